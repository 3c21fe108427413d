"""Columns some of whose values are rounded: found, with mass 1, and given back on the grid."""

from __future__ import annotations

import math
import re

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor

from ciflows.core.noise import Noise
from ciflows.tables import Schema, TableSettings
from ciflows.tables.jumps import Jumps
from ciflows.tables.lattice import Lattice
from ciflows.tables.marginals import Marginal, Smooth, log_normal
from ciflows.tables.real import Real
from ciflows.tables.rounded import Rounded
from ciflows.tables.survey import survey_table

INF = math.inf
ROWS = 1500


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def rounded(low: float, high: float, grid: float, origin: float, step: float = 0.0) -> Rounded:
    first = low if math.isfinite(low) else 0.0
    rest = Smooth(numbers(low), numbers(high + step), numbers(step), numbers(first))
    rest.centre.fill_(0.5 if math.isfinite(low) else 3.0)
    rest.scale.fill_(0.8)
    layer = Rounded(rest, numbers(grid), numbers(origin))
    layer.share.fill_(0.3)
    return layer


def probability(layer: Marginal, x: Tensor, draws: int = 1) -> Tensor:
    """What the layer gives to values x (rows,) with a normal density of scores."""
    z, log_weight = layer.encode(x[:, None].expand(draws, -1, 1), Noise.seeded(0))
    return torch.exp(log_weight + log_normal(z)).mean(0)[:, 0]


@pytest.mark.parametrize("bounds", [(-INF, INF), (0.0, INF), (0.0, 10.0), (-0.3, 9.7)])
@pytest.mark.parametrize("with_atoms", [False, True])
def test_a_grid_beside_a_density_has_mass_1(bounds: tuple[float, float], with_atoms: bool) -> None:
    low, high = max(bounds[0], -40), min(bounds[1], 400)
    layer: Marginal = rounded(*bounds, 0.7, 0.1)
    places = np.round(0.1 + 0.7 * np.arange(math.ceil((low - 0.1) / 0.7), (high - 0.1) // 0.7 + 1), 9)
    if with_atoms:
        layer = Jumps(layer, numbers(1.5, 2.323)[None])  # on the grid, and off it
        layer.probabilities.fill_(0.15)
        places = np.append(places, 2.323)
    fine = low + np.exp(np.linspace(-30, 3, 20_001))
    x = torch.from_numpy(np.unique(np.concatenate([np.linspace(low, high, 200_001) + 1e-7, fine]))[:-1])
    density = torch.trapezoid(probability(layer, x), x)
    mass = density + probability(layer, torch.from_numpy(places)).sum()
    assert mass.item() == pytest.approx(1, abs=2e-4)


@pytest.mark.parametrize("bounds", [(-INF, INF), (0.0, INF), (0.0, 10.0)])
@pytest.mark.parametrize(("grid", "origin"), [(1.0, 0.0), (1.75, 0.25), (0.5, 0.0)])
def test_a_grid_on_a_lattice_has_mass_1(bounds: tuple[float, float], grid: float, origin: float) -> None:
    low, high = max(bounds[0], -40), min(bounds[1], 400)
    layer = rounded(*bounds, grid, origin, step=0.25)
    x = torch.arange(low, high + 0.125, 0.25, dtype=torch.float64)
    assert probability(layer, x, 400).sum().item() == pytest.approx(1, abs=2e-3)
    crowded = Jumps(layer, numbers(2.0, 3.25)[None])
    crowded.probabilities.fill_(0.15)
    assert probability(crowded, x, 400).sum().item() == pytest.approx(1, abs=2e-3)


def test_samples_are_as_frequent_as_their_probability_and_come_back() -> None:
    layer = Jumps(rounded(0.0, INF, 1.0, 0.0), numbers(0.0, 2.0)[None])
    layer.probabilities.copy_(numbers(0.2, 0.1)[None])
    z = torch.randn(20_000, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = layer.decode(z, Noise.seeded(0))
    for value in (0.0, 1.0, 2.0, 3.0):
        expected = probability(layer, numbers(value)).item()
        assert (x == value).double().mean().item() == pytest.approx(expected, abs=0.012)
    back = layer.decode(layer.encode(x, Noise.seeded(1))[0], Noise.seeded(2))
    assert torch.allclose(back, x, rtol=1e-9)


def survey(values: np.ndarray, **settings: object) -> tuple[Schema, list[str]]:
    said: list[str] = []
    frame = pl.DataFrame({"x": values})
    return survey_table([frame], TableSettings.model_validate(settings), said.append), said


def test_grids_are_found_said_and_kept_in_samples() -> None:
    rng = np.random.default_rng(0)
    x, some = rng.normal(size=ROWS), rng.random(ROWS) < 0.5
    schema, said = survey(np.where(some, np.round(x, 2), x))
    (column,) = schema.columns
    assert isinstance(column, Real)
    assert (column.grid, column.atoms) == (0.01, ())
    assert any(re.search("Partly rounded.*x to 0.01", sentence) for sentence in said)
    assert schema.measure["x"] == "density, probability at steps of 0.01 from 0"
    assert column.decode(np.array([0.07000000000000001]))[0] == 0.07
    schema, _ = survey(np.where(some, np.round(1e4 * x, -3), np.round(1e4 * x)))
    (wide,) = schema.columns
    assert isinstance(wide, Lattice)
    assert (wide.grid, wide.step) == (1000.0, 1.0)
    assert survey(np.round(1e4 * x))[0].columns[0].grid == 0
    assert survey(x)[0].columns[0].grid == 0


def test_values_that_repeat_in_no_steps_are_atoms_or_said() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=ROWS)[rng.integers(0, ROWS // 2, ROWS)]
    schema, said = survey(values)
    different, counts = np.unique(values, return_counts=True)
    assert schema.columns[0].atoms == tuple(different[counts > 1])
    assert any(re.search(r"x -?\d.* and \d+ others \(\d+\.\d%\)", sentence) for sentence in said)
    _, said = survey(values, atoms={"x": "none"})
    assert any("Repeated values, still modelled as a density" in sentence for sentence in said)
    few = rng.normal(size=100)[rng.integers(0, 100, ROWS)]
    assert survey(few)[0].columns[0].levels == 100
    mostly_zero = np.where(rng.random(ROWS) < 0.97, 0.0, rng.lognormal(size=ROWS))
    assert survey(mostly_zero)[0].columns[0].atoms == (0.0,)


def test_copied_rows_are_no_atoms() -> None:
    rng = np.random.default_rng(0)
    chosen = rng.integers(0, ROWS // 2, ROWS)
    x, y = rng.normal(size=(2, ROWS))[:, chosen]
    schema = survey_table([pl.DataFrame({"x": x, "y": y})], TableSettings.model_validate({}))
    assert schema.measure == {"x": "density", "y": "density"}
    dry = rng.random(ROWS) < 0.4
    rain = {name: np.where(dry, 0.0, rng.lognormal(size=ROWS)) for name in "abc"}
    schema = survey_table([pl.DataFrame(rain)], TableSettings.model_validate({}))
    assert [column.atoms for column in schema.columns] == [(0.0,)] * 3

"""What is claimed of each two-dimensional set holds of its points."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from ciflows.datasets import load_dataset
from ciflows.datasets.synthetic import SYNTHETIC, Synthetic, get_synthetic
from ciflows.errors import UserError
from ciflows.runs.config import read_overrides, resolve
from ciflows.runs.fit import fit
from ciflows.runs.run import load_run

SETS = list(SYNTHETIC.values())
EXACT = [each for each in SETS if each.log_density is not None]
SHARP = [each for each in SETS if each.contains is not None]
SMOOTH = [each for each in EXACT if each.contains is None]

LIMITS = {
    "two-uniforms": -1.386,
    "annulus": -2.243,
    "two-lines": 3.219,
    "two-marginals": -1.419,
    "one-uniform": 0.0,
    "split-gaussian": -2.838,
    "checkerboard": -3.466,
}

OUTSIDE = {
    "two-uniforms": [(0.0, 0.0), (-0.99, 0.0), (1.5, 1.01), (2.01, 0.0)],
    "annulus": [(0.0, 0.0), (0.7, 0.7), (1.5, 1.5)],
    "two-lines": [(0.0, 0.0), (1.006, 0.0), (-0.994, 0.0), (1.0, -1.01)],
    "two-marginals": [(0.0, 0.0), (0.74, 0.0), (-1.26, 5.0)],
    "one-uniform": [(0.51, 0.0), (0.0, -0.51)],
    "checkerboard": [(1.0, -1.0), (-3.0, -1.0), (3.0, -3.0), (4.01, 3.0), (-3.0, -4.01)],
}

INSIDE = {
    "two-uniforms": [(-2.0, 1.0), (1.01, -0.99)],
    "annulus": [(1.0, 0.0), (0.0, -2.0), (-1.4, 1.4)],
    "two-lines": [(1.004, 0.0), (-0.996, -1.0)],
    "two-marginals": [(0.76, 0.0), (-1.24, 50.0)],
    "one-uniform": [(0.49, -0.49), (-0.5, 0.5)],
    "checkerboard": [(1.0, 1.0), (1.0, -3.0), (-1.0, 3.0), (3.0, -1.0), (-3.9, -3.9)],
}


def over(sets: list[Synthetic]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("each", sets, ids=lambda each: each.name)


@cache
def points(each: Synthetic) -> Tensor:
    return each.sample(50_000, seed=1)


def grid(each: Synthetic, columns: int, rows: int, stretch: float = 1.0) -> tuple[Tensor, float]:
    """Midpoints of a grid over the window, (columns, rows, 2), and the area of a cell."""
    x_low, x_high, y_low, y_high = (stretch * edge for edge in each.window)
    width, height = (x_high - x_low) / columns, (y_high - y_low) / rows
    x = x_low + width * (torch.arange(columns, dtype=torch.float64) + 0.5)
    y = y_low + height * (torch.arange(rows, dtype=torch.float64) + 0.5)
    return torch.stack(torch.meshgrid(x, y, indexing="ij"), dim=-1), width * height


@cache
def masses(each: Synthetic) -> Tensor:
    """Probability of each cell of the window: fine in x1, where two-lines is thin.

    The cells' edges fall on the edges of every set made of boxes.
    """
    cells, area = grid(each, 3000, 300)
    return each.log_density(cells).exp() * area


@over(SETS)
def test_points_are_finite_float32_pairs(each: Synthetic) -> None:
    x = each.sample(1001, seed=0)
    assert x.shape == (1001, 2)
    assert x.dtype == torch.float32
    assert x.isfinite().all()
    assert each.sample(0, seed=0).shape == (0, 2)


@over(SETS)
def test_points_depend_on_the_seed_alone(each: Synthetic) -> None:
    first = each.sample(100, seed=3)
    np.random.seed(5)
    torch.manual_seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    assert torch.equal(first, each.sample(100, seed=3))
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()
    assert (first != each.sample(100, seed=4)).any(dim=-1).all()


@over(SETS)
def test_points_are_independent(each: Synthetic) -> None:
    """A set drawn in order (arm after arm) would have neighbours alike."""
    x = points(each)
    steps = (x[1:] - x[:-1]).square().sum(dim=-1).mean()
    spread = 2 * x.var(dim=0).sum()
    assert steps == pytest.approx(spread.item(), rel=0.05)


@over(SETS)
def test_window_shows_the_points_and_no_desert(each: Synthetic) -> None:
    x_low, x_high, y_low, y_high = each.window
    x1, x2 = points(each).T
    shown = (x_low < x1) & (x1 < x_high) & (y_low < x2) & (x2 < y_high)
    assert shown.float().mean() > 0.999
    assert max(x1.abs().max() / x_high, x2.abs().max() / y_high) > 0.45


@over(SHARP)
def test_points_lie_in_the_support(each: Synthetic) -> None:
    x = points(each)
    assert each.contains(x).all()
    assert each.log_density(x).isfinite().all()


class Extremes(np.random.Generator):
    """A generator whose uniform numbers are often the first or the last of their range."""

    def uniform(self, low=0.0, high=1.0, size=None):  # type: ignore[no-untyped-def]
        size = np.broadcast(low, high).shape if size is None else size
        share = np.array([0.0, 1.0, np.nan])[self.integers(3, size=size)]
        share = np.where(np.isnan(share), self.random(size), share)
        return low + share * (np.asarray(high) - low)


@over(SHARP)
def test_rounding_carries_no_point_out_of_the_support(each: Synthetic) -> None:
    x = torch.from_numpy(each.draw(10_000, Extremes(np.random.PCG64(0)))).float()
    assert each.contains(x).all()


@over(SHARP)
def test_support_is_where_it_should_be(each: Synthetic) -> None:
    inside, outside = torch.tensor(INSIDE[each.name]), torch.tensor(OUTSIDE[each.name])
    assert each.contains(inside).tolist() == [True] * len(inside)
    assert each.contains(outside).tolist() == [False] * len(outside)
    assert each.log_density(inside).isfinite().all()
    assert (each.log_density(outside) == -math.inf).all()


def test_sharp_supports_are_these() -> None:
    assert {each.name for each in SHARP} == set(INSIDE) == set(OUTSIDE)


@over(EXACT)
def test_density_keeps_leading_dimensions_and_is_float64(each: Synthetic) -> None:
    x = points(each)[:12]
    log_density = each.log_density(x.reshape(3, 4, 2))
    assert log_density.dtype == torch.float64
    assert log_density.shape == (3, 4)
    assert torch.allclose(log_density.flatten(), torch.stack([each.log_density(row) for row in x]))


@over(EXACT)
def test_density_refuses_points_of_other_dimensions(each: Synthetic) -> None:
    with pytest.raises(ValueError, match="expected shape"):
        each.log_density(torch.zeros(5, 3))


@over(EXACT)
def test_density_integrates_to_one(each: Synthetic) -> None:
    assert masses(each).sum().item() == pytest.approx(1.0, abs=1e-3)


@over(EXACT)
def test_density_matches_a_histogram(each: Synthetic) -> None:
    x_low, x_high, y_low, y_high = each.window
    x = points(each).double().numpy()
    observed, _, _ = np.histogram2d(*x.T, bins=30, range=[(x_low, x_high), (y_low, y_high)])
    expected = len(x) * masses(each).reshape(30, 100, 30, 10).sum(dim=(1, 3)).numpy()
    full = expected > 5
    freedom = full.sum()
    chi_square = (np.square(observed - expected)[full] / expected[full]).sum()
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)
    assert observed[~full].sum() < expected[~full].sum() + 5 * math.sqrt(expected[~full].sum() + 1)


@over(EXACT)
def test_density_has_the_points_marginals(each: Synthetic) -> None:
    """Kolmogorov and Smirnov's distance between the distribution functions of each coordinate."""
    x = points(each).double().numpy()
    for axis in (0, 1):
        mass = masses(each).sum(dim=1 - axis).numpy()
        low, high = each.window[2 * axis : 2 * axis + 2]
        edges = np.linspace(low, high, len(mass) + 1)[1:]
        share = np.searchsorted(np.sort(x[:, axis]), edges) / len(x)
        assert np.abs(share - mass.cumsum()).max() < 2 / math.sqrt(len(x))


@over(EXACT)
def test_entropy_is_the_points_average(each: Synthetic) -> None:
    surprise = -each.log_density(points(each))
    error = surprise.std().item() / math.sqrt(len(surprise))
    assert abs(surprise.mean().item() - each.entropy) < 4 * error + 1e-9


@over(SMOOTH)
def test_entropy_is_the_integral(each: Synthetic) -> None:
    cells, area = grid(each, 800, 800, stretch=1.6)
    log_density = each.log_density(cells)
    integral = -(log_density.exp() * log_density).sum().item() * area
    assert integral == pytest.approx(each.entropy, abs=1e-8)


@over(EXACT)
def test_far_away_the_density_is_small_and_not_nan(each: Synthetic) -> None:
    far = each.log_density(torch.tensor([[50.0, 0.0], [0.0, -50.0], [-40.0, 30.0]]))
    assert (far < -500).all()


@pytest.mark.parametrize("name", LIMITS)
def test_limits_are_the_known_ones(name: str) -> None:
    assert SYNTHETIC[name].limit == pytest.approx(LIMITS[name], abs=5e-4)


@over(SETS)
def test_a_limit_comes_with_a_density(each: Synthetic) -> None:
    assert (each.entropy is None) == (each.limit is None) == (each.log_density is None)


def two_spirals(s: Tensor) -> Tensor:
    t = 3 * math.pi * s
    # The middle of the uniform square that each arm is smeared with.
    arm = (torch.stack([-t * t.cos(), t * t.sin()], dim=-1) + 0.25) / 3
    return torch.cat([arm, -arm])


def swiss_roll(s: Tensor) -> Tensor:
    t = 1.5 * math.pi * (1 + 2 * s)
    return torch.stack([t * t.cos(), t * t.sin()], dim=-1) / 5


def moons(s: Tensor) -> Tensor:
    moon = torch.stack([2 * (math.pi * s).cos() - 1, 2 * (math.pi * s).sin() - 0.5], dim=-1)
    return torch.cat([moon, -moon])


@pytest.mark.parametrize(
    ("name", "curve", "thickness", "power"),
    [
        # Noise of sd 0.1 and a uniform of width 1/6, whose sd is 1/6 / sqrt(12).
        ("two-spirals", two_spirals, math.hypot(0.1, 1 / 6 / math.sqrt(12)), 1),
        ("swiss-roll", swiss_roll, 0.2, 0),
        ("moons", moons, 0.2, 0),
    ],
    ids=["two-spirals", "swiss-roll", "moons"],
)
def test_points_lie_along_their_curve(
    name: str, curve: Callable[[Tensor], Tensor], thickness: float, power: int
) -> None:
    """Points are c(s) + noise, p(s) proportional to s^power: as far off the curve as the noise, and

    E[x x^T] = E[c(s) c(s)^T] + thickness^2 I.
    """
    x = points(get_synthetic(name)).double()
    s = (torch.arange(500, dtype=torch.float64) + 0.5) / 500
    path = curve(s)
    arms = len(path) // len(s)
    weights = (s**power / (arms * (s**power).sum())).repeat(arms)

    nearest = torch.cat([torch.cdist(part, path).min(dim=-1).values for part in x.split(5000)])
    assert nearest.max() < 6 * thickness
    assert nearest.square().mean().sqrt().item() == pytest.approx(thickness, rel=0.1)

    assert (x.mean(dim=0) - weights @ path).abs().max() < 5 * x.std() / math.sqrt(len(x))
    squares = x[:, :, None] * x[:, None, :]
    expected = (path * weights[:, None]).T @ path + thickness**2 * torch.eye(2)
    error = squares.std(dim=0) / math.sqrt(len(x))
    assert ((squares.mean(dim=0) - expected).abs() < 4 * error).all()


def test_names_are_keys_and_cover_the_contract() -> None:
    assert all(name == each.name for name, each in SYNTHETIC.items())
    assert all(each.summary and "\n" not in each.summary for each in SETS)
    assert len({each.summary for each in SETS}) == len(SETS)
    assert set(SYNTHETIC) == {
        "two-uniforms", "annulus", "two-lines", "two-marginals", "one-uniform", "split-gaussian",
        "eight-gaussians", "checkerboard", "two-spirals", "rings", "pinwheel", "swiss-roll",
        "circles", "moons",
    }  # fmt: skip


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    assert get_synthetic("rings") is SYNTHETIC["rings"]
    with pytest.raises(UserError, match=r"'anulus'.*Did you mean annulus"):
        get_synthetic("anulus")
    with pytest.raises(UserError, match=r"Known: .*two-spirals"):
        get_synthetic("zzzz")


def test_other_training_points_leave_the_test_as_it_is() -> None:
    own, more = load_dataset("annulus"), load_dataset("annulus", training_points=12_000)
    assert more.train.shape == (12_000, 2)
    drawn = torch.cat([own.train, own.validation, own.test])
    assert {*map(tuple, more.train.tolist())}.isdisjoint(map(tuple, drawn.tolist()))
    assert torch.equal(more.validation, own.validation)
    assert torch.equal(more.test, own.test)
    assert more.fingerprint != own.fingerprint
    assert torch.equal(load_dataset("annulus", training_points=12_000).train, more.train)


def test_a_run_remembers_its_training_points(tmp_path: Path) -> None:
    words = ["training_points=300", "steps=1", "layers=1", "hidden=[4, 4]", "evaluation.samples=2"]
    config = resolve("annulus", "cif-resflow", layers=[read_overrides("cif-resflow", words)])
    fit(config, tmp_path / "run")
    assert len(load_run(tmp_path / "run").dataset().train) == 300


def test_only_what_is_drawn_has_other_training_points() -> None:
    with pytest.raises(UserError, match=r"people\.csv: training_points is for built-in 2-D sets"):
        resolve("people.csv", "maf", layers=[{"training": {"training_points": 5}}])
    with pytest.raises(UserError, match="power: training_points"):
        load_dataset("power", training_points=5)

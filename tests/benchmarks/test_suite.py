"""The suite of real tables: what goes in, and what comes out."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("sklearn")
from benchmarks.tables.data import Entry, Table, _continuous, load_table, read_suite
from benchmarks.tables.methods import score
from benchmarks.tables.report import Fit, markdown, read_fits, write_report

RANDOM = np.random.default_rng(0)


def test_half_of_the_suite_is_held_out() -> None:
    suite = read_suite()
    assert len(suite) >= 12
    assert len({entry.name for entry in suite}) == len(suite)
    assert sum(entry.part == "held-out" for entry in suite) * 2 == len(suite)


def test_a_shipped_table_is_standardised_by_its_training_rows() -> None:
    table = load_table(Entry("iris", "development", "sklearn", "iris"))
    assert [part.shape for part in table[1:4]] == [(120, 4), (15, 4), (15, 4)]
    assert np.allclose(table.train.mean(0), 0)
    assert np.allclose(table.train.std(0), 1)
    again = load_table(Entry("iris", "development", "sklearn", "iris"))
    assert all(np.array_equal(one, other) for one, other in zip(table[1:], again[1:], strict=True))


def test_noise_fills_the_cells_of_a_lattice() -> None:
    values = RANDOM.integers(0, 50, 5000) / 10
    column = _continuous(pd.Series(values), RANDOM, log=False)
    assert column is not None
    assert ((column - values) >= 0).all()
    assert 0.09 < (column - values).max() <= 0.1


def test_categories_are_numbered() -> None:
    column = _continuous(pd.Series(["b", "a", "c", "a"]), RANDOM, log=False)
    assert column is not None
    assert np.floor(column).tolist() == [1, 0, 2, 0]


def test_a_column_with_an_atom_or_without_a_spread_is_left_out() -> None:
    values = RANDOM.normal(size=1000)
    assert _continuous(pd.Series(values), RANDOM, log=False) is not None
    values[:300] = 0
    assert _continuous(pd.Series(values), RANDOM, log=False) is None
    assert _continuous(pd.Series(np.ones(10)), RANDOM, log=False) is None


@pytest.mark.parametrize("method", ["mixture", "kde", "zuko"])
def test_methods_know_a_gaussian(method: str) -> None:
    """Correlated normals in their own units: the best that a method can reach is minus the entropy."""
    covariance = np.array([[1.0, 0.8], [0.8, 1.0]])
    rows = RANDOM.multivariate_normal([0, 0], covariance, 1400)
    table = Table("normal", rows[:1000], rows[1000:1200], rows[1200:])
    limit = -math.log(2 * math.pi * math.e) - 0.5 * math.log(np.linalg.det(covariance))
    result = score(method, table, seconds=1.0, seed=0)
    assert abs(result.log_prob - limit) < 3 * result.std_error + (0.05 if method != "zuko" else 0.3)


def test_the_report(tmp_path: Path) -> None:
    fits = [
        Fit("a", part, method, seed, 60.0, value + 0.1 * seed, 0.01, 59.0, "", 100, 3)
        for part, method, value in [("held-out", "default", 1.0), ("held-out", "nsf", 0.5)]
        for seed in range(2)
    ]
    text = write_report(fits, tmp_path)
    assert "| a, 100 × 3 | **1.050 ± 0.050** | 0.550 ± 0.050 | +0.500 ± 0.000 |" in text
    assert text.index("held-out") < text.index("| a, ")
    assert (tmp_path / "tables.png").stat().st_size > 1000
    assert markdown(fits[::2]).endswith("| a, 100 × 3 | **1.000** | 0.500 |\n")  # one seed: no errors
    assert markdown([*fits[:2], fits[2]._replace(table="b")]).count("–") == 4
    assert read_fits(tmp_path / "none.jsonl") == []

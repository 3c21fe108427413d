"""How well samples match the data, column by column and pair by pair, in the units of the file."""

from __future__ import annotations

__all__ = ["Columns", "chance", "columns_block", "compare_columns", "kolmogorov", "pairs_block"]

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ciflows.core.rows import Rows
from ciflows.report.column_plots import Feature, Part, draw_marginal, draw_pair
from ciflows.report.grids import Entry
from ciflows.report.page import Block, Picture, make_picture, set_number
from ciflows.report.plots import PANEL
from ciflows.tables.column import Column
from ciflows.tables.read import own_names
from ciflows.tables.values import column_values, given_values

if TYPE_CHECKING:
    from ciflows.datasets import Dataset

Array = NDArray[np.float64]
ROWS, SAMPLES = 2000, 4000
MISFIT = 0.05  # a smaller difference is no concern, even if it is no chance
MOST_MARGINALS, MOST_PAIRS, BINS = 12, 6, 5


class Columns(NamedTuple):
    """The columns of some data beside samples of each model.

    Attributes:
        shown: Rows for pictures, of all parts (rows, columns).
        drawn: Samples of each model (samples, columns).
        differences: For each column and model, the largest difference of the distribution functions of
            test rows and samples.
        limit: What chance explains of the largest of a model's differences, 19 times out of 20.
        conditions: The given columns of a conditional density.
        given: Their values in the rows for pictures (rows, conditions).
    """

    features: list[Feature]
    shown: Array
    names: list[str]
    drawn: list[Array]
    differences: Array
    limit: float
    conditions: list[Feature]
    given: Array

    def with_given(self) -> Columns:
        """The given columns before the others, those of a row beside all samples for it."""
        if not self.conditions:
            return self
        beside = [np.tile(self.given, (len(x) // len(self.given), 1)) for x in self.drawn]
        return self._replace(
            features=[*self.conditions, *self.features],
            shown=np.hstack([self.given, self.shown]),
            drawn=[np.hstack(parts) for parts in zip(beside, self.drawn, strict=True)],
        )

    def misfits(self, model: int) -> list[str]:
        """The columns whose samples differ from the data by more than chance, the worst first."""
        misfit = self.differences[:, model] > max(self.limit, MISFIT)
        return [self.features[k].name for k in self.worst_first() if misfit[k]]

    def worst_first(self) -> list[int]:
        return [int(k) for k in np.argsort(-self.differences.max(1), kind="stable")]


def compare_columns(entries: Sequence[Entry], seed: int) -> Columns:
    """Compare samples of each run with the test rows; for a conditional density, given the same."""
    dataset = entries[0].dataset
    rows = dataset.rows("test")[:ROWS]
    count = effective_rows(rows.weight, len(rows))
    rows = resampled(rows)
    codes = [draw_samples(entry, SAMPLES, rows.context, seed) for entry in entries]
    test, *drawn = (column_values(dataset.schema, part) for part in (rows.x, *codes))
    pairs = [[kolmogorov(a, b) for a, b in zip(test.T, model.T, strict=True)] for model in drawn]
    limit = chance(count, len(drawn[0]), test.shape[1])
    shown = test if rows.context is not None else column_values(dataset.schema, _shown(dataset))
    names = [entry.name for entry in entries]
    conditions, given = [], np.empty((len(shown), 0))
    if dataset.schema is not None and rows.context is not None:
        conditions = [_feature(column) for column in dataset.schema.given]
        given = given_values(dataset.schema, rows.context)
    return Columns(_features(dataset), shown, names, drawn, np.array(pairs).T, limit, conditions, given)


def columns_block(columns: Columns) -> Block:
    """A panel for each column, the worst first."""
    order = columns.worst_first()
    left_out = len(order) - MOST_MARGINALS
    more = f" The {left_out} columns that fit best are left out." if left_out > 0 else ""
    limit = set_number(columns.limit, "{:.2f}")
    words = (
        "Do samples look like the data? Data are filled, samples are lines. The worst column is first. "
        "Its number is the largest difference between the distribution functions of test rows and "
        f"samples, from 0 to 1. Chance explains up to {limit}. A column above that and above "
        f"{MISFIT} is a misfit.{more}"
    )
    return Block("Columns", words, [_marginal(columns, k) for k in order[:MOST_MARGINALS]])


def pairs_block(columns: Columns) -> Block:
    """The pairs of columns that depend most on each other in the data; not two given ones."""
    given, columns = len(columns.conditions), columns.with_given()
    cells = [_binned(f, x) for f, x in zip(columns.features, columns.shown.T, strict=True)]
    pairs = (pair for pair in itertools.combinations(range(len(cells)), 2) if pair[1] >= given)
    strength = {(i, j): cramers_v(cells[i], cells[j]) for i, j in pairs}
    chosen = sorted(strength, key=lambda pair: -strength[pair])[:MOST_PAIRS]
    if not chosen:
        return Block("Pairs of columns")
    words = (
        "The pairs that depend most on each other. Dots and filled shapes are data; lines are samples: "
        "contours hold 50 % and 90 % of them."
    )
    return Block("Pairs of columns", words, [_pair(columns, pair) for pair in chosen])


def _marginal(columns: Columns, place: int) -> Picture:
    feature = columns.features[place]
    legend = len(columns.names) > 1 and place == columns.worst_first()[0]
    draw = partial(draw_marginal, feature=feature, parts=_parts(columns, [place]), legend=legend)
    numbers = [set_number(gap, "{:.3f}") for gap in columns.differences[place]]
    if len(numbers) > 1:
        numbers = [f"{name} {number}" for name, number in zip(columns.names, numbers, strict=True)]
    bad = any(feature.name in columns.misfits(k) for k in range(len(columns.names)))
    note = f"{'misfit: ' if bad else ''}{', '.join(numbers)}"
    return make_picture(draw, PANEL, f"Distribution of {feature.name}", feature.name, note)


def _pair(columns: Columns, pair: tuple[int, int]) -> Picture:
    first, second = (columns.features[k] for k in pair)
    draw = partial(draw_pair, pair=(first, second), parts=_parts(columns, list(pair)))
    return make_picture(draw, PANEL, f"{second.name} against {first.name}")


def _parts(columns: Columns, places: list[int]) -> list[Part]:
    """The data and each model's samples of some columns, without rows that miss a value."""
    parts = []
    for name, values in zip(("data", *columns.names), (columns.shown, *columns.drawn), strict=True):
        chosen = values[:, places]
        parts.append(Part(name, chosen[~np.isnan(chosen).any(1)].squeeze()))
    return parts


# -- rows and samples --------------------------------------------------------------------------------


def draw_samples(entry: Entry, count: int, context: Tensor | None, seed: int) -> Tensor:
    """About `count` samples, in codes; for a conditional density as many for each row of context."""
    if context is None:
        return entry.flow.sample(count, seed=seed).cpu()
    context = context.to(entry.flow.device, entry.flow.dtype)
    return entry.flow.sample(-(-count // len(context)), context, seed).flatten(0, 1).cpu()


def resampled(rows: Rows) -> Rows:
    """Rows drawn by their weights, so that all count the same; they are spread evenly, not at random."""
    if rows.weight is None:
        return rows
    ends = rows.weight.double().cumsum(0)
    places = (torch.arange(len(rows)) + 0.5) * ends[-1] / len(rows)
    return rows[torch.searchsorted(ends, places).clamp(max=len(rows) - 1)]


def effective_rows(weight: Tensor | None, rows: int) -> float:
    """How many rows of equal weights tell as much: (Σw)² / Σw²."""
    return rows if weight is None else (weight.sum() ** 2 / weight.square().sum()).item()


def _shown(dataset: Dataset) -> Tensor:
    parts = [dataset.rows("test")[:ROWS], dataset.rows("validation"), dataset.rows("train")]
    return torch.cat([resampled(rows[:ROWS]).x for rows in parts])[:ROWS]


def _features(dataset: Dataset) -> list[Feature]:
    if dataset.schema is None:
        names = [*dataset.columns, *own_names(dataset.features)][: dataset.features]
        return [Feature(name) for name in names]
    return [_feature(column) for column in dataset.schema.columns]


def _feature(column: Column) -> Feature:
    discrete = column.levels is not None
    return Feature(column.name, column.words, discrete, getattr(column, "step", 0.0))


# -- measures ----------------------------------------------------------------------------------------


def kolmogorov(first: Array, second: Array) -> float:
    """The largest difference of two samples' distribution functions (Kolmogorov and Smirnov's)."""
    first, second = (np.sort(values[~np.isnan(values)]) for values in (first, second))
    values = np.concatenate([first, second])
    shares = [np.searchsorted(x, values, side="right") / max(1, len(x)) for x in (first, second)]
    return float(np.abs(shares[0] - shares[1]).max(initial=0.0))


def chance(first: float, second: float, tests: int = 1) -> float:
    """What chance explains of the largest of some `kolmogorov` differences, 19 times out of 20."""
    return math.sqrt(-0.5 * math.log(0.05 / (2 * tests)) * (1 / first + 1 / second))


def cramers_v(first: NDArray[np.int64], second: NDArray[np.int64]) -> float:
    """How strongly two columns of levels depend, 0 to 1, without what chance adds (Bergsma, 2013)."""
    counts = np.zeros((first.max(initial=0) + 1, second.max(initial=0) + 1))
    np.add.at(counts, (first, second), 1)
    counts = counts[counts.any(1)][:, counts.any(0)]
    n, (r, k) = len(first), counts.shape
    expected = counts.sum(1, keepdims=True) * counts.sum(0, keepdims=True) / n
    phi = ((counts - expected) ** 2 / expected).sum() / n - (r - 1) * (k - 1) / (n - 1)
    most = min(r - (r - 1) ** 2 / (n - 1), k - (k - 1) ** 2 / (n - 1)) - 1
    return math.sqrt(max(0.0, phi) / most) if most > 0 else 0.0


def _binned(feature: Feature, values: Array) -> NDArray[np.int64]:
    """Levels as they are, numbers as fifths; what is missing is a level of its own."""
    if feature.words:
        return np.nan_to_num(values, nan=-1).astype(np.int64) + 1
    inner = np.nanquantile(values, np.linspace(0, 1, BINS + 1)[1:-1])
    return np.where(np.isnan(values), BINS, np.searchsorted(inner, values))

"""What a report shows of a table of one's own: columns, pairs of them, extreme rows, calibration.

Everything is in the values of the file. Samples of a conditional density are drawn given what the test
rows have, one for each.
"""

from __future__ import annotations

__all__ = ["TableReport", "draw_samples", "table_report"]

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ciflows.report.grids import Entry, on_device
from ciflows.report.pictures import MOST_MARGINALS, Picture, make_picture
from ciflows.report.plots import (
    CHART,
    PANEL,
    draw_levels,
    draw_marginal,
    draw_pair,
    draw_scores,
)
from ciflows.report.tables import Details, Table, set_error, set_number

if TYPE_CHECKING:
    from ciflows.data import Dataset, Schema
    from ciflows.data.schema import Column

Array = NDArray[np.float64]
ROWS = 2000
SCORE_ROWS, SCORE_DRAWS = 1000, 50
MOST_PAIRS, MOST_WORST, MOST_EXTREMES, MOST_SHOWN = 4, 8, 5, 12


class TableReport(NamedTuple):
    """The parts of a report on a table.

    Attributes:
        marginals: A panel for each column, data and samples.
        pairs: Panels of the most dependent pairs of columns, the data's and a model's in turn.
        worst: How far each column's samples are from the data, the worst first.
        usual: What one in twenty pairs of samples of the same distribution would differ by, or more.
        scores: The scores of test rows beside those of samples.
        extremes: Of each model, the test rows with the lowest and the highest scores.
        hint: How to find out whether the index helps, where that is not shown.
    """

    marginals: list[Picture]
    pairs: list[Picture]
    worst: Table
    usual: str
    scores: list[Picture]
    extremes: list[Details]
    hint: str


def draw_samples(entry: Entry, rows: int, seed: int) -> Tensor:
    """Codes (rows, features) drawn from a model, given what the test rows have if it is conditional."""
    context = entry.dataset.rows("test").context
    if context is None:
        return entry.flow.sample(rows, seed=seed).cpu()
    return entry.flow.sample(1, on_device(context[:rows], entry.flow), seed)[0].cpu()


def table_report(entries: Sequence[Entry], drawn: Sequence[Tensor], seed: int) -> TableReport:
    """All that a report shows of runs on one table.

    Arguments:
        entries: The runs.
        drawn: Samples of each, in codes.
        seed: Seed of the draws for scores.
    """
    dataset = entries[0].dataset
    assert dataset.schema is not None
    schema, names = dataset.schema, [entry.name for entry in entries]
    data, *models = (_values(schema, codes) for codes in (dataset.test[:ROWS], *drawn))
    kinds = list(schema.columns)
    shown = kinds[:MOST_MARGINALS]
    scored = [_scores(entry, seed) for entry in entries]
    return TableReport(
        marginals=[_marginal(c, i, data, names, models) for i, c in enumerate(shown)],
        pairs=_pairs(kinds, data, names[0], models[0]),
        worst=_worst(kinds, data, names, models),
        usual=set_number(1.36 * math.sqrt(1 / len(data) + 1 / len(models[0])), "{:.2f}"),
        scores=[_calibration(name, *pair) for name, pair in zip(names, scored, strict=True)],
        extremes=[
            Details(name, _extremes(dataset, schema, held_out))
            for name, (held_out, _) in zip(names, scored, strict=True)
        ],
        hint=_hint(entries),
    )


def _values(schema: Schema, codes: Tensor) -> Array:
    """Values of the file (rows, columns); levels of what is categorical."""
    frame = schema.decode(codes)
    columns = [
        codes[:, i].numpy() if column.categories else frame[column.name].to_numpy()
        for i, column in enumerate(schema.columns)
    ]
    return np.stack(columns, axis=1).astype(np.float64)


def _marginal(
    column: Column, place: int, data: Array, names: Sequence[str], models: Sequence[Array]
) -> Picture:
    named = [(name, model[:, place]) for name, model in zip(names, models, strict=True)]
    words = [str(value) for value in column.categories or ()]
    if column.levels is None:
        tensors = [(name, torch.from_numpy(values)) for name, values in named]
        values = torch.from_numpy(data[:, place])
        draw = partial(draw_marginal, column=column.name, data=values, samples=tensors)
    else:
        draw = partial(draw_levels, column=column.name, data=data[:, place], samples=named, words=words)
    return make_picture(draw, PANEL, f"Distribution of {column.name}, data and samples")


def _pairs(columns: Sequence[Column], data: Array, name: str, model: Array) -> list[Picture]:
    """The pairs of columns that depend most on each other, by rank correlation in the data."""
    places = range(len(columns))
    ranks = data.argsort(0).argsort(0)
    strength = np.abs(np.corrcoef(ranks.T)) if len(columns) > 1 else np.zeros((1, 1))
    chosen = sorted(itertools.combinations(places, 2), key=lambda pair: -strength[pair])[:MOST_PAIRS]
    pictures = []
    for i, j in chosen:
        pair = columns[i], columns[j]
        window = _window(_scattered(data[:, [i, j]], pair))
        for title, points in (("data", data), (name, model[: len(data)])):
            some = _scattered(points[:, [i, j]], pair)
            levels = [[str(value) for value in column.categories or ()] for column in pair]
            names = pair[0].name, pair[1].name
            draw = partial(draw_pair, points=some, names=names, levels=levels, window=window)
            words = f"{names[1]} against {names[0]}"
            pictures.append(make_picture(draw, PANEL, f"{words}: {title}", title, words))
    return pictures


def _scattered(points: Array, columns: Sequence[Column]) -> Array:
    """Points with the levels of discrete columns spread a little, so that not all lie on one another."""
    spread = np.array([0.6 * (column.levels is not None) for column in columns])
    return points + spread * (np.random.default_rng(0).random(points.shape) - 0.5)


def _window(points: Array) -> Array:
    """Where most of the points lie, with some room: (2, 2), a row for each axis."""
    low, high = np.quantile(points, [0.01, 0.99], axis=0)
    room = np.maximum(0.08 * (high - low), 0.5 * (low == high))
    return np.stack([low - room, high + room], axis=1)


def _worst(
    columns: Sequence[Column], data: Array, names: Sequence[str], models: Sequence[Array]
) -> Table:
    """Columns by the largest difference of the distribution functions of data and samples."""
    gaps = [
        [kolmogorov(data[:, place], model[:, place]) for model in models]
        for place in range(len(columns))
    ]
    order = sorted(range(len(columns)), key=lambda place: -max(gaps[place]))[:MOST_WORST]
    rows = [(columns[k].name, *(set_number(gap, "{:.3f}") for gap in gaps[k])) for k in order]
    return Table(("column", *names), rows)


def kolmogorov(first: Array, second: Array) -> float:
    """The largest difference of two samples' distribution functions (Kolmogorov and Smirnov's)."""
    values = np.concatenate([first, second])
    shares = [np.searchsorted(np.sort(x), values, side="right") / len(x) for x in (first, second)]
    return float(np.abs(shares[0] - shares[1]).max())


def _scores(entry: Entry, seed: int) -> tuple[Array, Array]:
    """log p of test rows, and of fresh samples."""
    rows = entry.dataset.rows("test")[:SCORE_ROWS].to(entry.flow.device, entry.flow.dtype)
    fresh = draw_samples(entry, len(rows), seed + 1).to(rows.x)
    held_out, drawn = (
        entry.flow.estimate(x, SCORE_DRAWS, context=rows.context, seed=seed).log_prob
        for x in (rows.x, fresh)
    )
    return held_out.double().cpu().numpy(), drawn.double().cpu().numpy()


def _calibration(name: str, held_out: Array, drawn: Array) -> Picture:
    gap = kolmogorov(held_out, drawn)
    draw = partial(draw_scores, held_out=held_out, drawn=drawn)
    note = f"largest difference of the distribution functions: {set_number(gap, '{:.3f}')}"
    return make_picture(draw, CHART, f"Scores of test rows and of samples: {name}", name, note)


def _extremes(dataset: Dataset, schema: Schema, held_out: Array) -> Table:
    order = held_out.argsort()
    count = min(MOST_EXTREMES, len(order) // 2) or 1
    chosen = [*order[:count], *order[-count:][::-1]]
    frame = schema.decode(dataset.test[: len(held_out)])[[int(place) for place in chosen]]
    names = frame.columns[:MOST_SHOWN]
    rows = [
        (
            "lowest" if k < count else "highest",
            set_number(float(held_out[place]), "{:.2f}"),
            *_cells(row),
        )
        for k, (place, row) in enumerate(zip(chosen, frame.select(names).iter_rows(), strict=True))
    ]
    return Table(("", "log p", *names), rows)


def _cells(row: tuple[object, ...]) -> list[str]:
    return [f"{value:.6g}" if isinstance(value, float) else str(value) for value in row]


def _hint(entries: Sequence[Entry]) -> str:
    names = {entry.name for entry in entries}
    for name in names:
        if name.startswith("cif-") and name.removeprefix("cif-") in names:
            return _verdict({entry.name: entry for entry in entries}, name)
    model = entries[0].name.removeprefix("cif-")
    return (
        "Whether the index helps on these data is seen beside the same flow without one: "
        f"ciflows compare {entries[0].dataset.name} {model} cif-{model}"
    )


def _verdict(entries: dict[str, Entry], name: str) -> str:
    """What the index is worth, with the error of the difference as if the two were independent."""
    tests = [entries[each].metrics["test"] for each in (name, name.removeprefix("cif-"))]
    gain = tests[0]["log_prob"] - tests[1]["log_prob"]
    error = float(np.hypot(tests[0]["std_error"], tests[1]["std_error"]))
    return (
        f"With the index the test log-likelihood differs by {set_error(gain, error, '{:+.3f}')} nats "
        "a row (the error is an upper bound, since both models see the same rows)."
    )

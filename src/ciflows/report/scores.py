"""How likely a model finds the test rows, beside rows that it draws itself."""

from __future__ import annotations

__all__ = ["Scores", "calibration_block", "rows_block", "score_rows"]

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ciflows.core.rows import Rows
from ciflows.report.columns import chance, draw_samples, effective_rows, kolmogorov, resampled
from ciflows.report.grids import Entry
from ciflows.report.page import Block, Picture, Table, make_picture, set_number
from ciflows.report.plots import CHART, draw_scores

Array = NDArray[np.float64]
ROWS, TIMES, DRAWS = 1000, 4, 20
FEWEST = 2000  # samples of an unconditional density, so that few test rows are not judged by few samples
MISFIT = 0.1
MOST_LISTED, MOST_SHOWN = 5, 12


class Scores(NamedTuple):
    """log p of test rows and of samples.

    Attributes:
        test: Scores of test rows.
        counted: The same, as often as their weights say.
        drawn: Scores of rows drawn from the model.
        limit: What chance explains of the difference of the two distribution functions, one of as many
            tests as there are columns, and one more; the coverage of the joint density has the same.
    """

    test: Array
    counted: Array
    drawn: Array
    limit: float

    @property
    def difference(self) -> float:
        return kolmogorov(self.counted, self.drawn)

    @property
    def calibrated(self) -> bool:
        return self.difference <= max(self.limit, MISFIT)

    @property
    def narrow(self) -> bool:
        """Whether test rows score lower than samples."""
        return bool(np.median(self.counted) < np.median(self.drawn))

    @property
    def suspicious(self) -> NDArray[np.bool_]:
        """Test rows that score below every sample; on average, chance gives at most a quarter of one."""
        return self.test < self.drawn.min()


@torch.no_grad()
def score_rows(entry: Entry, seed: int) -> Scores:
    """Score test rows and four times as many samples, or more where those would be few."""
    rows = entry.dataset.rows("test")[:ROWS]
    count = TIMES * len(rows) if rows.context is not None else max(FEWEST, TIMES * len(rows))
    fresh = draw_samples(entry, count, rows.context, seed + 1)
    context = None if rows.context is None else rows.context.repeat(TIMES, 1)
    test, drawn = (_log_prob(entry, part, seed) for part in (rows, Rows(fresh, context)))
    counted = resampled(Rows(torch.from_numpy(test), weight=rows.weight)).x.numpy()
    tests = rows.x[0].numel() + 1
    limit = chance(effective_rows(rows.weight, len(rows)), len(drawn), tests)
    return Scores(test, counted, drawn, limit)


def _log_prob(entry: Entry, rows: Rows, seed: int) -> Array:
    rows = rows.on(entry.flow)
    score = entry.flow.estimate(rows.x, DRAWS, context=rows.context, seed=seed).log_prob
    return score.double().cpu().numpy()


def calibration_block(entries: Sequence[Entry], scores: Sequence[Scores]) -> Block:
    """The distribution functions of the scores; pictures of coverage belong here too."""
    words = (
        "Does the model expect the data that it gets? The curves show scores log p(x) of test rows and "
        "of rows drawn from the model. If they coincide, it does. Test rows further left: the "
        "model is overconfident. Further right: it is too wide."
    )
    pictures = [_curves(entry.name, each) for entry, each in zip(entries, scores, strict=True)]
    return Block("Calibration", words, pictures)


def _curves(name: str, scores: Scores) -> Picture:
    draw = partial(draw_scores, held_out=scores.counted, drawn=scores.drawn)
    difference, limit = (set_number(x, "{:.3f}") for x in (scores.difference, scores.limit))
    note = f"largest difference {difference}; chance explains up to {limit}"
    return make_picture(draw, CHART, f"Scores of test rows and of samples: {name}", name, note)


def rows_block(entries: Sequence[Entry], scores: Sequence[Scores]) -> Block:
    """The test rows with the lowest and the highest scores."""
    words = (
        f"Are there odd rows? Of {len(scores[0].test):,} test rows, these score lowest and highest. A "
        f"suspicious one scores below all {len(scores[0].drawn):,} samples of the model: an anomaly, or "
        "a mistake in the data."
    )
    tables = [_extremes(entry, each) for entry, each in zip(entries, scores, strict=True)]
    return Block("Suspicious rows", words, tables=tables)


def _extremes(entry: Entry, scores: Scores) -> Table:
    order = scores.test.argsort()
    count = max(1, min(MOST_LISTED, len(order) // 2))
    places = [int(place) for place in (*order[:count], *order[-count:][::-1])]
    names, cells = _cells(entry, places)
    kinds = ["suspicious" if scores.suspicious[place] else "lowest" for place in places[:count]]
    kinds += ["highest"] * (len(places) - count)
    numbers = [set_number(float(scores.test[place]), "{:.2f}") for place in places]
    rows = [(kind, number, *row) for kind, number, row in zip(kinds, numbers, cells, strict=True)]
    return Table((entry.name, "log p", *names), rows)


def _cells(entry: Entry, places: list[int]) -> tuple[list[str], list[list[str]]]:
    """The first columns of some test rows, in words."""
    dataset, codes = entry.dataset, entry.dataset.test[places]
    if dataset.schema is None:
        names, rows = list(dataset.columns), codes.flatten(1).tolist()
    else:
        context = dataset.rows("test")[torch.tensor(places)].context
        given = None if context is None else dataset.schema.decode_given(context)
        frame = dataset.schema.decode(codes, given)
        names, rows = frame.columns, frame.rows()
    words = [[f"{x:.6g}" if isinstance(x, float) else str(x) for x in row[:MOST_SHOWN]] for row in rows]
    return names[:MOST_SHOWN], words

"""From a table's rows to training, validation and test rows, with nothing learnt from the last two.

The table is read in passes: which columns of text are numbers; which rows are whole, and to which
part each belongs; what the columns are, from training rows alone; and the rows themselves. Rows for
validation and testing that hold what training rows rule out, such as a new category, are left out and
counted: a new file with them would be refused.
"""

from __future__ import annotations

__all__ = ["FEWEST_ROWS", "SPLIT_SEED", "PreparedTable", "Split", "prepare_table", "split_rows"]

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ciflows.core.rows import Rows
from ciflows.errors import UserError
from ciflows.optional import polars as pl
from ciflows.progress import Say, Watch, silent, unwatched
from ciflows.tables.options import TableSettings
from ciflows.tables.schema import Schema, count_gaps, filled
from ciflows.tables.survey import choose_columns, number_columns, survey_table
from ciflows.tables.text import numbers_from_text

Array = NDArray[Any]
Chunks = Callable[[], Iterable["pl.DataFrame"]]
SPLIT_SEED = 2020
HELD_OUT = 0.1
FEWEST_ROWS = 10
MOST_COMPARED = 20_000_000  # rows of which duplicates are counted
NAMES = ("training", "validation", "test")


class Split(NamedTuple):
    """Where each row goes.

    Attributes:
        place: Place of each row (rows,) in the order train, validation, test.
        sizes: Number of rows of each part.
        groups: Number of groups in training, if rows belong to groups.
    """

    place: NDArray[np.int64]
    sizes: tuple[int, int, int]
    groups: int | None = None

    def part(self) -> NDArray[np.uint8]:
        """The part of each row: 0, 1 or 2."""
        first, second, _ = np.cumsum(self.sizes)
        part = (self.place >= first).astype(np.uint8)  # one byte a row: there may be very many
        part += self.place >= second
        return part


class PreparedTable(NamedTuple):
    """A table's rows in three parts.

    Attributes:
        parts: The rows of each part, packed side by side: points, contexts, weights.
        duplicates: Rows for validation or testing that are in training to the last value.
        left_out: Rows of validation and test that hold what training rows rule out.
        groups: Number of groups in training, if rows belong to groups.
    """

    schema: Schema
    parts: list[Array]
    duplicates: int
    left_out: tuple[int, int]
    groups: int | None


def prepare_table(
    chunks: Chunks,
    settings: TableSettings,
    say: Say = silent,
    watch: Watch = unwatched,
    allocate: Callable[[tuple[int, int]], Array] = np.empty,
) -> PreparedTable:
    """Survey, split and encode a table.

    Arguments:
        chunks: Gives the rows, some at a time; called several times.
        allocate: Makes room for the encoded rows.
    """
    table = _Table(chunks, settings, watch)
    split = table.split(say)
    part = split.part()
    schema = survey_table(table.some("surveying", part == 0), settings, say)
    parts, left_out, reasons = table.encode(schema, split, allocate)
    if reasons:
        say(f"Left out {_counts(left_out, split)}, which training rows rule out: {'; '.join(reasons)}.")
    if table.duplicates:
        say(
            f"{table.duplicates:,} of {sum(split.sizes[1:]):,} validation and test rows are also in "
            "training, to the last value: the test favours what remembers them (group keeps rows "
            "together)."
        )
    return PreparedTable(schema, parts, table.duplicates, left_out, split.groups)


def _counts(left_out: tuple[int, int], split: Split) -> str:
    counts = zip(left_out, split.sizes[1:], NAMES[1:], strict=True)
    return " and ".join(f"{n} of {size} {name} rows" for n, size, name in counts if n)


def split_rows(rows: int, what: str = "rows", groups: NDArray[np.uint64] | None = None) -> Split:
    """An order fixed for good, in which the last fifth is for validation and test.

    Arguments:
        what: What they are, for the error.
        groups: A number for each row (rows,); rows with equal ones go to the same part.
    """
    if rows < FEWEST_ROWS:
        raise UserError(f"{rows} {what} are too few to fit; at least {FEWEST_ROWS} needed.")
    held_out = max(1, int(HELD_OUT * rows))
    generator = torch.Generator().manual_seed(SPLIT_SEED)
    if groups is None:
        order = torch.randperm(rows, generator=generator).numpy()
        return Split(np.argsort(order), (rows - 2 * held_out, held_out, held_out))
    _, group = np.unique(groups, return_inverse=True)
    count = int(group.max()) + 1
    if count < 3:
        raise UserError(
            f"{count} groups cannot be split into training, validation and test: at least 3 needed."
        )
    rank = torch.randperm(count, generator=generator).numpy()
    order = np.argsort(rank[group], kind="stable")
    ends = np.cumsum(np.bincount(rank[group]))  # rows up to the end of each group, in the groups' order
    last = _nearest_end(ends[:-1], rows - held_out)
    first = _nearest_end(ends[: np.searchsorted(ends, last)], rows - 2 * held_out)
    in_training = int(np.searchsorted(ends, first)) + 1
    return Split(np.argsort(order), (first, last - first, rows - last), in_training)


def _nearest_end(ends: NDArray[np.int64], wanted: int) -> int:
    return int(ends[np.argmin(np.abs(ends - wanted))])


class _Table:
    """A table read in passes, with the columns that matter alone."""

    def __init__(self, chunks: Chunks, settings: TableSettings, watch: Watch) -> None:
        self.chunks, self.settings, self.watch = chunks, settings, watch
        self.duplicates = 0

    @cached_property
    def first(self) -> pl.DataFrame:
        """The first rows."""
        frame = next(iter(self.chunks()), None)
        if frame is None or not frame.width:
            raise UserError("the table is empty.")
        return frame

    @cached_property
    def names(self) -> list[str]:
        return choose_columns(self.first, self.settings)

    @cached_property
    def numbers(self) -> list[str]:
        """Columns of text that hold numbers."""
        text = [name for name in self.names if self.first.schema[name] == pl.String]
        chunks = self.watch(self.chunks(), "reading") if text else ()
        return number_columns(chunks, text, self.settings)

    def read(self, what: str) -> Iterator[tuple[pl.DataFrame, pl.Series]]:
        """The rows, some at a time, and which of them are whole."""
        for chunk in self.watch(self.chunks(), what):
            frame = chunk.select(self.names)
            found = [numbers_from_text(frame[name]) for name in self.numbers]
            frame = frame.with_columns([part for part in found if part is not None])
            yield frame, frame.select(pl.all_horizontal(filled(frame))).to_series()

    def some(self, what: str, wanted: NDArray[np.bool_]) -> Iterator[pl.DataFrame]:
        """Those of the whole rows that are wanted."""
        start = 0
        for frame, whole in self.read(what):
            kept = frame.filter(whole)
            yield kept.filter(wanted[start : start + len(kept)])
            start += len(kept)

    def split(self, say: Say) -> Split:
        """Which part each whole row belongs to; gaps are counted, and refused or said."""
        gaps: dict[str, int] = {}
        hashes: list[Array] = []
        groups: list[Array] = []
        rows = dropped = 0
        group = self.settings.group
        for frame, whole in self.read("counting"):
            for name, count in count_gaps(frame).items():
                gaps[name] = gaps.get(name, 0) + count
            kept = frame.filter(whole)
            rows, dropped = rows + len(kept), dropped + len(frame) - len(kept)
            if rows <= MOST_COMPARED:
                hashes.append(kept.drop(group or []).hash_rows().to_numpy())
            if group:
                groups.append(kept[group].hash().to_numpy())
        if not rows and not dropped:
            raise UserError("the table is empty.")
        self._check_gaps(gaps, rows, dropped, say)
        split = split_rows(rows, groups=np.concatenate(groups) if group else None)
        if rows <= MOST_COMPARED:
            every, in_training = np.concatenate(hashes), split.part() == 0
            self.duplicates = int(np.isin(every[~in_training], every[in_training]).sum())
        return split

    def _check_gaps(self, gaps: dict[str, int], rows: int, dropped: int, say: Say) -> None:
        found = ", ".join(f"{name} ({count})" for name, count in gaps.items())
        if found and self.settings.missing == "refuse":
            raise UserError(
                f"missing or infinite values in {found}. Leave out those rows (missing = drop), or "
                "exclude those columns."
            )
        if found:
            of = f"{dropped:,} of {dropped + rows:,} rows"
            say(f"Left out {of}: missing or infinite values in {found}.")
        if not rows:
            raise UserError("every row has missing or infinite values.")

    def encode(
        self, schema: Schema, split: Split, allocate: Callable[[tuple[int, int]], Array]
    ) -> tuple[list[Array], tuple[int, int], list[str]]:
        """The three parts' rows, how many of validation and test were left out, and why."""
        width = len(schema.columns) + schema.context_features + (schema.weights is not None)
        packed = allocate((sum(split.sizes), width))
        bad = np.zeros(len(split.place), dtype=bool)
        reasons: dict[str, None] = {}
        start = 0
        for frame, whole in self.read("preparing"):
            kept = frame.filter(whole)
            place = split.place[start : start + len(kept)]
            encoded = schema.encode_some(kept.drop([c.name for c in schema.constants]), weights=True)
            outside = _outside(schema, encoded.rows.x.numpy())
            packed[place[~encoded.bad]] = _pack(encoded.rows)
            bad[place[encoded.bad]] = True
            bad[place[~encoded.bad][outside.any(1)]] = True
            reasons |= dict.fromkeys([*encoded.reasons, *_beyond(schema, outside)])
            start += len(kept)
        _check_training(bad[: split.sizes[0]], list(reasons))
        ends = np.cumsum(split.sizes)
        train, *held_out = np.split(packed, ends[:2])
        keep = np.split(~bad, ends[:2])[1:]
        parts = [part if good.all() else part[good] for part, good in zip(held_out, keep, strict=True)]
        if any(not len(part) for part in parts):
            raise UserError(f"no row is left for validation or testing: {'; '.join(reasons)}.")
        if schema.weights and not parts[0][:, -1].any():  # the survey looked at those of training
            raise UserError(
                f"weights {schema.weights}: all validation rows have weight 0. Leave out rows of "
                "weight 0, or give weights to more of them."
            )
        return [train, *parts], (int((~keep[0]).sum()), int((~keep[1]).sum())), list(reasons)


def _check_training(bad: NDArray[np.bool_], reasons: list[str]) -> None:
    """A large table is surveyed from a sample: what it missed in training rows is a user's to decide."""
    if bad.any():
        raise UserError(f"{int(bad.sum())} training rows are unlike the others: {'; '.join(reasons)}.")


def _outside(schema: Schema, x: Array) -> NDArray[np.bool_]:
    """Which values lie outside their column's bounds: (rows, columns)."""
    lows = [getattr(column, "low", None) for column in schema.columns]
    highs = [getattr(column, "high", None) for column in schema.columns]
    low = np.array([-np.inf if low is None else low for low in lows])
    high = np.array([np.inf if high is None else high for high in highs])
    outside: NDArray[np.bool_] = (x < low) | (x > high)
    return outside


def _beyond(schema: Schema, outside: NDArray[np.bool_]) -> list[str]:
    names = [
        c.name for c, wrong in zip(schema.columns, np.atleast_1d(outside.any(0)), strict=True) if wrong
    ]
    return [f"{name} lies outside the bounds of training" for name in names]


def _pack(rows: Rows) -> Array:
    """Points, contexts and weights side by side."""
    weight = None if rows.weight is None else rows.weight[:, None]
    parts = [part.double() for part in (rows.x, rows.context, weight) if part is not None]
    return torch.cat(parts, dim=1).numpy()

"""What you can ask of a run: quantiles, distribution functions, intervals, means, expectations.

All of them are answered from n samples of the run, given each row of `given` if the density is
conditional, and each answer has its Monte-Carlo standard error beside it. It tells how far other samples
would move the answer, not how well the model fits. The samples of a row depend on the seed and on that
row alone. `Run` has these functions as methods.
"""

from __future__ import annotations

__all__ = ["cdf", "expectation", "interval", "mean", "quantile"]

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from ciflows.errors import UserError
from ciflows.optional import polars as pl
from ciflows.runs.circles import direction
from ciflows.runs.densest import densest
from ciflows.runs.frames import columns_of, is_pandas, like, to_pandas
from ciflows.runs.samples import Modelled, Samples, modelled
from ciflows.tables import TableLike, as_frame
from ciflows.tables.dates import as_dates, in_unit_of, unit_of
from ciflows.tables.schema import check_names

if TYPE_CHECKING:
    from ciflows.runs.run import Run

Array = NDArray[np.float64]
ERROR = "_std_error"
REGIONS = "highest-density regions"


def quantile(
    run: Run,
    q: float | Sequence[float],
    given: TableLike | None = None,
    *,
    columns: Sequence[str] | None = None,
    n: int | None = None,
    seed: int = 0,
) -> Any:
    """The q-quantile of each column of numbers, beside its standard error: `price`, `price_std_error`.

    With x_(k) the k-th smallest of n samples and δ = sqrt(n q (1 - q)):

        quantile  = x_(⌈nq⌉)
        std_error = (x_(nq + 2δ) - x_(nq - 2δ)) / 4     infinite if there are too few samples for q

    A row for each row of `given`, in its order; if q is a list, a row for each q in turn, which a column
    `q` names. A pandas `given` gives a pandas frame with its index, all else a polars frame.

    Arguments:
        q: A number between 0 and 1, or several.
        given: The rows to condition on, if the density is conditional.
        columns: The columns to answer for; all columns of numbers if None.
        n: Samples for each row; 10,000 if None, or 1,000 for each row of `given`.
        seed: Seed of the samples.
    """
    levels = _read_shares(q, "A quantile")
    chosen = _numbers(run, columns, "quantiles")
    samples = Samples(run, given, n, seed)
    values, errors = _joined(_quantiles(_of(x, chosen), levels) for x in samples.values())
    frame = _frame([column.name for column in chosen], values, errors)
    if np.ndim(q):
        frame.insert_column(0, pl.Series("q", levels * samples.rows, dtype=pl.Float64))
    return like(given, frame, len(levels))


def cdf(
    run: Run,
    x: float | TableLike,
    given: TableLike | None = None,
    *,
    n: int | None = None,
    seed: int = 0,
) -> Any:
    """P(column <= x) of each column that x names, beside its standard error.

        cdf       = k / n                    with k of n samples at or below x
        std_error = sqrt(p (1 - p) / n)      with p = (k + 1) / (n + 2), so that it is never 0

    Columns are answered one by one; for several at once see `expectation`. A row for each row of
    `given`, or for each value if x has several: then `given` has one row, or as many. A pandas frame
    gives a pandas frame.

    Arguments:
        x: {column: value or values}, a table, or one number if one column of numbers is modelled.
        given: The rows to condition on, if the density is conditional.
        n: Samples for each row; 10,000 if None, or 1,000 for each row of `given`.
        seed: Seed of the samples.
    """
    chosen, points = _points(run, x)
    samples = Samples(run, given, n, seed)
    if samples.rows > 1 and len(points) not in (1, samples.rows):
        rows = samples.rows
        raise UserError(f"x has {len(points)} values for {rows} rows of `given`: give 1 or {rows}.")
    shares, start = [], 0
    for values in samples.values():
        own = points[start : start + len(values)] if len(points) == samples.rows else points
        shares.append(_shares(_of(values, chosen), own))
        start += len(values)
    share = np.concatenate(shares)
    frame = _frame([column.name for column in chosen], share, _share_error(share, samples.n))
    return like(given if given is not None and len(frame) == samples.rows else x, frame)


def interval(
    run: Run,
    level: float = 0.9,
    given: TableLike | None = None,
    *,
    kind: Literal["central", "hdr"] = "central",
    columns: Sequence[str] | None = None,
    n: int | None = None,
    seed: int = 0,
) -> Any:
    """Intervals that hold a share of each column of numbers, with the standard errors of their ends.

    central: between the quantiles (1 - level) / 2 and (1 + level) / 2. A row for each row of `given`,
    in its order, with `price_low`, `price_high`, `price_low_std_error` and `price_high_std_error`.

    hdr: the highest-density region, that is the shortest intervals that together hold the share. There
    may be several, so each has a row of its own with `row` (the row of `given`, from 0), `column`,
    `low`, `high` (both included), `mass`, `low_std_error` and `high_std_error`: first by row, then by
    column, then from low to high. Values with a probability of their own come first. Pieces that samples
    cannot tell apart are joined: where the density is flat, they then hold more than the share. Columns
    on a circle have such a region alone; if `low` is above `high`, the interval passes the seam.

    Arguments:
        level: The share, between 0 and 1.
        given: The rows to condition on, if the density is conditional.
        kind: "central" or "hdr".
        columns: The columns to answer for; all columns of numbers if None.
        n: Samples for each row; 10,000 if None, or 1,000 for each row of `given`.
        seed: Seed of the samples.
    """
    level, *more = _read_shares(level, "The share of an interval")
    if more:
        raise UserError("An interval has one share: ask for each by itself.")
    chosen = _numbers(run, columns, REGIONS if kind == "hdr" else "central intervals")
    if kind == "hdr":
        frame, repeats = _highest(Samples(run, given, n, seed), level, chosen)
        return like(given, frame, repeats)
    if kind != "central":
        raise UserError(f'An interval is "central" or "hdr"; got {kind!r}.')
    ends = [(1 - level) / 2, (1 + level) / 2]
    samples = Samples(run, given, n, seed)
    answers = _joined(_quantiles(_of(x, chosen), ends) for x in samples.values())
    names = [f"{column.name}_{side}" for column in chosen for side in ("low", "high")]
    # (rows * ends, columns) -> (rows, columns * ends)
    values, errors = (
        part.reshape(samples.rows, 2, -1).swapaxes(1, 2).reshape(samples.rows, -1) for part in answers
    )
    return like(given, _frame(names, values, errors))


def mean(
    run: Run,
    given: TableLike | None = None,
    *,
    columns: Sequence[str] | None = None,
    n: int | None = None,
    seed: int = 0,
) -> Any:
    """The mean of each column, beside its standard error s / sqrt(n).

    A categorical column is answered by the probabilities of its values, in columns such as `city=Oslo`;
    a column on a circle by its mean direction. A row for each row of `given`, in its order. A pandas
    `given` gives a pandas frame.

    Arguments:
        given: The rows to condition on, if the density is conditional.
        columns: The columns to answer for; all if None.
        n: Samples for each row; 10,000 if None, or 1,000 for each row of `given`.
        seed: Seed of the samples.
    """
    chosen = _asked(run, columns)
    samples = Samples(run, given, n, seed)
    values, errors = _joined(
        [np.concatenate(parts, axis=-1) for parts in zip(*(_mean(x, f) for f in chosen), strict=True)]
        for x in samples.values()
    )
    names = [
        name
        for feature in chosen
        for name in ([f"{feature.name}={word}" for word in feature.words] or [feature.name])
    ]
    return like(given, _frame(names, values, errors))


def expectation(
    run: Run,
    f: Callable[[Any], Any],
    given: TableLike | None = None,
    *,
    n: int | None = None,
    seed: int = 0,
) -> Any:
    """E[f(x)], beside its standard error: `expectation`, `std_error`.

    A row for each row of `given`, in its order. A pandas `given` gives a pandas frame.

    Arguments:
        f: Takes a table of samples, with the given columns beside them, and gives a number (or true or
            false) for each of its rows: lambda x: x["price"] > 100. It may give a table or a mapping of
            several columns; then each has its own expectation and error. The table is a polars frame, or
            a pandas frame if `given` is one.
        given: The rows to condition on, if the density is conditional.
        n: Samples for each row; 10,000 if None, or 1,000 for each row of `given`.
        seed: Seed of the samples.
    """
    modelled(run)
    samples = Samples(run, given, n, seed)
    names: list[str] = []
    answers = []
    for table in samples.tables():
        found = f(to_pandas(table) if is_pandas(given) else table)
        columns = columns_of(found, len(table))
        names = list(columns)
        outcomes = np.stack(list(columns.values()), axis=-1)
        answers.append(_means(outcomes.reshape(-1, samples.n, len(names))))
    frame = _frame(names, *_joined(answers))
    return like(given, frame.rename({f"expectation{ERROR}": "std_error"}, strict=False))


# -- which columns -----------------------------------------------------------------------------------


def _asked(run: Run, columns: Sequence[str] | None) -> list[Modelled]:
    """The columns that are asked for; all if None."""
    features = modelled(run)
    if columns is None:
        return features
    names = [columns] if isinstance(columns, str) else list(columns)
    check_names(names, [feature.name for feature in features], "columns")
    if not names:
        raise UserError("columns: name at least one, or leave it out for all.")
    return [feature for feature in features if feature.name in names]


def _numbers(run: Run, columns: Sequence[str] | None, what: str) -> list[Modelled]:
    """The columns of numbers among those asked for; for regions (hdr) with those on a circle."""
    asked = _asked(run, columns)
    words = [f.name for f in asked if f.words]
    circles = [f.name for f in asked if f.circle and what != REGIONS]
    numbers = [feature for feature in asked if feature.name not in words + circles]
    if words and (columns is not None or not numbers):
        raise UserError(
            f"{', '.join(words)}: categorical columns have no {what}; `mean` gives their probabilities."
        )
    if circles and (columns is not None or not numbers):
        raise UserError(
            f"{', '.join(circles)}: a circle has no {what}; `mean` gives its direction, and "
            'interval(kind="hdr") its region.'
        )
    return numbers


def _points(run: Run, x: float | TableLike) -> tuple[list[Modelled], Array]:
    """The columns that x names, and its values (values, columns)."""
    if not hasattr(x, "columns") and not isinstance(x, Mapping):
        columns = _numbers(run, None, "distribution function")
        if len(columns) > 1:
            names = ", ".join(column.name for column in columns)
            raise UserError(f"Several columns are modelled: give x as {{column: value}}, of {names}.")
        return columns, _as_numbers(columns[0], x)[:, None]
    named = dict(x) if isinstance(x, Mapping) else as_frame(x).to_dict()
    chosen = _numbers(run, list(named), "distribution function")
    if not chosen:
        raise UserError("x names no column: give {column: value}.")
    values = [_as_numbers(column, named[column.name]) for column in chosen]
    if len({len(each) for each in values} - {1}) > 1:
        raise UserError("x has columns of different lengths.")
    return chosen, np.stack(np.broadcast_arrays(*values), axis=1)


def _as_numbers(feature: Modelled, values: Any) -> Array:
    name, column = feature.name, feature.column
    if column is not None and unit_of(column.dtype):
        dates = as_dates(as_frame({name: values})[name])
        values = values if dates is None else in_unit_of(dates, column.dtype)
    try:
        numbers = np.atleast_1d(np.asarray(values, dtype=np.float64))
    except (TypeError, ValueError):
        numbers = np.array([np.nan])
    if numbers.ndim != 1 or np.isnan(numbers).any() or not len(numbers):
        raise UserError(f"cdf of {name}: expected a number or several; got {values!r}.")
    return numbers


def _read_shares(given: Any, what: str) -> list[float]:
    """A number between 0 and 1, or several, as a list."""
    try:
        shares = [float(share) for share in np.atleast_1d(np.asarray(given, dtype=np.float64))]
    except (TypeError, ValueError):
        raise UserError(f"{what} lies between 0 and 1; got {given!r}.") from None
    wrong = [share for share in shares if not 0 < share < 1]
    if wrong or not shares:
        raise UserError(f"{what} lies between 0 and 1; got {f'{wrong[0]:g}' if wrong else 'none'}.")
    return shares


# -- answers from samples x (rows, n, columns) -------------------------------------------------------


def _of(x: Array, chosen: Sequence[Modelled]) -> Array:
    return x[..., [column.place for column in chosen]]


def _quantiles(x: Array, levels: Sequence[float]) -> tuple[Array, Array]:
    """Quantiles and their errors, both (rows * levels, columns)."""
    x, n = np.sort(x, axis=1), x.shape[1]
    q = np.array(levels)
    spread = np.sqrt(n * q * (1 - q))
    low, high = np.floor(n * q - 2 * spread).astype(int), np.ceil(n * q + 2 * spread).astype(int)
    known = (low >= 1) & (high <= n)
    middle = np.ceil(n * q - 1e-9).astype(int).clip(1, n)
    gap = x[:, high.clip(1, n) - 1] - x[:, low.clip(1, n) - 1]
    per_rank = (spread / (high - low))[:, None]
    errors = np.where(known[:, None], gap * per_rank, np.inf)
    columns = x.shape[-1]
    return x[:, middle - 1].reshape(-1, columns), errors.reshape(-1, columns)


def _shares(x: Array, points: Array) -> Array:
    """Shares of samples at or below points: (rows, columns), or (points, columns) for one row."""
    if len(x) == 1:
        ordered = np.sort(x[0], axis=0)
        counts = [
            np.searchsorted(column, values, side="right")
            for column, values in zip(ordered.T, points.T, strict=True)
        ]
        return np.stack(counts, axis=1) / x.shape[1]
    return (x <= points[:, None]).mean(1)


def _share_error(share: Array, n: int) -> Array:
    p = (n * share + 1) / (n + 2)
    return np.sqrt(p * (1 - p) / n)


def _means(x: Array) -> tuple[Array, Array]:
    """Means and their errors, both (rows, columns)."""
    return x.mean(1), x.std(1, ddof=1) / np.sqrt(x.shape[1])


def _mean(x: Array, feature: Modelled) -> tuple[Array, Array]:
    """A column's mean, its direction on a circle, or the share of each value; their errors (rows, 1)."""
    values = x[..., feature.place, None]
    if feature.circle:
        mean, error = direction(values[..., 0], feature.circle)
        return mean[:, None], error[:, None]
    shares = values == np.arange(len(feature.words))
    return _means(shares.astype(np.float64) if feature.words else values)


def _highest(
    samples: Samples, level: float, chosen: Sequence[Modelled]
) -> tuple[pl.DataFrame, list[int]]:
    """Highest-density regions, an interval a row, and how many each row of `given` has."""
    rows: list[dict[str, Any]] = []
    repeats: list[int] = []
    for values in samples.values():
        for x in values:
            found = [
                {"row": len(repeats), "column": feature.name, **interval._asdict()}
                for feature in chosen
                for interval in densest(x[:, feature.place], level, feature.column)
            ]
            rows += found
            repeats.append(len(found))
    return pl.DataFrame(rows), repeats


# -- frames ------------------------------------------------------------------------------------------


def _joined(answers: Any) -> tuple[Array, Array]:
    values, errors = zip(*answers, strict=True)
    return np.concatenate(values), np.concatenate(errors)


def _frame(names: Sequence[str], values: Array, errors: Array) -> pl.DataFrame:
    """Each answer beside its error."""
    columns: dict[str, Array] = {}
    for place, name in enumerate(names):
        columns |= {name: values[:, place], f"{name}{ERROR}": errors[:, place]}
    return pl.DataFrame(columns)

"""What a table's columns are, found from their values: a first pass over its rows, a chunk at a time."""

from __future__ import annotations

__all__ = ["Survey", "choose_tail", "survey_table"]

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ciflows.data.prepared import Say, silent
from ciflows.data.schema import (
    Bounds,
    Column,
    Constant,
    Schema,
    TableSettings,
    check_names,
    count_gaps,
    filled,
)
from ciflows.errors import UserError

if TYPE_CHECKING:
    import polars as pl

Array = NDArray[np.float64]
MOST_CATEGORIES = 1000
MOST_LEVELS = 64  # integers that spread wider are modelled as numbers, not level by level
ROWS_A_LEVEL = 5  # and so are those with fewer rows for each level than this
WIDEST = 2**22  # integers that spread wider still are as good as real numbers
SAMPLE = 50_000  # rows from which bounds, middles and spreads are found
NATURAL_BOUNDS: tuple[Bounds, ...] = ((0.0, None), (0.0, 1.0), (0.0, 100.0), (-1.0, 1.0))
FEW_VALUES = 12  # numbers with a point of which there are no more, each often, are categories
LARGEST = 1e30  # codes are in single precision
NEAR = 0.9  # share of the way to a second bound that the data have to go
LEAST_GAIN = 0.01  # nats a row by which a bound or a tail has to help before it is believed
TAILS = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0)


class Survey(NamedTuple):
    """A table's schema, and how many of its rows are used."""

    schema: Schema
    rows: int


@dataclass
class _Facts:
    """What is known of a column after some chunks."""

    dtype: pl.DataType
    categorical: bool
    gaps: int = 0
    low: float = math.inf
    high: float = -math.inf
    whole: bool = True
    values: set[Any] = field(default_factory=set)

    def add(self, values: pl.Series) -> None:
        if len(self.values) <= (MOST_CATEGORIES if self.categorical else FEW_VALUES):
            self.values |= set(values.unique().to_list())
        if self.categorical:
            return
        self.low, self.high = min(self.low, values.min()), max(self.high, values.max())  # type: ignore
        self.whole = self.whole and (values.dtype.is_integer() or bool((values == values.round()).all()))


def survey_table(chunks: Iterable[pl.DataFrame], settings: TableSettings, say: Say = silent) -> Survey:
    """Find out what the columns of a table are; what is set aside or found is said.

    Arguments:
        chunks: Its rows, some at a time.
        settings: What is known already.
        say: Hears what the user should know.
    """
    facts: dict[str, _Facts] = {}
    sample, rows, dropped = _Sample(), 0, 0
    for chunk in chunks:
        if not facts:
            facts = _begin(chunk, settings)
        chunk = chunk.select(list(facts))
        for name, count in count_gaps(chunk).items():
            facts[name].gaps += count
        kept = chunk.filter(filled(chunk))
        rows, dropped = rows + len(kept), dropped + len(chunk) - len(kept)
        for name, fact in facts.items() if len(kept) else ():
            fact.add(kept[name])
        sample.add(kept)
    if not rows and not dropped:
        raise UserError("the table is empty.")
    _check_gaps(facts, settings, rows, dropped, say)
    return Survey(_schema(facts, settings, sample.frame(), rows, say), rows)


def choose_tail(y: Array) -> tuple[float, float]:
    """How strongly to tame a column y of spread 1 (λ of `Tame`), and its log-likelihood then.

    That under which arsinh(λ y) / λ is best fitted by a Gaussian; 0 where nothing is gained.
    """
    fits = {}
    for tail in TAILS:
        z = np.arcsinh(tail * y) / tail if tail else y
        fits[tail] = gaussian_fit(z, -np.log(np.hypot(1.0, tail * y)))
    best = max(fits, key=lambda tail: fits[tail])
    return (best, fits[best]) if fits[best] > fits[0.0] + LEAST_GAIN else (0.0, fits[0.0])


def gaussian_fit(z: Array, log_slope: Array) -> float:
    """Mean log-likelihood of a Gaussian fitted to z = T(x), as a density of x."""
    return float(-0.5 * np.log(2 * np.pi * np.e * max(z.var(), 1e-300)) + log_slope.mean())


# -- inside ------------------------------------------------------------------------------------------


class _Sample:
    """Evenly spread rows of a table of unknown length, some tens of thousands at most."""

    def __init__(self) -> None:
        self.parts: list[pl.DataFrame] = []
        self.every, self.seen = 1, 0

    def add(self, chunk: pl.DataFrame) -> None:
        self.parts.append(chunk.gather_every(self.every, -self.seen % self.every))
        self.seen += len(chunk)
        while sum(map(len, self.parts)) > 2 * SAMPLE:
            self.every *= 2
            self.parts = [self.frame().gather_every(2)]

    def frame(self) -> pl.DataFrame:
        import polars as pl

        return pl.concat(self.parts)


def _begin(chunk: pl.DataFrame, settings: TableSettings) -> dict[str, _Facts]:
    """The columns that are wanted, in the order of the file; refused where one cannot be used."""
    import polars as pl

    known = chunk.columns
    for what in ("columns", "exclude", "given", "categorical", "bounds"):
        check_names(list(getattr(settings, what) or ()), known, f"--{what}")
    special = [*settings.given, *([settings.weights] if settings.weights else [])]
    check_names(special, known, "--weights")
    if settings.weights in settings.given:
        raise UserError(f"{settings.weights} cannot be both a weight and given.")
    chosen = [name for name in settings.columns or known if name not in settings.exclude]
    names = [name for name in known if name in (*chosen, *special)]
    if not names:
        raise UserError("no column is left to model.")
    dates = [f"{name} ({chunk.schema[name]})" for name in names if chunk.schema[name].is_temporal()]
    if dates:
        raise UserError(
            f"dates have no density as they stand: {', '.join(dates)}. Turn them into numbers, such as "
            "days since the first one, or leave them out with --exclude."
        )
    facts = {}
    for name in names:
        dtype = chunk.schema[name]
        words = dtype in (pl.String, pl.Boolean, pl.Categorical, pl.Enum)
        if not words and not dtype.is_numeric():
            raise UserError(f"columns that are neither numbers nor words: {name} ({dtype}).")
        facts[name] = _Facts(dtype, words or name in settings.categorical)
    if settings.weights and facts[settings.weights].categorical:
        raise UserError(f"--weights {settings.weights}: weights have to be numbers.")
    return facts


def _check_gaps(
    facts: dict[str, _Facts], settings: TableSettings, rows: int, dropped: int, say: Say
) -> None:
    found = ", ".join(f"{name} ({fact.gaps})" for name, fact in facts.items() if fact.gaps)
    if found and settings.missing == "refuse":
        raise UserError(
            f"missing or infinite values in {found}. Leave out those rows with --missing drop, or those "
            "columns with --exclude."
        )
    if found:
        say(f"Left out {dropped:,} of {dropped + rows:,} rows: missing or infinite values in {found}.")
    if not rows:
        raise UserError("no row is without missing or infinite values.")


def _schema(
    facts: dict[str, _Facts], settings: TableSettings, sample: pl.DataFrame, rows: int, say: Say
) -> Schema:
    constants = []
    columns: dict[str, Column] = {}
    for name, fact in facts.items():
        if name == settings.weights:
            _check_weights(name, fact)
        elif (one := _only_value(fact)) is not None:
            constants.append(Constant(name=name, dtype=_dtype(fact), value=one))
        elif fact.categorical or (_is_code(fact, rows) and name not in settings.bounds):
            columns[name] = _categorical(name, fact, rows, settings)
        else:
            columns[name] = _number(name, fact, sample[name].to_numpy(), rows, settings)
    if constants:
        values = ", ".join(f"{constant.name} = {constant.value}" for constant in constants)
        say(f"Set aside what is constant: {values}.")
    modelled = [column for name, column in columns.items() if name not in settings.given]
    if not modelled:
        raise UserError("no column is left to model.")
    _say_found(columns.values(), settings, say)
    return Schema(
        columns=tuple(modelled),
        given=tuple(columns[name] for name in settings.given if name in columns),
        constants=tuple(constants),
        weights=settings.weights,
        order=tuple(name for name in facts if name != settings.weights),
    )


def _say_found(columns: Iterable[Column], settings: TableSettings, say: Say) -> None:
    """Tell which bounds were found, and what was taken for something else than its type says."""
    bounds = [
        f"{column.name} {'' if column.low is None else f'{column.low:g}'}:"
        f"{'' if column.high is None else f'{column.high:g}'}"
        for column in columns
        if (column.low, column.high) != (None, None) and column.name not in settings.bounds
    ]
    codes = [f"{c.name} ({c.levels} values)" for c in columns if c.categories and "Float" in c.dtype]
    if codes:
        say(f"Taken for categories: {', '.join(codes)}.")
    if bounds:
        say(f"Bounds found in the data: {', '.join(bounds)} (--bounds sets others).")


def _check_weights(name: str, fact: _Facts) -> None:
    if fact.low < 0 or fact.high <= 0:
        raise UserError(f"--weights {name}: weights have to be positive numbers, or 0.")


def _only_value(fact: _Facts) -> bool | int | float | str | None:
    if fact.categorical:
        return next(iter(fact.values)) if len(fact.values) == 1 else None
    if fact.low != fact.high:
        return None
    return int(fact.low) if fact.dtype.is_integer() else float(fact.low)


def _is_code(fact: _Facts, rows: int) -> bool:
    """Whether a column of fractions has so few values that it has no density: they stand for kinds."""
    return not fact.whole and len(fact.values) <= min(FEW_VALUES, rows // ROWS_A_LEVEL)


def _dtype(fact: _Facts) -> str:
    """The name of a polars type that values can be given back in."""
    name = str(fact.dtype.base_type())
    return "Float64" if name == "Decimal" else name


def _categorical(name: str, fact: _Facts, rows: int, settings: TableSettings) -> Column:
    count = len(fact.values)
    if name in settings.bounds:
        raise UserError(f"--bounds {name}: the column is categorical and has no bounds.")
    if count > MOST_CATEGORIES or (count > 20 and 2 * count > rows):
        many = f"more than {MOST_CATEGORIES}" if count > MOST_CATEGORIES else str(count)
        raise UserError(
            f"{name} has {many} different values in {rows} rows, as names or dates do: leave it out "
            f"with --exclude {name}, or turn it into numbers."
        )
    values = sorted(fact.values)
    if _dtype(fact) == "Enum":
        values = [value for value in fact.dtype.categories if value in fact.values]  # type: ignore
    return Column(name=name, kind="categorical", dtype=_dtype(fact), levels=count, categories=values)


def _number(name: str, fact: _Facts, values: NDArray[Any], rows: int, settings: TableSettings) -> Column:
    low, high = settings.limits(name)
    if (low is not None and fact.low < low) or (high is not None and fact.high > high):
        raise UserError(
            f"--bounds {name}={settings.bounds[name]}: its values go from {fact.low:g} to {fact.high:g}."
        )
    if max(-fact.low, fact.high) > LARGEST or fact.high - fact.low < 1 / LARGEST:
        raise UserError(
            f"{name} goes from {fact.low:g} to {fact.high:g}, beyond what its codes can hold: "
            "give it another unit."
        )
    values = values.astype(np.float64)
    if fact.whole and name not in settings.given:
        found = _few_levels(name, fact, rows, (low, high))
        if found is not None:
            return found
    if name not in settings.bounds:
        low, high = _natural_bounds(values + 0.5 * fact.whole, fact)
    if fact.whole and fact.high - fact.low <= WIDEST and name not in settings.given:
        offset, scale = float(np.median(values).round()), 1.0
        if high is not None and low is None:
            offset, scale = high, -1.0
        offset = offset if low is None else low
    else:
        offset, scale = _place(values, low, high)
    return Column(
        name=name,
        kind="integer" if fact.whole else "real",
        dtype=_dtype(fact),
        offset=offset,
        scale=scale,
        low=low,
        high=high,
    )


def _few_levels(name: str, fact: _Facts, rows: int, bounds: Bounds) -> Column | None:
    """An integer column with a cell for each level, and some more where it has no bound."""
    spread = int(fact.high - fact.low) + 1
    if spread > MOST_LEVELS or spread * ROWS_A_LEVEL > rows:
        return None
    low, high = bounds
    beyond = max(8, spread // 2)
    if low is None and 0 <= fact.low <= beyond:
        low = 0.0
    first = fact.low - beyond if low is None else math.ceil(low)
    last = fact.high + beyond if high is None else math.floor(high)
    if last - first > 4 * MOST_LEVELS:
        return None
    return Column(
        name=name,
        kind="integer",
        dtype=_dtype(fact),
        offset=first,
        levels=int(last - first) + 1,
        low=low,
        high=high,
    )


def _place(values: Array, low: float | None, high: float | None) -> tuple[float, float]:
    """Offset and scale of a column of numbers: codes are near 1, and above 0 where there is a bound."""
    middle = float(np.median(values))
    if low is not None and high is not None:
        return low, high - low
    if low is not None:
        return low, (middle - low) or float(values.mean() - low)
    if high is not None:
        return high, (middle - high) or float(values.mean() - high)
    quarter, three = np.quantile(values, [0.25, 0.75])
    return middle, float(three - quarter) / 1.35 or float(values.std()) or 1.0


def _natural_bounds(values: Array, fact: _Facts) -> Bounds:
    """Bounds such as 0 and 1 under which a Gaussian fits the transformed column clearly better."""
    middle, spread = _place(values, None, None)
    best: Bounds = (None, None)
    best_fit = choose_tail((values - middle) / spread)[1] - np.log(spread) + LEAST_GAIN
    for low, high in NATURAL_BOUNDS:
        assert low is not None
        if fact.low < low or not (high is None or low + NEAR * (high - low) <= fact.high <= high):
            continue
        fit = _bounded_fit(values, low, high)
        if fit > best_fit:
            best, best_fit = (low, high), fit + LEAST_GAIN
    return best


def _bounded_fit(values: Array, low: float, high: float | None) -> float:
    if high is None:
        x = np.maximum(values - low, 1e-6 * max(np.median(values) - low, 1e-300))
        return gaussian_fit(np.log(x), -np.log(x))
    p = ((values - low) / (high - low)).clip(1e-6, 1 - 1e-6)
    return gaussian_fit(np.log(p / (1 - p)), -np.log(p * (1 - p) * (high - low)))

"""What a table's columns are, found from its training rows in one pass, a chunk at a time."""

from __future__ import annotations

__all__ = ["choose_columns", "number_columns", "survey_table"]

from collections.abc import Iterable, Mapping

import numpy as np

from ciflows.errors import UserError
from ciflows.optional import polars as pl
from ciflows.progress import Say, silent
from ciflows.tables.circular import Circular
from ciflows.tables.column import MOST_NAMED, Column, Number, dtype_name
from ciflows.tables.dates import is_date
from ciflows.tables.facts import Facts, as_numbers
from ciflows.tables.functions import find_function, find_likely_function
from ciflows.tables.lattice import Lattice
from ciflows.tables.options import TableSettings
from ciflows.tables.real import SOME_TIED, Real
from ciflows.tables.schema import KINDS, AnyColumn, Constant, Schema, check_names
from ciflows.tables.text import NumberText

SAMPLE = 50_000  # rows from which bounds, atoms, middles and spreads are found
FAR = 5.0  # spreads from all other values that a repeated one has to be to look like a code for a gap
FEWEST_IDENTIFIERS = 50
MOST_ATOMS_SHOWN, MOST_REFUSED = 5, 5
MOST_COPIES, COPIED_SHARE = 10, 0.005  # rows, and share of them, that sampling makes of one row


def choose_columns(frame: pl.DataFrame, settings: TableSettings) -> list[str]:
    """The columns that matter, in the order of the file; refused where one cannot be used."""
    known = frame.columns
    for what in ("columns", "exclude", "given", "categorical", "bounds", "atoms", "step", "circular"):
        check_names(list(getattr(settings, what) or ()), known, what)
    alone = {"weights": settings.weights, "group": settings.group}
    for what, name in alone.items():
        check_names([name] if name else [], known, what)
    if settings.weights in settings.given:
        raise UserError(f"{settings.weights} cannot be both a weight and given.")
    special = [*settings.given, *(name for name in alone.values() if name)]
    chosen = [name for name in settings.columns or known if name not in settings.exclude]
    names = [name for name in known if name in (*chosen, *special)]
    if not [name for name in names if name not in special]:
        raise UserError("no column is left to model.")
    _check_dtypes(frame.select(names), settings)
    return names


def _check_dtypes(frame: pl.DataFrame, settings: TableSettings) -> None:
    kinds = frame.schema.items()
    times = [
        f"{name} ({dtype})"
        for name, dtype in kinds
        if dtype.is_temporal() and not is_date(dtype) and name != settings.group
    ]
    if times:
        raise UserError(
            f"times of day and durations have no density as they stand: {', '.join(times)}. Turn them "
            "into numbers, such as hours, or exclude them."
        )
    wrong = [f"{name} ({dtype})" for name, dtype in kinds if not _usable(dtype)]
    if wrong:
        raise UserError(f"columns that are neither numbers nor words: {', '.join(wrong)}.")
    large = [name for name, dtype in kinds if str(dtype) in ("Int128", "UInt128")]
    if large:
        raise UserError(f"128-bit integers cannot be modelled: convert or exclude {', '.join(large)}.")


def _usable(dtype: pl.DataType) -> bool:
    return dtype.is_numeric() or dtype.is_temporal() or _is_words(dtype)


def _is_words(dtype: pl.DataType) -> bool:
    return dtype in (pl.String, pl.Boolean, pl.Categorical, pl.Enum)


def number_columns(
    chunks: Iterable[pl.DataFrame], names: Iterable[str], settings: TableSettings
) -> list[str]:
    """Which columns of text are numbers with gaps spelt out; refused where some words are no gaps.

    Arguments:
        settings: Those said to be categorical stay text.
    """
    seen = {name: NumberText() for name in names if name not in (*settings.categorical, settings.group)}
    for chunk in chunks if seen else ():
        for name, text in seen.items():
            text.add(chunk[name])
    mixed = [
        f"{name} has {text.numbers:,} numbers and {text.words:,} words ({', '.join(text.examples)})"
        for name, text in seen.items()
        if text.is_mixed
    ]
    if mixed:
        raise UserError(
            f"{'; '.join(mixed)}. Replace the words by numbers or gaps, or name it as categorical."
        )
    return [name for name, text in seen.items() if text.is_number]


def survey_table(chunks: Iterable[pl.DataFrame], settings: TableSettings, say: Say = silent) -> Schema:
    """Find out what the columns of a table are; what is set aside or found is said.

    Arguments:
        chunks: Its training rows without gaps, some at a time, with the columns that matter.
    """
    facts: dict[str, Facts] = {}
    sample = _Sample()
    for chunk in chunks:
        if not facts:
            facts = _begin(chunk, settings)
        for name, fact in facts.items() if len(chunk) else ():
            fact.add(chunk[name])
        sample.add(chunk)
    if not facts or not next(iter(facts.values())).rows:
        raise UserError("the table is empty.")
    frame = _without_copies(sample.frame(), facts)
    for name, fact in facts.items():
        if not fact.words:
            fact.sample = as_numbers(_without_repeats(frame, fact, settings.group)[name])
    return _schema(facts, frame, settings, say)


def _without_copies(frame: pl.DataFrame, facts: Mapping[str, Facts]) -> pl.DataFrame:
    """A table without copies of rows, as sampling with replacement makes them: they are no atoms.

    A row is a copy if two columns with all their digits agree; one that is very frequent is none.
    """
    names = [name for name, fact in facts.items() if not fact.words and fact.decimals is None]
    if len(names) < 2:
        return frame
    often = pl.len().over(names) > max(MOST_COPIES, COPIED_SHARE * len(frame))
    return frame.filter(pl.struct(names).is_first_distinct() | often)


def _without_repeats(frame: pl.DataFrame, fact: Facts, group: str | None) -> pl.DataFrame:
    """A table in which a value with all its digits is once in each group: what a group shares."""
    if group is None or fact.decimals is not None:
        return frame
    return frame.unique([group, fact.name], keep="first", maintain_order=True)


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
        return pl.concat(self.parts)


def _begin(chunk: pl.DataFrame, settings: TableSettings) -> dict[str, Facts]:
    facts = {
        name: Facts(name, dtype, _is_words(dtype) or name in settings.categorical)
        for name, dtype in chunk.schema.items()
        if name != settings.group
    }
    if settings.weights and facts[settings.weights].words:
        raise UserError(f"weights {settings.weights}: weights have to be numbers.")
    return facts


def _schema(facts: dict[str, Facts], frame: pl.DataFrame, settings: TableSettings, say: Say) -> Schema:
    constants, refused = [], []
    columns: dict[str, AnyColumn] = {}
    for name, fact in facts.items():
        if name == settings.weights:
            _check_weights(fact)
        elif len(fact.values) == 1:
            constants.append(Constant(name=name, dtype=dtype_name(fact), value=_plain(fact)))
        else:
            try:
                columns[name] = _recognise(fact, settings)
            except UserError as error:
                refused.append(str(error))
    if refused:
        raise UserError(" ".join(refused[:MOST_REFUSED]))
    if constants:
        values = ", ".join(f"{constant.name} = {constant.shown}" for constant in constants)
        say(f"Left out, because constant: {values}.")
    if not [name for name in columns if name not in settings.given]:
        raise UserError("no column is left to model.")
    _check_functions(frame, facts, columns, settings, say)
    copies = [f"{name} (of {first})" for name, first in _copies(frame, columns).items()]
    if copies:
        say(f"Copies of other columns: {', '.join(copies)}. Exclude them: they add nothing.")
    say(_kinds_in_words(columns))
    for sentence in _findings(facts, columns, settings):
        say(sentence)
    return Schema(
        columns=tuple(column for name, column in columns.items() if name not in settings.given),
        given=tuple(columns[name] for name in settings.given if name in columns),
        constants=tuple(constants),
        weights=settings.weights,
        order=tuple(name for name in facts if name != settings.weights),
    )


def _recognise(fact: Facts, settings: TableSettings) -> AnyColumn:
    """The column as the first kind that it is one of."""
    found = (kind.recognise(fact, settings) for kind in KINDS)
    return next(column for column in found if column is not None)


def _plain(fact: Facts) -> bool | int | float | str:
    (value,) = fact.values
    if fact.words:
        return value
    if fact.dates:
        return fact.low
    return int(value) if fact.dtype.is_integer() else float(value)


def _check_weights(fact: Facts) -> None:
    if fact.low < 0 or fact.high <= 0:
        raise UserError(f"weights {fact.name}: weights have to be positive numbers, or 0.")


def _check_functions(
    frame: pl.DataFrame,
    facts: Mapping[str, Facts],
    columns: dict[str, AnyColumn],
    settings: TableSettings,
    say: Say,
) -> None:
    """Refuse a column that has a density by itself, but none beside the columns that determine it.

    Where that happens in some rows only, and its values have few decimals, it becomes a lattice: values
    in steps may well agree, and have probabilities.
    """
    numbers = {n: as_numbers(frame[n]) for n, column in columns.items() if isinstance(column, Number)}
    targets = {
        n: column.has_density(numbers[n]) for n, column in columns.items() if isinstance(column, Real)
    }
    while (found := find_function(numbers, targets)) is not None:
        name, step = found.name, facts[found.name].recorded_step
        instead = f", or put {found.instead} in its place" if found.instead else ""
        if found.share == 1 or not step or name in settings.step:
            raise UserError(
                f"{name} is determined by {', '.join(found.of)} ({found.formula}): there is no "
                f"density of both. Exclude {name}{instead}."
            )
        stepped = settings.model_copy(update={"step": {**settings.step, name: step}})
        columns[name] = _recognise(facts[name], stepped)
        del targets[name]
    likely = find_likely_function(numbers, targets)
    if likely is not None:
        say(
            f"{likely.name} looks determined by {' and '.join(likely.of)}: if it is, there is no "
            f"density of all three, and no likelihood. Exclude {likely.name} then."
        )


def _copies(frame: pl.DataFrame, columns: Mapping[str, Column]) -> dict[str, str]:
    """Columns that equal another in all rows, with its name; those with a density are refused before."""
    seen: dict[bytes, str] = {}
    found = {}
    for name, column in columns.items():
        number = isinstance(column, Number)
        values = as_numbers(frame[name]).tobytes() if number else repr(frame[name].to_list()).encode()
        if values in seen:
            found[name] = seen[values]
        seen.setdefault(values, name)
    return found


def _findings(
    facts: Mapping[str, Facts], columns: Mapping[str, Column], settings: TableSettings
) -> list[str]:
    """What was found in the columns that their types do not say, a sentence for each kind of finding."""
    atoms, steps, bounds, few, far, names = [], [], [], [], [], []
    grids, ties, turns = [], [], []
    for name, column in columns.items():
        fact = facts[name]
        if isinstance(column, Number):
            atoms += (
                [_atoms_in_words(fact, column)] if column.atoms and name not in settings.atoms else []
            )
            known = name in settings.bounds or name in settings.circular
            found = (column.low, column.high) != (None, None) and not known
            ends = ("" if end is None else column.show(end) for end in (column.low, column.high))
            bounds += [f"{name} {':'.join(ends)}"] if found and not column.levels else []
            grids += [f"{name} to {column.grid:g}"] if column.grid else []
            outer = dict.fromkeys([*column.atoms[:2], *column.atoms[-2:]])
            far += [f"{name} {column.show(atom)}" for atom in outer if _is_far(fact, atom)]
            if isinstance(column, Circular) and fact.high - fact.low > column.period:
                turns += [f"{name} from {fact.low:g} to {fact.high:g}"]
        elif not fact.words:
            few.append(f"{name} ({column.levels} values)")
        if isinstance(column, Real) and name not in settings.given:
            tied = column.tied(fact.sample)
            ties += [f"{name} ({tied:.1%} of the rows)"] if tied > SOME_TIED else []
        if isinstance(column, Lattice):
            said = column.step == 1 or name in settings.step
            steps += [] if said else [f"{name} {column.spacing}"]
            names += [name] if _is_identifier(fact) else []
    return [
        f"{what}: {', '.join(found)}{then}"
        for what, found, then in (
            ("Numbers with few values, taken for categories", few, "."),
            ("Atoms, repeated values with a probability", atoms, ". To change: atoms."),
            ("Steps, with a probability each", steps, ". To change: step; 0 asks for a density."),
            ("Partly rounded, with probabilities there", grids, ". To change: step."),
            ("Repeated values, still modelled as a density", ties, "."),
            ("More than once around the circle", turns, ": is its period right?"),
            ("Bounds found in the data", bounds, ". To change: bounds."),
            ("Repeated far from all other values, perhaps codes for missing ones", far, "."),
            ("Whole numbers, all different, perhaps identifiers", names, ". Exclude those that are."),
        )
        if found
    ]


def _kinds_in_words(columns: Mapping[str, AnyColumn]) -> str:
    """How many columns there are of each kind, and which."""
    kinds: dict[str, list[str]] = {}
    for name, column in columns.items():
        kinds.setdefault(column.kind, []).append(name)
    found = []
    for kind, names in kinds.items():
        shown = ", ".join([*names[:MOST_NAMED], "..."] if len(names) > MOST_NAMED else names)
        found.append(f"{len(names)} {kind} ({shown})")
    return f"Columns: {', '.join(found)}."


def _atoms_in_words(fact: Facts, column: Number) -> str:
    """The most frequent atoms of a column with their shares, and how many others there are."""
    sample = column.exact(fact.sample)
    shares = {atom: float((sample == atom).mean()) for atom in column.atoms}
    often = sorted(sorted(shares, key=shares.__getitem__)[-MOST_ATOMS_SHOWN:])
    shown = ", ".join(f"{column.show(atom)} ({shares[atom]:.1%})" for atom in often)
    more = len(shares) - len(often)
    rest = sum(shares.values()) - sum(shares[atom] for atom in often)
    return f"{fact.name} {shown}" + (f" and {more:,} others ({rest:.1%})" if more else "")


def _is_far(fact: Facts, atom: float) -> bool:
    rest = fact.sample[fact.sample != atom]
    quarter, three = np.quantile(rest, [0.05, 0.95])
    width = max(three - quarter, 1e-300)
    return bool(np.abs(rest - atom).min() > FAR * width)


def _is_identifier(fact: Facts) -> bool:
    enough = len(fact.sample) >= FEWEST_IDENTIFIERS
    return enough and fact.whole and not fact.dates and len(fact.counts[0]) == len(fact.sample)

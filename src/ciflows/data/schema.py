"""What the columns of a table are, and how their values become the numbers that a flow sees.

Every column of interest is real, an integer or categorical. Values become codes: (value - offset) /
scale, computed in double precision and kept in single, since a code is near 1; the levels 0, 1, ...
where a column is modelled level by level. A table's schema is all that is needed to make codes from
values, to make values from codes, and to check that another table is of the same kind.
"""

from __future__ import annotations

__all__ = ["PLAIN_TABLE", "Column", "Constant", "Schema", "TableSettings"]

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, field_validator
from torch import Tensor

from ciflows.errors import UserError, nearest
from ciflows.rows import Rows
from ciflows.settings import Settings

if TYPE_CHECKING:
    import polars as pl

Array = NDArray[Any]
Bounds = tuple[float | None, float | None]
MOST_NAMED = 5


class TableSettings(Settings):
    """Which columns of a table are modelled, and how."""

    columns: list[str] | None = Field(None, description="columns to take; all if not given")
    exclude: list[str] = Field([], description="columns to leave out")
    given: list[str] = Field([], description="columns to condition on: p(the rest | these)")
    weights: str | None = Field(None, description="column with the weight of each row")
    bounds: dict[str, str] = Field({}, description="limits of columns, such as age = '0:120'")
    categorical: list[str] = Field([], description="columns of numbers that are only names")
    missing: Literal["refuse", "drop"] = Field("refuse", description="what to do with gaps")

    @field_validator("columns", "exclude", "given", "categorical", mode="before")
    @classmethod
    def _words(cls, value: Any) -> Any:
        """A list, also as one word with commas."""
        return value.split(",") if isinstance(value, str) else value

    def limits(self, name: str) -> Bounds:
        """The limits given for a column, each of them perhaps None."""
        text = self.bounds.get(name, ":")
        low, colon, high = text.partition(":")
        try:
            first, last = (float(end) if end.strip() else None for end in (low, high))
            if not colon or (first is not None and last is not None and not first < last):
                raise ValueError
        except ValueError:
            raise UserError(f"--bounds {name}={text}: write them as LOW:HIGH, LOW: or :HIGH.") from None
        return first, last


PLAIN_TABLE = TableSettings.model_validate({})


class Column(Settings):
    """One column: what it holds, and how it is coded.

    Attributes:
        name: Its name.
        kind: What its values are.
        dtype: Its type in the file, for the tables that are given back.
        offset: What is taken off a number.
        scale: What the rest is divided by; negative where the only bound is an upper one.
        low: The smallest possible value; None where there is none.
        high: The largest possible value.
        levels: Number of levels, where it is modelled level by level.
        categories: The values in the order of their levels, where it is categorical.
    """

    name: str
    kind: Literal["real", "integer", "categorical"]
    dtype: str
    offset: float = 0.0
    scale: float = 1.0
    low: float | None = None
    high: float | None = None
    levels: int | None = None
    categories: list[bool | int | float | str] | None = None

    @property
    def dequantised(self) -> bool:
        """Whether it is an integer of too many levels for a cell each, but few enough to tell apart."""
        return self.kind == "integer" and self.levels is None and abs(self.scale) == 1

    @property
    def width(self) -> float | None:
        """The code of the far bound, where there are two; whole numbers reach to the next one."""
        if self.low is None or self.high is None:
            return None
        return (self.high - self.low + self.dequantised) / abs(self.scale)

    def encode(self, values: pl.Series) -> Array:
        """Values as codes (rows,) in single precision."""
        if self.categories is not None:
            return self._levels(values)
        numbers = values.to_physical().cast(_float64()).to_numpy()
        if self.levels is not None or self.dequantised:
            self._check_whole(numbers)
        codes = (numbers - self.offset) / self.scale
        if self.levels is not None:
            bottom = -np.inf if self.low is not None else 0
            codes = codes.clip(bottom, np.inf if self.high is not None else self.levels - 1)
        return np.asarray(codes, dtype=np.float32)

    def decode(self, codes: Array) -> pl.Series:
        """Codes (rows,) as values of the file's own type, inside the bounds."""
        import polars as pl

        if self.categories is not None:
            found = [self.categories[int(code)] for code in codes]
            return pl.Series(self.name, found).cast(self._type())
        values = codes.astype(np.float64) * self.scale + self.offset
        if self.kind == "integer":
            # a dequantised integer has been rounded down already, and its code is whole
            values = values.round()
        values = values.clip(
            -np.inf if self.low is None else self.low, np.inf if self.high is None else self.high
        )
        return pl.Series(self.name, _inside(values, self.dtype)).cast(self._type())

    def context(self, values: pl.Series) -> Array:
        """Values as numbers (rows, n) to condition on: one of n for a category, tamed for a number."""
        codes = self.encode(values)
        if self.categories is not None:
            return np.eye(len(self.categories), dtype=np.float32)[codes.astype(int)]
        return np.arcsinh(codes)[:, None]

    def _check_whole(self, numbers: Array) -> None:
        broken = numbers[numbers != numbers.round()]
        if len(broken):
            raise UserError(
                f"{self.name} had whole numbers in training, and now has {broken[0]:g}: give it to the "
                "training too, or round it."
            )

    def _levels(self, values: pl.Series) -> Array:
        import polars as pl

        assert self.categories is not None
        known = pl.Series(self.categories).cast(pl.String)
        words = values.cast(pl.String)
        new = words.filter(~words.is_in(known.implode())).unique(maintain_order=True).to_list()
        if new:
            more = ", ..." if len(new) > MOST_NAMED else ""
            raise UserError(
                f"{self.name} has values that were not there in training: "
                f"{', '.join(map(str, new[:MOST_NAMED]))}{more}."
            )
        places = words.replace_strict(known, pl.Series(range(len(known))), return_dtype=pl.Int64)
        return places.to_numpy().astype(np.float32)

    def _type(self) -> Any:
        import polars as pl

        if self.dtype == "Enum":
            return pl.Enum([str(value) for value in self.categories or ()])
        return getattr(pl, self.dtype)


class Constant(Settings):
    """A column that has one value only: set aside in training, and given back with samples."""

    name: str
    dtype: str
    value: bool | int | float | str


class Schema(Settings):
    """All columns of a table that matter.

    Attributes:
        columns: Those that are modelled, in the order of a flow's features.
        given: Those that are conditioned on.
        constants: Those that have one value only.
        weights: The one with the rows' weights.
        order: The names of all but the weights, as they stand in the file.
    """

    columns: tuple[Column, ...]
    given: tuple[Column, ...] = ()
    constants: tuple[Constant, ...] = ()
    weights: str | None = None
    order: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the modelled columns."""
        return tuple(column.name for column in self.columns)

    @property
    def context_features(self) -> int:
        """Size of what the density is conditioned on."""
        return sum(len(column.categories or "x") for column in self.given)

    def needed(self, weights: bool = False) -> list[str]:
        """The columns that a table must have to be scored, or to be trained on."""
        names = [column.name for column in [*self.columns, *self.given]]
        return [*names, self.weights] if weights and self.weights else names

    def encode(self, frame: pl.DataFrame, weights: bool = False) -> Rows:
        """A table's rows as codes, checked: other columns than those needed may hold anything."""
        check_columns(frame, self.needed(weights))
        self._check_types(frame)
        check_gaps(frame, self.needed(weights))
        x = np.stack([column.encode(frame[column.name]) for column in self.columns], axis=1)
        weight = None
        if weights and self.weights:
            weight = torch.from_numpy(frame[self.weights].cast(_float64()).to_numpy(writable=True))
        return Rows(torch.from_numpy(x), self.encode_given(frame), weight)

    def encode_given(self, frame: pl.DataFrame) -> Tensor | None:
        """What a table's rows are conditioned on: (rows, context_features)."""
        if not self.given:
            return None
        names = [column.name for column in self.given]
        check_columns(frame, names)
        self._check_types(frame.select(names))
        check_gaps(frame, names)
        parts = [column.context(frame[column.name]) for column in self.given]
        return torch.from_numpy(np.concatenate(parts, axis=1))

    def decode(self, x: Tensor, given: pl.DataFrame | None = None) -> pl.DataFrame:
        """Codes (rows, features) as a table with all columns of the file, beside those given."""
        import polars as pl

        codes = x.cpu().numpy()
        series = {c.name: c.decode(codes[:, i]) for i, c in enumerate(self.columns)}
        for constant in self.constants:
            value = pl.Series(constant.name, [constant.value])
            series[constant.name] = value.cast(getattr(pl, constant.dtype)).new_from_index(0, len(x))
        if given is not None:
            series |= {column.name: given[column.name] for column in self.given}
        return pl.DataFrame([series[name] for name in self.order if name in series])

    def _check_types(self, frame: pl.DataFrame) -> None:
        wrong = [
            f"{column.name} ({frame.schema[column.name]})"
            for column in [*self.columns, *self.given]
            if column.name in frame.columns
            and column.kind != "categorical"
            and not frame.schema[column.name].is_numeric()
        ]
        if wrong:
            raise UserError(
                f"columns that were numbers in training and are not now: {', '.join(wrong)}."
            )


def check_columns(frame: pl.DataFrame, names: Sequence[str]) -> None:
    """Refuse a table that lacks some columns."""
    missing = [name for name in names if name not in frame.columns]
    if missing:
        columns = f"column{'s' * (len(missing) > 1)} {', '.join(missing)}"
        raise UserError(f"lacks the {columns}; it has {', '.join(frame.columns)}.")


def check_gaps(frame: pl.DataFrame, names: Sequence[str]) -> None:
    """Refuse a table with gaps in some columns."""
    counts = count_gaps(frame.select(names))
    if counts:
        found = ", ".join(f"{name} ({count})" for name, count in counts.items())
        raise UserError(f"missing or infinite values in {found}.")


def count_gaps(frame: pl.DataFrame) -> dict[str, int]:
    """How many values of each column are missing, not a number or infinite; only where some are."""
    counts = frame.select([(~there).sum() for there in filled(frame)])
    return {name: count for name, count in counts.row(0, named=True).items() if count}


def filled(frame: pl.DataFrame) -> list[pl.Expr]:
    """Expressions that are true, column by column, where there is a value."""
    import polars as pl

    return [
        pl.col(name).is_finite().fill_null(False) if dtype.is_float() else pl.col(name).is_not_null()
        for name, dtype in frame.schema.items()
    ]


def check_names(names: Sequence[str], known: Sequence[str], what: str) -> None:
    """Refuse names of columns that are not there."""
    for name in names:
        if name not in known:
            raise UserError(f"{what}: there is no column {name!r}. {nearest(name, known)}")


def _float64() -> Any:
    import polars as pl

    return pl.Float64


def _inside(values: Array, dtype: str) -> Array:
    """Whole numbers that fit into a type of integers."""
    if "Int" not in dtype:
        return values
    info = np.iinfo(dtype.lower())
    # the largest 64-bit integers are no floats: the float below them is
    return values.clip(float(info.min), np.nextafter(float(info.max), 0)).astype(dtype.lower())

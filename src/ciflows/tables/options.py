"""What you may say about a table's columns; whatever you leave out is found from the data."""

from __future__ import annotations

__all__ = ["PLAIN_TABLE", "Bounds", "TableSettings"]

import math
from shlex import quote
from typing import Any, Literal

from pydantic import Field, field_validator

from ciflows.errors import UserError
from ciflows.settings import Settings

Bounds = tuple[float | None, float | None]
FARTHEST = 1e100  # a bound beyond which squares of distances leave float64


class TableSettings(Settings):
    """Which columns of a table are modelled, and how."""

    columns: list[str] | None = Field(None, description="columns to take; all if not given")
    exclude: list[str] = Field([], description="columns to leave out")
    given: list[str] = Field([], description="columns to condition on: p(the rest | these)")
    weights: str | None = Field(None, description="column with the weight of each row")
    group: str | None = Field(
        None, description="column whose equal values stay together in the split; it is not modelled"
    )
    bounds: dict[str, str] = Field({}, description="limits of columns, such as age = '0:120'")
    atoms: dict[str, str] = Field(
        {}, description="values with a probability of their own, such as spend = '0'; 'none' for none"
    )
    step: dict[str, float] = Field(
        {}, description="distance between a column's values, such as price = 0.05; 0 for a density"
    )
    circular: dict[str, str] = Field(
        {}, description="columns whose values wrap around, such as hour = '0:24'"
    )
    categorical: list[str] = Field([], description="columns of numbers that are only names")
    missing: Literal["refuse", "drop"] = Field("refuse", description="what to do with gaps")

    @field_validator("columns", "exclude", "given", "categorical", mode="before")
    @classmethod
    def _words(cls, value: Any) -> Any:
        """A list, also as one word with commas."""
        return value.split(",") if isinstance(value, str) else value

    def limits(self, name: str) -> Bounds:
        """The limits of a column that you gave, each of them perhaps None."""
        text = self.bounds.get(name, ":")
        found = _ends(text)
        if found is None:
            raise UserError(f"bounds {name}={text}: write them as LOW:HIGH, LOW: or :HIGH.")
        ends = [None if end is None or math.isinf(end) else end for end in found]
        if any(end is not None and abs(end) > FARTHEST for end in ends):
            raise UserError(f"bounds {name}={text}: leave out a bound beyond {FARTHEST:g}.")
        return ends[0], ends[1]

    def ends_of(self, name: str) -> tuple[float, float] | None:
        """Where the values of a circular column begin and wrap around; None if it is not circular."""
        text = self.circular.get(name)
        if text is None:
            return None
        low, high = _ends(text) or (None, None)
        if low is None or high is None or not math.isfinite(high - low):
            raise UserError(f"circular {name}={text}: write it as LOW:HIGH, such as 0:24.")
        return low, high

    def atoms_of(self, name: str) -> tuple[float, ...] | None:
        """The atoms of a column that you gave; None where the data decide."""
        text = self.atoms.get(name)
        if text is None or text.strip().lower() == "none":
            return None if text is None else ()
        try:
            values = sorted({float(word) for word in text.split(",")})
            if not all(map(math.isfinite, values)):
                raise ValueError
        except ValueError:
            raise UserError(
                f"atoms {name}={text}: write numbers with commas between them, or none."
            ) from None
        return tuple(values)

    def step_of(self, name: str) -> float | None:
        """The step of a column that you gave; 0 for a density, None where the data decide."""
        step = self.step.get(name)
        if step is not None and not (0 <= step < math.inf):
            raise UserError(f"step {name}={step:g}: a step is a positive number, or 0 for a density.")
        return step

    def as_options(self) -> list[str]:
        """What differs from the defaults, as options of the command line, quoted."""
        found = []
        for option, value in self.model_dump(exclude_defaults=True).items():
            values = [f"{k}={v}" for k, v in value.items()] if isinstance(value, dict) else [value]
            words = [",".join(each) if isinstance(each, list) else each for each in values]
            found += [f"--{option} {quote(word)}" for word in words]
        return found


def _ends(text: str) -> Bounds | None:
    """The ends in LOW:HIGH, in ascending order; None where it is written in another way."""
    low, colon, high = text.partition(":")
    try:
        first, last = (float(end) if end.strip() else None for end in (low, high))
    except ValueError:
        return None
    wrong = first is not None and last is not None and not first < last
    return None if wrong or not colon else (first, last)


PLAIN_TABLE = TableSettings.model_validate({})

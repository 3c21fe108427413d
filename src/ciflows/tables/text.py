"""Numbers that a file holds as text, with gaps spelt in one of the usual ways."""

from __future__ import annotations

__all__ = ["GAPS", "NumberText", "numbers_from_text", "without_gaps"]

from dataclasses import dataclass, field

from ciflows.optional import polars as pl

GAPS = (
    *("", "na", "n/a", "n.a.", "<na>", "#n/a", "#na", "nan", "null", "none", "nil", "missing", "?", "-"),
    *("--", ".", "undefined", "#value!", "#div/0!", "#num!", "#ref!", "#null!", "#name?"),  # Excel's own
)
MOST_WORDS = 5


def numbers_from_text(values: pl.Series) -> pl.Series | None:
    """A column of text as numbers, with nulls for gaps; None where some of it is neither.

    Columns that are no text stay as they are.

    Example:
        >>> import polars as pl
        >>> numbers_from_text(pl.Series(["1", " 2.5", "n/a"])).to_list()
        [1.0, 2.5, None]
        >>> numbers_from_text(pl.Series(["1", "two"])) is None
        True
    """
    if values.dtype != pl.String:
        return values
    text = without_gaps(values)
    numbers = text.cast(pl.Float64, strict=False)
    return None if numbers.null_count() > text.null_count() else numbers


def without_gaps(values: pl.Series) -> pl.Series:
    """Text without spaces around it, and with nulls where it spells a gap."""
    text = values.str.strip_chars()
    is_gap = text.str.to_lowercase().is_in(list(GAPS))
    return text.set(is_gap.fill_null(False), pl.Series([None], dtype=pl.String)[0])


@dataclass
class NumberText:
    """What a column of text holds, chunk by chunk: numbers, gaps, and words that are neither."""

    numbers: int = 0
    words: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, values: pl.Series) -> None:
        """Count in some more values."""
        text = without_gaps(values).drop_nulls()
        numbers = text.cast(pl.Float64, strict=False)
        self.numbers += len(text) - numbers.null_count()
        self.words += numbers.null_count()
        if numbers.null_count() and len(self.examples) < MOST_WORDS:
            found = text.filter(numbers.is_null()).unique(maintain_order=True).to_list()
            self.examples = list(dict.fromkeys([*self.examples, *found]))[:MOST_WORDS]

    @property
    def is_number(self) -> bool:
        """Whether all that is no gap is a number."""
        return self.numbers > 0 and self.words == 0

    @property
    def is_mixed(self) -> bool:
        """Whether it is a column of numbers with some words in it."""
        return 0 < self.words < self.numbers

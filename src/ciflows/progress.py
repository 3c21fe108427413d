"""How long work shows you where it is: in sentences, by counting its pieces, in a line of bars."""

from __future__ import annotations

__all__ = ["Say", "Watch", "silent", "sparkline", "unwatched"]

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

Say = Callable[[str], None]
BARS = "▁▂▃▄▅▆▇█"
T = TypeVar("T")


class Watch(Protocol):
    """Passes pieces on one by one, and shows how many have gone by."""

    def __call__(self, chunks: Iterable[T], what: str) -> Iterable[T]: ...


def silent(message: str) -> None:
    """Say nothing."""


def unwatched(chunks: Iterable[T], what: str) -> Iterable[T]:
    """Show nothing."""
    return chunks


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """Values as a line of bars, the last of each stretch where there are too many.

    The scale begins at the lowest value after the first tenth: a steep start would flatten the rest.

    Example:
        >>> sparkline([-9.0, -3.0, -2.0, -1.0, 0.0])
        '▁▁▃▆█'
    """
    values = [value for value in values if math.isfinite(value)]
    count = min(width, len(values))
    shown = [values[(k + 1) * len(values) // count - 1] for k in range(count)]
    start = max(len(values) // 10, int(len(values) > 2))
    low, high = min(values[start:], default=0.0), max(values, default=0.0)
    heights = [(value - low) / (high - low) if high > low else 1.0 for value in shown]
    return "".join(BARS[round(max(0.0, height) * (len(BARS) - 1))] for height in heights)

"""Things that have something in common, put together."""

from __future__ import annotations

__all__ = ["grouped"]

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

T = TypeVar("T")


def grouped(items: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    """The items with one key together, both in the order in which they came.

    Example:
        >>> grouped(["a", "bc", "d"], len)
        [['a', 'd'], ['bc']]
    """
    groups: dict[Hashable, list[T]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return list(groups.values())

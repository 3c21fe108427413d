"""Two lines of work at once, where a GPU records what it does: nothing waits for the second but the end.

Small networks leave most of a GPU idle. A prior's log p(u | z) is needed in a sum alone, so it need not
hold up the layers that follow it; nor, on the way back, its gradients those of the layers.
"""

from __future__ import annotations

__all__ = ["beside", "rejoin", "two_lines"]

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class _Lines:
    """The second line's stream, and what it was given: not to be written over while it may be read."""

    second: torch.cuda.Stream
    given: list[Tensor] = field(default_factory=list)


_lines: ContextVar[_Lines | None] = ContextVar("lines", default=None)


@contextmanager
def two_lines(second: torch.cuda.Stream) -> Iterator[None]:
    """Let `beside` have a stream of its own for a while; at the end of it both lines are one again.

    A way back through what was done here belongs inside.
    """
    token = _lines.set(_Lines(second))
    try:
        yield
        rejoin()
    finally:
        _lines.reset(token)


@contextmanager
def beside(*given: Tensor) -> Iterator[None]:
    """Work that only `rejoin` waits for, where there are two lines.

    Arguments:
        given: All tensors of the first line that the work uses.
    """
    lines = _lines.get()
    if lines is None or torch.cuda.current_stream() == lines.second:
        yield
        return
    lines.given += given
    lines.second.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(lines.second):
        yield


def rejoin() -> None:
    """Wait for what was done beside, if anything was."""
    lines = _lines.get()
    if lines is not None and lines.given and torch.cuda.current_stream() != lines.second:
        torch.cuda.current_stream().wait_stream(lines.second)

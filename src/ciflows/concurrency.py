"""Two lines of work at once, where a GPU records what it does: nothing waits for the second but the end.

Small networks leave most of a GPU idle. A prior's log p(u | z) is needed in a sum alone, so it need not
hold up the layers that follow it; nor, on the way back, its gradients those of the layers.
"""

from __future__ import annotations

__all__ = ["beside", "called", "rejoin", "two_lines"]

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class _Lines:
    """The second line's stream, what it was given, and who may give it more.

    Attributes:
        second: The stream.
        given: Tensors of the first line: not to be written over while the second may read them.
        caller: The layer whose log-weight is waited for by `rejoin` alone.
    """

    second: torch.cuda.Stream
    given: list[Tensor] = field(default_factory=list)
    caller: object = None

    @property
    def is_first(self) -> bool:
        return bool(torch.cuda.current_stream() != self.second)


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
def called(caller: object) -> Iterator[None]:
    """Let one layer, and none of those inside it, leave its log-weight to the second line.

    Whoever calls it so adds log-weights up `beside`, and waits with `rejoin` before the sum is used.
    """
    lines = _lines.get()
    if lines is None:
        yield
        return
    before, lines.caller = lines.caller, caller
    try:
        yield
    finally:
        lines.caller = before


@contextmanager
def beside(caller: object, *given: Tensor | None) -> Iterator[None]:
    """Work that only `rejoin` waits for, where there are two lines and the caller may use the second.

    Arguments:
        caller: Who asks.
        given: All tensors of the first line that the work uses.
    """
    lines = _lines.get()
    if lines is None or lines.caller is not caller or not lines.is_first:
        yield
        return
    lines.given += [tensor for tensor in given if tensor is not None]
    lines.second.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(lines.second):
        yield


def rejoin() -> None:
    """Wait for what was done beside, if anything was."""
    lines = _lines.get()
    if lines is not None and lines.given and lines.is_first:
        torch.cuda.current_stream().wait_stream(lines.second)

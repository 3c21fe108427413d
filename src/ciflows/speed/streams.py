"""A second CUDA stream for log p(u | z), where a training step is captured.

Small networks leave most of a GPU idle. A prior's log-density only enters a sum, so the layers that
follow need not wait for it; nor, in the backward pass, their gradients for those of the prior.
"""

from __future__ import annotations

__all__ = ["add", "encode_part", "log_weight", "two_streams"]

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class _Streams:
    """The second stream, and who may use it.

    Attributes:
        second: The stream.
        held: Tensors of the first stream that the second may still read: their memory is not reused.
        layer: The layer whose log-weight only `add` waits for.
    """

    second: torch.cuda.Stream
    held: list[Tensor] = field(default_factory=list)
    layer: object = None

    @property
    def is_first(self) -> bool:
        return bool(torch.cuda.current_stream() != self.second)

    @contextmanager
    def aside(self, *tensors: Tensor | None) -> Iterator[None]:
        """Work on the second stream, with these tensors of the first."""
        self.held += [tensor for tensor in tensors if tensor is not None]
        self.second.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.second):
            yield

    def join(self) -> None:
        """Let the first stream wait for the second."""
        if self.held:
            torch.cuda.current_stream().wait_stream(self.second)


_streams: ContextVar[_Streams | None] = ContextVar("streams", default=None)


@contextmanager
def two_streams(second: torch.cuda.Stream) -> Iterator[None]:
    """Use a second stream for a while, for a forward pass and its backward; at the end both join."""
    streams = _Streams(second)
    token = _streams.set(streams)
    try:
        yield
        streams.join()
    finally:
        _streams.reset(token)


def encode_part(plain: Callable[..., Any], part: object, *args: Any) -> Any:
    """A flow's pass through one part: this layer, and none inside it, may use the second stream."""
    streams = _streams.get()
    if streams is None:
        return plain(part, *args)
    before, streams.layer = streams.layer, part
    try:
        return plain(part, *args)
    finally:
        streams.layer = before


def log_weight(plain: Callable[..., Tensor], layer: object, *args: Any) -> Tensor:
    """`Indexed._log_weight`, on the second stream where the flow itself called the layer."""
    streams = _streams.get()
    if streams is None or streams.layer is not layer or not streams.is_first:
        return plain(layer, *args)
    with streams.aside(*(each for each in args if isinstance(each, Tensor))):
        return plain(layer, *args)


def add(plain: Callable[..., Tensor], log_weights: Sequence[Tensor]) -> Tensor:
    """A flow's sum of log-weights, which waits for both streams."""
    streams = _streams.get()
    if streams is None or not streams.held or not streams.is_first:
        return plain(log_weights)
    with streams.aside(*log_weights):
        total = plain(log_weights)
    streams.join()
    return total

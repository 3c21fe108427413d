"""The contract that every layer keeps.

A flow is a flat list of layers. Each maps the data side to the noise side and back:

    encode(x) -> (z, log_weight)        decode(z) -> x

with one promise: p(z) exp(log_weight) is an unbiased estimate of p(x). For a bijection it is exact and
log_weight is the log-determinant log|det Dz/Dx|; for an indexed layer it holds on average over its draw
of u (the paper's Algorithm 1).

What a layer takes from data at the start, such as a normalisation, it takes in `initialise`, never in
`encode`.
"""

from __future__ import annotations

__all__ = [
    "Bijection",
    "Layer",
    "Shape",
    "as_shape",
    "beside_event",
    "check_halves",
    "check_order",
    "check_shape",
    "halves",
    "join",
    "leading_shape",
    "sum_event",
]

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from ciflows.noise import Noise

Shape = tuple[int, ...]


def check_shape(value: Tensor, shape: Shape, what: str) -> None:
    """Refuse a tensor whose last dimensions are not `shape`."""
    if value.ndim < len(shape) or tuple(value.shape[value.ndim - len(shape) :]) != shape:
        wanted = ", ".join(["*", *map(str, shape)])
        raise ValueError(f"{what}: expected shape ({wanted}); got {tuple(value.shape)}.")


def check_order(order: Tensor, what: str) -> None:
    """Refuse indices (d,) that do not name each of 0, ..., d - 1 once."""
    if order.ndim != 1 or sorted(order.tolist()) != list(range(len(order))) or not len(order):
        raise ValueError(f"{what}: expected each of 0, ..., d - 1 once; got {order.tolist()}.")


def as_shape(size: int | Shape) -> Shape:
    """The shape of vectors of so many features; a shape as it is."""
    return (size,) if isinstance(size, int) else tuple(size)


def leading_shape(value: Tensor, shape: Shape) -> torch.Size:
    """The dimensions * of a value (*, shape)."""
    return value.shape[: value.ndim - len(shape)]


def sum_event(value: Tensor, shape: Shape) -> Tensor:
    """Sum a value (*, shape) over all of its shape's dimensions: (*)."""
    return value.sum(tuple(range(-len(shape), 0)))


def beside_event(value: Tensor, shape: Shape) -> Tensor:
    """A value (*) with a dimension of size 1 for each of a shape's, so that it multiplies (*, shape)."""
    return value.reshape(*value.shape, *[1] * len(shape))


def check_halves(output: Tensor, shape: Shape, what: str) -> Tensor:
    """A network's output (*, 2 c, ...), which stands for two values of shape (c, ...).

    Checked, since an output of another size might broadcast, to a wrong likelihood.
    """
    check_shape(output, (2 * shape[0], *shape[1:]), f"{what}, its network's output")
    return output


def halves(output: Tensor, shape: Shape, what: str) -> tuple[Tensor, Tensor]:
    """Part a network's output (*, 2 c, ...) into two values of shape (c, ...)."""
    first, second = check_halves(output, shape, what).chunk(2, dim=-len(shape))
    return first, second


def join(first: Tensor, second: Tensor | None, dims: int = 1) -> Tensor:
    """Concatenate vectors (*, a) and (*, b) into (*, a + b), or images by channel; what leads is shared.

    Arguments:
        first: A value (*, a, ...).
        second: Another one (*, b, ...); None for nothing to join.
        dims: Number of dimensions of one value: 1 for vectors, 3 for images (channels, height, width).

    Example:
        >>> join(torch.zeros(5, 3, 2), torch.ones(3, 1)).shape
        torch.Size([5, 3, 3])
        >>> join(torch.zeros(5, 3, 2, 4, 4), torch.ones(3, 1, 4, 4), dims=3).shape
        torch.Size([5, 3, 3, 4, 4])
    """
    if second is None:
        return first
    leading = torch.broadcast_shapes(first.shape[:-dims], second.shape[:-dims])
    parts = [part.expand(*leading, *part.shape[-dims:]) for part in (first, second)]
    return torch.cat(parts, dim=-dims)


class Layer(nn.Module, ABC):
    """A step between the data side x and the noise side z.

    Subclasses compute in `_encode` and `_decode`; shapes are checked here and nowhere else.

    Arguments:
        shape: Shape of one x, without leading dimensions.
        noise_shape: Shape of one z, where it differs.
        context_shape: Shape of the context that the layer needs; None where it needs none, and then
            a context passed along to the whole flow is ignored.
    """

    def __init__(
        self, shape: Shape, noise_shape: Shape | None = None, context_shape: Shape | None = None
    ) -> None:
        super().__init__()
        self.shape = tuple(shape)
        self.noise_shape = self.shape if noise_shape is None else tuple(noise_shape)
        self.context_shape = None if context_shape is None else tuple(context_shape)

    @property
    def exact(self) -> bool:
        """Whether log_weight needs no draws: p(x) = p(z) exp(log_weight) holds exactly."""
        return False

    @property
    def noisy(self) -> bool:
        """Whether log_weight carries noise of its own, such as an estimated log-determinant.

        Such noise may not enter a log-mean-exp over draws: it would raise it (see docs/likelihoods.md).
        """
        return False

    @property
    def pure(self) -> tuple[str, ...]:
        """Methods that are arithmetic alone, without draws, so that they can be compiled."""
        return ()

    @property
    def starts_from_data(self) -> bool:
        """Whether `initialise` sets anything."""
        return type(self)._initialise is not Layer._initialise

    def encode(
        self, x: Tensor, context: Tensor | None = None, noise: Noise | None = None
    ) -> tuple[Tensor, Tensor]:
        """Map x (*, shape) to z (*, noise_shape), with log_weight (*)."""
        context = self._check(x, self.shape, context)
        return self._encode(x, context, noise or Noise())

    def decode(self, z: Tensor, context: Tensor | None = None, noise: Noise | None = None) -> Tensor:
        """Map z (*, noise_shape) to x (*, shape)."""
        context = self._check(z, self.noise_shape, context)
        return self._decode(z, context, noise or Noise())

    def initialise(self, x: Tensor, context: Tensor | None = None) -> None:
        """Set what depends on data from a first batch x (*, shape); most layers have nothing to set."""
        context = self._check(x, self.shape, context)
        if x.numel() == 0:
            raise ValueError(f"{type(self).__name__}: a batch without rows gives it no start.")
        with torch.no_grad():
            self._initialise(x, context)

    def _check(self, value: Tensor, shape: Shape, context: Tensor | None) -> Tensor | None:
        name = type(self).__name__
        check_shape(value, shape, name)
        if self.context_shape is None:
            return None
        if context is None:
            raise ValueError(f"{name}: needs a context of shape (*, {self.context_shape}).")
        check_shape(context, self.context_shape, f"{name}, context")
        return context

    def _initialise(self, x: Tensor, context: Tensor | None) -> None:
        return

    @abstractmethod
    def _encode(self, x: Tensor, context: Tensor | None, noise: Noise) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def _decode(self, z: Tensor, context: Tensor | None, noise: Noise) -> Tensor: ...


class Bijection(Layer):
    """A layer with one z for each x and back; log_weight is log|det Dz/Dx|."""

    @property
    def exact(self) -> bool:
        return not self.noisy

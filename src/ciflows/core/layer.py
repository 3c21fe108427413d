"""The contract of a layer.

A flow is a flat list of layers. Each maps the data side to the noise side and back:

    encode(x) -> (z, log_weight)        decode(z) -> x

with one promise: p(z) exp(log_weight) is an unbiased estimate of p(x). For a bijection it is exact and
log_weight is the log-determinant log|det Dz/Dx|; for an indexed layer it holds on average over its draw
of u (the paper's Algorithm 1).

Samples have a weight too: decode_with_log_weight(z) -> (x, log_weight) draws u ~ p(u | z) and gives the
same log p(x, u) / q(u | x), less log p(z). On average it is at least log p(x) - log p(z), where that of
`encode` is at most that: variational inference needs this direction.

What depends on a first batch of data, such as a normalisation, is set in `initialise`, not in `encode`.
"""

from __future__ import annotations

__all__ = [
    "Bijection",
    "Layer",
    "Shape",
    "as_shape",
    "beside_event",
    "check_halves",
    "check_layer",
    "check_order",
    "check_shape",
    "common_context",
    "halves",
    "join",
    "leading_shape",
    "module_list",
    "sum_event",
]

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from ciflows.core.noise import Noise

Shape = tuple[int, ...]
T = TypeVar("T")


def check_shape(value: Tensor, shape: Shape, what: str) -> None:
    """Refuse what is no tensor, or one whose last dimensions are not `shape`."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{what}: expected a tensor; got a {type(value).__name__}.")
    if value.ndim < len(shape) or tuple(value.shape[value.ndim - len(shape) :]) != shape:
        wanted = ", ".join(["*", *map(str, shape)])
        raise ValueError(f"{what}: expected shape ({wanted}); got {tuple(value.shape)}.")


def check_order(order: Tensor, what: str) -> None:
    """Refuse indices (d,) that do not name each of 0, ..., d - 1 once."""
    if order.ndim != 1 or sorted(order.tolist()) != list(range(len(order))) or not len(order):
        raise ValueError(f"{what}: expected each of 0, ..., d - 1 once; got {order.tolist()}.")


def as_shape(size: int | Shape) -> Shape:
    """A shape from a number of features; a shape is returned unchanged."""
    return (size,) if isinstance(size, int) else tuple(size)


def leading_shape(value: Tensor, shape: Shape) -> torch.Size:
    """The dimensions * of a value (*, shape)."""
    return value.shape[: value.ndim - len(shape)]


def sum_event(value: Tensor, shape: Shape) -> Tensor:
    """Sum a value (*, shape) over all of its shape's dimensions: (*)."""
    return value.sum(tuple(range(-len(shape), 0)))


def beside_event(value: Tensor, shape: Shape) -> Tensor:
    """A value (*) with a dimension of size 1 added for each of a shape's, to multiply (*, shape)."""
    return value.reshape(*value.shape, *[1] * len(shape))


def common_context(parts: Iterable[nn.Module], what: str) -> Shape | None:
    """The context shape of those layers and densities that take a context; refuse different ones."""
    shapes = {cast(Shape | None, part.context_shape) for part in parts} - {None}
    if len(shapes) > 1:
        raise ValueError(f"{what} expect contexts of different shapes: {shapes}.")
    return shapes.pop() if shapes else None


def check_halves(output: Tensor, shape: Shape, what: str) -> Tensor:
    """Check a network's output (*, 2 c, ...), which holds two values of shape (c, ...).

    An output of another size might broadcast, and give a wrong likelihood.
    """
    check_shape(output, (2 * shape[0], *shape[1:]), f"{what}, its network's output")
    return output


def halves(output: Tensor, shape: Shape, what: str) -> tuple[Tensor, Tensor]:
    """Split a network's output (*, 2 c, ...) into two values of shape (c, ...)."""
    first, second = check_halves(output, shape, what).chunk(2, dim=-len(shape))
    return first, second


def join(first: Tensor, second: Tensor | None, dims: int = 1) -> Tensor:
    """Concatenate vectors (*, a) and (*, b) into (*, a + b), or images by channel; the rest broadcasts.

    Arguments:
        first: A value (*, a, ...).
        second: A value (*, b, ...); None for nothing to join.
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


def module_list(parts: Iterable[T]) -> list[T]:
    """`nn.ModuleList`, typed as a list of what it holds."""
    return cast(list[T], nn.ModuleList(cast(Iterable[nn.Module], parts)))


class Layer(nn.Module, ABC):
    """A step between the data side x and the noise side z.

    Subclasses define `_encode` and `_decode`; this class checks shapes.

    Arguments:
        shape: Shape of one x, without leading dimensions.
        noise_shape: Shape of one z, if it differs.
        context_shape: Shape of the context that the layer needs; None if it needs none. Then it ignores
            the flow's context.
    """

    def __init__(
        self, shape: Shape, noise_shape: Shape | None = None, context_shape: Shape | None = None
    ) -> None:
        super().__init__()
        self.shape = tuple(shape)
        self.noise_shape = self.shape if noise_shape is None else tuple(noise_shape)
        self.context_shape = None if context_shape is None else tuple(context_shape)

    @property
    def input_dtype(self) -> torch.dtype | None:
        """The type of x that it takes, whatever that of its weights; None if it is theirs."""
        return None

    @property
    def noise_range(self) -> str | None:
        """Where all z lie, in words, if that is less than all real numbers."""
        return None

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
    def discrete(self) -> bool:
        """Whether some x have probabilities, as integers do, and no density or gradient."""
        return False

    @property
    def reparameterised(self) -> bool:
        """Whether samples are differentiable functions of the parameters and of fixed noise."""
        return not self.discrete

    @property
    def weighs_samples(self) -> bool:
        """Whether `decode_with_log_weight` has a weight to give."""
        defined = type(self)._decode_with_log_weight is not Layer._decode_with_log_weight
        return defined or self.exact or isinstance(self, Bijection)

    @property
    def pure(self) -> tuple[str, ...]:
        """Methods without draws, which can be compiled."""
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

    def decode_with_log_weight(
        self, z: Tensor, context: Tensor | None = None, noise: Noise | None = None
    ) -> tuple[Tensor, Tensor]:
        """Map z (*, noise_shape) to x (*, shape), with log p(x, u) / q(u | x) - log p(z) (*)."""
        context = self._check(z, self.noise_shape, context)
        return self._decode_with_log_weight(z, context, noise or Noise())

    def initialise(self, x: Tensor, context: Tensor | None = None) -> None:
        """Set what depends on data from a first batch x (*, shape); most layers have nothing to set."""
        context = self._check(x, self.shape, context)
        if x.numel() == 0:
            raise ValueError(f"{type(self).__name__}: cannot initialise from a batch without rows.")
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

    def _decode_with_log_weight(
        self, z: Tensor, context: Tensor | None, noise: Noise
    ) -> tuple[Tensor, Tensor]:
        if not self.weighs_samples:
            why = "integers and atoms have no density" if self.discrete else "define them first"
            raise ValueError(f"{type(self).__name__}: its samples have no weights: {why}.")
        x = self._decode(z, context, noise)
        return x, self._encode(x, context, noise)[1]

    @abstractmethod
    def _encode(self, x: Tensor, context: Tensor | None, noise: Noise) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def _decode(self, z: Tensor, context: Tensor | None, noise: Noise) -> Tensor: ...


class Bijection(Layer):
    """A layer with one z for each x and back; log_weight is log|det Dz/Dx|."""

    @property
    def exact(self) -> bool:
        return not self.noisy


def check_layer(part: object, what: str) -> None:
    """Refuse what is not a layer, and say how to make it one."""
    if not isinstance(part, Layer):
        raise TypeError(
            f"{what}: expected a layer, such as those of ciflows.layers; got a {type(part).__name__}. "
            "Wrap a module or transform of your own: ciflows.layers.as_bijection(yours, features)."
        )

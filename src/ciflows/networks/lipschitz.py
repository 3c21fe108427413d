"""Networks with a bounded Lipschitz constant, and the products with their Jacobian.

g is a chain of (LipSwish, linear) maps. Along with a value h it can carry tangents T = (∂h/∂x) v for any
directions v, at the price of one more row in each matrix product for each direction:

    h ← W a(h) + b          T ← W (a'(h) ⊙ T)

With the identity as directions this is the whole Jacobian, exactly, without automatic differentiation;
and it can be differentiated again.
"""

from __future__ import annotations

__all__ = [
    "LipschitzMLP",
    "LipschitzNetwork",
    "Spectral",
    "SpectralLinear",
    "converge_norms",
    "iterate_norms",
    "lipswish",
    "spectral_maps",
]

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ciflows.core.groups import grouped
from ciflows.core.hook import replaceable
from ciflows.core.layer import Shape

SCALE = 1 / 1.1  # the largest slope of x σ(βx), for every β, is below 1.1
MAX_POWER_ITERATIONS = 1000


def lipswish(stack: Tensor, bias: Tensor, beta: Tensor) -> Tensor:
    """Value and tangents through a(h) = h σ(βh) / 1.1: (a(h), a'(h) ⊙ T).

    Arguments:
        stack: A value less its bias, and k tangents T: (1 + k, *, features), or for images
            (1 + k, *, channels, height, width).
        bias: The bias (features,), or (channels, 1, 1).
        beta: β ().
    """
    y = beta * (stack[:1] + bias)
    silu, s = F.silu(y), torch.sigmoid(y)
    value = silu * (SCALE / beta)
    if len(stack) == 1:
        return value
    slope = SCALE * (s + silu * (1 - s))
    return torch.cat([value, slope * stack[1:]])


class Spectral(nn.Module, ABC):
    """A linear map whose weight W is scaled down to norm `bound` if it exceeds it.

    The norm is σ = ⟨u, Wv⟩ with buffers u and v that power iterations keep near the leading singular
    vectors: `iterate_norms` and `converge_norms` move them, and nothing else does.

    Arguments:
        weight: The weight at the start.
        bias: The bias at the start.
        u: A vector of the outputs' shape, to start from.
        v: One of the inputs' shape.
        bound: The largest norm.
    """

    def __init__(self, weight: Tensor, bias: Tensor, u: Tensor, v: Tensor, bound: float) -> None:
        super().__init__()
        self.bound = bound
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(bias)
        self.u = nn.Buffer(u / u.norm())
        self.v = nn.Buffer(v / v.norm())

    def scaled_weight(self) -> Tensor:
        return self.weight * (self.bound / self._norm().clamp(min=self.bound))

    @property
    def kind(self) -> Hashable:
        """What maps that iterate together have in common."""
        return type(self), self.weight.shape, self.v.shape

    @abstractmethod
    def _norm(self) -> Tensor:
        """σ (), differentiable in W."""

    @staticmethod
    @abstractmethod
    def product(weight: Tensor, v: Tensor) -> Tensor:
        """W v for n maps at once: (n, *weight) and (n, *input) -> (n, *output)."""

    @staticmethod
    @abstractmethod
    def adjoint(weight: Tensor, u: Tensor) -> Tensor:
        """Wᵀ u for n maps at once: (n, *weight) and (n, *output) -> (n, *input)."""


class SpectralLinear(Spectral):
    """A linear map whose weight is scaled down to spectral norm `bound` if it exceeds it.

    Weights start orthogonal: a flat spectrum passes most through the bound (and trains markedly faster).
    """

    def __init__(self, in_features: int, out_features: int, bound: float) -> None:
        weight = nn.init.orthogonal_(torch.empty(out_features, in_features))
        limit = 1 / math.sqrt(in_features)
        bias = nn.init.uniform_(torch.empty(out_features), -limit, limit)
        super().__init__(weight, bias, torch.randn(out_features), torch.randn(in_features), bound)

    def _norm(self) -> Tensor:
        return torch.dot(self.u, torch.mv(self.weight, self.v))

    @staticmethod
    def product(weight: Tensor, v: Tensor) -> Tensor:
        return (v[:, None] @ weight.mT).squeeze(1)  # as rows: on a CPU columns take eight times as long

    @staticmethod
    def adjoint(weight: Tensor, u: Tensor) -> Tensor:
        return (u[:, None] @ weight).squeeze(1)


@torch.no_grad()
def iterate_norms(maps: Sequence[Spectral], iterations: int) -> None:
    """Run power iterations for maps of one kind, all together."""
    weight, u, v = _stack(maps)
    for _ in range(iterations):
        u, v = _power_iteration(maps[0], weight, u)
    _store(maps, u, v)


@torch.no_grad()
def converge_norms(module: nn.Module, tolerance: float = 1e-5) -> None:
    """Run power iterations until no norm in a module changes by more than `tolerance`, relatively."""
    for maps in spectral_maps(module):
        weight, u, v = _stack(maps)
        before = _norms(maps[0], weight, u, v)
        for _ in range(MAX_POWER_ITERATIONS):
            for _ in range(10):
                u, v = _power_iteration(maps[0], weight, u)
            after = _norms(maps[0], weight, u, v)
            if bool(((after - before).abs() <= tolerance * after).all()):
                break
            before = after
        _store(maps, u, v)


def spectral_maps(module: nn.Module) -> list[list[Spectral]]:
    """The `Spectral` maps in a module, those of one kind together."""
    parts = [part for part in module.modules() if isinstance(part, Spectral)]
    return grouped(parts, lambda part: part.kind)


def _stack(maps: Sequence[Spectral]) -> tuple[Tensor, Tensor, Tensor]:
    """W, u and v of maps of one kind: (n, *weight), (n, *output), (n, *input)."""
    parts = ([getattr(part, name) for part in maps] for name in ("weight", "u", "v"))
    weight, u, v = map(torch.stack, parts)
    return weight, u, v


def _power_iteration(kind: Spectral, weight: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    v = _normalised(kind.adjoint(weight, u))
    after = _normalised(kind.product(weight, v))
    alive = after.flatten(1).any(1).reshape(-1, *[1] * (u.ndim - 1))
    return torch.where(alive, after, u), v  # a zero weight must not zero u


def _normalised(vectors: Tensor) -> Tensor:
    return F.normalize(vectors.flatten(1), dim=1).view_as(vectors)


def _norms(kind: Spectral, weight: Tensor, u: Tensor, v: Tensor) -> Tensor:
    return (u * kind.product(weight, v)).flatten(1).sum(1)


def _store(maps: Sequence[Spectral], u: Tensor, v: Tensor) -> None:
    torch._foreach_copy_([part.u for part in maps], list(u.unbind()))
    torch._foreach_copy_([part.v for part in maps], list(v.unbind()))


class LipschitzNetwork(nn.Module, ABC):
    """g: (*, shape) -> (*, shape) with Lipschitz constant at most `kappa`, and the products J v.

    Arguments:
        shape: Shape of one x.
        kappa: Bound on the Lipschitz constant, below 1.
        context_shape: Shape of the context; None if there is none.
    """

    def __init__(self, shape: Shape, kappa: float, context_shape: Shape | None = None) -> None:
        super().__init__()
        if not 0 < kappa < 1:
            raise ValueError(f"{type(self).__name__}: kappa must lie between 0 and 1; got {kappa}.")
        self.shape = tuple(shape)
        self.kappa = kappa
        self.context_shape = context_shape

    @abstractmethod
    def forward(
        self, x: Tensor, directions: Tensor | None = None, context: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """g(x) (*, shape) and J directions (k, *, shape), for directions of that same shape."""


class LipschitzMLP(LipschitzNetwork):
    """(LipSwish, linear) repeated, with Lipschitz constant at most `kappa`: (*, d) -> (*, d).

    Each linear map gets the same share of the constant: spectral norm at most kappa^(1/n) for n of them.
    A context enters after the first linear map, without a bound: only the map of x is constrained.

    Arguments:
        features: Size of the input and of the output.
        hidden: Sizes of the hidden layers.
        kappa: Bound on the Lipschitz constant, below 1.
        context_features: Size of the context; 0 for none.
        last_std: Standard deviation of the last weight at the start: small, so that g starts near 0.

    Example:
        >>> g, tangents = LipschitzMLP(2)(torch.randn(7, 2), torch.eye(2)[:, None].expand(2, 7, 2))
        >>> g.shape, tangents.shape
        (torch.Size([7, 2]), torch.Size([2, 7, 2]))
    """

    def __init__(
        self,
        features: int,
        hidden: Sequence[int] = (128, 128, 128, 128),
        kappa: float = 0.9,
        context_features: int = 0,
        last_std: float = 1e-3,
    ) -> None:
        super().__init__((features,), kappa, (context_features,) if context_features else None)
        sizes = [features, *hidden, features]
        bound = kappa ** (1 / (len(sizes) - 1))
        self.features = features
        self.sizes = sizes
        self.linears = nn.ModuleList(
            SpectralLinear(before, after, bound) for before, after in itertools.pairwise(sizes)
        )
        self.beta = nn.Parameter(torch.full((len(sizes) - 1,), 0.5))
        self.context = nn.Linear(context_features, sizes[1], bias=False) if context_features else None
        last = self.linears[-1]
        nn.init.normal_(last.get_parameter("weight"), std=last_std)
        nn.init.zeros_(last.get_parameter("bias"))
        converge_norms(self)

    @replaceable
    def forward(
        self, x: Tensor, directions: Tensor | None = None, context: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """g(x) (*, features) and J directions (k, *, features), for directions of that same shape."""
        stack = x[None] if directions is None else torch.cat([x[None], directions])
        bias = x.new_zeros(self.features)
        for index, beta in enumerate(F.softplus(self.beta).unbind()):
            linear = cast(SpectralLinear, self.linears[index])
            stack = lipswish(stack, bias, beta) @ linear.scaled_weight().mT
            bias = linear.bias
            if index == 0 and self.context is not None:
                bias = bias + self.context(context)
        return stack[0] + bias, stack[1:]

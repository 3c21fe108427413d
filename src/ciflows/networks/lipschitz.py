"""Networks with a bounded Lipschitz constant, and the products with their Jacobian.

g is a chain of (LipSwish, linear) maps. Along with a value h it can carry tangents T = (∂h/∂x) v for any
directions v, at the price of one more row in each matrix product for each direction:

    h ← W a(h) + b          T ← W (a'(h) ⊙ T)

With the identity as directions this is the whole Jacobian, exactly, without automatic differentiation;
and it can be differentiated again.
"""

from __future__ import annotations

__all__ = [
    "LipSwish",
    "LipschitzMLP",
    "LipschitzNetwork",
    "Spectral",
    "SpectralLinear",
    "converge_norms",
    "iterate_norms",
    "scaled_weights",
    "spectral_maps",
    "update_norms",
]

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ciflows import kernels
from ciflows.groups import grouped
from ciflows.kernels.cpu import silu_chain
from ciflows.kernels.plain import plain_gradients
from ciflows.layers import Shape

SCALE = 1 / 1.1  # the largest slope of x σ(βx), for every β, is below 1.1
MAX_POWER_ITERATIONS = 1000


class LipSwish(torch.autograd.Function):
    """Value and tangents through a(h) = h σ(βh) / 1.1, in few operations both ways.

    Rows: `stack` (1 + k, *, features) holds a value, less its bias, and k tangents; for images it is
    (1 + k, *, channels, height, width) with a bias (channels, 1, 1). The slope a' and the curvature a''
    come from the same sigmoid, so that the backward pass recomputes and stores little.
    """

    @staticmethod
    def forward(ctx: Any, stack: Tensor, bias: Tensor, beta: Tensor) -> Tensor:
        h = stack[0] + bias
        bh = beta * h
        s = torch.sigmoid(bh)
        value = h * s * SCALE
        ctx.save_for_backward(stack, bias, beta, bh, s)
        if len(stack) == 1:
            return value[None]
        return torch.cat([value[None], stack[1:] * _slope(bh, s)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (grad,) = grads
        stack, bias, beta, bh, s = ctx.saved_tensors
        if torch.is_grad_enabled():  # for a derivative of this one, as functions of what was given
            bh = beta * (stack[0] + bias)
            s = torch.sigmoid(bh)
        slope = _slope(bh, s)
        ds = torch.addcmul(s, s, s, value=-1)
        grad_h = grad[0] * slope
        by_beta = grad[0] * bh * ds
        grad_stack = grad_h[None]
        if len(stack) > 1:
            # a'' = β σ' (2 + βh (1 - 2σ)) / 1.1, and ∂a'/∂β is the same with h in place of β
            bend = (torch.addcmul(bh, bh, s, value=-2) + 2) * (grad[1:] * stack[1:]).sum(0) * ds
            grad_h = torch.addcmul(grad_h, bend, beta * SCALE)
            by_beta = torch.addcmul(by_beta, bend, beta)
            grad_stack = torch.cat([grad_h[None], grad[1:] * slope])
        grad_bias = grad_h.sum_to_size(bias.shape)
        grad_beta = torch.dot(by_beta.flatten(), bh.flatten()) * SCALE / beta.square()
        return grad_stack, grad_bias, grad_beta


def _slope(bh: Tensor, s: Tensor) -> Tensor:
    """a'(h) = σ (1 + βh (1 - σ)) / 1.1, from βh and σ = σ(βh)."""
    return (torch.addcmul(bh, bh, s, value=-1) + 1) * s * SCALE


class Spectral(nn.Module, ABC):
    """A linear map whose weight W is scaled down to norm `bound` where it exceeds it.

    The norm is σ = ⟨u, Wv⟩ with buffers u and v that power iterations keep near the leading singular
    vectors: `update_norms` and `converge_norms` move them, and nothing else does.

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
        self.u: Tensor
        self.v: Tensor
        self.register_buffer("u", u / u.norm())
        self.register_buffer("v", v / v.norm())

    def scaled_weight(self) -> Tensor:
        return _scaled_down(self.weight, self._norm(), self.bound)

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
    """A linear map whose weight is scaled down to spectral norm `bound` where it exceeds it.

    Weights start orthogonal: a flat spectrum passes most through the bound (and trains markedly faster).

    Arguments:
        in_features: Size of the input.
        out_features: Size of the output.
        bound: The largest spectral norm.
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


class ScaledMaps(torch.autograd.Function):
    """f W / max(1, σ / bound) with σ = ⟨u, Wv⟩ and h b for several maps, in few operations both ways.

    Takes the factors f and h (n,), the bound, and W, u, v and b of each map in turn; gives the weights
    and then the shifts.
    """

    @staticmethod
    def forward(
        ctx: Any, factors: Tensor, heights: Tensor, bound: float, *parts: Tensor
    ) -> tuple[Tensor, ...]:
        results, norms = _scaled(factors, heights, bound, *parts)
        ctx.bound = bound
        ctx.save_for_backward(factors, heights, norms, *parts)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        factors, heights, norms, *parts = ctx.saved_tensors
        if torch.is_grad_enabled():
            inputs = [factors, heights, ctx.bound, *parts]
            return plain_gradients(lambda *given: _scaled(*given)[0], inputs, grads)
        weights, us, vs, biases = (parts[start::4] for start in range(4))
        by_weights, by_shifts = grads[: len(weights)], grads[len(weights) :]
        shares = ctx.bound / norms.clamp(min=ctx.bound)
        dots, by_heights = _dots(by_weights, weights), _dots(by_shifts, biases)
        scales = factors * shares
        by_norms = torch.where(norms > ctx.bound, -dots * scales / norms, 0.0)
        numbers = zip(by_weights, us, vs, scales.tolist(), by_norms.tolist(), strict=True)
        scaled = [torch.addr(g, u, v, beta=beta, alpha=alpha) for g, u, v, beta, alpha in numbers]
        shifted = [g * height for g, height in zip(by_shifts, heights.tolist(), strict=True)]
        pairs = zip(scaled, shifted, strict=True)
        by_parts = itertools.chain(*((by_weight, None, None, by_bias) for by_weight, by_bias in pairs))
        return dots * shares, by_heights, None, *by_parts


def _scaled(
    factors: Tensor, heights: Tensor, bound: float, *parts: Tensor
) -> tuple[tuple[Tensor, ...], Tensor]:
    """What `ScaledMaps` gives, and the norms that the weights had (n,)."""
    weights, us, vs, biases = (parts[start::4] for start in range(4))
    maps = zip(weights, us, vs, strict=True)
    norms = torch.stack([torch.dot(u, torch.mv(weight, v)) for weight, u, v in maps])
    scales = factors * (bound / norms.clamp(min=bound))
    scaled = [weight * scale for weight, scale in zip(weights, scales.unbind(), strict=True)]
    shifts = [bias * height for bias, height in zip(biases, heights.unbind(), strict=True)]
    return (*scaled, *shifts), norms


def _dots(some: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """⟨a, b⟩ (n,) of n pairs of tensors."""
    pairs = zip(some, others, strict=True)
    return torch.stack([torch.dot(one.flatten(), other.flatten()) for one, other in pairs])


@torch.no_grad()
def update_norms(module: nn.Module, iterations: int = 5) -> None:
    """Run power iterations for every `Spectral` map in a module."""
    for maps in spectral_maps(module):
        iterate_norms(maps, iterations)


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


def _scaled_down(weight: Tensor, norm: Tensor, bound: float) -> Tensor:
    return weight * (bound / norm.clamp(min=bound))


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
        context_shape: Shape of the context; None where there is none.
    """

    def __init__(self, shape: Shape, kappa: float, context_shape: Shape | None = None) -> None:
        super().__init__()
        if not 0 < kappa < 1:
            raise ValueError(f"{type(self).__name__}: kappa must lie between 0 and 1; got {kappa}.")
        self.shape = tuple(shape)
        self.kappa = kappa
        self.context_shape = context_shape

    @property
    def fused(self) -> bool:
        """Whether it goes to the GPU's kernel where it is now, with tangents."""
        return False

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

    def forward(
        self, x: Tensor, directions: Tensor | None = None, context: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """g(x) (*, features) and J directions (k, *, features), for directions of that same shape."""
        tangents = 0 if directions is None else len(directions)
        fixed = directions is None or not directions.requires_grad
        if context is None and fixed and kernels.fits(x, self.sizes, tangents):
            return self._fused(x, directions)
        stack = x[None] if directions is None else torch.cat([x[None], directions])
        return self._chain(stack, context) if stack.is_cpu else self._plain(stack, context)

    @property
    def fused(self) -> bool:
        point = self.beta.new_empty(1, self.features)
        return self.context is None and kernels.fits(point, self.sizes, tangents=1)

    def _plain(self, stack: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        """Layer by layer, in operations that torch differentiates and compiles."""
        bias = stack.new_zeros(self.features)
        betas = F.softplus(self.beta).unbind()
        for index, (linear, beta) in enumerate(zip(self.linears, betas, strict=True)):
            assert isinstance(linear, SpectralLinear)
            stack = LipSwish.apply(stack, bias, beta) @ linear.scaled_weight().mT
            bias = linear.bias
            if index == 0 and self.context is not None:
                assert context is not None
                stack = torch.cat([stack[:1] + self.context(context), stack[1:]])
        return stack[0] + bias, stack[1:]

    def _fused(self, x: Tensor, directions: Tensor | None) -> tuple[Tensor, Tensor]:
        from ciflows.kernels.gpu import chain

        first, middle, last, biases, beta = self.__dict__.get("given") or _scale([self])[0]
        last_bias = self.linears[-1].get_parameter("bias")
        return chain(x, directions, first, middle, last, biases, last_bias, "lipswish", beta)

    def _chain(self, stack: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        """All layers at once. In y = βh activations have no parameters: a(h) = y σ(y) / (1.1 β)."""
        beta = F.softplus(self.beta)
        after = torch.cat([beta[1:], beta.new_ones(1)])
        linears = cast(Sequence[SpectralLinear], self.linears)
        parts = [(map_.weight, map_.u, map_.v, map_.bias) for map_ in linears]
        factors = SCALE * after / beta
        maps = ScaledMaps.apply(factors, after, linears[0].bound, *itertools.chain(*parts))
        weights, shifts = maps[: len(linears)], list(maps[len(linears) :])
        if self.context is not None:
            assert context is not None
            shift = shifts[0] + after[0] * self.context(context)
            shifts[0] = shift.expand(*stack.shape[1:-1], -1).reshape(-1, shift.shape[-1])
        rows = (beta[0] * stack).reshape(len(stack), -1, self.features)
        stack = silu_chain(rows, weights, shifts).reshape(stack.shape)
        return stack[0], stack[1:]


Scaled = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _scale(networks: Sequence[LipschitzMLP]) -> list[Scaled]:
    """What the kernel takes of networks of one size: W₁, those between, Wₙ, biases but the last, β."""

    def scale(maps: Sequence[SpectralLinear]) -> Tensor:
        weight, u, v = _stack(maps)
        return _scaled_down(weight, _norms(maps[0], weight, u, v)[:, None, None], maps[0].bound)

    rows = [cast(Sequence[SpectralLinear], network.linears) for network in networks]
    first, last = (scale([row[end] for row in rows]) for end in (0, -1))
    middle = scale([map_ for row in rows for map_ in row[1:-1]])
    biases = torch.stack([map_.bias for row in rows for map_ in row[:-1]])
    middle, biases = (part.unflatten(0, (len(rows), -1)) for part in (middle, biases))
    beta = F.softplus(torch.stack([network.beta for network in networks]))
    return list(zip(*(part.unbind() for part in (first, middle, last, biases, beta)), strict=True))


def scaled_weights(networks: Sequence[LipschitzMLP]) -> dict[nn.Module, Scaled]:
    """What the kernel takes of several networks, of all of one size at once."""
    scaled: dict[nn.Module, Scaled] = {}
    for group in grouped(networks, lambda network: (*network.sizes, network.kappa)):
        scaled |= zip(group, _scale(group), strict=True)
    return scaled

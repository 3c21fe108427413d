"""Jacobians and inverses: how much a flow stretches distances, and how exactly it comes back.

The bi-Lipschitz constant of a map f (section 2) is the least M with

    |x - x'| / M <= |f(x) - f(x')| <= M |x - x'|,    M = max(sup σ_max(Df), 1 / inf σ_min(Df)).

A bijection that carries a Gaussian to data of another topology needs an ever larger M. The singular
values of Jacobians at some points bound M from below; residual blocks have a bound from above too.
"""

from __future__ import annotations

__all__ = [
    "Lipschitz",
    "RoundTrip",
    "Stretch",
    "is_chain",
    "lipschitz",
    "reconstruction_error",
    "round_trip",
]

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ciflows.core.density import StandardNormal
from ciflows.core.flow import Flow
from ciflows.core.indexed import Indexed
from ciflows.core.layer import Bijection, Layer, check_shape, join
from ciflows.core.noise import Noise
from ciflows.core.precision import float32_products
from ciflows.diagnostics.log_dets import no_log_dets
from ciflows.layers import Residual, Standardise
from ciflows.layers.split import Split


class Stretch(NamedTuple):
    """How much a map from data to noise stretches and shrinks distances at some points.

    Attributes:
        largest: The largest singular value of its Jacobian.
        smallest: The smallest one.
        constant: max(largest, 1 / smallest), a lower bound on the bi-Lipschitz constant.
        bound: An upper bound on it that holds everywhere; None if none is known.
    """

    layer: str
    largest: float
    smallest: float
    constant: float
    bound: float | None


class Lipschitz(NamedTuple):
    """Bi-Lipschitz constants of each layer, data side first, and of the whole map."""

    layers: tuple[Stretch, ...]
    whole: Stretch


class RoundTrip(NamedTuple):
    """Largest |decode(encode(x)) - x| of each layer, data side first, and of the whole map."""

    layers: tuple[float, ...]
    whole: float


def is_chain(flow: Flow) -> bool:
    """Whether a flow is a chain of maps from data to noise, once its indices are drawn.

    A mixture is not, nor is a flow with splits.
    """
    layers, base = flow.unrolled()
    known = all(isinstance(layer, Bijection | Indexed) for layer in layers)
    return bool(layers) and known and isinstance(base, StandardNormal)


@float32_products()
def lipschitz(flow: Flow, x: Tensor, context: Tensor | None = None, seed: int | None = 0) -> Lipschitz:
    """Bi-Lipschitz constants seen at points x (rows, shape), from the Jacobians' singular values.

    An indexed layer is a bijection for each u: u is drawn from q(u | x) and held fixed. The whole map's
    Jacobian is the product of the layers' Jacobians, and its bound the product of their bounds.

    Example:
        >>> from ciflows.layers import Standardise
        >>> flow = Flow([Standardise(torch.zeros(2), torch.tensor([0.5, 4.0]))])
        >>> lipschitz(flow, torch.zeros(1, 2)).whole
        Stretch(layer='whole map', largest=2.0, smallest=0.25, constant=4.0, bound=4.0)
    """
    with no_log_dets(flow):
        steps = _trace(flow, x, context, seed)
        jacobians = [_jacobian(step) for step in steps]
    layers = []
    product = torch.eye(x[0].numel(), dtype=torch.float64, device=x.device)
    for step, jacobian in zip(steps, jacobians, strict=True):
        layers.append(_stretch(step.name, jacobian, _bound(step.bijection)))
        product = jacobian @ product
    bounds = [layer.bound for layer in layers if layer.bound is not None]
    bound = math.prod(bounds) if len(bounds) == len(layers) else None
    return Lipschitz(tuple(layers), _stretch("whole map", product, bound))


@torch.no_grad()
@float32_products()
def round_trip(flow: Flow, x: Tensor, context: Tensor | None = None, seed: int | None = 0) -> RoundTrip:
    """How exactly decoding inverts encoding at points x (rows, shape), with every u held fixed."""
    with no_log_dets(flow):
        steps = _trace(flow, x, context, seed)
        back = steps[-1].z
        layers = []
        for step in reversed(steps):
            layers.append(_largest(step.bijection.decode(step.z, step.context) - step.x))
            back = step.bijection.decode(back, step.context)
    return RoundTrip(tuple(reversed(layers)), _largest(back - x))


@torch.no_grad()
@float32_products()
def reconstruction_error(flow: Flow, x: Tensor, seed: int = 0) -> float:
    """The largest |decode(encode(x)) - x| over the pixels of images x (n, C, H, W).

    Every index and every part split off is kept for decoding. Encoding starts after the first layer, the
    dequantisation: its rounding would hide an error, or turn it into a whole level.
    """
    noise = Noise.seeded(seed, x.device)
    first, *layers = flow.layers
    x = start = first.encode(x, noise=noise)[0]
    back: list[Callable[[Tensor], Tensor]] = []
    for layer in layers:
        x, inverse = _there_and_back(layer, x, noise)
        back.append(inverse)
    for inverse in reversed(back):
        x = inverse(x)
    return (x - start).abs().max().item()


def _there_and_back(layer: Layer, x: Tensor, noise: Noise) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """A layer's output for x, and its inverse with the same draws."""
    if isinstance(layer, Split):
        channels = layer.noise_shape[0]
        z, leaving = x[:, :channels], x[:, channels:]
        return z, lambda z: torch.cat([z, leaving], dim=1)
    bijection, its_context = _at_draw(layer, x, None, noise)
    return bijection.encode(x, its_context, noise)[0], lambda z: bijection.decode(z, its_context)


class _Step(NamedTuple):
    """One layer as a plain bijection, with its input x and its output z."""

    name: str
    bijection: Bijection
    context: Tensor | None
    x: Tensor
    z: Tensor


@torch.no_grad()
def _trace(flow: Flow, x: Tensor, context: Tensor | None, seed: int | None) -> list[_Step]:
    """Pass rows x through the layers; draw a u for each row in each indexed layer."""
    check_shape(x, flow.shape, "diagnostics")
    if x.ndim != len(flow.shape) + 1 or len(x) == 0:
        raise ValueError(f"diagnostics: expected at least one row; got shape {tuple(x.shape)}.")
    noise, steps, layers = Noise.seeded(seed, x.device), [], flow.unrolled()[0]
    if not layers:
        raise ValueError("diagnostics: the flow has no layers whose Jacobian could be measured.")
    for index, layer in enumerate(layers):
        bijection, its_context = _at_draw(layer, x, context, noise)
        name = f"{index} {type(layer).__name__}"
        if isinstance(layer, Indexed):
            name += f" {type(bijection).__name__}"
        z = bijection.encode(x, its_context, noise)[0]
        steps.append(_Step(name, bijection, its_context, x, z))
        x = z
    return steps


def _at_draw(
    layer: Layer, x: Tensor, context: Tensor | None, noise: Noise
) -> tuple[Bijection, Tensor | None]:
    """A layer's bijection at a draw of u, and the context to call it with."""
    its_context = context if layer.context_shape is not None else None
    if isinstance(layer, Indexed):
        dims = len(layer.shape)
        u = layer.posterior.draw((len(x),), join(x, its_context, dims), noise)
        return layer.family, join(u, its_context, dims)
    if isinstance(layer, Bijection):
        return layer, its_context
    raise ValueError(
        f"diagnostics: {type(layer).__name__} is neither a bijection nor an indexed family of them, "
        "so it has no Jacobian and no inverse to measure."
    )


def _jacobian(step: _Step) -> Tensor:
    """Dz/Dx (rows, d, d) in double precision; rows are independent, so d backward passes do."""
    with torch.enable_grad():
        x = step.x.detach().requires_grad_()
        z = step.bijection.encode(x, step.context)[0].flatten(1)
        gradients = [
            torch.autograd.grad(column.sum(), x, retain_graph=True)[0].flatten(1)
            for column in z.unbind(1)
        ]
    return torch.stack(gradients, dim=1).double()


def _stretch(name: str, jacobian: Tensor, bound: float | None) -> Stretch:
    values = torch.linalg.svdvals(jacobian)
    largest, smallest = values.max().item(), values.min().item()
    constant = max(largest, 1 / smallest) if smallest > 0 else math.inf
    return Stretch(name, largest, smallest, constant, bound)


def _bound(bijection: Bijection) -> float | None:
    """An upper bound on the bi-Lipschitz constant, if one is known."""
    if isinstance(bijection, Residual):
        kappa = bijection.network.kappa
        return max(1 + kappa, 1 / (1 - kappa))
    if isinstance(bijection, Standardise):
        return max(1 / bijection.scale.min().item(), bijection.scale.max().item())
    return None


def _largest(difference: Tensor) -> float:
    return difference.abs().max().item()

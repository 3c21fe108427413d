"""Weights in the form in which a GPU uses them, made for all networks of one shape at once.

One by one, at each use, this takes more kernels than everything else in a training step. The results
wait in a cache on each module. On a CPU nothing is gained, and nothing is made.
"""

from __future__ import annotations

__all__ = [
    "activation_of",
    "cached",
    "is_kernel",
    "linears",
    "lu_product",
    "masked_linear",
    "masked_residual",
    "on",
    "scaled_maps",
    "sizes_of",
]

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ciflows.core.groups import grouped
from ciflows.layers.linear import LULinear
from ciflows.networks import MLP, LipschitzMLP, MaskedMLP, MaskedResidualNet, Perceptron
from ciflows.networks.lipschitz import SpectralLinear
from ciflows.networks.masked import MaskedLinear
from ciflows.speed import gpu
from ciflows.speed.stacked_linear import linear, unstack

ACTIVATIONS = {nn.Tanh: "tanh", nn.ReLU: "relu"}
CACHE = "speed_cache"
MULTIPLE = 8  # GPUs multiply fastest where sizes are multiples of this

M = TypeVar("M", bound=nn.Module)


@contextmanager
def on(module: nn.Module) -> Iterator[None]:
    """Scale, mask, multiply and stack a module's weights for a while, where it is on a GPU."""
    first = next(module.parameters(), None)
    if first is None or not (first.is_cuda or gpu.INTERPRETED):
        yield
        return
    with caching(prepared(list(module.modules()))):
        yield


@contextmanager
def caching(values: dict[nn.Module, Any]) -> Iterator[None]:
    """Give modules cached values for a while."""
    try:
        for part, value in values.items():
            part.__dict__[CACHE] = value  # as an attribute, since modules share what torch compiles
        yield
    finally:
        for part in values:
            part.__dict__.pop(CACHE, None)


def cached(part: nn.Module) -> Any:
    """A module's cached value, or None; without a gradient where constants replace its parameters."""
    value = part.__dict__.get(CACHE)
    if value is None or any(p.requires_grad for p in part.parameters()):
        return value
    return value.detach() if isinstance(value, Tensor) else tuple(each.detach() for each in value)


def prepared(parts: Sequence[nn.Module]) -> dict[nn.Module, Any]:
    """What `cached` will give for each of some modules."""

    def all_of(kind: type[M]) -> list[M]:
        return [part for part in parts if isinstance(part, kind)]

    masked = [part for network in all_of(MaskedMLP) if is_kernel(network) for part in linears(network)]
    return {
        **together(filter(is_kernel, all_of(LipschitzMLP)), lambda g: (*g.sizes, g.kappa), scaled_maps),
        **together(masked, lambda part: part.weight.shape, lambda some: list(_masked(some).unbind())),
        **together(filter(is_kernel, all_of(MLP)), lambda part: (*sizes_of(part),), inner_maps),
        **padded_maps(all_of(MaskedResidualNet)),
        **together(all_of(LULinear), lambda layer: layer.shape, lu_products),
    }


def together(
    parts: Iterable[M], key: Callable[[M], Hashable], make: Callable[[list[M]], Sequence[Any]]
) -> dict[nn.Module, Any]:
    """What `make` makes of all modules with one key at once, by module."""
    made: dict[nn.Module, Any] = {}
    for some in grouped(parts, key):
        made |= zip(some, make(some), strict=True)
    return made


# -- what runs as one kernel -------------------------------------------------------------------------


def is_kernel(network: nn.Module) -> bool:
    """Whether a network, where it is now, runs as one GPU kernel, with tangents if it has any."""
    point = next(network.parameters()).new_empty(1, 1)
    if isinstance(network, LipschitzMLP):
        point = point.expand(1, network.features)
        return network.context is None and gpu.fits_chain(point, network.sizes, tangents=1)
    if isinstance(network, Perceptron):
        sizes = sizes_of(network)
        point = point.expand(1, sizes[0])
        return activation_of(network) is not None and gpu.fits_chain(point, sizes)
    return False


def linears(network: Perceptron) -> list[nn.Linear]:
    return [part for part in network if isinstance(part, nn.Linear)]


def sizes_of(network: Perceptron) -> list[int]:
    """Sizes of the input, of the hidden layers and of the output."""
    maps = linears(network)
    return [maps[0].in_features, *(part.out_features for part in maps)]


def activation_of(network: Perceptron) -> str | None:
    """The activation between the maps; None if the chains do not have it."""
    kinds = {type(part) for part in network if not isinstance(part, nn.Linear)}
    return ACTIVATIONS.get(kinds.pop()) if len(kinds) == 1 else None


# -- what is prepared --------------------------------------------------------------------------------


def scaled_maps(networks: Sequence[LipschitzMLP]) -> list[tuple[Tensor, ...]]:
    """What the kernel takes of networks of one size: W₁, those between, Wₙ, biases but the last, β."""
    rows = [cast(Sequence[SpectralLinear], network.linears) for network in networks]
    first, last = (_scaled([row[end] for row in rows]) for end in (0, -1))
    middle = _scaled([part for row in rows for part in row[1:-1]])
    biases = torch.stack([part.bias for row in rows for part in row[:-1]])
    middle, biases = (part.unflatten(0, (len(rows), -1)) for part in (middle, biases))
    beta = F.softplus(torch.stack([network.beta for network in networks]))
    return list(zip(*(part.unbind() for part in (first, middle, last, biases, beta)), strict=True))


def _scaled(maps: Sequence[SpectralLinear]) -> Tensor:
    """W / max(1, σ / bound) of maps of one shape (maps, out, in)."""
    weight, u, v = (torch.stack([getattr(part, name) for part in maps]) for name in ("weight", "u", "v"))
    norms = (u * SpectralLinear.product(weight, v)).sum(1)[:, None, None]
    return weight * (maps[0].bound / norms.clamp(min=maps[0].bound))


def inner_maps(networks: Sequence[Perceptron]) -> list[tuple[Tensor, ...]]:
    """The weights between the first and the last, and the biases but the last, of each network."""
    maps = [linears(network) for network in networks]
    weights = torch.stack([part.weight for each in maps for part in each[1:-1]])
    biases = torch.stack([part.bias for each in maps for part in each[:-1]])
    pairs = (part.unflatten(0, (len(networks), -1)).unbind() for part in (weights, biases))
    return list(zip(*pairs, strict=True))


def _masked(maps: Sequence[nn.Linear]) -> Tensor:
    """The masked weights of maps of one shape (maps, out, in)."""
    masks = torch.stack([part.get_buffer("mask") for part in maps])
    return masks * torch.stack([part.weight for part in maps])


def padded_maps(networks: Sequence[MaskedResidualNet]) -> dict[nn.Module, Any]:
    """Masked weights and biases, with hidden units added that do nothing up to a multiple of 8."""
    maps: list[tuple[MaskedLinear, int, int]] = []  # and the units added to its input and output
    for network in networks:
        more = -network.hidden % MULTIPLE
        inner = [part for block in network.blocks for part in block.children()]
        maps += [(network.first, 0, more), (network.last, more, 0)]
        maps += [(cast(MaskedLinear, part), more, more) for part in inner]
    made: dict[nn.Module, Any] = {}
    for alike in grouped(maps, lambda each: (each[0].weight.shape, *each[1:])):
        parts, (_, before, after) = [part for part, *_ in alike], alike[0]
        weights = F.pad(_masked(parts), (0, before, 0, after))
        biases = F.pad(torch.stack([part.bias for part in parts]), (0, after))
        made |= zip(parts, unstack(weights, biases), strict=True)
    return made


def lu_products(layers: Sequence[LULinear]) -> Sequence[Tensor]:
    """L U of layers of one size."""
    diagonals = torch.exp(torch.stack([layer.log_diagonal for layer in layers]))
    lower, upper = torch.diag_embed(torch.ones_like(diagonals)), torch.diag_embed(diagonals)
    rows, columns = layers[0].rows, layers[0].columns
    lower[:, rows, columns] = torch.stack([layer.lower for layer in layers])
    upper[:, columns, rows] = torch.stack([layer.upper for layer in layers])
    return (lower @ upper).unbind()


# -- versions of plain functions that use it ---------------------------------------------------------


def masked_linear(plain: Callable[..., Tensor], part: MaskedLinear, input: Tensor) -> Tensor:
    """`MaskedLinear.forward`, perhaps with units added."""
    maps = cached(part)
    return plain(part, input) if maps is None else linear(input, *maps)


def masked_residual(
    plain: Callable[..., Tensor],
    network: MaskedResidualNet,
    x: Tensor,
    context: Tensor | None = None,
    masks: Tensor | None = None,
) -> Tensor:
    """`MaskedResidualNet.forward`, with masks of dropout for the units added."""
    maps = cached(network.first)
    if masks is not None and maps is not None:
        masks = F.pad(masks, (0, len(maps[0]) - network.hidden))
    return plain(network, x, context, masks)


def lu_product(plain: Callable[..., Tensor], layer: LULinear) -> Tensor:
    product: Tensor | None = cached(layer)
    return plain(layer) if product is None else product

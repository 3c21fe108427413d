"""Whole networks at once: in C on a CPU, as one Triton kernel on a GPU."""

from __future__ import annotations

__all__ = ["lipschitz", "perceptron"]

from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ciflows.networks import LipschitzMLP, Perceptron
from ciflows.networks.lipschitz import SCALE, SpectralLinear
from ciflows.speed import cpu_chain, gpu
from ciflows.speed.stacked import activation_of, cached, linears, scaled_maps, sizes_of


def perceptron(plain: Callable[..., Tensor], network: Perceptron, x: Tensor) -> Tensor:
    """`Perceptron.forward`, where all activations are tanh or all are ReLU."""
    maps, activation = linears(network), activation_of(network)
    if activation is None or not (x.is_cpu or x.is_cuda):
        return plain(network, x)
    if gpu.fits_chain(x, sizes_of(network)):
        return _perceptron_on_gpu(network, maps, activation, x)
    worth_it = activation == "tanh" or torch.is_grad_enabled()  # torch's ReLU takes no time
    if worth_it and x.is_cpu and x.dtype == torch.float32 and x.ndim:
        rows = x.reshape(-1, x.shape[-1])
        parts = [*map(_weight, maps), *(part.bias for part in maps)]
        if cpu_chain.fits(rows, parts):
            y = cpu_chain.chain(activation, rows, parts)
            return y.reshape(*x.shape[:-1], y.shape[-1])
    return plain(network, x)


def _perceptron_on_gpu(
    network: Perceptron, maps: Sequence[nn.Linear], activation: str, x: Tensor
) -> Tensor:
    from ciflows.speed.gpu_chain import chain

    first, *between, last = map(_weight, maps)
    biases: list[Tensor] = [part.bias for part in maps]
    inner = cached(network)
    if inner is None:
        inner = between[0][None] if len(between) == 1 else torch.stack(between), torch.stack(biases[:-1])
    return chain(x, None, first, inner[0], last, inner[1], biases[-1], activation)[0]


def lipschitz(
    plain: Callable[..., tuple[Tensor, Tensor]],
    network: LipschitzMLP,
    x: Tensor,
    directions: Tensor | None = None,
    context: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`LipschitzMLP.forward`, where there is no context."""
    if network.context is None:
        fixed = directions is None or not directions.requires_grad
        tangents = 0 if directions is None else len(directions)
        if fixed and gpu.fits_chain(x, network.sizes, tangents):
            return _lipschitz_on_gpu(network, x, directions)
        stack = x[None] if directions is None else torch.cat([x[None], directions])
        maps = cast(Sequence[SpectralLinear], network.linears)
        parts = [*(part.weight for part in maps), *(part.bias for part in maps)]
        rows = stack.reshape(len(stack), -1, network.features)
        if cpu_chain.fits(rows, parts):
            made = _lipschitz_on_cpu(network, rows).reshape(stack.shape)
            return made[0], made[1:]
    return plain(network, x, directions, context)


def _lipschitz_on_gpu(
    network: LipschitzMLP, x: Tensor, directions: Tensor | None
) -> tuple[Tensor, Tensor]:
    from ciflows.speed.gpu_chain import chain

    first, middle, last, biases, beta = cached(network) or scaled_maps([network])[0]
    last_bias = network.linears[-1].get_parameter("bias")
    return chain(x, directions, first, middle, last, biases, last_bias, "lipswish", beta)


def _lipschitz_on_cpu(network: LipschitzMLP, stack: Tensor) -> Tensor:
    """The chain in y = βh, whose activations y σ(y) have no parameters: a(h) = y σ(y) / (1.1 β)."""
    beta = F.softplus(network.beta)
    after = torch.cat([beta[1:], beta.new_ones(1)])
    maps = cast(Sequence[SpectralLinear], network.linears)
    norms = torch.stack([torch.dot(part.u, torch.mv(part.weight, part.v)) for part in maps])
    scales = SCALE * after / beta * (maps[0].bound / norms.clamp(min=maps[0].bound))
    weights = [part.weight * scale for part, scale in zip(maps, scales.unbind(), strict=True)]
    biases = [part.bias * factor for part, factor in zip(maps, after.unbind(), strict=True)]
    return cpu_chain.chain("silu", beta[0] * stack, [*weights, *biases])


def _weight(part: nn.Linear) -> Tensor:
    """A map's weight, masked where it has a mask."""
    weight: Tensor | None = cached(part)
    if weight is not None:
        return weight
    return part.get_buffer("mask") * part.weight if hasattr(part, "mask") else part.weight

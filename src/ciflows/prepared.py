"""Weights in the form in which a GPU uses them, made for all networks at once."""

from __future__ import annotations

__all__ = ["detached", "giving", "prepared"]

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch import Tensor, nn

from ciflows.bijections.linear import LULinear, lu_products
from ciflows.networks.lipschitz import LipschitzMLP, scaled_weights
from ciflows.networks.masked import MaskedMLP, MaskedResidualNet, masked_weights, padded_maps
from ciflows.networks.mlp import MLP, stacked_maps

M = TypeVar("M", bound=nn.Module)
Given = Tensor | tuple[Tensor, ...]


@contextmanager
def prepared(module: nn.Module) -> Iterator[None]:
    """Scale, mask, multiply or stack a module's weights on a GPU for a while, of one shape together.

    One by one, at each use, that takes more kernels than all else in a step. On a CPU nothing is gained.
    """
    first = next(module.parameters(), None)
    if first is None or not first.is_cuda:
        yield
        return

    parts = list(module.modules())

    def all_of(kind: type[M]) -> list[M]:
        return [part for part in parts if isinstance(part, kind)]

    blocks = [network for network in all_of(LipschitzMLP) if network.fused]
    perceptrons = [network for network in all_of(MLP) if network.fused]
    masked = [linear for network in all_of(MaskedMLP) for linear in network.shared]
    values: dict[nn.Module, Given] = {**scaled_weights(blocks), **masked_weights(masked)}
    values |= stacked_maps(perceptrons)
    values |= {**padded_maps(all_of(MaskedResidualNet)), **lu_products(all_of(LULinear))}
    with giving(values):
        yield


@contextmanager
def giving(values: dict[nn.Module, Given]) -> Iterator[None]:
    """Give modules what they then need not make for a while."""
    try:
        for part, value in values.items():
            part.__dict__["given"] = value
        yield
    finally:
        for part in values:
            part.__dict__.pop("given", None)


@contextmanager
def detached(module: nn.Module) -> Iterator[None]:
    """Let what modules were given be constants for a while, in which their parameters are."""
    held = {part: part.__dict__["given"] for part in module.modules() if "given" in part.__dict__}
    try:
        for part, value in held.items():
            part.__dict__["given"] = (
                value.detach() if isinstance(value, Tensor) else tuple(each.detach() for each in value)
            )
        yield
    finally:
        for part, value in held.items():
            part.__dict__["given"] = value

"""Weights in the form in which a GPU uses them, made for all networks at once."""

from __future__ import annotations

__all__ = ["giving", "prepared", "withheld"]

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

from ciflows.bijections.linear import LULinear, lu_products
from ciflows.networks.lipschitz import LipschitzMLP, scaled_weights
from ciflows.networks.masked import MaskedMLP, MaskedResidualNet, masked_weights, padded_maps

M = TypeVar("M", bound=nn.Module)


@contextmanager
def prepared(module: nn.Module) -> Iterator[None]:
    """Scale, mask or multiply a module's weights on a GPU for a while, those of one shape together.

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
    masked = [linear for network in all_of(MaskedMLP) for linear in network.shared]
    values: dict[nn.Module, Any] = {**scaled_weights(blocks), **masked_weights(masked)}
    values |= {**padded_maps(all_of(MaskedResidualNet)), **lu_products(all_of(LULinear))}
    with giving(values):
        yield


@contextmanager
def giving(values: dict[nn.Module, Any]) -> Iterator[None]:
    """Give modules what they then need not make for a while."""
    try:
        for part, value in values.items():
            part.__dict__["given"] = value
        yield
    finally:
        for part in values:
            part.__dict__.pop("given", None)


@contextmanager
def withheld(module: nn.Module) -> Iterator[None]:
    """Take back what modules were given, for a while in which they have other parameters."""
    held = {part: part.__dict__.pop("given") for part in module.modules() if "given" in part.__dict__}
    try:
        yield
    finally:
        for part, value in held.items():
            part.__dict__["given"] = value

"""The paper's ablation: flows of indices alone, f the identity (supplement, "Ablating f").

x = e^{-s(u)} z - t(u) with u ~ p(u | z) in each layer, u as large as the data.
"""

from __future__ import annotations

__all__ = ["Id1Settings", "Id2Settings", "build_affine", "build_sum", "build_translation"]

from collections.abc import Callable

import torch
from pydantic import Field
from torch import Tensor, nn

from ciflows.core.flow import Flow
from ciflows.models.index import indexed_affine
from ciflows.networks import MLP
from ciflows.settings import Settings, Sizes


class Id1Settings(Settings):
    """Settings of a flow of indices with t(u) = u, s = 0."""

    layers: int = Field(10, ge=1, description="number of indexed layers")
    prior_hidden: Sizes = Field([128] * 4, description="hidden sizes of the network of p(u|z)")
    posterior_hidden: Sizes = Field([10, 10], description="hidden sizes of the network of q(u|x)")


class Id2Settings(Settings):
    """Settings of a flow of indices with t a network (s = 0), or (s, t)."""

    layers: int = Field(10, ge=1, description="number of indexed layers")
    affine_hidden: Sizes = Field([128, 128], description="hidden sizes of the network of s and t")
    prior_hidden: Sizes = Field([128, 128], description="hidden sizes of the network of p(u|z)")
    posterior_hidden: Sizes = Field([10, 10], description="hidden sizes of the network of q(u|x)")


class _Translation(nn.Module):
    """u -> [0, t(u)]; without a network t takes the first `features` numbers of u."""

    def __init__(self, features: int, network: nn.Module | None = None) -> None:
        super().__init__()
        self.features = features
        self.network = network

    def forward(self, u: Tensor) -> Tensor:
        t = u[..., : self.features] if self.network is None else self.network(u)
        return torch.cat([torch.zeros_like(t), t], dim=-1)


def build_sum(features: int, context_features: int, settings: Id1Settings) -> Flow:
    """The paper's CIF-Id-1: z = x + u."""
    return _stack(features, context_features, settings, lambda: _Translation(features))


def build_translation(features: int, context_features: int, settings: Id2Settings) -> Flow:
    """The paper's CIF-Id-2: z = x + t(u)."""

    def network() -> nn.Module:
        return _Translation(features, MLP(features + context_features, features, settings.affine_hidden))

    return _stack(features, context_features, settings, network)


def build_affine(features: int, context_features: int, settings: Id2Settings) -> Flow:
    """The paper's CIF-Id-3: z = e^{s(u)} (x + t(u))."""

    def network() -> nn.Module:
        return MLP(features + context_features, 2 * features, settings.affine_hidden)

    return _stack(features, context_features, settings, network)


def _stack(
    features: int,
    context_features: int,
    settings: Id1Settings | Id2Settings,
    make_network: Callable[[], nn.Module],
) -> Flow:
    hidden = settings.prior_hidden, settings.posterior_hidden
    return Flow(
        [
            indexed_affine(features, context_features, features, make_network(), *hidden)
            for _ in range(settings.layers)
        ]
    )

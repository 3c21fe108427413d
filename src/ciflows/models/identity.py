"""Flows of indices alone: the paper's ablation, where f is the identity, and the VAE.

x = e^{-s(u)} z - t(u) with u ~ p(u | z). The ablation (supplement, "Ablating f") stacks such layers with
an index as large as the data; with one layer and u independent of z it is a VAE (section 4.3): u is the
code, N(-t(u), e^{-2s(u)}) the decoder, q(u | x) the encoder.
"""

from __future__ import annotations

__all__ = [
    "Id1Settings",
    "Id2Settings",
    "Id3Settings",
    "VAESettings",
    "build_affine",
    "build_sum",
    "build_translation",
    "build_vae",
]

from collections.abc import Callable

import torch
from pydantic import Field
from torch import Tensor, nn

from ciflows.bijections import Affine
from ciflows.densities import ConditionalNormal, Density, StandardNormal
from ciflows.flow import Flow
from ciflows.indexed import Indexed
from ciflows.networks import MLP
from ciflows.settings import Settings, Sizes


class Id1Settings(Settings):
    """Settings of a flow of indices with t(u) = u, s = 0."""

    layers: int = Field(10, ge=1, description="number of indexed layers")
    prior_hidden: Sizes = Field([128] * 4, description="hidden sizes of the network of p(u|z)")
    posterior_hidden: Sizes = Field([10, 10], description="hidden sizes of the network of q(u|x)")


class Id2Settings(Settings):
    """Settings of a flow of indices with t a network, s = 0."""

    layers: int = Field(10, ge=1, description="number of indexed layers")
    affine_hidden: Sizes = Field([128, 128], description="hidden sizes of the network of s and t")
    prior_hidden: Sizes = Field([128, 128], description="hidden sizes of the network of p(u|z)")
    posterior_hidden: Sizes = Field([10, 10], description="hidden sizes of the network of q(u|x)")


class Id3Settings(Id2Settings):
    """Settings of a flow of indices with (s, t) a network."""


class VAESettings(Settings):
    """Settings of a variational autoencoder with a Gaussian decoder."""

    index_features: int = Field(2, ge=1, description="size of the code u")
    affine_hidden: Sizes = Field([128, 128], description="hidden sizes of the decoder")
    posterior_hidden: Sizes = Field([128, 128], description="hidden sizes of the encoder")


class _Translation(nn.Module):
    """u -> [0, t(u)], with t the identity on the first `features` numbers where there is no network."""

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


def build_affine(features: int, context_features: int, settings: Id3Settings) -> Flow:
    """The paper's CIF-Id-3: z = e^{s(u)} (x + t(u))."""

    def network() -> nn.Module:
        return MLP(features + context_features, 2 * features, settings.affine_hidden)

    return _stack(features, context_features, settings, network)


def build_vae(features: int, context_features: int, settings: VAESettings) -> Flow:
    """A variational autoencoder: one indexed layer whose index does not depend on z."""
    index = settings.index_features
    network = MLP(index + context_features, 2 * features, settings.affine_hidden)
    prior = StandardNormal((index,))
    return Flow([_indexed(features, context_features, index, network, prior, settings.posterior_hidden)])


def _stack(
    features: int,
    context_features: int,
    settings: Id1Settings | Id2Settings,
    make_network: Callable[[], nn.Module],
) -> Flow:
    given = features + context_features
    return Flow(
        [
            _indexed(
                features,
                context_features,
                features,
                make_network(),
                ConditionalNormal(MLP(given, 2 * features, settings.prior_hidden), features, given),
                settings.posterior_hidden,
            )
            for _ in range(settings.layers)
        ]
    )


def _indexed(
    features: int,
    context_features: int,
    index: int,
    network: nn.Module,
    prior: Density,
    posterior_hidden: Sizes,
) -> Indexed:
    given = features + context_features
    return Indexed(
        Affine(features, network, context_features=index + context_features),
        prior,
        ConditionalNormal(MLP(given, 2 * index, posterior_hidden), index, given),
        context_shape=(context_features,) if context_features else None,
    )

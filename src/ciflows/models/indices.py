"""The indexed layer that the paper puts after each bijection of a flow over vectors."""

from __future__ import annotations

__all__ = ["IndexSettings", "indexed_affine", "with_index"]

from collections.abc import Sequence

from pydantic import Field

from ciflows.bijections import Affine
from ciflows.densities import ConditionalNormal
from ciflows.indexed import Indexed
from ciflows.layers import Bijection, Layer
from ciflows.networks import MLP
from ciflows.settings import Settings, Sizes


class IndexSettings(Settings):
    """Settings of the indices of a CIF over vectors."""

    index_features: int | None = Field(
        None, ge=1, description="size of each layer's index u; about a quarter of the features if none"
    )
    affine_hidden: Sizes = Field([64, 64], description="hidden sizes of the network of s and t")
    prior_hidden: Sizes = Field([64, 64], description="hidden sizes of the network of p(u|z)")
    posterior_hidden: Sizes = Field([64, 64], description="hidden sizes of the network of q(u|x)")


def indexed_affine(features: int, context_features: int, settings: IndexSettings) -> Indexed:
    """F(z; u) = e^{-s(u)} z - t(u), with Gaussian p(u|z) and q(u|x); the identity at the start.

    Arguments:
        features: Size of x.
        context_features: Size of the outer context; 0 for none.
        settings: Sizes of the index and of the three networks.
    """
    given = features + context_features
    index = settings.index_features or max(1, round(features / 4))
    return Indexed(
        family=Affine(
            features,
            MLP(
                index + context_features,
                2 * features,
                settings.affine_hidden,
                zero_last=True,
            ),
            context_features=index + context_features,
        ),
        prior=ConditionalNormal(MLP(given, 2 * index, settings.prior_hidden), index, given),
        posterior=ConditionalNormal(MLP(given, 2 * index, settings.posterior_hidden), index, given),
        context_shape=(context_features,) if context_features else None,
    )


def with_index(
    steps: Sequence[Sequence[Bijection]], features: int, context_features: int, settings: Settings
) -> list[Layer]:
    """The layers of a model: steps of bijections, each followed by an index where settings have one."""
    layers: list[Layer] = []
    for step in steps:
        layers += step
        if isinstance(settings, IndexSettings):
            layers.append(indexed_affine(features, context_features, settings))
    return layers

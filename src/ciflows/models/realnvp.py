"""Flows of affine couplings over vectors (Dinh et al., 2017)."""

from __future__ import annotations

__all__ = ["CIFRealNVPSettings", "RealNVPSettings", "build"]

from pydantic import Field

from ciflows.core.flow import Flow
from ciflows.models.autoregressive import check_affine, feature_order, masked_layer
from ciflows.models.index import IndexSettings, with_index
from ciflows.settings import Settings, Sizes


class RealNVPSettings(Settings):
    """Settings of a flow of affine couplings."""

    layers: int = Field(10, ge=2, description="number of coupling layers")
    hidden: Sizes = Field([128, 128], description="hidden sizes of each layer's network")


class CIFRealNVPSettings(RealNVPSettings, IndexSettings):
    """Settings of a flow of affine couplings with an index after each layer."""


def build(
    features: int, context_features: int, settings: RealNVPSettings, index: IndexSettings | None = None
) -> Flow:
    """Build the flow: couplings alone, or each followed by an indexed affine map."""
    check_affine(features, index)
    steps = [
        [masked_layer(feature_order(features, layer), context_features, settings.hidden, coupling=True)]
        for layer in range(settings.layers)
    ]
    return Flow(with_index(steps, features, context_features, index))

"""Masked autoregressive flows (Papamakarios et al., 2017)."""

from __future__ import annotations

__all__ = ["CIFMAFSettings", "MAFSettings", "PlainMAFSettings", "build", "masked_steps"]

from pydantic import Field

from ciflows.core.flow import Flow
from ciflows.core.layer import Bijection
from ciflows.layers import BatchNorm
from ciflows.models.autoregressive import check_affine, feature_order, masked_layer
from ciflows.models.index import IndexSettings, with_index
from ciflows.settings import Settings, Sizes


class MAFSettings(Settings):
    """Settings of a masked autoregressive flow."""

    layers: int = Field(10, ge=1, description="number of autoregressive layers")
    hidden: Sizes = Field([128, 128], description="hidden sizes of each layer's masked network")


class PlainMAFSettings(MAFSettings):
    """Settings of a masked autoregressive flow without an index, which may have batch norm instead."""

    batch_norm: bool = Field(False, description="normalise by batch after each layer")


class CIFMAFSettings(MAFSettings, IndexSettings):
    """Settings of a masked autoregressive flow with an index after each layer."""


def build(
    features: int, context_features: int, settings: MAFSettings, index: IndexSettings | None = None
) -> Flow:
    """Build the flow: layers alone, or each followed by an indexed affine map."""
    check_affine(features, index)
    steps = masked_steps(features, context_features, settings)
    if isinstance(settings, PlainMAFSettings) and settings.batch_norm:
        steps = [[*step, BatchNorm((features,))] for step in steps]
    return Flow(with_index(steps, features, context_features, index))


def masked_steps(features: int, context_features: int, settings: MAFSettings) -> list[list[Bijection]]:
    """The autoregressive layers, without any index."""
    return [
        [masked_layer(feature_order(features, layer), context_features, settings.hidden)]
        for layer in range(settings.layers)
    ]

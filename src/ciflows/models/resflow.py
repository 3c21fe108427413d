"""Residual flows over vectors (supplement, "Residual Flows")."""

from __future__ import annotations

__all__ = ["CIFResFlowSettings", "ResFlowSettings", "build"]

from typing import Literal

from pydantic import Field

from ciflows.core.flow import Flow
from ciflows.core.layer import Bijection
from ciflows.layers import ActNorm, Residual, Roulette
from ciflows.models.index import IndexSettings, with_index
from ciflows.networks import LipschitzMLP
from ciflows.settings import Settings, Sizes


class ResFlowSettings(Settings):
    """Settings of a residual flow."""

    layers: int = Field(10, ge=1, description="number of residual blocks")
    hidden: Sizes = Field([128] * 4, description="hidden sizes of each block's network")
    kappa: float = Field(0.9, gt=0, lt=1, description="Lipschitz bound of each block's g")
    log_det: Literal["exact", "roulette"] = Field(
        "exact", description="log-determinants in training; evaluation is always exact"
    )
    act_norm: bool = Field(
        False, description="scale and shift each feature after each block, which lifts the bound on them"
    )


class CIFResFlowSettings(ResFlowSettings, IndexSettings):
    """Settings of a residual flow with an index after each block."""


def build(
    features: int, context_features: int, settings: ResFlowSettings, index: IndexSettings | None = None
) -> Flow:
    """Build the flow: blocks alone, or each followed by an indexed affine map."""
    blocks = [_block(features, context_features, settings) for _ in range(settings.layers)]
    return Flow(with_index(blocks, features, context_features, index))


def _block(features: int, context_features: int, settings: ResFlowSettings) -> list[Bijection]:
    """A residual block, and the normalisation after it if there is one."""
    network = LipschitzMLP(features, settings.hidden, settings.kappa, context_features)
    block = Residual(network, training_log_det=Roulette() if settings.log_det == "roulette" else None)
    return [block, ActNorm((features,))] if settings.act_norm else [block]

"""Residual flows, plain and with a continuous index (supplement, "Residual Flows")."""

from __future__ import annotations

__all__ = ["ResFlowSettings", "build"]

from typing import Literal

from pydantic import Field

from ciflows.bijections import Residual, Roulette
from ciflows.flow import Flow
from ciflows.models.indices import with_index
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


def build(features: int, context_features: int, settings: ResFlowSettings) -> Flow:
    """Build the flow: blocks alone, or each followed by an indexed affine map."""
    blocks = [
        [
            Residual(
                LipschitzMLP(features, settings.hidden, settings.kappa, context_features),
                training_log_det=Roulette() if settings.log_det == "roulette" else None,
            )
        ]
        for _ in range(settings.layers)
    ]
    return Flow(with_index(blocks, features, context_features, settings))

"""A mixture of masked autoregressive flows, to compare a discrete index with a continuous one."""

from __future__ import annotations

__all__ = ["MixtureSettings", "build"]

from itertools import chain

from pydantic import Field

from ciflows.core.flow import Flow
from ciflows.layers.mixture import Mixture
from ciflows.models.maf import MAFSettings, masked_steps
from ciflows.networks import MLP
from ciflows.settings import Sizes


class MixtureSettings(MAFSettings):
    """Settings of a mixture of masked autoregressive flows."""

    components: int = Field(8, ge=1, description="number of flows in the mixture")
    layers: int = Field(4, ge=1, description="number of autoregressive layers of each")
    hidden: Sizes = Field([64, 64], description="hidden sizes of each layer's masked network")
    gate_hidden: Sizes = Field([64, 64], description="hidden sizes of the network of p(i|z)")


def build(features: int, context_features: int, settings: MixtureSettings) -> Flow:
    """Build the mixture, as the base of a flow without layers."""
    gate = MLP(features + context_features, settings.components, settings.gate_hidden)
    flows = [
        list(chain.from_iterable(masked_steps(features, context_features, settings)))
        for _ in range(settings.components)
    ]
    return Flow([], Mixture(flows, gate))

"""The variational autoencoder as a CIF of one layer (section 4.3).

f is the identity and u does not depend on z: u ~ N(0, I) is the code, N(-t(u), e^{-2s(u)}) the decoder,
and q(u | x) the encoder.
"""

from __future__ import annotations

__all__ = ["VAESettings", "build"]

from pydantic import Field

from ciflows.core.flow import Flow
from ciflows.models.index import indexed_affine
from ciflows.networks import MLP
from ciflows.settings import Settings, Sizes


class VAESettings(Settings):
    """Settings of a variational autoencoder with a Gaussian decoder."""

    index_features: int = Field(2, ge=1, description="size of the code u")
    affine_hidden: Sizes = Field([128, 128], description="hidden sizes of the decoder")
    posterior_hidden: Sizes = Field([128, 128], description="hidden sizes of the encoder")


def build(features: int, context_features: int, settings: VAESettings) -> Flow:
    """Build the flow: one indexed layer."""
    size, hidden = settings.index_features, settings.posterior_hidden
    decoder = MLP(size + context_features, 2 * features, settings.affine_hidden)
    return Flow([indexed_affine(features, context_features, size, decoder, None, hidden)])

"""Autoregressive and coupling flows over vectors, plain and with a continuous index.

Each layer is one masked network from zuko, and every other one takes the features in reverse. In an
autoregressive layer each feature is transformed given all before it, in a coupling layer the second half
given the first.
"""

from __future__ import annotations

__all__ = [
    "CIFMAFSettings",
    "CIFNSFSettings",
    "CIFRealNVPSettings",
    "MAFSettings",
    "NSFSettings",
    "RealNVPSettings",
    "build",
]

from functools import partial
from typing import Any

import torch
from pydantic import Field
from zuko.flows import MaskedAutoregressiveTransform
from zuko.transforms import MonotonicRQSTransform

from ciflows.bijections import ZukoBijection
from ciflows.errors import UserError
from ciflows.flow import Flow
from ciflows.layers import Bijection
from ciflows.models.indices import IndexSettings, with_index
from ciflows.settings import Settings, Sizes


class MAFSettings(Settings):
    """Settings of a masked autoregressive flow."""

    layers: int = Field(10, ge=1, description="number of autoregressive layers")
    hidden: Sizes = Field([128, 128], description="hidden sizes of each layer's masked network")


class RealNVPSettings(Settings):
    """Settings of a flow of affine couplings."""

    layers: int = Field(10, ge=2, description="number of coupling layers")
    hidden: Sizes = Field([128, 128], description="hidden sizes of each layer's network")


class NSFSettings(Settings):
    """Settings of a neural spline flow."""

    layers: int = Field(10, ge=1, description="number of spline layers")
    hidden: Sizes = Field([128, 128], description="hidden sizes of each layer's masked network")
    bins: int = Field(8, ge=2, description="pieces of each rational-quadratic spline")
    bound: float = Field(5.0, gt=0, description="splines act on [-bound, bound], the identity beyond")
    coupling: bool = Field(False, description="coupling in place of autoregressive layers")


class CIFMAFSettings(MAFSettings, IndexSettings):
    """Settings of a masked autoregressive flow with an index after each layer."""


class CIFRealNVPSettings(RealNVPSettings, IndexSettings):
    """Settings of a flow of affine couplings with an index after each."""


class CIFNSFSettings(NSFSettings, IndexSettings):
    """Settings of a neural spline flow with an index after each layer."""


def build(
    features: int, context_features: int, settings: MAFSettings | RealNVPSettings | NSFSettings
) -> Flow:
    """Build the flow: layers alone, or each followed by an indexed affine map."""
    spline = settings if isinstance(settings, NSFSettings) else None
    coupling = isinstance(settings, RealNVPSettings) or (spline is not None and spline.coupling)
    if features == 1 and spline is None and not isinstance(settings, IndexSettings):
        raise UserError("Affine layers make of one column nothing but a Gaussian: use nsf or resflow.")
    options: dict[str, Any] = {"passes": 2} if coupling and features > 1 else {}
    if spline is not None:
        options["univariate"] = partial(MonotonicRQSTransform, bound=spline.bound)
        options["shapes"] = [(spline.bins,), (spline.bins,), (spline.bins - 1,)]
    order = torch.arange(features)
    blocks: list[Bijection] = [
        ZukoBijection(
            MaskedAutoregressiveTransform(
                features,
                context_features,
                order=order.flip(0) if index % 2 else order,
                hidden_features=settings.hidden,
                **options,
            ),
            features,
            context_features,
        )
        for index in range(settings.layers)
    ]
    return Flow(with_index(blocks, features, context_features, settings))

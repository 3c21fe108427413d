"""Neural spline flows (Durkan et al., 2019)."""

from __future__ import annotations

__all__ = ["CIFNSFSettings", "NSFSettings", "build"]

from functools import partial

import torch
from pydantic import Field
from torch import Tensor

from ciflows.core.flow import Flow
from ciflows.core.layer import Bijection
from ciflows.errors import UserError
from ciflows.layers import AutoregressiveSpline, LULinear, Permutation
from ciflows.layers.splines import Spline
from ciflows.models.autoregressive import feature_order, masked_layer
from ciflows.models.index import IndexSettings, with_index
from ciflows.networks import MaskedResidualNet
from ciflows.settings import Settings, Sizes


class NSFSettings(Settings):
    """Settings of a neural spline flow."""

    layers: int = Field(10, ge=1, description="number of spline layers")
    hidden: Sizes = Field([128, 128], description="hidden sizes of each layer's masked network")
    bins: int = Field(8, ge=2, description="pieces of each rational-quadratic spline")
    bound: float = Field(5.0, gt=0, description="splines act on [-bound, bound], the identity beyond")
    coupling: bool = Field(False, description="coupling in place of autoregressive layers")
    residual: bool = Field(
        False, description="residual masked networks: a block for each (equal) hidden size"
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="share of units dropped in residual networks")
    linear: bool = Field(
        False, description="a random permutation and an LU-factored linear map around each layer"
    )


class CIFNSFSettings(NSFSettings, IndexSettings):
    """Settings of a neural spline flow with an index after each layer."""


def build(
    features: int, context_features: int, settings: NSFSettings, index: IndexSettings | None = None
) -> Flow:
    """Build the flow: spline layers alone, or each followed by an indexed affine map."""
    steps = [_step(layer, features, context_features, settings) for layer in range(settings.layers)]
    last = _linear(features) if settings.linear else []
    return Flow([*with_index(steps, features, context_features, index), *last])


def _step(layer: int, features: int, context_features: int, settings: NSFSettings) -> list[Bijection]:
    linear = _linear(features) if settings.linear else []
    # the random permutation takes the place of the reversed order
    order = feature_order(features, 0 if linear else layer)
    make = _residual_spline if settings.residual else _spline
    return [*linear, make(order, context_features, settings)]


def _linear(features: int) -> list[Bijection]:
    return [Permutation(torch.randperm(features)), LULinear(features)]


def _spline(order: Tensor, context_features: int, settings: NSFSettings) -> Bijection:
    if settings.dropout:
        raise UserError("model nsf: dropout is for residual networks: set residual=true with it.")
    bins = settings.bins
    univariate, shapes = partial(Spline, bound=settings.bound), [(bins,), (bins,), (bins - 1,)]
    options = {"univariate": univariate, "shapes": shapes}
    return masked_layer(order, context_features, settings.hidden, settings.coupling, **options)


def _residual_spline(order: Tensor, context_features: int, settings: NSFSettings) -> Bijection:
    if settings.coupling or len(set(settings.hidden)) != 1:
        raise UserError(
            "model nsf: residual networks are for autoregressive layers, and have one width: "
            "set coupling=false, and equal hidden sizes such as [256, 256]."
        )
    network = MaskedResidualNet(
        len(order),
        3 * settings.bins - 1,
        settings.hidden[0],
        len(settings.hidden),
        context_features,
        settings.dropout,
        order.argsort(),
    )
    return AutoregressiveSpline(len(order), network, settings.bins, settings.bound)

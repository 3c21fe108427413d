"""Autoregressive and coupling flows over vectors.

Each layer is one masked network, and every other one takes the features in reverse (but where a random
permutation comes before each). In an autoregressive layer each feature is transformed given all before
it, in a coupling layer the second half given the first.
"""

from __future__ import annotations

__all__ = ["MAFSettings", "NSFSettings", "PlainMAFSettings", "RealNVPSettings", "build", "masked_layers"]

from functools import partial
from typing import Any

import torch
from pydantic import Field
from torch import nn
from zuko.flows import MaskedAutoregressiveTransform

from ciflows.bijections import AutoregressiveSpline, BatchNorm, LULinear, Permutation, ZukoBijection
from ciflows.bijections.autoregressive import Spline
from ciflows.errors import UserError
from ciflows.flow import Flow
from ciflows.layers import Bijection
from ciflows.models.indices import IndexSettings, with_index
from ciflows.networks import MaskedMLP, MaskedResidualNet
from ciflows.settings import Settings, Sizes


class MAFSettings(Settings):
    """Settings of a masked autoregressive flow."""

    layers: int = Field(10, ge=1, description="number of autoregressive layers")
    hidden: Sizes = Field([128, 128], description="hidden sizes of each layer's masked network")


class PlainMAFSettings(MAFSettings):
    """Settings of a masked autoregressive flow without an index, which may have batch norm instead."""

    batch_norm: bool = Field(False, description="normalise by batch after each layer")


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
    residual: bool = Field(
        False, description="residual masked networks: a block for each (equal) hidden size"
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="share of units dropped in residual networks")
    linear: bool = Field(
        False, description="a random permutation and an LU-factored linear map around each layer"
    )


def build(
    features: int, context_features: int, settings: MAFSettings | RealNVPSettings | NSFSettings
) -> Flow:
    """Build the flow: layers alone, or each followed by an indexed affine map."""
    splines = isinstance(settings, NSFSettings)
    if features == 1 and not splines and not isinstance(settings, IndexSettings):
        raise UserError("Affine layers make of one column nothing but a Gaussian: use nsf or resflow.")
    steps = _steps(features, context_features, settings)
    last = _linear(features) if isinstance(settings, NSFSettings) and settings.linear else []
    return Flow([*with_index(steps, features, context_features, settings), *last])


def masked_layers(features: int, context_features: int, settings: MAFSettings) -> list[Bijection]:
    """The layers of a masked autoregressive flow, without any index."""
    return [layer for step in _steps(features, context_features, settings) for layer in step]


def _steps(
    features: int, context_features: int, settings: MAFSettings | RealNVPSettings | NSFSettings
) -> list[list[Bijection]]:
    return [_step(index, features, context_features, settings) for index in range(settings.layers)]


def _step(
    index: int,
    features: int,
    context_features: int,
    settings: MAFSettings | RealNVPSettings | NSFSettings,
) -> list[Bijection]:
    order = torch.arange(features)
    order = order.flip(0) if index % 2 else order
    if isinstance(settings, NSFSettings):
        linear = _linear(features) if settings.linear else []
        order = torch.arange(features) if linear else order
        return [*linear, _spline(order, context_features, settings)]
    passes = 2 if isinstance(settings, RealNVPSettings) else None
    layer = _masked(order, context_features, settings.hidden, passes)
    norm = isinstance(settings, PlainMAFSettings) and settings.batch_norm
    return [layer, BatchNorm((features,))] if norm else [layer]


def _linear(features: int) -> list[Bijection]:
    return [Permutation(torch.randperm(features)), LULinear(features)]


def _spline(order: torch.Tensor, context_features: int, settings: NSFSettings) -> Bijection:
    bins, features = settings.bins, len(order)
    if not settings.residual:
        if settings.dropout:
            raise UserError("model nsf: dropout is for residual networks: set residual=true with it.")
        return _masked(
            order,
            context_features,
            settings.hidden,
            passes=2 if settings.coupling else None,
            univariate=partial(Spline, bound=settings.bound),
            shapes=[(bins,), (bins,), (bins - 1,)],
        )
    if settings.coupling or len(set(settings.hidden)) != 1:
        raise UserError(
            "model nsf: residual networks are for autoregressive layers, and have one width: "
            "set coupling=false, and equal hidden sizes such as [256, 256]."
        )
    network = MaskedResidualNet(
        features,
        3 * bins - 1,
        settings.hidden[0],
        len(settings.hidden),
        context_features,
        settings.dropout,
        order.argsort(),
    )
    return AutoregressiveSpline(features, network, bins, settings.bound)


def _masked(
    order: torch.Tensor, context_features: int, hidden: Sizes, passes: int | None, **options: Any
) -> Bijection:
    features = len(order)
    if features > 1:
        options |= {"order": order, "passes": passes}
    transform = MaskedAutoregressiveTransform(
        features,
        context_features,
        hidden_features=hidden,
        activation=partial(nn.ReLU, inplace=True),
        **options,
    )
    if features > 1:
        transform.hyper = MaskedMLP(transform.hyper)
    return ZukoBijection(transform, features, context_features, compiles=True)

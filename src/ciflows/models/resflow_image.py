"""Residual flows over images (Chen et al., 2019; supplement, "Image Experiments")."""

from __future__ import annotations

__all__ = ["CIFResFlowImageSettings", "ResFlowImageSettings", "build"]

import math
from typing import Literal

from pydantic import Field

from ciflows.core.flow import Flow
from ciflows.core.layer import Layer, Shape
from ciflows.layers import ActNorm, Flatten, Residual, Roulette, Series, Squeeze, default_log_det
from ciflows.models.image_parts import (
    ImageIndexSettings,
    ImageSettings,
    check_even,
    from_pixels,
    image_index,
)
from ciflows.networks import LipschitzConvNet, LipschitzMLP
from ciflows.networks.lipschitz import LipschitzNetwork
from ciflows.settings import Sizes


class ResFlowImageSettings(ImageSettings):
    """Settings of a multi-scale residual flow over images."""

    scales: int = Field(3, ge=1, description="number of scales; between them images are squeezed")
    layers: int = Field(4, ge=1, description="convolutional residual blocks at each scale")
    channels: int = Field(128, ge=1, description="channels inside a convolutional block")
    flat_layers: int = Field(4, ge=0, description="fully connected residual blocks at the end")
    flat_hidden: Sizes = Field([64, 64], description="hidden sizes of a fully connected block")
    kappa: float = Field(0.98, gt=0, lt=1, description="Lipschitz bound of each block's g")
    log_det: Literal["roulette", "series"] = Field(
        "roulette", description="log-determinants in training; series: those of evaluation"
    )
    probes: int = Field(
        16, ge=4, multiple_of=4, description="probes of each log-determinant in evaluation"
    )


class CIFResFlowImageSettings(ResFlowImageSettings, ImageIndexSettings):
    """Settings of a multi-scale residual flow over images with an index after each block."""

    affine_channels: int = Field(32, ge=1, description="channels of the network of s and t")
    index_channels: int = Field(32, ge=1, description="channels of those of p(u|z) and q(u|x)")


def build(shape: Shape, settings: ResFlowImageSettings, index: ImageIndexSettings | None = None) -> Flow:
    """Scales of convolutional residual blocks, then fully connected ones.

    An actnorm comes before the first block and after each of them, and an index before each actnorm.
    """
    check_even(shape, settings.scales - 1)
    layers = from_pixels(shape, settings)
    layers += [*image_index(shape, index), ActNorm(shape)]
    for scale in range(settings.scales):
        for _ in range(settings.layers):
            network = LipschitzConvNet(shape, settings.channels, kappa=settings.kappa)
            layers += _block(network, len(layers), settings, index)
        if scale < settings.scales - 1:
            layers.append(Squeeze(shape))
            shape = layers[-1].noise_shape
    layers.append(Flatten(shape))
    for _ in range(settings.flat_layers):
        flat = LipschitzMLP(math.prod(shape), settings.flat_hidden, settings.kappa)
        layers += _block(flat, len(layers), settings, index)
    return Flow(layers)


def _block(
    network: LipschitzNetwork,
    number: int,
    settings: ResFlowImageSettings,
    index: ImageIndexSettings | None,
) -> list[Layer]:
    """A residual block with probes of its own, its index, if any, and an actnorm."""
    log_det = default_log_det(network.shape, number)
    if isinstance(log_det, Series):
        log_det = Series(settings.probes, seed=number)
    in_training = Roulette() if settings.log_det == "roulette" else None
    block = Residual(network, log_det, in_training)
    return [block, *image_index(network.shape, index), ActNorm(network.shape)]

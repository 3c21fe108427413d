"""RealNVP over images (Dinh et al., 2017; supplement, "Image Experiments")."""

from __future__ import annotations

__all__ = ["CIFRealNVPImageSettings", "RealNVPImageSettings", "build"]

from typing import Literal

from pydantic import Field

from ciflows.core.flow import Flow
from ciflows.core.layer import Layer, Shape
from ciflows.layers import BatchNorm, Coupling, Squeeze
from ciflows.layers.split import Split
from ciflows.models.image_parts import (
    ImageIndexSettings,
    ImageSettings,
    check_even,
    from_pixels,
    image_index,
)
from ciflows.networks import ResNet


class RealNVPImageSettings(ImageSettings):
    """Settings of a multi-scale RealNVP over images."""

    blocks: int = Field(4, ge=1, description="residual blocks of each coupling's network")
    channels: int = Field(64, ge=1, description="channels of each coupling's network")


class CIFRealNVPImageSettings(RealNVPImageSettings, ImageIndexSettings):
    """Settings of a multi-scale RealNVP over images with an index after each coupling."""


def build(shape: Shape, settings: RealNVPImageSettings, index: ImageIndexSettings | None = None) -> Flow:
    """Ten couplings as Dinh et al. (2017) have them for CIFAR-10, each followed by a batch norm.

    Three with checkerboards, a squeeze, three with channels, a split, four with checkerboards. As in the
    authors' code the batch norm comes after the index, and has parameters in a plain flow only.
    """
    check_even(shape, 1)
    layers = from_pixels(shape, settings)
    layers += _couplings(shape, 3, "checkerboard", settings, index)
    layers.append(Squeeze(shape))
    layers += _couplings(layers[-1].noise_shape, 3, "channel", settings, index)
    layers.append(Split(layers[-1].noise_shape))
    layers += _couplings(layers[-1].noise_shape, 4, "checkerboard", settings, index)
    return Flow(layers)


def _couplings(
    shape: Shape,
    count: int,
    mask: Literal["checkerboard", "channel"],
    settings: RealNVPImageSettings,
    index: ImageIndexSettings | None,
) -> list[Layer]:
    """Couplings with alternating masks, each with its index, if any, and a batch norm."""
    stays = shape[0] if mask == "checkerboard" else shape[0] // 2
    layers: list[Layer] = []
    for layer in range(count):
        network = ResNet(stays, 2 * stays, settings.channels, settings.blocks, zero_last=True)
        layers.append(Coupling(shape, network, mask, flip=bool(layer % 2)))
        layers += [*image_index(shape, index), BatchNorm(shape, affine=index is None)]
    return layers

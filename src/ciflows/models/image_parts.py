"""What flows over images share: from pixels to all real numbers, and an index of one channel.

Dequantisation, division by the number of levels and the logit come first, so likelihoods are those of
the discrete images. A plain flow is therefore evaluated by draws too, those of the dequantisation.
"""

from __future__ import annotations

__all__ = ["ImageIndexSettings", "ImageSettings", "check_even", "from_pixels", "image_index"]

from typing import Literal

from pydantic import Field
from torch import nn

from ciflows.core.density import ConditionalNormal
from ciflows.core.flow import Flow
from ciflows.core.indexed import Indexed
from ciflows.core.layer import Layer, Shape
from ciflows.errors import UserError
from ciflows.layers import Affine, Coupling, Logit, Scale
from ciflows.layers.dequantise import Dequantise
from ciflows.networks import MLP, ResNet
from ciflows.settings import Settings

DEQUANTISE_COUPLINGS = 4
DEQUANTISE_BLOCKS, DEQUANTISE_CHANNELS = 2, 64


class ImageSettings(Settings):
    """Settings of the way from pixels to all real numbers."""

    levels: int = Field(256, ge=2, le=256, description="values of a pixel: 0, ..., levels - 1")
    alpha: float = Field(
        0.05, gt=0, lt=0.5, description="how far the logit keeps off 0 and 1; smaller for sharp images"
    )
    dequantise: Literal["uniform", "variational"] = Field(
        "uniform", description="noise added to the integer pixels: uniform, or learned for each image"
    )


class ImageIndexSettings(Settings):
    """Settings of the indices of a CIF over images, each of one channel."""

    affine_blocks: int = Field(2, ge=1, description="residual blocks of the network of s and t")
    affine_channels: int = Field(8, ge=1, description="channels of the network of s and t")
    index_blocks: int = Field(2, ge=1, description="residual blocks of those of p(u|z) and q(u|x)")
    index_channels: int = Field(64, ge=1, description="channels of those of p(u|z) and q(u|x)")


def check_even(shape: Shape, squeezes: int) -> None:
    """Refuse images that cannot be halved so many times."""
    multiple = 2**squeezes
    if shape[1] % multiple or shape[2] % multiple:
        raise UserError(
            f"This model halves images {squeezes} times, so that their height and width have to be "
            f"multiples of {multiple}; got {shape[1]} and {shape[2]}."
        )


def from_pixels(shape: Shape, settings: ImageSettings) -> list[Layer]:
    """The layers from integers 0, ..., levels - 1 to all real numbers."""
    noise = _dequantiser(shape) if settings.dequantise == "variational" else None
    return [
        Dequantise(shape, noise, settings.levels),
        Scale(shape, 1 / settings.levels),
        Logit(shape, settings.alpha),
    ]


def _dequantiser(shape: Shape) -> Flow:
    """q(w | x): couplings that see the image, N(0, I) at the start (Ho et al., 2019)."""
    return Flow(
        [
            Coupling(shape, _dequantiser_network(shape), flip=bool(layer % 2), context_features=shape)
            for layer in range(DEQUANTISE_COUPLINGS)
        ]
    )


def _dequantiser_network(shape: Shape) -> nn.Module:
    """(*, 2 C, H, W) -> (*, 2 C, H, W), at half of the resolution for even sizes, which is quicker."""
    halved = 1 if any(size % 2 for size in shape[1:]) else 2
    channels = 2 * shape[0] * halved**2
    network = ResNet(channels, channels, DEQUANTISE_CHANNELS, DEQUANTISE_BLOCKS, zero_last=True)
    return nn.Sequential(nn.PixelUnshuffle(halved), network, nn.PixelShuffle(halved))


def image_index(shape: Shape, index: ImageIndexSettings | None) -> list[Indexed]:
    """The indexed affine map after a bijection; none if `index` is None.

    u has one channel, or is one number for vectors. No network starts at 0, as in the authors' code.
    With s, t, p and q all at 0 u says nothing about x and no gradient of p or q changes that: training
    hardly leaves this saddle (Fashion-MNIST: 2.796 bits per dimension from there, 2.778 from here).
    """
    if index is None:
        return []
    u = (1, *shape[1:])
    affine, size = (
        (index.affine_blocks, index.affine_channels),
        (index.index_blocks, index.index_channels),
    )
    prior, posterior = (ConditionalNormal(_network(shape, 2, *size), u, shape) for _ in range(2))
    return [Indexed(Affine(shape, _network(u, 2 * shape[0], *affine), u), prior, posterior)]


def _network(shape: Shape, out: int, blocks: int, channels: int) -> ResNet | MLP:
    """A ResNet on images of a shape; on vectors an MLP with as many hidden layers as blocks."""
    if len(shape) == 1:
        return MLP(shape[0], out, [channels] * blocks)
    return ResNet(shape[0], out, channels, blocks)

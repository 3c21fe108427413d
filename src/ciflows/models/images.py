"""Flows over images, plain and with a continuous index (supplement, "Image Experiments").

Both begin with the same steps from pixels to all numbers, so that likelihoods are those of the discrete
images: dequantisation, division by the number of levels, and the logit. With them in the flow, a plain
one too is evaluated by draws, those of the dequantisation.
"""

from __future__ import annotations

__all__ = [
    "ImageIndexSettings",
    "RealNVPImageSettings",
    "ResFlowImageSettings",
    "ResFlowIndexSettings",
    "build_realnvp",
    "build_resflow",
]

import math
from typing import Literal

from pydantic import Field

from ciflows.bijections import (
    ActNorm,
    Affine,
    BatchNorm,
    Coupling,
    Flatten,
    Logit,
    Residual,
    Roulette,
    Scale,
    Series,
    Squeeze,
    default_log_det,
)
from ciflows.densities import ConditionalNormal
from ciflows.dequantise import Dequantise
from ciflows.errors import UserError
from ciflows.flow import Flow
from ciflows.indexed import Indexed
from ciflows.layers import Bijection, Layer, Shape
from ciflows.multiscale import Split
from ciflows.networks import MLP, LipschitzConvNet, LipschitzMLP, ResNet
from ciflows.networks.lipschitz import LipschitzNetwork
from ciflows.settings import Settings, Sizes

DEQUANTISE_COUPLINGS = 4
DEQUANTISE_BLOCKS, DEQUANTISE_CHANNELS = 2, 32


class ImageSettings(Settings):
    """Settings of the way from pixels to all numbers."""

    levels: int = Field(256, ge=2, le=256, description="values of a pixel: 0, ..., levels - 1")
    alpha: float = Field(
        0.05, gt=0, lt=0.5, description="how far the logit keeps off 0 and 1; smaller for sharp images"
    )
    dequantise: Literal["uniform", "variational"] = Field(
        "uniform", description="noise added to the integer pixels: uniform, or learned for each image"
    )


class RealNVPImageSettings(ImageSettings):
    """Settings of a multi-scale RealNVP over images."""

    blocks: int = Field(4, ge=1, description="residual blocks of each coupling's network")
    channels: int = Field(64, ge=1, description="channels of each coupling's network")


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


class ImageIndexSettings(Settings):
    """Settings of the indices of a CIF over images, each of one channel."""

    affine_blocks: int = Field(2, ge=1, description="residual blocks of the network of s and t")
    affine_channels: int = Field(8, ge=1, description="channels of the network of s and t")
    index_blocks: int = Field(2, ge=1, description="residual blocks of those of p(u|z) and q(u|x)")
    index_channels: int = Field(64, ge=1, description="channels of those of p(u|z) and q(u|x)")


class ResFlowIndexSettings(ImageIndexSettings):
    """Settings of the indices of a residual CIF over images."""

    affine_channels: int = Field(32, ge=1, description="channels of the network of s and t")
    index_channels: int = Field(32, ge=1, description="channels of those of p(u|z) and q(u|x)")


def build_realnvp(shape: Shape, settings: RealNVPImageSettings) -> Flow:
    """Ten couplings as Dinh et al. (2017) have them for CIFAR-10, each followed by a batch norm.

    Three with checkerboards, a squeeze, three with channels, a split, four with checkerboards. As in the
    authors' code the batch norm stands after the index, and has parameters in a plain flow alone.
    """
    _check_even(shape, 1)
    layers = _from_pixels(shape, settings)
    layers += _couplings(shape, 3, "checkerboard", settings)
    layers.append(Squeeze(shape))
    layers += _couplings(layers[-1].noise_shape, 3, "channel", settings)
    layers.append(Split(layers[-1].noise_shape))
    layers += _couplings(layers[-1].noise_shape, 4, "checkerboard", settings)
    return Flow(layers)


def build_resflow(shape: Shape, settings: ResFlowImageSettings) -> Flow:
    """Scales of convolutional residual blocks, then fully connected ones (Chen et al., 2019).

    An actnorm stands before the first block and after each of them, and an index before each actnorm.
    """
    _check_even(shape, settings.scales - 1)
    layers = _from_pixels(shape, settings)
    layers += [*_index(shape, settings), ActNorm(shape)]
    for scale in range(settings.scales):
        for _ in range(settings.layers):
            network = LipschitzConvNet(shape, settings.channels, kappa=settings.kappa)
            layers += _block(network, len(layers), settings)
        if scale < settings.scales - 1:
            layers.append(Squeeze(shape))
            shape = layers[-1].noise_shape
    layers.append(Flatten(shape))
    for _ in range(settings.flat_layers):
        flat = LipschitzMLP(math.prod(shape), settings.flat_hidden, settings.kappa)
        layers += _block(flat, len(layers), settings)
    return Flow(layers)


# -- inside ------------------------------------------------------------------------------------------


def _check_even(shape: Shape, squeezes: int) -> None:
    multiple = 2**squeezes
    if shape[1] % multiple or shape[2] % multiple:
        raise UserError(
            f"This model halves images {squeezes} times, so that their height and width have to be "
            f"multiples of {multiple}; got {shape[1]} and {shape[2]}."
        )


def _from_pixels(shape: Shape, settings: ImageSettings) -> list[Layer]:
    """From integers 0, ..., levels - 1 to all numbers."""
    noise = _dequantiser(shape) if settings.dequantise == "variational" else None
    return [
        Dequantise(shape, noise, settings.levels),
        Scale(shape, 1 / settings.levels),
        Logit(shape, settings.alpha),
    ]


def _dequantiser(shape: Shape) -> Flow:
    """q(w | x): couplings that see the image, from N(0, I) at the start (Ho et al., 2019)."""
    size = (DEQUANTISE_CHANNELS, DEQUANTISE_BLOCKS)
    return Flow(
        [
            Coupling(
                shape,
                ResNet(2 * shape[0], 2 * shape[0], *size, zero_last=True),
                flip=bool(index % 2),
                context_features=shape,
            )
            for index in range(DEQUANTISE_COUPLINGS)
        ]
    )


def _couplings(
    shape: Shape,
    count: int,
    mask: Literal["checkerboard", "channel"],
    settings: RealNVPImageSettings,
) -> list[Layer]:
    """Couplings whose masks alternate, each with its index, where there are any, and a batch norm."""
    stays = shape[0] if mask == "checkerboard" else shape[0] // 2
    indexed = isinstance(settings, ImageIndexSettings)
    layers: list[Layer] = []
    for index in range(count):
        network = ResNet(stays, 2 * stays, settings.channels, settings.blocks, zero_last=True)
        layers.append(Coupling(shape, network, mask, flip=bool(index % 2)))
        layers += [*_index(shape, settings), BatchNorm(shape, affine=not indexed)]
    return layers


def _block(network: LipschitzNetwork, number: int, settings: ResFlowImageSettings) -> list[Layer]:
    """A residual block with probes of its own, its index, where there are any, and an actnorm."""
    log_det = default_log_det(network.shape, number)
    if isinstance(log_det, Series):
        log_det = Series(settings.probes, seed=number)
    in_training = Roulette() if settings.log_det == "roulette" else None
    block: Bijection = Residual(network, log_det, in_training)
    return [block, *_index(network.shape, settings), ActNorm(network.shape)]


def _index(shape: Shape, settings: Settings) -> list[Indexed]:
    """The indexed affine map after a bijection; none where the settings are those of a plain flow.

    u has one channel, or is one number beside vectors. All three networks start at 0: the affine map is
    the identity, p(u|z) and q(u|x) are both N(0, I), and the flow is exactly the plain one.
    """
    if not isinstance(settings, ImageIndexSettings):
        return []
    affine = (settings.affine_blocks, settings.affine_channels)
    index = (settings.index_blocks, settings.index_channels)
    u = (1, *shape[1:])
    prior, posterior = (ConditionalNormal(_network(shape, 2, *index), u, shape) for _ in range(2))
    return [Indexed(Affine(shape, _network(u, 2 * shape[0], *affine), u), prior, posterior)]


def _network(shape: Shape, out: int, blocks: int, channels: int) -> ResNet | MLP:
    """A ResNet of images of a shape; of vectors a perceptron of as many hidden layers as blocks."""
    if len(shape) == 1:
        return MLP(shape[0], out, [channels] * blocks, zero_last=True)
    return ResNet(shape[0], out, channels, blocks, zero_last=True)

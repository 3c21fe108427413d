"""Autoregressive splines: each feature passes a monotonic map that the features before it choose."""

from __future__ import annotations

__all__ = ["AutoregressiveSpline", "Spline", "spline", "spline_inverse"]

import math

import torch
from torch import Tensor
from torch.distributions import Transform
from zuko.transforms import MonotonicRQSTransform

from ciflows.core.hook import replaceable
from ciflows.core.layer import Bijection
from ciflows.core.noise import Noise
from ciflows.networks.masked import MaskedResidualNet

LEAST_SLOPE = 1e-3


@replaceable
def spline(
    x: Tensor, widths: Tensor, heights: Tensor, slopes: Tensor, bound: float, least: float
) -> tuple[Tensor, Tensor]:
    """Monotonic rational-quadratic splines of x (*), and the logarithms of their slopes (*).

    Arguments:
        widths: Logarithms of the widths of each spline's pieces, up to a constant (*, bins).
        heights: The same of their heights (*, bins).
        slopes: Logarithms of the slopes between them (*, bins - 1).
        bound: Splines map [-bound, bound] to itself, and are the identity beyond.
        least: The least slope; widths and heights are bounded to match.
    """
    return MonotonicRQSTransform(widths, heights, slopes, bound, least).call_and_ladj(x)


@replaceable
def spline_inverse(
    y: Tensor, widths: Tensor, heights: Tensor, slopes: Tensor, bound: float, least: float
) -> Tensor:
    """The x (*) that `spline` takes to y (*), in float64 within: right in float32 too.

    There the root of a steep piece's discriminant can be that of a negative number, and the inverse off
    by the whole range.
    """
    wide = MonotonicRQSTransform(widths, heights, slopes, bound, least)
    wide.horizontal, wide.vertical = wide.horizontal.double(), wide.vertical.double()
    wide.derivatives = wide.derivatives.double()
    return wide._inverse(y.double()).to(y.dtype)


class Spline(MonotonicRQSTransform):  # type: ignore[misc]
    """Zuko's rational-quadratic spline, with an inverse that is right in float32 too."""

    def __init__(self, widths: Tensor, heights: Tensor, slopes: Tensor, bound: float = 5.0) -> None:
        Transform.__init__(self)
        self.numbers, self.bound = (widths, heights, slopes), bound

    @property
    def bins(self) -> int:
        return self.numbers[0].shape[-1]

    def call_and_ladj(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return spline(x, *self.numbers, self.bound, LEAST_SLOPE)

    def _call(self, x: Tensor) -> Tensor:
        return self.call_and_ladj(x)[0]

    def _inverse(self, y: Tensor) -> Tensor:
        return spline_inverse(y, *self.numbers, self.bound, LEAST_SLOPE)


class AutoregressiveSpline(Bijection):
    """z_i = spline_i(x_i), rational-quadratic, with parameters from x_{<i} (Durkan et al., 2019).

    Splines map [-bound, bound] to itself and are the identity beyond. `decode` takes as many passes as
    there are features, and never drops units: with dropout it undoes `encode` in evaluation mode alone.

    Arguments:
        network: Gives 3 bins - 1 numbers for each feature: widths, heights, inner slopes. Its order of
            the features is that of the layer, its context the layer's.
        bins: Pieces of each spline.
        bound: Where splines end.

    Example:
        >>> network = MaskedResidualNet(3, 3 * 8 - 1, hidden=16, blocks=2)
        >>> layer = AutoregressiveSpline(3, network, bins=8).double()
        >>> x = torch.randn(5, 3).double()
        >>> z, log_det = layer.encode(x)
        >>> bool(((layer.decode(z) - x).abs() < 1e-12).all())
        True
    """

    pure = ("_bend",)

    def __init__(
        self, features: int, network: MaskedResidualNet, bins: int = 8, bound: float = 3.0
    ) -> None:
        context = network.context_features
        super().__init__((features,), context_shape=(context,) if context else None)
        wanted, got = (features, 3 * bins - 1), (network.features, network.out_per_feature)
        if wanted != got:
            raise ValueError(
                f"AutoregressiveSpline: {bins} bins and {features} features need a network with "
                f"(features, out_per_feature) = {wanted}; got {got}."
            )
        self.network = network
        self.bins = bins
        self.bound = bound

    def _encode(self, x: Tensor, context: Tensor | None, noise: Noise) -> tuple[Tensor, Tensor]:
        masks = self.network.draw_masks(x, context, noise)
        return self._bend(x, self.network(x, context, masks))

    def _bend(self, x: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """z and the log-determinant, from the splines' parameters."""
        z, log_det = self._splines(numbers).call_and_ladj(x)
        return z, log_det.sum(-1)

    def _decode(self, z: Tensor, context: Tensor | None, noise: Noise) -> Tensor:
        x = torch.zeros_like(z)
        for feature in self.network.order.split(1):
            numbers = self.network(x, context).index_select(-2, feature)
            x = x.index_copy(-1, feature, self._splines(numbers).inv(z.index_select(-1, feature)))
        return x

    def _splines(self, numbers: Tensor) -> Spline:
        """The splines of parameters (*, 3 bins - 1).

        Widths and heights are divided by √hidden, as Durkan et al. do. Zuko then differs from them in
        how it keeps pieces from vanishing: it bounds the numbers softly (widths and heights to within a
        factor 1000 of each other, slopes to [1/1000, 1000]) where they add 1/1000 to a softmax and to a
        softplus; and numbers of 0 make it the identity, where their inner slopes are 0.69.
        """
        widths, heights, slopes = numbers.split([self.bins, self.bins, self.bins - 1], dim=-1)
        shrink = 1 / math.sqrt(self.network.hidden)
        return Spline(shrink * widths, shrink * heights, slopes, bound=self.bound)

"""From pixels between 0 and 1 to all real numbers."""

from __future__ import annotations

__all__ = ["Logit"]

import math

import torch
from torch import Tensor

from ciflows.core.layer import Bijection, Shape, sum_event
from ciflows.core.noise import Noise


class Logit(Bijection):
    """z = log(p / (1 - p)) with p = α + (1 - 2α) x, for x in [0, 1] (Dinh et al., 2017).

    Finite at 0 and 1. Outside [-α / (1 - 2α), 1 + α / (1 - 2α)], the range of `decode`, it is NaN.

    Arguments:
        shape: Shape of one x.
        alpha: α, between 0 and 1/2 (the paper: 1e-5 for Fashion-MNIST, 0.05 for CIFAR-10).

    Example:
        >>> z, log_det = Logit((3,), alpha=0.05).encode(torch.tensor([0.0, 0.5, 1.0]))
        >>> z
        tensor([-2.9444,  0.0000,  2.9444])
    """

    pure = ("_encode",)

    def __init__(self, shape: Shape, alpha: float) -> None:
        super().__init__(shape)
        if not 0 < alpha < 0.5:
            raise ValueError(f"Logit: alpha must lie between 0 and 1/2; got {alpha}.")
        self.alpha = alpha

    def _encode(self, x: Tensor, context: Tensor | None, noise: Noise) -> tuple[Tensor, Tensor]:
        slope = 1 - 2 * self.alpha
        # 1 - p from 1 - x: near x = 1 p would lose all digits of a small α
        log_p, log_rest = torch.log(self.alpha + slope * x), torch.log(self.alpha + slope * (1 - x))
        return log_p - log_rest, sum_event(math.log(slope) - log_p - log_rest, self.shape)

    def _decode(self, z: Tensor, context: Tensor | None, noise: Noise) -> Tensor:
        return (torch.sigmoid(z) - self.alpha) / (1 - 2 * self.alpha)

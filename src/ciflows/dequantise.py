"""Dequantisation: integers such as pixels as numbers that have a density."""

from __future__ import annotations

__all__ = ["Dequantise"]

import torch
import torch.nn.functional as F
from torch import Tensor

from ciflows.densities import Density
from ciflows.layers import Layer, Shape, leading_shape, sum_event
from ciflows.noise import Noise


class Dequantise(Layer):
    """z = x + v with v in [0, 1), so that P(x) = ∫ p(x + v) dv is the probability of the integers x.

    v is uniform, with a log_weight of 0 (Theis et al., 2016), or v = σ(w) with w ~ q(w | x), and a
    log_weight of -log q(v | x) (variational dequantisation; Ho et al., 2019). P(x) is an integral, so
    likelihoods are estimates from draws of v, those of a plain flow too. `decode` rounds down.

    Arguments:
        shape: Shape of one x.
        posterior: q(w | x), with x / levels as its context; its density has to be exact. A `Flow` will
            do. None for uniform v.
        levels: Number of values that x takes, 0, ..., levels - 1; only the posterior's context needs it.

    Example:
        >>> layer, x = Dequantise((1, 2, 2)), torch.full((3, 1, 2, 2), 255.0)
        >>> z, log_weight = layer.encode(x)
        >>> bool(((z >= 255) & (z < 256)).all()), torch.equal(layer.decode(z), x)
        (True, True)
    """

    def __init__(self, shape: Shape, posterior: Density | None = None, levels: int = 256) -> None:
        super().__init__(shape)
        if posterior is not None and not posterior.exact:
            raise ValueError(
                "Dequantise: the posterior's density must be exact, since the weight divides by it; "
                f"{type(posterior).__name__} only estimates it."
            )
        self.posterior = posterior
        self.levels = levels

    @property
    def noisy(self) -> bool:
        return self.posterior is not None and self.posterior.noisy

    def _encode(self, x: Tensor, context: Tensor | None, noise: Noise) -> tuple[Tensor, Tensor]:
        leading = leading_shape(x, self.shape)
        if self.posterior is None:
            return _add(x, noise.uniform(x.shape, like=x)), x.new_zeros(leading)
        w, log_q = noise.posterior(self.posterior, leading, x / self.levels)
        log_slope = F.logsigmoid(w) + F.logsigmoid(-w)
        return _add(x, torch.sigmoid(w)), sum_event(log_slope, self.shape) - log_q

    def _decode(self, z: Tensor, context: Tensor | None, noise: Noise) -> Tensor:
        return torch.floor(z)


def _add(x: Tensor, v: Tensor) -> Tensor:
    """x + v, and below x + 1 even where rounding would reach it: a pixel has to stay its own."""
    return torch.minimum(x + v, torch.nextafter(x.detach() + 1, x.detach()))

"""Dequantisation: from integers, such as pixels, to real numbers with a density."""

from __future__ import annotations

__all__ = ["Dequantise"]

import torch
import torch.nn.functional as F
from torch import Tensor

from ciflows.core.density import Density
from ciflows.core.layer import Layer, Shape, leading_shape, sum_event
from ciflows.core.noise import Noise


class Dequantise(Layer):
    """z = x + v with v in [0, 1), so that P(x) = ∫ p(x + v) dv is the probability of the integers x.

    v is uniform, with log_weight 0 (Theis et al., 2016), or v = σ(w) with w ~ q(w | x) and log_weight
    -log q(v | x) (variational dequantisation; Ho et al., 2019). P(x) is an integral, so likelihoods are
    estimates from draws of v, even for a plain flow. `decode` rounds down.

    Arguments:
        posterior: q(w | x), with x / levels as its context and an exact density, such as a `Flow`; None
            for uniform v.
        levels: Number of values of x: 0, ..., levels - 1. Only the posterior's context uses it.

    Example:
        >>> layer, x = Dequantise((1, 2, 2)), torch.full((3, 1, 2, 2), 255.0)
        >>> z, log_weight = layer.encode(x)
        >>> bool(((z >= 255) & (z < 256)).all()), torch.equal(layer.decode(z), x)
        (True, True)
    """

    discrete = True

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
            v = noise.latent(self, noise.uniform(x.shape, like=x))
            return _add(x, v), x.new_zeros(leading)
        w, log_q = noise.posterior(self.posterior, leading, x / self.levels)
        log_slope = F.logsigmoid(w) + F.logsigmoid(-w)
        return _add(x, torch.sigmoid(w)), sum_event(log_slope, self.shape) - log_q

    def _decode(self, z: Tensor, context: Tensor | None, noise: Noise) -> Tensor:
        x = torch.floor(z)
        v = z - x
        if self.posterior is None:
            noise.record(self, v)
        else:
            noise.record(self.posterior, torch.logit(v, eps=torch.finfo(v.dtype).eps))
        return x


def _add(x: Tensor, v: Tensor) -> Tensor:
    """x + v, kept below x + 1 even where rounding would reach it, so that `decode` gives x back."""
    return torch.minimum(x + v, torch.nextafter(x.detach() + 1, x.detach()))

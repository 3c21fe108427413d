"""Layers for the columns of a table: what stands between the values of a file and a flow's own layers.

A table comes to a flow in codes (see `ciflows.data.schema`): numbers near 1, the levels 0, 1, ... of
what is discrete. These layers lead from there to columns that are about N(0, 1) each, with everything
counted: the result is log p in the units of the file, and log P of a discrete value.
"""

from __future__ import annotations

__all__ = ["Bounded", "Cells", "HalfBounded", "On", "Tame", "Units"]

from collections.abc import Sequence

import torch
from torch import Tensor

from ciflows.densities import LOG_2_PI
from ciflows.layers import Bijection, Layer, Shape, leading_shape
from ciflows.noise import Noise

EDGE = 1e-6  # values on a bound count as this share of the way inside
FARTHEST = 60.0  # where samples end: nothing was seen so far out, and e^z would soon be no float


class Units(Layer):
    """z = x, where x = (v - offset) / scale was made from values v: log p(v) = log p(x) - Σ log scale.

    The division itself has been done in double precision, before digits were dropped.

    Arguments:
        scales: Scales of the features (features,), of either sign.

    Example:
        >>> Units(torch.tensor([1.0, -1000.0])).encode(torch.zeros(2))[1]
        tensor(-6.9078)
    """

    def __init__(self, scales: Tensor) -> None:
        super().__init__(tuple(scales.shape))
        self.scales: Tensor
        self.register_buffer("scales", scales.double())

    @property
    def exact(self) -> bool:
        return True

    def _encode(self, x: Tensor, context: Tensor | None, noise: Noise) -> tuple[Tensor, Tensor]:
        log_det = -torch.log(self.scales.abs()).sum().to(x.dtype)
        return x, log_det.expand(x.shape[:-1])

    def _decode(self, z: Tensor, context: Tensor | None, noise: Noise) -> Tensor:
        return z


class On(Layer):
    """Applies a layer to some of the features and leaves the others as they are.

    Arguments:
        features: Number of all features.
        places: Which of them the layer takes, in its order.
        layer: A layer over so many features.

    Example:
        >>> layer = On(3, [1], Cells(torch.tensor([[0.5, 0.5]])))
        >>> z, log_weight = layer.encode(torch.zeros(3))
        >>> z[0].item(), bool(z[1] < 0), z[2].item()
        (0.0, True, 0.0)
    """

    def __init__(self, features: int, places: Sequence[int], layer: Layer) -> None:
        super().__init__((features,))
        if layer.shape != (len(places),) or layer.noise_shape != layer.shape:
            raise ValueError(f"On: {len(places)} features for a layer of shape {layer.shape}.")
        self.layer = layer
        self.places: Tensor
        self.register_buffer("places", torch.tensor(places), persistent=False)

    @property
    def exact(self) -> bool:
        return self.layer.exact

    @property
    def noisy(self) -> bool:
        return self.layer.noisy

    def _encode(self, x: Tensor, context: Tensor | None, noise: Noise) -> tuple[Tensor, Tensor]:
        z, log_weight = self.layer.encode(x.index_select(-1, self.places), context, noise)
        return x.index_copy(-1, self.places, z), log_weight

    def _decode(self, z: Tensor, context: Tensor | None, noise: Noise) -> Tensor:
        x = self.layer.decode(z.index_select(-1, self.places), context, noise)
        return z.index_copy(-1, self.places, x)


class Bounded(Bijection):
    """z = log(p / (1 - p)) with p = x / width, for x between 0 and width.

    A value on a bound counts as the nearest one inside, whose density is finite; beyond there is none.

    Arguments:
        width: Upper bounds of the features (features,).

    Example:
        >>> z, log_det = Bounded(torch.tensor([2.0])).encode(torch.tensor([[1.0], [0.0]]))
        >>> z[0].item(), bool(z.isfinite().all())
        (0.0, True)
    """

    def __init__(self, width: Tensor) -> None:
        super().__init__(tuple(width.shape))
        self.width: Tensor
        self.register_buffer("width", width.clone())

    def _encode(self, x: Tensor, context: Tensor | None, noise: Noise) -> tuple[Tensor, Tensor]:
        p = (x / self.width).clamp(EDGE, 1 - EDGE)
        log_p, log_rest = torch.log(p), torch.log1p(-p)
        log_det = -(torch.log(self.width) + log_p + log_rest)
        return log_p - log_rest, _nowhere((x < 0) | (x > self.width), log_det).sum(-1)

    def _decode(self, z: Tensor, context: Tensor | None, noise: Noise) -> Tensor:
        return torch.sigmoid(z) * self.width


class HalfBounded(Bijection):
    """z = log x, for x above 0.

    A value on the bound counts as the nearest one inside, whose density is finite; below there is none.

    Arguments:
        features: Number of features.

    Example:
        >>> HalfBounded(1).encode(torch.tensor([1.0]))[0]
        tensor([0.])
    """

    def __init__(self, features: int) -> None:
        super().__init__((features,))

    def _encode(self, x: Tensor, context: Tensor | None, noise: Noise) -> tuple[Tensor, Tensor]:
        z = torch.log(x.clamp(min=EDGE))
        return z, _nowhere(x < 0, -z).sum(-1)

    def _decode(self, z: Tensor, context: Tensor | None, noise: Noise) -> Tensor:
        return torch.exp(z.clamp(max=FARTHEST))


class Tame(Bijection):
    """z = arsinh(λ y) / λ with y = (x - centre) / scale: tails of a power of x become those of e^-z.

    Where λ = 0 it is z = y.

    Arguments:
        centre: Middles of the features (features,).
        scale: Their scales (features,).
        tail: How strongly each is tamed (features,): λ, at least 0.

    Example:
        >>> layer = Tame(torch.zeros(2), torch.ones(2), torch.tensor([0.0, 1.0]))
        >>> layer.encode(torch.tensor([1e6, 1e6]))[0]
        tensor([1.0000e+06, 1.4509e+01])
    """

    def __init__(self, centre: Tensor, scale: Tensor, tail: Tensor) -> None:
        super().__init__(tuple(centre.shape))
        self.centre: Tensor
        self.scale: Tensor
        self.tail: Tensor
        for name, value in {"centre": centre, "scale": scale, "tail": tail}.items():
            self.register_buffer(name, value.clone())

    def _encode(self, x: Tensor, context: Tensor | None, noise: Noise) -> tuple[Tensor, Tensor]:
        y, tail = (x - self.centre) / self.scale, self._safe_tail()
        z = torch.where(self.tail > 0, torch.asinh(tail * y) / tail, y)
        log_slope = -torch.log(self.scale) - torch.log(torch.hypot(torch.ones_like(y), self.tail * y))
        return z, log_slope.sum(-1)

    def _decode(self, z: Tensor, context: Tensor | None, noise: Noise) -> Tensor:
        tail = self._safe_tail()
        y = torch.where(self.tail > 0, torch.sinh((tail * z).clamp(-FARTHEST, FARTHEST)) / tail, z)
        return y * self.scale + self.centre

    def _safe_tail(self) -> Tensor:
        """λ, and 1 where it is 0 and not used: both branches of a `where` have to be finite."""
        return torch.where(self.tail > 0, self.tail, 1.0)


class Cells(Layer):
    """Levels x = 0, 1, ... as cells of the normal distribution, each of the level's own probability.

    With C_k = p_0 + ... + p_(k-1) the normal's cell of level k is [Φ⁻¹(C_k), Φ⁻¹(C_k+1)), and

        v ~ U(0, 1),  z = Φ⁻¹(C_x + p_x v),  log_weight = log p_x - log φ(z)

    so that P(x) = ∫ p(z) dz over the cell, estimated without bias. Where p(z) is the normal density
    itself this is p_x with no variance at all: columns that are independent are right from the start.

    Arguments:
        probabilities: p_k of each feature's levels (features, levels), filled up with zeros.

    Example:
        >>> layer, x = Cells(torch.tensor([[0.2, 0.3, 0.5]])), torch.tensor([[0.0], [1.0], [2.0]])
        >>> z, log_weight = layer.encode(x)
        >>> torch.equal(layer.decode(z), x)
        True
        >>> from ciflows.densities import StandardNormal
        >>> torch.exp(log_weight + StandardNormal((1,)).log_weight(z))
        tensor([0.2000, 0.3000, 0.5000])
    """

    def __init__(self, probabilities: Tensor) -> None:
        shape: Shape = (probabilities.shape[0],)
        super().__init__(shape)
        self.probabilities: Tensor
        self.register_buffer("probabilities", probabilities.double())

    def _encode(self, x: Tensor, context: Tensor | None, noise: Noise) -> tuple[Tensor, Tensor]:
        # In double precision: near 1 a float could not tell the cells of rare levels apart.
        below, above = self._cumulative()
        level = torch.minimum(x.round().clamp(min=0).long(), self._last())
        p = _look_up(self.probabilities, level)
        v = noise.uniform(x.shape, like=p).clamp(2.0**-30, 1 - 2.0**-30)
        lower, upper = _look_up(below, level) + p * v, _look_up(above, level + 1) + p * (1 - v)
        z = _quantile(lower, upper)
        log_normal = -0.5 * (z.square() + LOG_2_PI)
        log_weight = _nowhere(x.round() != level, torch.log(p) - log_normal).sum(-1)
        return z.to(x.dtype), log_weight.to(x.dtype)

    def _decode(self, z: Tensor, context: Tensor | None, noise: Noise) -> Tensor:
        below, above = self._cumulative()
        edges = _quantile(below, above)[:, 1:-1].contiguous()
        columns = z.double().reshape(-1, *self.shape).T.contiguous()
        level = torch.searchsorted(edges, columns, right=True).T
        return torch.minimum(level, self._last()).to(z.dtype).reshape(*leading_shape(z, self.shape), -1)

    def _last(self) -> Tensor:
        """The last level of each feature (features,)."""
        return (self.probabilities > 0).sum(-1) - 1

    def _cumulative(self) -> tuple[Tensor, Tensor]:
        """Probabilities below and above each of the edges: (features, levels + 1) both."""
        zero = self.probabilities.new_zeros(len(self.probabilities), 1)
        below = torch.cat([zero, self.probabilities.cumsum(-1)], -1)
        above = torch.cat([self.probabilities.flip(-1).cumsum(-1).flip(-1), zero], -1)
        return below, above


def _nowhere(outside: Tensor, log_weight: Tensor) -> Tensor:
    """A log-weight that is -inf where a value cannot be."""
    return torch.where(outside, -torch.inf, log_weight)


def _look_up(table: Tensor, level: Tensor) -> Tensor:
    """The entries of a table (features, levels) at levels (*, features)."""
    return table[torch.arange(len(table), device=table.device), level]


def _quantile(below: Tensor, above: Tensor) -> Tensor:
    """Φ⁻¹ of a probability, given with its complement: accurate in both tails."""
    lower, upper = below.clamp(max=1.0), above.clamp(max=1.0)
    return torch.where(below < 0.5, torch.special.ndtri(lower), -torch.special.ndtri(upper))

"""Multi-scale flows: a part of the numbers leaves early, so that later layers have fewer."""

from __future__ import annotations

__all__ = ["Split"]

import torch
from torch import Tensor

from ciflows.densities import Density, StandardNormal
from ciflows.layers import Layer, Shape, leading_shape
from ciflows.noise import Noise


class Split(Layer):
    """Keep the first half z of the channels of x = [z, z']; the others leave with log p(z' | z).

    Arguments:
        shape: Shape of one x: (channels, height, width), or (features,). An odd number of channels is
            parted so that more are kept.
        conditional: p(z' | z), with z as its context; N(0, I) where none is given.

    Example:
        >>> layer = Split((4, 7, 7))
        >>> z, log_weight = layer.encode(torch.zeros(5, 4, 7, 7))
        >>> z.shape, layer.decode(z).shape, layer.exact
        (torch.Size([5, 2, 7, 7]), torch.Size([5, 4, 7, 7]), True)
    """

    def __init__(self, shape: Shape, conditional: Density | None = None) -> None:
        if shape[0] < 2:
            raise ValueError(f"Split: one channel cannot be parted; got shape {tuple(shape)}.")
        leaves = shape[0] // 2
        super().__init__(shape, (shape[0] - leaves, *shape[1:]))
        leaving = (leaves, *shape[1:])
        conditional = StandardNormal(leaving) if conditional is None else conditional
        given = conditional.context_shape
        if conditional.shape != leaving or given not in (None, self.noise_shape):
            raise ValueError(
                f"Split: expected a density over {leaving}, perhaps given {self.noise_shape}; got one "
                f"over {conditional.shape} given {given}."
            )
        self.conditional = conditional

    @property
    def exact(self) -> bool:
        return self.conditional.exact

    @property
    def noisy(self) -> bool:
        return self.conditional.noisy

    def _encode(self, x: Tensor, context: Tensor | None, noise: Noise) -> tuple[Tensor, Tensor]:
        sizes = [self.noise_shape[0], self.conditional.shape[0]]
        z, leaving = x.split(sizes, dim=-len(self.shape))
        return z, self.conditional.log_weight(leaving, self._given(z), noise)

    def _decode(self, z: Tensor, context: Tensor | None, noise: Noise) -> Tensor:
        leaving = self.conditional.draw(leading_shape(z, self.noise_shape), self._given(z), noise)
        return torch.cat([z, leaving], dim=-len(self.shape))

    def _given(self, z: Tensor) -> Tensor | None:
        """What the conditional is told of z: nothing where it asks for nothing."""
        return None if self.conditional.context_shape is None else z

"""Multi-scale flows: a part of the numbers leaves early, so later layers have fewer."""

from __future__ import annotations

__all__ = ["Split"]

import torch
from torch import Tensor

from ciflows.core.density import Density, StandardNormal
from ciflows.core.layer import Layer, Shape, leading_shape
from ciflows.core.noise import Noise


class Split(Layer):
    """Keep the first half z of the channels of x = [z, z']; the rest leaves, with log p(z' | z).

    Arguments:
        shape: Shape of one x: (channels, height, width), or (features,). Of an odd number of channels
            the larger half is kept.
        conditional: p(z' | z), with z as its context; N(0, I) by default.

    Example:
        >>> layer = Split((4, 7, 7))
        >>> z, log_weight = layer.encode(torch.zeros(5, 4, 7, 7))
        >>> z.shape, layer.decode(z).shape, layer.exact
        (torch.Size([5, 2, 7, 7]), torch.Size([5, 4, 7, 7]), True)
    """

    def __init__(self, shape: Shape, conditional: Density | None = None) -> None:
        if shape[0] < 2:
            raise ValueError(f"Split: a single channel cannot be split; got shape {tuple(shape)}.")
        leaves = shape[0] // 2
        super().__init__(shape, (shape[0] - leaves, *shape[1:]))
        leaving = (leaves, *shape[1:])
        conditional = StandardNormal(leaving) if conditional is None else conditional
        context = conditional.context_shape
        if conditional.shape != leaving or context not in (None, self.noise_shape):
            raise ValueError(
                f"Split: expected a density over {leaving} with no context or {self.noise_shape}; "
                f"got a density over {conditional.shape} with context {context}."
            )
        self.conditional = conditional

    @property
    def exact(self) -> bool:
        return self.conditional.exact

    @property
    def noisy(self) -> bool:
        return self.conditional.noisy

    @property
    def reparameterised(self) -> bool:
        return self.conditional.reparameterised

    def _encode(self, x: Tensor, context: Tensor | None, noise: Noise) -> tuple[Tensor, Tensor]:
        sizes = [self.noise_shape[0], self.conditional.shape[0]]
        z, leaving = x.split(sizes, dim=-len(self.shape))
        return z, self.conditional.log_weight(leaving, self._context(z), noise)

    def _decode(self, z: Tensor, context: Tensor | None, noise: Noise) -> Tensor:
        leaving = self.conditional.draw(leading_shape(z, self.noise_shape), self._context(z), noise)
        return torch.cat([z, leaving], dim=-len(self.shape))

    def _decode_with_log_weight(
        self, z: Tensor, context: Tensor | None, noise: Noise
    ) -> tuple[Tensor, Tensor]:
        leading = leading_shape(z, self.noise_shape)
        leaving, log_weight = self.conditional.draw_with_log_weight(leading, self._context(z), noise)
        return torch.cat([z, leaving], dim=-len(self.shape)), log_weight

    def _context(self, z: Tensor) -> Tensor | None:
        """z, if the conditional takes a context."""
        return None if self.conditional.context_shape is None else z

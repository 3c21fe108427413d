"""A table's first layer: from values in the file's units to scores."""

from __future__ import annotations

__all__ = ["ColumnLayer"]

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from ciflows.core.layer import Layer, module_list
from ciflows.core.noise import Noise
from ciflows.tables.marginals import Marginal

FARTHEST = 1e15  # scores with a density


class ColumnLayer(Layer):
    """A table's first layer: the marginals of all columns side by side.

    It takes values in float64, whatever the precision of the layers behind it.

    Arguments:
        features: Number of columns.
        parts: Places of columns, with the marginal that maps them; each place once.

    Example:
        >>> import math
        >>> from ciflows.tables.cells import Cells
        >>> from ciflows.tables.marginals import Smooth
        >>> smooth = Smooth(torch.tensor([-math.inf]), torch.tensor([math.inf]))
        >>> layer = ColumnLayer(2, [([1], smooth), ([0], Cells(torch.tensor([2])))])
        >>> z, log_weight = layer.encode(torch.tensor([[1.0, 0.5]]).double())
        >>> z.dtype, z.shape, log_weight.shape, layer.exact
        (torch.float32, torch.Size([1, 2]), torch.Size([1]), False)
    """

    input_dtype = torch.float64

    def __init__(self, features: int, parts: Sequence[tuple[Sequence[int], Marginal]]) -> None:
        super().__init__((features,))
        self.places = [list(places) for places, _ in parts]
        if sorted(place for places in self.places for place in places) != list(range(features)):
            raise ValueError(
                f"ColumnLayer: expected each of {features} columns once; got {self.places}."
            )
        self.marginals = module_list(marginal for _, marginal in parts)
        for number, places in enumerate(self.places):
            self.register_buffer(f"places_{number}", torch.tensor(places), persistent=False)
        self.like = nn.Buffer(torch.zeros(()), persistent=False)

    @property
    def exact(self) -> bool:
        return all(marginal.exact for marginal in self.marginals)

    @property
    def discrete(self) -> bool:
        return any(marginal.discrete for marginal in self.marginals)

    @property
    def weighs_samples(self) -> bool:
        return not self.discrete

    def log_weights(self, x: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
        """Scores and log-weights of each column by itself, both (*, features) in float64."""
        x = x.double()
        z, log_weight = torch.empty_like(x), torch.empty_like(x)
        for places, marginal in self._parts():
            z[..., places], log_weight[..., places] = marginal.encode(x[..., places], noise)
        return z, log_weight

    def _parts(self) -> Iterator[tuple[Tensor, Marginal]]:
        """The marginals with their places, as tensors: lists could not be part of a CUDA graph."""
        for number, marginal in enumerate(self.marginals):
            yield self.get_buffer(f"places_{number}"), marginal

    def _encode(self, x: Tensor, context: Tensor | None, noise: Noise) -> tuple[Tensor, Tensor]:
        z, log_weight = self.log_weights(x, noise)
        far = ~(z.abs() < FARTHEST)  # squares leave float32 there: a density of 0, not NaN
        log_weight = torch.where(far, -torch.inf, log_weight)
        return torch.where(far, 0.0, z).to(self.like.dtype), log_weight.sum(-1).to(self.like.dtype)

    def _decode(self, z: Tensor, context: Tensor | None, noise: Noise) -> Tensor:
        z = z.double()
        x = torch.empty_like(z)
        for places, marginal in self._parts():
            x[..., places] = marginal.decode(z[..., places], noise)
        return x

    def _decode_with_log_weight(
        self, z: Tensor, context: Tensor | None, noise: Noise
    ) -> tuple[Tensor, Tensor]:
        if self.discrete:
            return super()._decode_with_log_weight(z, context, noise)
        z = z.double()
        x, log_weight = torch.empty_like(z), torch.empty_like(z)
        for places, marginal in self._parts():
            x[..., places], log_weight[..., places] = marginal.decode_with_log_weight(
                z[..., places], noise
            )
        return x, log_weight.sum(-1).to(self.like.dtype)

"""Affine couplings: a part of x passes unchanged and chooses an affine map for the rest."""

from __future__ import annotations

__all__ = ["Coupling"]

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ciflows.core.layer import Bijection, Shape, as_shape, halves, join, sum_event
from ciflows.core.noise import Noise


class Coupling(Bijection):
    """z = e^s ⊙ (x + t) on a part of x, with [s, t] from the unchanged rest (Dinh et al., 2017).

    Arguments:
        shape: Shape of one x: (channels, height, width), or (features,) with the channel mask.
        network: Maps the unchanged part to [s, t], s first; s should be bounded, as `ResNet`'s output
            is. With its last weights at zero the map is the identity. Its channels, in and out:

            - checkerboard: all C, zero where x changes, and 2 C;
            - channel: those of the unchanged half, and twice those of the other.

        mask: The unchanged part: every other pixel, where i + j is even ("checkerboard"), or the first
            half of the channels ("channel").
        flip: Swap the two parts.
        context_features: Size of the context, or its shape, which joins the network's input; 0 for none.

    Example:
        >>> from ciflows.networks import ResNet
        >>> layer = Coupling((1, 4, 4), ResNet(1, 2, hidden=8, zero_last=True), mask="checkerboard")
        >>> x = torch.randn(5, 1, 4, 4)
        >>> z, log_det = layer.encode(x)
        >>> torch.equal(z, x), log_det.shape
        (True, torch.Size([5]))
    """

    pure = ("_encode",)

    def __init__(
        self,
        shape: Shape,
        network: nn.Module,
        mask: Literal["checkerboard", "channel"] = "checkerboard",
        flip: bool = False,
        context_features: int | Shape = 0,
    ) -> None:
        super().__init__(shape, context_shape=as_shape(context_features) if context_features else None)
        if mask not in ("checkerboard", "channel"):
            raise ValueError(f'Coupling: mask must be "checkerboard" or "channel"; got "{mask}".')
        if mask == "checkerboard" and len(self.shape) != 3:
            raise ValueError(f"Coupling: a checkerboard needs images; got shape {self.shape}.")
        if mask == "channel" and self.shape[0] < 2:
            raise ValueError(f"Coupling: a single channel cannot be split; got shape {self.shape}.")
        self.network = network
        self.flip = flip
        self.board: Tensor | None
        board = _checkerboard(self.shape, flip) if mask == "checkerboard" else None
        self.register_buffer("board", board, persistent=False)

    def _encode(self, x: Tensor, context: Tensor | None, noise: Noise) -> tuple[Tensor, Tensor]:
        s, t = self._affine(x, context)
        return torch.exp(s) * (x + t), sum_event(s, self.shape)

    def _decode(self, z: Tensor, context: Tensor | None, noise: Noise) -> Tensor:
        s, t = self._affine(z, context)
        return torch.exp(-s) * z - t

    def _affine(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        """s and t (*, shape), zero where x is unchanged."""
        dims = len(self.shape)
        if self.board is not None:
            s, t = self._choose(self.board * x, context, self.shape[0])
            return (1 - self.board) * s, (1 - self.board) * t
        sizes = [self.shape[0] // 2, self.shape[0] - self.shape[0] // 2]
        parts = x.split(sizes, dim=-dims)
        s, t = self._choose(parts[self.flip], context, sizes[not self.flip])
        fill = [0, 0] * (dims - 1) + ([0, sizes[1]] if self.flip else [sizes[0], 0])
        return F.pad(s, fill), F.pad(t, fill)

    def _choose(self, fixed: Tensor, context: Tensor | None, channels: int) -> tuple[Tensor, Tensor]:
        output = self.network(join(fixed, context, len(self.shape)))
        return halves(output, (channels, *self.shape[1:]), "Coupling")


def _checkerboard(shape: Shape, flip: bool) -> Tensor:
    """1 where x is unchanged, 0 elsewhere: (1, height, width)."""
    rows, columns = torch.arange(shape[1])[:, None], torch.arange(shape[2])
    return ((rows + columns + int(flip)) % 2 == 0).float()[None]

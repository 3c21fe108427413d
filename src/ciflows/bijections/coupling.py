"""Affine couplings: a part of x passes as it is, and chooses an affine map for the rest."""

from __future__ import annotations

__all__ = ["Coupling"]

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ciflows.layers import Bijection, Shape, as_shape, halves, join, sum_event
from ciflows.noise import Noise


class Coupling(Bijection):
    """z = e^s ⊙ (x + t) on a part of x, with [s, t] from the rest, which stays (Dinh et al., 2017).

    Arguments:
        shape: Shape of one x: (channels, height, width), or (features,) with the channel mask.
        network: Maps what stays to [s, t], s first; s should be bounded, as `ResNet`'s output is. Where
            its last weights are zero the map is the identity. It takes and gives

            - for the checkerboard, all C channels with zeros in place of the rest, and 2 C;
            - for channels, the half that stays, and twice the number of those that do not.

        mask: What stays: every other pixel, those with i + j even ("checkerboard"), or the first half of
            the channels ("channel").
        flip: Let the others stay.
        context_features: Size of the context, or its shape, which joins the network's input; 0 for none.

    Example:
        >>> from ciflows.networks import ResNet
        >>> layer = Coupling((1, 4, 4), ResNet(1, 2, hidden=8, zero_last=True), mask="checkerboard")
        >>> x = torch.randn(5, 1, 4, 4)
        >>> z, log_det = layer.encode(x)
        >>> torch.equal(z, x), log_det.shape
        (True, torch.Size([5]))
    """

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
            raise ValueError(f"Coupling: one channel cannot be parted; got shape {self.shape}.")
        self.network = network
        self.flip = flip
        self.board: Tensor | None
        board = _checkerboard(self.shape, flip) if mask == "checkerboard" else None
        self.register_buffer("board", board, persistent=False)

    @property
    def pure(self) -> tuple[str, ...]:
        return ("_encode",)

    def _encode(self, x: Tensor, context: Tensor | None, noise: Noise) -> tuple[Tensor, Tensor]:
        s, t = self._affine(x, context)
        return torch.exp(s) * (x + t), sum_event(s, self.shape)

    def _decode(self, z: Tensor, context: Tensor | None, noise: Noise) -> Tensor:
        s, t = self._affine(z, context)
        return torch.exp(-s) * z - t

    def _affine(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        """s and t (*, shape), which are zero where x stays."""
        dims = len(self.shape)
        if self.board is not None:
            s, t = self._choose(self.board * x, context, self.shape[0])
            return (1 - self.board) * s, (1 - self.board) * t
        sizes = [self.shape[0] // 2, self.shape[0] - self.shape[0] // 2]
        parts = x.split(sizes, dim=-dims)
        s, t = self._choose(parts[self.flip], context, sizes[not self.flip])
        fill = [0, 0] * (dims - 1) + ([0, sizes[1]] if self.flip else [sizes[0], 0])
        return F.pad(s, fill), F.pad(t, fill)

    def _choose(self, stays: Tensor, context: Tensor | None, channels: int) -> tuple[Tensor, Tensor]:
        output = self.network(join(stays, context, len(self.shape)))
        return halves(output, (channels, *self.shape[1:]), "Coupling")


def _checkerboard(shape: Shape, flip: bool) -> Tensor:
    """1 where x stays, 0 elsewhere: (1, height, width)."""
    rows, columns = torch.arange(shape[1])[:, None], torch.arange(shape[2])
    return ((rows + columns + int(flip)) % 2 == 0).float()[None]

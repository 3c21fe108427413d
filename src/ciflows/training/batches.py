"""The rows of each training step."""

from __future__ import annotations

__all__ = ["Batches"]

from dataclasses import replace

import torch
from torch import Tensor

from ciflows.core.flow import Flow
from ciflows.core.rows import Rows
from ciflows.errors import UserError

MOST_OF_GPU = 0.5  # of its free memory, for training rows


class Batches:
    """The batch of any step: each epoch has its own random order of the rows.

    Arguments:
        rows: Training rows; they are kept on the flow's device if they fit.
        flow: The flow to train, for its device and types.
        size: Rows in a batch, over all processes.
        share: Those of them that this process takes.
        seed: Seed of the orders.
        flips: Mirror images left to right, half of them in each epoch.
    """

    def __init__(
        self, rows: Rows, flow: Flow, size: int, share: slice, seed: int, flips: bool = False
    ) -> None:
        if flips and len(flow.shape) != 3:
            raise UserError(
                "flips = true mirrors images, and this data has none: leave the setting out."
            )
        self.rows, self.flow = _placed(rows, flow), flow
        self.size, self.share, self.seed, self.flips = size, share, seed, flips
        self.epoch, self.order, self.flipped = -1, torch.empty(0), torch.empty(0)

    def of_step(self, step: int) -> Rows:
        """The rows of a step, on the flow's device: this process's share of the batch."""
        epoch, position = divmod(step, len(self.rows) // self.size)
        if epoch != self.epoch:
            self.epoch = epoch
            self._shuffle(torch.Generator().manual_seed((self.seed << 32) + epoch))
        start = position * self.size
        chosen = self.order[start + self.share.start : start + self.share.stop]
        batch = self.rows[chosen].on(self.flow)
        if not self.flips:
            return batch
        flipped = self.flipped[chosen].to(batch.x.device)[:, None, None, None]
        return replace(batch, x=torch.where(flipped, batch.x.flip(-1), batch.x))

    def _shuffle(self, generator: torch.Generator) -> None:
        self.order = self._moved(torch.randperm(len(self.rows), generator=generator))
        if self.flips:
            self.flipped = self._moved(torch.rand(len(self.rows), generator=generator) < 0.5)

    def _moved(self, values: Tensor) -> Tensor:
        """Values for all rows, to where these are; on a GPU no step waits for it."""
        device = self.rows.x.device
        pinned = values.pin_memory() if device.type == "cuda" else values
        return pinned.to(device, non_blocking=True)


def _placed(rows: Rows, flow: Flow) -> Rows:
    """Training rows on a flow's device; or where they are, if that is a GPU which they would fill."""
    if (
        flow.device.type == "cuda"
        and rows.x.nbytes > MOST_OF_GPU * torch.cuda.mem_get_info(flow.device)[0]
    ):
        return rows
    return rows.to(flow.device) if rows.x.dtype == torch.uint8 else rows.on(flow)

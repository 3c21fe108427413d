"""What can be watched while a flow over images trains: samples, round trips, images a second."""

from __future__ import annotations

__all__ = ["ImageMonitor"]

import math
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import TextColumn
from torch import Tensor

from ciflows.diagnostics import reconstruction_error
from ciflows.errors import InversionError
from ciflows.files import write_bytes
from ciflows.flow import Flow
from ciflows.images import image_grid, png
from ciflows.training.monitor import Hear, RunMonitor

SAMPLES = 36
SEED = 0


class ImageMonitor(RunMonitor):
    """A `RunMonitor` that at each validation draws images, always from the same seed, and sends some of
    the data to the noise and back.

    Arguments:
        folder: The run folder; the pictures go to samples/ in it, and to TensorBoard.
        console: Where progress is shown.
        title: What stands before the bar.
        flow: The flow that trains.
        images: Some of the data (n, C, H, W).
        batch_size: Images in one step.
        levels: Number of values of a pixel.
        hear: Called with the step and the score of each validation; it may raise to end the run.
    """

    def __init__(
        self,
        folder: Path,
        console: Console,
        title: str,
        flow: Flow,
        images: Tensor,
        batch_size: int,
        levels: int,
        hear: Hear | None = None,
    ) -> None:
        super().__init__(folder, console, title, hear)
        self.flow = flow
        self.images = images.to(flow.device, flow.dtype)
        self.batch_size = batch_size
        self.levels = levels
        self.last: tuple[int, float] | None = None
        *columns, remaining = self.progress.columns
        self.progress.columns = (*columns, TextColumn("{task.fields[rate]}"), remaining)
        self.progress.update(self.task, rate="")

    def record(self, step: int, values: dict[str, float], done: float) -> None:
        super().record(step, values, done)
        if self.last is not None and values["seconds"] > self.last[1]:
            rate = self.batch_size * (step - self.last[0]) / (values["seconds"] - self.last[1])
            self.progress.update(self.task, rate=f"{_digits(rate)} images/s")
        validated = "validation" in values
        # the time that a validation takes counts to the steps after it: those are passed over
        self.last = None if validated else (step, values["seconds"])
        if validated:
            self._draw(step)

    def _draw(self, step: int) -> None:
        """Samples of the weights as they are, and how exactly images come back from the noise."""
        self.flow.eval()
        try:
            images = self.flow.sample(SAMPLES, seed=SEED)
            error = reconstruction_error(self.flow, self.images, SEED)
        except InversionError as reason:
            self.say(f"No samples at step {step}: {reason}")
            return
        finally:
            self.flow.train()
        grid = image_grid(torch.nan_to_num(images), self.levels)
        (self.folder / "samples").mkdir(exist_ok=True)
        write_bytes(self.folder / "samples" / f"step-{step:06d}.png", png(grid))
        self.curves.add_image("samples", grid.numpy(), step)
        self.curves.add_scalar("reconstruction error, in levels of a pixel", error, step)


def _digits(rate: float) -> str:
    """A rate with three digits."""
    return f"{rate:,.{max(0, 2 - math.floor(math.log10(rate)))}f}"

"""What training on images shows beside the rest: samples, reconstruction errors, images per second."""

from __future__ import annotations

__all__ = ["ImageMonitor"]

import math
import warnings
from importlib import import_module
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import TextColumn
from torch import Tensor

from ciflows.core.flow import Flow
from ciflows.diagnostics import reconstruction_error
from ciflows.errors import InversionError, missing_package
from ciflows.files import write_bytes
from ciflows.pixels import image_grid, png
from ciflows.training.monitor import OnValidation, RunMonitor

SAMPLES = 36
SEED = 0


class ImageMonitor(RunMonitor):
    """A `RunMonitor` that at each validation draws images, always with the same seed, and encodes and
    decodes some of the data.

    Arguments:
        folder: The run folder; pictures go to its samples/ and to TensorBoard.
        images: Some of the data (n, C, H, W).
        batch_size: Images in one step.
        levels: Number of values that a pixel can take.
        on_validation: Called with the step and the score of each validation; it may raise to stop.
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
        on_validation: OnValidation | None = None,
    ) -> None:
        super().__init__(folder, console, title, on_validation)
        self.flow = flow
        self.images = images.to(flow.device, flow.dtype)
        self.batch_size = batch_size
        self.levels = levels
        self.last: tuple[int, float] | None = None
        self.pictures = _can_draw()
        *columns, remaining = self.progress.columns
        self.progress.columns = (*columns, TextColumn("{task.fields[rate]}"), remaining)
        self.progress.update(self.task, rate="")

    def record(self, step: int, values: dict[str, float], done: float) -> None:
        super().record(step, values, done)
        if self.last is not None and values["seconds"] > self.last[1]:
            rate = self.batch_size * (step - self.last[0]) / (values["seconds"] - self.last[1])
            self.progress.update(self.task, rate=f"{_digits(rate)} images/s")
        validated = "validation" in values
        # the steps after a validation include its time: leave them out of the rate
        self.last = None if validated else (step, values["seconds"])
        if validated:
            self._draw(step)

    def _draw(self, step: int) -> None:
        """Save samples from the current weights, and record the reconstruction error."""
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
        if self.pictures:
            (self.folder / "samples").mkdir(exist_ok=True)
            write_bytes(self.folder / "samples" / f"step-{step:06d}.png", png(grid))
        if self.curves:
            self.curves.add_image("samples", grid.numpy(), step)
            self.curves.add_scalar("reconstruction error, in levels of a pixel", error, step)


def _can_draw() -> bool:
    """Whether pictures can be written; False, with a warning, where Pillow is not installed."""
    try:
        import_module("PIL")
    except ModuleNotFoundError as error:
        warnings.warn(f"No pictures of samples: {missing_package(error)}", stacklevel=1)
        return False
    return True


def _digits(rate: float) -> str:
    """A rate with three significant digits."""
    return f"{rate:,.{max(0, 2 - math.floor(math.log10(rate)))}f}"

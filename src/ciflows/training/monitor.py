"""What training shows and writes: a progress bar, metrics.jsonl and TensorBoard curves."""

from __future__ import annotations

__all__ = ["Monitor", "OnValidation", "RunMonitor", "read_history"]

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ciflows.errors import missing_package
from ciflows.files import write_text
from ciflows.progress import sparkline

if TYPE_CHECKING:
    from rich.console import Console

OnValidation = Callable[[int, float], None]


class Monitor:
    """Receives the events of training and ignores them; the base class of all monitors."""

    def stage(self, name: str) -> None:
        """What is trained from here on, where there are several stages."""

    def begin(self, step: int, steps: int, done: float) -> None:
        """Training starts after `step` of at most `steps` steps; the share `done` is complete."""

    def record(self, step: int, values: dict[str, float], done: float) -> None:
        """Some steps were taken. Values: loss, learning_rate, seconds; validation, index_kl at times."""

    def say(self, message: str) -> None:
        """Print a message for the user."""

    def end(self) -> None:
        """Training has ended, or failed."""


class RunMonitor(Monitor):
    """Writes a run's metrics and shows its progress.

    Arguments:
        on_validation: Called with the step and the score of each validation; it may raise to stop.
    """

    def __init__(
        self, folder: Path, console: Console, title: str, on_validation: OnValidation | None = None
    ) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.folder = folder
        self.on_validation = on_validation
        self.console = console
        self.progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[step]}"),
            TextColumn("loss {task.fields[loss]:.4f}  validation {task.fields[validation]:.4f}"),
            TextColumn("{task.fields[course]}"),
            TimeRemainingColumn(compact=True),
            console=console,
        )
        shown: dict[str, Any] = {"loss": float("nan"), "validation": float("nan")}
        self.task = self.progress.add_task(title, total=1.0, step="", course="", **shown)
        self.scores: list[float] = []

    def stage(self, name: str) -> None:
        self.progress.update(self.task, description=name)

    def begin(self, step: int, steps: int, done: float) -> None:
        path = self.folder / "metrics.jsonl"
        rows = [row for row in read_history(path) if row["step"] <= step]
        write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
        self.file = path.open("a")
        self.curves = _curves(self.folder / "tensorboard", step + 1)
        self.steps = steps
        self.progress.update(self.task, completed=done, step=f"{step}/{steps}")
        self.progress.start()

    def record(self, step: int, values: dict[str, float], done: float) -> None:
        self.file.write(json.dumps({"step": step, **values}) + "\n")
        self.file.flush()
        for name, value in values.items() if self.curves else ():
            self.curves.add_scalar(name, value, step)
        shown: dict[str, Any] = {name: values[name] for name in ("loss", "validation") if name in values}
        if "validation" in values:
            self.scores.append(values["validation"])
            shown["course"] = sparkline(self.scores, width=8)
        self.progress.update(self.task, completed=done, step=f"{step}/{self.steps}", **shown)
        if self.on_validation is not None and "validation" in values:
            self.on_validation(step, values["validation"])

    def say(self, message: str) -> None:
        self.console.print(message, markup=False)

    def end(self) -> None:
        self.progress.stop()
        if self.curves:
            self.curves.close()
        self.file.close()


def _curves(folder: Path, step: int) -> Any:
    """TensorBoard's writer from a step on; None, with a warning, where TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError as error:
        warnings.warn(f"No TensorBoard curves: {missing_package(error)}", stacklevel=1)
        return None
    return SummaryWriter(str(folder), purge_step=step)


def read_history(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl file, without a last one that was cut off by a kill."""
    rows = []
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break
    return rows

"""What can be watched while a flow trains: a progress bar, metrics.jsonl and TensorBoard curves."""

from __future__ import annotations

__all__ = ["Hear", "Monitor", "RunMonitor"]

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ciflows.files import write_text

Hear = Callable[[int, float], None]


class Monitor:
    """Listens to training and does nothing; the base of those that do."""

    def begin(self, step: int, steps: int, done: float) -> None:
        """Training starts, or goes on, after `step` of at most `steps` steps; `done` of it is over."""

    def record(self, step: int, values: dict[str, float], done: float) -> None:
        """Some steps have been taken: loss, learning_rate, seconds, and validation now and then."""

    def say(self, message: str) -> None:
        """Something happened that the user should know."""

    def end(self) -> None:
        """Training is over, one way or another."""


class RunMonitor(Monitor):
    """Writes a run's metrics and shows its progress.

    Arguments:
        folder: The run folder.
        console: Where progress is shown.
        title: What stands before the bar.
        hear: Called with the step and the score of each validation; it may raise to end the run.
    """

    def __init__(self, folder: Path, console: Console, title: str, hear: Hear | None = None) -> None:
        self.folder = folder
        self.hear = hear
        self.console = console
        self.progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[step]}"),
            TextColumn("loss {task.fields[loss]:.4f}  validation {task.fields[validation]:.4f}"),
            TimeRemainingColumn(compact=True),
            console=console,
        )
        unknown = float("nan")
        self.task = self.progress.add_task(title, total=1.0, step="", loss=unknown, validation=unknown)

    def begin(self, step: int, steps: int, done: float) -> None:
        from torch.utils.tensorboard import SummaryWriter

        path = self.folder / "metrics.jsonl"
        rows = [row for row in read_history(path) if row["step"] <= step]
        write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
        self.file = path.open("a")
        self.curves = SummaryWriter(str(self.folder / "tensorboard"), purge_step=step + 1)
        self.steps = steps
        self.progress.update(self.task, completed=done, step=f"{step}/{steps}")
        self.progress.start()

    def record(self, step: int, values: dict[str, float], done: float) -> None:
        self.file.write(json.dumps({"step": step, **values}) + "\n")
        self.file.flush()
        for name, value in values.items():
            self.curves.add_scalar(name, value, step)
        shown: dict[str, Any] = {name: values[name] for name in ("loss", "validation") if name in values}
        self.progress.update(self.task, completed=done, step=f"{step}/{self.steps}", **shown)
        if self.hear is not None and "validation" in values:
            self.hear(step, values["validation"])

    def say(self, message: str) -> None:
        self.console.print(message, markup=False)

    def end(self) -> None:
        self.progress.stop()
        self.curves.close()
        self.file.close()


def read_history(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl file, less a last one that was cut off in writing."""
    rows = []
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break
    return rows

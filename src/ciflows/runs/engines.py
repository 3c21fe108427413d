"""Who makes the parts of a job: this process, or those of Ray."""

from __future__ import annotations

__all__ = ["ENGINES", "Engine", "run_job"]

from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import track

from ciflows.errors import UserError, nearest
from ciflows.runs.parts import Job, Made, check_job, make_part, open_job, remaining, sum_up
from ciflows.runs.run import Run, load_run

ENGINES = ("local", "ray")


class Engine(NamedTuple):
    """An engine, by name, and what Ray needs to know.

    Attributes:
        name: local or ray.
        address: The cluster; Ray on this machine if None.
        workers: Processes of Ray; one for each core, or for each GPU, if None.
    """

    name: str = "local"
    address: str | None = None
    workers: int | None = None

    def check(self, out: Path) -> bool:
        """Whether it writes many files; an engine that cannot write to `out` is refused."""
        if self.name not in ENGINES:
            raise UserError(f"There is no engine {self.name!r}. {nearest(self.name, ENGINES)}")
        if out.suffix and self.name == "ray":
            raise UserError(f"{out}: Ray writes many files: give the name of a folder.")
        return not out.suffix

    def load(self, folder: Path, device: str) -> Run:
        """The run; with Ray, whose processes load it themselves, only to check the data."""
        return load_run(folder, "cpu" if self.name == "ray" else device)


def run_job(run: Run, job: Job, engine: Engine, resume: bool, console: Console) -> Made:
    """Make all parts of a job that are not there yet.

    Arguments:
        resume: Whether to go on in a folder where the same job was begun.
    """
    check_job(job, resume)
    parts = remaining(job)
    if engine.name == "ray" and parts:
        from ciflows.runs.cluster import make_parts_with_ray, start_ray

        start_ray(engine.address, engine.workers)
        open_job(job, resume)
        make_parts_with_ray(job, parts, engine.workers, quiet=console.quiet)
    else:
        open_job(job, resume)
        hidden = not console.is_terminal
        for part in track(parts, "parts", console=console, transient=True, disable=hidden):
            make_part(run, job, part)
    return sum_up(job, len(job.parts) - len(parts))

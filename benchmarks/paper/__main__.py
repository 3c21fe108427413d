"""`python -m benchmarks.paper`: work off the queue of the paper's rows, then write the results page."""

from __future__ import annotations

__all__ = ["app", "main"]

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table as Grid

from benchmarks.paper.figures import collect, read_figures, read_results, write_figures
from benchmarks.paper.page import write_pages
from benchmarks.paper.plan import QUEUE, Job, choose, list_jobs, read_queue
from benchmarks.paper.release import pack
from benchmarks.paper.stand_ins import write_stand_ins
from benchmarks.paper.work import Progress, work_off
from ciflows.errors import UserError
from ciflows.runs.folder import is_finished

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console(emoji=False)


@app.command()
def paper(
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder of the runs; runs/paper, or runs/paper-quick."),
    ] = None,
    queue: Annotated[Path, typer.Option(metavar="FILE", help="Another queue.")] = QUEUE,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="WORD", help="Runs with this in their names, as --list shows; may repeat."),
    ] = None,
    jobs: Annotated[int, typer.Option(help="Runs at once on the machine.", min=1)] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    minutes: Annotated[
        float | None,
        typer.Option(help="Stop after so long; the next time it goes on from there.", min=0),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Folder with the files of the data sets; CIFLOWS_DATA by default."),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Tiny runs on made-up data: minutes on a CPU, and the same page."),
    ] = False,
    show: Annotated[bool, typer.Option("--list", help="List the runs and train nothing.")] = False,
    page: Annotated[
        bool, typer.Option("--page", help="Write the page from what is finished and train nothing.")
    ] = False,
    figures: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write chart and table from a file of figures; train nothing."
        ),
    ] = None,
    document: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the page, such as docs; OUT/page.")
    ] = None,
    release: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Pack finished runs, without checkpoints, into a zip file."),
    ] = None,
) -> None:
    """Train every row of the paper that queue.toml lists, and write the page of results.

    Ctrl-C, --minutes and a crash cost at most half a minute of each run: the same command goes on. Small
    models share a GPU: with --jobs 6 under NVIDIA's multi-process service (nvidia-cuda-mps-control -d)
    steps are about twice as fast as without it.

        python -m benchmarks.paper --quick

        python -m benchmarks.paper --jobs 6 --data-dir DIR --only power/

        python -m benchmarks.paper --page --document docs
    """
    if figures is not None:
        _say_written(write_pages(document or Path("docs"), read_figures(figures)))
        return
    if quick and document is not None:
        raise UserError(
            "The page of a quick run has no place among the documents: leave --document out."
        )
    out = out or Path("runs/paper-quick" if quick else "runs/paper")
    everything = list_jobs(read_queue(queue), quick)
    chosen = choose(everything, only or [])
    if show:
        _show(chosen, out)
        return
    _prepare_data(out, quick, data_dir)
    if not page and release is None:
        _work(chosen, out, jobs, device, minutes)
    if release is not None:
        names = pack(chosen, out, release)
        _say(f"Packed {len(names)} runs into {release} ({release.stat().st_size / 1e6:.1f} MB).")
        return
    results = read_results(everything, out)
    found = collect(everything if only is None else chosen, results)
    write_figures(out / "figures.toml", found)
    _say_written([out / "figures.toml", *write_pages(document or out / "page", found, results, quick)])


def _prepare_data(out: Path, quick: bool, data_dir: Path | None) -> None:
    """Where the runs find their data: the processes of the runs inherit the environment."""
    if quick:
        write_stand_ins(out / "data")
        os.environ["CIFLOWS_CACHE"] = str((out / "cache").absolute())
        data_dir = out / "data"
    if data_dir is not None:
        os.environ["CIFLOWS_DATA"] = str(data_dir.absolute())


def _work(chosen: list[Job], out: Path, jobs: int, device: str, minutes: float | None) -> None:
    """Work off the queue; end here if it was stopped, and say what failed."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        done = work_off(chosen, out, at_once=jobs, device=device, minutes=minutes, say=_say)
    except KeyboardInterrupt:
        _say(f"Stopped. The same command goes on; {out / 'queue.json'} says how far it has come.")
        raise typer.Exit(130) from None
    states = [one.state for one in done.values()]
    _say(f"{states.count('finished')} of {len(states)} runs are finished.")
    failed: dict[str, Progress] = {key: one for key, one in done.items() if one.state == "failed"}
    if failed:
        _say(f"Failed, and tried again the next time: {', '.join(failed)}.")


def _show(chosen: list[Job], out: Path) -> None:
    """A table of the runs: length, about how long, and whether they are finished."""
    grid = Grid("run", "steps, at most", "minutes on an H200, about", "state")
    for job in chosen:
        folder = out / job.key
        state = "finished" if is_finished(folder) else "begun" if folder.exists() else "waiting"
        steps = f"{job.config().training.steps:,}"
        grid.add_row(job.key, steps, "–" if job.quick else f"{job.row.minutes:g}", state)
    console.print(grid)
    hours = sum(job.row.minutes for job in chosen) / 60
    _say(f"{len(chosen)} runs" + ("." if chosen[0].quick else f", about {hours:.0f} hours one by one."))


def _say_written(files: list[Path]) -> None:
    _say(f"Wrote {', '.join(map(str, files))}.")


def _say(message: str) -> None:
    console.print(message, markup=False, highlight=False, soft_wrap=True)


def main() -> None:
    """Run the command; print a user's mistake as one line."""
    try:
        app()
    except UserError as error:
        Console(stderr=True, emoji=False).print(f"Error: {error}", markup=False, soft_wrap=True)
        sys.exit(1)


if __name__ == "__main__":
    main()

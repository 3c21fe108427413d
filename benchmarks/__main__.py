"""`python -m benchmarks`: time the models beside other libraries, then show and write the result."""

from __future__ import annotations

__all__ = ["app", "main"]

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.markdown import to_markdown, update_document
from benchmarks.measure import BenchSettings, chosen_cases, run_bench
from benchmarks.results import Result, read_result
from ciflows.devices import find_device
from ciflows.errors import UserError
from ciflows.files import write_text

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console(emoji=False)


@app.command()
def bench(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the results.")] = Path(
        "runs/bench"
    ),
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    threads: Annotated[int, typer.Option(help="CPU threads of each library.", min=1)] = 1,
    repeats: Annotated[int, typer.Option(help="Repetitions of each measurement.", min=1)] = 9,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="WORDS", help="Cases whose names contain these words; may repeat."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Three repetitions, and no growth curves.")
    ] = False,
    growth: Annotated[bool, typer.Option(help="Measure how cost grows with each size.")] = True,
    peers: Annotated[
        bool, typer.Option(help="Compare with zuko and normflows, installed in their own environment.")
    ] = True,
    authors: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Compare with the authors' code too, in this checkout of github.com/jrmcornish/cif; "
            "the Python of its .venv runs it, if there is one.",
        ),
    ] = None,
    document: Annotated[
        Path | None,
        typer.Option(
            help="Write the tables into this document too, such as docs/performance-tables.md."
        ),
    ] = None,
    show: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Show an earlier bench.json and measure nothing."),
    ] = None,
) -> None:
    """Time training steps, likelihoods and samples of the models, beside other libraries.

    The libraries take turns, so that a disturbance hits all of them. Compare the ratios: absolute times
    vary from machine to machine and from minute to minute.

        python -m benchmarks --quick --only resflow

        python -m benchmarks --device cuda --no-peers

        python -m benchmarks --show runs/bench/bench.json --document docs/performance-tables.md
    """
    if show is not None:
        result = read_result(show)
    else:
        settings = BenchSettings(
            device=device,
            threads=threads,
            repeats=3 if quick else repeats,
            only=tuple(only or ()),
            growth=growth and not quick,
            authors=authors,
            peers=None,
        )
        try:
            result = _measure(out, settings, peers)
        except KeyboardInterrupt:
            _say(f"Interrupted. The finished cases are in {out / 'bench.json'}.")
            raise typer.Exit(130) from None
    _say(f"Wrote {', '.join(map(str, _write(result, out, document)))}.")


def _measure(folder: Path, settings: BenchSettings, peers: bool) -> Result:
    """Run the benchmark under a progress bar; check everything before installing the peers."""
    find_device(settings.device)
    chosen_cases(settings)
    if settings.authors is not None and not (settings.authors / "config").is_dir():
        raise UserError(f"{settings.authors} is not a checkout of the authors' code.")
    if peers:
        from benchmarks.peers import peer_python

        settings = settings.model_copy(update={"peers": peer_python(_say)})
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=1.0)
        return run_bench(
            folder / "bench.json",
            settings,
            lambda what, done: bar.update(task, description=what, completed=done),
        )


def _write(result: Result, folder: Path, document: Path | None) -> list[Path]:
    """Print a result; write its table, its growth curves and its part of a document."""
    console.print(Markdown(to_markdown(result)))
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "bench.md"]
    write_text(files[0], to_markdown(result))
    if result.growth and find_spec("matplotlib") is not None:
        from benchmarks.growth import draw_growth

        place = folder if document is None else document.parent / "figures"
        files.append(place / f"growth-{result.machine.kind}.png")
        draw_growth(files[1], result)
    if document is not None:
        update_document(document, result)
        files.append(document)
    return files


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

"""What `ciflows bench` does: measure, show, and write it down."""

from __future__ import annotations

__all__ = ["bench", "show"]

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ciflows.bench.measure import BenchSettings, chosen_cases, run_bench
from ciflows.bench.results import Result
from ciflows.bench.tables import to_markdown, update_document
from ciflows.devices import find_device
from ciflows.errors import UserError
from ciflows.files import write_text


def bench(
    folder: Path, settings: BenchSettings, peers: bool, console: Console, say: Callable[[str], None]
) -> Result:
    """Run the benchmark under a progress bar, with an environment for the peers if they are wanted."""
    find_device(settings.device)
    chosen_cases(settings)  # refused before an environment is made
    if settings.authors is not None and not (settings.authors / "config").is_dir():
        raise UserError(f"{settings.authors} is not a checkout of the authors' code.")
    if peers:
        from ciflows.bench.peers import peer_python

        settings = settings.model_copy(update={"peers": peer_python(say)})
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=1.0)
        return run_bench(
            folder / "bench.json",
            settings,
            lambda what, done: bar.update(task, description=what, completed=done),
        )


def show(result: Result, folder: Path, document: Path | None, console: Console) -> list[Path]:
    """Print a result and write its table, its picture and its part of a document; the files written."""
    console.print(Markdown(to_markdown(result)))
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "bench.md"]
    write_text(files[0], to_markdown(result))
    if result.growth and find_spec("matplotlib") is not None:
        from ciflows.bench.plots import draw_growth

        place = folder if document is None else document.parent / "figures"
        files.append(place / f"growth-{result.machine.kind}.png")
        draw_growth(files[1], result)
    if document is not None:
        update_document(document, result)
        files.append(document)
    return files

"""Several runs side by side: a table, a picture, a report."""

from __future__ import annotations

__all__ = ["compare_models", "report_runs"]

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ciflows.config import RunConfig
from ciflows.errors import UserError
from ciflows.files import write_json
from ciflows.report import Entry, compare_picture, density_grids, in_plane, write_report
from ciflows.run import Run, comparison_row, fit, read_description
from ciflows.run import resume as resume_run


def compare_models(
    configs: Sequence[RunConfig],
    folder: Path,
    *,
    device: str = "auto",
    resume: bool = False,
    console: Console | None = None,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Train each configuration in a folder of its own; the rows of compare.json, and the files written.

    Arguments:
        configs: Configurations with the same data and different models.
        folder: Gets compare.json, compare.png, report.html and a run folder for each model.
        device: auto, cpu or cuda.
        resume: Go on with runs found in the folder: finished ones are kept as they are.
        console: Where progress is shown.
    """
    names = [config.model for config in configs]
    if len(set(names)) < len(names):
        raise UserError("Name each model once.")
    if folder.exists() and any(folder.iterdir()) and not resume:
        raise UserError(f"{folder} exists already: choose another --out, or add --resume.")
    _check_settings(configs, folder)
    runs = [_fit_or_resume(config, folder / config.model, device, console) for config in configs]
    rows = [comparison_row(run) for run in runs]
    write_json(folder / "compare.json", rows)
    entries = _entries(runs)
    grids = density_grids(entries)
    files = ["compare.json", "report.html"]
    if in_plane(entries[0].dataset):
        compare_picture(folder / "compare.png", entries, grids=grids)
        files.insert(1, "compare.png")
    title = _title(Path(configs[0].data).stem, names)
    write_report(folder / "report.html", entries, title, grids=grids)
    return rows, files


def report_runs(runs: Sequence[Run], path: Path) -> None:
    """Write a report on finished runs, data set by data set; or a picture, where the path is a .png."""
    entries = _entries(runs)
    if path.suffix == ".png":
        compare_picture(path, entries)
        return
    data = " and ".join(dict.fromkeys(Path(run.config.data).stem for run in runs))
    write_report(path, entries, _title(data, list(dict.fromkeys(entry.name for entry in entries))))


def _fit_or_resume(config: RunConfig, folder: Path, device: str, console: Console | None) -> Run:
    if folder.exists():
        return resume_run(folder, device=device, console=console)
    return fit(config, folder, device=device, console=console)


def _check_settings(configs: Sequence[RunConfig], folder: Path) -> None:
    """Refuse runs that were begun with other settings, before anything is trained."""
    for config in configs:
        if (folder / config.model).exists():
            begun = read_description(folder / config.model)[0]
            if begun != config:
                raise UserError(
                    f"{folder / config.model} was begun with other settings: choose another --out, "
                    "or remove it."
                )


def _title(data: str, names: Sequence[str]) -> str:
    return f"{data}: {' and '.join(names)}"


def _entries(runs: Sequence[Run]) -> list[Entry]:
    datasets = {run.about["fingerprint"]: run.dataset() for run in runs}
    models = [(run.about["fingerprint"], run.config.model) for run in runs]
    twice = len(set(models)) < len(models)
    return [
        Entry(
            run.path.name if twice else run.config.model,
            run.flow,
            datasets[run.about["fingerprint"]],
            run.metrics,
            run.history,
            run.config.to_toml(),
        )
        for run in runs
    ]

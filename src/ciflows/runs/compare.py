"""Several runs side by side: a table, a picture, a report."""

from __future__ import annotations

__all__ = ["Difference", "compare_models", "comparison_row", "paired_difference", "report_runs"]

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from rich.console import Console

from ciflows.errors import UserError
from ciflows.files import typed_path, write_json
from ciflows.runs.config import RunConfig
from ciflows.runs.fit import fit
from ciflows.runs.fit import resume as resume_run
from ciflows.runs.folder import RowScores, read_description, read_test_scores
from ciflows.runs.run import Run
from ciflows.tables.many_files import data_name

if TYPE_CHECKING:
    from ciflows.report import Entry

OTHERS = ("limit", "gap", "leaked_mass", "seconds", "bits_per_dim", "bits_per_dim_std_error")


class Difference(NamedTuple):
    """How much higher one model scores than another, on the same test rows.

    Attributes:
        reference: Name of the other model.
        log_prob: Mean difference of log p(x), in nats.
        std_error: Its paired standard error: what the rows have in common cancels.
    """

    reference: str
    log_prob: float
    std_error: float


def compare_models(
    configs: Sequence[RunConfig],
    folder: Path,
    *,
    device: str = "auto",
    resume: bool = False,
    console: Console | None = None,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Train several models on the same data; return the rows of compare.json and the files written.

    Arguments:
        configs: Configurations with the same data and different models; the first is the reference.
        folder: Gets compare.json, compare.png, report.html and a run folder for each model.
        resume: Resume the runs in the folder; finished ones are kept.
    """
    from ciflows.report import compare_picture, density_grids, in_plane, write_report

    names = [config.model for config in configs]
    if len(set(names)) < len(names):
        raise UserError("Name each model once.")
    if folder.exists() and any(folder.iterdir()) and not resume:
        raise UserError(
            f"{folder} exists already: choose another folder, or resume the comparison in it.",
            command="the same command with --resume",
        )
    _check_settings(configs, folder)
    runs = [_fit_or_resume(config, folder / config.model, device, console) for config in configs]
    rows = [comparison_row(run, runs[0]) for run in runs]
    write_json(folder / "compare.json", rows)
    entries = _entries(runs)
    grids = density_grids(entries)
    files = ["compare.json", "report.html"]
    if in_plane(entries[0].dataset):
        compare_picture(folder / "compare.png", entries, grids=grids)
        files.insert(1, "compare.png")
    title = _title(data_name(configs[0].data), names)
    write_report(folder / "report.html", entries, title, grids=grids)
    return rows, files


def comparison_row(run: Run, reference: Run | None = None) -> dict[str, Any]:
    """A run's row in compare.json."""
    metrics = run.metrics
    difference = None if reference is None else _difference(run, reference)
    return {
        "model": run.config.model,
        "parameters": metrics["parameters"],
        **metrics["test"],
        **{key: metrics.get(key) for key in OTHERS},
        "difference": None if difference is None else difference._asdict(),
    }


def paired_difference(name: str, reference: RowScores, scores: RowScores) -> Difference:
    """The mean of log p(x) - log p'(x) over the same rows, with its paired standard error.

    Arguments:
        reference: log p'(x) and weights of the rows.
        scores: log p(x) of the same rows.

    Example:
        >>> one, other = RowScores(torch.zeros(4), None), RowScores(torch.tensor([1.0, 2, 1, 2]), None)
        >>> paired_difference("maf", one, other)
        Difference(reference='maf', log_prob=1.5, std_error=0.28867513459481287)
    """
    gains = scores.log_prob.double() - reference.log_prob.double()
    weight = torch.ones_like(gains) if scores.weight is None else scores.weight.to(gains)
    share, rows = weight / weight.sum(), len(gains)
    mean = (share * gains).sum()
    spread = (share * (gains - mean)).square().sum() * (rows / (rows - 1) if rows > 1 else math.nan)
    return Difference(name, mean.item(), spread.sqrt().item())


def report_runs(runs: Sequence[Run], path: Path) -> list[str]:
    """Write a report on finished runs and return its verdicts; only the picture if path is a .png."""
    from ciflows.report import compare_picture, write_report

    entries = _entries(runs)
    if path.suffix == ".png":
        compare_picture(path, entries)
        return []
    data = " and ".join(dict.fromkeys(data_name(run.config.data) for run in runs))
    names = list(dict.fromkeys(entry.name for entry in entries))
    return write_report(path, entries, _title(data, names))


def _difference(run: Run, reference: Run) -> Difference | None:
    """The paired difference of two runs; None for the same run, or if they scored different rows."""
    same = run.about["fingerprint"] == reference.about["fingerprint"]
    if run.path == reference.path or not same:
        return None
    first, second = read_test_scores(reference.path), read_test_scores(run.path)
    if first is None or second is None or len(first.log_prob) != len(second.log_prob):
        return None
    return paired_difference(reference.config.model, first, second)


def _fit_or_resume(config: RunConfig, folder: Path, device: str, console: Console | None) -> Run:
    if folder.exists():
        return resume_run(folder, device=device, console=console)
    return fit(config, folder, device=device, console=console)


def _check_settings(configs: Sequence[RunConfig], folder: Path) -> None:
    """Refuse runs that were begun with other settings, before anything is trained."""
    for config in configs:
        if (folder / config.model).exists() and read_description(folder / config.model)[0] != config:
            raise UserError(
                f"{folder / config.model} was begun with other settings: choose another folder, or "
                "remove it."
            )


def _title(data: str, names: Sequence[str]) -> str:
    return f"{data}: {' and '.join(names)}"


def _entries(runs: Sequence[Run]) -> list[Entry]:
    """What a report needs of each run; runs on the same data share it, and are compared to the first."""
    from ciflows.report import Entry

    first = {run.about["fingerprint"]: run for run in reversed(runs)}
    datasets = {fingerprint: run.dataset() for fingerprint, run in first.items()}
    models = [(run.about["fingerprint"], run.config.model) for run in runs]
    twice = len(set(models)) < len(models)
    return [
        Entry(
            run.path.name if twice else run.config.model,
            run.flow,
            datasets[run.about["fingerprint"]],
            run.metrics | {"difference": _difference_words(run, first[run.about["fingerprint"]], twice)},
            run.history,
            run.config.to_toml(),
            typed_path(str(run.path)),
            " ".join(run.config.table.as_options()),
        )
        for run in runs
    ]


def _difference_words(run: Run, reference: Run, by_folder: bool) -> dict[str, Any] | None:
    difference = _difference(run, reference)
    if difference is None:
        return None
    name = reference.path.name if by_folder else difference.reference
    return difference._replace(reference=name)._asdict()

"""The format of a run folder: which files it holds, how it is created, how its description is read.

config.toml               every setting
about.json                versions, commit, machine, command, columns, fingerprint of the data
data.parquet              the table, if it came from memory
metrics.jsonl             loss and validation during training; tensorboard/ shows the same
checkpoints/              the state of training, to resume from
weights.safetensors       the trained weights
test_scores.safetensors   log p(x) of each test row, to compare runs row by row
metrics.json              the test result; it is written last, so a run that has it is finished
"""

from __future__ import annotations

__all__ = [
    "TABLE",
    "RowScores",
    "about_run",
    "check_free",
    "create_folder",
    "is_finished",
    "load_run_data",
    "read_description",
    "read_metrics",
    "read_schema",
    "read_test_scores",
    "read_weights",
    "write_result",
]

import os
import platform
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ciflows import __version__
from ciflows.core.flow import Flow
from ciflows.datasets import Dataset, load_dataset
from ciflows.errors import UserError
from ciflows.files import read_json, write_json, write_text
from ciflows.optional import polars as pl
from ciflows.runs.config import RunConfig
from ciflows.settings import parse_settings
from ciflows.tables import Schema
from ciflows.training.checkpoint import load_tensors, save_tensors

FORMAT = 2
CONFIG, ABOUT, METRICS = "config.toml", "about.json", "metrics.json"
TABLE, WEIGHTS, SCORES = "data.parquet", "weights.safetensors", "test_scores.safetensors"
PACKAGES = ("torch", "numpy", "safetensors")


class RowScores(NamedTuple):
    """The log-likelihood of each test row, in the order of the test set.

    Attributes:
        log_prob: Estimates of log p(x) (rows,).
        weight: Weights of the rows (rows,); None if all count the same.
    """

    log_prob: Tensor
    weight: Tensor | None


def check_free(folder: Path) -> None:
    """Refuse to write a run into a folder that holds something."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    resume = f"ciflows fit --resume {folder}" if folder.is_dir() else None
    raise UserError(f"{folder} exists already: choose another folder.", command=resume)


def about_run(dataset: Dataset, flow: Flow, *, standardised: bool, components: int) -> dict[str, Any]:
    """The content of about.json: where a run comes from, and what is needed to rebuild its flow.

    Arguments:
        standardised: Whether its first layer standardises the data.
        components: Number of Gaussians in its base; 0 for the model's own base.
    """
    return {
        "format": FORMAT,
        "packages": {"ciflows": __version__, **{name: version(name) for name in PACKAGES}},
        "python": platform.python_version(),
        "machine": platform.platform(),
        "commit": _commit(),
        "command": shlex.join(sys.argv),
        "fingerprint": dataset.fingerprint,
        "split_seed": dataset.split_seed,
        "shape": list(flow.shape),
        "columns": list(dataset.columns),
        "standardised": standardised,
        "components": components,
        "schema": None if dataset.schema is None else dataset.schema.model_dump(mode="json"),
    }


def create_folder(
    folder: Path, config: RunConfig, about: dict[str, Any], table: pl.DataFrame | None = None
) -> None:
    """Create a run folder with its description in one step: a kill leaves all of it or nothing."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    try:
        write_text(temporary / CONFIG, config.to_toml())
        write_json(temporary / ABOUT, about)
        if table is not None:
            table.write_parquet(temporary / TABLE)
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary)
        raise


def read_description(folder: Path) -> tuple[RunConfig, dict[str, Any]]:
    """Read config.toml and about.json; refuse other folders and other formats."""
    if not (folder / CONFIG).exists() or not (folder / ABOUT).exists():
        raise UserError(f"{folder} is not a run folder: it has no {CONFIG} and {ABOUT}.")
    about = read_json(folder / ABOUT)
    if about.get("format") != FORMAT:
        made = about.get("packages", {}).get("ciflows", "an unknown version")
        raise UserError(
            f"{folder} was made by ciflows {made} in format {about.get('format')}; "
            f"this is ciflows {__version__}, which reads format {FORMAT}."
        )
    return RunConfig.from_toml((folder / CONFIG).read_text(), f"{folder}/{CONFIG}"), about


def read_schema(about: dict[str, Any]) -> Schema | None:
    """The columns of the table that a run was trained on; None if it was a built-in set or images."""
    schema = about.get("schema")
    return None if schema is None else parse_settings(Schema, schema, f"{ABOUT}, schema")


def load_run_data(folder: Path, config: RunConfig, about: dict[str, Any]) -> Dataset:
    """Load the data of a run again; refuse them if they have changed since it began."""
    name = config.data if config.data != TABLE else str(folder / TABLE)
    dataset = load_dataset(name, table=config.table, training_points=config.training.training_points)
    if dataset.fingerprint != about["fingerprint"]:
        raise UserError(
            f"The data of {name} have changed since the run began, or come from other files."
        )
    return dataset


def is_finished(folder: Path) -> bool:
    """Whether a run has been trained and tested."""
    return (folder / METRICS).exists()


def write_result(folder: Path, flow: Flow, scores: RowScores, metrics: dict[str, Any]) -> None:
    """Write the weights, the scores of the test rows and, last, metrics.json."""
    save_tensors(folder / WEIGHTS, flow.state_dict(), {"steps": metrics["steps"]})
    tensors = {name: value for name, value in scores._asdict().items() if value is not None}
    save_tensors(folder / SCORES, tensors, {})
    write_json(folder / METRICS, metrics)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The trained weights by name."""
    return load_tensors(folder / WEIGHTS)[0]


def read_metrics(folder: Path) -> dict[str, Any]:
    """The content of metrics.json."""
    return read_json(folder / METRICS)


def read_test_scores(folder: Path) -> RowScores | None:
    """The scores of the test rows; None for a run of an older version, which kept none."""
    if not (folder / SCORES).exists():
        return None
    tensors = load_tensors(folder / SCORES)[0]
    return RowScores(tensors["log_prob"], tensors.get("weight"))


def _commit() -> str | None:
    """The commit of the source tree that runs, marked if it has changes; None outside a repository."""
    here = Path(__file__)
    git = ["git", "-C", str(here.parent)]
    describe = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*"]
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", here.name], capture_output=True, check=True)
        found = subprocess.run([*git, *describe], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()

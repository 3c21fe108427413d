"""Runs: a folder that tells everything about one trained flow, and the ways in and out of it."""

from __future__ import annotations

__all__ = [
    "Run",
    "build_flow",
    "comparison_row",
    "evaluate",
    "fit",
    "load_run",
    "read_description",
    "resume",
]

import math
import os
import platform
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from ciflows.bijections import Residual, Series, Standardise
from ciflows.config import RunConfig
from ciflows.data import Dataset, load_dataset
from ciflows.devices import device_name, find_device
from ciflows.diagnostics import leaked_mass, log_det_error
from ciflows.errors import InversionError, UserError
from ciflows.estimate import Estimate, summarise
from ciflows.files import read_json, write_json, write_text
from ciflows.flow import Flow
from ciflows.images import bits_per_dim
from ciflows.layers import Layer, Shape
from ciflows.models import build_model
from ciflows.networks import converge_norms
from ciflows.training import fit_flow
from ciflows.training.checkpoint import Checkpoints, load_tensors, save_tensors
from ciflows.training.monitor import Hear, RunMonitor, read_history
from ciflows.training.samples import ImageMonitor

FORMAT = 1
LOG_DET_POINTS = 100


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        path: Its folder.
        config: Its configuration.
        flow: The trained flow, in eval mode.
        about: Package versions, commit, machine, data fingerprint.
        metrics: The content of metrics.json: the test result and what belongs to it.
        history: The rows of metrics.jsonl.
    """

    path: Path
    config: RunConfig
    flow: Flow
    about: dict[str, Any]
    metrics: dict[str, Any]
    history: list[dict[str, Any]]

    def dataset(self) -> Dataset:
        """The data it was trained on, loaded again; refused where they have changed since."""
        return _same_data(self.config.data, self.about["fingerprint"])

    def estimate(self, x: Tensor, samples: int = 100, seed: int | None = None) -> Estimate:
        """`Flow.estimate` of the trained flow."""
        return self.flow.estimate(x, samples, seed=seed)

    def log_prob(self, x: Tensor, samples: int = 100, seed: int | None = None) -> Tensor:
        """`Flow.log_prob` of the trained flow."""
        return self.flow.log_prob(x, samples, seed=seed)

    def sample(self, n: int, seed: int | None = None, temperature: float = 1.0) -> Tensor:
        """`Flow.sample` of the trained flow."""
        return self.flow.sample(n, seed=seed, temperature=temperature)

    @property
    def images(self) -> bool:
        """Whether it is a density over images."""
        return len(self.flow.shape) == 3


def fit(
    config: RunConfig,
    folder: Path | str,
    *,
    device: str = "auto",
    console: Console | None = None,
    hear: Hear | None = None,
) -> Run:
    """Train and test a model in a new run folder.

    Arguments:
        config: What to train, on what, and how.
        folder: The run folder; there must be nothing in it yet.
        device: auto, cpu or cuda.
        console: Where progress is shown.
        hear: Called with the step and the score of each validation; it may raise to end the run.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(
            f"{folder} exists already: choose another --out, or 'ciflows fit --resume {folder}'."
        )
    where = find_device(device)
    console = console or Console(quiet=True)
    dataset = load_dataset(config.data, say=partial(console.print, markup=False, soft_wrap=True))
    flow = build_flow(config, dataset).to(where)
    _make_folder(folder, config, dataset)
    return _train(flow, config, dataset, _monitor(flow, config, folder, dataset, console, hear))


def resume(
    folder: Path | str,
    *,
    device: str = "auto",
    console: Console | None = None,
    hear: Hear | None = None,
) -> Run:
    """Go on with a run that was interrupted; a finished one is only loaded."""
    folder = Path(folder)
    config, about = read_description(folder)
    if (folder / "metrics.json").exists():
        return load_run(folder, device)
    where = find_device(device)
    dataset = _same_data(config.data, about["fingerprint"])
    flow = build_flow(config, dataset).to(where)
    console = console or Console(quiet=True)
    return _train(flow, config, dataset, _monitor(flow, config, folder, dataset, console, hear))


def load_run(folder: Path | str, device: str = "cpu") -> Run:
    """Load a finished run.

    Arguments:
        folder: The run folder.
        device: Where to put the flow.
    """
    folder = Path(folder)
    config, about = read_description(folder)
    if not (folder / "metrics.json").exists():
        raise UserError(f"{folder} is not finished: go on with 'ciflows fit --resume {folder}'.")
    # a run from before there were images says how many features it has
    flow = _empty_flow(config, tuple(about.get("shape") or [about["features"]]))
    if about["standardised"]:
        ones = torch.ones(flow.shape, dtype=flow.dtype)
        flow = _standardised(flow, ones, ones)
    tensors, _ = load_tensors(folder / "weights.safetensors")
    try:
        flow.load_state_dict(tensors)
    except RuntimeError:
        raise UserError(f"{folder}: the weights do not fit the model in its config.toml.") from None
    flow.to(find_device(device)).eval()
    metrics = read_json(folder / "metrics.json")
    return Run(folder, config, flow, about, metrics, read_history(folder / "metrics.jsonl"))


def build_flow(config: RunConfig, dataset: Dataset) -> Flow:
    """The flow that a configuration describes, over the units of the data; tables are standardised."""
    flow = _empty_flow(config, dataset.shape)
    if dataset.images:
        _check_levels(dataset, config.architecture["levels"])
    if not _needs_scaling(dataset):
        return flow
    mean, scale, largest = _spread(dataset)
    constant = [name for name, s in zip(dataset.columns, scale, strict=True) if not s > 0]
    if constant:
        raise UserError(f"{dataset.name}: leave out what is constant: {', '.join(constant)}.")
    kept = torch.finfo(flow.dtype)
    bad = (largest > kept.max) | (largest * kept.eps > 1e-3 * scale) | (scale < kept.tiny)
    if bad.any():
        names = [name for name, wrong in zip(dataset.columns, bad, strict=True) if wrong]
        raise UserError(
            f"{dataset.name}: {', '.join(names)} cannot be told apart in {flow.dtype}: their values are "
            "too large, or differ too little. Use --precision float64, or shift and scale them."
        )
    return _standardised(flow, mean.to(flow.dtype), scale.to(flow.dtype))


def evaluate(flow: Flow, dataset: Dataset, config: RunConfig) -> dict[str, Any]:
    """What metrics.json says of the flow itself."""
    samples = 1 if flow.exact else config.evaluation.samples
    test = _some(dataset.test, config.evaluation.points).to(flow.device, flow.dtype)
    estimate = flow.estimate(test, samples, seed=config.evaluation.seed)
    summary = summarise(estimate, samples)
    bits, bits_error = (
        bits_per_dim(value, dataset.features) if dataset.images else None
        for value in (summary.log_prob, -summary.std_error)
    )
    limit = None if dataset.truth is None else dataset.truth.limit
    contains = None if dataset.truth is None else dataset.truth.contains
    try:
        leak = contains and leaked_mass(flow, contains, seed=config.evaluation.seed)
    except InversionError:
        leak = None
    return {
        "test": summary._asdict(),
        "bits_per_dim": bits,
        "bits_per_dim_std_error": bits_error,
        "log_det": _log_det(flow, test, samples, config.evaluation.seed),
        "limit": limit,
        "gap": None if limit is None else limit - summary.log_prob,
        "leaked_mass": leak.share if leak else None,
        "leaked_mass_std_error": leak.std_error if leak else None,
        "parameters": sum(p.numel() for p in flow.parameters()),
        "device": device_name(flow.device),
    }


def comparison_row(run: Run) -> dict[str, Any]:
    """A run's line in compare.json."""
    test, metrics = run.metrics["test"], run.metrics
    of_test = ("log_prob", "std_error", "monte_carlo_error", "elbo", "samples")
    others = ("limit", "gap", "leaked_mass", "seconds")
    return {
        "model": run.config.model,
        "parameters": metrics["parameters"],
        **{key: test[key] for key in of_test},
        **{key: metrics[key] for key in others},
        **{key: metrics.get(key) for key in ("bits_per_dim", "bits_per_dim_std_error")},
    }


def read_description(folder: Path) -> tuple[RunConfig, dict[str, Any]]:
    """A run folder's configuration and facts; refused where it is none, or of another format."""
    if not (folder / "config.toml").exists() or not (folder / "about.json").exists():
        raise UserError(f"{folder} is not a run folder: it has no config.toml and about.json.")
    about = read_json(folder / "about.json")
    if about.get("format") != FORMAT:
        made = about.get("packages", {}).get("ciflows", "an unknown version")
        raise UserError(
            f"{folder} was made by ciflows {made} in format {about.get('format')}; "
            f"this is ciflows {version('ciflows')}, which reads format {FORMAT}."
        )
    config = RunConfig.from_toml((folder / "config.toml").read_text(), f"{folder}/config.toml")
    return config, about


def _make_folder(folder: Path, config: RunConfig, dataset: Dataset) -> None:
    """Make the run folder with its description in it, both at once: no kill can leave half of it."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    try:
        write_text(temporary / "config.toml", config.to_toml())
        write_json(temporary / "about.json", _about(dataset))
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary)
        raise


def _train(flow: Flow, config: RunConfig, dataset: Dataset, monitor: RunMonitor) -> Run:
    folder = monitor.folder
    outcome = fit_flow(
        flow,
        dataset.train,
        dataset.validation,
        config.training,
        seed=config.seed,
        checkpoints=Checkpoints(folder / "checkpoints", monitor.say),
        monitor=monitor,
    )
    if outcome.validation == -math.inf:
        raise UserError(f"{folder}: training came to nothing: {outcome.early}.")
    if outcome.early:
        monitor.say(f"Training ended after {outcome.steps} steps: {outcome.early}.")
    converge_norms(flow)
    save_tensors(folder / "weights.safetensors", flow.state_dict(), {"steps": outcome.steps})
    monitor.say("Testing ...")
    metrics = {**evaluate(flow, dataset, config), **outcome._asdict()}
    write_json(folder / "metrics.json", metrics)
    return load_run(folder, str(flow.device))


def _monitor(
    flow: Flow,
    config: RunConfig,
    folder: Path,
    dataset: Dataset,
    console: Console,
    hear: Hear | None,
) -> RunMonitor:
    if not dataset.images:
        return RunMonitor(folder, console, config.model, hear)
    batch_size = min(config.training.batch_size, len(dataset.train))
    levels = config.architecture["levels"]
    return ImageMonitor(folder, console, config.model, flow, batch_size, levels, hear)


def _empty_flow(config: RunConfig, shape: Shape) -> Flow:
    flow = build_model(config.model, shape=shape, seed=config.seed, **config.architecture)
    return flow.double() if config.training.precision == "float64" else flow


def _check_levels(dataset: Dataset, levels: int) -> None:
    largest = max(int(part.max()) for part in (dataset.train, dataset.validation, dataset.test))
    if largest >= levels:
        raise UserError(
            f"{dataset.name}: there are pixels of value {largest}, but levels = {levels} means that the "
            f"largest is {levels - 1}."
        )


def _needs_scaling(dataset: Dataset) -> bool:
    """Whether a flow begins with a standardisation: images have their own way to the noise."""
    return dataset.truth is None and not dataset.images


def _some(points: Tensor, most: int | None) -> Tensor:
    """So many points at most, evenly spread: the beginning of a set may be unlike the rest."""
    if most is None or most >= len(points):
        return points
    return points[torch.arange(most) * len(points) // most]


def _log_det(flow: Flow, test: Tensor, samples: int, seed: int) -> dict[str, float] | None:
    """What estimated log-determinants may contribute to the test result; None where all are exact."""
    blocks = [block for block in flow.modules() if isinstance(block, Residual)]
    if not any(isinstance(block.log_det, Series) for block in blocks):
        return None
    some = _some(test, LOG_DET_POINTS)
    error = log_det_error(flow, some, samples, seed=seed)
    # rows have independent probes: their error falls with the number of rows
    std_error = error.std_error * math.sqrt(len(some) / len(test))
    return error._replace(std_error=std_error)._asdict()


def _spread(dataset: Dataset) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and standard deviation of each training column, and the largest |x| of all parts."""
    rows = []
    # Column by column: a copy of all the rows in double precision may not fit.
    for column in range(dataset.features):
        train = dataset.train[:, column].double()
        parts = (train, dataset.validation[:, column], dataset.test[:, column])
        largest = torch.stack([part.abs().max().double() for part in parts]).max()
        rows.append(torch.stack([train.mean(), train.std(), largest]))
    mean, scale, largest = torch.stack(rows, dim=1)
    return mean, scale, largest


def _standardised(flow: Flow, mean: Tensor, scale: Tensor) -> Flow:
    layers: list[Layer] = [Standardise(mean, scale), *flow.layers]
    return Flow(layers, flow.base)


def _about(dataset: Dataset) -> dict[str, Any]:
    names = ("ciflows", "torch", "numpy", "safetensors")
    return {
        "format": FORMAT,
        "packages": {name: version(name) for name in names},
        "python": platform.python_version(),
        "machine": platform.platform(),
        "commit": _commit(),
        "command": shlex.join(sys.argv),
        "fingerprint": dataset.fingerprint,
        "split_seed": dataset.split_seed,
        "shape": list(dataset.shape),
        "columns": list(dataset.columns),
        "standardised": _needs_scaling(dataset),
    }


def _commit() -> str | None:
    """The commit of the source tree that is running, where it is one; marked where it is changed."""
    here = Path(__file__)
    git = ["git", "-C", str(here.parent)]
    describe = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*"]
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", here.name], capture_output=True, check=True)
        found = subprocess.run([*git, *describe], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def _same_data(name: str, fingerprint: str) -> Dataset:
    dataset = load_dataset(name)
    if dataset.fingerprint != fingerprint:
        raise UserError(
            f"The data of {name} have changed since the run began, or come from other files than then."
        )
    return dataset

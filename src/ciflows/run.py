"""Runs: a folder that tells everything about one trained flow, and the ways in and out of it."""

from __future__ import annotations

__all__ = ["Run", "build_flow", "comparison_row", "evaluate", "fit", "load_run", "resume"]

import json
import platform
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from ciflows.bijections import Standardise
from ciflows.config import RunConfig
from ciflows.data import Dataset, load_dataset
from ciflows.diagnostics import leaked_mass
from ciflows.errors import UserError
from ciflows.estimate import Estimate, summarise
from ciflows.files import write_text
from ciflows.flow import Flow
from ciflows.layers import Layer
from ciflows.models import build_model
from ciflows.networks import converge_norms
from ciflows.training import Outcome, fit_flow
from ciflows.training.checkpoint import Checkpoints, load_tensors, save_tensors
from ciflows.training.monitor import RunMonitor, read_history

FORMAT = 1


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

    def sample(self, n: int, seed: int | None = None) -> Tensor:
        """`Flow.sample` of the trained flow."""
        return self.flow.sample(n, seed=seed)


def fit(
    config: RunConfig,
    folder: Path | str,
    *,
    device: str = "auto",
    console: Console | None = None,
) -> Run:
    """Train and test a model in a new run folder.

    Arguments:
        config: What to train, on what, and how.
        folder: The run folder; it must not exist yet.
        device: auto, cpu or cuda.
        console: Where progress is shown.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} exists already. Resume it, or choose another folder.")
    where = find_device(device)
    dataset = load_dataset(config.data)
    flow = build_flow(config, dataset.features, dataset.truth is None, dataset.train).to(where)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "config.toml", config.to_toml())
    write_text(folder / "about.json", json.dumps(_about(dataset), indent=2))
    return _train(flow, config, folder, dataset, console or Console(quiet=True))


def resume(folder: Path | str, *, device: str = "auto", console: Console | None = None) -> Run:
    """Go on with a run that was interrupted; a finished one is only loaded."""
    folder = Path(folder)
    config, about = _read_description(folder)
    if (folder / "metrics.json").exists():
        return load_run(folder)
    where = find_device(device)
    dataset = _same_data(config.data, about["fingerprint"])
    flow = build_flow(config, dataset.features, about["standardised"], dataset.train).to(where)
    return _train(flow, config, folder, dataset, console or Console(quiet=True))


def load_run(folder: Path | str, device: str = "cpu") -> Run:
    """Load a finished run.

    Arguments:
        folder: The run folder.
        device: Where to put the flow.
    """
    folder = Path(folder)
    config, about = _read_description(folder)
    if not (folder / "metrics.json").exists():
        raise UserError(f"{folder} is not finished: go on with 'ciflows fit --resume {folder}'.")
    flow = build_flow(config, about["features"], about["standardised"])
    tensors, _ = load_tensors(folder / "weights.safetensors")
    flow.load_state_dict(tensors)
    flow.to(find_device(device)).eval()
    metrics = json.loads((folder / "metrics.json").read_text())
    return Run(folder, config, flow, about, metrics, read_history(folder / "metrics.jsonl"))


def find_device(name: str) -> torch.device:
    """The device that a name means here."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError("There is no CUDA device here; use --device cpu.")
    try:
        return torch.device(name)
    except RuntimeError:
        raise UserError(f"There is no device {name!r}; use auto, cpu or cuda.") from None


def build_flow(
    config: RunConfig, features: int, standardised: bool, train: Tensor | None = None
) -> Flow:
    """The flow that a configuration describes, over the data's own units.

    Arguments:
        config: The configuration.
        features: Size of one data point.
        standardised: Whether the first layer standardises the data.
        train: The data to take means and scales from; placeholders, to be loaded, where None.
    """
    flow = build_model(config.model, features=features, seed=config.seed, **config.architecture)
    if config.training.precision == "float64":
        flow = flow.double()
    if not standardised:
        return flow
    like = torch.zeros(features) if train is None else train
    mean, scale = (like, like + 1) if train is None else (like.mean(0), like.std(0))
    if not bool((scale > 0).all()):
        raise UserError("A column of the table is constant: leave it out.")
    layers: list[Layer] = [Standardise(mean, scale), *flow.layers]
    return Flow(layers, flow.base)


def _train(flow: Flow, config: RunConfig, folder: Path, dataset: Dataset, console: Console) -> Run:
    outcome = fit_flow(
        flow,
        dataset.train,
        dataset.validation,
        config.training,
        seed=config.seed,
        checkpoints=Checkpoints(folder / "checkpoints", console.print),
        monitor=RunMonitor(folder, console, config.model),
    )
    if outcome.reason != "all steps taken":
        console.print(f"Training ended after {outcome.steps} steps: {outcome.reason}.")
    converge_norms(flow)
    save_tensors(folder / "weights.safetensors", flow.state_dict(), {"steps": outcome.steps})
    metrics = evaluate(flow, dataset, config, outcome)
    write_text(folder / "metrics.json", json.dumps(metrics, indent=2))
    return load_run(folder, str(flow.device))


def evaluate(flow: Flow, dataset: Dataset, config: RunConfig, outcome: Outcome) -> dict[str, Any]:
    """The content of metrics.json."""
    samples = 1 if flow.exact else config.evaluation.samples
    test = dataset.test.to(flow.device, flow.dtype)
    estimate = flow.estimate(test, samples, seed=config.evaluation.seed)
    summary = summarise(estimate, samples)
    limit = None if dataset.truth is None else dataset.truth.limit
    contains = None if dataset.truth is None else dataset.truth.contains
    leak = None if contains is None else leaked_mass(flow, contains, seed=config.evaluation.seed)
    return {
        "test": summary._asdict(),
        "limit": limit,
        "gap": None if limit is None else limit - summary.log_prob,
        "leaked_mass": None if leak is None else leak.share,
        "leaked_mass_std_error": None if leak is None else leak.std_error,
        "validation": outcome.validation,
        "parameters": sum(p.numel() for p in flow.parameters()),
        "steps": outcome.steps,
        "seconds": outcome.seconds,
        "ended": outcome.reason,
        "device": device_name(flow.device),
    }


def comparison_row(run: Run) -> dict[str, Any]:
    """A run's line in compare.json."""
    test, metrics = run.metrics["test"], run.metrics
    return {
        "model": run.config.model,
        "parameters": metrics["parameters"],
        "log_prob": test["log_prob"],
        "std_error": test["std_error"],
        "monte_carlo_error": test["monte_carlo_error"],
        "elbo": test["elbo"],
        "samples": test["samples"],
        "limit": metrics["limit"],
        "gap": metrics["gap"],
        "leaked_mass": metrics["leaked_mass"],
        "seconds": metrics["seconds"],
    }


def device_name(device: torch.device) -> str:
    """The machine in words, for tables of results."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def _about(dataset: Dataset) -> dict[str, Any]:
    names = ("ciflows", "torch", "numpy", "safetensors")
    return {
        "format": FORMAT,
        "packages": {name: version(name) for name in names},
        "python": platform.python_version(),
        "machine": platform.platform(),
        "commit": _commit(),
        "command": " ".join(sys.argv),
        "fingerprint": dataset.fingerprint,
        "split_seed": dataset.split_seed,
        "features": dataset.features,
        "columns": list(dataset.columns),
        "standardised": dataset.truth is None,
    }


def _commit() -> str | None:
    """The commit of the source tree that is running, where it is one."""
    here = Path(__file__).parent
    words = ["git", "-C", str(here), "rev-parse", "HEAD"]
    try:
        found = subprocess.run(words, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def _read_description(folder: Path) -> tuple[RunConfig, dict[str, Any]]:
    if not (folder / "config.toml").exists() or not (folder / "about.json").exists():
        raise UserError(f"{folder} is not a run folder: it has no config.toml and about.json.")
    about = json.loads((folder / "about.json").read_text())
    if about.get("format") != FORMAT:
        made = about.get("packages", {}).get("ciflows", "an unknown version")
        raise UserError(
            f"{folder} was made by ciflows {made} in format {about.get('format')}; "
            f"this is ciflows {version('ciflows')}, which reads format {FORMAT}."
        )
    config = RunConfig.from_toml((folder / "config.toml").read_text(), f"{folder}/config.toml")
    return config, about


def _same_data(name: str, fingerprint: str) -> Dataset:
    dataset = load_dataset(name)
    if dataset.fingerprint != fingerprint:
        raise UserError(f"The data of {name} have changed since the run began.")
    return dataset

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
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from ciflows.bijections import Residual, Series, Standardise
from ciflows.config import RunConfig
from ciflows.data import Dataset, Schema, TableLike, as_frame, load_dataset, table_dataset
from ciflows.data.tables import errors_of, read_chunks
from ciflows.densities import StandardNormal
from ciflows.devices import device_name, find_device
from ciflows.diagnostics import leaked_mass, log_det_error
from ciflows.errors import InversionError, UserError
from ciflows.estimate import Estimate, summarise
from ciflows.files import read_json, write_json, write_text
from ciflows.flow import Flow
from ciflows.gaussian_mixture import GaussianMixture
from ciflows.images import bits_per_dim
from ciflows.layers import Layer, Shape
from ciflows.models import build_model
from ciflows.networks import converge_norms
from ciflows.rows import Rows
from ciflows.settings import parse_settings
from ciflows.table_flow import column_layers, fit_base, start_as_identity, table_flow
from ciflows.training import fit_flow
from ciflows.training.checkpoint import Checkpoints, load_tensors, save_tensors
from ciflows.training.loop import validation_score
from ciflows.training.monitor import Hear, RunMonitor, read_history
from ciflows.training.samples import ImageMonitor

if TYPE_CHECKING:
    import polars as pl

T = TypeVar("T")
FORMAT = 1
KEPT = "data.parquet"
LOG_DET_POINTS = 100
ROUND_TRIPS = 16


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
        return _same_data(self.path, self.config, self.about["fingerprint"])

    @cached_property
    def schema(self) -> Schema | None:
        """What the columns are, where it was trained on a table of one's own."""
        return _read_schema(self.about)

    def estimate(
        self,
        x: TableLike | Rows,
        samples: int = 100,
        seed: int | None = None,
        *,
        std_error: float | None = None,
        max_samples: int = 10_000,
    ) -> Estimate:
        """`Flow.estimate` of the trained flow.

        Arguments:
            x: Points (rows, shape) as a flow takes them; or a table with the columns of training, be it
                a data frame, an array or a file's path, and then likelihoods are in its units; or what
                `rows` made of one.
            samples: Draws for each point, where no tolerance is given.
            seed: Seed of the draws.
            std_error: Draw until each point's standard error is about this.
            max_samples: The most draws for one point then.
        """
        rows = x.to(self.flow.device, self.flow.dtype) if isinstance(x, Rows) else self.rows(x)
        return self.flow.estimate(
            rows.x,
            samples,
            std_error=std_error,
            max_samples=max_samples,
            context=rows.context,
            seed=seed,
        )

    def log_prob(self, x: TableLike, samples: int = 100, seed: int | None = None) -> Tensor:
        """Only log p(x) of what `estimate` gives: (rows,)."""
        return self.estimate(x, samples, seed).log_prob

    def score(self, x: TableLike, samples: int = 100, seed: int | None = None) -> float:
        """The mean of log p(x) over some rows."""
        return self.log_prob(x, samples, seed).double().mean().item()

    def sample(
        self,
        n: int,
        seed: int | None = None,
        temperature: float = 1.0,
        given: TableLike | None = None,
    ) -> Any:
        """Draw n points: a tensor (n, shape), or a table with the columns, types and bounds of training.

        Arguments:
            n: How many; for each row of `given`, where there are such rows.
            seed: Seed of the draws.
            temperature: Factor of all normal numbers drawn.
            given: A table of what the density is conditioned on, where it is.
        """
        if given is not None and not (self.schema and self.schema.given):
            raise UserError("The run is of no conditional density: there is nothing to be given.")
        if self.schema is None:
            return self.flow.sample(n, seed=seed, temperature=temperature)
        if not self.schema.given:
            return self.schema.decode(self.flow.sample(n, seed=seed, temperature=temperature))
        if given is None:
            names = ", ".join(column.name for column in self.schema.given)
            raise UserError(f"The run is of a conditional density: give {names}.")
        frame = table_frame(given)
        context = self.schema.encode_given(frame)
        assert context is not None
        x = self.flow.sample(n, context.to(self.flow.device, self.flow.dtype), seed, temperature)
        each = frame[[i for i in range(len(frame)) for _ in range(n)]]
        return self.schema.decode(x.transpose(0, 1).flatten(0, 1), each)

    def save(self, folder: Path | str) -> Run:
        """Copy the run folder to another place, and load it from there."""
        if Path(folder).exists():
            raise UserError(f"{folder} exists already: choose another folder.")
        shutil.copytree(self.path, folder)
        return load_run(folder, str(self.flow.device))

    def rows(self, x: TableLike) -> Rows:
        """Points as the flow takes them, from a table where they are in one."""
        if isinstance(x, Tensor) or self.schema is None:
            return Rows(torch.as_tensor(x))
        return self.schema.encode(table_frame(x)).to(self.flow.device, self.flow.dtype)

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
    table: pl.DataFrame | None = None,
) -> Run:
    """Train and test a model in a new run folder.

    Arguments:
        config: What to train, on what, and how.
        folder: The run folder; there must be nothing in it yet.
        device: auto, cpu or cuda.
        console: Where progress is shown.
        hear: Called with the step and the score of each validation; it may raise to end the run.
        table: The data themselves, where they are in no file yet: they are kept in the run folder.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(
            f"{folder} exists already: choose another --out"
            + (f", or 'ciflows fit --resume {folder}'." if folder.is_dir() else ".")
        )
    where = find_device(device)
    console = console or Console(quiet=True)
    say = partial(console.print, markup=False, soft_wrap=True)
    if table is None:
        watch = partial(_watch, console)
        points = config.training.training_points
        dataset = load_dataset(
            config.data, say=say, table=config.table, watch=watch, training_points=points
        )
    else:
        config = config.model_copy(update={"data": KEPT})
        dataset = table_dataset(config.data, lambda: table.iter_slices(), config.table, say)
    flow = build_flow(config, dataset).to(where)
    _make_folder(folder, config, dataset, flow, table)
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
    dataset = _same_data(folder, config, about["fingerprint"])
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
    schema, shape = _read_schema(about), tuple(about.get("shape") or [about["features"]])
    flow = _empty_flow(config, shape, schema.context_features if schema else 0)
    if schema is not None:
        flow = _in_precision(table_flow(flow, schema, about["components"]), flow)
    elif about["standardised"]:
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
    flow = _empty_flow(config, dataset.shape, dataset.context_features)
    if dataset.schema is not None:
        return _in_precision(_start_of_table(flow, dataset.schema, dataset), flow)
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
    rows = _some(dataset.rows("test"), config.evaluation.points).to(flow.device, flow.dtype)
    estimate = flow.estimate(rows.x, samples, context=rows.context, seed=config.evaluation.seed)
    summary = summarise(estimate, samples, rows.weight)
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
        "log_det": _log_det(flow, rows, samples, config.evaluation.seed),
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


def _watch(console: Console, chunks: Iterable[T], what: str) -> Iterable[T]:
    return track(chunks, what, console=console, transient=True, disable=not console.is_terminal)


def _make_folder(
    folder: Path, config: RunConfig, dataset: Dataset, flow: Flow, table: pl.DataFrame | None
) -> None:
    """Make the run folder with its description in it, both at once: no kill can leave half of it."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    try:
        write_text(temporary / "config.toml", config.to_toml())
        write_json(temporary / "about.json", _about(dataset, flow))
        if table is not None:
            table.write_parquet(temporary / KEPT)
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary)
        raise


class _Start:
    """What a flow over a table starts from, and how good that is: it may be better than what follows."""

    def __init__(self, flow: Flow, dataset: Dataset, config: RunConfig) -> None:
        training = config.training
        rows = dataset.rows("validation")[: training.validation_points].to(flow.device, flow.dtype)
        self.state = {name: value.clone() for name, value in flow.state_dict().items()}
        self.validation = validation_score(flow.eval(), rows, training)


def _train(flow: Flow, config: RunConfig, dataset: Dataset, monitor: RunMonitor) -> Run:
    folder = monitor.folder
    start = None if dataset.schema is None else _Start(flow, dataset, config)
    outcome = fit_flow(
        flow,
        dataset.rows("train"),
        dataset.rows("validation"),
        config.training,
        seed=config.seed,
        checkpoints=Checkpoints(folder / "checkpoints", monitor.say),
        monitor=monitor,
    )
    if outcome.validation == -math.inf:
        why = outcome.early or "no validation had a finite likelihood"
        raise UserError(f"{folder}: training came to nothing: {why}.")
    if start is not None and start.validation > outcome.validation:
        flow.load_state_dict(start.state)
        outcome = outcome._replace(validation=start.validation)
        monitor.say("Training did not improve on the mixture of Gaussians that it started from.")
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
    levels, images = config.architecture["levels"], dataset.validation[:ROUND_TRIPS]
    return ImageMonitor(folder, console, config.model, flow, images, batch_size, levels, hear)


def _empty_flow(config: RunConfig, shape: Shape, context_features: int = 0) -> Flow:
    flow = build_model(
        config.model,
        shape=shape,
        context_features=context_features,
        seed=config.seed,
        **config.architecture,
    )
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
    return dataset.truth is None and dataset.schema is None and not dataset.images


def _some(points: Rows, most: int | None) -> Rows:
    """So many points at most, evenly spread: the beginning of a set may be unlike the rest."""
    if most is None or most >= len(points):
        return points
    return points[torch.arange(most) * len(points) // most]


def _log_det(flow: Flow, test: Rows, samples: int, seed: int) -> dict[str, float] | None:
    """What estimated log-determinants may contribute to the test result; None where all are exact."""
    blocks = [block for block in flow.modules() if isinstance(block, Residual)]
    if not any(isinstance(block.log_det, Series) for block in blocks):
        return None
    some = _some(test, LOG_DET_POINTS)
    error = log_det_error(flow, some.x, samples, some.context, seed)
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


def _start_of_table(flow: Flow, schema: Schema, dataset: Dataset) -> Flow:
    """A model over a table's columns, which starts from a mixture where it can."""
    layers, base = column_layers(schema, dataset.rows("train")), flow.base
    if start_as_identity(flow) and not schema.given and isinstance(base, StandardNormal):
        base = fit_base(layers, dataset.rows("train"), dataset.rows("validation"))
    return Flow([*layers, *flow.layers], base)


def _in_precision(whole: Flow, flow: Flow) -> Flow:
    """A flow in the precision of its model."""
    return whole.double() if flow.dtype == torch.float64 else whole


def _read_schema(about: dict[str, Any]) -> Schema | None:
    schema = about.get("schema")
    return None if schema is None else parse_settings(Schema, schema, "about.json, schema")


def table_frame(data: TableLike) -> pl.DataFrame:
    """A table from a file, or as it is in memory."""
    if isinstance(data, str | Path):
        import polars as pl

        with errors_of(data):
            return pl.concat(read_chunks(Path(data)))
    return as_frame(data)


def _about(dataset: Dataset, flow: Flow) -> dict[str, Any]:
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
        "components": len(flow.base.means) if isinstance(flow.base, GaussianMixture) else 0,
        "schema": None if dataset.schema is None else dataset.schema.model_dump(),
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


def _same_data(folder: Path, config: RunConfig, fingerprint: str) -> Dataset:
    name = config.data if config.data != KEPT else str(folder / KEPT)
    dataset = load_dataset(name, table=config.table, training_points=config.training.training_points)
    if dataset.fingerprint != fingerprint:
        raise UserError(
            f"The data of {name} have changed since the run began, or come from other files than then."
        )
    return dataset

"""Training a run, from its configuration to its folder."""

from __future__ import annotations

__all__ = ["fit", "resume"]

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import track

from ciflows.core.flow import Flow
from ciflows.datasets import Dataset, load_dataset, table_dataset
from ciflows.errors import UserError
from ciflows.networks import converge_norms
from ciflows.optional import polars as pl
from ciflows.runs import folder as folders
from ciflows.runs.assemble import (
    Variant,
    build_together,
    index_settings,
    is_staged,
    starts_together,
    variant_of,
)
from ciflows.runs.config import RunConfig
from ciflows.runs.metrics import evaluate
from ciflows.runs.run import Run, load_run
from ciflows.training import Outcome, fit_flow
from ciflows.training.checkpoint import Checkpoints
from ciflows.training.first_weights import Start
from ciflows.training.image_monitor import ImageMonitor
from ciflows.training.monitor import Monitor, OnValidation, RunMonitor, read_history
from ciflows.training.processes import ALONE, Processes
from ciflows.training.staged import fit_staged

T = TypeVar("T")
ROUND_TRIPS = 16


def fit(
    config: RunConfig,
    folder: Path | str,
    *,
    device: str = "auto",
    console: Console | None = None,
    on_validation: OnValidation | None = None,
    table: pl.DataFrame | None = None,
    processes: Processes = ALONE,
) -> Run:
    """Train and test a model in a new run folder.

    Arguments:
        folder: The run folder; it must not exist yet, or be empty.
        on_validation: Called with the step and the score of each validation; it may raise to stop.
        table: The data, if they are in memory; they are saved in the run folder.
        processes: Those that train together, each called with the same arguments; the first of them
            writes the folder.
    """
    folder, console = Path(folder), console or Console(quiet=True)
    processes.from_main(lambda: folders.check_free(folder))
    target = processes.device(device)
    if table is not None:
        config = config.model_copy(update={"data": folders.TABLE})
    with processes.one_first():
        dataset = _load_data(config, console, table)
    flow, about = build_together(config, dataset, target, processes)
    if processes.main:
        folders.create_folder(folder, config, about, table)
    training = _Training(folder, config, dataset, console, on_validation, processes)
    return training.run(flow, about)


def resume(
    folder: Path | str,
    *,
    device: str = "auto",
    console: Console | None = None,
    on_validation: OnValidation | None = None,
    processes: Processes = ALONE,
) -> Run:
    """Resume a run that was interrupted; a finished run is loaded.

    Arguments:
        on_validation: Called with the step and the score of each validation; it may raise to stop.
        processes: Those that train together; there may be more or fewer of them than before.
    """
    folder, console = Path(folder), console or Console(quiet=True)
    config, about = processes.from_main(lambda: folders.read_description(folder))
    if processes.from_main(lambda: folders.is_finished(folder)):
        return load_run(folder, device)
    target = processes.device(device)
    with processes.one_first():
        dataset = folders.load_run_data(folder, config, about)
    flow, _ = build_together(config, dataset, target, processes)
    return _Training(folder, config, dataset, console, on_validation, processes).run(flow, about)


def _load_data(config: RunConfig, console: Console, table: pl.DataFrame | None) -> Dataset:
    say = partial(console.print, markup=False, soft_wrap=True)
    if table is not None:
        return table_dataset(config.data, lambda: table.iter_slices(), config.table, say)
    return load_dataset(
        config.data,
        say=say,
        table=config.table,
        watch=partial(_show_progress, console),
        training_points=config.training.training_points,
    )


@dataclass(frozen=True)
class _Training:
    """Everything beside the flow that training and testing a run needs."""

    folder: Path
    config: RunConfig
    dataset: Dataset
    console: Console
    on_validation: OnValidation | None
    processes: Processes

    def run(self, flow: Flow, about: dict[str, Any]) -> Run:
        """Train, test, write the result, and return the run."""
        folder, config, processes = self.folder, self.config, self.processes
        monitor = self.monitor(flow)
        if is_staged(config):
            flow, outcome, facts = self.in_stages(flow, monitor)
        else:
            outcome, facts = self.train(flow, monitor), {}
        monitor.say("Testing ...")
        metrics, scores = evaluate(flow, self.dataset, config, processes)
        if processes.main:
            folders.write_result(folder, flow, scores, metrics | outcome._asdict() | facts)
        history = processes.from_main(lambda: read_history(folder / "metrics.jsonl"))
        written = processes.from_main(lambda: folders.read_metrics(folder))
        return Run(folder, config, flow, about, written, history, self.dataset)

    def train(self, flow: Flow, monitor: Monitor) -> Outcome:
        """Train a flow in place; it ends in eval mode, with the best weights and no gradients."""
        start = None if self.dataset.schema is None else self.start(flow)
        outcome = fit_flow(
            flow,
            self.dataset.rows("train"),
            self.dataset.rows("validation"),
            self.config.training,
            seed=self.config.seed,
            checkpoints=Checkpoints(self.folder / "checkpoints", monitor.say),
            monitor=monitor,
            processes=self.processes,
        )
        _check_outcome(outcome, self.folder)
        score = outcome.validation if start is None else start.better_of(flow, outcome.validation)
        if score > outcome.validation:
            outcome = outcome._replace(validation=score)
            monitor.say("Training did not improve on the mixture of Gaussians that it started from.")
        if outcome.early:
            monitor.say(f"Training stopped after {outcome.steps} steps: {outcome.early}.")
        converge_norms(flow)
        flow.zero_grad(set_to_none=True)
        return outcome

    def start(self, flow: Flow) -> Start:
        """The weights that a table's flow starts from, and their score: training may end below it."""
        return Start(flow, self.dataset.rows("validation"), self.config.training, self.processes)

    def in_stages(self, flow: Flow, monitor: Monitor) -> tuple[Flow, Outcome, dict[str, Any]]:
        """Train the flow without an index, add the index and keep it if it pays; what was found then."""
        others = self.others(flow)
        own = variant_of(self.config, flow)
        variants = [own, *(others or [own])]  # a second flow is like the first
        staged = fit_staged(
            flow,
            self.dataset.rows("train"),
            self.dataset.rows("validation"),
            self.config.training,
            index_settings(self.config),
            others=[other for variant, other in others.items() if variant.trained],
            fixed=[other for variant, other in others.items() if not variant.trained],
            seed=self.config.seed,
            folder=self.folder / "checkpoints",
            monitor=monitor,
            processes=self.processes,
        )
        _check_outcome(staged.outcome, self.folder)
        monitor.say(staged.story)
        staged.flow.zero_grad(set_to_none=True)
        worth = None if staged.worth is None else staged.worth._asdict()
        facts: dict[str, Any] = {"indexed": staged.indexed, "index_worth": worth, "story": staged.story}
        if others or len(staged.members) > 1:
            facts["members"] = [variants[place]._asdict() for place in staged.members]
        return staged.flow, staged.outcome, facts

    def others(self, flow: Flow) -> dict[Variant, Flow]:
        """Other flows to start from, for a table."""
        if self.dataset.schema is None:
            return {}
        return starts_together(self.config, self.dataset, flow, self.processes)

    def monitor(self, flow: Flow) -> Monitor:
        """What listens to training: the first process alone writes and shows it."""
        common = self.folder, self.console, self.config.model
        if not self.processes.main:
            return Monitor()
        if not self.dataset.images:
            return RunMonitor(*common, self.on_validation)
        batch_size = min(self.config.training.batch_size, len(self.dataset.train))
        levels, images = self.config.architecture["levels"], self.dataset.validation[:ROUND_TRIPS]
        return ImageMonitor(*common, flow, images, batch_size, levels, self.on_validation)


def _check_outcome(outcome: Outcome, folder: Path) -> None:
    if outcome.validation == -math.inf:
        why = outcome.early or "no validation had a finite likelihood"
        raise UserError(f"{folder}: training failed: {why}.")


def _show_progress(console: Console, chunks: Iterable[T], what: str) -> Iterable[T]:
    return track(chunks, what, console=console, transient=True, disable=not console.is_terminal)

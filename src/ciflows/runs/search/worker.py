"""Runs a search: trials first, then the best settings over seeds, in one or several processes."""

from __future__ import annotations

__all__ = ["run_search"]

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import torch
from optuna.study import Study
from optuna.trial import Trial
from rich.console import Console
from torch.multiprocessing.spawn import ProcessExitedException, spawn

from ciflows.datasets import load_dataset
from ciflows.devices import find_device
from ciflows.errors import UserError
from ciflows.files import read_json, write_json
from ciflows.runs.config import RunConfig
from ciflows.runs.fit import fit, resume
from ciflows.runs.search.plan import Plan
from ciflows.runs.search.results import (
    Candidate,
    FailedSeed,
    SearchResult,
    SeedScore,
    mean_and_error,
    write_result,
)
from ciflows.runs.search.study import (
    DATABASE,
    FAILURES,
    candidates,
    create_database,
    open_studies,
    pruner,
    work,
)
from ciflows.training.processes import uninterrupted

STOPPED = "stopped.json"
PATIENCE_SECONDS = 30.0


def run_search(
    plan: Plan,
    folder: Path | str,
    *,
    seeds: int = 3,
    workers: int | None = None,
    device: str = "auto",
    console: Console | None = None,
) -> SearchResult:
    """Choose settings by validation and test them over several seeds.

    The same call continues an interrupted search, or joins one that is running.

    Arguments:
        folder: The folder of the search; it must hold nothing else.
        seeds: Number of seeds, counted up from the plan's.
        workers: Number of processes; if None, one for each GPU, or one without any.
        device: auto, cpu, cuda or cuda:N; with auto or cuda, workers take turns at the GPUs.
    """
    folder, console = Path(folder), console or Console(quiet=True)
    workers = _default_workers(device) if workers is None else workers
    if min(seeds, workers) < 1:
        raise UserError(f"A search needs at least one seed and one worker; got {seeds} and {workers}.")
    _check_folder(folder)
    find_device(device)
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    config = plan.config(plan.choices[0])
    points = config.training.training_points
    dataset = load_dataset(config.data, say=say, table=config.table, training_points=points)
    folder.mkdir(parents=True, exist_ok=True)
    numbers = range(plan.seed, plan.seed + seeds)
    create_database(folder / DATABASE, plan, {**plan.identity(), "data": dataset.fingerprint}, numbers)
    if not plan.trials:
        say(f"{plan.title} has no grid: its settings are used as they are.")
    if workers > 1:
        say(_sharing(workers, device))
        _run_workers(workers, say, plan, folder, numbers, device, console.quiet)
    with open_studies(folder / DATABASE, plan) as (trials, queue):
        worker = Worker(plan, folder, numbers, device, console, trials, queue)
        worker.work()
        result = worker.result()
    write_result(folder / "search.json", result)
    return result


@dataclass(frozen=True)
class Worker:
    """One process of a search.

    Attributes:
        trials: The study of the trials.
        queue: The study of the seeds.
        alone: Whether to show the progress of each run.
    """

    plan: Plan
    folder: Path
    seeds: Sequence[int]
    device: str
    console: Console
    trials: Study
    queue: Study
    alone: bool = True

    def work(self) -> None:
        """Take part until all trials and seeds are finished."""
        work(self.trials, self._run_trial, waiting=self._say_waiting)
        best = self._best()
        folders = [self._seed_folder(best, seed) for seed in self.seeds]
        work(self.queue, partial(self._run_seed, best), folders, self._say_waiting)

    def result(self) -> SearchResult:
        """Collect the result of a finished search."""
        best = self._best()
        outcomes = [self._outcome(best, seed) for seed in self.seeds]
        scores = [outcome for outcome in outcomes if isinstance(outcome, SeedScore)]
        failed = [outcome for outcome in outcomes if isinstance(outcome, FailedSeed)]
        if not scores:
            raise UserError(f"{self.plan.title}: every seed failed. {failed[0].reason}")
        log_prob, std_error = mean_and_error([score.log_prob for score in scores])
        return SearchResult(
            experiment=self.plan.experiment.name,
            data=self.plan.data,
            model=self.plan.experiment.model,
            settings=best.settings if best else {},
            candidates=candidates(self.trials, self.plan),
            seeds=scores,
            failed_seeds=failed,
            log_prob=log_prob,
            std_error=std_error,
            parameters=read_json(self.folder / scores[0].folder / "metrics.json")["parameters"],
            published=self.plan.experiment.published(self.plan.data),
        )

    def _run_trial(self, trial: Trial) -> float:
        options = self.plan.options
        words = {key: trial.suggest_categorical(key, list(values)) for key, values in options.items()}
        settings = {key: options[key][word] for key, word in words.items()}
        number = int(Path(trial.user_attrs["folder"]).name)
        text = ", ".join(f"{key}={value}" for key, value in settings.items())
        title = f"Trial {number} of {self.plan.trials}, {text}"
        config = self.plan.config(settings)
        self.trials.pruner = pruner(config.training)
        return self._run(trial, title, config, "validation", partial(self._report, trial))

    def _report(self, trial: Trial, step: int, score: float) -> None:
        """Record a validation score; stop the trial if it has fallen behind."""
        with uninterrupted():  # in the middle of a transaction it would leave a lock
            # a resumed run may repeat steps
            if step not in self.trials.get_trials(deepcopy=False)[trial.number].intermediate_values:
                trial.report(score, step)
            prune = self.plan.prune and trial.should_prune()
        if prune:
            raise optuna.TrialPruned

    def _run_seed(self, best: Candidate | None, trial: Trial) -> float:
        seed = trial.user_attrs["seed"]
        config = self.plan.config(best.settings if best else {}, seed)
        title = f"Seed {seed - self.seeds[0] + 1} of {len(self.seeds)}"
        return self._run(trial, title, config, "test")

    def _run(
        self,
        trial: Trial,
        title: str,
        config: RunConfig,
        score: str,
        report: Callable[[int, float], None] | None = None,
    ) -> float:
        """Train a run, or resume it; return its score, or note in its folder why there is none."""
        folder = self.folder / trial.user_attrs["folder"]
        if self.alone:
            self._say(f"{title} ...")
        try:
            metrics = self._train(config, folder, report)
            value = metrics["validation"] if score == "validation" else metrics["test"]["log_prob"]
            if value is None:
                raise UserError(f"its {score} log-likelihood is not finite")
        except optuna.TrialPruned:
            self._stop(title, folder, "pruned", "it fell behind the median of the other trials")
            raise
        except FAILURES as error:
            trial.set_user_attr("reason", str(error))
            self._stop(title, folder, "failed", str(error))
            raise
        self._say(f"{title}: {score} {value:.4f}")
        return float(value)

    def _train(
        self, config: RunConfig, folder: Path, report: Callable[[int, float], None] | None
    ) -> dict[str, Any]:
        console = self.console if self.alone else Console(quiet=True)
        if (folder / "config.toml").exists():
            return resume(folder, device=self.device, console=console, on_validation=report).metrics
        return fit(config, folder, device=self.device, console=console, on_validation=report).metrics

    def _stop(self, title: str, folder: Path, state: str, reason: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / STOPPED, {"state": state, "reason": reason})
        self._say(f"{title}: {state}: {reason}")

    def _best(self) -> Candidate | None:
        """The trial with the best validation; None without a grid."""
        found = candidates(self.trials, self.plan)
        if found and found[0].state != "finished":
            raise UserError(
                f"{self.plan.title}: every trial failed. {found[0].folder}: {found[0].reason}"
            )
        return found[0] if found else None

    def _seed_folder(self, best: Candidate | None, seed: int) -> str:
        return best.folder if best and seed == self.plan.seed else f"seeds/{seed}"

    def _outcome(self, best: Candidate | None, seed: int) -> SeedScore | FailedSeed:
        folder = self._seed_folder(best, seed)
        if not (self.folder / folder / "metrics.json").exists():
            return FailedSeed(seed, read_json(self.folder / folder / STOPPED)["reason"], folder)
        test = read_json(self.folder / folder / "metrics.json")["test"]
        if test["log_prob"] is None:
            return FailedSeed(seed, "its test log-likelihood is not finite", folder)
        of_test = {key: test[key] for key in ("log_prob", "std_error", "elbo", "samples")}
        return SeedScore(seed=seed, folder=folder, **of_test)

    def _say(self, message: str) -> None:
        self.console.print(message, markup=False, highlight=False, soft_wrap=True)

    def _say_waiting(self) -> None:
        if self.alone:
            self._say("Other processes have the remaining runs; waiting for them.")


def _check_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: choose another folder.")
    if folder.exists() and any(folder.iterdir()) and not (folder / DATABASE).exists():
        raise UserError(f"{folder} exists already and holds no search: choose another folder.")


# -- several processes -------------------------------------------------------------------------------


def _run_workers(workers: int, say: Callable[[str], None], *search: Any) -> None:
    """Let several processes do the work; Ctrl-C reaches each of them, and each saves a checkpoint."""
    context = spawn(_run_worker, (workers, *search), nprocs=workers, join=False, daemon=True)
    try:
        while not context.join():
            pass
    except KeyboardInterrupt:
        for process in context.processes:
            process.join(PATIENCE_SECONDS)
        raise
    except ProcessExitedException:
        say("A worker ended early; continuing with what is left.")


def _run_worker(
    index: int,
    workers: int,
    plan: Plan,
    folder: Path,
    seeds: Sequence[int],
    device: str,
    quiet: bool,
) -> None:
    # torch sends SIGINT to workers whose parent has ended, which a shell's background jobs ignore
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    device, console = _worker_device(device, index), Console(emoji=False, quiet=quiet)
    try:
        with suppress(KeyboardInterrupt), open_studies(folder / DATABASE, plan) as studies:
            Worker(plan, folder, seeds, device, console, *studies, alone=False).work()
    except Exception as error:  # the parent takes over the work, and meets it again unless it was chance
        console.print(
            f"A worker ended early; the others go on. {type(error).__name__}: {error}",
            markup=False, highlight=False,
        )  # fmt: skip


def _spread_over_gpus(device: str) -> int:
    """The number of GPUs that workers take turns at; 0 if they all have one device."""
    spread = find_device(device).type == "cuda" and ":" not in device
    return torch.cuda.device_count() if spread else 0


def _default_workers(device: str) -> int:
    return max(1, _spread_over_gpus(device))


def _sharing(workers: int, device: str) -> str:
    gpus = _spread_over_gpus(device)
    return f"{workers} workers share the runs" + (f", on {min(gpus, workers)} GPUs." if gpus else ".")


def _worker_device(device: str, index: int) -> str:
    """The device of a worker."""
    gpus = _spread_over_gpus(device)
    return f"cuda:{index % gpus}" if gpus else device

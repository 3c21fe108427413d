"""What one process does in a search: trials, then the chosen settings over seeds, beside any others."""

from __future__ import annotations

__all__ = ["Search", "Worker"]

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import Trial
from rich.console import Console

from ciflows.config import RunConfig
from ciflows.errors import UserError
from ciflows.files import read_json, write_json
from ciflows.run import fit, resume
from ciflows.search.claims import Claims
from ciflows.search.plan import Plan
from ciflows.search.results import Candidate, FailedSeed, SearchResult, SeedScore, mean_and_error
from ciflows.search.study import Trials, trial_folder
from ciflows.training.monitor import Hear

STOPPED = "stopped.json"
POLL_SECONDS = 1.0
# What ends one run and not the search: the next may do well.
FAILURES = (UserError, RuntimeError)  # what does not fit into memory is a RuntimeError too


@dataclass(frozen=True)
class Search:
    """A search as every process of it must know it.

    Attributes:
        plan: What is searched.
        folder: Its folder.
        seeds: How many seeds the chosen settings are tested with.
        fingerprint: That of the data.
    """

    plan: Plan
    folder: Path
    seeds: int
    fingerprint: str


class Worker:
    """One process of a search.

    Arguments:
        search: The search.
        device: Where it trains.
        console: Where it tells what it does.
        alone: Whether it may show the progress of each run too.
    """

    def __init__(self, search: Search, device: str, console: Console, alone: bool = True) -> None:
        self.plan, self.folder, self.device = search.plan, search.folder, device
        self.seeds = range(search.plan.seed, search.plan.seed + search.seeds)
        self.trials = Trials(search.folder, search.plan, search.fingerprint)
        self.claims = Claims(search.folder / "claims")
        self.say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
        self.alone, self.shown = alone, console if alone else Console(quiet=True)

    def work(self) -> None:
        """Do what there is to do, until it is done by this process or by others."""
        self._share(self.trials.unfinished, trial_folder, self._run_trial)
        chosen = self._chosen()
        folder = partial(self._seed_folder, chosen)
        self._share(partial(self._seeds_left, chosen), folder, partial(self._run_seed, chosen))

    def result(self) -> SearchResult:
        """What came of it all."""
        chosen = self._chosen()
        outcomes = [self._outcome(chosen, seed) for seed in self.seeds]
        scores = [outcome for outcome in outcomes if isinstance(outcome, SeedScore)]
        failed = [outcome for outcome in outcomes if isinstance(outcome, FailedSeed)]
        if not scores:
            raise UserError(f"{self.plan.title}: no seed came to an end. {failed[0].reason}")
        log_prob, std_error = mean_and_error([score.log_prob for score in scores])
        return SearchResult(
            experiment=self.plan.experiment.name,
            data=self.plan.data,
            model=self.plan.experiment.model,
            settings=chosen.settings if chosen else {},
            candidates=self.trials.candidates(),
            seeds=scores,
            failed_seeds=failed,
            log_prob=log_prob,
            std_error=std_error,
            parameters=read_json(self.folder / scores[0].folder / "metrics.json")["parameters"],
            published=self.plan.experiment.published(self.plan.data),
        )

    def _share(
        self, left: Callable[[], list[int]], folder: Callable[[int], str], run: Callable[[int], None]
    ) -> None:
        """Run what is left and nobody else works on, until nothing is left."""
        told = False
        while numbers := left():
            if any(self._run_claimed(folder(number), partial(run, number)) for number in numbers):
                continue
            if self.alone and not told:
                self.say("Other processes work on the rest; waiting for them.")
                told = True
            time.sleep(POLL_SECONDS)

    def _run_claimed(self, folder: str, run: Callable[[], None]) -> bool:
        claim = self.claims.take(folder.replace("/", "-"))
        if claim is None:
            return False
        with claim:
            run()
        return True

    def _tell(self, title: str, run: Callable[[], str]) -> None:
        """Say what is run, where its progress is shown, and what came of it."""
        if self.alone:
            self.say(f"{title} ...")
        self.say(f"{title}: {run()}")

    # -- trials --------------------------------------------------------------------------------------

    def _run_trial(self, number: int) -> None:
        trial = self.trials.start(number)
        if trial is None:
            return
        settings = self.trials.settings(trial.params)
        title = f"Trial {number + 1} of {self.trials.count}, {_text(settings)}"
        self._tell(title, partial(self._try, trial, self.plan.config(settings)))

    def _try(self, trial: Trial, config: RunConfig) -> str:
        """Train a trial's run and put down how it ended, in the storage and in words."""
        folder = self.folder / trial_folder(trial.number)
        try:
            hear = partial(self.trials.report, trial, config.training)
            score = self._train(config, folder, hear)["validation"]
            if score is None:
                raise UserError("its validation log-likelihood is not finite")
        except optuna.TrialPruned:
            self.trials.prune(trial)
            return _mark(folder, "pruned", "it fell behind the median of the other trials")
        except FAILURES as error:
            self.trials.fail(trial, str(error))
            return _mark(folder, "failed", str(error))
        self.trials.finish(trial, score)
        return f"validation {score:.4f}"

    def _chosen(self) -> Candidate | None:
        """The candidate with the best validation; None where there is nothing to choose from."""
        candidates = self.trials.candidates()
        if candidates and candidates[0].state != "finished":
            raise UserError(
                f"{self.plan.title}: every trial failed. {candidates[0].folder}: {candidates[0].reason}"
            )
        return candidates[0] if candidates else None

    # -- seeds ---------------------------------------------------------------------------------------

    def _run_seed(self, chosen: Candidate | None, seed: int) -> None:
        folder = self.folder / self._seed_folder(chosen, seed)
        if _is_over(folder):
            return
        config = self.plan.config(chosen.settings if chosen else {}, seed)
        title = f"Seed {self.seeds.index(seed) + 1} of {len(self.seeds)}"
        self._tell(title, partial(self._test, config, folder))

    def _test(self, config: RunConfig, folder: Path) -> str:
        """Train and test a seed's run; how it ended in words."""
        try:
            log_prob = self._train(config, folder)["test"]["log_prob"]
        except FAILURES as error:
            return _mark(folder, "failed", str(error))
        return "test not finite" if log_prob is None else f"test {log_prob:.4f}"

    def _seeds_left(self, chosen: Candidate | None) -> list[int]:
        folders = {seed: self.folder / self._seed_folder(chosen, seed) for seed in self.seeds}
        return [seed for seed, folder in folders.items() if not _is_over(folder)]

    def _seed_folder(self, chosen: Candidate | None, seed: int) -> str:
        """Where a seed's run is: the chosen trial's own run has the first seed already."""
        return chosen.folder if chosen and seed == self.plan.seed else f"seeds/{seed}"

    def _outcome(self, chosen: Candidate | None, seed: int) -> SeedScore | FailedSeed:
        folder = self._seed_folder(chosen, seed)
        if not (self.folder / folder / "metrics.json").exists():
            return FailedSeed(seed, read_json(self.folder / folder / STOPPED)["reason"], folder)
        test = read_json(self.folder / folder / "metrics.json")["test"]
        if test["log_prob"] is None:
            return FailedSeed(seed, "its test log-likelihood is not finite", folder)
        of_test = {key: test[key] for key in ("log_prob", "std_error", "elbo", "samples")}
        return SeedScore(seed=seed, folder=folder, **of_test)

    def _train(self, config: RunConfig, folder: Path, hear: Hear | None = None) -> dict[str, Any]:
        if (folder / "config.toml").exists():
            return resume(folder, device=self.device, console=self.shown, hear=hear).metrics
        return fit(config, folder, device=self.device, console=self.shown, hear=hear).metrics


def _is_over(folder: Path) -> bool:
    return (folder / "metrics.json").exists() or (folder / STOPPED).exists()


def _mark(folder: Path, state: str, reason: str) -> str:
    """Leave a note in a run folder on why it was given up; the same in words."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / STOPPED, {"state": state, "reason": reason})
    return f"{state}: {reason}"


def _text(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in settings.items())

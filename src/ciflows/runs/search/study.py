"""Optuna studies in one SQLite file: a queue of jobs that several processes share.

Optuna hands each queued trial to one process. A running trial writes a heartbeat; when that stops,
another process queues the trial again, and its run resumes from the last checkpoint.
"""

from __future__ import annotations

__all__ = ["DATABASE", "FAILURES", "candidates", "create_database", "open_studies", "pruner", "work"]

import math
import os
import random
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.exceptions import ExperimentalWarning, OptunaError
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback, fail_stale_trials
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import SQLAlchemyError

from ciflows.errors import UserError
from ciflows.runs.search.plan import Plan
from ciflows.runs.search.results import Candidate
from ciflows.training import TrainingSettings

DATABASE = "search.db"
HEARTBEAT_SECONDS, GRACE_SECONDS, POLL_SECONDS = 10, 60, 1.0
STATES = {TrialState.COMPLETE: "finished", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}
# A run that fails in one of these ways does not stop the search. Out of memory is a RuntimeError too.
FAILURES = (UserError, RuntimeError)
# No pruning before this many trials have finished, nor before this many validations of a trial.
FINISHED, VALIDATIONS = 4, 10

optuna.logging.set_verbosity(optuna.logging.ERROR)


@contextmanager
def open_studies(path: Path, plan: Plan) -> Iterator[tuple[Study, Study]]:
    """Open the studies of the trials and of the seeds."""
    with _open_storage(path) as storage:
        try:
            trials, seeds = (
                optuna.load_study(study_name=name, storage=storage) for name in ("trials", "seeds")
            )
        except KeyError:
            raise UserError(f"{path} is damaged, or not the database of a search.") from None
        trials.sampler = _Untried(plan) if plan.sampler == "tpe" else RandomSampler()
        yield trials, seeds


def create_database(path: Path, plan: Plan, identity: dict[str, Any], seeds: Sequence[int]) -> None:
    """Queue all trials and seeds in a new database, or check that an existing one fits the plan.

    The file appears whole, under its name, in one step: no process can see or leave half of it.
    """
    if not path.exists():
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with _open_storage(temporary) as storage:
                trials = optuna.create_study(study_name="trials", storage=storage, direction="maximize")
                trials.set_user_attr("identity", identity)
                for number, words in enumerate(plan.queue(), start=1):
                    trials.enqueue_trial(words, user_attrs={"folder": f"trials/{number:03d}"})
                optuna.create_study(study_name="seeds", storage=storage)
            if not path.exists():
                os.link(temporary, path)
        except FileExistsError:
            pass  # another process was faster
        finally:
            temporary.unlink(missing_ok=True)
    with open_studies(path, plan) as (trials, queue):
        _check_identity(trials.user_attrs["identity"], identity, path.parent)
        queued = {trial.user_attrs.get("folder") for trial in queue.get_trials(deepcopy=False)}
        # the best trial has the first seed already
        for seed in seeds[1:] if plan.trials else seeds:
            if f"seeds/{seed}" not in queued:
                queue.enqueue_trial({}, user_attrs={"folder": f"seeds/{seed}", "seed": seed})


def work(
    study: Study,
    run: Callable[[Trial], float],
    folders: Collection[str] | None = None,
    waiting: Callable[[], None] = lambda: None,
) -> None:
    """Run queued trials until all are finished, by this process or another.

    Arguments:
        folders: The run folders to wait for; default all.
        waiting: Called once, when only other processes have work left.
    """
    told = False
    while left := _left(study, folders):
        _requeue_lost(study)
        if any(trial.state == TrialState.WAITING for trial in left):
            study.optimize(lambda trial: _run(study, trial, run), n_trials=1, catch=FAILURES)
            continue
        if not told:
            waiting()
            told = True
        time.sleep(POLL_SECONDS)


def candidates(study: Study, plan: Plan) -> list[Candidate]:
    """The finished trials, best first."""
    trials = [trial for trial in study.get_trials(deepcopy=False) if "folder" in trial.user_attrs]
    # the last attempt at a run counts
    last = {trial.user_attrs["folder"]: trial for trial in trials}
    finished = [trial for trial in last.values() if trial.state.is_finished() and trial.params]
    return sorted((_candidate(trial, plan) for trial in finished), key=_rank)


def pruner(training: TrainingSettings) -> optuna.pruners.BasePruner:
    """Optuna's median pruner, after a warm-up."""
    warm_up = min(VALIDATIONS * training.validate_every, training.steps // 5)
    return optuna.pruners.MedianPruner(FINISHED, warm_up, n_min_trials=FINISHED)


class _Untried(BaseSampler):
    """TPE over the choices of a plan; if it suggests a tried one, a random untried one instead."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return {key: CategoricalDistribution(list(o)) for key, o in self.plan.options.items()}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        seed = (self.plan.seed * 1_000_003 + trial.number) % 2**32
        tpe = TPESampler(seed=seed)
        wanted = {
            key: tpe.sample_independent(study, trial, key, values)
            for key, values in search_space.items()
        }
        tried = [t.params for t in study.get_trials(deepcopy=False) if t.number != trial.number]
        left = [words for words in self.plan.words if words not in tried]
        return wanted if wanted in left or not left else random.Random(seed).choice(left)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        raise AssertionError("sample_relative samples every setting")


@contextmanager
def _quiet() -> Iterator[None]:
    """Ignore the warnings that Optuna's heartbeat is experimental."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        yield


def _retry() -> RetryHeartbeatStaleTrialCallback:
    with _quiet():
        return RetryHeartbeatStaleTrialCallback(inherit_intermediate_values=True)


@contextmanager
def _open_storage(path: Path) -> Iterator[RDBStorage]:
    try:
        with _quiet():
            storage = RDBStorage(
                f"sqlite:///{path.absolute()}",
                engine_kwargs={"connect_args": {"timeout": GRACE_SECONDS}},
                heartbeat_interval=HEARTBEAT_SECONDS,
                grace_period=GRACE_SECONDS,
                heartbeat_stale_trial_callback=_retry(),
            )
    except (SQLAlchemyError, OptunaError, RuntimeError):
        raise UserError(f"{path} is damaged, or not the database of a search.") from None
    _take_turns(storage.engine)
    try:
        yield storage
    finally:
        storage.remove_session()
        storage.engine.dispose()


def _take_turns(engine: Engine) -> None:
    """Lock the file before a transaction reads.

    Python's sqlite3 locks it when a transaction first writes: two processes could both read that a trial
    is queued, and both take it.
    """

    @event.listens_for(engine, "connect")
    def begin_by_hand(connection: Any, _record: Any) -> None:
        connection.isolation_level = None

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    engine.dispose()  # connections from before


def _check_identity(begun: dict[str, Any], identity: dict[str, Any], folder: Path) -> None:
    other = [key for key, value in identity.items() if begun.get(key) != value]
    if other:
        raise UserError(
            f"{folder} holds a search that differs in its {', '.join(other)}: use the same settings to "
            "continue it, or choose another folder."
        )


def _requeue_lost(study: Study) -> None:
    """Queue trials again whose process has vanished."""
    with _quiet():
        fail_stale_trials(study)
    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    oldest = datetime.now() - timedelta(seconds=GRACE_SECONDS)
    for trial in running:
        # Optuna does not notice a process that was killed before its first heartbeat.
        begun = trial.user_attrs.get("begun") == trial.number
        if not begun and trial.datetime_start and trial.datetime_start < oldest:
            with suppress(ValueError):  # another process has done it
                study.tell(trial.number, state=TrialState.FAIL)
                _retry()(study, trial)


def _left(study: Study, folders: Collection[str] | None) -> list[FrozenTrial]:
    """The trials in `folders` that are queued or running."""
    trials = study.get_trials(deepcopy=False, states=(TrialState.WAITING, TrialState.RUNNING))
    return [t for t in trials if folders is None or t.user_attrs.get("folder") in folders]


def _run(study: Study, trial: Trial, run: Callable[[Trial], float]) -> float:
    if "folder" not in trial.user_attrs:  # another process took the last queued trial
        raise optuna.TrialPruned
    trial.set_user_attr("begun", trial.number)
    try:
        return run(trial)
    except (optuna.TrialPruned, *FAILURES):
        raise
    except (Exception, KeyboardInterrupt):
        _retry()(study, study.get_trials()[trial.number])
        raise


def _candidate(trial: FrozenTrial, plan: Plan) -> Candidate:
    reported = filter(math.isfinite, trial.intermediate_values.values())
    return Candidate(
        settings={key: options[trial.params[key]] for key, options in plan.options.items()},
        validation=trial.value if trial.values else max(reported, default=None),
        state=STATES[trial.state],
        reason=trial.user_attrs.get("reason"),
        folder=trial.user_attrs["folder"],
    )


def _rank(candidate: Candidate) -> tuple[int, float]:
    best = -math.inf if candidate.validation is None else candidate.validation
    return list(STATES.values()).index(candidate.state), -best

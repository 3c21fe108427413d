"""The trials of a search in Optuna's storage, where several processes may take them up."""

from __future__ import annotations

__all__ = ["Trials"]

import math
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock, JournalStorage
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState

from ciflows.errors import UserError
from ciflows.search.claims import locked
from ciflows.search.plan import Plan
from ciflows.search.results import Candidate
from ciflows.training import TrainingSettings

JOURNAL, STUDY = "search.journal", "search"
STATES = {TrialState.COMPLETE: "finished", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}
# Nothing is pruned before so many trials have finished, nor before so many of its own validations.
FINISHED, VALIDATIONS = 4, 10

optuna.logging.set_verbosity(optuna.logging.WARNING)


class Trials:
    """The trials of a search; the first process to come makes them, the others find them.

    Arguments:
        folder: The folder of the search.
        plan: What is searched.
        fingerprint: That of the data.
    """

    def __init__(self, folder: Path, plan: Plan, fingerprint: str) -> None:
        self.plan, self.journal = plan, (folder / JOURNAL).absolute()
        identity = {**plan.identity(), "data": fingerprint}
        with locked(self.journal):
            self.storage = _open_journal(self.journal)
            self.study = _open_study(self.storage, identity, folder)
            # A process that was killed here may have queued some of them.
            for words in plan.queue()[self.count :]:
                self.study.enqueue_trial(words)

    @property
    def count(self) -> int:
        return len(self._all())

    def unfinished(self) -> list[int]:
        """The numbers of the trials that are to be done, or being done."""
        return [trial.number for trial in self._all() if not trial.state.is_finished()]

    def start(self, number: int) -> Trial | None:
        """Begin a trial, or take it up where its process is gone; None where there is nothing to do.

        The caller must have claimed the trial: its state does not tell whether its process lives.
        """
        frozen = self._all()[number]
        if frozen.state.is_finished():
            return None
        if frozen.state == TrialState.WAITING and not self._begin(frozen):
            return None
        with locked(self.journal):  # so that no two trials are given the same settings
            self.study.sampler = _Untried(self.plan)
            trial = Trial(self.study, frozen._trial_id)
            for key, options in self.plan.options.items():
                trial.suggest_categorical(key, list(options))
        return trial

    def settings(self, params: Mapping[str, str]) -> dict[str, Any]:
        """The values that a trial's words stand for."""
        return {key: options[params[key]] for key, options in self.plan.options.items()}

    def report(self, trial: Trial, training: TrainingSettings, step: int, score: float) -> None:
        """Note a validation score, and end the trial where it has fallen behind the others."""
        # Steps that a resumed run takes again have been noted already.
        if step not in self._all()[trial.number].intermediate_values:
            trial.report(score, step)
        if self.plan.prune:
            self.study.pruner = _pruner(training)
            if trial.should_prune():
                raise optuna.TrialPruned

    def finish(self, trial: Trial, validation: float) -> None:
        self.study.tell(trial, validation)

    def prune(self, trial: Trial) -> None:
        self.study.tell(trial, state=TrialState.PRUNED)

    def fail(self, trial: Trial, reason: str) -> None:
        trial.set_user_attr("reason", reason)
        self.study.tell(trial, state=TrialState.FAIL)

    def candidates(self) -> list[Candidate]:
        """The trials that are over, the best first."""
        over = [trial for trial in self._all() if trial.state.is_finished()]
        return sorted(map(self._candidate, over), key=_rank)

    def _begin(self, trial: FrozenTrial) -> bool:
        """Let a trial be running; False where another process was faster."""
        return self.storage.set_trial_state_values(trial._trial_id, TrialState.RUNNING)

    def _candidate(self, trial: FrozenTrial) -> Candidate:
        return Candidate(
            self.settings(trial.params),
            _validation(trial),
            STATES[trial.state],
            trial.user_attrs.get("reason"),
            trial_folder(trial.number),
        )

    def _all(self) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False)


class _Untried(optuna.samplers.BaseSampler):
    """TPE over the choices of a plan; where it comes to one tried before, a random one of the rest."""

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
        tpe = optuna.samplers.TPESampler(seed=seed)
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
        raise AssertionError("every setting has been sampled with the others")


class _Journal(JournalFileBackend):
    """Optuna's journal in a file, which also outlives a process killed in the middle of a line."""

    def __init__(self, path: Path) -> None:
        self.path, self.lock = path, JournalFileOpenLock(str(path))
        super().__init__(str(path), self.lock)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        self.lock.acquire()
        try:
            _drop_cut_line(self.path)
        finally:
            self.lock.release()
        super().append_logs(logs)


def trial_folder(number: int) -> str:
    """The run folder of a trial, inside that of the search; people count from one."""
    return f"trials/{number + 1:03d}"


def _open_journal(path: Path) -> JournalStorage:
    try:
        return JournalStorage(_Journal(path))
    except (ValueError, LookupError, TypeError, AssertionError):
        raise UserError(f"{path} is damaged, or not the journal of a search.") from None


def _open_study(storage: JournalStorage, identity: dict[str, Any], folder: Path) -> Study:
    """The study of a search, made where there is none; refused where it is of another search."""
    if not storage.get_all_studies():
        optuna.create_study(storage=storage, study_name=STUDY, direction="maximize")
    study = optuna.load_study(study_name=STUDY, storage=storage)
    begun = study.user_attrs.get("identity")
    if begun is None:
        study.set_user_attr("identity", identity)
    elif begun != identity:
        other = [key for key, value in identity.items() if begun.get(key) != value]
        raise UserError(
            f"{folder} holds a search that differs in its {', '.join(other)}: go on as it was begun, "
            "or choose another --out."
        )
    return study


def _pruner(training: TrainingSettings) -> optuna.pruners.BasePruner:
    warm_up = min(VALIDATIONS * training.validate_every, training.steps // 5)
    return optuna.pruners.MedianPruner(FINISHED, warm_up, n_min_trials=FINISHED)


def _validation(trial: FrozenTrial) -> float | None:
    """A trial's best validation, also where it did not end."""
    if trial.state == TrialState.COMPLETE:
        return trial.value
    return max(filter(math.isfinite, trial.intermediate_values.values()), default=None)


def _rank(candidate: Candidate) -> tuple[int, float]:
    states = list(STATES.values())
    best = -math.inf if candidate.validation is None else candidate.validation
    return states.index(candidate.state), -best


def _drop_cut_line(path: Path) -> None:
    """Take off what follows a file's last line, left by a process that was killed while it wrote."""
    with path.open("r+b") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return
        file.seek(-1, os.SEEK_END)
        if file.read() != b"\n":
            file.truncate(path.read_bytes().rfind(b"\n") + 1)

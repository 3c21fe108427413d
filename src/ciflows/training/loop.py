"""The training loop, the same on a CPU and on a GPU.

Training proceeds in rounds of at most 50 steps. After a round the mean loss is read (on a GPU this is
the only synchronisation). If it is finite, the state is copied in memory as the last good one. If not,
the last good state is restored and the learning rate halved. Validation and checkpoints come between
rounds.
"""

from __future__ import annotations

__all__ = ["Outcome", "fit_flow", "validation_score"]

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ciflows.core.flow import Flow
from ciflows.core.groups import grouped
from ciflows.core.noise import Noise, ShareNoise
from ciflows.core.rows import Rows
from ciflows.devices import few_threads
from ciflows.diagnostics.index_use import index_activity
from ciflows.errors import LostProcessError, UserError
from ciflows.networks import converge_norms
from ciflows.training.batches import Batches
from ciflows.training.monitor import Monitor
from ciflows.training.processes import ALONE, Processes, uninterrupted
from ciflows.training.settings import TrainingSettings, suited_to_rows
from ciflows.training.step import Step, make_step

if TYPE_CHECKING:
    from ciflows.training.checkpoint import Checkpoints

ROUND = 50
MOST_ROLLBACKS = 6
VALIDATION_SEED = 1
INDEX_POINTS = 200  # at which the use of an index is followed


class Outcome(NamedTuple):
    """How training ended.

    Attributes:
        steps: Steps taken.
        seconds: Training time, over all resumptions.
        validation: Validation log-likelihood of the final weights, the best or the last; -inf if there
            was no finite one.
        rollbacks: How often the loss was not finite and a good state was restored.
        early: Why training stopped before its last step; None if it did not.
    """

    steps: int
    seconds: float
    validation: float
    rollbacks: int
    early: str | None


@dataclass
class _Progress:
    """The numbers in the state of training."""

    step: int = 0
    seconds: float = 0.0
    rate_scale: float = 1.0
    rollbacks: int = 0
    best: float = -math.inf
    last: float = -math.inf
    stale: int = 0


class _State(NamedTuple):
    """The whole state of training: resuming from it gives the same result to the bit."""

    tensors: dict[str, Tensor]
    generator: Tensor
    progress: _Progress
    best: dict[str, Tensor]


def fit_flow(
    flow: Flow,
    train: Rows | Tensor,
    validation: Rows | Tensor,
    settings: TrainingSettings,
    *,
    seed: int = 0,
    checkpoints: Checkpoints | None = None,
    monitor: Monitor | None = None,
    clock: Callable[[], float] = time.monotonic,
    until: float = 1.0,
    processes: Processes = ALONE,
) -> Outcome:
    """Train a flow in place; it ends in eval mode with the weights that were best in validation.

    Arguments:
        flow: The flow, on the device to train on.
        train: Training points (rows, *shape), perhaps with contexts and weights (1 on average).
        validation: Points to choose the weights by.
        seed: Of the order of the data and of the draws.
        checkpoints: Where to save the state; training resumes from the newest one there.
        clock: Returns the seconds that `max_minutes` counts, such as `time.process_time`.
        until: The share of all steps or minutes to stop after. Called again with the same checkpoints
            and a larger share, training goes on as if it had not stopped.
        processes: Those that train this flow together, each called with the same arguments; each takes
            its share of every batch and of the validation points, and the result is that of one.
    """
    rows = Rows.of(train), Rows.of(validation)
    settings = suited_to_rows(settings, len(rows[0]))
    training = _Training(flow, *rows, settings, seed, checkpoints, monitor, clock, until, processes)
    with few_threads(flow, training.batch_size * math.prod(flow.shape[1:])):
        return training.run()


@torch.no_grad()
def validation_score(
    flow: Flow, points: Rows, settings: TrainingSettings, processes: Processes = ALONE
) -> float:
    """Mean log-likelihood of validation points, always with the same draws."""
    own, samples = points[processes.share(len(points))], settings.validation_samples
    estimate = flow.estimate(own.x, samples, context=own.context, seed=VALIDATION_SEED)
    return points.mean(processes.whole(estimate.log_prob, len(points))).item()


class _Training:
    def __init__(
        self,
        flow: Flow,
        train: Rows,
        validation: Rows,
        settings: TrainingSettings,
        seed: int,
        checkpoints: Checkpoints | None,
        monitor: Monitor | None,
        clock: Callable[[], float] = time.monotonic,
        until: float = 1.0,
        processes: Processes = ALONE,
    ) -> None:
        self.clock, self.until, self.processes = clock, until, processes
        self.flow, self.settings, self.seed = flow, settings, seed
        self.validation = validation[: settings.validation_points].on(flow)
        self.checkpoints, self.monitor = checkpoints, monitor or Monitor()
        self.batch_size = min(settings.batch_size, len(train))
        self.share = processes.share(self.batch_size)
        self.batches = Batches(train, flow, self.batch_size, self.share, seed, settings.flips)
        self.noise = self._make_noise()
        self.started = 0.0
        self.progress = _Progress()
        self.best = _copy(flow.state_dict())

    @property
    def generator(self) -> torch.Generator:
        assert self.noise.generator is not None
        return self.noise.generator

    def _make_noise(self) -> Noise:
        noise = Noise.seeded(self.seed, self.flow.device)
        if self.processes.size == 1:
            return noise
        if self.batch_size < self.processes.size:
            raise UserError(
                f"A batch of {self.batch_size} cannot be shared by {self.processes.size} processes: "
                "raise batch_size, or start fewer."
            )
        return ShareNoise(noise.generator, self.share, self.batch_size)

    def run(self) -> Outcome:
        """Train to the end; on an interruption, save the last good state to resume from."""
        self.started, saved = self.clock(), time.monotonic()
        self._prepare()
        progress = self.progress
        good, spare = self._state(), self._state()
        self.monitor = Monitor() if self._finished() else self.monitor  # nothing to show
        self.monitor.begin(progress.step, self.settings.steps, self._done())
        try:
            while not self._finished():
                loss = self._round()
                if not math.isfinite(loss):
                    self._roll_back(good)
                    continue
                values = {"loss": loss, "learning_rate": self._rate(), "seconds": progress.seconds}
                if progress.step % self.settings.validate_every == 0 or self._finished():
                    values |= self._validate()
                self.monitor.record(progress.step, values, self._done())
                good, spare = self._state(spare), good
                if time.monotonic() - saved > self.settings.checkpoint_seconds:
                    self._save(good)
                    saved = time.monotonic()
        except (KeyboardInterrupt, LostProcessError):
            with uninterrupted():
                self._save(good)
            raise
        finally:
            self.monitor.end()
        self._save(good)
        self.flow.load_state_dict(self.best)
        self.flow.eval()
        kept = progress.best if self.settings.keep == "best" else progress.last
        return Outcome(progress.step, progress.seconds, kept, progress.rollbacks, self._stopped())

    def _prepare(self) -> None:
        """Initialise layers that depend on data, make the step, and resume from a checkpoint if any."""
        self.flow.train()
        if self.flow.device.type == "cuda":
            self.monitor.say("Compiling for this GPU: up to a minute the first time, seconds later.")
        first = self.batches.rows[: self.batch_size].on(self.flow)
        noise = Noise.seeded(self.seed, self.flow.device)
        self.flow.initialise(first.x, first.context, noise)
        self.step = self._make_step(first)
        self.tensors = self._tensors()
        self._resume()
        self.processes.copy_from_main(self.tensors.values())

    def _make_step(self, batch: Rows) -> Step:
        if self.processes.size == 1:
            return make_step(self.flow, self.settings, self.noise, batch)
        if self.flow.device.type == "cuda":
            self.monitor.say("Several processes take plain steps, without a CUDA graph.")
        return Step(self.flow, self.settings, self.noise, self.processes, self.batch_size)

    def _finished(self) -> bool:
        return self._reached() or self._stopped() is not None

    def _stopped(self) -> str | None:
        """Why training should stop before its last step; None if it should not."""
        settings, progress = self.settings, self.progress
        if progress.step >= settings.steps:
            return None
        if self._time_is_over():
            return f"{settings.max_minutes:g} minutes are over"
        if settings.patience is not None and progress.stale >= settings.patience:
            return f"no better validation in the last {progress.stale}"
        if progress.rollbacks > MOST_ROLLBACKS:
            return (
                f"the loss was not finite {progress.rollbacks} times, with ever smaller learning rates; "
                "try a smaller learning_rate or clip, or precision = float64"
            )
        return None

    def _time_is_over(self) -> bool:
        minutes = self.settings.max_minutes
        return minutes is not None and self.progress.seconds >= 60 * minutes

    def _last_step(self) -> int:
        return max(1, round(self.until * self.settings.steps))

    def _reached(self) -> bool:
        """Whether as much of training is over as was asked for."""
        minutes = self.settings.max_minutes
        late = minutes is not None and self.progress.seconds >= 60 * minutes * self.until
        return late or self.progress.step >= self._last_step()

    def _round(self) -> float:
        """Take steps up to a multiple of `ROUND`, or until time is over; return their mean loss."""
        settings, progress = self.settings, self.progress
        due = min(ROUND * (progress.step // ROUND + 1), self._last_step())
        due = min(due, settings.validate_every * (progress.step // settings.validate_every + 1))
        losses: list[Tensor] = []
        while progress.step < due and not (losses and self._reached()):
            self.step.set_learning_rate(self._rate())
            losses.append(self.step(self.batches.of_step(progress.step)))
            progress.step += 1
            # by one clock for all, or some would stop before the others
            progress.seconds = self.processes.seconds(lambda: self.clock() - self.started)
        return self.processes.sum(torch.stack(losses)).mean().item()

    def _rate(self) -> float:
        settings, progress = self.settings, self.progress
        risen = min(1.0, (progress.step + 1) / (settings.warm_up + 1))
        rate = settings.learning_rate * progress.rate_scale * risen
        if settings.schedule == "constant":
            return rate
        return rate * 0.5 * (1 + math.cos(math.pi * self._done()))

    def _done(self) -> float:
        """The share of training completed, by steps or by minutes: between 0 and 1."""
        settings, progress = self.settings, self.progress
        done = progress.step / settings.steps
        if settings.max_minutes is not None:
            done = max(done, progress.seconds / (60 * settings.max_minutes))
        return min(done, 1.0)

    def _validate(self) -> dict[str, float]:
        """Validation log-likelihood of the current weights, which are kept if they are the best."""
        progress = self.progress
        self.flow.eval()
        with self.step.averaged():
            converge_norms(self.flow)
            score = validation_score(self.flow, self.validation, self.settings, self.processes)
            progress.last = score
            if score > progress.best or self.settings.keep == "last":
                self.best = _copy(self.flow.state_dict())
            some = self.validation[:INDEX_POINTS]
            activity = index_activity(self.flow, some.x, some.context)
        self.flow.train()
        if score > progress.best:
            progress.best, progress.stale = score, 0
        else:
            progress.stale += 1
        return {"validation": score, **(activity._asdict() if activity else {})}

    # -- state ---------------------------------------------------------------------------------------

    def _state(self, old: _State | None = None) -> _State:
        """A copy of the state, into the memory of an old copy if there is one."""
        if old is None:
            tensors = _copy(self.tensors)
        else:
            tensors = old.tensors
            _copy_into(tensors, self.tensors)
        return _State(tensors, self.generator.get_state(), replace(self.progress), self.best)

    def _tensors(self) -> dict[str, Tensor]:
        """All tensors that a step changes, by names that are the same on every device."""
        weights = {f"flow.{name}": value for name, value in self.flow.state_dict().items()}
        return weights | self.step.state()

    def _roll_back(self, good: _State) -> None:
        """Restore a good state, except the generator, and halve the learning rate from there on."""
        progress = self.progress
        at, progress.step = progress.step, good.progress.step
        _copy_into(self.tensors, good.tensors)
        progress.rollbacks += 1
        progress.rate_scale /= 2
        self.monitor.say(
            f"The loss was not finite before step {at}: back to step {progress.step}, "
            f"with the learning rate at {progress.rate_scale:g} of its schedule."
        )

    def _save(self, state: _State) -> None:
        if self.checkpoints is not None and self.processes.main:
            best = {f"best.{name}": value for name, value in state.best.items()}
            tensors = state.tensors | best | {"generator": state.generator}
            self.checkpoints.save(state.progress.step, tensors, asdict(state.progress))

    def _resume(self) -> None:
        if self.checkpoints is None:
            return
        found = self.processes.from_main(self.checkpoints.load)
        if found is not None:
            tensors, facts = found
            if not self.tensors.keys() <= tensors.keys():
                raise UserError("The checkpoints belong to another model: this run cannot be resumed.")
            _copy_into(self.tensors, tensors)
            self.progress = _Progress(**facts)
            self.started -= self.progress.seconds
            self._resume_generator(tensors["generator"])
            self.best = {
                name: tensors[f"best.{name}"].to(value.device) for name, value in self.best.items()
            }

    def _resume_generator(self, state: Tensor) -> None:
        """Continue the random numbers; on another kind of device say that this is impossible."""
        if state.numel() == self.generator.get_state().numel():
            self.generator.set_state(state)
        else:
            self.generator.manual_seed((self.seed << 20) + self.progress.step)
            self.monitor.say("This run began on another device: its random numbers differ from here on.")


def _copy(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in tensors.items()}


@torch.no_grad()
def _copy_into(targets: dict[str, Tensor], sources: dict[str, Tensor]) -> None:
    """Copy tensors into those of the same name, one call per dtype."""
    for names in grouped(targets, lambda name: targets[name].dtype):
        torch._foreach_copy_([targets[name] for name in names], [sources[name] for name in names])

"""The training loop: readable in one sitting, the same on a CPU and on a GPU.

Training goes in rounds of a few steps. After each round the losses are looked at once (on a GPU that is
the only time it waits), and the state is either kept in memory as good or, where a loss was not finite,
put back to the last good one with half the step size. Validation and checkpoints fall between rounds.
"""

from __future__ import annotations

__all__ = ["Outcome", "fit_flow", "validation_score"]

import math
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ciflows.errors import UserError
from ciflows.flow import Flow
from ciflows.groups import grouped
from ciflows.kernels.ahead import compiled_ahead
from ciflows.networks import converge_norms
from ciflows.noise import Noise
from ciflows.rows import Rows
from ciflows.training.monitor import Monitor
from ciflows.training.settings import TrainingSettings
from ciflows.training.step import make_step

if TYPE_CHECKING:
    from ciflows.training.checkpoint import Checkpoints

ROUND = 50
MOST_ROLLBACKS = 6
VALIDATION_SEED = 1
COMPILED_FOR = 2**16  # validation points whose kernels are compiled ahead: more have the same


class Outcome(NamedTuple):
    """How training ended.

    Attributes:
        steps: Steps taken.
        seconds: Time taken, over all resumptions.
        validation: The validation log-likelihood that the flow's weights now have, the best one or the
            last; -inf where training never got as far as one.
        rollbacks: How often the loss was not finite and the state was put back.
        early: Why it ended before all steps were taken; None where it did not.
    """

    steps: int
    seconds: float
    validation: float
    rollbacks: int
    early: str | None


@dataclass
class _Progress:
    """The plain numbers of a training run's state."""

    step: int = 0
    seconds: float = 0.0
    rate_scale: float = 1.0
    rollbacks: int = 0
    best: float = -math.inf
    last: float = -math.inf
    stale: int = 0


class _State(NamedTuple):
    """A moment of training, whole: going on from it is as if nothing had come between."""

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
) -> Outcome:
    """Train a flow in place and leave it with the weights that did best in validation.

    Arguments:
        flow: The flow, on the device to train on.
        train: Points to fit (rows, *shape), perhaps with contexts and with weights that are 1 on
            average; bytes stay bytes until they are in a batch.
        validation: Points to choose the weights by.
        settings: How to train.
        seed: Seed of the order of the data and of the draws.
        checkpoints: Where to keep the state; training goes on from the newest one found there.
        monitor: What listens.
    """
    rows = Rows.of(train), Rows.of(validation)
    return _Training(flow, *rows, settings, seed, checkpoints, monitor).run()


def validation_score(flow: Flow, points: Rows, settings: TrainingSettings) -> float:
    """Mean log-likelihood of points, by which weights are chosen: always with the same draws."""
    samples = settings.validation_samples
    estimate = flow.estimate(points.x, samples, context=points.context, seed=VALIDATION_SEED)
    return points.mean(estimate.log_prob).item()


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
    ) -> None:
        device = flow.device
        self.flow, self.settings, self.seed = flow, settings, seed
        self.train = train.to(device, None if train.x.dtype == torch.uint8 else flow.dtype)
        self.validation = validation[: settings.validation_points].to(device, flow.dtype)
        self.checkpoints, self.monitor = checkpoints, monitor or Monitor()
        self.batch_size = min(settings.batch_size, len(train))
        self.noise = Noise.seeded(seed, device)
        self.epoch, self.order = -1, torch.empty(0)
        self.started = 0.0
        self.validated = False
        self.progress = _Progress()
        self.best = _copy(flow.state_dict())

    @property
    def generator(self) -> torch.Generator:
        assert self.noise.generator is not None
        return self.noise.generator

    def run(self) -> Outcome:
        """Train to the end; what an interruption finds is saved, so that training can go on."""
        self.started = saved = time.monotonic()
        self.flow.train()
        if self.flow.device.type == "cuda":
            self.monitor.say("Compiling for this GPU: up to a minute the first time, seconds later.")
        first = self.train[: self.batch_size].to(self.flow.device, self.flow.dtype)
        noise = Noise.seeded(self.seed, self.flow.device)
        self.flow.initialise(first.x, first.context, noise)
        self.step = make_step(self.flow, self.settings, self.noise, first)
        self.tensors = self._tensors()
        self._resume()
        progress = self.progress
        good, spare = self._state(), self._state()
        self.monitor.begin(progress.step, self.settings.steps, self._done())
        try:
            while not self._finished():
                loss = self._round()
                if not math.isfinite(loss):
                    self._roll_back(good)
                    continue
                values = {"loss": loss, "learning_rate": self._rate(), "seconds": progress.seconds}
                if progress.step % self.settings.validate_every == 0 or self._finished():
                    values["validation"] = self._validate()
                self.monitor.record(progress.step, values, self._done())
                good, spare = self._state(spare), good
                if time.monotonic() - saved > self.settings.checkpoint_seconds:
                    self._save(good)
                    saved = time.monotonic()
        except KeyboardInterrupt:
            self._save(good)
            raise
        finally:
            self.monitor.end()
            self.step.optimizer.spread()
        self._save(good)
        self.flow.load_state_dict(self.best)
        self.flow.eval()
        kept = progress.best if self.settings.keep == "best" else progress.last
        return Outcome(progress.step, progress.seconds, kept, progress.rollbacks, self._stopped())

    def _finished(self) -> bool:
        return self.progress.step >= self.settings.steps or self._stopped() is not None

    def _stopped(self) -> str | None:
        """Why training should end before all steps are taken, if it should."""
        settings, progress = self.settings, self.progress
        if progress.step >= settings.steps:
            return None
        if self._time_is_over():
            return f"{settings.max_minutes:g} minutes are over"
        if settings.patience is not None and progress.stale >= settings.patience:
            return f"no better validation in the last {progress.stale}"
        if progress.rollbacks > MOST_ROLLBACKS:
            return (
                f"the loss was not finite {progress.rollbacks} times, with ever smaller steps; "
                "try a smaller learning_rate or clip, or precision = float64"
            )
        return None

    def _time_is_over(self) -> bool:
        minutes = self.settings.max_minutes
        return minutes is not None and self.progress.seconds >= 60 * minutes

    def _round(self) -> float:
        """Take steps up to the next multiple of `ROUND`, or to the end of the time; their mean loss."""
        settings, progress = self.settings, self.progress
        due = min(ROUND * (progress.step // ROUND + 1), settings.steps)
        due = min(due, settings.validate_every * (progress.step // settings.validate_every + 1))
        losses: list[Tensor] = []
        while progress.step < due and not (losses and self._time_is_over()):
            self.step.set_learning_rate(self._rate())
            batch = self._batch(progress.step)
            losses.append(self.step(batch))
            progress.step += 1
            progress.seconds = time.monotonic() - self.started
        return torch.stack(losses).mean().item()

    def _rate(self) -> float:
        settings, progress = self.settings, self.progress
        risen = min(1.0, (progress.step + 1) / (settings.warm_up + 1))
        rate = settings.learning_rate * progress.rate_scale * risen
        if settings.schedule == "constant":
            return rate
        return rate * 0.5 * (1 + math.cos(math.pi * self._done()))

    def _done(self) -> float:
        """How much of training is over, by its steps or by its minutes: between 0 and 1."""
        settings, progress = self.settings, self.progress
        done = progress.step / settings.steps
        if settings.max_minutes is not None:
            done = max(done, progress.seconds / (60 * settings.max_minutes))
        return min(done, 1.0)

    def _batch(self, step: int) -> Rows:
        """The batch of a step: the data in an order drawn anew for each pass over them."""
        per_epoch = len(self.train) // self.batch_size
        epoch, position = divmod(step, per_epoch)
        if epoch != self.epoch:
            shuffle = torch.Generator().manual_seed((self.seed << 32) + epoch)
            self.epoch = epoch
            order, device = torch.randperm(len(self.train), generator=shuffle), self.train.x.device
            pinned = order.pin_memory() if device.type == "cuda" else order  # no step waits for it then
            self.order = pinned.to(device, non_blocking=True)
        start = position * self.batch_size
        batch = self.train[self.order[start : start + self.batch_size]]
        return batch.to(self.flow.device, self.flow.dtype)

    def _validate(self) -> float:
        """Validation log-likelihood of the weights as they are; the best are kept."""
        progress = self.progress
        self.flow.eval()
        if not self.validated and self.step.has_kernels:
            with compiled_ahead(), suppress(Exception):
                validation_score(self.flow, self.validation[:COMPILED_FOR], self.settings)
        self.validated = True
        with self.step.averaged():
            converge_norms(self.flow)
            score = progress.last = validation_score(self.flow, self.validation, self.settings)
            if score > progress.best or self.settings.keep == "last":
                self.best = _copy(self.flow.state_dict())
        self.flow.train()
        if score > progress.best:
            progress.best, progress.stale = score, 0
        else:
            progress.stale += 1
        return score

    # -- state ---------------------------------------------------------------------------------------

    def _state(self, old: _State | None = None) -> _State:
        """All of the state, copied; in place of an old one, since hundreds of its tensors are small."""
        if old is None:
            tensors = _copy(self.tensors)
        else:
            tensors = old.tensors
            _copy_into(tensors, self.tensors)
        return _State(tensors, self.generator.get_state(), replace(self.progress), self.best)

    def _tensors(self) -> dict[str, Tensor]:
        """The tensors that a step changes, under names that do not depend on the device."""
        weights = {f"flow.{name}": value for name, value in self.flow.state_dict().items()}
        return weights | self.step.state()

    def _roll_back(self, good: _State) -> None:
        """Go back to a good state, all but the generator, with half the step size from there on."""
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
        if self.checkpoints is not None:
            best = {f"best.{name}": value for name, value in state.best.items()}
            tensors = state.tensors | best | {"generator": state.generator}
            self.checkpoints.save(state.progress.step, tensors, asdict(state.progress))

    def _resume(self) -> None:
        found = self.checkpoints.load() if self.checkpoints is not None else None
        if found is not None:
            tensors, facts = found
            if not self.tensors.keys() <= tensors.keys():
                raise UserError("The checkpoints are of another model: this run cannot go on.")
            _copy_into(self.tensors, tensors)
            self.progress = _Progress(**facts)
            self.started -= self.progress.seconds
            self._resume_generator(tensors["generator"])
            self.best = {
                name: tensors[f"best.{name}"].to(value.device) for name, value in self.best.items()
            }

    def _resume_generator(self, state: Tensor) -> None:
        """Go on with the same numbers; a generator of another kind of device cannot give them."""
        if state.numel() == self.generator.get_state().numel():
            self.generator.set_state(state)
        else:
            self.generator.manual_seed((self.seed << 20) + self.progress.step)
            self.monitor.say("This run began on another device: its draws differ from here on.")


def _copy(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in tensors.items()}


@torch.no_grad()
def _copy_into(targets: dict[str, Tensor], sources: dict[str, Tensor]) -> None:
    """Copy tensors into those of the same name, all of one type at once."""
    for names in grouped(targets, lambda name: targets[name].dtype):
        torch._foreach_copy_([targets[name] for name in names], [sources[name] for name in names])

"""Training in stages: a plain flow first, then an index where it pays.

Per step an index helps almost everywhere. Per second it may not, since its steps take longer. So the
plain flow takes the first steps alone. Then it races against a copy of itself with indices, which starts
as exactly the same density: both train for the same time, and the one with the better validation score
takes the rest of it.

    plain | plain race, indexed race | the winner

Where the plain flow is still learning fast when the race should begin, there is none: an index would not
make up for its longer steps, and the plain flow has all of the time.

All goes on as if there were no stages: one schedule of the learning rate, one state of the optimiser.
The index joins with a state of its own that is fresh.

There may be several plain flows to choose from; none is best for all data. Each trains for a short
time, and the best has the rest of it. The result is a mixture of all, where that is ahead of the best.

Nor is one optimiser: with Muon most tables end higher, some by more than a nat, and a few lower. One
sees early on which these are. So with `optimizer="auto"` a flow that is alone is tried with both, and
goes on with Muon unless Adam is far ahead. Where it settles early and an index does not help, the rest
of the time is for another one from the same start with the other optimiser; they are mixed if that pays.
"""

from __future__ import annotations

__all__ = ["SHARES", "Shares", "Staged", "fit_staged"]

import copy
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ciflows.core.flow import Flow
from ciflows.core.indexed import Indexed
from ciflows.core.layer import Layer
from ciflows.core.rows import Rows
from ciflows.diagnostics.index_use import IndexWorth, index_worth
from ciflows.files import read_json, write_json
from ciflows.layers.blend import blend_flows, fit_shares
from ciflows.models.index import IndexSettings, add_index
from ciflows.training.branch import branch
from ciflows.training.checkpoint import Checkpoints, InMemory
from ciflows.training.first_weights import Start
from ciflows.training.loop import Outcome, fit_flow
from ciflows.training.monitor import Monitor
from ciflows.training.processes import ALONE, Processes
from ciflows.training.settings import TrainingSettings, suited_to_rows

STILL_LEARNING = 0.02  # nats that a plain flow gains in a race's time: above it an index costs too much
LEAST_GAIN = 0.5  # standard errors that an index or a mixture has to gain
LEAST_NATS, LEAST_BY_MIXTURE = 0.002, 0.01  # and nats: a mixture takes as many times longer to score
STAGES = "plain", "indexed"
TRIAL = 0.15  # of all steps or minutes, for each flow to choose from; earlier on starts still differ
OPTIMIZERS = "adam", "muon"
OPTIMIZER_TRIAL = 0.05  # of all steps or minutes, for each optimiser; 0.03 is too early to tell
CATCHES_UP = 0.3  # nats that Muon may be behind Adam then: it gains more later on
FINISH, SECOND = 0.1, 0.3  # of all steps or minutes: a settled flow's last ones, and a second flow
IN_VAIN = "A second flow, with the other optimiser, did not help either."
LEAST_TRIAL = 10  # steps: fewer do not tell flows apart
LEAST_SHARE = 0.02  # of a flow in the mixture at the end


class Shares(NamedTuple):
    """How training is shared out, in parts of its steps or minutes.

    Attributes:
        plain: The plain flow alone.
        race: Each of the two flows in the race.
        finish: The winner.
    """

    plain: float = 0.4
    race: float = 0.1
    finish: float = 0.4


SHARES = Shares()


class Staged(NamedTuple):
    """What training in stages came to.

    Attributes:
        flow: The flow that won, in eval mode, with its best weights.
        outcome: How training ended, over all stages.
        indexed: Whether it has indices.
        worth: What the index was worth at the end of the race, on the validation rows; None where there
            was no race.
        story: What was done and found, in words.
        members: Which of the flows the result is a mixture of: numbers in [flow, *others, *fixed].
    """

    flow: Flow
    outcome: Outcome
    indexed: bool
    worth: IndexWorth | None
    story: str
    members: tuple[int, ...] = (0,)


def fit_staged(
    flow: Flow,
    train: Rows | Tensor,
    validation: Rows | Tensor,
    settings: TrainingSettings,
    index: IndexSettings,
    *,
    others: Sequence[Flow] = (),
    fixed: Sequence[Flow] = (),
    shares: Shares = SHARES,
    seed: int = 0,
    folder: Path | None = None,
    monitor: Monitor | None = None,
    clock: Callable[[], float] = time.monotonic,
    processes: Processes = ALONE,
) -> Staged:
    """Train a plain flow, add indices to it, and keep them if they are ahead in validation.

    Arguments:
        flow: A plain flow over vectors, on the device to train on; it is trained in place.
        train: Rows to fit.
        validation: Rows to choose by; at least two.
        settings: How to train, over all stages. Indices are trained by the ELBO with one draw; each step
            with several would take twice as long, for the same as long as almost all draws count.
        index: Sizes of the indices and their networks.
        others: Other plain flows to choose from, of the same shape. First layers that are the same
            object in all of them stay the first layers of the result.
        fixed: Densities that need no training, such as a mixture of Gaussians, for the final mixture.
        shares: How time is shared out.
        seed: Seed of the order of the data, of the draws and of the index's first weights.
        folder: Where both flows keep their checkpoints; training goes on from what is found there.
        monitor: What listens to all stages, one after the other.
        clock: Tells the seconds that `max_minutes` counts.
        processes: Those that train this flow together, each called with the same arguments.
    """
    if any(isinstance(layer, Indexed) for layer in flow.layers):
        raise ValueError("fit_staged: the flow has indices already: give it a plain one.")
    rows = Rows.of(train), Rows.of(validation)
    settings = suited_to_rows(settings, len(rows[0]))
    stages = _Staged(rows, settings, shares, seed, folder, monitor, clock, processes)
    if TRIAL * settings.steps < LEAST_TRIAL or len(rows[1]) < 2:
        others, fixed = (), ()
    return stages.run([flow, *others], fixed, index)


class _Staged:
    def __init__(
        self,
        rows: tuple[Rows, Rows],
        settings: TrainingSettings,
        shares: Shares,
        seed: int,
        folder: Path | None,
        monitor: Monitor | None,
        clock: Callable[[], float],
        processes: Processes,
    ) -> None:
        self.rows, self.shares, self.seed, self.processes = rows, shares, seed, processes
        self.folder, self.monitor, self.clock = folder, monitor or Monitor(), clock
        self.settings = settings.model_copy(update={"objective": "elbo"})
        self.whole = self.settings  # what both flows share
        self.seconds = 0.0  # of trials that were not the best, and of a second flow
        self.second: Flow | None = None  # the same start once more, for the other optimiser
        self.settled = False  # whether more time brings the flow nothing, and an index does not either

    def run(self, flows: Sequence[Flow], fixed: Sequence[Flow], index: IndexSettings) -> Staged:
        trials = [_Trial(self, flow, number) for number, flow in enumerate(flows, 1)]
        best, found, everything = 0, "", [*flows, *fixed]
        if len(flows) > 1:
            best = self.choose(trials)
        elif self.may_choose_optimizer():
            self.second = _again(flows[0])
            found = self.choose_optimizer(trials[0])
        staged = self.in_stages(trials[best], index)
        if self.second is not None and self.settled:
            self.train_second(self.second)
            everything.append(self.second)
        staged = staged._replace(story=found + staged.story)
        outcome = staged.outcome._replace(seconds=staged.outcome.seconds + self.seconds)
        staged = staged._replace(outcome=outcome, members=(best,))
        if staged.indexed or len(everything) == 1:
            return staged  # a flow with an index stands alone, so that one sees what it does
        mixed = self.blend(everything, best, staged)
        in_vain = self.settled and len(mixed.members) == 1
        return mixed._replace(story=f"{mixed.story} {IN_VAIN}") if in_vain else mixed

    def choose(self, trials: Sequence[_Trial]) -> int:
        """Train each flow for a short time; the number of the best, which has the rest of it."""
        outcomes = [self.train(trial.flow, trial.run, TRIAL, trial.stage) for trial in trials]
        scores = [
            trial.start.better_of(trial.flow, outcome.validation)
            for trial, outcome in zip(trials, outcomes, strict=True)
        ]
        self.shorten(1 - TRIAL * (len(trials) - 1))
        best = scores.index(max(scores))
        self.seconds = sum(outcome.seconds for k, outcome in enumerate(outcomes) if k != best)
        return best

    def may_choose_optimizer(self) -> bool:
        enough = OPTIMIZER_TRIAL * self.settings.steps >= LEAST_TRIAL and len(self.rows[1]) > 1
        return self.settings.optimizer == "auto" and enough

    def choose_optimizer(self, trial: _Trial) -> str:
        """Train a flow with each optimiser for a short time, and choose how to go on, in words."""
        runs = trial.run, self.checkpoints("plain-muon")
        found = self.kept("optimizer.json", lambda: self.try_optimizers(trial.flow, runs))
        muon = bool(found["muon_wins"])
        trial.run, self.seconds = runs[muon], found["seconds_of_other"]
        self.settings = self.settings.model_copy(update={"optimizer": OPTIMIZERS[muon]})
        self.shorten(1 - OPTIMIZER_TRIAL)
        return "Trained with Muon: Adam was not far ahead early on. " if muon else ""

    def try_optimizers(self, flow: Flow, runs: Sequence[Checkpoints]) -> dict[str, float]:
        """Whether to go on with Muon, and the seconds that the other one took."""
        auto, outcomes = self.settings, []
        for name, one, run in zip(OPTIMIZERS, (flow, copy.deepcopy(flow)), runs, strict=True):
            self.settings = auto.model_copy(update={"optimizer": name})
            outcomes.append(self.train(one, run, OPTIMIZER_TRIAL, name))
        self.settings = auto
        wins = outcomes[1].validation > outcomes[0].validation - CATCHES_UP
        return {"muon_wins": float(wins), "seconds_of_other": outcomes[not wins].seconds}

    def train_second(self, flow: Flow) -> None:
        """Train a flow with the optimiser that the first one was not trained with."""
        other = OPTIMIZERS[self.settings.optimizer == OPTIMIZERS[0]]
        self.settings = self.whole.model_copy(update={"optimizer": other})
        self.shorten(SECOND)
        self.seconds += self.train(flow, self.checkpoints("second"), 1.0, "second").seconds

    def in_stages(self, trial: _Trial, index: IndexSettings) -> Staged:
        """Train one flow to the end, and an index with it where that may pay."""
        staged, flow = self.with_or_without(trial, index), trial.flow
        score = trial.start.better_of(flow, staged.outcome.validation)
        if score == staged.outcome.validation:
            return staged
        outcome = staged.outcome._replace(validation=score)
        return Staged(flow, outcome, False, staged.worth, "Training did not improve on its start.")

    def with_or_without(self, trial: _Trial, index: IndexSettings) -> Staged:
        flow, runs = trial.flow, (trial.run, self.checkpoints("indexed"))
        learning = self.kept("learning.json", lambda: {"gain": self.alone(flow, runs[0])})["gain"]
        if learning > STILL_LEARNING or len(self.rows[1]) < 2:  # one row cannot tell a gain from chance
            outcome = self.train(flow, runs[0], 1.0)
            return Staged(flow, outcome, False, None, _still_learning(learning))
        self.whole = self.settings
        self.leave_out_the_loser()
        flows = flow, self.join(flow, index, *runs)
        worth = IndexWorth(**self.kept("race.json", lambda: self.race(flows, runs)._asdict()))
        wins = _is_ahead(*worth, LEAST_NATS)
        if self.second is not None and not wins:
            self.settled = True
            self.shorten((self.shares.plain + self.shares.race + FINISH) / sum(self.shares))
        outcome = self.train(flows[wins], runs[wins], 1.0, STAGES[wins])
        return Staged(flows[wins], outcome, wins, worth, _story(wins, worth))

    @torch.no_grad()
    def blend(self, flows: Sequence[Flow], best: int, staged: Staged) -> Staged:
        """The mixture of all flows, where it is ahead of the best in validation."""
        rows = self.held_out(flows[best])
        log_probs = self.processes.from_main(
            lambda: torch.stack([self.scores(flow, rows) for flow in flows]).cpu()
        ).to(rows.x.device)
        shares = fit_shares(log_probs, rows.weight)
        members = [k for k in range(len(flows)) if k == best or shares[k] >= LEAST_SHARE]
        shares = fit_shares(log_probs[members], rows.weight)
        gains = torch.logsumexp(log_probs[members] + shares.log()[:, None], 0) - log_probs[best]
        gain, error = rows.mean(gains).item(), gains.std().item() / len(rows) ** 0.5
        if len(members) == 1 or not _is_ahead(gain, error, LEAST_BY_MIXTURE):
            return staged
        outcome = staged.outcome._replace(validation=staged.outcome.validation + gain)
        story = f"{staged.story} {_mixture_story(len(members), gain, error)}"
        flow = blend_flows([flows[k] for k in members], shares).to(flows[best].device).eval()
        return Staged(flow, outcome, False, staged.worth, story, tuple(members))

    def scores(self, flow: Flow, rows: Rows) -> Tensor:
        """The log-likelihood of each row (rows,)."""
        samples = self.settings.validation_samples
        return flow.eval().estimate(rows.x, samples, context=rows.context, seed=0).log_prob.double()

    def alone(self, flow: Flow, run: Checkpoints) -> float:
        """Train the plain flow alone; what it gained at the end, in as much time as a race takes."""
        early = max(0.0, self.shares.plain - self.shares.race)
        before = self.kept("before.json", lambda: {"score": self.train(flow, run, early).validation})
        return self.train(flow, run, self.shares.plain).validation - before["score"]

    def leave_out_the_loser(self) -> None:
        """From here on time is the winner's: all but what the other one has in the race."""
        self.shorten(sum(self.shares))

    def shorten(self, share: float) -> None:
        """Train for a share of the steps and minutes from here on."""
        steps, minutes = max(1, round(share * self.settings.steps)), self.settings.max_minutes
        minutes = None if minutes is None else share * minutes
        self.settings = self.settings.model_copy(update={"steps": steps, "max_minutes": minutes})

    def join(self, flow: Flow, index: IndexSettings, run: Checkpoints, indexed_run: Checkpoints) -> Flow:
        """A copy of the plain flow with indices, to be trained on from where the plain one is."""
        indexed = add_index(copy.deepcopy(flow), index, self.seed)
        if self.processes.main and indexed_run.load() is None:
            branch(flow, indexed, run, indexed_run, self.settings)
        return indexed

    def race(self, flows: tuple[Flow, Flow], runs: tuple[Checkpoints, Checkpoints]) -> IndexWorth:
        """Train both for the same time; what the index adds then."""
        until = (self.shares.plain + self.shares.race) / sum(self.shares)
        for flow, run, stage in zip(flows, runs, STAGES, strict=True):
            self.train(flow, run, until, stage)
        return self.worth(*flows)

    def kept(self, name: str, find: Callable[[], dict[str, float]]) -> dict[str, float]:
        """What was found at a fork in the road: read again where a run resumes after it."""
        if self.folder is None:
            return find()
        path = self.folder / name
        if not self.processes.from_main(path.exists):
            found = find()
            if self.processes.main:
                write_json(path, found)
        return self.processes.from_main(lambda: read_json(path))

    def train(self, flow: Flow, run: Checkpoints, until: float, stage: str = STAGES[0]) -> Outcome:
        """Go on with a flow's training up to a share of it."""
        self.monitor.stage(stage)
        return fit_flow(
            flow,
            *self.rows,
            self.settings,
            seed=self.seed,
            checkpoints=run,
            monitor=self.monitor,
            clock=self.clock,
            until=until,
            processes=self.processes,
        )

    def checkpoints(self, name: str) -> Checkpoints:
        return InMemory() if self.folder is None else Checkpoints(self.folder / name)

    def worth(self, plain: Flow, indexed: Flow) -> IndexWorth:
        """What the index adds in validation, with the rows that scores are taken from."""
        rows, samples = self.held_out(plain), self.settings.validation_samples
        return self.processes.from_main(
            lambda: index_worth(indexed, rows.x, rows.context, plain, samples)
        )

    def held_out(self, flow: Flow) -> Rows:
        """The rows that scores are taken from, on a flow's device."""
        return self.rows[1][: self.settings.validation_points].on(flow)


class _Trial:
    """A plain flow to choose from, counted from 1, its first weights and its checkpoints."""

    def __init__(self, stages: _Staged, flow: Flow, number: int) -> None:
        self.flow, self.stage = flow, f"start {number}"
        self.run = stages.checkpoints(f"plain-{number - 1}")
        self.start = Start(flow, stages.rows[1], stages.settings, stages.processes)


def _again(flow: Flow) -> Flow:
    """A copy of a flow that has its first layers in common with it, where these are fixed."""
    fixed = itertools.takewhile(_is_fixed, flow.layers)
    return copy.deepcopy(flow, {id(layer): layer for layer in fixed})


def _is_fixed(layer: Layer) -> bool:
    return not layer.starts_from_data and next(layer.parameters(), None) is None


def _is_ahead(nats: float, std_error: float, least: float) -> bool:
    return nats > max(least, LEAST_GAIN * std_error)


def _still_learning(gain: float) -> str:
    return (
        f"The plain flow was still gaining {gain:.3f} nats a row, so it trained to the end without an "
        "index. With more steps an index may pay."
    )


def _story(wins: bool, worth: IndexWorth) -> str:
    found = f"{worth.nats:+.3f} ± {worth.std_error:.3f} nats a row in validation"
    if wins:
        return f"The index helped the trained flow ({found}) and was kept."
    if worth.nats == worth.std_error == 0:
        return "Validation did not improve once an index joined, so the flow has none."
    return f"The index did not help the trained flow ({found}) and was dropped."


def _mixture_story(members: int, gain: float, error: float) -> str:
    return (
        f"The result is a mixture of {members} flows: {gain:+.3f} ± {error:.3f} nats a row in "
        "validation, beside the best of them."
    )

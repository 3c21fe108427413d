"""Training in stages: an index that changes nothing at first, and stays only where it pays."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from ciflows import Flow, Indexed, build_model
from ciflows.core.layer import Layer
from ciflows.diagnostics.index_use import IndexWorth
from ciflows.layers import Standardise
from ciflows.models.index import IndexSettings, add_index
from ciflows.tables.start import start_as_identity
from ciflows.training import Outcome, TrainingSettings, fit_flow
from ciflows.training import staged as staging
from ciflows.training.checkpoint import Checkpoints, load_tensors
from ciflows.training.monitor import Monitor
from ciflows.training.optimizer import Optimizer, gradients
from ciflows.training.settings import suited_to_rows
from ciflows.training.staged import Shares, _story, fit_staged

INDEX = IndexSettings(affine_hidden=[16], prior_hidden=[16], posterior_hidden=[16])
SETTINGS = TrainingSettings(
    steps=200, batch_size=64, learning_rate=1e-2, validate_every=20, validation_samples=5
)


def plain_flow(context: int = 0) -> Flow:
    """A trained-looking spline flow behind a standardisation."""
    flow = build_model("nsf", features=2, context_features=context, layers=2, hidden=[8], seed=0)
    layers: list[Layer] = [Standardise(torch.ones(2), torch.full((2,), 2.0)), *flow.layers]  # type: ignore[list-item]
    return Flow(layers, flow.base)


def wide_flow() -> Flow:
    """A flow with matrices that are large enough for Muon."""
    return build_model("nsf", features=2, layers=2, hidden=[32, 32], seed=0)


AUTO = SETTINGS.model_copy(update={"optimizer": "auto", "learning_rate": 2e-3})


def two_blobs(n: int, seed: int) -> Tensor:
    """Two normal distributions of standard deviation 0.3 around (2, 2) and (-2, -2)."""
    generator = torch.Generator().manual_seed(seed)
    centre = 4.0 * torch.randint(2, (n, 1), generator=generator) - 2.0
    return centre + 0.3 * torch.randn(n, 2, generator=generator)


@pytest.mark.parametrize("context", [0, 3])
def test_an_added_index_does_not_change_the_density(context: int) -> None:
    flow = plain_flow(context).double().eval()
    indexed = add_index(flow, INDEX, seed=1).eval()
    x = torch.randn(50, 2, dtype=torch.float64)
    given = torch.randn(50, context, dtype=torch.float64) if context else None
    estimate = indexed.estimate(x, 7, context=given, seed=0)
    assert torch.allclose(estimate.log_prob, flow.log_prob(x, context=given), atol=1e-12)
    assert torch.allclose(estimate.effective_samples, torch.full((50,), 7.0, dtype=torch.float64))
    assert sum(isinstance(layer, Indexed) for layer in indexed.layers) == 2


def test_every_part_of_an_added_index_learns() -> None:
    """s and t get a gradient at once, p and q as soon as they have moved."""
    flow = add_index(plain_flow(), INDEX)
    optimizer = torch.optim.Adam(flow.parameters(), 1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        (-flow.log_weight(two_blobs(64, seed=0)).mean()).backward()
        optimizer.step()
    for layer in flow.layers:
        if isinstance(layer, Indexed):
            assert all(bool((p.grad != 0).any()) for p in layer.parameters() if p.grad is not None)
            assert all(p.grad is not None for p in layer.parameters())


def test_what_cannot_take_an_index_is_refused() -> None:
    with pytest.raises(ValueError, match="no bijection with weights"):
        add_index(Flow([Standardise(torch.zeros(2), torch.ones(2))]), INDEX)
    with pytest.raises(ValueError, match="must be equal"):
        add_index(plain_flow(), IndexSettings(prior_hidden=[8]))
    with pytest.raises(ValueError, match="over vectors"):
        add_index(build_model("realnvp-image", shape=(1, 4, 4), blocks=1, channels=4), INDEX)


def test_what_cannot_be_trained_in_stages_is_refused() -> None:
    x = torch.randn(10, 2)
    with pytest.raises(ValueError, match="indices already"):
        fit_staged(add_index(plain_flow(), INDEX), x, x, SETTINGS, INDEX)


@pytest.fixture
def _always_race(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ciflows.training.staged.STILL_LEARNING", math.inf)


@pytest.fixture(scope="module")
def blobs() -> tuple[Tensor, Tensor]:
    return two_blobs(1000, seed=1), two_blobs(500, seed=2)


@pytest.mark.usefixtures("_always_race")
@pytest.mark.parametrize(("nats", "stays"), [(0.1, True), (0.004, False), (-0.1, False)])
def test_an_index_stays_where_it_is_ahead(
    blobs: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch, nats: float, stays: bool
) -> None:
    monkeypatch.setattr("ciflows.training.staged.index_worth", lambda *_: IndexWorth(nats, 0.01))
    flow, settings = plain_flow(), SETTINGS.model_copy(update={"steps": 40})
    staged = fit_staged(flow, *blobs, settings, INDEX)
    assert staged.indexed is stays
    assert any(isinstance(layer, Indexed) for layer in staged.flow.layers) is stays
    assert (staged.flow is flow) is not stays
    assert ("kept" in staged.story) is stays


def test_training_never_ends_below_its_start(blobs: tuple[Tensor, Tensor]) -> None:
    """Steps that are far too large make everything worse: then the first weights stay."""
    flow = plain_flow().eval()
    start = flow.log_prob(blobs[1]).mean()
    settings = SETTINGS.model_copy(update={"steps": 40, "learning_rate": 5.0, "clip": 1e6})
    staged = fit_staged(flow, *blobs, settings, INDEX)
    assert staged.flow.log_prob(blobs[1], 5, seed=0).mean() >= start
    assert staged.outcome.validation >= start


@pytest.mark.parametrize(
    ("rows", "rate", "every"), [(100, 0.001, 10), (8000, 0.004, 155), (10**6, 0.005, 200)]
)
def test_a_learning_rate_that_suits_the_rows(rows: int, rate: float, every: int) -> None:
    auto = {"batch_size": 256, "learning_rate": 0.0, "validate_every": 200}
    settings = suited_to_rows(SETTINGS.model_copy(update=auto), rows)
    assert settings.learning_rate == pytest.approx(rate)
    assert settings.validate_every == every


class _Rates(Monitor):
    """Keeps the learning rates of each stage."""

    def __init__(self) -> None:
        self.stages: list[list[float]] = []

    def begin(self, step: int, steps: int, done: float) -> None:
        self.stages.append([])

    def record(self, step: int, values: dict[str, float], done: float) -> None:
        self.stages[-1].append(values["learning_rate"])


@pytest.mark.usefixtures("_always_race")
def test_the_learning_rate_has_one_schedule_over_all_stages(blobs: tuple[Tensor, Tensor]) -> None:
    rates = _Rates()
    settings = SETTINGS.model_copy(update={"steps": 100, "validate_every": 5})
    fit_staged(plain_flow(), *blobs, settings, INDEX, monitor=rates)
    first, second, race, race_indexed, finish = rates.stages
    assert race == race_indexed
    # ten of a hundred steps are the loser's, and the winner does without them
    done = [k / 20 for k in range(1, 9)] + [k / 18 for k in range(9, 19)]
    truth = [0.5e-2 * (1 + math.cos(math.pi * share)) for share in done]
    assert [*first, *second, *race, *finish] == pytest.approx(truth, abs=1e-9)


def test_a_flow_that_still_learns_is_trained_as_without_stages(
    blobs: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ciflows.training.staged.STILL_LEARNING", -math.inf)
    settings = SETTINGS.model_copy(update={"steps": 100, "validate_every": 10, "average": 0.9})
    staged = fit_staged(plain_flow(), *blobs, settings, INDEX)
    alone = plain_flow()
    outcome = fit_flow(alone, *blobs, settings.model_copy(update={"objective": "elbo"}))
    assert staged.outcome._replace(seconds=0) == outcome._replace(seconds=0)
    assert staged.worth is None
    assert "to the end without an index" in staged.story
    for name, value in alone.state_dict().items():
        assert torch.equal(value, staged.flow.state_dict()[name])


def at_the_fork(
    make: Callable[[], Flow],
    blobs: tuple[Tensor, Tensor],
    settings: TrainingSettings,
    index: IndexSettings,
    folder: Path,
) -> list[tuple[dict[str, Tensor], dict[str, Any]]]:
    """The checkpoints of a plain flow after 40 of 100 steps, and of that with indices at its first."""
    fit_staged(make(), *blobs, settings, index, shares=Shares(0.4, 0.0, 0.6), folder=folder)
    settings = settings.model_copy(update={"objective": "elbo"})
    fit_flow(make(), *blobs, settings, checkpoints=Checkpoints(folder / "again"), until=0.4)
    return [load_tensors(folder / name / "step-000000040.safetensors") for name in ("again", "indexed")]


@pytest.mark.usefixtures("_always_race")
def test_the_indexed_flow_goes_on_where_the_plain_one_was(
    blobs: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    settings = SETTINGS.model_copy(update={"steps": 100, "validate_every": 10, "average": 0.9})
    (plain, facts), (indexed, its_facts) = at_the_fork(plain_flow, blobs, settings, INDEX, tmp_path)
    assert {**facts, "seconds": 0} == {**its_facts, "seconds": 0}
    second_spline = [name for name in plain if "layers.2." in name]  # an index comes before it
    assert second_spline
    for name in second_spline:
        assert torch.equal(plain[name], indexed[name.replace("layers.2.", "layers.3.")])


@pytest.mark.usefixtures("_always_race")
def test_so_do_its_momenta_under_muon(blobs: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    index = IndexSettings(affine_hidden=[16, 16], prior_hidden=[16, 16], posterior_hidden=[16, 16])
    settings = AUTO.model_copy(update={"steps": 100, "validate_every": 10, "optimizer": "muon"})
    (plain, _), (indexed, _) = at_the_fork(wide_flow, blobs, settings, index, tmp_path)
    momenta = [
        {name: value for name, value in tensors.items() if name.startswith("muon.")}
        for tensors in (plain, indexed)
    ]
    assert 0 < len(momenta[0]) < len(momenta[1])
    carried = [value for value in momenta[1].values() if value.any()]
    for value in momenta[0].values():
        assert any(torch.equal(value, other) for other in carried)
    assert len(carried) == len(momenta[0])  # those of the index are fresh


@pytest.mark.usefixtures("_always_race")
def test_the_outcome_counts_all_stages(blobs: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(update={"steps": 40, "validate_every": 5})
    first = fit_staged(plain_flow(), *blobs, settings, INDEX, folder=tmp_path)
    assert first.outcome.steps == 36  # the other flow's steps in the race do not count
    again = fit_staged(plain_flow(), *blobs, settings, INDEX, folder=tmp_path)
    assert again.worth == first.worth  # all stages were finished: nothing is trained again
    x = blobs[1]
    assert torch.equal(again.flow.log_prob(x, 3, seed=0), first.flow.log_prob(x, 3, seed=0))


SHORT = SETTINGS.model_copy(update={"steps": 100, "validate_every": 5, "learning_rate": 1e-4})


def trained(blobs: tuple[Tensor, Tensor]) -> Flow:
    flow = plain_flow()
    fit_flow(flow, *blobs, SETTINGS.model_copy(update={"steps": 300, "validate_every": 50}))
    return flow


def test_the_best_of_several_flows_has_the_rest_of_the_time(
    blobs: tuple[Tensor, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, better = plain_flow(), trained(blobs)
    steps = _Steps()
    monkeypatch.setattr("ciflows.training.staged.STILL_LEARNING", math.inf)
    staged = fit_staged(first, *blobs, SHORT, INDEX, others=[better], folder=tmp_path, monitor=steps)
    assert staged.members == (1,)
    assert staged.flow is better
    assert steps.stages[:2] == [15, 15]  # a trial takes 15 % of the steps
    assert steps.names[:3] == ["start 1", "start 2", "plain"]
    assert max(steps.stages) == 76  # all but the other one's trial and the index's part of the race
    too_short = SHORT.model_copy(update={"steps": 20})
    assert fit_staged(first, *blobs, too_short, INDEX, others=[better]).members == (0,)
    again = fit_staged(plain_flow(), *blobs, SHORT, INDEX, others=[trained(blobs)], folder=tmp_path)
    assert again.members == (1,)
    assert torch.equal(again.flow.log_prob(blobs[1]), staged.flow.log_prob(blobs[1]))


class _Scores(Monitor):
    """Keeps the name of each stage, and the best score in it."""

    def __init__(self) -> None:
        self.best: dict[str, float] = {}

    def stage(self, name: str) -> None:
        self.name = name

    def record(self, step: int, values: dict[str, float], done: float) -> None:
        score = values.get("validation", -math.inf)
        self.best[self.name] = max(score, self.best.get(self.name, -math.inf))


@pytest.mark.parametrize("worse", ["adam", "muon"])
def test_the_optimizer_that_is_ahead_early_on_goes_on(
    blobs: tuple[Tensor, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worse: str
) -> None:
    """The worse one gets gradients of the wrong sign, so that it is sure to be worse."""
    step = Optimizer.step

    def backwards(self: Optimizer, clip: float = math.inf) -> Tensor:
        if bool(self.matrices) is (worse == "muon"):
            torch._foreach_neg_(gradients(self.parameters))
        return step(self, clip)

    monkeypatch.setattr(Optimizer, "step", backwards)
    scores = _Scores()
    staged = fit_staged(wide_flow(), *blobs, AUTO, INDEX, folder=tmp_path, monitor=scores)
    assert ("Muon" in staged.story) is (worse == "adam")
    assert list(scores.best)[:3] == ["adam", "muon", "plain"]
    assert staged.outcome.validation == scores.best["plain"] > scores.best[worse]
    assert staged.outcome.steps == 190  # all but the trial of the other one
    (tmp_path / "learning.json").unlink()
    again = fit_staged(wide_flow(), *blobs, AUTO, INDEX, folder=tmp_path)
    assert torch.equal(again.flow.log_prob(blobs[1]), staged.flow.log_prob(blobs[1]))


@pytest.mark.parametrize(("lead", "muon"), [(0.9, True), (1.1, False)])
def test_muon_may_be_a_little_behind_at_first(
    blobs: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch, lead: float, muon: bool
) -> None:
    """It is told to have come to so much less than Adam, in units of what it may be behind."""
    fit, score = staging.fit_flow, {"adam": 0.0, "muon": -lead * staging.CATCHES_UP}

    def told(flow: Flow, *rows: Tensor, **options: Any) -> Outcome:
        optimizer, in_trial = rows[2].optimizer, options["until"] == staging.OPTIMIZER_TRIAL
        outcome = fit(flow, *rows, **options)
        return outcome._replace(validation=score[optimizer]) if in_trial else outcome

    monkeypatch.setattr(staging, "fit_flow", told)
    assert ("Muon" in fit_staged(wide_flow(), *blobs, AUTO, INDEX).story) is muon


def test_the_time_that_a_settled_flow_leaves_is_for_the_other_optimizer(
    blobs: tuple[Tensor, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled = {"STILL_LEARNING": math.inf, "LEAST_NATS": math.inf}  # the index is dropped
    mixed = {"LEAST_BY_MIXTURE": -math.inf, "LEAST_GAIN": -math.inf, "LEAST_SHARE": -math.inf}
    for name, value in (settled | mixed).items():
        monkeypatch.setattr(staging, name, value)
    watched, flow = _Steps(), plain_flow()
    staged = fit_staged(flow, *blobs, AUTO, INDEX, folder=tmp_path, monitor=watched)
    assert staged.members == (0, 1)
    assert not staged.indexed
    assert "mixture of 2 flows" in staged.story
    assert watched.names[:2] == ["adam", "muon"]
    assert watched.names[-1] == "second"
    assert staged.outcome.steps == round(0.6 / 0.9 * 171)  # of 190 and the race, less the second's
    assert watched.stages[-1] == round(0.3 * 190)
    assert staged.flow.layers[0] is flow.layers[0]  # the standardisation is common to both
    log_prob = staged.flow.log_prob(blobs[1])
    again = fit_staged(plain_flow(), *blobs, AUTO, INDEX, folder=tmp_path)
    assert torch.equal(again.flow.log_prob(blobs[1]), log_prob)
    monkeypatch.setattr(staging, "LEAST_BY_MIXTURE", math.inf)
    alone = fit_staged(plain_flow(), *blobs, AUTO, INDEX, folder=tmp_path)
    assert alone.story.endswith(staging.IN_VAIN)
    assert alone.members == (0,)
    monkeypatch.setattr(staging, "LEAST_BY_MIXTURE", -math.inf)
    shutil.rmtree(tmp_path / "second")
    resumed = fit_staged(plain_flow(), *blobs, AUTO, INDEX, folder=tmp_path)
    assert torch.equal(resumed.flow.log_prob(blobs[1]), log_prob)


def test_a_flow_that_still_learns_has_all_of_the_time(
    blobs: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "STILL_LEARNING", -math.inf)
    watched = _Steps()
    staged = fit_staged(plain_flow(), *blobs, AUTO, INDEX, monitor=watched)
    assert "second" not in watched.names
    assert staged.outcome.steps == 190


def test_too_few_steps_to_tell_are_adams(blobs: tuple[Tensor, Tensor]) -> None:
    settings = AUTO.model_copy(update={"steps": 150})
    flows = [wide_flow(), wide_flow()]
    for flow, optimizer in zip(flows, ("auto", "adam"), strict=True):
        fit_staged(flow, *blobs, settings.model_copy(update={"optimizer": optimizer}), INDEX)
    assert torch.equal(*(flow.log_prob(blobs[1]) for flow in flows))


class _Steps(Monitor):
    """Keeps the last step and the name of each stage."""

    def __init__(self) -> None:
        self.stages: list[int] = []
        self.names: list[str] = []

    def stage(self, name: str) -> None:
        self.names.append(name)

    def begin(self, step: int, steps: int, done: float) -> None:
        self.stages.append(step)

    def record(self, step: int, values: dict[str, float], done: float) -> None:
        self.stages[-1] = step


def tiny_spline() -> Layer:
    flow = build_model("nsf", features=2, layers=1, hidden=[8], seed=0)
    start_as_identity(flow)
    return cast(Layer, flow.layers[0])


def test_the_result_is_a_mixture_where_that_is_ahead() -> None:
    """Two flows that cannot learn, each around one of two clusters."""
    flows = [Flow([Standardise(torch.full((2,), m), torch.ones(2)), tiny_spline()]) for m in (-2.0, 2.0)]
    x = torch.cat([torch.randn(500, 2) - 2, torch.randn(500, 2) + 2])
    x, held_out = x[::2], x[1::2]
    settings = SHORT.model_copy(update={"learning_rate": 1e-9})
    staged = fit_staged(flows[0], x, held_out, settings, INDEX, others=flows[1:])
    assert staged.members == (0, 1)
    assert "a mixture of 2 flows" in staged.story
    with_fixed = fit_staged(flows[0], x, held_out, settings, INDEX, fixed=flows[1:])
    assert with_fixed.members == (0, 1)
    log_probs = torch.stack([flow.log_prob(held_out) for flow in flows])
    truth = torch.logsumexp(log_probs, 0) - math.log(2)
    assert (staged.flow.log_prob(held_out) - truth).abs().mean() < 0.02
    assert staged.outcome.validation == pytest.approx(truth.mean().item(), abs=0.02)


def test_a_stage_without_steps_is_not_shown(blobs: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    settings = SHORT.model_copy(update={"steps": 10})
    for shown in ([10], []):
        steps = _Steps()
        fit_flow(plain_flow(), *blobs, settings, checkpoints=Checkpoints(tmp_path), monitor=steps)
        assert steps.stages == shown


def test_an_index_that_changed_nothing_is_not_said_to_be_measured() -> None:
    assert "joined" in _story(False, IndexWorth(0.0, 0.0))
    assert "-0.100 ± 0.010" in _story(False, IndexWorth(-0.1, 0.01))

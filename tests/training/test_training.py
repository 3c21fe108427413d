"""The training loop: it fits, it resumes to the bit, it survives what goes wrong."""

from __future__ import annotations

import math
import shutil
import types
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import ciflows
from ciflows import Flow, Indexed
from ciflows.core.noise import Noise
from ciflows.core.objectives import ELBO
from ciflows.core.rows import Rows
from ciflows.datasets import SYNTHETIC
from ciflows.errors import UserError
from ciflows.layers import LULinear
from ciflows.models import MODELS
from ciflows.speed.capture import CapturedStep
from ciflows.training import TrainingSettings, batches, fit_flow, loop
from ciflows.training.checkpoint import Checkpoints, load_tensors, save_tensors
from ciflows.training.monitor import Monitor
from ciflows.training.step import Step, make_step
from constructors import affine, generic, normal, residual, spline

SMALL = {"layers": 2, "hidden": [8, 8]}
NOT_CAPTURED = {"bpf", "cnf", "gf"}  # zuko copies numbers to the GPU in these, or asks it for some
QUICK = TrainingSettings(steps=200, batch_size=100, validate_every=50, objective="elbo")


class Listener(Monitor):
    """Remembers what it hears."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.messages: list[str] = []

    def record(self, step: int, values: dict[str, float], done: float) -> None:
        assert 0 < done <= 1
        self.rows.append((step, values))

    def say(self, message: str) -> None:
        self.messages.append(message)


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    points = SYNTHETIC["two-uniforms"].sample(1200, seed=1)
    return points[:1000], points[1000:]


def small(name: str = "cif-resflow", **settings: object) -> Flow:
    return ciflows.build_model(name, features=2, seed=3, **SMALL | settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("optimizer", "objective"), [("adam", "elbo"), ("adam", "iwae"), ("adam", "dreg"), ("muon", "dreg")]
)
@pytest.mark.parametrize("name", ["resflow", "cif-resflow"])
def test_training_raises_the_likelihood(
    name: str, objective: str, optimizer: str, data: tuple[Tensor, Tensor]
) -> None:
    flow = small(name, hidden=[8, 8] if optimizer == "adam" else [16, 16])
    before = flow.eval().log_prob(data[1], 20, seed=0).mean()
    update = {"objective": objective, "draws": 3, "optimizer": optimizer}
    settings = QUICK.model_copy(update=update)
    outcome = fit_flow(flow, *data, settings)
    after = flow.log_prob(data[1], 20, seed=0).mean()
    assert after > before + 0.3
    assert outcome.steps == 200
    assert abs(after.item() - outcome.validation) < 0.1


def test_roulette_trains_as_well_as_exact(data: tuple[Tensor, Tensor]) -> None:
    scores = []
    for log_det in ("exact", "roulette"):
        flow = small("resflow", log_det=log_det)
        scores.append(fit_flow(flow, *data, QUICK).validation)
    assert abs(scores[0] - scores[1]) < 0.05


class Interrupted(ELBO):
    """An objective that is interrupted in the middle of some call, as by a signal."""

    def __init__(self, call: int) -> None:
        self.call, self.count = call, 0

    def __call__(self, flow: Flow, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        value = super().__call__(flow, x, *args, **kwargs)  # type: ignore[arg-type]
        self.count += 1
        if self.count == self.call:
            raise KeyboardInterrupt
        return value


@pytest.mark.parametrize(
    ("optimizer", "hidden", "call"),
    [("adam", [8, 8], 60), ("adam", [8, 8], 100), ("adam", [8, 8], 173), ("muon", [16, 16], 100)],
)
def test_resumed_run_ends_with_the_same_bits(
    optimizer: str,
    hidden: list[int],
    call: int,
    data: tuple[Tensor, Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = QUICK.model_copy(update={"optimizer": optimizer})
    straight, whole = small(hidden=hidden), Listener()
    fit_flow(straight, *data, settings, seed=5, monitor=whole)
    checkpoints = Checkpoints(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(TrainingSettings, "make_objective", lambda _: Interrupted(call))
        with pytest.raises(KeyboardInterrupt):
            fit_flow(small(hidden=hidden), *data, settings, seed=5, checkpoints=checkpoints)
    resumed, rest = small(hidden=hidden), Listener()
    fit_flow(resumed, *data, settings, seed=5, checkpoints=checkpoints, monitor=rest)
    assert 0 < len(rest.rows) < len(whole.rows)
    for name, value in straight.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    assert rest.rows[-1][1]["loss"] == whole.rows[-1][1]["loss"]


def test_seed_decides_everything(data: tuple[Tensor, Tensor]) -> None:
    ends = []
    for seed in (0, 0, 1):
        flow = small()
        fit_flow(flow, *data, QUICK, seed=seed)
        ends.append(torch.cat([p.detach().flatten() for p in flow.parameters()]))
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


def test_damaged_checkpoint_falls_back(data: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    said: list[str] = []
    checkpoints = Checkpoints(tmp_path, said.append)
    for step in (50, 100):
        settings = QUICK.model_copy(update={"steps": step})
        fit_flow(small(), *data, settings, checkpoints=checkpoints)
    newest = sorted(tmp_path.glob("*.safetensors"))[-1]
    content = bytearray(newest.read_bytes())
    content[-3] ^= 1
    newest.write_bytes(content)
    found = checkpoints.load()
    assert found is not None
    assert found[1]["step"] == 50
    assert newest.name in said[0]
    assert not newest.exists()
    older = sorted(tmp_path.glob("*.safetensors"))[-1]
    older.write_bytes(content[: len(content) // 2])
    assert checkpoints.load() is None
    assert "starts over" in said[1]


def test_a_checkpoint_that_cannot_be_opened_is_not_thrown_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"x": torch.zeros(2)}, {})

    def refuse(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("ciflows.training.checkpoint.safe_open", refuse)
    with pytest.raises(UserError, match="Too many open files"):
        checkpoints.load()
    assert len(list(tmp_path.glob("*.safetensors"))) == 1


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in range(5):
        checkpoints.save(step, {"x": torch.ones(2)}, {"step": step})
    assert [p.name for p in sorted(tmp_path.iterdir())] == [
        "step-000000003.safetensors",
        "step-000000004.safetensors",
    ]


def test_tensors_survive_a_file(tmp_path: Path) -> None:
    save_tensors(tmp_path / "a.safetensors", {"x": torch.arange(3.0).double()}, {"n": 1})
    tensors, facts = load_tensors(tmp_path / "a.safetensors")
    assert tensors["x"].dtype == torch.float64
    assert tensors["x"].tolist() == [0, 1, 2]
    assert facts == {"n": 1}


def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.safetensors"
    save_tensors(path, {"x": torch.ones(2)}, {})

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save_tensors(path, {"x": torch.zeros(2)}, {})
    assert load_tensors(path)[0]["x"].tolist() == [1, 1]
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


class BreaksOnce(ELBO):
    """An objective whose value is not finite at some calls."""

    def __init__(self, calls: range) -> None:
        self.calls, self.count = calls, 0

    def __call__(self, flow: Flow, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        value = super().__call__(flow, x, *args, **kwargs)  # type: ignore[arg-type]
        self.count += 1
        return value * math.nan if self.count - 1 in self.calls else value


def test_non_finite_loss_rolls_back(
    data: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = BreaksOnce(range(70, 71))
    monkeypatch.setattr(TrainingSettings, "make_objective", lambda _: broken)
    flow, listener = small(), Listener()
    outcome = fit_flow(flow, *data, QUICK, monitor=listener)
    assert outcome.steps == 200
    assert len(listener.messages) == 1
    assert "back to step 50" in listener.messages[0]
    assert broken.count == 250
    half = 0.5 * QUICK.learning_rate
    assert all(v["learning_rate"] <= half for step, v in listener.rows if step > 50)
    assert all(p.isfinite().all() for p in flow.parameters())


def test_hopeless_loss_stops_with_the_best_weights(
    data: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = BreaksOnce(range(120, 10**9))
    monkeypatch.setattr(TrainingSettings, "make_objective", lambda _: broken)
    flow = small()
    outcome = fit_flow(flow, *data, QUICK)
    assert outcome.early is not None
    assert "not finite" in outcome.early
    assert "learning_rate" in outcome.early
    score = flow.log_prob(data[1], QUICK.validation_samples, seed=loop.VALIDATION_SEED).mean()
    assert score.item() == pytest.approx(outcome.validation, abs=1e-6)
    assert math.isfinite(outcome.validation)


def test_last_weights_are_kept_where_asked_for(data: tuple[Tensor, Tensor]) -> None:
    """Trained on narrow data, a flow gives wide ones less and less."""
    slow = {"steps": 50, "schedule": "constant", "validate_every": 10}
    narrow, wide = 0.1 * data[0], data[1]
    scores = {}
    for keep in ("best", "last"):
        flow, listener = small("resflow"), Listener()
        settings = QUICK.model_copy(update={**slow, "keep": keep})
        outcome = fit_flow(flow, narrow, wide, settings, monitor=listener)
        heard = [values["validation"] for _, values in listener.rows if "validation" in values]
        assert outcome.validation == (max(heard) if keep == "best" else heard[-1])
        assert max(heard) > heard[-1]
        scores[keep] = flow.log_prob(wide, QUICK.validation_samples, seed=loop.VALIDATION_SEED).mean()
    assert scores["best"].item() == pytest.approx(max(heard), abs=1e-5)
    assert scores["last"].item() == pytest.approx(heard[-1], abs=1e-5)


def test_averaged_weights_are_those_of_the_last_steps(data: tuple[Tensor, Tensor]) -> None:
    """With a decay of 0.5 after three steps: half the last weights, a quarter of those before, ..."""
    flow = small().train()
    step = Step(flow, QUICK.model_copy(update={"average": 0.5}), Noise())
    start = [p.detach().clone() for p in flow.parameters()]
    expected = start
    for _ in range(3):
        step(Rows(data[0][:100]))
        expected = [(e + p.detach()) / 2 for e, p in zip(expected, flow.parameters(), strict=True)]
    last = [p.detach().clone() for p in flow.parameters()]
    with step.averaged():
        pairs = zip(flow.parameters(), expected, strict=True)
        assert all(torch.allclose(p, e, atol=1e-6) for p, e in pairs)
    assert all(torch.equal(p, e) for p, e in zip(flow.parameters(), last, strict=True))


def test_averages_are_kept_and_resumed(
    data: tuple[Tensor, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = QUICK.model_copy(update={"average": 0.9})
    straight = small()
    outcome = fit_flow(straight, *data, settings, seed=5)
    score = straight.log_prob(data[1], QUICK.validation_samples, seed=loop.VALIDATION_SEED).mean()
    assert score.item() == pytest.approx(outcome.validation, abs=1e-5)
    checkpoints = Checkpoints(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(TrainingSettings, "make_objective", lambda _: Interrupted(120))
        with pytest.raises(KeyboardInterrupt):
            fit_flow(small(), *data, settings, seed=5, checkpoints=checkpoints)
    resumed = small()
    fit_flow(resumed, *data, settings, seed=5, checkpoints=checkpoints)
    for name, value in straight.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_weight_decay_makes_weights_smaller(data: tuple[Tensor, Tensor]) -> None:
    sizes = []
    for decay in (0.0, 1.0):
        flow = small("maf")
        fit_flow(flow, *data, QUICK.model_copy(update={"weight_decay": decay}))
        sizes.append(sum(p.square().sum().item() for p in flow.parameters()))
    assert sizes[1] < 0.9 * sizes[0]


def test_validation_looks_at_so_many_points(data: tuple[Tensor, Tensor]) -> None:
    settings = QUICK.model_copy(update={"validation_points": 30})
    training = loop._Training(small(), Rows(data[0]), Rows(data[1]), settings, 0, None, None)
    assert torch.equal(training.validation.x, data[1][:30])


def test_patience_ends_training_with_the_best_weights(data: tuple[Tensor, Tensor]) -> None:
    wild = QUICK.model_copy(
        update={"steps": 5000, "learning_rate": 0.5, "validate_every": 10, "patience": 3}
    )
    flow, listener = small(), Listener()
    outcome = fit_flow(flow, *data, wild, monitor=listener)
    assert outcome.steps < 5000
    assert outcome.early is not None
    assert "no better validation" in outcome.early
    scores = [values["validation"] for _, values in listener.rows if "validation" in values]
    assert outcome.validation == max(scores)
    assert outcome.validation not in scores[-3:]


def test_minutes_end_training(data: tuple[Tensor, Tensor]) -> None:
    settings = QUICK.model_copy(update={"steps": 10**9, "max_minutes": 0.02})
    listener = Listener()
    outcome = fit_flow(small(), *data, settings, monitor=listener)
    assert outcome.early is not None
    assert "minutes are over" in outcome.early
    assert listener.rows[-1][1]["learning_rate"] < 0.1 * settings.learning_rate


def test_clipping_bounds_the_whole_gradient(data: tuple[Tensor, Tensor]) -> None:
    flow = small().train()
    step = Step(flow, QUICK.model_copy(update={"clip": 1e-3}), Noise())
    step(Rows(data[0][:100]))
    total = torch.stack([p.grad.square().sum() for p in flow.parameters() if p.grad is not None])
    assert total.sum().sqrt().item() == pytest.approx(1e-3, rel=1e-2)


def test_the_step_size_rises_at_the_start(data: tuple[Tensor, Tensor]) -> None:
    settings = QUICK.model_copy(update={"warm_up": 3, "schedule": "constant", "learning_rate": 1.0})
    training = loop._Training(small(), Rows(data[0]), Rows(data[1]), settings, 0, None, None)
    rates = []
    for training.progress.step in range(6):
        rates.append(training._rate())
    assert rates == [0.25, 0.5, 0.75, 1, 1, 1]


def test_last_rows_are_not_lost_between_passes(data: tuple[Tensor, Tensor]) -> None:
    settings = QUICK.model_copy(update={"batch_size": 300})
    training = loop._Training(small(), Rows(data[0]), Rows(data[1]), settings, 0, None, None)
    seen = torch.cat([training.batches.of_step(step).x for step in range(30)])
    assert len({tuple(row) for row in seen.tolist()}) == len(data[0])


def test_interrupted_write_is_not_mistaken_for_a_checkpoint(
    data: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path)
    fit_flow(small(), *data, QUICK.model_copy(update={"steps": 50}), checkpoints=checkpoints)
    only = next(tmp_path.glob("*.safetensors"))
    shutil.copy(only, tmp_path / ".step-000000099.safetensors.1.tmp")
    found = checkpoints.load()
    assert found is not None
    assert found[1]["step"] == 50


def test_resume_on_another_kind_of_device_goes_on(data: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    checkpoints, listener = Checkpoints(tmp_path), Listener()
    fit_flow(small(), *data, QUICK.model_copy(update={"steps": 100}), checkpoints=checkpoints)
    tensors, facts = load_tensors(sorted(tmp_path.glob("*.safetensors"))[-1])
    tensors["generator"] = torch.zeros(16, dtype=torch.uint8)
    checkpoints.save(100, tensors, facts)
    outcome = fit_flow(small(), *data, QUICK, checkpoints=checkpoints, monitor=listener)
    assert outcome.steps == 200
    assert "another device" in listener.messages[0]


def test_checkpoint_of_another_model_is_refused(data: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    fit_flow(small("resflow"), *data, QUICK.model_copy(update={"steps": 50}), checkpoints=checkpoints)
    with pytest.raises(UserError, match="another model"):
        fit_flow(small(), *data, QUICK, checkpoints=checkpoints)


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def plain_and_fast(
    make_flow: Callable[[], Flow], settings: TrainingSettings, points: Tensor
) -> tuple[Step, Step]:
    """The plain step and the fastest one of two equal flows, which had equal losses in ten steps."""
    batch = Rows(points.cuda())
    losses, steps = [], []
    for fast in (False, True):
        flow = make_flow().cuda().train()
        flow.initialise(batch.x, noise=Noise.seeded(1, "cuda"))
        noise = Noise.seeded(0, "cuda")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step = make_step(flow, settings, noise, batch) if fast else Step(flow, settings, noise)
        losses.append([step(batch).item() for _ in range(10)])
        steps.append(step)
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    return steps[0], steps[1]


@needs_cuda
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")  # of cnf
@pytest.mark.parametrize(
    "name", sorted(name for name, model in MODELS.items() if model.takes == "vectors")
)
@pytest.mark.parametrize("objective", ["elbo", "dreg"])
def test_captured_step_equals_the_plain_one(
    objective: str, name: str, data: tuple[Tensor, Tensor]
) -> None:
    update = {"objective": objective, "draws": 3, "precision": "float32"}
    settings = QUICK.model_copy(update=update)
    sizes = {key: value for key, value in SMALL.items() if key in MODELS[name].settings.model_fields}

    def make_flow() -> Flow:
        return ciflows.build_model(name, features=2, seed=3, **sizes)  # type: ignore[arg-type]

    fast = plain_and_fast(make_flow, settings, data[0][:100])[1]
    assert type(fast) is (Step if name.removeprefix("cif-") in NOT_CAPTURED else CapturedStep)


@needs_cuda
def test_captured_step_equals_the_plain_one_under_muon(data: tuple[Tensor, Tensor]) -> None:
    settings = QUICK.model_copy(update={"optimizer": "muon", "precision": "float32"})
    fast = plain_and_fast(lambda: small(hidden=[32, 32]), settings, data[0][:100])[1]
    assert isinstance(fast, CapturedStep)


@needs_cuda
def test_captured_step_equals_the_plain_one_where_series_end_at_random(
    data: tuple[Tensor, Tensor],
) -> None:
    settings = QUICK.model_copy(update={"precision": "float32"})
    fast = plain_and_fast(lambda: small(log_det="roulette"), settings, data[0][:100])[1]
    assert isinstance(fast, CapturedStep)
    assert len(fast.graphs) > 1


@needs_cuda
def test_captured_gradient_is_the_plain_one_in_every_step(data: tuple[Tensor, Tensor]) -> None:
    """What is computed beside the layers reads nothing that they write over, and is waited for."""
    update = {"objective": "dreg", "precision": "float32", "learning_rate": 1e-12, "clip": math.inf}
    settings, batch = QUICK.model_copy(update=update), Rows(data[0].cuda())
    flows = [small(layers=6, hidden=[64, 64]).cuda().train() for _ in range(2)]
    noises = [Noise.seeded(0, "cuda") for _ in flows]
    plain, fast = Step(flows[0], settings, noises[0]), CapturedStep(flows[1], settings, noises[1], batch)
    for seed in range(20):
        gradients = []
        for flow, noise, step in zip(flows, noises, (plain, fast), strict=True):
            assert noise.generator is not None
            noise.generator.manual_seed(seed)
            step(batch)
            gradients.append(
                torch.cat([p.grad.flatten() for p in flow.parameters() if p.grad is not None])
            )
        assert (gradients[0] - gradients[1]).norm() < 1e-3 * gradients[0].norm()


def fixed_numbers(self: Noise, shape: Sequence[int], like: Tensor) -> Tensor:
    """The same numbers in every call and on every device."""
    places = torch.arange(math.prod(shape), dtype=like.dtype, device=like.device)
    return torch.sin(7 * places).reshape(tuple(shape))


@needs_cuda
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of torch's compiler
@pytest.mark.parametrize("objective", ["elbo", "dreg"])
def test_captured_gradient_on_a_gpu_is_the_plain_one_on_a_cpu(
    objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With flows for prior, posterior and base, and a context: all that streams and caches touch."""
    monkeypatch.setattr(Noise, "normal", fixed_numbers)
    update = {"objective": objective, "draws": 3, "precision": "float32", "clip": math.inf}
    settings = QUICK.model_copy(update=update)
    generator = torch.Generator().manual_seed(0)
    x, context = (torch.randn(50, size, generator=generator) for size in (2, 1))

    def make() -> Flow:
        first = Indexed(affine(2, 2), Flow([spline(1, 3)]), Flow([spline(1, 3)]), context_shape=(1,))
        fused = Indexed(affine(2, 1, layers=2), normal(1, 2, layers=2), normal(1, 2, layers=2))
        inner = Flow([residual(2), LULinear(2), fused])
        return generic(Flow([first, LULinear(2)], inner)).float()

    flows = make(), make().cuda()
    steps = (
        Step(flows[0].train(), settings, Noise()),
        CapturedStep(flows[1].train(), settings, Noise(), Rows(x, context).to("cuda")),
    )
    losses = [
        step(Rows(x, context).to(flow.device)).item() for step, flow in zip(steps, flows, strict=True)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    for one, other in zip(*(flow.parameters() for flow in flows), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert_close(other.grad.cpu(), one.grad, rtol=1e-2, atol=1e-4)


def test_blocks_of_a_step_share_how_many_terms_there_are(
    data: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    geometric = Noise.geometric

    def listen(self: Noise, p: float) -> int:
        asked.append(geometric(self, p))
        return asked[-1]

    monkeypatch.setattr(Noise, "geometric", listen)
    flow = small(log_det="roulette").train()
    step = Step(flow, QUICK.model_copy(update={"objective": "elbo"}), Noise.seeded(0))
    shared = []
    for _ in range(20):
        asked.clear()
        step(Rows(data[0][:10]))
        assert len(asked) > 2
        assert len(set(asked)) == 1
        shared.append(asked[0])
    assert len(set(shared)) > 1


def test_training_that_comes_to_nothing_says_so(
    data: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainingSettings, "make_objective", lambda _: BreaksOnce(range(10**9)))
    outcome = fit_flow(small(), *data, QUICK)
    assert outcome.validation == -math.inf
    assert outcome.rollbacks == loop.MOST_ROLLBACKS + 1


def test_rows_that_would_fill_a_gpu_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, flow = Rows(torch.zeros(10, 2)), types.SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (rows.x.nbytes, 0))
    assert batches._placed(rows, flow) is rows  # type: ignore[arg-type]


@pytest.mark.parametrize(("hidden", "expected"), [(8, 1), (256, 2)])
def test_small_steps_take_one_thread(hidden: int, expected: int) -> None:
    """Threads that wait for each other gain nothing; afterwards there are as many as before."""
    flow, seen = ciflows.build_model("maf", features=2, layers=2, hidden=[hidden, hidden]), set()

    def clock() -> float:
        seen.add(torch.get_num_threads())
        return 0.0

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        x = torch.randn(400, 2)
        settings = TrainingSettings(steps=2, batch_size=400, objective="elbo")
        fit_flow(flow, x, x, settings, clock=clock)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen == {expected}

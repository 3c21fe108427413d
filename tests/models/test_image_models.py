"""Models of images: each trains, scores, samples and comes back; their runs, from folder to report."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from PIL import Image
from torch import Tensor

from ciflows import Flow, Indexed, Run, build_model, load_run
from ciflows.core.evaluate import rows_at_once
from ciflows.core.noise import Noise
from ciflows.core.rows import Rows
from ciflows.datasets import Dataset
from ciflows.diagnostics import reconstruction_error
from ciflows.errors import UserError
from ciflows.layers import BatchNorm, Residual, Series
from ciflows.layers.dequantise import Dequantise
from ciflows.models import MODELS
from ciflows.pixels import image_grid, png
from ciflows.runs.assemble import build_flow
from ciflows.runs.config import resolve
from ciflows.runs.fit import fit, resume
from ciflows.runs.metrics import estimate_rows, evaluate
from ciflows.training import TrainingSettings, fit_flow
from ciflows.training import monitor as monitor_module
from ciflows.training.image_monitor import ImageMonitor
from ciflows.training.loop import _Training

IMAGES = sorted(name for name, model in MODELS.items() if model.takes == "images")
REALNVP = {"blocks": 1, "channels": 4}
RESFLOW = {"scales": 2, "layers": 1, "channels": 4, "flat_layers": 1, "flat_hidden": [8]}
INDEX = {"affine_blocks": 1, "affine_channels": 4, "index_blocks": 1, "index_channels": 4}
PNG = b"\x89PNG\r\n\x1a\n"


def sizes(name: str) -> dict[str, Any]:
    own = REALNVP if "realnvp" in name else RESFLOW
    return own | (INDEX if name.startswith("cif-") else {})


def small(name: str, shape: tuple[int, int, int] = (1, 8, 8), **settings: Any) -> Flow:
    return build_model(name, shape=shape, seed=1, **(sizes(name) | settings))


def stripes(n: int, height: int = 8, width: int = 8, seed: int = 0) -> Tensor:
    """Dark images with one bright row, as bytes."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(20, 40, (n, 1, height, width), generator=generator)
    images[torch.arange(n), 0, torch.randint(height, (n,), generator=generator)] += 180
    return images.to(torch.uint8)


def dataset(n: int, **size: int) -> Dataset:
    parts = [stripes(part, seed=seed, **size) for seed, part in enumerate((n, n // 4, n // 4))]
    return Dataset("stripes", *parts, (), 0, "0", None)  # type: ignore[arg-type]


# -- models -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings"),
    [*((name, {}) for name in IMAGES), ("realnvp-image", {"dequantise": "variational"})],
)
def test_model_trains_scores_samples_and_comes_back(name: str, settings: dict[str, Any]) -> None:
    images = stripes(250)
    flow = small(name, **settings)
    assert not flow.exact
    held_out = images[200:].float()
    before = flow.eval().log_prob(held_out, 3, seed=0).mean()
    training = TrainingSettings(
        steps=12, batch_size=40, validate_every=12, learning_rate=0.01, objective="elbo"
    )
    fit_flow(flow, images[:200], images[200:], training)
    after = flow.log_prob(held_out, 3, seed=0)
    assert after.mean() > before + 5
    assert after.mean() < 0
    samples = flow.sample(20, seed=0)
    assert samples.shape == (20, 1, 8, 8)
    assert torch.equal(samples, samples.round())
    assert reconstruction_error(flow.double(), held_out.double()) < 1e-6


@pytest.mark.parametrize("name", IMAGES)
def test_every_parameter_learns(name: str) -> None:
    """Not at the start, where couplings are the identity and their inner weights get no gradient."""
    flow = small(name, dequantise="variational").double()
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    flow.log_weight(stripes(10).double()).mean().backward()
    without = [key for key, p in flow.named_parameters() if p.grad is None or not p.grad.any()]
    assert not without


def test_noise_is_learned_for_images_of_odd_sizes_too() -> None:
    flow = build_model("resflow-image", shape=(1, 5, 7), scales=1, dequantise="variational")
    images = torch.randint(256, (4, 1, 5, 7)).float()
    assert flow.eval().log_prob(images, 2).isfinite().all()


@pytest.mark.parametrize("name", [name for name in IMAGES if name.startswith("cif-")])
def test_an_index_learns_from_the_first_step(name: str) -> None:
    """All of p(u|z), q(u|x), s and t: with all of them at 0 nothing would tie u to x."""
    flow = small(name).double()
    layers = [layer for layer in flow.layers if isinstance(layer, Indexed)]
    assert len(layers) == (10 if "realnvp" in name else 1 + 2 + 1)
    flow.log_weight(stripes(10).double()).mean().backward()
    for layer in layers:
        assert layer.prior.shape == (1, *layer.shape[1:])
        without = [key for key, p in layer.named_parameters() if p.grad is None or not p.grad.any()]
        assert not without


def test_realnvp_is_that_of_dinh() -> None:
    flow = small("realnvp-image", (3, 8, 8))
    kinds = [(type(layer).__name__, layer.noise_shape) for layer in flow.layers]
    couplings = [shape for kind, shape in kinds if kind == "Coupling"]
    assert couplings == [(3, 8, 8)] * 3 + [(12, 4, 4)] * 3 + [(6, 4, 4)] * 4
    assert [kind for kind, _ in kinds if kind in ("Squeeze", "Split")] == ["Squeeze", "Split"]
    plain, indexed = (
        next(layer for layer in small(name).layers if isinstance(layer, BatchNorm))
        for name in ("realnvp-image", "cif-realnvp-image")
    )
    assert list(plain.parameters())
    assert not list(indexed.parameters())


def test_blocks_of_large_images_have_series_of_their_own() -> None:
    flow = small("resflow-image", (1, 12, 12), probes=8)
    series = [block.log_det for block in flow.modules() if isinstance(block, Residual)]
    assert all(isinstance(one, Series) and len(one.numbers) == 8 for one in series)
    assert len({one.seed for one in series if isinstance(one, Series)}) == len(series) == 3
    assert flow.train().noisy
    assert not flow.eval().noisy
    assert not small("resflow-image", (1, 12, 12), log_det="series").train().noisy


def test_kinds_that_do_not_go_together_are_refused() -> None:
    message = r"cif-resflow takes vectors, and the data are images of size 1×8×8\. .*cif-resflow-image"
    with pytest.raises(UserError, match=message):
        build_model("cif-resflow", shape=(1, 8, 8))
    with pytest.raises(
        UserError, match=r"realnvp-image takes images, and the data are vectors .*realnvp"
    ):
        build_model("realnvp-image", features=4)
    with pytest.raises(UserError, match="takes no context"):
        build_model("realnvp-image", shape=(1, 8, 8), context_features=2)
    for wrong in ({}, {"features": 2, "shape": (2,)}, {"shape": (2, 2)}, {"features": 0}):
        with pytest.raises(UserError, match=r"features|shape"):
            build_model("maf", **wrong)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="multiples of 4; got 6 and 8"):
        build_model("resflow-image", shape=(1, 6, 8))


def test_a_shape_of_one_number_is_features() -> None:
    first, second = build_model("maf", features=3), build_model("maf", shape=(3,))
    assert all(map(torch.equal, first.parameters(), second.parameters()))


def test_few_images_are_pushed_through_at_once() -> None:
    cpu = torch.device("cpu")
    assert rows_at_once((1, 28, 28), cpu) == 83
    assert rows_at_once((3, 32, 32), cpu) == 64
    assert rows_at_once((3, 1000, 1000), cpu) == 1


def test_training_images_stay_bytes() -> None:
    flow, images = small("realnvp-image"), stripes(20)
    rows = Rows(images)
    training = _Training(flow, rows, rows, TrainingSettings(batch_size=4), 0, None, None)
    assert training.batches.rows.x.dtype == torch.uint8
    assert training.batches.of_step(0).x.dtype == torch.float32


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", [name for name in IMAGES if "realnvp" in name])
def test_captured_step_equals_the_plain_one(name: str) -> None:
    from ciflows.speed.capture import CapturedStep
    from ciflows.training.step import Step

    batch, losses = Rows(stripes(40).cuda().float()), []
    for kind in (Step, CapturedStep):
        flow = small(name).cuda().train()
        noise = Noise(torch.Generator("cuda").manual_seed(0))
        settings = TrainingSettings(objective="elbo", learning_rate=1e-3)
        step = (
            Step(flow, settings, noise) if kind is Step else CapturedStep(flow, settings, noise, batch)
        )
        losses.append([step(batch).item() for _ in range(5)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


# -- likelihoods ------------------------------------------------------------------------------------


def test_bits_per_dimension_are_those_of_the_integers() -> None:
    """A flow whose only layer dequantises, over N(0, I): P(x) is a product of Φ(x + 1) - Φ(x)."""
    flow = Flow([Dequantise((1, 2, 2), levels=2)])
    data = Dataset("bits", *[torch.randint(0, 2, (50, 1, 2, 2)).byte()] * 3, (), 0, "0", None)  # type: ignore[arg-type]
    config = resolve("bits", "realnvp-image", layers=[{"evaluation": {"samples": 4000}}])
    metrics = evaluate(flow, data, config).metrics
    ends = torch.special.ndtr(torch.arange(3.0))
    log_p = torch.log(ends[1:] - ends[:-1])[data.test.long()].sum((1, 2, 3))
    bits = -log_p / (4 * math.log(2))
    assert metrics["bits_per_dim"] == pytest.approx(bits.mean().item(), abs=2e-3)
    error = bits.std().item() / math.sqrt(50)
    assert metrics["bits_per_dim_std_error"] == pytest.approx(error, abs=1e-3)
    assert metrics["test"]["log_prob"] == pytest.approx(log_p.mean().item(), abs=5e-3)
    assert metrics["log_det"] is None


def test_some_test_points_are_spread_over_all_of_them() -> None:
    data, flow = dataset(40), small("realnvp-image").eval()
    layers = [{"evaluation": {"samples": 2, "points": 4}}]
    metrics = evaluate(flow, data, resolve("stripes", "realnvp-image", layers=layers)).metrics
    chosen = data.test[[0, 2, 5, 7]].float()
    assert metrics["test"]["points"] == 4
    assert metrics["test"]["log_prob"] == pytest.approx(
        estimate_rows(flow, Rows(chosen), 2, seed=0).log_prob.double().mean().item()
    )


def test_estimated_log_determinants_are_told_with_their_error() -> None:
    data, flow = dataset(16, height=12, width=12), small("resflow-image", (1, 12, 12)).eval()
    config = resolve("stripes", "resflow-image", layers=[{"evaluation": {"samples": 2}}])
    error = evaluate(flow, data, config).metrics["log_det"]
    assert error.keys() == {"std_error", "bias", "bias_error", "truncation"}
    assert 0 < error["std_error"] < 1


# -- runs -------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CIFLOWS_CACHE", str(tmp_path / "cache"))


def write_folder(folder: Path, images: Tensor) -> Path:
    folder.mkdir()
    for index, image in enumerate(images):
        Image.fromarray(image[0].numpy()).save(folder / f"{index:03d}.png")
    return folder


def settings(name: str, steps: int, **architecture: Any) -> dict[str, Any]:
    return {
        "architecture": sizes(name) | architecture,
        "training": {"steps": steps, "batch_size": 20, "validate_every": 5},
        "evaluation": {"samples": 3},
    }


def words(values: dict[str, Any]) -> list[str]:
    pairs = [(f"{s}.{key}", value) for s, keys in values.items() for key, value in keys.items()]
    return [word for key, value in pairs for word in ("--set", f"{key}={value}")]


@pytest.mark.parametrize("name", ["realnvp-image", "cif-realnvp-image"])
def test_probabilities_of_a_trained_run_sum_to_one(name: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 2, (60, 1, 2, 2), generator=generator)
    bits[:, :, 1] = bits[:, :, 0]
    folder = write_folder(tmp_path / "bits", bits.byte())
    values = settings(name, 30, levels=2, alpha=1e-5)
    values["training"] |= {"learning_rate": 0.02}
    fit(resolve(str(folder), name, layers=[values]), tmp_path / "run")
    run = load_run(tmp_path / "run")
    every = torch.cartesian_prod(*[torch.arange(2.0)] * 4).reshape(16, 1, 2, 2)
    estimate = run.estimate(every, samples=40_000, seed=0)
    p = estimate.log_prob.double().exp()
    assert p.sum().item() == pytest.approx(1, abs=0.02)
    likely = (every[:, :, 0] == every[:, :, 1]).all(-1).flatten()
    assert p[likely].sum() > 4 / 16 + 0.1
    drawn = run.sample(2000, seed=0)
    same = (drawn[:, 0, 0] == drawn[:, 0, 1]).all(-1).double().mean()
    assert same.item() == pytest.approx(p[likely].sum().item(), abs=0.05)
    with pytest.raises(UserError, match="but with levels = 2 the largest is 1"):
        build_flow(
            resolve(str(folder), name, layers=[settings(name, 3, levels=2)]),
            run.dataset()._replace(train=stripes(5, 2, 2)),
        )


def test_an_interrupted_run_of_images_ends_as_it_would_have(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "stripes", stripes(60))
    name = "cif-resflow-image"
    config = resolve(str(folder), name, layers=[settings(name, 15)])
    fit(config, tmp_path / "whole")

    def interrupt(step: int, score: float) -> None:
        if step == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(config, tmp_path / "cut", on_validation=interrupt)
    resume(tmp_path / "cut")
    whole, cut = ((tmp_path / run / "weights.safetensors").read_bytes() for run in ("whole", "cut"))
    assert whole == cut
    names = [f"step-{step:06d}.png" for step in (5, 10, 15)]
    for run in ("whole", "cut"):
        assert sorted(path.name for path in (tmp_path / run / "samples").iterdir()) == names
    pictures = [(tmp_path / run / "samples" / names[-1]).read_bytes() for run in ("whole", "cut")]
    assert pictures[0] == pictures[1]
    assert pictures[0].startswith(PNG)


def test_from_a_folder_to_scores_samples_and_a_report(
    command: Callable[..., str], tmp_path: Path
) -> None:
    write_folder(tmp_path / "pictures", stripes(50))
    name = "cif-realnvp-image"
    text = command("fit", "pictures", *words(settings(name, 10)), "--out", "run")
    assert name in text
    assert "bits/dim" in text
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    nats = metrics["test"]["log_prob"]
    assert metrics["bits_per_dim"] == pytest.approx(-nats / (64 * math.log(2)))
    report = (tmp_path / "run" / "report.html").read_text()
    for expected in ("bits per dimension", "36 samples", "Reconstruction", "Images of 8×8 pixels, grey"):
        assert expected in report
    assert "Marginals" not in report
    assert len(list((tmp_path / "run" / "samples").iterdir())) == 2
    events = next((tmp_path / "run" / "tensorboard").iterdir()).read_bytes()
    assert b"samples" in events
    text = command("score", "run", "pictures", "--samples", "2")
    assert "over 50 rows" in text
    assert "bits per dimension" in text
    scores = pl.read_csv(tmp_path / "scores.csv")
    assert len(scores) == 50
    assert np.allclose(scores["bits_per_dim"], -scores["log_prob"] / (64 * np.log(2)), atol=1e-5)
    assert "samples.png" in command("sample", "run", "-n", "16")
    with Image.open(tmp_path / "samples.png") as grid:
        assert grid.size == (16 * 37, 16 * 37)
    command("sample", "run", "-n", "5", "--out", "some.npy", "--temperature", "0.5")
    drawn = np.load(tmp_path / "some.npy")
    assert (drawn.shape, drawn.dtype) == ((5, 1, 8, 8), np.uint8)
    for given, expected in [
        (["sample", "run", "--out", "x.csv"], ".png or .npy"),
        (
            ["score", "run", "two-uniforms", "--out", "x.csv"],
            "have size 2; the run was trained on 1×8×8",
        ),
        (["score", "run", "people.csv", "--out", "x.csv"], "give a folder of images"),
        (["fit", "pictures", "--model", "maf"], "maf takes vectors"),
        (["fit", "two-uniforms", "--model", "realnvp-image"], "realnvp-image takes images"),
        (
            ["fit", "pictures", "--model", name, "--set", "levels=2"],
            "but with levels = 2 the largest is 1",
        ),
        (["report", "run", "--out", "x.png"], "two features"),
    ]:
        assert expected in command(*given, code=1)
    write_folder(tmp_path / "wide", stripes(3, width=10))
    assert "size 1×8×10" in command("score", "run", "wide", "--out", "x.csv", code=1)


def test_a_run_over_vectors_refuses_images(tmp_path: Path) -> None:
    from rich.console import Console

    from ciflows.runs.score import ScoreSettings, score_data

    values = {"training": {"steps": 1}, "architecture": {"layers": 1, "hidden": [4]}}
    run: Run = fit(resolve("annulus", "maf", layers=[values]), tmp_path / "run")
    write_folder(tmp_path / "some", stripes(12))
    with pytest.raises(UserError, match="folder"):
        score_data(
            run.path, str(tmp_path / "some"), tmp_path / "x.csv", ScoreSettings(1), "cpu", Console()
        )


def test_settings_that_suit_images_are_their_defaults(command: Callable[..., str]) -> None:
    config = resolve("mnist", "cif-realnvp-image")
    assert (config.training.objective, config.training.batch_size) == ("elbo", 64)
    assert resolve("annulus", "maf").training.batch_size == 1000
    over = resolve("mnist", "realnvp-image", layers=[{"training": {"batch_size": 7}}])
    assert over.training.batch_size == 7
    text = command("models", "realnvp-image")
    assert [line for line in text.splitlines() if "batch_size" in line and "64" in line]
    with pytest.raises(UserError, match="objective=elbo"):
        resolve("mnist", "resflow-image", layers=[{"training": {"objective": "dreg"}}])


def test_progress_tells_images_a_second(tmp_path: Path) -> None:
    from rich.console import Console

    flow = small("realnvp-image").train()
    monitor = ImageMonitor(tmp_path, Console(quiet=True), "x", flow, stripes(3), 40, 256)
    monitor.begin(0, 100, 0.0)

    def rate() -> str:
        return str(monitor.progress.tasks[0].fields["rate"])

    for step, seconds, shown in [
        (50, 10.0, ""),
        (60, 12.0, "200 images/s"),
        (70, 52.0, "10.0 images/s"),
    ]:
        monitor.record(step, {"loss": 1.0, "seconds": seconds}, step / 100)
        assert rate() == shown
    monitor.record(80, {"loss": 1.0, "seconds": 53.0, "validation": 0.0}, 0.8)
    assert rate() == "400 images/s"
    monitor.record(90, {"loss": 1.0, "seconds": 99.0}, 0.9)
    assert rate() == "400 images/s"
    monitor.end()
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["step-000080.png"]
    assert monitor.flow.training
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (error,) = events.Scalars("reconstruction error, in levels of a pixel")
    assert error.step == 80
    assert 0 < error.value < 0.1


# -- samples ----------------------------------------------------------------------------------------


def test_a_grid_has_every_image_in_its_place() -> None:
    images = torch.arange(5.0).reshape(5, 1, 1, 1).expand(5, 1, 3, 2) * 60
    grid = image_grid(images)
    assert grid.shape == (1, 2 * 4 + 1, 3 * 3 + 1)
    assert grid[0, 1, [1, 4, 7]].tolist() == [0, 60, 120]
    assert grid[0, 5, [1, 4, 7]].tolist() == [180, 240, 128]
    assert image_grid(torch.tensor([-20.0, 300.0]).reshape(2, 1, 1, 1)).unique().tolist() == [
        0,
        128,
        255,
    ]
    assert image_grid(torch.ones(1, 1, 1, 1), levels=2).max() == 255
    assert image_grid(torch.zeros(4, 3, 2, 2)).shape[0] == 3
    assert png(grid).startswith(PNG)


def test_a_temperature_scales_all_normal_numbers() -> None:
    flow = Flow([Dequantise((1, 1, 1))])
    assert flow.sample(1000, seed=0, temperature=1e-3).add(0.5).abs().max() == 0.5
    cool, warm = (small("cif-realnvp-image").eval().sample(50, seed=0, temperature=t) for t in (0.1, 1))
    assert cool.std(0).mean() < 0.5 * warm.std(0).mean()
    same = small("realnvp-image").eval()
    assert torch.equal(same.sample(3, seed=0), same.sample(3, seed=0, temperature=1.0))


def test_training_without_pillow_draws_no_pictures_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Console

    monkeypatch.setitem(sys.modules, "PIL", None)
    flow, console = small("realnvp-image").train(), Console(quiet=True)
    with pytest.warns(UserWarning, match=r"No pictures of samples: PIL is not installed\. Run: pip"):
        monitor = ImageMonitor(tmp_path, console, "x", flow, stripes(3), 40, 256)
    monkeypatch.setattr(monitor_module, "_curves", lambda *_: None)
    monitor.begin(0, 100, 0.0)
    monitor.record(10, {"loss": 1.0, "seconds": 1.0, "validation": 0.0}, 0.1)
    monitor.end()
    assert not (tmp_path / "samples").exists()

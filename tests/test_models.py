"""Models by name: each builds, trains, scores and samples, plain and with an index, given or not."""

from __future__ import annotations

import math

import pytest
import torch

from ciflows import Flow, build_model
from ciflows.data import SYNTHETIC
from ciflows.errors import UserError
from ciflows.models import MODELS
from ciflows.training import TrainingSettings, fit_flow


def small(name: str, features: int = 2, context_features: int = 0) -> Flow:
    return build_model(
        name, features=features, context_features=context_features, layers=2, hidden=[16], seed=1
    )


@pytest.mark.parametrize("name", sorted(MODELS))
def test_model_trains_scores_and_samples(name: str) -> None:
    points = SYNTHETIC["split-gaussian"].sample(1200, seed=0)
    flow = small(name)
    assert flow.exact == (not name.startswith("cif-"))
    before = flow.eval().log_prob(points[1000:], 20, seed=0).mean()
    settings = TrainingSettings(steps=60, batch_size=200, validate_every=30, learning_rate=0.01, draws=2)
    fit_flow(flow, points[:1000], points[1000:], settings)
    after = flow.log_prob(points[1000:], 20, seed=0)
    assert after.mean() > before + 0.2
    samples = flow.sample(500, seed=0)
    assert samples.shape == (500, 2)
    assert (samples.mean(0) - points.mean(0)).abs().max() < 0.6


@pytest.mark.parametrize("name", sorted(MODELS))
def test_model_takes_a_context(name: str) -> None:
    flow, x, context = small(name, 2, 3).eval(), torch.randn(5, 2), torch.randn(5, 3)
    first = flow.log_prob(x, 50, context=context, seed=0)
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    moved = flow.log_prob(x, 50, context=context + 1, seed=0)
    assert first.shape == moved.shape == (5,)
    assert not torch.allclose(moved, flow.log_prob(x, 50, context=context, seed=0))
    assert flow.sample(4, context=context, seed=0).shape == (4, 5, 2)


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"maf", "realnvp"}))
def test_one_column_is_no_mere_gaussian(name: str) -> None:
    """Two far modes, of entropy log 2 + log sd + (1 + log 2π)/2; a Gaussian would be far off."""
    generator = torch.Generator().manual_seed(0)
    signs = 2.0 * torch.randint(0, 2, (1500, 1), generator=generator) - 1
    points = 2 * signs + 0.3 * torch.randn(1500, 1, generator=generator)
    flow = build_model(name, features=1, layers=3, hidden=[16, 16], seed=0)
    settings = TrainingSettings(steps=250, batch_size=250, validate_every=50, learning_rate=0.01)
    score = fit_flow(flow, points[:1000], points[1000:], settings).validation
    gaussian = -math.log(points.std().item()) - 0.5 * math.log(2 * math.pi * math.e)
    assert score > gaussian + 0.2


@pytest.mark.parametrize("name", ["maf", "realnvp"])
def test_one_column_is_refused_where_it_would_be_a_gaussian(name: str) -> None:
    with pytest.raises(UserError, match="nothing but a Gaussian"):
        small(name, features=1)


@pytest.mark.parametrize("name", ["nsf", "cif-nsf"])
def test_splines_stay_finite_beyond_their_bound(name: str) -> None:
    flow = small(name).eval()
    far = torch.tensor([[1e4, -1e4], [5.0, -5.0], [0.0, 1e6]])
    assert flow.log_weight(far).isfinite().all()
    flow.log_weight(far).sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in flow.parameters())


def test_parameters_are_as_many_as_the_papers() -> None:
    """The 2-D MAF comparison of the supplement: 160,080 (printed there as 160,160) and 119,910."""
    plain = build_model("maf", features=2, layers=20, hidden=[50] * 4)
    nets = {"affine_hidden": [10, 10], "prior_hidden": [50] * 4, "posterior_hidden": [50] * 4}
    indexed = build_model("cif-maf", features=2, layers=5, hidden=[50] * 4, **nets)
    assert sum(p.numel() for p in plain.parameters()) == 160_080
    assert sum(p.numel() for p in indexed.parameters()) == 119_910


def test_seed_alone_decides_the_parameters() -> None:
    torch.manual_seed(5)
    first = build_model("cif-nsf", features=3, seed=7, layers=2)
    torch.manual_seed(6)
    again, other = (build_model("cif-nsf", features=3, seed=seed, layers=2) for seed in (7, 8))
    pairs = zip(first.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(next(first.parameters()), next(other.parameters()))


def test_unknown_names_are_met_with_the_nearest() -> None:
    with pytest.raises(UserError, match="cif-maf"):
        build_model("cif-mef", features=2)
    with pytest.raises(UserError, match="Did you mean bins"):
        build_model("nsf", features=2, bin=3)

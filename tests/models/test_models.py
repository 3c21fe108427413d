"""Models by name: each builds, trains, scores and samples, plain and with an index, given or not."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence

from ciflows import Flow, Indexed, build_model
from ciflows.core.density import ConditionalNormal
from ciflows.core.noise import Noise
from ciflows.datasets import SYNTHETIC
from ciflows.diagnostics import round_trip
from ciflows.errors import UserError
from ciflows.layers import Affine, Residual, Roulette
from ciflows.layers.mixture import Mixture
from ciflows.models import MODELS
from ciflows.networks import LipschitzMLP
from ciflows.training import TrainingSettings, fit_flow
from constructors import generic

SIZES = {"layers": 2, "hidden": [16], "scalar_hidden": [16], "components": 3, "tolerance": 1e-3}
SIZES |= {f"{key}_hidden": [16] for key in ("affine", "prior", "posterior", "gate")}
VECTORS = {name for name, model in MODELS.items() if model.takes == "vectors"}
EXACT = {name for name in VECTORS if not name.startswith("cif-")} - {"vae"}


def small(name: str, features: int = 2, context_features: int = 0, **settings: Any) -> Flow:
    fields = MODELS[name].settings.model_fields
    sizes = {key: value for key, value in SIZES.items() if key in fields} | settings
    return build_model(name, features=features, context_features=context_features, seed=1, **sizes)


@pytest.mark.filterwarnings("ignore:.*could not be inverted")
@pytest.mark.parametrize("name", sorted(VECTORS))
def test_model_trains_scores_and_samples(name: str) -> None:
    points = SYNTHETIC["split-gaussian"].sample(1200, seed=0)
    flow = small(name)
    assert flow.exact == (name in EXACT)
    before = flow.eval().log_prob(points[1000:], 20, seed=0).mean()
    settings = TrainingSettings(steps=60, batch_size=200, validate_every=30, learning_rate=0.01, draws=2)
    fit_flow(flow, points[:1000], points[1000:], settings)
    after = flow.log_prob(points[1000:], 20, seed=0)
    assert after.mean() > before + 0.2
    samples = flow.sample(500, seed=0)
    assert samples.shape == (500, 2)
    assert (samples.mean(0) - points.mean(0)).abs().max() < 0.6


@pytest.mark.filterwarnings("ignore:.*could not be inverted")
@pytest.mark.parametrize("name", sorted(VECTORS))
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


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name.endswith("cnf") else ())
        for name in sorted(VECTORS - {"maf", "realnvp"})
    ],
)
def test_one_column_is_no_mere_gaussian(name: str) -> None:
    """Two far modes, of entropy log 2 + log sd + (1 + log 2π)/2; a Gaussian would be far off."""
    fields = MODELS[name].settings.model_fields
    generator = torch.Generator().manual_seed(0)
    signs = 2.0 * torch.randint(0, 2, (1500, 1), generator=generator) - 1
    points = 2 * signs + 0.3 * torch.randn(1500, 1, generator=generator)
    larger = {"layers": 3, "hidden": [16, 16], "scalar_hidden": [32, 32]}
    flow = small(name, 1, **{key: value for key, value in larger.items() if key in fields})
    # unaf integrates each row's map numerically, and is there in fewer steps
    steps, size = (60, 100) if name.endswith("unaf") else (250, 250)
    settings = TrainingSettings(
        steps=steps, batch_size=size, validate_every=50, validation_samples=5, learning_rate=0.01
    )
    score = fit_flow(flow, points[:1000], points[1000:1200], settings).validation
    gaussian = -math.log(points.std().item()) - 0.5 * math.log(2 * math.pi * math.e)
    assert score > gaussian + 0.2


@pytest.mark.parametrize("name", ["maf", "realnvp"])
def test_one_column_is_refused_where_it_would_be_a_gaussian(name: str) -> None:
    with pytest.raises(UserError, match="only a Gaussian"):
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


def test_a_vae_is_a_cif() -> None:
    """Section 4.3: one indexed layer with u ~ N(0, I) has the ELBO of the VAE with that decoder."""
    flow = generic(small("vae", features=3, index_features=2), size=0.2)
    layer = flow.layers[0]
    assert isinstance(layer, Indexed)
    x = torch.randn(7, 3, dtype=torch.float64)
    encoder, decoder = layer.posterior, layer.family
    assert isinstance(encoder, ConditionalNormal)
    assert isinstance(decoder, Affine)
    mean, log_std = encoder.network(x).chunk(2, dim=-1)
    noise = torch.randn(5, 7, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    code = mean + log_std.exp() * noise
    scale, shift = decoder.network(code).chunk(2, dim=-1)
    likelihood = Normal(-shift, torch.exp(-scale)).log_prob(x).sum(-1)
    weights = likelihood + Normal(0, 1).log_prob(code).sum(-1)
    weights = weights - Normal(mean, log_std.exp()).log_prob(code).sum(-1)
    ours = flow.log_weights(x, 5, noise=Noise.seeded(3))
    assert torch.allclose(ours, weights, atol=1e-12)
    divergence = kl_divergence(Normal(mean, log_std.exp()), Normal(0, 1)).sum(-1)
    many = flow.log_weights(x, 40_000, noise=Noise.seeded(4))
    code = mean + log_std.exp() * torch.randn(40_000, 7, 2, dtype=torch.float64)
    scale, shift = decoder.network(code).chunk(2, dim=-1)
    direct = Normal(-shift, torch.exp(-scale)).log_prob(x).sum(-1) - divergence
    error = torch.sqrt((many.var(0) + direct.var(0)) / 40_000)
    assert ((many.mean(0) - direct.mean(0)).abs() < 4 * error).all()
    assert error.max() < 0.1


def test_samples_of_a_vae_follow_its_decoder() -> None:
    flow = generic(small("vae", features=1, index_features=1))
    decoder = flow.layers[0].family.network  # type: ignore[union-attr]
    code = torch.randn(200_000, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    scale, shift = decoder(code).chunk(2, dim=-1)  # type: ignore[operator]
    direct = -shift + torch.exp(-scale) * torch.randn(200_000, 1, dtype=torch.float64)
    ours = flow.sample(200_000, seed=1)
    levels = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    assert torch.allclose(ours.quantile(levels), direct.detach().quantile(levels), atol=0.03)


def test_mixture_is_the_sum_over_its_paths() -> None:
    """Against the definition, component by component, with p(i | z) taken at each component's z."""
    flow = generic(small("mixture", features=2))
    mixture, x = flow.base, torch.randn(6, 2, dtype=torch.float64)
    assert isinstance(mixture, Mixture)
    total = torch.zeros(6, dtype=torch.float64)
    for index, layers in enumerate(mixture.components):
        component = Flow(list(layers))  # type: ignore[arg-type]
        z = x
        for layer in layers:  # type: ignore[attr-defined]
            z = layer.encode(z)[0]
        share = torch.softmax(mixture.gate(z), dim=-1)[:, index]
        total = total + component.log_prob(x).exp() * share
    assert torch.allclose(flow.log_prob(x), total.log(), atol=1e-12)


def test_mixture_integrates_to_one_and_samples_follow_it() -> None:
    flow = generic(small("mixture", features=2), size=0.4).eval()
    line = torch.linspace(-25, 25, 801, dtype=torch.float64)
    grid = torch.cartesian_prod(line, line)
    mass = flow.log_prob(grid).exp() * (line[1] - line[0]) ** 2
    assert mass.sum().item() == pytest.approx(1, abs=1e-3)
    left = mass[grid[:, 0] < 0].sum().item()
    samples = flow.sample(20_000, seed=0)
    assert (samples[:, 0] < 0).double().mean().item() == pytest.approx(left, abs=0.015)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dropout": 0.1}, "residual=true"),
        ({"residual": True, "hidden": [8, 16]}, "equal hidden sizes"),
        ({"residual": True, "coupling": True}, "coupling=false"),
    ],
)
def test_splines_that_do_not_go_together_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        small("nsf", **settings)


@pytest.mark.parametrize("name", ["nsf", "cif-nsf"])
def test_durkans_splines_train_with_dropout(name: str) -> None:
    points = SYNTHETIC["split-gaussian"].sample(1200, seed=0)
    flow = small(name, residual=True, linear=True, dropout=0.1, hidden=[16, 16])
    before = flow.eval().log_prob(points[1000:], 20, seed=0).mean()
    settings = TrainingSettings(
        steps=100, batch_size=200, validate_every=50, learning_rate=0.01, draws=2
    )
    fit_flow(flow, points[:1000], points[1000:], settings)
    assert flow.log_prob(points[1000:], 20, seed=0).mean() > before + 0.2
    x = points[:50].double()
    assert round_trip(flow.double(), x).whole < 1e-9


def test_batch_norm_trains_and_is_for_plain_flows_alone() -> None:
    points = SYNTHETIC["split-gaussian"].sample(1200, seed=0)
    flow = small("maf", batch_norm=True)
    settings = TrainingSettings(steps=200, batch_size=200, validate_every=50, learning_rate=0.01)
    outcome = fit_flow(flow, points[:1000], points[1000:], settings)
    plain = small("maf")
    assert outcome.validation > fit_flow(plain, points[:1000], points[1000:], settings).validation - 0.1
    with pytest.raises(UserError, match="no setting 'batch_norm'"):
        small("cif-maf", batch_norm=True)


def test_index_is_a_quarter_of_the_features() -> None:
    for features, size in ((1, 1), (2, 1), (6, 2), (8, 2), (21, 5), (63, 16)):
        layer = small("cif-maf", features).layers[1]
        assert isinstance(layer, Indexed)
        assert layer.prior.shape == (size,)


def test_likelihoods_that_depend_on_the_batch_are_refused() -> None:
    x = torch.randn(5, 2)
    for flow in (small("maf", batch_norm=True), small("nsf", residual=True, dropout=0.1)):
        with pytest.raises(ValueError, match=r"call eval\(\) first"):
            flow.train().log_prob(x)
        first = flow.eval().log_prob(x)
        assert torch.equal(first, flow.log_prob(x))
        assert torch.allclose(first[:1], flow.log_prob(x[:1]), atol=1e-6)


def test_a_mixture_of_noisy_components_is_noisy() -> None:
    exact, noisy = (
        Mixture([[Residual(LipschitzMLP(2, [8]), log_det)]], nn.Linear(2, 1))
        for log_det in (None, Roulette())
    )
    assert (exact.noisy, exact.exact) == (False, True)
    assert (noisy.noisy, noisy.exact) == (True, False)
    with pytest.raises(ValueError, match="noisy"):
        Flow([], noisy).eval().log_prob(torch.zeros(3, 2))


def test_points_that_zuko_cannot_invert_are_counted() -> None:
    flow = small("gf", features=1)
    with pytest.warns(UserWarning, match="could not be inverted"):
        flow.layers[0].decode(torch.tensor([[0.0], [8.0]]))  # type: ignore[operator]


def test_normalisation_lifts_the_bound_on_a_residual_flow() -> None:
    """Two blocks stretch by (1 + κ)² at most, so that narrow data have a density out of reach."""
    points = 1e-3 * torch.randn(1200, 2)
    settings = TrainingSettings(steps=40, batch_size=200, validate_every=20, learning_rate=0.01)
    means = {}
    for act_norm in (False, True):
        flow = small("resflow", kappa=0.5, act_norm=act_norm)
        fit_flow(flow, points[:1000], points[1000:], settings)
        means[act_norm] = flow.log_prob(points[1000:]).mean().item()
        assert round_trip(flow, points[:50]).whole < 1e-6
    bound = 2 * 2 * math.log(1.5) - math.log(2 * math.pi)
    entropy = 2 * math.log(1e-3) + math.log(2 * math.pi * math.e)
    assert means[False] <= bound
    assert means[True] > -entropy - 0.5


def test_an_informative_index_starts_with_q_as_p_and_moves_x() -> None:
    x = torch.randn(500, 2)
    flow = small("cif-nsf", index_start="informative").eval()
    identity = small("cif-nsf").eval()
    for layer in (part for part in flow.layers if isinstance(part, Indexed)):
        assert isinstance(layer.prior, ConditionalNormal)
        assert isinstance(layer.posterior, ConditionalNormal)
        mean, log_std = layer.prior.network(x).chunk(2, -1)
        assert mean.std() > log_std.exp().mean()  # u tells rows apart
        assert torch.equal(layer.posterior.network(x), layer.prior.network(x))
        u = torch.tensor([[-1.0], [1.0]])
        low, high = (layer.family.encode(x, each.expand(len(x), 1))[0] for each in u)
        assert (low - high).abs().max() > 0.01
    assert flow.log_prob(x, 10, seed=0).isfinite().all()
    affine = next(part for part in identity.layers if isinstance(part, Indexed)).family
    assert torch.equal(affine.encode(x, torch.ones(len(x), 1))[0], x)
    with pytest.raises(UserError, match="needs equal prior_hidden and posterior_hidden"):
        small("cif-nsf", index_start="informative", prior_hidden=[8])

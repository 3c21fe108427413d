"""Samples with weights, gradients of likelihoods, and variational inference with both."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Distribution, MultivariateNormal, Normal
from torch.testing import assert_close

import ciflows
from ciflows import Flow, Indexed, vi
from ciflows.core.density import ConditionalNormal
from ciflows.core.noise import Noise, RowNoise
from ciflows.core.objectives import ELBO, IWAE
from ciflows.core.proposals import RecordingNoise, ReplayNoise
from ciflows.errors import UserError
from ciflows.layers import Affine, BatchNorm, LULinear, Scale
from ciflows.layers.dequantise import Dequantise
from ciflows.layers.gaussian_mixture import GaussianMixture
from ciflows.networks import MLP
from ciflows.vi import bound as bounds
from ciflows.vi import inference
from constructors import LAYERS, build, generic, linear_gaussian_flow

SMALL = {"layers": 2, "hidden": [8, 8]}
INDEX = {"affine_hidden": [8], "prior_hidden": [8], "posterior_hidden": [8]}
DISCRETE = ("dequantise", "cells", "atoms", "lattice")


def small(name: str, features: int = 2, **options: Any) -> Flow:
    options = SMALL | (INDEX if name.startswith("cif-") else {}) | options
    return generic(ciflows.build_model(name, features=features, **options)).eval()


def cif(**options: Any) -> Flow:
    return small("cif-maf", **options)


def gradients(flow: Flow, loss: Tensor) -> list[Tensor]:
    return list(
        torch.autograd.grad(loss, list(flow.parameters()), allow_unused=True, materialize_grads=True)
    )


# -- samples with weights --------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYERS)
def test_decoding_gives_the_weight_that_encoding_the_same_index_gives(name: str) -> None:
    layer, case = build(name), LAYERS[name]
    if any(word in name for word in DISCRETE):
        with pytest.raises(ValueError, match="no weights"):
            layer.decode_with_log_weight(torch.zeros(3, *layer.noise_shape).double())
        return
    if layer.noisy:
        pytest.skip("its log-determinants are estimates")
    z = 0.5 * torch.randn(6, *layer.noise_shape).double()
    context = None if case.context_shape is None else torch.randn(6, *case.context_shape).double()
    record = RecordingNoise(torch.Generator().manual_seed(0))
    x, log_weight = layer.decode_with_log_weight(z, context, record)
    back, expected = layer.encode(x, context, ReplayNoise(record))
    assert_close(back, z, rtol=1e-9, atol=1e-9)
    assert_close(log_weight, expected, rtol=1e-9, atol=1e-9)
    assert log_weight.shape == (6,)


@pytest.mark.parametrize("name", ["nsf", "maf", "realnvp", "resflow", "sospf"])
def test_weights_of_a_plain_flow_are_its_likelihoods(name: str) -> None:
    flow = small(name)
    x, log_weight = flow.rsample_with_log_weight(50, seed=0)
    assert x.requires_grad
    assert log_weight.requires_grad
    assert_close(log_weight, flow.log_prob(x), rtol=0, atol=1e-5)
    assert_close(x, flow.sample(50, seed=0), rtol=0, atol=1e-9)


def directional(flow: Flow, value: Callable[[], Tensor]) -> tuple[float, float]:
    """The slope of a value along its own gradient: by that, and by finite differences."""
    parameters = list(flow.parameters())
    start = nn.utils.parameters_to_vector(parameters).detach()
    gradient = torch.cat([part.flatten() for part in gradients(flow, value())])
    ends = []
    for step in (1e-4, -1e-4):
        nn.utils.vector_to_parameters(start + step * gradient / gradient.norm(), parameters)
        ends.append(value().item())
    nn.utils.vector_to_parameters(start, parameters)
    return gradient.norm().item(), (ends[0] - ends[1]) / 2e-4


@pytest.mark.parametrize("name", ["naf", "unaf", "cnf", "cif-unaf"])
def test_gradients_of_zukos_networks_are_whole_in_eval_mode(name: str) -> None:
    flow, x = small(name, hidden=[8], layers=1), 0.5 * torch.randn(20, 2).double()
    slope, expected = directional(flow, lambda: flow.log_prob(x, 4, seed=0).mean())
    assert slope == pytest.approx(expected, rel=1e-3)


def test_samples_of_zukos_cnf_have_whole_gradients_in_eval_mode() -> None:
    flow = small("cnf", hidden=[8], layers=1)

    def value() -> Tensor:
        x, log_weight = flow.rsample_with_log_weight(20, seed=0)
        return (x.sin().sum(-1) + log_weight).mean()

    slope, expected = directional(flow, value)
    assert slope == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("name", ["naf", "unaf", "cif-naf"])
def test_samples_whose_gradients_zuko_gets_wrong_are_refused(name: str) -> None:
    flow = small(name, hidden=[8], layers=1)
    assert not flow.distribution().has_rsample
    with pytest.raises(ValueError, match=r"ZukoBijection have no right gradient: .* by bisection"):
        flow.rsample_with_log_weight(3)
    with torch.no_grad():
        x, log_weight = flow.rsample_with_log_weight(3, seed=0)
    assert x.shape == (3, 2)
    assert log_weight.isfinite().all()


@pytest.mark.parametrize("inner", [1, 4])
def test_weights_of_a_cif_bound_from_above_and_are_unbiased(inner: int) -> None:
    """E[W] >= E[log p(x)], and E[r(x) / exp W] = 1 for any density r; against a closed form."""
    flow, truth = linear_gaussian_flow(depth=2, off=0.3)
    with torch.no_grad():
        x, log_weight = flow.rsample_with_log_weight(40_000, inner=inner, seed=0)
    gap = log_weight - truth.log_prob(x)
    assert 0.01 < gap.mean() < 1
    ratio = torch.exp(-gap)
    assert ratio.mean().item() == pytest.approx(1, abs=4 * ratio.std().item() / 200)


def test_inner_draws_tighten_the_bound() -> None:
    flow, truth = linear_gaussian_flow(depth=2, off=0.3)
    gaps = []
    with torch.no_grad():
        for inner in (1, 4, 16):
            x, log_weight = flow.rsample_with_log_weight(20_000, inner=inner, seed=0)
            gaps.append((log_weight - truth.log_prob(x)).mean().item())
    assert gaps[0] > 2 * gaps[1] > 4 * gaps[2] > 0


def test_weights_of_an_exact_posterior_have_no_error() -> None:
    flow, truth = linear_gaussian_flow(depth=3)
    x, log_weight = flow.rsample_with_log_weight(20, seed=0)
    assert_close(log_weight, truth.log_prob(x), rtol=0, atol=1e-9)


def test_contexts_and_shapes() -> None:
    flow = cif(context_features=3)
    context = torch.randn(5, 3).double()
    x, log_weight = flow.rsample_with_log_weight(7, context, seed=0)
    assert x.shape == (7, 5, 2)
    assert log_weight.shape == (7, 5)
    with pytest.raises(ValueError, match="needs a context"):
        flow.rsample_with_log_weight(7)


def test_a_flow_as_base_and_as_prior_have_weights_of_their_own() -> None:
    """A CIF over a CIF whose prior is a CIF: every index is weighed."""
    prior = Flow([build("indexed affine, context")])  # u (2,) given z (3,)
    family = Affine(3, MLP(2, 6, [8]), context_features=2)
    posterior = ConditionalNormal(MLP(3, 4, [8]), features=2, context_features=3)
    layer = Indexed(family, prior, posterior)
    flow = generic(Flow([layer], Flow([build_three()]))).eval()
    with torch.no_grad():
        x, log_weight = flow.rsample_with_log_weight(20_000, seed=0)
        log_prob = flow.log_prob(x[:500], samples=2000, seed=1)
    gap = log_weight[:500] - log_prob
    assert gap.mean() > 0
    ratio = torch.exp(Normal(0.0, 1.0).log_prob(x).sum(-1) - log_weight)
    assert ratio.mean().item() == pytest.approx(1, abs=5 * ratio.std().item() / math.sqrt(len(x)))


def build_three() -> Indexed:
    affine = Affine(3, MLP(1, 6, [8]), context_features=1)
    p, q = (ConditionalNormal(MLP(3, 2, [8]), features=1, context_features=3) for _ in "pq")
    return Indexed(affine, p, q)


def test_what_has_no_weights_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="such as integers, have no density"):
        Flow([Dequantise((2,))]).rsample_with_log_weight(3)
    mixture = Flow([], GaussianMixture(3, 2))
    with pytest.raises(ValueError, match="no gradient passes the choice"):
        mixture.rsample_with_log_weight(3)
    with torch.no_grad():
        x, log_weight = mixture.rsample_with_log_weight(3, seed=0)
    assert_close(log_weight, mixture.log_prob(x))
    with pytest.raises(ValueError, match=r"call eval\(\) first"):
        Flow([BatchNorm((2,))]).train().rsample_with_log_weight(3)
    with pytest.raises(ValueError, match="only estimated"):
        cif().draw_with_log_prob((3,))


# -- gradients -------------------------------------------------------------------------------------


def test_log_prob_of_a_plain_flow_trains_it() -> None:
    flow = ciflows.build_model("maf", features=2, **SMALL)
    x = 3 + 0.5 * torch.randn(500, 2, generator=torch.Generator().manual_seed(0))
    adam = torch.optim.Adam(flow.parameters(), 0.02)
    before = flow.log_prob(x).mean().item()
    for _ in range(100):
        adam.zero_grad()
        (-flow.log_prob(x).mean()).backward()
        adam.step()
    assert before < -5
    assert flow.log_prob(x).mean().item() > -1.8  # the truth: -1.45


def test_gradients_of_a_plain_flow_are_those_of_its_weight() -> None:
    flow, x = small("nsf"), torch.randn(20, 2).double()
    expected = gradients(flow, ELBO()(flow, x).sum())
    assert_close(gradients(flow, flow.log_prob(x).sum()), expected)


@pytest.mark.parametrize("draws", [1, 6])
def test_gradients_of_a_cif_are_iwaes(draws: int) -> None:
    flow, x = cif(), torch.randn(20, 2).double()
    expected = gradients(flow, IWAE(draws)(flow, x, RowNoise(0)).sum())
    assert_close(gradients(flow, flow.log_prob(x, draws, seed=0).sum()), expected)
    assert any(bool((gradient != 0).any()) for gradient in expected)


@pytest.mark.parametrize("name", ["maf", "cif-maf", "cif-resflow"])
def test_gradients_in_x_are_those_of_differences(name: str) -> None:
    flow, x = small(name), torch.randn(4, 2).double().requires_grad_()

    def smooth(x: Tensor) -> Tensor:
        return flow.estimate(x, 3, noise=Noise.seeded(0)).log_prob

    assert torch.autograd.gradcheck(smooth, x, atol=1e-5)


def test_values_with_gradients_are_those_without(monkeypatch: pytest.MonkeyPatch) -> None:
    flow, x = cif(), torch.randn(30, 2).double()
    monkeypatch.setattr("ciflows.core.evaluate.rows_at_once", lambda shape, device: 40)
    for how in ({"samples": 50}, {"std_error": 1.0, "max_samples": 10_000}):
        with torch.no_grad():
            without = flow.estimate(x, **how, seed=0)  # type: ignore[arg-type]
        estimate = flow.estimate(x, **how, seed=0)  # type: ignore[arg-type]
        assert_close(
            tuple(part.detach() for part in estimate), tuple(without), rtol=0, atol=1e-12, equal_nan=True
        )
        asks = [part.requires_grad for part in estimate]
        assert asks == [True, True] + [False] * (len(asks) - 2)
        assert not any(part.requires_grad for part in without)
        assert all(bool(g.isfinite().all()) for g in gradients(flow, estimate.log_prob.sum()))


def test_frozen_flows_have_no_gradients_and_integers_none_in_x() -> None:
    flow = cif().requires_grad_(False)
    assert not flow.log_prob(torch.randn(3, 2).double()).requires_grad
    pixels = Flow([Dequantise((2,))])
    with pytest.raises(ValueError, match="without a gradient in x"):
        pixels.log_prob(torch.ones(3, 2, requires_grad=True))


def test_runs_score_without_gradients() -> None:
    table = {"a": torch.randn(200).numpy(), "b": torch.randn(200).numpy()}
    run = ciflows.fit(table, "maf", steps=2, layers=1, hidden=[8])
    assert not run.estimate(table).log_prob.requires_grad


# -- distributions ---------------------------------------------------------------------------------


def test_a_plain_flow_is_an_exact_distribution() -> None:
    flow = small("nsf", context_features=3)
    context = torch.randn(5, 3).double()
    p = flow.distribution(context)
    assert isinstance(p, Distribution)
    assert (p.batch_shape, p.event_shape, p.has_rsample, p.exact) == ((5,), (2,), True, True)
    x = p.rsample((4,))
    assert x.shape == (4, 5, 2)
    assert x.requires_grad
    assert not p.sample().requires_grad
    assert p.sample().shape == (5, 2)
    assert_close(p.log_prob(x), flow.log_prob(x, context=context))
    assert p.expand((4, 5)).log_prob(x).shape == (4, 5)
    assert bool(p.support.check(x).all())


def test_a_cif_says_that_it_is_estimated() -> None:
    flow, truth = linear_gaussian_flow(depth=1, off=0.2)
    p = flow.distribution(samples=500, seed=0)
    assert not p.exact
    x = p.sample((50,))
    assert_close(p.log_prob(x).detach(), truth.log_prob(x), rtol=0, atol=0.2)
    assert torch.equal(p.log_prob(x), p.log_prob(x))
    assert p.expand((3,)).sample().shape == (3, 2)
    assert "event_shape=(2,), log_prob estimated from 500 draws" in repr(p)
    with pytest.raises(ValueError, match=r"FlowDistribution: expected shape \(\*, 2\); got \(3, 1\)"):
        p.log_prob(torch.zeros(3, 1))


def test_distributions_without_gradients_refuse_rsample() -> None:
    p = Flow([], GaussianMixture(2, 2)).distribution()
    assert not p.has_rsample
    with pytest.raises(NotImplementedError, match="call sample"):
        p.rsample()


# -- variational inference -------------------------------------------------------------------------


def correlated(x: Tensor) -> Tensor:
    """A Gaussian, and e³ times it."""
    covariance = torch.tensor([[1.0, 0.6], [0.6, 0.5]]).to(x)
    return 3 + MultivariateNormal(torch.ones(2).to(x), covariance).log_prob(x)


def full_bound(flow: Flow, batch: int, draws: int, noise: Noise) -> Tensor:
    """The same bound, with the score term in its gradients."""
    x, log_weight = flow.rsample_with_log_weight(draws * batch, noise=noise)
    ratio = (correlated(x) - log_weight).reshape(draws, batch)
    return torch.logsumexp(ratio, 0) - math.log(draws)


@pytest.mark.parametrize(("name", "draws"), [("maf", 1), ("maf", 3), ("cif-maf", 1), ("cif-resflow", 1)])
def test_path_gradients_are_unbiased(name: str, draws: int) -> None:
    """With 4000 samples: a gradient off by a tenth of its noise in a step of 400 would show."""
    flow = small(name)
    bound = vi.Bound(correlated, flow, draws)
    assert bound.path_wise
    assert not vi.Bound(correlated, cif(), draws=2).path_wise

    path = repeated(flow, lambda noise: bound(4000, noise=noise))
    assert_same_mean(path, repeated(flow, lambda noise: full_bound(flow, 4000, draws, noise)))


def repeated(flow: Flow, value: Callable[[Noise], Tensor]) -> list[Tensor]:
    """Gradients by each parameter, forty of each."""
    rows = [gradients(flow, value(Noise.seeded(seed)).mean()) for seed in range(40)]
    return [torch.stack(some).flatten(1) for some in zip(*rows, strict=True)]


def assert_same_mean(one: list[Tensor], other: list[Tensor]) -> None:
    first, second = torch.cat(one, 1), torch.cat(other, 1)
    error = ((first.var(0) + second.var(0)) / len(first)).sqrt() + 1e-9
    off = (first.mean(0) - second.mean(0)) / error
    assert off.square().mean() < 2
    assert off.abs().max() < 6


@pytest.mark.parametrize("name", ["maf", "cif-maf"])
def test_gradients_by_weights_are_unbiased(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MOST_OFF", math.inf)
    flow = small(name)
    bound = vi.Bound(correlated, flow)
    found = repeated(flow, lambda noise: bound.by_weights(4000, noise=noise))
    expected = repeated(flow, lambda noise: full_bound(flow, 4000, 1, noise))
    assert_same_mean(found, expected)
    values = bound.by_weights(4000, noise=Noise.seeded(0))
    assert_close(values, full_bound(flow, 4000, 1, Noise.seeded(0)))
    with pytest.raises(UserError, match="draws = inner = 1"):
        vi.Bound(correlated, flow, draws=2).by_weights(5)
    amortised = ciflows.build_model("maf", features=2, context_features=1, **SMALL)
    with pytest.raises(UserError, match="not for flows with a context"):
        vi.Bound(correlated, amortised).by_weights(5)


def test_path_gradients_of_a_perfect_fit_are_zero() -> None:
    """The plain gradient is noise there: this is what is gained."""
    flow = small("maf")
    fixed = generic(ciflows.build_model("maf", features=2, **SMALL)).eval().requires_grad_(False)
    values = vi.Bound(fixed.log_prob, flow)(50, noise=Noise.seeded(0))
    assert_close(values, torch.zeros(50).double(), rtol=0, atol=1e-9)
    assert max(float(g.abs().max()) for g in gradients(flow, values.mean())) < 1e-9
    x, log_weight = flow.rsample_with_log_weight(50, seed=0)
    plain = gradients(flow, (fixed.log_prob(x) - log_weight).mean())
    assert max(float(g.abs().max()) for g in plain) > 1e-3


def test_shared_parameters_get_the_plain_gradient() -> None:
    network = MLP(2, 2, [8])
    p, q = (ConditionalNormal(network, features=1, context_features=2) for _ in "pq")
    flow = Flow([Indexed(Affine(2, MLP(1, 4, [8]), context_features=1), p, q)])
    assert bounds._names_without_posteriors(flow) == []
    assert len(bounds._names_without_posteriors(cif())) < len(list(cif().named_parameters()))


@pytest.mark.parametrize("name", ["maf", "cif-maf", "cif-resflow"])
def test_a_gaussian_is_found_with_its_constant(name: str) -> None:
    flow = ciflows.build_model(name, features=2, **(SMALL | (INDEX if "cif" in name else {})))
    history = vi.fit(correlated, flow, steps=300, batch=128, learning_rate=0.01, seed=0)
    found = vi.evaluate(correlated, flow, 4000)
    assert history.shape == (300,)
    assert found.elbo == pytest.approx(3, abs=0.05)
    assert found.elbo < 3 + 4 * found.std_error
    assert found.log_z == pytest.approx(3, abs=5 * found.log_z_error + 1e-4)
    assert found.effective_draws > 3000
    assert found.pareto_k < 1
    assert not flow.training


def test_the_bound_of_a_cif_never_passes_the_constant() -> None:
    """Weights from the wrong side (`draw` and `log_weight`) would rise without end."""
    flow = ciflows.build_model("cif-maf", features=2, **SMALL, **INDEX)
    history = vi.fit(correlated, flow, steps=400, batch=64, learning_rate=0.02, draws=2, inner=2)
    assert history[-100:].mean() < 3.02
    assert history[-100:].mean() > 2.8


def four_modes(x: Tensor) -> Tensor:
    """Four normals on a line, 2 apart, of standard deviation 0.25; log Z = 0."""
    parts = torch.stack([Normal(place, 0.25).log_prob(x[:, 0]) for place in (-3.0, -1.0, 1.0, 3.0)])
    return torch.logsumexp(parts, 0) - math.log(4)


def test_annealing_finds_more_modes() -> None:
    """A narrow start keeps to one of them, at -log 4; where π is flattened first it spreads."""
    elbos = []
    for anneal in (0.0, 0.5):
        inner = ciflows.build_model("nsf", features=1, layers=2, hidden=[16], seed=0)
        flow = Flow([*inner.layers, Scale((1,), 1 / 0.3)])
        vi.fit(four_modes, flow, steps=300, batch=64, learning_rate=0.05, anneal=anneal)
        elbos.append(vi.evaluate(four_modes, flow, 4000).elbo)
    assert elbos[0] < -1.3
    assert elbos[1] > -0.9
    with pytest.raises(UserError, match="anneal is a share of the steps"):
        vi.fit(four_modes, flow, steps=1, anneal=2)


def test_balancing_finds_the_shares_of_modes() -> None:
    """Few paths lead from a mode to the next, so that their masses hardly change; weights tell them."""
    elbos = []
    for balance in (0.0, 0.75):
        flows = [ciflows.build_model("nsf", features=1, layers=2, hidden=[16], seed=i) for i in range(3)]
        for seed, flow in enumerate(flows):
            how: dict[str, Any] = {"steps": 300, "batch": 64, "anneal": 0.5, "balance": balance}
            vi.fit(four_modes, flow, **how, learning_rate=0.05, seed=seed)
        elbos.append(sum(vi.evaluate(four_modes, flow, 4000).elbo for flow in flows) / 3)
    assert elbos[1] > elbos[0] + 0.1, elbos
    with pytest.raises(UserError, match="balance is a share of the steps"):
        vi.fit(four_modes, cif(), steps=1, balance=2)
    with pytest.raises(UserError, match="draws = inner = 1"):
        vi.fit(correlated, cif(), steps=4, draws=2, balance=0.5)


def test_rates_fall_to_zero() -> None:
    state = inference._State(cif(), 2, (0.1, 0.2), 0)
    rates = []
    for _ in range(2):
        state.take(sum(p.sum() for p in state.parameters))
        rates.append([group["lr"] for group in state.adam.param_groups])
    assert rates[0] == pytest.approx([0.1, 0.2])
    assert rates[1] == pytest.approx([0.05, 0.1])


def test_the_power_rises_to_one() -> None:
    powers = [inference._power(done, 0.5, 0.01) for done in (0.0, 0.25, 0.5, 0.9)]
    assert powers == pytest.approx([0.01, 0.1, 1, 1])
    assert inference._power(0.0, 0.0, 0.01) == 1


def test_amortised_fits_follow_their_context() -> None:
    def log_density(x: Tensor, context: Tensor) -> Tensor:
        return Normal(context, 0.5).log_prob(x).sum(-1)

    flow = ciflows.build_model("cif-maf", features=2, context_features=2, **SMALL, **INDEX)
    contexts = torch.randn(1000, 2, generator=torch.Generator().manual_seed(0))
    vi.fit(log_density, flow, steps=400, batch=128, learning_rate=0.01, context=contexts)
    for context in torch.tensor([[0.0, 0.0], [1.0, -0.5]]):
        assert vi.evaluate(log_density, flow, 2000, context=context).elbo > -0.1
    with pytest.raises(UserError, match="takes them"):
        vi.fit(log_density, flow, steps=1)
    with pytest.raises(UserError, match=r"one context, of shape \(2,\); got \(1000, 2\)"):
        vi.evaluate(log_density, flow, context=contexts)


def test_an_interrupted_fit_goes_on_where_it_was(tmp_path: Path) -> None:
    class StopError(Exception):
        pass

    def stop(step: int, bound: float) -> None:
        if step == 20:
            raise StopError

    how: dict[str, Any] = {"steps": 30, "batch": 16, "every": 10, "seed": 1, "index_rate": 0.3}
    flows = [ciflows.build_model("cif-maf", features=2, **SMALL, **INDEX) for _ in range(3)]
    whole = vi.fit(correlated, flows[0], **how)
    with pytest.raises(StopError):
        vi.fit(correlated, flows[1], **how, checkpoint=tmp_path / "fit", progress=stop)
    rest = vi.fit(correlated, flows[2], **how, checkpoint=tmp_path / "fit")
    assert torch.equal(whole, rest)
    for first, second in zip(flows[0].parameters(), flows[2].parameters(), strict=True):
        assert torch.equal(first, second)
    with pytest.raises(UserError, match=r"other settings \(steps 30\)"):
        vi.fit(correlated, flows[2], **(how | {"steps": 40}), checkpoint=tmp_path / "fit")
    with pytest.raises(UserError, match="other settings"):
        vi.fit(correlated, cif(layers=3).float(), **how, checkpoint=tmp_path / "fit")
    vi.fit(correlated, flows[2], steps=1, batch=4, every=1, checkpoint=tmp_path / "new" / "fit")


@pytest.mark.parametrize("name", ["steps", "batch", "every", "learning_rate", "first_power"])
def test_settings_of_a_fit_that_mean_nothing_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"{name}.*; got"):
        vi.fit(correlated, cif(), **({"steps": 1} | {name: 0}))


def test_a_flow_with_nothing_to_train_is_refused() -> None:
    flow = Flow([Scale((2,), 2.0)])
    with pytest.raises(UserError, match="no parameters to train"):
        vi.fit(correlated, flow, steps=2)


def test_densities_that_cannot_be_right_are_refused() -> None:
    flow = cif().float()
    with pytest.raises(UserError, match="one value a row"):
        vi.fit(lambda x: -x.square(), flow, steps=1)
    with pytest.raises(UserError, match="no gradient"):
        vi.fit(lambda x: -x.detach().square().sum(-1), flow, steps=1)
    with pytest.raises(UserError, match="not finite"):
        vi.fit(lambda x: x.sum(-1) * math.nan, flow, steps=200, batch=2)
    with pytest.raises(ValueError, match="no density"):
        vi.fit(correlated, Flow([Dequantise((2,)), LULinear(2)]), steps=1)


# -- posteriors with a reference -------------------------------------------------------------------


def funnel(x: Tensor) -> Tensor:
    """Neal's: v ~ N(0, 1.5²), two others ~ N(0, e^v)."""
    v = x[:, 0]
    return Normal(0.0, 1.5).log_prob(v) + Normal(0.0, torch.exp(v / 2)[:, None]).log_prob(x[:, 1:]).sum(
        -1
    )


EFFECTS = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
ERRORS = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def eight_schools(x: Tensor) -> Tensor:
    """mu / 10, log tau and (theta - mu) / tau of Rubin's schools; mu ~ N(0, 10²), log tau ~ N(1, 1)."""
    mu, log_tau, offsets = 10 * x[:, 0], x[:, 1], x[:, 2:]
    theta = mu[:, None] + torch.exp(log_tau)[:, None] * offsets
    prior = Normal(0.0, 1.0).log_prob(x[:, 0]) + Normal(1.0, 1.0).log_prob(log_tau)
    prior = prior + Normal(0.0, 1.0).log_prob(offsets).sum(-1)
    return prior + Normal(theta, ERRORS.to(x)).log_prob(EFFECTS.to(x)).sum(-1)


def schools_reference() -> Tensor:
    """Moments of mu / 10 and log tau, by a grid: the offsets are integrated in closed form."""
    first, log_tau = torch.linspace(-4, 5, 600), torch.linspace(-4, 5, 600)
    variance = torch.exp(2 * log_tau)[:, None] + ERRORS.square()
    log_p = Normal(10 * first[:, None, None], variance.sqrt()).log_prob(EFFECTS).sum(-1)
    log_p += Normal(0.0, 1.0).log_prob(first)[:, None] + Normal(1.0, 1.0).log_prob(log_tau)
    return grid_moments(first, log_tau, log_p)


def logistic(x: Tensor) -> Tensor:
    """Two coefficients ~ N(0, 2²) of twenty rows, of which one class is rare: skewed."""
    rows, labels = logistic_data()
    likelihood = torch.distributions.Bernoulli(logits=x @ rows.to(x).T).log_prob(labels.to(x)).sum(-1)
    return likelihood + Normal(0.0, 2.0).log_prob(x).sum(-1)


def logistic_data() -> tuple[Tensor, Tensor]:
    slopes = torch.linspace(-2, 2, 20)
    return torch.stack([torch.ones(20), slopes], -1), (slopes > 1.4).float()


def logistic_reference() -> Tensor:
    axis = torch.linspace(-12, 12, 800)
    log_p = logistic(torch.cartesian_prod(axis, axis)).reshape(800, 800)
    return grid_moments(axis, axis, log_p)


def grid_moments(first: Tensor, second: Tensor, log_p: Tensor) -> Tensor:
    """Means and standard deviations of two coordinates, as rows, from a density on their grid."""
    weights = torch.softmax(log_p.flatten().double(), 0).reshape(log_p.shape)
    pairs = [(first.double(), weights.sum(1)), (second.double(), weights.sum(0))]
    means = torch.stack([(w * x).sum() for x, w in pairs])
    squares = torch.stack([(w * x.square()).sum() for x, w in pairs])
    return torch.stack([means, (squares - means.square()).sqrt()])


REFERENCES: dict[str, tuple[Callable[[Tensor], Tensor], int, Callable[[], Tensor]]] = {
    "funnel": (funnel, 3, lambda: torch.tensor([[0.0, 0.0], [1.5, math.exp(0.5 * 1.5**2 / 2)]])),
    "eight schools": (eight_schools, 10, schools_reference),
    "logistic regression": (logistic, 2, logistic_reference),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFERENCES)
def test_moments_of_posteriors_are_those_of_references(name: str) -> None:
    """By importance weights, within four of their errors; and by plain samples nearly."""
    log_density, features, reference = REFERENCES[name]
    sizes = {f"{part}_hidden": [16, 16] for part in ("affine", "prior", "posterior")}
    flow = ciflows.build_model(
        "cif-nsf", features=features, layers=3, hidden=[32, 32], coupling=True, **sizes
    )
    vi.fit(log_density, flow, steps=2500, batch=200, learning_rate=5e-3)
    found = vi.evaluate(log_density, flow, 20_000)
    assert found.effective_draws > 5000
    with torch.no_grad():
        x, log_weight = flow.rsample_with_log_weight(20_000, seed=1)
        weights = torch.softmax((log_density(x) - log_weight).double(), 0)[:, None]
    means, stds = reference()
    x = x[:, :2].double()
    mean = (weights * x).sum(0)
    errors = (weights * (x - mean)).square().sum(0).sqrt()
    assert ((mean - means).abs() < 4 * errors).all(), (mean, means, errors)
    std = (weights * (x - mean).square()).sum(0).sqrt()
    assert ((std - stds).abs() < 0.05 * stds).all(), (std, stds)
    assert ((x.mean(0) - means).abs() < 0.1 * stds).all(), (x.mean(0), means)

"""Likelihoods against what is known: closed forms, integrals, samples, and their own error bars."""

from __future__ import annotations

import math
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor
from torch.testing import assert_close

from ciflows import Flow, Indexed, build_model, diagnostics
from ciflows.core.density import StandardNormal
from ciflows.core.evaluate import RunningEstimate, summarise
from ciflows.core.noise import Noise, RowNoise
from ciflows.layers import Residual, Series, Standardise
from ciflows.networks import LipschitzMLP
from constructors import affine, generic, linear_gaussian_flow, normal, residual

SMALL = {"layers": 2, "hidden": [16], "kappa": 0.6}
NETS = {name: [8] for name in ("affine_hidden", "prior_hidden", "posterior_hidden")}


def plain_flow() -> Flow:
    return generic(build_model("resflow", features=2, **SMALL)).eval()


@cache
def cif(context_features: int = 0) -> Flow:
    """A CIF with generic parameters, and posteriors fitted for a moment, then widened: near enough
    to the right ones for weights of finite variance, and not right."""
    flow = build_model("cif-resflow", features=2, context_features=context_features, **SMALL, **NETS)
    generic(flow, size=0.3).eval()
    posteriors = [layer.posterior for layer in flow.layers if isinstance(layer, Indexed)]
    optimiser = torch.optim.Adam([p for q in posteriors for p in q.parameters()], lr=0.02)
    noise = Noise.seeded(0)
    for step in range(100):
        context = noise.normal((256, context_features), like=torch.zeros(1).double())
        x = flow.sample(1, context, seed=step)[0] if context_features else flow.sample(256, seed=step)
        optimiser.zero_grad()
        (-flow.log_weight(x, context, noise).mean()).backward()
        optimiser.step()
    with torch.no_grad():
        for posterior in posteriors:
            posterior.network[-1].bias[1] += 0.2
    return flow.requires_grad_(False)


def grid(limit: float, cells: int) -> tuple[Tensor, float]:
    """Centres of the cells of a square, and the area of one."""
    side = 2 * limit / cells
    axis = -limit + side * (torch.arange(cells).double() + 0.5)
    return torch.cartesian_prod(axis, axis), side**2


def integrate(
    flow: Flow, of: Tensor, points: Tensor, area: float, **how: object
) -> tuple[Tensor, Tensor]:
    """∫ of(x) p(x) dx, with its Monte-Carlo standard error: p is estimated without bias."""
    estimate = flow.estimate(points, seed=0, **how)
    p = estimate.log_prob.exp()[:, None] * area
    variance = (of * p * estimate.std_error[:, None]).square().sum(0)
    return (of * p).sum(0), variance.sqrt()


# -- closed forms -----------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_the_exact_posterior_gives_equal_weights(depth: int) -> None:
    flow, truth = linear_gaussian_flow(depth)
    x = 2 * torch.randn(30, 2).double()
    estimate = flow.estimate(x, samples=20)
    assert_close(flow.log_weights(x, 20), truth.log_prob(x).expand(20, -1), rtol=0, atol=1e-11)
    assert_close(estimate.log_prob, truth.log_prob(x), rtol=0, atol=1e-11)
    assert_close(estimate.elbo, truth.log_prob(x), rtol=0, atol=1e-11)
    assert_close(estimate.effective_samples, torch.full((30,), 20.0).double(), rtol=1e-10, atol=0)
    assert estimate.std_error.max() < 1e-6


@pytest.mark.parametrize("depth", [1, 2])
def test_another_posterior_agrees_within_its_error(depth: int) -> None:
    flow, truth = linear_gaussian_flow(depth, off=0.3)
    x = truth.sample((50,))
    estimate = flow.estimate(x, samples=4000, seed=0)
    errors = (estimate.log_prob - truth.log_prob(x)) / estimate.std_error
    assert errors.abs().max() < 4
    assert 0.5 < errors.square().mean() < 2
    assert estimate.std_error.max() < 0.1
    assert estimate.elbo.mean() < truth.log_prob(x).mean() - 0.05
    assert bool((estimate.effective_samples < 4000).all())


def test_samples_of_a_linear_gaussian_flow_have_its_moments() -> None:
    flow, truth = linear_gaussian_flow(2)
    x = flow.sample(100_000, seed=0)
    scale = truth.covariance_matrix.diagonal().sqrt()
    assert_close(x.mean(0) / scale, truth.mean / scale, rtol=0, atol=4 / math.sqrt(len(x)))
    assert_close(x.T.cov() / scale.outer(scale), truth.covariance_matrix / scale.outer(scale),
                 rtol=0, atol=6 / math.sqrt(len(x)))  # fmt: skip


# -- plain flows, and Proposition 4.1 ---------------------------------------------------------------


def test_a_plain_flow_needs_no_draws() -> None:
    flow, x = plain_flow(), 2 * torch.randn(20, 2).double()
    assert flow.exact
    estimate = flow.estimate(x, samples=1)
    z, log_det = x, torch.zeros(20).double()
    for layer in flow.layers:
        z, more = layer.encode(z)
        log_det = log_det + more
    assert_close(estimate.log_prob, flow.base.log_weight(z) + log_det, rtol=0, atol=1e-13)
    for samples in (10, 100):
        more_draws = flow.estimate(x, samples)
        assert_close(more_draws.log_prob, estimate.log_prob, rtol=0, atol=1e-13)
        assert more_draws.std_error.max() < 1e-6
        assert_close(more_draws.elbo, estimate.log_prob, rtol=0, atol=1e-13)


def test_a_plain_flow_in_single_precision_has_no_error_either() -> None:
    flow, x = plain_flow().float(), 30 * torch.randn(50, 2)
    one, many = flow.estimate(x, samples=1), flow.estimate(x, samples=7)
    assert torch.equal(one.log_prob, many.log_prob)
    assert torch.equal(many.log_prob, many.elbo)
    assert not one.std_error.any()
    assert not many.std_error.any()
    assert bool((many.effective_samples == 7).all())


def test_a_cif_whose_index_does_nothing_is_the_plain_flow() -> None:
    """Proposition 4.1: s = t = 0 and p = q; then the bound is tight and the density the flow's."""
    indexed = build_model("cif-resflow", features=2, **SMALL, **NETS).double().eval()
    blocks = [layer for layer in indexed.layers if not isinstance(layer, Indexed)]
    for block in blocks:
        generic(block)
    plain = Flow(blocks)
    x = z = y = 2 * torch.randn(20, 2).double()
    for layer in indexed.layers:
        if isinstance(layer, Indexed):
            layer.posterior.load_state_dict(layer.prior.state_dict())
            z, log_weight = layer.encode(z)
            assert not log_weight.any()
        else:
            z, log_det = layer.encode(z)
            y, plain_log_det = layer.encode(y)
            assert torch.equal(log_det, plain_log_det)
        assert torch.equal(z, y)
    assert torch.equal(indexed.log_weight(x), plain.log_weight(x))
    estimate = indexed.estimate(x, samples=10)
    assert_close(estimate.log_prob, plain.log_prob(x), rtol=0, atol=1e-13)
    assert_close(estimate.elbo, plain.log_prob(x), rtol=0, atol=1e-13)
    assert not estimate.std_error.any()


# -- densities and samples --------------------------------------------------------------------------


def test_a_plain_density_integrates_to_one() -> None:
    points, area = grid(limit=12, cells=200)
    total, _ = integrate(plain_flow(), torch.ones(1).double(), points, area, samples=1)
    assert_close(total, torch.ones(1).double(), rtol=0, atol=1e-4)


def test_a_cif_density_integrates_to_one() -> None:
    points, area = grid(limit=12, cells=100)
    total, error = integrate(cif(), torch.ones(1).double(), points, area, samples=40)
    assert error < 0.01
    assert (total - 1).abs() < 4 * error


def test_a_cif_density_integrates_to_one_for_each_context() -> None:
    """And its mean, given the context, is that of its samples given the context."""
    points, area = grid(limit=12, cells=80)
    contexts = torch.tensor([[0.0, 0.0, 0.0], [1.0, -1.5, 1.0]]).double()
    samples = cif(3).sample(5000, contexts, seed=1)
    means = []
    for context, drawn in zip(contexts, samples.unbind(1), strict=True):
        of = torch.cat([torch.ones(len(points), 1).double(), points], dim=1)
        total, error = integrate(cif(3), of, points, area, samples=80, context=context)
        assert error[0] < 0.01
        assert (total[0] - 1).abs() < 4 * error[0]
        allowed = 4 * (error[1:].square() + drawn.var(0) / len(drawn)).sqrt()
        assert bool(((total[1:] - drawn.mean(0)).abs() < allowed).all())
        means.append(drawn.mean(0))
    assert (means[0] - means[1]).abs().max() > 0.3


@pytest.mark.parametrize("make", [plain_flow, cif])
def test_samples_match_the_density(make: Callable[[], Flow]) -> None:
    limit, bins, fine, n = 6.0, 12, 8, 20_000
    flow = make()
    x = flow.sample(n, seed=1)
    points, area = grid(limit, bins * fine)
    mass = flow.log_prob(points, samples=40, seed=2).exp() * area
    expected = n * mass.reshape(bins, fine, bins, fine).sum((1, 3)).flatten()
    counts = torch.histogramdd(x, bins=[bins] * 2, range=[-limit, limit] * 2).hist.flatten()
    some = expected >= 10
    expected = torch.cat([expected[some], n - expected[some].sum()[None]])
    counts = torch.cat([counts[some], n - counts[some].sum()[None]])
    statistic = ((counts - expected).square() / expected).sum().item()
    assert len(counts) > 30
    assert chi2.sf(statistic, df=len(counts) - 1) > 1e-3


def test_a_flow_can_be_the_base_of_another() -> None:
    layers = list(cif().layers)
    whole, nested = Flow(layers), Flow(layers[:1], base=Flow(layers[1:]))
    whole, nested = whole.double(), nested.double()
    x = torch.randn(5, 2).double()
    assert not nested.exact
    assert_close(nested.estimate(x, 40, seed=0), whole.estimate(x, 40, seed=0))
    assert torch.equal(nested.sample(5, seed=0), whole.sample(5, seed=0))


def test_a_flow_without_layers_is_its_base() -> None:
    x = torch.randn(5, 2)
    base = StandardNormal((2,))
    assert_close(Flow([], base).log_prob(x), base.log_weight(x))


def test_layers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"layer 0 \(Residual\) gives \(2,\)"):
        Flow([residual(2), residual(3)])
    with pytest.raises(ValueError, match="contexts of different shapes"):
        Flow([residual(2, 3), residual(2, 4)])
    with pytest.raises(ValueError, match="at least one layer"):
        Flow([])


def test_a_posterior_has_to_be_exact() -> None:
    with pytest.raises(ValueError, match="must be exact"):
        Indexed(affine(2, 2), normal(2, 2), posterior=cif())


# -- errors, draws and seeds ------------------------------------------------------------------------


def test_running_estimate_is_the_estimate_of_all_draws() -> None:
    log_weights = 2 * torch.randn(50, 4).double() - 700
    running = RunningEstimate()
    for some in log_weights.split([1, 20, 29]):
        running.add(some)
    weights = (log_weights + 700).exp()
    log_prob, elbo, std_error, effective, bias, pareto_k, *_ = running.result()
    assert_close(log_prob, weights.mean(0).log() - 700)
    assert_close(elbo, log_weights.mean(0))
    assert_close(std_error, weights.std(0) / weights.mean(0) / math.sqrt(50))
    assert_close(effective, weights.sum(0).square() / weights.square().sum(0))
    assert_close(bias, -std_error.square() / 2)
    whole = RunningEstimate()
    whole.add(log_weights)
    assert_close(pareto_k, whole.result().pareto_k)


def test_equal_weights_have_no_error_in_single_precision() -> None:
    log_weights = -1e4 * torch.rand(50)
    running = RunningEstimate()
    running.add(log_weights.expand(3, 50))
    running.add(log_weights.expand(4, 50))
    log_prob, elbo, std_error, effective, bias, pareto_k, *_ = running.result()
    assert torch.equal(log_prob, log_weights)
    assert torch.equal(elbo, log_weights)
    assert not std_error.any()
    assert not bias.any()
    assert bool((effective == 7).all())
    assert pareto_k.isnan().all()  # of seven draws


def test_the_standard_error_is_the_spread_of_repeated_estimates() -> None:
    x = torch.tensor([[0.0, 0.0], [1.0, 0.5], [2.0, -1.0], [-1.0, 1.0]]).double()
    estimate = cif().estimate(x.expand(400, 4, 2), samples=200, noise=Noise.seeded(0))
    spread = estimate.log_prob.std(0)
    reported = estimate.std_error.square().mean(0).sqrt()
    assert reported.min() > 0.01
    assert_close(reported / spread, torch.ones(4).double(), rtol=0, atol=0.3)


def test_a_tolerance_is_met_by_drawing_more() -> None:
    x = cif().sample(40, seed=0)
    first = cif().estimate(x, samples=16, seed=0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        estimate = cif().estimate(x, std_error=0.03, seed=0)
    late = int((estimate.std_error > 0.03).sum())
    assert first.std_error.max() > 0.03
    assert late <= 4
    assert estimate.std_error.max() <= 1.5 * 0.03
    assert [str(warning.message).split()[0] for warning in said] == [str(late)] * (late > 0)
    reference = cif().estimate(x, samples=5000, seed=1)
    error = (estimate.log_prob - reference.log_prob).abs()
    assert error.max() < 5 * 0.03


def test_a_tolerance_does_not_raise_the_estimate() -> None:
    """Log-mean-exps are low on average. Stopping where their error looks small may not undo that."""
    flow, truth = linear_gaussian_flow(1, off=0.4)
    x = truth.sample((20_000,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        estimate = flow.estimate(x, std_error=0.1, max_samples=2000, seed=0)
    error = estimate.log_prob - truth.log_prob(x)
    assert (estimate.std_error > 0.1).double().mean() < 0.02
    assert error.mean() < 4 * error.std() / math.sqrt(len(x))


def test_a_tolerance_that_is_not_met_is_told() -> None:
    x = cif().sample(40, seed=0)
    said = r"40 of 40 points have a standard error above 0.0001 .*took all of 50 draws.*max_samples"
    with pytest.warns(UserWarning, match=said) as record:
        estimate = cif().estimate(x, std_error=1e-4, max_samples=50)
    assert record[0].filename == __file__
    assert estimate.effective_samples.max() > 16


def test_no_rows_are_an_estimate_of_none_and_no_row_may_be_ready_at_first() -> None:
    """Zuko's transforms refuse a batch without rows."""
    flow = build_model("cif-maf", features=2, layers=1, hidden=[8], seed=0).eval()
    assert flow.estimate(torch.zeros(3, 0, 2)).log_prob.shape == (3, 0)
    generic(flow).float()
    with pytest.warns(UserWarning, match="3 of 3 points"):
        estimate = flow.estimate(torch.randn(3, 2), std_error=1e-6, max_samples=40)
    assert estimate.log_prob.isfinite().all()


def test_a_density_of_zero_has_no_error() -> None:
    running = RunningEstimate()
    running.add(torch.tensor([[-math.inf, 0.0], [-math.inf, 0.0]]))
    log_prob, _, std_error, effective_samples, *_ = running.result()
    assert log_prob.tolist() == [-math.inf, 0]
    assert std_error.tolist() == [0, 0]
    assert effective_samples.tolist() == [2, 2]


@pytest.mark.parametrize("std_error", [0.0, -1.0, math.nan])
def test_a_tolerance_that_cannot_be_met_is_refused(std_error: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        cif().estimate(torch.zeros(1, 2).double(), std_error=std_error)


def test_rows_and_draws_in_chunks_are_all_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    x = cif().sample(10, seed=0)
    whole = cif().estimate(x, samples=500, seed=0)
    monkeypatch.setattr("ciflows.core.evaluate.rows_at_once", lambda shape, device: 4)
    parts = cif().estimate(x, samples=500, seed=0)
    assert parts.log_prob.shape == (10,)
    error = (whole.std_error.square() + parts.std_error.square()).sqrt()
    assert bool(((whole.log_prob - parts.log_prob).abs() < 5 * error).all())
    assert_close(parts.effective_samples, whole.effective_samples, rtol=0.3, atol=0)
    assert cif().sample(10, seed=0).shape == (10, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the rows that would need more draws
        loose = cif().estimate(x, std_error=0.1, seed=0).log_prob
    assert_close(loose, whole.log_prob, rtol=0, atol=0.5)


MEMORY = """
import re, torch
torch.set_grad_enabled(False)
from pathlib import Path
from ciflows import build_model
torch.set_num_threads(1)
flow, x = build_model("cif-resflow", features=2, layers=2, hidden=[64]).eval(), torch.randn(500, 2)
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024
flow.estimate(x, samples=50)
before = peak()
flow.estimate(x, samples=1500)
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_memory_does_not_grow_with_draws() -> None:
    """All 750,000 rows at once would take 200 MB for each hidden layer's value alone."""
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 50


def test_seeds_repeat_draws() -> None:
    flow, x = cif(), torch.randn(6, 2).double()
    assert torch.equal(flow.sample(9, seed=3), flow.sample(9, seed=3))
    assert not torch.equal(flow.sample(9, seed=3), flow.sample(9, seed=4))
    assert_close(flow.estimate(x, 30, seed=3), flow.estimate(x, 30, seed=3), rtol=0, atol=0)
    assert not torch.equal(flow.log_prob(x, 9, seed=3), flow.log_prob(x, 9, seed=4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        once, again = (flow.estimate(x, std_error=0.2, seed=3) for _ in range(2))
    assert_close(once, again, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("how", [{"samples": 30}, {"std_error": 0.1, "max_samples": 200}])
def test_noise_of_the_rows_makes_each_estimate_its_own(how: dict[str, Any]) -> None:
    flow, x = cif(), torch.randn(50, 2).double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = flow.estimate(x, **how, noise=RowNoise(0))
        each = [flow.estimate(row[None], **how, noise=RowNoise(0)) for row in x]
        backwards = flow.estimate(x.flip(0), **how, noise=RowNoise(0))
        other = flow.estimate(x, **how, noise=RowNoise(1))
    for i, column in enumerate(whole):
        assert_close(torch.cat([estimate[i] for estimate in each]), column, equal_nan=True)
        assert_close(backwards[i].flip(0), column, equal_nan=True)
    assert not (other.log_prob == whole.log_prob).any()


def test_noise_of_the_rows_estimates_without_bias() -> None:
    """log p(x) averaged over many seeds, beside the same from a generator."""
    flow, x = cif(), torch.zeros(400, 2).double()
    by_row = [flow.estimate(x[:1], 20, noise=RowNoise(seed)).log_prob.exp() for seed in range(400)]
    drawn = flow.estimate(x, 20, noise=Noise.seeded(0)).log_prob.exp()
    error = math.hypot(torch.cat(by_row).std().item(), drawn.std().item()) / math.sqrt(400)
    assert abs(torch.cat(by_row).mean() - drawn.mean()) < 4 * error


def test_a_seed_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    cif().sample(3, seed=0)
    cif().log_prob(torch.zeros(3, 2).double(), seed=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_reports_keep_the_shape_of_the_points() -> None:
    for shape in ((), (0,), (3,), (3, 4)):
        estimate = cif().estimate(torch.zeros(*shape, 2).double(), samples=5)
        assert all(column.shape == shape for column in estimate)
        assert cif().log_weights(torch.zeros(*shape, 2).double(), 5).shape == (5, *shape)


def test_impossible_requests_are_refused() -> None:
    x = torch.zeros(3, 2).double()
    with pytest.raises(ValueError, match="samples must be at least 1; got 0"):
        cif().log_prob(x, samples=0)
    with pytest.raises(ValueError, match="n must be at least 1; got 0"):
        cif().sample(0)
    with pytest.raises(ValueError, match=r"expected shape \(\*, 2\); got \(3, 1\)"):
        cif().log_prob(x[:, :1])


def test_summary_averages_over_the_data() -> None:
    flow, truth = linear_gaussian_flow(1, off=0.3)
    x = truth.sample((200,))
    estimate = flow.estimate(x, samples=50, seed=0)
    summary = summarise(estimate, samples=50)
    assert summary.points == 200
    assert summary.samples == 50
    assert summary.log_prob == pytest.approx(estimate.log_prob.mean().item())
    assert summary.elbo < summary.log_prob
    assert summary.std_error == pytest.approx(estimate.log_prob.std().item() / math.sqrt(200))
    error = summary.log_prob - truth.log_prob(x).mean().item()
    assert abs(error) < 4 * summary.monte_carlo_error
    assert summary.monte_carlo_error < summary.std_error


# -- contexts ---------------------------------------------------------------------------------------


def test_contexts_may_lead_or_be_shared() -> None:
    flow, x = cif(3), torch.randn(4, 5, 2).double()
    context = torch.randn(5, 3).double()
    shared = flow.estimate(x, 40, context=context, seed=0)
    assert_close(shared, flow.estimate(x, 40, context=context.expand(4, 5, 3), seed=0))
    assert not torch.allclose(shared.log_prob, flow.log_prob(x, 40, context=context[0], seed=0))
    weights = flow.log_weights(x, 10, context, Noise.seeded(0))
    assert_close(weights, flow.log_weights(x, 10, context.expand(4, 5, 3), Noise.seeded(0)))
    assert flow.sample(7, context).shape == (7, 5, 2)
    assert flow.sample(7, context[0]).shape == (7, 2)
    assert flow.sample(7, context.expand(4, 5, 3)).shape == (7, 4, 5, 2)
    many = flow.estimate(x[0, 0], 40, context=context, seed=0)
    assert_close(many, flow.estimate(x[0, 0].expand(5, 2), 40, context=context, seed=0))
    with pytest.raises(ValueError, match=r"points \(4, 5\) and contexts \(2,\) do not fit together"):
        flow.log_prob(x, context=context[:2])


def test_a_likelihood_of_a_plain_flow_draws_nothing() -> None:
    flow, x = build_model("nsf", features=2, layers=1, hidden=[8]), torch.randn(4, 2)
    state = torch.get_rng_state()
    assert torch.allclose(torch.func.vmap(flow.log_prob)(x), flow.log_prob(x), atol=1e-6)
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(TypeError, match="expected a tensor; got a ndarray"):
        flow.log_prob(x.numpy())  # type: ignore[arg-type]


def test_context_rows_stay_with_their_points() -> None:
    flow, contexts = cif(3), 2 * torch.randn(6, 3).double()
    x = flow.sample(1, contexts, seed=0)[0]
    precise = {"samples": 2000, "seed": 0}
    together = flow.estimate(x, context=contexts, **precise)
    adaptive = flow.estimate(x, context=contexts, std_error=0.02, max_samples=50_000, seed=0)
    for i in range(6):
        alone = flow.estimate(x[i], context=contexts[i], **precise)
        error = 5 * (alone.std_error + together.std_error[i] + 0.02)
        assert (alone.log_prob - together.log_prob[i]).abs() < error
        assert (alone.log_prob - adaptive.log_prob[i]).abs() < error


def test_a_missing_context_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a context"):
        cif(3).log_prob(torch.zeros(2, 2).double())
    with pytest.raises(ValueError, match="needs a context"):
        cif(3).sample(2)
    with pytest.raises(ValueError, match=r"context: expected shape \(\*, 3\)"):
        cif(3).sample(2, torch.zeros(4).double())


def test_a_context_that_no_layer_takes_is_refused() -> None:
    x, context = torch.randn(6, 2).double(), torch.zeros(3).double()
    with pytest.raises(ValueError, match="none of its layers takes one"):
        cif().estimate(x, context=context)
    with pytest.raises(ValueError, match="none of its layers takes one"):
        cif().sample(3, context=context)


def test_points_of_another_precision_are_refused_in_words() -> None:
    with pytest.raises(ValueError, match=r"takes torch.float64, the points are torch.float32"):
        cif().estimate(torch.zeros(2, 2))


@pytest.mark.parametrize(
    "evaluate",
    [
        lambda flow, x: flow.log_prob(x),
        lambda flow, x: flow.sample(3),
        diagnostics.lipschitz,
        diagnostics.round_trip,
        diagnostics.reconstruction_error,
        diagnostics.log_det_error,
        diagnostics.paper_log_prob,
        diagnostics.draws_curve,
    ],
)
def test_what_is_reported_has_all_bits_whatever_is_set(evaluate: Callable[[Flow, Tensor], Any]) -> None:
    """Torch may be set to multiply with fewer bits on a GPU; a likelihood is not to be had that way."""
    seen = []

    class Spy(Standardise):
        def _encode(self, *args: Any) -> Any:
            return self._note(super()._encode(*args))

        def _decode(self, *args: Any) -> Any:
            return self._note(super()._decode(*args))

        def _note(self, result: Any) -> Any:
            seen.append((torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32))
            return result

    block = Residual(LipschitzMLP(2, [8]), Series(probes=4))
    flow = Flow([Spy(torch.zeros(2), torch.ones(2)), block]).eval()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        evaluate(flow, torch.zeros(3, 2))
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert set(seen) == {("highest", False)}

"""Stated errors against known truths: intervals that cover, flags that fire, bounds from both sides."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal
from torch.testing import assert_close

from ciflows import Flow, Indexed, build_model
from ciflows.core.density import ConditionalNormal
from ciflows.core.evaluate import Estimate, RunningEstimate, Summary, summarise
from ciflows.core.layer import Layer
from ciflows.core.noise import Noise, RowNoise
from ciflows.core.proposals import RecordingNoise, TrueDrawNoise, WidenedNoise
from ciflows.datasets import get_synthetic
from ciflows.diagnostics import level_test, paired, sandwich
from ciflows.layers import Affine, AutoregressiveSpline, Standardise
from ciflows.layers.dequantise import Dequantise
from ciflows.networks import MaskedResidualNet
from ciflows.tables.cells import Cells
from ciflows.tables.column_layer import ColumnLayer
from ciflows.tables.marginals import Smooth
from constructors import LAYERS, build, generic, linear_gaussian_flow


def linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.weight.data, layer.bias.data = weight, bias
    return layer


def gaussian_cif(width: float = 1.0, shift: float = 0.0) -> tuple[Flow, MultivariateNormal]:
    """x = z - u with z, u ~ N(0, I), and the density of x; q's width and shift are relative to the
    exact posterior's width."""
    zero, one = torch.zeros(2), torch.eye(2)
    flat, std = torch.zeros(2, 2), math.sqrt(0.5)
    log_std = torch.full((2,), math.log(width * std))
    layer = Indexed(
        Affine(2, linear(torch.cat([flat, one]), torch.zeros(4)), 2),
        ConditionalNormal(linear(torch.cat([flat, flat]), torch.zeros(4)), 2, 2),
        ConditionalNormal(
            linear(torch.cat([-one / 2, flat]), torch.cat([zero + shift * std, log_std])), 2, 2
        ),
    )
    return Flow([layer]).double().eval(), MultivariateNormal(zero.double(), 2 * one.double())


def groups(estimate: Estimate, size: int) -> list[Summary]:
    columns = zip(*(column.split(size) for column in estimate), strict=True)
    return [summarise(Estimate(*part)) for part in columns]


# -- intervals and flags ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "shift"), [(1.1, 0.1), (1.3, 0.3), (0.9, 0.2)], ids=["good", "wide", "narrower"]
)
def test_the_interval_of_the_mean_covers_it(width: float, shift: float) -> None:
    flow, truth = gaussian_cif(width, shift)
    x = truth.sample((400 * 200,))
    summaries = groups(flow.estimate(x, 40, seed=0), 200)
    means = truth.log_prob(x).reshape(400, 200).mean(1).tolist()
    inside = [s.interval[0] < mean < s.interval[1] for s, mean in zip(summaries, means, strict=True)]
    assert 0.92 <= sum(inside) / 400 <= 0.98
    assert not any(summary.doubtful for summary in summaries)


def test_without_its_bias_the_interval_would_not_cover() -> None:
    flow, truth = gaussian_cif(1.6, 0.3)
    x = truth.sample((20_000,))
    summary = summarise(flow.estimate(x, 10, seed=0))
    error = summary.log_prob - truth.log_prob(x).mean().item()
    assert error < -5 * summary.monte_carlo_error
    assert summary.interval[0] < truth.log_prob(x).mean().item() < summary.interval[1]


def test_the_interval_of_a_trained_cif_covers_many_draws() -> None:
    flow = build_model("cif-maf", features=2, layers=1, hidden=[8], seed=0)
    data = get_synthetic("two-uniforms").sample(26_000, seed=0)
    optimiser = torch.optim.Adam(flow.parameters(), lr=0.01)
    for step in range(200):
        optimiser.zero_grad()
        (
            -flow.log_weight(data[128 * step : 128 * (step + 1)], noise=Noise.seeded(step)).mean()
        ).backward()
        optimiser.step()
    x = data[-100:]
    reference = summarise(flow.eval().estimate(x, 10_000, seed=1000))
    truth = reference.log_prob - reference.bias
    summaries = [summarise(flow.estimate(x, 50, seed=seed)) for seed in range(200)]
    inside = sum(s.interval[0] < truth < s.interval[1] for s in summaries) / 200
    assert summaries[0].log_prob > summaries[0].elbo + 0.002  # the index is in use
    assert 0.91 <= inside <= 0.99


def test_flags_fire_for_a_narrow_q() -> None:
    flow, truth = gaussian_cif(0.3)
    x = truth.sample((100 * 200,))
    summaries = groups(flow.estimate(x, 100, seed=0), 200)
    means = truth.log_prob(x).reshape(100, 200).mean(1).tolist()
    covered = [s.interval[0] < mean < s.interval[1] for s, mean in zip(summaries, means, strict=True)]
    assert sum(covered) < 10  # so a flag has to fire
    assert sum(summary.doubtful for summary in summaries) >= 95
    assert all(sandwich(flow, 200, 100, seed=seed).is_wide() for seed in range(20))


def test_the_flag_fires_for_a_narrow_q_under_a_tolerance_too() -> None:
    """Redrawn rows have lighter tails, but the others still hide what q misses."""
    flow, truth = gaussian_cif(0.3)
    x = truth.sample((40 * 200,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        summaries = groups(flow.estimate(x, std_error=0.05, max_samples=300, seed=0), 200)
    assert sum(summary.doubtful for summary in summaries) >= 38


# -- tails and the widened q ------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0.2, 0.5, 0.9])
def test_the_tail_of_pareto_weights_is_found(k: float) -> None:
    """P(w > t) = t^(-1/k). The fit draws k towards 1/2, as if ten more weights had it."""
    generator = torch.Generator().manual_seed(0)
    running = RunningEstimate()
    for _ in range(10):
        running.add(-k * torch.rand(1000, 50, generator=generator).double().log())
    found = running.result().pareto_k
    assert abs(found.mean() - (300 * k + 5) / 310) < 0.04
    assert 0.02 < found.std() < 0.16


def test_a_tail_is_told_only_where_it_can_be() -> None:
    flow, truth = gaussian_cif(1.3)
    x = truth.sample((20,))
    assert flow.estimate(x, 24).pareto_k.isnan().all()
    assert flow.estimate(x, 25).pareto_k.isfinite().all()
    assert not gaussian_cif()[0].estimate(x, 100).pareto_k.any()  # all weights alike
    assert math.isnan(summarise(flow.estimate(x, 10)).pareto_share)
    running = RunningEstimate()
    running.add(torch.full((100, 2), -math.inf).index_put_((torch.tensor(3),), torch.tensor(0.0)))
    assert (running.result().pareto_k > 1).all()  # one draw has all the weight


def test_draws_of_a_widened_q_estimate_the_same_density() -> None:
    flow, truth = gaussian_cif(1.2, 0.2)
    x = truth.sample((20_000,))
    estimate = flow.estimate(x, 50, noise=WidenedNoise(0))
    assert estimate.widened.all()
    ratio = torch.exp(estimate.log_prob - truth.log_prob(x))  # 1 on average, without bias
    assert abs(ratio.mean() - 1) < 4 * ratio.std() / math.sqrt(len(x))
    assert ratio.std() < 0.3


def test_a_tolerance_widens_a_narrow_q_where_its_tail_is_heavy() -> None:
    flow, truth = gaussian_cif(0.3)
    x = truth.sample((400,))
    plain = flow.estimate(x, 400, seed=0).log_prob - truth.log_prob(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        estimate = flow.estimate(x, std_error=0.1, max_samples=400, seed=0)
    error = estimate.log_prob - truth.log_prob(x)
    wide = estimate.widened > 0
    assert wide.double().mean() > 0.3
    assert error[wide].square().mean().sqrt() < 0.3 * plain.square().mean().sqrt()
    assert summarise(estimate).widened == int(wide.sum())
    assert f"{int(wide.sum())} rows redrawn" in str(summarise(estimate))


def test_a_tolerance_takes_few_draws_where_few_will_do() -> None:
    flow, truth = gaussian_cif(1.01)
    x = truth.sample((500,))
    estimate = flow.estimate(x, std_error=0.05, seed=0)
    assert estimate.samples.mean() < 5
    assert (estimate.log_prob - truth.log_prob(x)).abs().max() < 0.1


# -- the sandwich -----------------------------------------------------------------------------------

DRAWING = [name for name, case in LAYERS.items() if not build(name).exact and not build(name).noisy]


@pytest.mark.parametrize("name", DRAWING)
def test_true_draws_lead_back_to_where_a_sample_came_from(name: str) -> None:
    """A layer that draws records the draw of a sample, and takes it back as draw number 0."""
    layer, case = build(name), LAYERS[name]
    z = torch.randn(5, *layer.noise_shape).double()
    context = None if case.context_shape is None else torch.randn(5, *case.context_shape).double()
    record = RecordingNoise(torch.Generator().manual_seed(0))
    x = layer.decode(z, context, record)
    noise = TrueDrawNoise(0, record.values).about(x, layer.shape)
    again, _ = layer.encode(x.expand(20, *x.shape), context, noise)
    assert record.values
    assert_close(again[0], z, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(again[1:], z.expand_as(again[1:]))
    assert noise.unclaimed == 0


@pytest.mark.parametrize("width", [1.0, 1.3, 0.6])
def test_the_sandwich_holds_the_truth(width: float) -> None:
    flow, truth = gaussian_cif(width)
    result = sandwich(flow, 20_000, 10, seed=0)
    mean = -truth.entropy().item()
    error = 4 * math.sqrt(truth.log_prob(truth.sample((20_000,))).var().item() / 20_000)
    assert result.lower < mean + error
    assert result.upper > mean - error
    assert result.gap == pytest.approx(result.upper - result.lower)
    assert (result.gap < 1e-9) if width == 1 else (result.gap > 4 * result.std_error)


def some_cells(features: int) -> ColumnLayer:
    """A table's layer: the second column has three levels, the others any number."""
    cells, others = Cells(torch.tensor([3])), [place for place in range(features) if place != 1]
    cells.probabilities[0] = torch.tensor([0.3, 0.5, 0.2])
    open_ = torch.full((len(others),), math.inf)
    return ColumnLayer(features, [([1], cells), (others, Smooth(-open_, open_))])


def test_the_sandwich_of_a_table_with_cells_and_of_integers() -> None:
    cells = some_cells(2)
    scale = Standardise(torch.zeros(2), torch.tensor([1.0, 0.5]))
    coarse = Standardise(torch.zeros(2), torch.full((2,), 0.4))
    for layers in ([cells, scale], [Dequantise((2,)), coarse]):
        result = sandwich(Flow(layers).double(), 4000, 2)
        assert 3 * result.std_error < result.gap < 1
        assert sandwich(Flow(layers).double(), 4000, 40).gap < result.gap / 3


def test_the_sandwich_takes_contexts() -> None:
    flow = build_model("cif-maf", features=2, context_features=3, layers=1, hidden=[8]).eval()
    result = sandwich(flow, samples=5, context=torch.randn(40, 3))
    assert (result.points, result.samples) == (40, 5)
    with pytest.raises(ValueError, match="needs a context"):
        sandwich(flow)


class Secretive(Layer):
    """Draws in encode and tells nobody."""

    def _encode(self, x: Tensor, context: Tensor | None, noise: Noise) -> tuple[Tensor, Tensor]:
        return x + noise.uniform(x.shape, like=x), x.new_zeros(x.shape[:-1])

    def _decode(self, z: Tensor, context: Tensor | None, noise: Noise) -> Tensor:
        return z.floor()


class Forgetful(Secretive):
    """Asks for its true draw, but has not recorded it."""

    def _encode(self, x: Tensor, context: Tensor | None, noise: Noise) -> tuple[Tensor, Tensor]:
        return x + noise.latent(self, noise.uniform(x.shape, like=x)), x.new_zeros(x.shape[:-1])


def test_layers_that_do_not_take_part_in_the_sandwich_are_refused() -> None:
    with pytest.raises(ValueError, match="does not pass its draws through"):
        sandwich(Flow([Secretive((2,))]))
    with pytest.raises(ValueError, match=r"Forgetful: it draws in encode.*noise\.record"):
        sandwich(Flow([Forgetful((2,))]))
    layer = gaussian_cif()[0].layers[0]
    with pytest.raises(ValueError, match="used twice"):
        sandwich(Flow([layer, layer]).double())  # type: ignore[list-item]


def test_the_level_test_tells_few_draws_from_enough() -> None:
    flow, truth = gaussian_cif(1.6, 0.5)
    x = truth.sample((2000,))
    few, enough = level_test(flow, x, 4), level_test(flow, x, 400)
    assert few.rise > 10 * few.std_error
    assert not few.is_level()
    assert enough.is_level()
    assert 1 <= enough.effective[0] <= enough.effective[1] <= enough.effective[2] <= 400
    with pytest.raises(ValueError, match="at least 2 draws"):
        level_test(flow, x, 1)


# -- rows, and the noise that is theirs -------------------------------------------------------------


def spline_cif() -> Flow:
    network = MaskedResidualNet(3, 3 * 4 - 1, hidden=8, blocks=1)
    spline = AutoregressiveSpline(3, network, bins=4, bound=3.0)
    index = build_model("cif-maf", features=3, layers=1, hidden=[8]).layers[-1]
    return Flow([spline, index])  # type: ignore[list-item]


def table_like() -> Flow:
    cells = some_cells(3)
    return Flow([cells, *build_model("cif-maf", features=3, layers=1, hidden=[8]).layers])  # type: ignore[list-item]


@pytest.mark.parametrize(
    "make",
    [
        lambda: build_model("cif-resflow", features=3, layers=2, hidden=[16]),
        lambda: build_model("cif-maf", features=3, layers=2, hidden=[16]),
        spline_cif,
        table_like,
    ],
    ids=["residual", "maf", "spline", "cells"],
)
@pytest.mark.parametrize("how", [{"samples": 40}, {"std_error": 0.2, "max_samples": 100}], ids=str)
def test_an_estimate_does_not_depend_on_order_or_batch(
    make: Any, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To rounding: matrix products of other sizes add up in another order. In float64, 1e-9 nats."""
    flow = generic(make(), 0.2).eval()
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0)).double()
    x[:, 1] = x[:, 1].round().clamp(0, 2)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = flow.estimate(x, **how, seed=0)
        shuffled = flow.estimate(x[order], **how, seed=0)
        parts = [flow.estimate(part, **how, seed=0) for part in x.split([1, 7, 52])]
        monkeypatch.setattr("ciflows.core.evaluate.rows_at_once", lambda shape, device: 11)
        chunked = flow.estimate(x, **how, seed=0)
    together = Estimate(*(torch.cat(column) for column in zip(*parts, strict=True)))
    for other in (Estimate(*(column[order.argsort()] for column in shuffled)), together, chunked):
        assert_close(other.log_prob, whole.log_prob, rtol=0, atol=1e-9)
        assert_close(other.std_error, whole.std_error, rtol=0, atol=1e-9)
        assert torch.equal(other.samples, whole.samples)


def test_rows_with_other_contexts_have_noise_of_their_own() -> None:
    x, contexts = torch.zeros(2, 2), torch.tensor([[0.0], [1.0]])
    first, second = RowNoise(0).about(x, (2,), contexts).normal((3, 2, 1), like=x).unbind(1)
    assert not (first == second).any()


def test_row_noise_has_the_moments_and_independence_of_noise() -> None:
    x = torch.arange(200.0)[:, None]
    normal = RowNoise(0).about(x, (1,)).normal((100, 200, 3), like=x)
    assert abs(normal.mean()) < 4 / math.sqrt(60_000)
    assert abs(normal.var() - 1) < 4 * math.sqrt(2 / 60_000)
    assert abs(normal.pow(4).mean() - 3) < 4 * math.sqrt(96 / 60_000)
    for one, other in [
        (normal[1:], normal[:-1]),
        (normal[:, 1:], normal[:, :-1]),
        (normal[..., 1:], normal[..., :-1]),
    ]:
        assert abs((one * other).mean()) < 4 / math.sqrt(one.numel())


def test_equal_rows_do_not_average_their_error_away() -> None:
    """Draws belong to rows: a row that comes a hundred times has one error, not a hundred."""
    flow, truth = gaussian_cif(1.5)
    x = truth.sample((5,))
    once, often = (summarise(flow.estimate(rows, 30, seed=0)) for rows in (x, x.repeat(100, 1)))
    assert often.monte_carlo_error == pytest.approx(once.monte_carlo_error)
    assert often.std_error < once.std_error / 5


# -- summaries and differences ----------------------------------------------------------------------


def test_whole_weights_are_repeated_rows() -> None:
    flow, truth = gaussian_cif(1.5)
    estimate = flow.estimate(truth.sample((50,)), 30, seed=0)
    weight = torch.arange(50) % 3
    repeated = Estimate(*(column.repeat_interleave(weight) for column in estimate))
    weighted, plain = summarise(estimate, weight=weight), summarise(repeated)
    assert weighted.log_prob == pytest.approx(plain.log_prob)
    assert weighted.bias == pytest.approx(plain.bias)
    assert weighted.monte_carlo_error == pytest.approx(plain.monte_carlo_error)
    assert (weighted.points, weighted.samples) == (50, 30)


def test_a_summary_is_one_line() -> None:
    flow, truth = gaussian_cif(1.5)
    summary = summarise(flow.estimate(truth.sample((50,)), 100, seed=0))
    assert str(summary).startswith(f"{summary.log_prob:.4f} ± {summary.std_error:.4f} nats")
    assert "% k > 0.7" in str(summary)
    assert "\n" not in str(summary)
    exact = summarise(Estimate.exact(torch.tensor([1.0, 2.0]), 1))
    assert str(exact) == "1.5000 ± 0.5000 nats over 2 rows (exact)"


def test_paired_differences_have_the_error_of_the_difference() -> None:
    """Two q's for one model differ by Monte-Carlo error alone, far less than either mean's own error."""
    (first, truth), (second, _) = gaussian_cif(1.3), gaussian_cif(1.2, 0.2)
    differences = []
    for seed in range(100):
        x = truth.sample((200,))
        a, b = first.estimate(x, 30, seed=seed), second.estimate(x, 30, seed=seed + 1000)
        differences.append(paired(a, b))
    means = torch.tensor([each.difference for each in differences])
    told = sum(each.std_error for each in differences) / 100
    assert told == pytest.approx(means.std().item(), rel=0.25)
    assert told < 0.2 * summarise(a).std_error
    assert differences[0].monte_carlo_error == pytest.approx(told, rel=0.25)
    assert abs(means.mean()) < 4 * told / 10
    weight = torch.rand(200)
    assert paired(a, a, weight).difference == 0
    with pytest.raises(ValueError, match="the same rows twice; got 200 and 199"):
        paired(a, Estimate(*(column[1:] for column in b)))


def test_the_bias_is_that_of_the_exact_posterior_widened() -> None:
    flow, truth = linear_gaussian_flow(2, off=0.1)
    x = truth.sample((20_000,))
    estimate = flow.estimate(x, 20, seed=0)
    error = estimate.log_prob - truth.log_prob(x)
    assert abs((error - estimate.bias).mean()) < 4 * error.std() / math.sqrt(len(x)) + 0.1 * abs(
        estimate.bias.mean()
    )
    assert estimate.bias.mean() < -3 * error.std() / math.sqrt(len(x))

"""Diagnostics against maps whose constants are known, and the estimator that is not to be trusted."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from ciflows import Flow, Indexed, build_model
from ciflows.core.density import ConditionalNormal
from ciflows.core.layer import Layer
from ciflows.core.noise import Noise
from ciflows.diagnostics import (
    draws_curve,
    is_chain,
    leaked_mass,
    lipschitz,
    paper_log_prob,
    round_trip,
)
from ciflows.layers import Affine, Residual, Standardise
from ciflows.networks import MLP, LipschitzMLP, converge_norms


def strong_blocks(features: int, signs: Sequence[int], kappa: float = 0.9) -> Flow:
    """Blocks x + g(x) with g(x) ≈ ±kappa x / 1.1² for large positive x: near their bounds there."""
    blocks = [Residual(LipschitzMLP(features, [features], kappa)) for _ in signs]
    with torch.no_grad():
        for block, sign in zip(blocks, signs, strict=True):
            block.network.beta.fill_(10.0)
            for linear, scale in zip(block.network.linears, (10, 10 * sign), strict=True):
                linear.get_parameter("weight").copy_(scale * torch.eye(features))
    flow = Flow(blocks)
    converge_norms(flow)
    return flow.eval()


def constant_network(values: list[float], inputs: int) -> nn.Linear:
    """A network that gives the same numbers whatever it is given."""
    network = nn.Linear(inputs, len(values))
    nn.init.zeros_(network.weight)
    with torch.no_grad():
        network.bias.copy_(torch.tensor(values))
    return network


@pytest.fixture
def index_layer() -> Indexed:
    """z = e^s ⊙ (x + t) with s = (u, -2u), and u = 0.5 almost surely."""
    network = nn.Linear(1, 4, bias=False)
    with torch.no_grad():
        network.weight.copy_(torch.tensor([[1.0], [-2.0], [0.3], [0.0]]))
    certain = constant_network([0.5, -30.0], inputs=2)
    normal = ConditionalNormal(certain, features=1, context_features=2)
    return Indexed(Affine(2, network, context_features=1), prior=normal, posterior=normal)


def test_known_singular_values() -> None:
    scales = torch.tensor([0.5, 2.0, 8.0])
    flow = Flow([Standardise(torch.ones(3), scales), Standardise(torch.zeros(3), 1 / scales)])
    result = lipschitz(flow, torch.randn(7, 3))
    first, second = result.layers
    assert (first.largest, first.smallest, first.constant) == pytest.approx((2, 1 / 8, 8))
    assert (second.largest, second.smallest, second.constant) == pytest.approx((8, 1 / 2, 8))
    assert result.whole[1:4] == pytest.approx((1, 1, 1))  # each undoes the other
    assert result.whole.bound == pytest.approx(64)


def test_indexed_layer_is_measured_at_its_draw(index_layer: Indexed) -> None:
    result = lipschitz(Flow([index_layer]), torch.randn(5, 2))
    expected = (math.exp(0.5), math.exp(-1.0), math.exp(1.0))
    assert result.whole[1:4] == pytest.approx(expected, rel=1e-5)
    assert result.whole.bound is None


def test_whole_map_is_the_product_of_jacobians(index_layer: Indexed) -> None:
    blocks = list(strong_blocks(2, [1, -1]).layers)
    flow = Flow([blocks[0], index_layer, blocks[1]]).double()  # type: ignore[list-item]
    x = torch.randn(6, 2, dtype=torch.float64)

    def encode(row: Tensor) -> Tensor:
        for layer in flow.layers:
            row = layer.encode(row[None])[0][0]  # type: ignore[operator]
        return row

    jacobians = torch.stack([torch.autograd.functional.jacobian(encode, row) for row in x])  # type: ignore[no-untyped-call]
    values = torch.linalg.svdvals(jacobians)
    whole = lipschitz(flow, x).whole
    assert whole.largest == pytest.approx(values.max().item(), rel=1e-6)
    assert whole.smallest == pytest.approx(values.min().item(), rel=1e-6)


@pytest.mark.parametrize("kappa", [0.3, 0.9])
def test_residual_blocks_come_near_their_bound_and_keep_it(kappa: float) -> None:
    flow = strong_blocks(2, [1, -1, -1], kappa)
    result = lipschitz(flow, torch.cat([torch.full((1, 2), 50.0), 5 * torch.randn(200, 2)]))
    for block in result.layers:
        assert block.bound == pytest.approx(1 / (1 - kappa))
        assert 1 - kappa - 1e-4 <= block.smallest <= block.largest <= 1 + kappa + 1e-4
    assert result.layers[0].largest > 1 + 0.8 * kappa
    assert result.layers[1].smallest < 1 - 0.8 * kappa
    assert result.whole.bound == pytest.approx((1 / (1 - kappa)) ** 3)
    assert 1 / (1 - 0.8 * kappa) < result.whole.constant <= (1 / (1 - kappa)) ** 3


def test_context_reaches_layers_and_families() -> None:
    flow = build_model("cif-resflow", features=2, context_features=3, layers=2, hidden=[8])
    x, context = torch.randn(4, 2), torch.randn(4, 3)
    assert len(lipschitz(flow, x, context).layers) == 4
    assert round_trip(flow, x, context).whole < 1e-5
    with pytest.raises(ValueError, match="needs a context"):
        lipschitz(flow, x)


class Lossy(Layer):
    """Neither a bijection nor an indexed family."""

    def _encode(self, x: Tensor, context: Tensor | None, noise: Noise) -> tuple[Tensor, Tensor]:
        return x, x.new_zeros(x.shape[:-1])

    def _decode(self, z: Tensor, context: Tensor | None, noise: Noise) -> Tensor:
        return z


def test_layer_without_a_jacobian_is_refused() -> None:
    with pytest.raises(ValueError, match="Lossy is neither a bijection nor an indexed family"):
        lipschitz(Flow([Lossy((2,))]), torch.zeros(1, 2))


def test_round_trip_is_rounding(index_layer: Indexed) -> None:
    blocks = list(strong_blocks(2, [1, -1, 1]).layers)
    flow = Flow([blocks[0], index_layer, *blocks[1:]]).double()  # type: ignore[list-item]
    result = round_trip(flow, 3 * torch.randn(50, 2, dtype=torch.float64))
    assert len(result.layers) == 4
    assert 0 < result.whole < 1e-11
    assert max(result.layers) < 1e-12


def test_round_trip_sees_a_wrong_inverse(index_layer: Indexed) -> None:
    wrong = Standardise(torch.zeros(2), torch.ones(2))
    wrong._decode = lambda z, context, noise: z + 0.25  # type: ignore[method-assign]
    result = round_trip(Flow([index_layer, wrong]), torch.zeros(3, 2))
    assert result.layers == pytest.approx((0, 0.25), abs=1e-6)
    assert result.whole == pytest.approx(0.25 * math.exp(1.0), rel=1e-4)  # stretched on the way back


def test_leaked_mass_of_a_gaussian() -> None:
    flow = Flow([Standardise(torch.zeros(2), torch.tensor([1.0, 3.0]))])
    leak = leaked_mass(flow, lambda x: (x[:, 0].abs() <= 1) & (x[:, 1].abs() <= 3), n=20_000)
    truth = 1 - math.erf(1 / math.sqrt(2)) ** 2
    assert leak.std_error == pytest.approx(math.sqrt(truth * (1 - truth) / 20_000), rel=0.05)
    assert abs(leak.share - truth) < 4 * leak.std_error
    assert leak.share < leak.upper < leak.share + 2 * leak.std_error
    none = leaked_mass(flow, lambda x: x[:, 0] < math.inf, n=100)
    assert none.share == none.std_error == 0
    assert none.upper == pytest.approx(0.03, rel=0.02)  # the rule of three


def test_paper_log_prob_rises_with_draws_though_nothing_is_drawn() -> None:
    """The trap: a plain flow has one likelihood, and the paper's estimator gives it many."""
    flow = strong_blocks(6, [1, 1])
    x = 5 + torch.randn(200, 6)
    exact = flow.log_prob(x)
    rises = [(paper_log_prob(flow, x, m, seed=0) - exact).mean().item() for m in (1, 10, 50)]
    assert torch.equal(flow.log_prob(x, samples=50), exact)
    assert abs(rises[0]) < 0.8  # unbiased where nothing stands inside a logarithm
    assert rises[1] > rises[0] + 1
    assert rises[2] > rises[1] + 0.2


def test_paper_log_prob_puts_strategies_back(monkeypatch: pytest.MonkeyPatch) -> None:
    flow = build_model("resflow", features=2, layers=2, hidden=[8], log_det="roulette")
    before = [(b.log_det, b.training_log_det) for b in flow.modules() if isinstance(b, Residual)]
    paper_log_prob(flow, torch.randn(3, 2), 2)

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("on the way")

    monkeypatch.setattr(flow, "log_weights", fail)
    with pytest.raises(RuntimeError, match="on the way"):
        paper_log_prob(flow, torch.randn(3, 2), 2)
    after = [(b.log_det, b.training_log_det) for b in flow.modules() if isinstance(b, Residual)]
    assert all(a is b for pair in zip(before, after, strict=True) for a, b in zip(*pair, strict=True))


def test_draws_curve_climbs_from_the_elbo_to_the_likelihood() -> None:
    flow = build_model("cif-resflow", features=2, layers=2, hidden=[8]).eval()
    x = torch.randn(200, 2)
    curve = draws_curve(flow, x, counts=(1, 4, 20, 100))
    values = [point.log_prob for point in curve]
    assert values == sorted(values)
    assert values[-1] > values[0] + 0.03
    assert all(0 < point.monte_carlo_error < 0.1 for point in curve)
    exact = flow.estimate(x, 2000, seed=1)
    assert values[0] == pytest.approx(exact.elbo.mean().item(), abs=5 * curve[0].monte_carlo_error)
    assert values[-1] == pytest.approx(exact.log_prob.mean().item(), abs=0.06)
    assert curve[-1].std_error == pytest.approx(exact.log_prob.std().item() / math.sqrt(200), rel=0.15)


def test_draws_curve_of_a_plain_flow_is_level() -> None:
    curve = draws_curve(strong_blocks(2, [1, -1]), torch.randn(50, 2), counts=(1, 10))
    assert curve[0].log_prob == curve[1].log_prob
    assert curve[0].monte_carlo_error == 0
    assert curve[1].monte_carlo_error == pytest.approx(0, abs=1e-8)


def test_draws_curve_refuses_noisy_log_determinants() -> None:
    flow = build_model("resflow", features=2, layers=1, hidden=[8], log_det="roulette").train()
    with pytest.raises(ValueError, match="must be exact"):
        draws_curve(flow, torch.randn(3, 2))


def test_monte_carlo_error_is_the_spread_over_seeds() -> None:
    flow = build_model("cif-resflow", features=2, layers=1, hidden=[8]).eval()
    x = torch.randn(50, 2)
    runs = [draws_curve(flow, x, counts=(2, 8), seed=seed) for seed in range(60)]
    for column in zip(*runs, strict=True):
        spread = torch.tensor([point.log_prob for point in column]).std().item()
        told = sum(point.monte_carlo_error for point in column) / len(column)
        assert told == pytest.approx(spread, rel=0.35)


def test_mlp_contexts_change_the_family() -> None:
    """A posterior that spreads u gives several Jacobians, so that the constant is over all of them."""
    layer = Indexed(
        Affine(2, MLP(1, 4), context_features=1),
        prior=ConditionalNormal(MLP(2, 2), features=1, context_features=2),
        posterior=ConditionalNormal(MLP(2, 2), features=1, context_features=2),
    )
    many = lipschitz(Flow([layer]), torch.zeros(200, 2)).whole
    one = lipschitz(Flow([layer]), torch.zeros(1, 2)).whole
    assert many.largest > one.largest or many.smallest < one.smallest


def test_a_flow_that_is_no_chain_of_maps_is_known_as_such() -> None:
    chain = build_model("cif-maf", features=2, layers=1)
    assert is_chain(chain)
    assert is_chain(Flow([Standardise(torch.zeros(2), torch.ones(2))], base=chain))
    mixture = build_model("mixture", features=2, layers=1, components=2)
    assert not is_chain(mixture)
    assert not is_chain(Flow([Standardise(torch.zeros(2), torch.ones(2))], base=mixture))
    with pytest.raises(ValueError, match="no layers"):
        lipschitz(mixture, torch.zeros(3, 2))

"""What an index does, against flows where that is known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from ciflows import Flow, Indexed, build_model
from ciflows.core.density import ConditionalNormal, StandardNormal
from ciflows.core.layer import Layer
from ciflows.diagnostics.index_use import (
    IndexWorth,
    index_activity,
    index_use,
    index_words,
    index_worth,
)
from ciflows.layers import Affine, Standardise
from ciflows.training import TrainingSettings, fit_flow
from ciflows.training.monitor import Monitor

ROWS = 4000
NOISE = 0.5


def linear(weight: list[list[float]], bias: list[float]) -> nn.Linear:
    network = nn.Linear(len(weight[0]), len(weight)).double()
    with torch.no_grad():
        network.weight.copy_(torch.tensor(weight))
        network.bias.copy_(torch.tensor(bias))
    return network


def normal(weight: float, std: float) -> ConditionalNormal:
    """N(weight c, std²)."""
    return ConditionalNormal(linear([[weight], [0.0]], [0.0, math.log(std)]), 1, 1)


def gaussian_cif() -> Flow:
    """x = 0.5 z - t(u), t(u) = -u, u ~ N(0, 1): so x ~ N(0, 1.25), with the exact posterior of u."""
    family = Affine(1, linear([[0.0], [-1.0]], [-math.log(NOISE), 0.0]), context_features=1)
    precision = 1 + 1 / NOISE**2
    prior = normal(0.0, 1.0)
    posterior = normal(1 / NOISE**2 / precision, precision**-0.5)
    return Flow([Indexed(family, prior, posterior)], StandardNormal((1,))).double().eval()


@pytest.fixture(scope="module")
def x() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 1, generator=generator, dtype=torch.float64) * math.sqrt(1 + NOISE**2)


def test_kl_of_a_linear_gaussian_index(x: Tensor) -> None:
    """KL(N(m, v) ‖ N(0, 1)), averaged over x ~ N(0, 1 + noise²)."""
    mean, variance = x / (1 + NOISE**2), NOISE**2 / (1 + NOISE**2)
    truth = 0.5 * (variance + mean.square() - 1 - math.log(variance))
    index = index_use(gaussian_cif(), x, samples=50).indices[0]
    assert index.kl == pytest.approx(truth.mean().item(), abs=0.01)
    assert index.kl_error == pytest.approx(truth.std().item() / math.sqrt(ROWS), rel=0.2)


def test_effect_of_a_linear_gaussian_index(x: Tensor) -> None:
    """z = (x - u) / noise: under q it varies as u does, over the data it is N(0, 1)."""
    posterior_std = NOISE / math.sqrt(1 + NOISE**2)
    index = index_use(gaussian_cif(), x, samples=10).indices[0]
    assert index.effect == pytest.approx(posterior_std / NOISE, rel=0.02)


def test_frozen_index_is_the_plain_flow_at_its_mean(x: Tensor) -> None:
    marginal = torch.distributions.Normal(0.0, math.sqrt(1 + NOISE**2)).log_prob(x)
    plain = torch.distributions.Normal(0.0, NOISE).log_prob(x)
    index = index_use(gaussian_cif(), x, samples=20).indices[0]
    assert index.frozen == pytest.approx((marginal - plain).mean().item(), rel=0.02)


def test_permuted_index_that_ignores_z_loses_nothing(x: Tensor) -> None:
    """With u independent of z the posteriors of all rows average to p(u): the density is the same."""
    index = index_use(gaussian_cif(), x[:500], samples=400).indices[0]
    assert index.permuted == pytest.approx(0.0, abs=0.02)


def test_permuted_index_that_knows_z() -> None:
    """u ~ N(sign z, tiny), x = z + 3 u: the sign of the mode is lost, and with it half of the mass."""
    prior = ConditionalNormal(_Sign(), 1, 1)
    family = Affine(1, linear([[0.0], [-3.0]], [0.0, 0.0]), context_features=1)
    flow = Flow([Indexed(family, prior, prior)], StandardNormal((1,))).double().eval()
    x = flow.sample(1000, seed=0)
    index = index_use(flow, x, samples=300).indices[0]
    assert index.permuted == pytest.approx(math.log(2), abs=0.05)
    assert index.frozen > 3


class _Sign(nn.Module):
    def forward(self, z: Tensor) -> Tensor:
        return torch.cat([z.sign(), torch.full_like(z, -7.0)], dim=-1)


def test_idle_index_is_worth_nothing() -> None:
    flow = build_model("cif-nsf", features=3, layers=2, hidden=[16], seed=0).eval()
    use = index_use(flow, torch.randn(100, 3), samples=5)
    assert len(use.indices) == 2
    for index in (*use.indices, use.total):
        assert index.effect == 0
        assert (index.permuted, index.frozen) == pytest.approx((0, 0), abs=0.3)
    worth = index_worth(flow, torch.randn(100, 3))
    assert worth.idle
    assert "nsf gives the same" in worth.sentence("nsf")


def test_worth_beside_a_plain_flow(x: Tensor) -> None:
    plain = Flow([Standardise(torch.zeros(1), torch.full((1,), 2.0))]).double().eval()
    truth = torch.distributions.Normal(0.0, math.sqrt(1 + NOISE**2)).log_prob(x)
    worse = torch.distributions.Normal(0.0, 2.0).log_prob(x)
    worth = index_worth(gaussian_cif(), x, plain=plain, samples=5)
    assert worth.nats == pytest.approx((truth - worse).mean().item(), abs=1e-6)
    assert worth.std_error == pytest.approx((truth - worse).std().item() / math.sqrt(ROWS), rel=1e-6)
    assert not worth.idle
    assert worth.sentence() == f"The index is worth {worth.nats:.2f} ± {worth.std_error:.2f} nats a row."


@pytest.mark.parametrize(
    ("nats", "error", "idle"), [(0.1, 0.01, False), (0.1, 0.06, True), (0.005, 0.0, True)]
)
def test_what_counts_as_idle(nats: float, error: float, idle: bool) -> None:
    assert IndexWorth(nats, error).idle is idle


def test_conditional_flow_over_a_flow() -> None:
    """Indices of a base that is a flow count too, and contexts reach them."""
    inner = build_model("cif-nsf", features=2, context_features=3, layers=1, hidden=[8], seed=0)
    layers: list[Layer] = [Standardise(torch.zeros(2), torch.ones(2))]
    flow = Flow(layers, inner).eval()
    use = index_use(flow, torch.randn(20, 2), torch.randn(20, 3), samples=3)
    assert [index.layer for index in use.indices] == ["2 Affine"]


def test_a_flow_without_an_index_is_refused() -> None:
    flow = build_model("nsf", features=2, layers=1, hidden=[8]).eval()
    for measure in (index_use, index_worth):
        with pytest.raises(ValueError, match="has no index"):
            measure(flow, torch.randn(5, 2))


def test_one_row_is_refused() -> None:
    with pytest.raises(ValueError, match="at least two rows"):
        index_use(gaussian_cif(), torch.zeros(1, 1).double())


def test_activity_is_followed_in_training() -> None:
    flow = build_model("cif-maf", features=2, layers=2, hidden=[8], seed=0)
    x = torch.randn(300, 2)
    settings = TrainingSettings(steps=20, batch_size=50, validate_every=10, validation_samples=2)
    seen: list[dict[str, float]] = []
    monitor = Monitor()
    monitor.record = lambda step, values, done: seen.append(values)  # type: ignore[method-assign]
    fit_flow(flow, x[:200], x[200:], settings, monitor=monitor)
    followed = [values for values in seen if "validation" in values]
    assert len(followed) == 2
    assert all(values["index_effect"] >= 0 and values["index_kl"] > -1 for values in followed)
    use = index_use(flow, x[200:]).total
    activity = index_activity(flow, x[200:])
    assert activity is not None
    assert activity.index_kl == pytest.approx(use.kl, abs=5 * use.kl_error + 0.05)
    assert index_activity(build_model("maf", features=2).eval(), x) is None


def test_words_for_a_finished_run() -> None:
    total = {"permuted": 0.5, "permuted_error": 0.1}
    assert "loses 0.50 ± 0.10 nats" in index_words("cif-maf", {"index": {"total": total}})
    idle = {"permuted": 0.001, "permuted_error": 0.1}
    assert "idle: maf gives the same" in index_words("cif-maf", {"index": {"total": idle}})
    worth = {"indexed": True, "index_worth": {"nats": 0.11, "std_error": 0.01}, "story": "kept"}
    assert "worth 0.11 ± 0.01 nats a row" in index_words("cif-nsf", worth)
    assert index_words("nsf", {"index": None}) == ""

"""Mixtures of densities: their sums, their draws and their shares."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from ciflows import Flow, build_model
from ciflows.core.density import StandardNormal
from ciflows.layers import Standardise
from ciflows.layers.blend import Blend, blend_flows, fit_shares


def at(mean: float, std: float = 1.0) -> Flow:
    return Flow([Standardise(torch.tensor([mean]), torch.tensor([std]))])


def test_the_density_is_the_weighted_sum() -> None:
    blend, x = (
        Blend([at(-1.0), at(2.0, 0.5)], torch.tensor([0.7, 0.3])),
        torch.linspace(-4, 4, 9)[:, None],
    )
    first, second = torch.distributions.Normal(-1.0, 1.0), torch.distributions.Normal(2.0, 0.5)
    truth = (0.7 * first.log_prob(x).exp() + 0.3 * second.log_prob(x).exp()).log()[:, 0]
    assert_close(blend.log_weight(x), truth)
    assert blend.exact
    assert not blend.reparameterised


def test_draws_come_from_each_member_as_often_as_its_share() -> None:
    blend = Blend([at(-9.0), at(0.0), at(9.0)], torch.tensor([0.2, 0.5, 0.3]))
    x = Flow([], blend).sample(40_000, seed=0)[:, 0]
    found = torch.tensor(
        [(x < -4).double().mean(), (x.abs() < 4).double().mean(), (x > 4).double().mean()]
    )
    assert_close(found, torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).to(found), atol=0.01, rtol=0)
    assert x[x > 4].std().item() == pytest.approx(1.0, abs=0.03)


def test_a_blend_with_an_index_is_an_estimate_of_the_sum() -> None:
    indexed = build_model("cif-maf", features=2, layers=1, hidden=[8], seed=0).eval()
    flow, x = Flow([], Blend([indexed, StandardNormal((2,))])).eval(), torch.randn(50, 2)
    assert not flow.exact
    alone = indexed.log_prob(x, 2000, seed=0)
    truth = torch.logaddexp(alone, StandardNormal((2,)).log_weight(x)) - math.log(2)
    assert_close(flow.log_prob(x, 2000, seed=0), truth, atol=0.05, rtol=0)


def test_flows_share_their_first_layers() -> None:
    first = Standardise(torch.ones(2), torch.full((2,), 3.0))
    flows = [
        Flow([first, *build_model("nsf", features=2, layers=1, hidden=[8], seed=k).layers])  # type: ignore[list-item]
        for k in range(2)
    ]
    blend, x = blend_flows(flows, torch.tensor([0.25, 0.75])), torch.randn(7, 2)
    assert list(blend.layers) == [first]
    terms = torch.stack([flow.log_weight(x) for flow in flows]).exp()
    assert_close(blend.log_weight(x), (0.25 * terms[0] + 0.75 * terms[1]).log())


def test_shares_are_those_that_the_rows_were_drawn_with() -> None:
    blend = Blend([at(-2.0), at(2.0)], torch.tensor([0.8, 0.2]))
    x = Flow([], blend).sample(20_000, seed=1)
    log_probs = torch.stack([at(-2.0).log_weight(x), at(2.0).log_weight(x)])
    assert fit_shares(log_probs).tolist() == pytest.approx([0.8, 0.2], abs=0.01)
    none_below = torch.where(x[:, 0] > 0, 1.0, 0.0)
    assert fit_shares(log_probs, none_below)[1] > 0.9


def test_members_of_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="same shape"):
        Blend([StandardNormal((2,)), StandardNormal((3,))])
    with pytest.raises(ValueError, match="at least one"):
        Blend([])

"""Likelihoods against what is known: closed forms, integrals, samples, and their own error bars."""

from __future__ import annotations

import math
import subprocess
import sys
import warnings

import pytest
import torch
from constructors import affine, generic, linear_gaussian_flow, normal, residual
from scipy.stats import chi2
from torch import Tensor
from torch.testing import assert_close

from ciflows import Flow, Indexed, build_model
from ciflows.densities import StandardNormal
from ciflows.estimate import RunningEstimate, summarise
from ciflows.layers import Layer
from ciflows.noise import Noise

SMALL = {"layers": 2, "hidden": [16], "kappa": 0.6}
NETS = dict.fromkeys(["affine_hidden", "prior_hidden", "posterior_hidden"], [8])


def plain_flow() -> Flow:
    return generic(build_model("resflow", features=2, **SMALL)).eval()


def cif(context_features: int = 0) -> Flow:
    """A CIF with a density far from Gaussian, and a posterior that is not the right one."""
    flow = build_model(
        "cif-resflow", features=2, context_features=context_features, **SMALL, **NETS
    )
    return generic(flow).eval()


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


@pytest.mark.xfail(strict=True, reason="RunningEstimate rounds; see the review's shifted sums")
def test_a_plain_flow_in_single_precision_has_no_error_either() -> None:
    flow, x = plain_flow().float(), 30 * torch.randn(50, 2)
    one, many = flow.estimate(x, samples=1), flow.estimate(x, samples=7)
    assert torch.equal(one.log_prob, many.log_prob)
    assert torch.equal(many.log_prob, many.elbo)
    assert not many.std_error.any()
    assert bool((many.effective_samples == 7).all())


def test_a_cif_whose_index_does_nothing_is_the_plain_flow() -> None:
    """Proposition 4.1: s = t = 0 and p = q; then the bound is tight and the density the flow's."""
    indexed = build_model("cif-resflow", features=2, **SMALL, **NETS).double().eval()
    blocks: list[Layer] = []
    x = z = y = 2 * torch.randn(20, 2).double()
    for index, layer in enumerate(indexed.layers):
        if isinstance(layer, Indexed):
            layer.posterior.load_state_dict(layer.prior.state_dict())
            z, log_weight = layer.encode(z)
            assert_close(log_weight, torch.zeros(20).double(), rtol=0, atol=1e-13)
        else:
            blocks.append(layer)
            z, log_det = layer.encode(z)
            y, plain_log_det = indexed.layers[index].encode(y)
            assert torch.equal(log_det, plain_log_det)
        assert torch.equal(z, y)
    assert len(blocks) == 2
    estimate = indexed.estimate(x, samples=10)
    assert_close(estimate.log_prob, Flow(blocks).log_prob(x), rtol=0, atol=1e-12)
    assert_close(estimate.elbo, Flow(blocks).log_prob(x), rtol=0, atol=1e-12)
    assert torch.equal(indexed.base.draw((5,), noise=Noise.seeded(0)).shape, (5, 2)) is not None


# -- densities and samples --------------------------------------------------------------------------


def test_a_plain_density_integrates_to_one() -> None:
    points, area = grid(limit=12, cells=200)
    total, _ = integrate(plain_flow(), torch.ones(1).double(), points, area, samples=1)
    assert_close(total, torch.ones(1).double(), rtol=0, atol=1e-4)

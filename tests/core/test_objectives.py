"""Objectives: ordered bounds, gradients that are the value's own, and DReG's better ones for q."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from ciflows import Flow, Indexed, build_model
from ciflows.core.layer import Layer
from ciflows.core.noise import Noise
from ciflows.core.objectives import ELBO, IWAE, DReG, Objective, _PathNoise
from ciflows.core.rows import Rows
from ciflows.layers.gaussian_mixture import GaussianMixture
from ciflows.networks import MaskedResidualNet
from ciflows.speed.stacked import caching, padded_maps
from constructors import affine, build, generic, linear_gaussian_flow, normal, residual, spline


def stacked_flow() -> Flow:
    """Two indexed layers, so that the second posterior depends on the first one's draw."""
    layers: list[Layer] = [residual(2)]
    layers += [Indexed(affine(2, 1), normal(1, 2), normal(1, 2)) for _ in range(2)]
    return generic(Flow(layers))


def flow_with_flow_posterior() -> Flow:
    """A posterior whose draws pass through a numerical inverse."""
    return Flow([build("indexed, flow as posterior")]).double()


def flow_with_cif_prior() -> Flow:
    """A prior with an index and a posterior of its own."""
    return Flow([build("indexed, CIF as prior")]).double()


FLOWS = {
    "stacked": stacked_flow,
    "flow as posterior": flow_with_flow_posterior,
    "CIF as prior": flow_with_cif_prior,
}
every_flow = pytest.mark.parametrize("make", FLOWS.values(), ids=FLOWS)


def of_posterior(name: str) -> bool:
    return "posterior." in name


def gradients(
    flow: Flow, objective: Objective, x: Tensor, noise: Noise, of: Callable[[str], bool]
) -> Tensor:
    """The gradient of the mean value, with respect to the parameters whose names are asked for."""
    wanted = [parameter for name, parameter in flow.named_parameters() if of(name)]
    value = objective(flow, x, noise=noise).mean()
    return torch.cat([g.flatten() for g in torch.autograd.grad(value, wanted)])


def test_bounds_are_in_order() -> None:
    flow, truth = linear_gaussian_flow(2, off=0.3)
    x = truth.sample((20_000,))
    with torch.no_grad():
        values = [o(flow, x, noise=Noise.seeded(0)) for o in (ELBO(), IWAE(2), IWAE(20))]
    values.append(truth.log_prob(x))
    for lower, upper in pairwise(values):
        gap = upper - lower
        assert gap.mean() > 4 * gap.std() / len(x) ** 0.5


def test_objectives_of_a_plain_flow_are_its_likelihood() -> None:
    flow, x = generic(Flow([residual(2)])), torch.randn(7, 2).double()
    for objective in (ELBO(), IWAE(3), DReG(3)):
        assert_close(objective(flow, x), flow.log_prob(x), rtol=0, atol=1e-12)
        assert objective(flow, x).requires_grad


@pytest.mark.parametrize("objective", [ELBO(), IWAE(3)], ids=["ELBO", "IWAE"])
@every_flow
def test_gradients_are_those_of_the_value(make: Callable[[], Flow], objective: Objective) -> None:
    """Against central differences of the value, the random numbers held fixed."""
    flow, x = make(), torch.randn(3, 2).double()
    gradient = gradients(flow, objective, x, Noise.seeded(1), of=lambda name: True)
    step, differences = 1e-5, []

    def value() -> Tensor:
        return objective(flow, x, noise=Noise.seeded(1)).mean()

    with torch.no_grad():
        for parameter in flow.parameters():
            for entry in parameter.view(-1).split(1):
                entry += step
                above = value()
                entry -= 2 * step
                differences.append((above - value()) / (2 * step))
                entry += step
    assert gradient.abs().max() > 0.01
    assert_close(gradient, torch.stack(differences), rtol=1e-5, atol=1e-8)


@every_flow
def test_dreg_has_the_value_of_iwae(make: Callable[[], Flow]) -> None:
    flow, x = make(), torch.randn(9, 2).double()
    values = [objective(flow, x, noise=Noise.seeded(1)) for objective in (IWAE(4), DReG(4))]
    assert_close(values[0], values[1], rtol=0, atol=1e-11)
    with torch.no_grad():
        assert_close(DReG(4)(flow, x, noise=Noise.seeded(1)), values[0].detach())


@every_flow
def test_dreg_leaves_the_other_gradients_as_they_are(make: Callable[[], Flow]) -> None:
    flow, x = make(), torch.randn(9, 2).double()
    iwae, dreg = (
        gradients(flow, objective, x, Noise.seeded(1), of=lambda name: not of_posterior(name))
        for objective in (IWAE(4), DReG(4))
    )
    assert iwae.abs().max() > 0.01
    assert_close(dreg, iwae, rtol=0, atol=1e-11)


def repeated_gradients_of_q(flow: Flow, objective: Objective, x: Tensor, seed: int) -> Tensor:
    """Gradients (repeats, parameters) of q's parameters, from draws of their own."""
    noise, copies = Noise.seeded(seed), x.repeat(50, 1)
    return torch.stack([gradients(flow, objective, copies, noise, of_posterior) for _ in range(150)])


def test_dreg_holds_q_fixed_where_its_weights_were_made_for_all_networks_at_once() -> None:
    q = Flow([spline(1, 2)])
    flow = generic(Flow([Indexed(affine(2, 1), normal(1, 2), q)]))
    parameters = list(flow.parameters())

    def gradient() -> tuple[Tensor, ...]:
        loss = DReG(3)(flow, torch.linspace(-1, 1, 10).double().reshape(5, 2), Noise.seeded(0)).sum()
        return torch.autograd.grad(loss, parameters)

    networks = [part for part in q.modules() if isinstance(part, MaskedResidualNet)]
    expected = gradient()
    with caching(padded_maps(networks)):
        for value, plain in zip(gradient(), expected, strict=True):
            assert_close(value, plain)


def test_the_path_of_a_draw_is_that_of_the_same_draw() -> None:
    paths = _PathNoise(Noise.seeded(0))
    q = generic(GaussianMixture(3, 1))  # which draws numbers of two kinds
    u, _ = paths.posterior(q, torch.Size((50,)), torch.zeros(50, 2).double())
    assert torch.equal(u, paths.drawn[0])


@every_flow
def test_dreg_has_iwaes_gradient_of_q_on_average(make: Callable[[], Flow]) -> None:
    flow, x = make(), torch.randn(2, 2).double()
    iwae = repeated_gradients_of_q(flow, IWAE(4), x, seed=1)
    dreg = repeated_gradients_of_q(flow, DReG(4), x, seed=2)
    mean, std_error = iwae.mean(0), ((iwae.var(0) + dreg.var(0)) / len(iwae)).sqrt()
    assert bool(((dreg.mean(0) - mean).abs() <= 4 * std_error + 1e-12).all())
    assert mean.norm() > 4 * std_error.norm()


@pytest.mark.parametrize("depth", [1, 2])
def test_dreg_has_less_variance_where_q_is_nearly_right(depth: int) -> None:
    """And none where q is right: the weights are equal and their gradient with respect to u is 0."""
    flow, truth = linear_gaussian_flow(depth, off=0.1)
    x = truth.sample((2,))
    iwae = repeated_gradients_of_q(flow, IWAE(8), x, seed=1)
    dreg = repeated_gradients_of_q(flow, DReG(8), x, seed=2)
    assert dreg.var(0).sum() < 0.2 * iwae.var(0).sum()
    exact, _ = linear_gaussian_flow(depth)
    at_the_best = gradients(exact, DReG(8), x, Noise.seeded(1), of_posterior)
    assert_close(at_the_best, torch.zeros_like(at_the_best), rtol=0, atol=1e-11)


@pytest.mark.parametrize("objective", [IWAE(2), DReG(2)], ids=["IWAE", "DReG"])
def test_several_draws_refuse_noisy_log_dets(objective: Objective) -> None:
    flow = build_model("cif-resflow", features=2, layers=1, hidden=[8], log_det="roulette").train()
    x = torch.randn(4, 2)
    with pytest.raises(ValueError, match="exact log-determinants"):
        objective(flow, x)
    assert ELBO()(flow, x).shape == (4,)
    assert objective(flow.eval(), x).shape == (4,)


@pytest.mark.parametrize("objective", [ELBO(), IWAE(3), DReG(3)], ids=["ELBO", "IWAE", "DReG"])
def test_objectives_take_a_context(objective: Objective) -> None:
    flow = generic(build_model("cif-resflow", features=2, context_features=3, layers=1, hidden=[8]))
    x, context = torch.randn(4, 2).double(), torch.randn(4, 3).double()
    values = objective(flow, Rows(x, context), Noise.seeded(0))
    others = objective(flow, Rows(x, context.flip(0)), Noise.seeded(0))
    assert values.shape == (4,)
    assert not torch.allclose(values, others)
    values.sum().backward()
    assert all(parameter.grad is not None for parameter in flow.parameters())


@pytest.mark.parametrize("objective", [ELBO(), IWAE(3), DReG(3)], ids=["ELBO", "IWAE", "DReG"])
def test_weights_multiply_the_values(objective: Objective) -> None:
    flow, x = stacked_flow(), torch.randn(4, 2).double()
    weight = torch.tensor([0.0, 1.0, 2.0, 0.5]).double()
    plain = objective(flow, x, Noise.seeded(0))
    assert_close(objective(flow, Rows(x, weight=weight), Noise.seeded(0)), weight * plain)

"""Your own maps as bijections: what is accepted, what is right, and what is refused in words."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import zuko
from torch import Tensor, nn
from torch.distributions import LogNormal, Transform, constraints
from torch.distributions.transforms import (
    AbsTransform,
    AffineTransform,
    ComposeTransform,
    CumulativeDistributionTransform,
    ExpTransform,
    SigmoidTransform,
    StackTransform,
    StickBreakingTransform,
)
from torch.testing import assert_close

from ciflows import Flow, Indexed, interleave
from ciflows.core.density import Density
from ciflows.core.layer import Shape
from ciflows.core.noise import Noise
from ciflows.layers import Scale, as_bijection
from constructors import SinhArcsinh, affine, normal


def test_a_flow_of_a_torch_transform_is_the_density_it_stands_for() -> None:
    """x = exp(m + s z) with z ~ N(0, 1) is log-normal."""
    inverse = ComposeTransform([ExpTransform().inv, AffineTransform(-0.5 / 0.8, 1 / 0.8)])
    flow = Flow([as_bijection(inverse, features=2)])
    x = 0.1 + 3 * torch.rand(7, 2)
    assert_close(flow.log_prob(x), LogNormal(0.5, 0.8).log_prob(x).sum(-1))
    drawn = flow.sample(20_000, seed=0)
    assert drawn.log().mean().item() == pytest.approx(0.5, abs=0.02)
    assert drawn.log().std().item() == pytest.approx(0.8, abs=0.02)


class Box(Density):
    """Uniform on [-π, π], for each entry."""

    def log_weight(self, x: Tensor, context: Tensor | None = None, noise: Noise | None = None) -> Tensor:
        return torch.full(x.shape[:-1], -math.log(2 * math.pi) * x.shape[-1])

    def draw(self, leading: Shape, context: Tensor | None = None, noise: Noise | None = None) -> Tensor:
        return math.pi * (2 * torch.rand(*leading, *self.shape) - 1)


def test_a_zuko_flow_gives_the_same_density_as_a_whole_and_in_layers() -> None:
    theirs = zuko.flows.NSF(3, transforms=2, hidden_features=[8])
    x = torch.randn(5, 3)
    expected = theirs().log_prob(x)
    whole = Flow([as_bijection(theirs.transform, 3)])
    layers = Flow([as_bijection(transform, 3) for transform in theirs.transform.transforms])
    assert_close(whole.log_prob(x), expected, rtol=0, atol=1e-5)
    assert_close(layers.log_prob(x), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("context", [0, 3])
def test_circular_splines_of_zuko_are_no_map_to_a_normal_base(context: int) -> None:
    theirs = zuko.flows.NCSF(2, context, transforms=2, hidden_features=[8]).transform
    for transform in (theirs, theirs.transforms[-1]):
        with pytest.raises(ValueError, match=r"gives \[-π, π\] .*base is uniform.* name another base"):
            Flow([as_bijection(transform, 2, context)])


def test_circular_splines_have_zukos_density_over_a_uniform_base() -> None:
    theirs = zuko.flows.NCSF(2, transforms=2, hidden_features=[8])
    x = 2 * torch.rand(5, 2)
    flow = Flow([as_bijection(theirs.transform, 2)], Box((2,)))
    assert_close(flow.log_prob(x), theirs().log_prob(x), rtol=0, atol=1e-4)


def test_dropout_within_a_zuko_transform_obeys_the_mode() -> None:
    network = {"activation": lambda: nn.Sequential(nn.Tanh(), nn.Dropout(0.5))}
    layer = as_bijection(zuko.flows.UNAF(2, transforms=1, network=network).transform, 2)
    x = torch.randn(5, 2)
    assert not torch.equal(layer.train().encode(x)[0], layer.encode(x)[0])
    assert torch.equal(layer.eval().encode(x)[0], layer.encode(x)[0])


def test_a_module_becomes_a_cif_that_learns() -> None:
    plain = [as_bijection(SinhArcsinh(2), 2) for _ in range(2)]
    flow = Flow(interleave(plain, lambda f: Indexed(affine(2, 1), normal(1, 2), normal(1, 2))))
    flow.log_weight(torch.randn(6, 2)).mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in flow.parameters())
    assert any(name.endswith("module.a") for name in flow.state_dict())
    assert flow.sample(4, seed=0).shape == (4, 2)


def test_an_inverse_may_return_its_log_determinant_too() -> None:
    class Both(SinhArcsinh):
        def inverse(self, z: Tensor, context: Tensor | None = None) -> Any:
            return super().inverse(z), torch.zeros(len(z))

    z = torch.randn(3, 4, 2)
    assert_close(as_bijection(Both(2), 2).decode(z), as_bijection(SinhArcsinh(2), 2).decode(z))


def test_a_bijection_stays_what_it_is() -> None:
    layer = Scale((2,), 0.5)
    assert as_bijection(layer, 2) is layer


class NoLogDet(Transform):
    bijective, domain, codomain = True, constraints.real, constraints.real


@pytest.mark.parametrize(
    ("yours", "error", "message"),
    [
        (nn.Linear(2, 2), TypeError, r"Linear has no inverse\(z\); expected a torch"),
        (nn.Module(), TypeError, r"no forward\(x\) -> \(z, log_det\) and no inverse\(z\)"),
        (torch.exp, TypeError, "expected a torch.distributions.Transform, a zuko lazy transform, or"),
        (zuko.flows.MAF(2), TypeError, "MAF is a transform and a base: give its transform"),
        (
            zuko.flows.NSF(2, 3).transform,
            ValueError,
            "without a context; was it built for that",
        ),
        (zuko.flows.NSF(3).transform, ValueError, r"does not take x of shape \(2,\)"),
        (AbsTransform(), ValueError, "AbsTransform is not bijective"),
        (StickBreakingTransform(), ValueError, r"does not map shape \(2,\) to itself"),
        (AffineTransform(0, 1, event_dim=2), ValueError, r"does not map shape \(2,\) to itself"),
        (NoLogDet(), TypeError, r"NoLogDet has no log_abs_det_jacobian\(x, z\) and no _inverse\(z\)\."),
        (AffineTransform(torch.zeros(3), 1.0), ValueError, r"does not take x of shape \(2,\)"),
        (StackTransform([ExpTransform().inv] * 2, dim=-1), ValueError, r"does not take x of shape"),
        (
            ComposeTransform([SigmoidTransform(), AffineTransform(nn.Parameter(torch.zeros(2)), 1.0)]),
            ValueError,
            "would not be trained",
        ),
    ],
)
def test_what_makes_no_bijection_is_named(yours: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        as_bijection(yours, 2)


def test_a_torch_transform_takes_no_context() -> None:
    with pytest.raises(ValueError, match="ExpTransform takes no context"):
        as_bijection(ExpTransform(), 2, context_features=1)


class Returns(nn.Module):
    """Returns what a test wants it to."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result

    def forward(self, x: Tensor) -> Any:
        return self.result

    def inverse(self, z: Tensor) -> Any:
        return self.result


@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        (torch.zeros(5, 2), TypeError, r"Returns\.forward: expected \(z, log_det\); got a Tensor"),
        ((torch.zeros(5, 2),) * 3, TypeError, "got 3 values"),
        ((torch.zeros(5, 3), torch.zeros(5)), ValueError, r"z: expected shape \(5, 2\); got \(5, 3\)"),
        ((torch.zeros(5, 2), torch.zeros(5, 2)), ValueError, r"log_det: expected shape \(5,\); got"),
        ((torch.zeros(5, 2), 0.0), ValueError, r"log_det: expected shape \(5,\); got a float"),
    ],
)
def test_wrong_results_are_named(result: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        as_bijection(Returns(result), 2).encode(torch.zeros(5, 2))


def test_a_wrong_inverse_is_named() -> None:
    with pytest.raises(ValueError, match=r"inverse's x: expected shape \(5, 2\); got \(5,\)"):
        as_bijection(Returns(torch.zeros(5)), 2).decode(torch.zeros(5, 2))


def test_flows_and_indices_say_how_to_wrap_a_module() -> None:
    with pytest.raises(TypeError, match=r"Flow, layer 1: expected a layer.* got a Linear.*as_bijection"):
        Flow([Scale((2,), 0.5), nn.Linear(2, 2)])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"Indexed, family: expected a layer.*as_bijection"):
        Indexed(nn.Linear(2, 2), normal(1, 2), normal(1, 2))  # type: ignore[arg-type]


def test_a_cumulative_distribution_maps_to_its_interval() -> None:
    """A transform whose noise side is bounded is fine inside a flow, with its own inverse after it."""
    cdf = CumulativeDistributionTransform(torch.distributions.Normal(0.0, 2.0))
    x = torch.randn(5, 1)
    flow = Flow([as_bijection(cdf, 1), as_bijection(cdf.inv, 1)])
    assert_close(
        flow.log_prob(x), torch.distributions.Normal(0, 1).log_prob(x).sum(-1), rtol=0, atol=1e-4
    )


def test_a_transform_the_wrong_way_round_is_refused() -> None:
    wrong = as_bijection(ExpTransform(), 2)
    with pytest.raises(
        ValueError, match=r"the last layer gives .*lower_bound=0.* alone: take the inverse"
    ):
        Flow([wrong])
    Flow([as_bijection(ExpTransform().inv, 2)])
    with pytest.warns(UserWarning, match="could not be inverted by ExpTransform"):
        wrong.decode(torch.tensor([[1.0, -1.0]]))

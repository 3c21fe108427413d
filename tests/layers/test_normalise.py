"""Normalising layers: their start from data, batches against running averages, and odd batches."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor
from torch.autograd.functional import jacobian
from torch.testing import assert_close

from ciflows import Flow, Indexed
from ciflows.core.density import StandardNormal
from ciflows.core.layer import Shape
from ciflows.core.noise import Noise
from ciflows.layers import ActNorm, BatchNorm, LULinear, Permutation
from constructors import affine, generic, normal, spline

SHAPES: list[Shape] = [(3,), (3, 4, 4)]
every_shape = pytest.mark.parametrize("shape", SHAPES)


def batch(*leading: int, shape: Shape = (3,), seed: int = 0) -> Tensor:
    """Channels of different means and scales."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.tensor([0.1, 2.0, 30.0]).reshape(3, *[1] * (len(shape) - 1))
    numbers = torch.randn(*leading, *shape, generator=generator)
    return (scale * (numbers.double() + 4)).double()


def channels(x: Tensor, shape: Shape) -> Tensor:
    """All values of each channel: (channels, n)."""
    return x.reshape(-1, *shape).transpose(0, 1).flatten(1)


def assert_normal(z: Tensor, shape: Shape, atol: float) -> None:
    values = channels(z, shape)
    assert_close(values.mean(1), torch.zeros(3).double(), rtol=0, atol=atol)
    assert_close(values.std(1, correction=0), torch.ones(3).double(), rtol=0, atol=atol)


# -- initialise -------------------------------------------------------------------------------------


@every_shape
def test_actnorm_starts_as_the_identity_and_normalises_its_first_batch(shape: Shape) -> None:
    layer, x = ActNorm(shape).double(), batch(5, 20, shape=shape)
    assert torch.equal(layer.encode(x)[0], x)
    layer.initialise(x)
    assert_normal(layer.encode(x)[0], shape, atol=1e-12)


def test_a_flow_starts_layer_by_layer_down_into_its_base() -> None:
    inner = Flow([LULinear(3), ActNorm((3,))], StandardNormal((3,)))
    layers = [ActNorm((3,)), spline(3), Indexed(affine(3, 1), normal(1, 3), normal(1, 3)), ActNorm((3,))]
    flow, x = generic(Flow(layers, inner)), batch(200)
    assert all(parameter.requires_grad for parameter in flow.parameters())
    flow.initialise(x, noise=Noise.seeded(0))
    assert all(parameter.requires_grad for parameter in flow.parameters())
    noise, normalised = Noise.seeded(0), 0
    for layer in [*flow.layers, *inner.layers]:
        x, _ = layer.encode(x, None, noise)
        if isinstance(layer, ActNorm):
            assert_normal(x, (3,), atol=1e-10)
            normalised += 1
    assert normalised == 3


def test_layers_behind_all_that_starts_from_data_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    flow = Flow([LULinear(3), ActNorm((3,)), Permutation(torch.tensor([1, 2, 0]))]).double()

    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(Permutation, "_encode", refuse)
    flow.initialise(batch(50))
    assert_normal(flow.layers[1].encode(batch(50))[0], (3,), atol=1e-10)


@pytest.mark.parametrize(("shape", "match"), [((5, 2), "expected shape"), ((0, 3), "without rows")])
def test_a_flow_without_such_layers_refuses_a_bad_start_too(shape: Shape, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Flow([LULinear(3)]).initialise(torch.zeros(shape))


def test_a_context_reaches_what_stands_before_a_layer() -> None:
    flow = generic(Flow([affine(3, 2), ActNorm((3,))]))
    x, context = batch(100), torch.randn(100, 2).double()
    flow.initialise(x, context)
    assert_normal(flow.layers[1].encode(flow.layers[0].encode(x, context)[0])[0], (3,), atol=1e-10)


def test_a_start_from_data_survives_a_file() -> None:
    flow, other = (Flow([ActNorm((3,)), LULinear(3)]).double() for _ in range(2))
    flow.initialise(batch(50))
    other.load_state_dict(load(save(flow.state_dict())))
    x = batch(7, seed=1)
    assert torch.equal(other.log_prob(x), flow.log_prob(x))


def test_constants_are_only_shifted() -> None:
    for dtype in (torch.float32, torch.float64):
        layer = ActNorm((3,)).to(dtype)
        x = torch.stack([torch.zeros(999), torch.full((999,), 0.1), torch.full((999,), -7e5)], dim=-1)
        layer.initialise(x.to(dtype))
        z, log_det = layer.encode(x.to(dtype))
        assert_close(z, torch.zeros_like(z), rtol=0, atol=1e-6 if dtype == torch.float64 else 0.1)
        assert bool((log_det == 0).all())


def test_small_scales_are_not_taken_for_constants() -> None:
    layer, x = ActNorm((3,)).double(), 1e3 + 1e-6 * torch.randn(500, 3).double()
    layer.initialise(x)
    assert_normal(layer.encode(x)[0], (3,), atol=1e-6)


def test_a_batch_that_gives_no_start_is_refused() -> None:
    with pytest.raises(ValueError, match="ActNorm: cannot initialise from a batch without rows"):
        ActNorm((3,)).initialise(torch.zeros(0, 3))
    with pytest.raises(ValueError, match=r"ActNorm: expected shape \(\*, 3\)"):
        ActNorm((3,)).initialise(torch.zeros(5, 2))


# -- batch norm -------------------------------------------------------------------------------------


@every_shape
def test_training_normalises_all_leading_dimensions_together(shape: Shape) -> None:
    layer, x = BatchNorm(shape, eps=0.0).double().train(), batch(5, 20, shape=shape)
    z, log_det = layer.encode(x)
    assert_normal(z, shape, atol=1e-12)
    assert log_det.shape == (5, 20)
    pixels = x[0, 0].numel() / 3
    expected = -pixels * channels(x, shape).std(1, correction=0).log().sum()
    assert_close(log_det, expected.expand(5, 20), rtol=1e-12, atol=0)


def test_training_takes_the_gradient_through_the_statistics() -> None:
    """Shifting or scaling all rows alike changes nothing of z, and log_det by the scale alone."""
    layer, x = BatchNorm((3,), eps=0.0).double().train(), batch(20).requires_grad_()
    z, log_det = layer.encode(x)
    (by_z,) = torch.autograd.grad((z * batch(20, seed=1)).sum(), x, retain_graph=True)
    assert by_z.abs().max() > 1e-3
    assert_close(by_z.sum(0), torch.zeros(3).double(), rtol=0, atol=1e-10)
    assert_close((by_z * x).sum(0), torch.zeros(3).double(), rtol=0, atol=1e-9)
    (by_log_det,) = torch.autograd.grad(log_det[0], x)
    assert_close((by_log_det * x).sum(0), -torch.ones(3).double(), rtol=0, atol=1e-10)


def test_log_det_in_training_holds_the_statistics_fixed() -> None:
    """As if m and v were constants: not the determinant of the whole batch's map, which is singular."""
    layer, x = generic(BatchNorm((3,))).train(), batch(6)
    frozen = copy.deepcopy(layer).eval()
    frozen.initialise(x)
    assert_close(layer.encode(x), frozen.encode(x), rtol=1e-12, atol=1e-12)
    whole = jacobian(lambda v: layer.encode(v)[0], x).reshape(18, 18)
    assert torch.linalg.slogdet(whole).logabsdet < layer.encode(x)[1].sum() - 10


def test_running_averages_come_to_those_of_the_data() -> None:
    layer = BatchNorm((3,), momentum=0.05).double().train()
    for seed in range(300):
        layer.encode(batch(100, seed=seed))
    x = batch(50_000, seed=1000)
    assert_close(layer.mean / x.mean(0), torch.ones(3).double(), rtol=0, atol=0.02)
    assert_close(layer.variance / x.var(0), torch.ones(3).double(), rtol=0, atol=0.1)
    assert_normal(layer.eval().encode(x)[0], (3,), atol=0.05)


def test_one_batch_moves_the_averages_by_the_momentum() -> None:
    """In place, so that a captured step goes on where the last one stopped."""
    layer, x = BatchNorm((3,), momentum=0.25).double().train(), batch(50)
    mean, variance = layer.mean, layer.variance
    layer.encode(x)
    assert layer.mean is mean
    assert layer.variance is variance
    assert_close(layer.mean, 0.25 * x.mean(0))
    assert_close(layer.variance, 0.75 + 0.25 * x.var(0, correction=0))


def test_evaluation_and_decoding_leave_the_averages_alone() -> None:
    layer, x = generic(BatchNorm((3,))).train(), batch(50)
    layer.encode(x)
    mean, variance = layer.mean.clone(), layer.variance.clone()
    in_training = layer.decode(x)
    layer.eval().encode(x)
    assert torch.equal(layer.decode(x), in_training)
    assert torch.equal(layer.mean, mean)
    assert torch.equal(layer.variance, variance)
    assert_close(layer.encode(layer.decode(x))[0], x, rtol=1e-12, atol=1e-12)


@every_shape
def test_parameters_only_where_affine(shape: Shape) -> None:
    count = [sum(p.numel() for p in BatchNorm(shape, affine=a).parameters()) for a in (True, False)]
    assert count == [6, 0]


@every_shape
@pytest.mark.parametrize("rows", [(), (1,), (1, 1), (4,)])
def test_rows_of_one_value_stay_finite(shape: Shape, rows: tuple[int, ...]) -> None:
    layer = BatchNorm(shape).train()
    x = torch.full((*rows, *shape), 3.0, requires_grad=True)
    z, log_det = layer.encode(x)
    (z.square().sum() + log_det.sum()).backward()
    assert x.grad is not None
    averages = (layer.mean, layer.variance)
    gradients = (p.grad for p in layer.parameters())
    for value in (z, log_det, x.grad, *averages, *gradients):
        assert value is not None
        assert bool(value.isfinite().all())
    assert_close(z, torch.zeros_like(z))
    assert log_det.shape == rows


def test_a_trained_batch_norm_can_be_copied() -> None:
    flow, x = Flow([LULinear(3), BatchNorm((3,))]).double().train(), batch(50)
    flow.log_weight(x).mean().backward()
    twin = copy.deepcopy(flow)
    flow.log_weight(batch(50, seed=1))
    before = twin.layers[1].mean.clone()
    assert not torch.equal(flow.layers[1].mean, before)
    twin.eval().log_weight(x)
    assert torch.equal(twin.layers[1].mean, before)


def test_initialise_gives_the_averages_of_the_batch() -> None:
    flow, x = Flow([BatchNorm((3,)), ActNorm((3,))]).double().eval(), batch(60)
    flow.initialise(x)
    z, _ = flow.layers[0].encode(x)
    assert_normal(z, (3,), atol=1e-2)
    assert_normal(flow.layers[1].encode(z)[0], (3,), atol=1e-12)

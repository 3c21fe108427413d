"""Masked networks and the autoregressive splines they drive."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.autograd.functional import jacobian
from torch.testing import assert_close
from zuko.transforms import MonotonicRQSTransform

from ciflows import Flow, Indexed
from ciflows.core.noise import Noise
from ciflows.core.objectives import IWAE
from ciflows.layers import AutoregressiveSpline, LULinear, Permutation
from ciflows.networks import MaskedResidualNet
from ciflows.speed.stacked import CACHE, caching, padded_maps
from constructors import affine, generic, normal, spline


def network(features: int = 4, context_features: int = 0, **options: object) -> MaskedResidualNet:
    sizes = {"hidden": 20, "blocks": 2, "activation": torch.tanh}
    return generic(MaskedResidualNet(features, 3, context_features=context_features, **sizes | options))


def total(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


# -- the network ------------------------------------------------------------------------------------


def test_maps_padded_for_several_networks_at_once_are_those_of_each() -> None:
    networks = torch.nn.ModuleList([network(dropout=0.5), network(dropout=0.5)]).double()
    x = torch.randn(7, 4).double()
    masks = networks[0].train().draw_masks(x, None, Noise.seeded(0))
    alone = torch.stack([each(x, masks=masks) for each in networks])
    maps = padded_maps(list(networks))
    assert {weight.shape for weight, _ in maps.values()} == {(24, 4), (24, 24), (12, 24)}
    with caching(maps):
        together = torch.stack([each(x, masks=masks) for each in networks])
    assert_close(together, alone)
    parameters = list(networks.parameters())
    grads = (torch.autograd.grad(y.square().sum(), parameters) for y in (together, alone))
    for one, other in zip(*grads, strict=True):
        assert_close(one, other)
    assert not any(CACHE in linear.__dict__ for linear in maps)


@pytest.mark.parametrize(
    ("features", "bins", "hidden", "blocks", "count"),
    [(6, 8, 256, 2, 300_426), (8, 8, 256, 2, 312_760), (43, 4, 64, 1, 41_881)],
)
def test_parameters_are_as_many_as_the_authors(
    features: int, bins: int, hidden: int, blocks: int, count: int
) -> None:
    assert total(MaskedResidualNet(features, 3 * bins - 1, hidden, blocks)) == count


@pytest.mark.parametrize(
    ("features", "bins", "hidden", "blocks", "count"),
    [
        (6, 8, 256, 2, 3_004_722),
        (8, 8, 256, 2, 3_128_392),
        (21, 8, 256, 2, 3_934_392),
        (43, 4, 64, 1, 439_622),
        (63, 8, 512, 2, 18_311_642),
    ],
)
def test_ten_layers_are_the_papers_spline_flows(
    features: int, bins: int, hidden: int, blocks: int, count: int
) -> None:
    net = MaskedResidualNet(features, 3 * bins - 1, hidden, blocks)
    assert 10 * total(net) + 11 * total(LULinear(features)) == count


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
@pytest.mark.parametrize("context_features", [0, 2])
def test_outputs_depend_on_exactly_the_features_before(order: list[int], context_features: int) -> None:
    net = network(4, context_features, order=order)
    context = torch.randn(context_features).double() if context_features else None
    matrix = jacobian(lambda x: net(x, context), torch.randn(4).double())
    for first, second in itertools.product(range(4), repeat=2):
        depends = (matrix[first, :, second] != 0).tolist()
        assert depends == 3 * [order.index(second) < order.index(first)]


@pytest.mark.parametrize("features", [1, 4])
def test_every_output_depends_on_all_of_the_context(features: int) -> None:
    net, x = network(features, 2), torch.randn(features).double()
    matrix = jacobian(lambda context: net(x, context), torch.randn(2).double())
    assert matrix.shape == (features, 3, 2)
    assert bool((matrix != 0).all())


def test_one_feature_has_constant_outputs() -> None:
    net = network(1)
    values = net(torch.randn(50, 1).double())
    assert values.shape == (50, 1, 3)
    assert_close(values, values[:1].expand(50, 1, 3), rtol=0, atol=1e-14)
    assert values.std() > 0.1


def test_the_formula_is_that_of_residual_blocks() -> None:
    """No activation before the first block's own, none before the last map."""
    net, x = generic(MaskedResidualNet(3, 2, hidden=16, blocks=2)), torch.randn(9, 3).double()
    state = net.state_dict()

    def linear(name: str, h: Tensor) -> Tensor:
        weight = state[f"{name}.weight"] * state[f"{name}.mask"]
        return h @ weight.T + state[f"{name}.bias"]

    h = linear("first", x)
    for block in ("blocks.0", "blocks.1"):
        h = h + linear(f"{block}.outer", linear(f"{block}.inner", h.relu()).relu())
    assert_close(net(x), linear("last", h).reshape(9, 3, 2))


def test_hidden_units_are_shared_out_evenly() -> None:
    """Inputs that a hidden unit sees: of 5 features, 1 to 4; with a context, 0 to 4 beside it."""
    plain, given = MaskedResidualNet(5, 1, 40, 1), MaskedResidualNet(5, 1, 40, 1, context_features=2)
    assert plain.first.mask.sum(1).bincount().tolist() == [0, 10, 10, 10, 10]
    assert given.first.mask.sum(1).bincount().tolist() == [0, 0, 8, 8, 8, 8, 8]


def test_blocks_start_near_the_identity() -> None:
    net, x = MaskedResidualNet(6, 23, hidden=256, blocks=2), torch.randn(100, 6)
    h = net.first(x)
    for block in net.blocks:
        after = block(h, None)
        assert 0 < (after - h).abs().max() < 0.02
        assert block.outer.weight.abs().max() <= 1e-3
        assert block.outer.weight.abs().max() > 0.9e-3
        h = after


def test_a_bad_network_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dropout must lie in \[0, 1\); got 1.0"):
        MaskedResidualNet(3, 2, 8, 1, dropout=1.0)
    with pytest.raises(ValueError, match=r"order: expected each of 0, ..., d - 1 once; got \[0, 0, 1\]"):
        MaskedResidualNet(3, 2, 8, 1, order=[0, 0, 1])
    with pytest.raises(ValueError, match="3 features, but 2 in their order"):
        MaskedResidualNet(3, 2, 8, 1, order=[1, 0])
    with pytest.raises(ValueError, match=r"8 bins and 3 features need .* = \(3, 23\); got \(3, 11\)"):
        AutoregressiveSpline(3, MaskedResidualNet(3, 11, 8, 1), bins=8)


# -- dropout ----------------------------------------------------------------------------------------


def test_draws_share_their_masks_and_rows_do_not() -> None:
    layer = generic(spline(3, dropout=0.5)).train()
    x = torch.randn(3).double().expand(6, 5, 3)
    z, log_det = layer.encode(x)
    assert_close(z, z[:1].expand(6, 5, 3), rtol=0, atol=1e-14)
    assert_close(log_det, log_det[:1].expand(6, 5), rtol=0, atol=1e-14)
    assert log_det[0].sort().values.diff().min() > 1e-6


def test_masks_are_one_a_row_for_points_and_contexts_alike() -> None:
    net, x, context = network(4, 2, dropout=0.5).train(), torch.zeros(4), torch.zeros(7, 5, 2)
    shapes = [
        (net.draw_masks(x.expand(5, 4), None, Noise()), (2, 5, 20)),
        (net.draw_masks(x, None, Noise()), (2, 20)),
        (net.draw_masks(x, context, Noise()), (2, 5, 20)),
        (net.draw_masks(x.expand(7, 5, 4), context[0], Noise()), (2, 5, 20)),
    ]
    for masks, shape in shapes:
        assert masks is not None
        assert masks.shape == shape


def test_masks_keep_a_share_and_the_mean() -> None:
    net, x = network(4, dropout=0.2).train(), torch.zeros(5000, 4).double()
    masks = net.draw_masks(x, None, Noise.seeded(0))
    assert masks is not None
    assert masks.dtype == torch.float64
    assert masks.unique().tolist() == pytest.approx([0, 1.25], abs=1e-15)
    assert masks.mean().item() == pytest.approx(1, abs=0.01)
    assert not torch.equal(masks[0], masks[1])


def test_masks_multiply_what_enters_a_blocks_last_map() -> None:
    net, x = network(4, dropout=0.5), torch.randn(9, 4).double()
    masks = torch.stack([torch.ones(9, 20), torch.zeros(9, 20)]).double()
    h = net.blocks[0](net.first(x), None) + net.blocks[1].outer.bias
    assert_close(net(x, masks=masks), net.last(h).reshape(9, 4, 3))
    assert_close(net(x, masks=torch.ones(2, 9, 20).double()), net(x))


def test_dropout_keeps_the_order_of_the_features() -> None:
    net, x = network(4, dropout=0.5).train(), torch.randn(4).double()
    masks = net.draw_masks(x, None, Noise())
    matrix = jacobian(lambda v: net(v, masks=masks), x).abs().sum(1)
    assert torch.equal(matrix, matrix.tril(-1))


def test_a_seed_repeats_dropout_and_evaluation_has_none() -> None:
    layer, x = generic(spline(3, dropout=0.5)).train(), torch.randn(8, 3).double()
    first, again, other = (layer.encode(x, noise=Noise.seeded(seed)) for seed in (0, 0, 1))
    assert_close(first, again, rtol=0, atol=0)
    assert not torch.equal(first[0], other[0])
    layer.eval()
    before = torch.get_rng_state()
    once, twice = (layer.encode(x, noise=Noise.seeded(seed)) for seed in (0, 1))
    assert_close(once, twice, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(once[0], first[0])


def test_without_dropout_training_is_as_evaluation() -> None:
    layer, x = generic(spline(3)), torch.randn(8, 3).double()
    assert layer.train().network.draw_masks(x, None, Noise()) is None
    assert_close(layer.train().encode(x), layer.eval().encode(x), rtol=0, atol=0)


def test_no_noise_of_dropout_enters_a_mean_over_draws() -> None:
    """With an index that does nothing all draws of a row have the same weight, dropout or not."""
    index = Indexed(affine(2, 1), normal(1, 2), normal(1, 2))
    with torch.no_grad():
        for parameter in index.parameters():
            parameter.zero_()
    flow = Flow([index, generic(spline(2, dropout=0.5))]).double().train()
    weights = flow.log_weights(torch.randn(6, 2).double(), 20)
    assert_close(weights, weights[:1].expand(20, 6), rtol=0, atol=1e-12)
    IWAE(5)(flow, torch.randn(6, 2).double()).mean().backward()


# -- splines ----------------------------------------------------------------------------------------


def cells(low: float, high: float, count: int) -> tuple[Tensor, float]:
    """Centres of the cells of an interval, and the length of one."""
    side = (high - low) / count
    return low + side * (torch.arange(count).double() + 0.5), side


def test_one_spline_integrates_to_1() -> None:
    flow = generic(Flow([spline(1)]), size=1.0).eval()
    x, side = cells(-8, 8, 100_000)
    density = flow.log_prob(x[:, None]).exp()
    assert (density.log() - flow.base.log_weight(x[:, None])).abs().max() > 0.5
    assert (density.sum() * side).item() == pytest.approx(1, abs=1e-6)


def test_two_features_integrate_to_1() -> None:
    layers = [spline(2), Permutation(torch.tensor([1, 0])), LULinear(2), spline(2, order=[1, 0])]
    flow = generic(Flow(layers), size=0.4).eval()
    x, side = cells(-9, 9, 600)
    points = torch.cartesian_prod(x, x)
    density = flow.log_prob(points).exp()
    assert (density.log() - flow.base.log_weight(points)).abs().max() > 0.5
    assert (density.sum() * side**2).item() == pytest.approx(1, abs=1e-3)


def test_samples_have_the_density() -> None:
    """Shares of samples in the quarters of the plane, against the integral of the density over each."""
    flow = generic(Flow([spline(2, order=[1, 0]), LULinear(2)]), size=0.4).eval()
    x, side = cells(-9, 9, 600)
    points = torch.cartesian_prod(x, x)
    density = flow.log_prob(points).exp() * side**2
    samples = flow.sample(40_000, seed=0)
    for signs in itertools.product([-1.0, 1.0], repeat=2):
        inside = (torch.sign(points) == torch.tensor(signs)).all(-1)
        expected = density[inside].sum().item()
        share = (torch.sign(samples) == torch.tensor(signs)).all(-1).double().mean().item()
        assert abs(share - expected) < 4 * math.sqrt(expected * (1 - expected) / len(samples))


def test_a_network_of_zeros_is_the_identity() -> None:
    layer, x = spline(3).double(), torch.randn(50, 3).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    z, log_det = layer.encode(x)
    assert_close(z, x, rtol=0, atol=1e-14)
    assert_close(log_det, torch.zeros(50).double(), rtol=0, atol=1e-13)


def test_splines_end_at_their_bound_without_a_step() -> None:
    layer = generic(spline(1), size=2.0).eval()
    inside, _ = cells(-1.5, 1.5, 3000)
    z, log_det = layer.encode(inside[:, None])
    assert z.abs().max() < 1.5
    assert bool((z[:, 0].diff() > 0).all())
    assert (z[:, 0] - inside).abs().max() > 0.1
    for end in (-1.5, 1.5):
        assert_close(layer.encode(torch.tensor([end]).double())[0], torch.tensor([end]).double())
    outside = torch.tensor([[-1.51], [1.51], [40.0]]).double()
    z, log_det = layer.encode(outside)
    assert torch.equal(z, outside)
    assert bool((log_det == 0).all())


def test_widths_and_heights_are_divided_by_the_root_of_the_width_and_slopes_are_not() -> None:
    """Of numbers 5, 0, ...: the first of 4 bins takes a softmax of 5/√h, which zuko bounds softly."""
    for hidden in (4, 64):
        layer = AutoregressiveSpline(1, MaskedResidualNet(1, 11, hidden, 1), bins=4, bound=1.0).double()
        numbers = torch.zeros(1, 11).double()
        numbers[0, [0, 4, 8]] = 5.0
        shrunk = 5 / math.sqrt(hidden)
        bounded = shrunk / (1 + 2 * shrunk / math.log(1000))
        knot = 2 * math.exp(bounded) / (math.exp(bounded) + 3) - 1
        splines = MonotonicRQSTransform(*layer._splines(numbers).numbers, layer.bound)
        assert splines.horizontal[0, 1].item() == pytest.approx(knot, abs=1e-12)
        assert splines.vertical[0, 1].item() == pytest.approx(knot, abs=1e-12)
        slope = math.exp(5 / (1 + 5 / math.log(1000)))
        assert splines.derivatives[0, 1].item() == pytest.approx(slope, abs=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_far_points_stay_finite(dtype: torch.dtype) -> None:
    layer = AutoregressiveSpline(4, MaskedResidualNet(4, 23, 64, 2)).to(dtype)
    signs = torch.tensor(list(itertools.product([-1e6, 0.3, 1e6], repeat=4)))
    x = signs.to(dtype).requires_grad_()
    z, log_det = layer.encode(x)
    back = layer.decode(x)
    (z.sum() + log_det.sum() + back.sum()).backward()
    for value in (z, log_det, back, x.grad, *(p.grad for p in layer.parameters())):
        assert value is not None
        assert value.dtype == dtype
        assert bool(value.isfinite().all())
    far = x.abs() > 1
    assert torch.equal(z[far], x[far])
    assert torch.equal(back[far], x[far])


def test_steep_splines_are_inverted_in_float32() -> None:
    """Where the inverse itself is not computed in float64, z comes back with an error of up to 6."""
    layer = AutoregressiveSpline(8, MaskedResidualNet(8, 23, 16, 1))
    generic(layer, size=5.0).float().eval()
    z = 6 * torch.rand(20_000, 8) - 3
    x = layer.decode(z)
    assert x.dtype == torch.float32
    assert (layer.encode(x)[0] - z).abs().max() < 0.03

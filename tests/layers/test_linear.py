"""Permutations and triangular factors."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load, save
from torch.testing import assert_close

from ciflows import Flow
from ciflows.layers import LULinear, Permutation
from ciflows.networks import MaskedResidualNet
from ciflows.speed.stacked import caching, prepared
from constructors import generic


def test_a_permutation_that_is_not_its_own_inverse_is_undone() -> None:
    order = torch.tensor([1, 2, 3, 0])
    layer, x = Permutation(order), torch.tensor([10.0, 11.0, 12.0, 13.0])
    z, log_det = layer.encode(x)
    assert z.tolist() == [11, 12, 13, 10]
    assert log_det.item() == 0
    assert torch.equal(layer.decode(z), x)
    assert layer.decode(x).tolist() == [13, 10, 11, 12]


@pytest.mark.parametrize("order", [[0, 0, 1], [1, 2, 3], [[0, 1]], [0.5, 1.0], [], [0, -1]])
def test_what_is_no_permutation_is_refused(order: list[float]) -> None:
    with pytest.raises(ValueError, match=r"Permutation: expected each of 0, \.\.\., d - 1 once"):
        Permutation(torch.tensor(order))


def test_an_order_may_be_given_twice_and_stays_as_it_is() -> None:
    order = torch.tensor([1, 2, 0])
    net = MaskedResidualNet(3, 2, 8, 1, order=order)
    flow = Flow([Permutation(order), Permutation(order)])
    state = load(save(flow.state_dict() | net.state_dict()))
    for layer in flow.layers:
        layer.order.copy_(torch.arange(3))
    net.order.copy_(torch.arange(3))
    assert order.tolist() == [1, 2, 0] == state["layers.1.order"].tolist() == state["order"].tolist()


def test_a_flow_of_permutations_alone_has_the_precision_of_its_base() -> None:
    flow = Flow([Permutation(torch.arange(3).flip(0))])
    x = torch.tensor([[1.0, 2.0, 3.0]])
    assert flow.dtype == torch.float32
    assert_close(flow.log_prob(x), flow.base.log_weight(x))


@pytest.mark.parametrize(("features", "count"), [(1, 2), (2, 6), (6, 42), (63, 4032)])
def test_lu_has_as_many_parameters_as_a_matrix_and_a_bias(features: int, count: int) -> None:
    assert sum(p.numel() for p in LULinear(features).parameters()) == count


@pytest.mark.parametrize("features", [1, 2, 6, 21])
def test_lu_starts_as_the_identity(features: int) -> None:
    x = torch.randn(10, features)
    z, log_det = LULinear(features).encode(x)
    assert torch.equal(z, x)
    assert bool((log_det == 0).all())


@pytest.mark.parametrize("features", [1, 2, 6, 21])
def test_lu_is_a_matrix_with_its_log_determinant(features: int) -> None:
    layer, x = generic(LULinear(features), size=0.2), torch.randn(4, 5, features).double()
    z, log_det = layer.encode(x)
    bias = layer.encode(torch.zeros(features).double())[0]
    matrix = (layer.encode(torch.eye(features).double())[0] - bias).mT
    assert_close(z, x @ matrix.mT + bias, rtol=1e-12, atol=1e-12)
    sign, log_abs_det = torch.linalg.slogdet(matrix)
    assert sign == 1
    assert_close(log_det, log_abs_det.expand(4, 5), rtol=1e-12, atol=1e-12)
    assert_close(layer.decode(z), x, rtol=1e-12, atol=1e-12)
    assert_close(layer.decode(x), torch.linalg.solve(matrix, (x - bias)[..., None])[..., 0])


def test_products_of_several_layers_at_once_are_those_of_each() -> None:
    layers = [generic(LULinear(size)) for size in (3, 2, 3)]
    xs = [torch.randn(4, *layer.shape).double() for layer in layers]
    parameters = [p for layer in layers for p in layer.parameters()]

    def encode() -> tuple[torch.Tensor, ...]:
        z = torch.cat([layer.encode(x)[0].flatten() for layer, x in zip(layers, xs, strict=True)])
        return z, *torch.autograd.grad(z.square().sum(), parameters)

    alone = encode()
    with caching(prepared(layers)):
        together = encode()
    for one, other in zip(together, alone, strict=True):
        assert_close(one, other)


def test_lu_factors_are_triangular() -> None:
    lower, upper = generic(LULinear(5)).factors()
    assert torch.equal(lower, lower.tril())
    assert torch.equal(upper, upper.triu())
    assert torch.equal(lower.diagonal(), torch.ones(5).double())
    assert bool((upper.diagonal() > 0).all())
    assert int((lower != 0).sum()) == int((upper != 0).sum()) == 15

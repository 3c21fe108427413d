"""Linear maps of a stack, whose gradients are taken together."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ciflows.speed import stacked_linear as module
from ciflows.speed.stacked_linear import linear, unstack


class Count(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **kwargs or {})


@pytest.fixture
def maps() -> tuple[Tensor, Tensor, Tensor]:
    """Weights and biases of five maps, and points."""
    generator = torch.Generator().manual_seed(0)
    shapes = (5, 3, 3), (5, 3), (2, 4, 3)
    weights, biases, x = (torch.randn(shape, generator=generator).double() for shape in shapes)
    return weights.requires_grad_(), biases.requires_grad_(), x.requires_grad_()


def test_gradients_are_those_of_plain_maps_however_these_are_used(
    maps: tuple[Tensor, Tensor, Tensor],
) -> None:
    def network(weights: Tensor, biases: Tensor, x: Tensor) -> Tensor:
        each = unstack(weights, biases)
        for index in (0, 2, 0):  # the first one twice
            x = torch.tanh(linear(x, *each[index]))
        some = linear(x[0, :2], *each[3])  # of other rows; the last one not at all
        return some.sum() + x.sum() + each[1][0].sum()  # the second one in another way

    weights, biases, x = maps
    with torch.no_grad():
        h = x
        for index in (0, 2, 0):
            h = torch.tanh(h @ weights[index].mT + biases[index])
        value = (h[0, :2] @ weights[3].mT + biases[3]).sum() + h.sum() + weights[1].sum()
    assert torch.equal(network(*maps), value)
    assert torch.autograd.gradcheck(network, maps)
    assert torch.autograd.gradgradcheck(network, maps)


def products(maps: tuple[Tensor, Tensor, Tensor]) -> Counter[str]:
    """Products in the backward pass through all five maps: of single matrices, and of many."""
    weights, biases, x = maps
    y = x[0]
    for weight, bias in unstack(weights, biases):
        y = linear(y, weight, bias)
    with Count() as count:
        torch.autograd.grad(y.sum(), maps)
    return Counter({name: count.calls[name] for name in ("mm", "bmm")})


def test_all_weights_have_their_gradients_in_one_product(maps: tuple[Tensor, Tensor, Tensor]) -> None:
    assert products(maps) == {"mm": 5, "bmm": 1}


def test_a_map_on_another_stream_keeps_its_gradient_to_itself(
    maps: tuple[Tensor, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = iter(["first", "first", "second", "first", "first", "first"])  # of the stack, of each use
    monkeypatch.setattr(module, "_stream", lambda device: next(streams))
    assert products(maps) == {"mm": 5 + 1, "bmm": 1}


def test_constant_maps_are_plain_ones(maps: tuple[Tensor, Tensor, Tensor]) -> None:
    weights, biases, x = maps
    for weight, bias in unstack(weights.detach(), biases.detach()):
        (grad,) = torch.autograd.grad(linear(x, weight, bias).sum(), x)
        assert torch.equal(grad, weight.sum(0).expand(2, 4, 3))


def test_a_gradient_of_x_alone_leaves_nothing_behind(maps: tuple[Tensor, Tensor, Tensor]) -> None:
    weights, biases, x = maps
    first, second, *_ = (linear(x, weight, bias).sum() for weight, bias in unstack(weights, biases))
    torch.autograd.grad(first, x, retain_graph=True)
    (grad,) = torch.autograd.grad(second, weights)
    assert not grad[0].any()
    assert grad[1].any()


def test_a_bias_alone_and_no_rows(maps: tuple[Tensor, Tensor, Tensor]) -> None:
    weights, biases, x = maps
    weight, bias = unstack(weights, biases)[0]
    assert torch.autograd.grad(bias.sum(), biases)[0].sum() == 3
    assert linear(x[:, :0], weight, bias).shape == (2, 0, 3)


def test_without_torchs_private_function_each_map_takes_its_own_gradient(
    maps: tuple[Tensor, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_will_execute", None)
    assert products(maps) == {"mm": 5 + 5, "bmm": 0}
    weights, biases, x = maps
    (grad,) = torch.autograd.grad(linear(x, *unstack(weights, biases)[1]).sum(), weights)
    torch.testing.assert_close(grad[1], x.sum((0, 1)).expand(3, 3))

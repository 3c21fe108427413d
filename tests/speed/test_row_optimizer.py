"""All tensors in one row: the same steps."""

import math

import pytest
import torch
from torch import Tensor, nn

from ciflows.speed.row_optimizer import RowOptimizer
from ciflows.training.optimizer import Optimizer

SHAPES = [(20, 20), (3,), (16, 40), (20, 20), (2, 20), ()]


def make(dtypes: tuple[torch.dtype, ...]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [nn.Parameter(value.to(dtypes[i % len(dtypes)])) for i, value in enumerate(values)]


def give_gradients(parameters: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in parameters[1:]:  # the first has none, which counts as 0
        p.grad = torch.randn(p.shape, generator=generator).to(p)


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(value, right[name])


@pytest.mark.parametrize("clip", [1.0, math.inf])
@pytest.mark.parametrize(
    ("muon", "dtypes"),
    [
        (False, (torch.float32,)),
        (True, (torch.float32,)),
        (False, (torch.float32, torch.float64)),
    ],
)
def test_steps_and_state_are_those_of_the_plain_optimiser(
    muon: bool, clip: float, dtypes: tuple[torch.dtype, ...]
) -> None:
    sides = [make(dtypes), make(dtypes)]
    plain = Optimizer(sides[0], 0.1, weight_decay=0.3, muon=muon)
    row = RowOptimizer(sides[1], 0.1, weight_decay=0.3, muon=muon)
    for seed in range(3):
        for parameters, optimizer in zip(sides, (plain, row), strict=True):
            optimizer.zero_grad()
            give_gradients(parameters, seed)
        torch.testing.assert_close(plain.step(clip), row.step(clip))
    for ours, theirs in zip(*sides, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert_same(plain.state(), row.state())


def test_it_goes_on_from_the_state_of_the_plain_optimiser() -> None:
    sides = [make((torch.float32,)), make((torch.float32,))]
    plain, row = Optimizer(sides[0], 0.1), RowOptimizer(sides[1], 0.1)
    give_gradients(sides[0], 0)
    plain.step()
    state = row.state()
    for name, value in plain.state().items():
        state[name].copy_(value)
    for ours, theirs in zip(*sides, strict=True):
        theirs.data.copy_(ours.data)
    for parameters, optimizer in zip(sides, (plain, row), strict=True):
        optimizer.zero_grad()
        give_gradients(parameters, 1)
        optimizer.step()
    for ours, theirs in zip(*sides, strict=True):
        torch.testing.assert_close(ours, theirs)

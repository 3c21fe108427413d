"""A row's bits do not depend on the other rows: products, functions and sums, one by one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ciflows.core.pareto import add_up
from ciflows.core.same_bits import FUNCTIONS, SameBits

PIECES = (1, 2, 3, 17, 63, 64, 65, 129, 1000)


@pytest.mark.parametrize("inputs", [1, 2, 5, 7, 13, 43, 64, 200, 512])
def test_rows_of_a_product_are_the_same_in_every_batch(inputs: int) -> None:
    x = torch.randn(1500, inputs)
    for outputs in (1, 2, 7, 8, 11, 16, 33, 161, 512):
        weight, bias = torch.randn(outputs, inputs), torch.randn(outputs)
        with SameBits():
            linear, product = F.linear(x, weight, bias), x @ weight.mT
            for size in PIECES:
                some = torch.randperm(len(x))[:size]
                assert torch.equal(F.linear(x[some], weight, bias), linear[some]), (outputs, size)
                assert torch.equal(x[some] @ weight.mT, product[some]), (outputs, size)
        assert torch.allclose(linear, F.linear(x, weight, bias), rtol=1e-4, atol=1e-4)


def test_other_products_are_what_they_were() -> None:
    x, three, vector = torch.randn(4, 10, 3), torch.randn(4, 3, 2), torch.randn(3)
    with SameBits():
        padded = [x @ three, x @ three[:1], x @ vector, torch.matmul(x, three[0]), vector @ three[0]]
    plain = [x @ three, x @ three[:1], x @ vector, torch.matmul(x, three[0]), vector @ three[0]]
    for one, other in zip(padded, plain, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_sums_over_draws_are_the_same_in_every_batch() -> None:
    values = torch.randn(37, 500)
    total = add_up(values)
    assert torch.allclose(total, values.sum(0), atol=1e-4)
    for size in PIECES[:-1]:
        some = torch.randperm(500)[:size]
        assert torch.equal(add_up(values[:, some]), total[some])


@pytest.mark.parametrize("name", sorted({function.__name__ for function in FUNCTIONS}))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_functions_are_the_same_in_every_batch(name: str, dtype: torch.dtype) -> None:
    x = torch.rand(40_001, dtype=dtype) * 0.98 + 0.01
    function = next(each for each in FUNCTIONS if each.__name__ == name)
    others = [x.flip(0)] if name in ("logaddexp", "pow", "atan2", "hypot", "__pow__") else []
    plain = function(x, *others)
    with SameBits():
        whole = function(x, *others)
        for size in PIECES:
            some = torch.randperm(len(x))[:size]
            assert torch.equal(function(x[some], *(other[some] for other in others)), whole[some])
            assert torch.equal(function(x[::7], *(other[::7] for other in others)), whole[::7])
    assert torch.allclose(whole, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("columns", [2, 3, 7, 20, 33, 100])
def test_sums_are_the_same_in_every_batch(columns: int) -> None:
    values = torch.randn(columns, 1500)  # transposed: the rows are the columns
    for function in (torch.sum, torch.logsumexp, torch.softmax, torch.log_softmax, torch.mean):
        with SameBits():
            whole = function(values.mT, -1)
            for size in PIECES:
                some = torch.randperm(1500)[:size]
                assert torch.equal(function(values[:, some].mT, -1), whole[some])

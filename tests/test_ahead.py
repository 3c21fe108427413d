"""Kernels compiled ahead: each kind once, none started, and zero for results."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

import ciflows
from ciflows import kernels
from ciflows.kernels.ahead import compiled_ahead, launch
from ciflows.noise import RowNoise


class Kernel:
    """Stands for one of triton's: fills what it is given with ones, and remembers what was asked."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.compiled: list[tuple[tuple[Tensor | int, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda result, *rest, **options: result.fill_(1)

    def warmup(self, *given: Tensor | int, grid: tuple[int, ...], **options: Any) -> None:
        time.sleep(0.05)
        if self.fails:
            raise RuntimeError("out of registers")
        self.compiled.append((given, options))


def start(kernel: Kernel, size: int = 3, result: Tensor | None = None, **options: int) -> list[float]:
    result = torch.full((2,), 7.0) if result is None else result
    launch(kernel, (1,), result, size, results=[result], **options)
    return result.tolist()


def test_a_kernel_starts_where_nothing_is_compiled_ahead() -> None:
    kernel = Kernel()
    assert start(kernel) == [1, 1]
    assert not kernel.compiled


def test_each_kind_is_compiled_once_and_none_starts() -> None:
    kernel = Kernel()
    with compiled_ahead() as compiler:
        assert not compiler.used
        values = [start(kernel), start(kernel), start(kernel, 5), start(kernel, 5, R=64)]
        assert compiler.used
    assert values == [[0, 0]] * 4
    kinds = sorted((options for _, options in kernel.compiled), key=len)
    assert kinds == [{}, {"R": 64}]  # and all are ready
    assert start(kernel) == [1, 1]


@pytest.mark.parametrize(
    "another",
    [
        {"size": 1},
        {"size": 32},
        {"size": 2**31 + 1},
        {"result": torch.zeros(2, dtype=torch.float64)},
        {"result": torch.zeros(3)[1:]},
    ],
)
def test_what_triton_tells_apart_is_compiled_apart(another: dict[str, Any]) -> None:
    kernel = Kernel()
    with compiled_ahead():
        start(kernel)
        start(kernel, **another)
    assert len(kernel.compiled) == 2


def test_what_does_not_compile_ahead_is_left_to_its_start() -> None:
    kernel = Kernel(fails=True)
    with compiled_ahead():
        start(kernel)
    assert start(kernel) == [1, 1]


def test_another_thread_goes_on_computing() -> None:
    """A likelihood must not be zero because another model is being compiled."""
    values: list[list[float]] = []
    with compiled_ahead():
        thread = threading.Thread(target=lambda: values.append(start(Kernel())))
        thread.start()
        thread.join()
    assert values == [[1, 1]]


def test_the_way_back_stays_in_the_thread() -> None:
    kernel = Kernel()

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.square()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            grad = torch.ones_like(grads[0])
            launch(kernel, (1,), grad, results=[grad])
            return grad

    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.ones(2, device=device, requires_grad=True)
    with compiled_ahead():
        assert not torch.autograd.is_multithreading_enabled()  # a GPU's has a thread of its own
        Square.apply(x).sum().backward()
    assert torch.autograd.is_multithreading_enabled()
    assert x.grad is not None
    assert x.grad.tolist() == [0, 0]
    assert len(kernel.compiled) == 1


@pytest.mark.skipif(
    not kernels.INSTALLED or not torch.cuda.is_available(), reason="needs triton and CUDA"
)
def test_kernels_of_a_flow_are_ready_after_they_were_compiled_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from triton.runtime.jit import JITFunction

    flow = ciflows.build_model("cif-resflow", features=2, layers=2, hidden=[24, 24], seed=0)
    x = torch.randn(1, 48, 2)
    expected = flow.log_weight(x, noise=RowNoise(0).about(x[0], (2,))).detach()
    flow.cuda()

    def log_weight() -> Tensor:
        value = flow.log_weight(x.cuda(), noise=RowNoise(0).about(x[0].cuda(), (2,)))
        flow.zero_grad()
        value.sum().backward()
        return value.detach().cpu()

    compiled: list[str] = []
    whole = JITFunction._do_compile

    def compile_one(self: Any, *given: Any, **options: Any) -> Any:
        compiled.append(self.__name__)
        return whole(self, *given, **options)

    monkeypatch.setattr(JITFunction, "_do_compile", compile_one)
    with compiled_ahead():
        log_weight()
    ahead = len(compiled)
    assert ahead
    torch.testing.assert_close(log_weight(), expected, rtol=1e-4, atol=1e-4)
    assert len(compiled) == ahead

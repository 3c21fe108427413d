"""The second stream: who may use it, what it waits for, and who waits for it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from ciflows import Flow, Indexed
from ciflows.core.layer import Layer
from ciflows.core.noise import Noise
from ciflows.speed.streams import add, encode_part, log_weight, two_streams
from constructors import affine, generic, normal, residual


class Stream:
    """Stands for a stream of a GPU: remembers in which order work, waits and joins come."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def second(log: list[str], monkeypatch: pytest.MonkeyPatch) -> Stream:
    """The second stream, where torch has these two for streams."""
    first, second = Stream("first", log), Stream("second", log)
    current = [first]

    @contextmanager
    def stream(given: Stream) -> Iterator[None]:
        current.append(given)
        try:
            yield
        finally:
            current.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", stream)
    return second


def flow_of(*layers: Layer, base: Flow | None = None) -> Flow:
    return generic(Flow(layers, base))


def indexed(prior: Flow | None = None) -> Indexed:
    return Indexed(affine(2, 1), normal(1, 2) if prior is None else prior, normal(1, 2))


def test_each_index_is_left_to_the_second_stream_and_waited_for_once(
    second: Stream, log: list[str]
) -> None:
    flow, x = flow_of(residual(2), indexed(), residual(2), indexed()), torch.randn(5, 2).double()
    with two_streams(second):  # type: ignore[arg-type]
        flow.log_weight(x)
        assert log[-1] == "first waits for second"
        assert log[:-1] == ["second waits for first"] * (2 + 1)  # indices; the sum
    assert log[-1] == "first waits for second"


def test_values_and_gradients_are_those_of_one_stream(second: Stream) -> None:
    flow = flow_of(residual(2), indexed(Flow([], normal(1, 2))), base=flow_of(indexed()))
    x, parameters = torch.randn(5, 2).double(), list(flow.parameters())

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(flow.log_weight(x, noise=Noise.seeded(0)).sum(), parameters)

    plain = gradients()
    with two_streams(second):  # type: ignore[arg-type]
        for one, other in zip(gradients(), plain, strict=True):
            assert torch.equal(one, other)


class Doubled(Layer):
    """A layer that computes with the log-weight of the one inside it."""

    def __init__(self, inner: Layer) -> None:
        super().__init__(inner.shape)
        self.inner = inner

    def _encode(self, x: Tensor, context: Tensor | None, noise: Noise) -> tuple[Tensor, Tensor]:
        z, log_weight = self.inner.encode(x, context, noise)
        return z, 2 * log_weight

    def _decode(self, z: Tensor, context: Tensor | None, noise: Noise) -> Tensor:
        return self.inner.decode(z, context, noise)


def test_a_layer_inside_another_one_does_not_leave_its_weight_to_the_second_stream(
    second: Stream, log: list[str]
) -> None:
    flow = flow_of(Doubled(indexed()))
    with two_streams(second):  # type: ignore[arg-type]
        flow.log_weight(torch.randn(5, 2).double())
    assert log == []


def test_nothing_is_waited_for_where_the_second_stream_did_nothing(
    second: Stream, log: list[str]
) -> None:
    with two_streams(second):  # type: ignore[arg-type]
        flow_of(residual(2)).log_weight(torch.randn(5, 2).double())
    assert log == []


def test_what_the_second_stream_reads_is_held_until_both_join(second: Stream) -> None:
    def plain(layer: object, tensor: Tensor) -> Tensor:
        return tensor.sum()

    with two_streams(second):  # type: ignore[arg-type]
        tensor = torch.zeros(2)
        alive = weakref.ref(tensor)
        total = encode_part(lambda part, each: log_weight(plain, part, each), "layer", tensor)
        del tensor
        add(sum, [total])  # type: ignore[arg-type]
        assert alive() is not None
    assert alive() is None


def test_without_a_second_stream_plain_functions_run() -> None:
    assert encode_part(lambda part, x: x, "part", 3) == 3
    assert log_weight(lambda layer, x: x.sum(), "layer", torch.ones(2)) == 2
    assert add(sum, [torch.ones(())]) == 1  # type: ignore[arg-type]

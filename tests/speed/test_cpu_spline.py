"""Splines in C: against the plain version in float64, at the edges, and where torch has to see them."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from ciflows.core.hook import plain
from ciflows.layers.splines import spline, spline_inverse
from ciflows.speed import cpu_spline

COMPILER = shlex.split(os.environ.get("CC", "cc"))[0]
pytestmark = pytest.mark.skipif(shutil.which(COMPILER) is None, reason="There is no C compiler.")
BOUND, LEAST = 3.0, 1e-3


@pytest.fixture(params=[1, 3])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def inputs(shape: tuple[int, ...], bins: int, spread: float = 1.0) -> list[Tensor]:
    numbers = spread * torch.randn(*shape, 3 * bins - 1)
    parts = [2.5 * torch.randn(shape), *numbers.split([bins, bins, bins - 1], dim=-1)]
    return [part.requires_grad_() for part in parts]


def bent(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    return spline(*parts, BOUND, LEAST)


def gradients(parts: list[Tensor]) -> tuple[Tensor, ...]:
    y, log_slope = bent(parts)
    return torch.autograd.grad((y**3).sum() + (torch.cos(log_slope)).sum(), parts)


def unbent(parts: list[Tensor]) -> Tensor:
    return spline_inverse(*parts, BOUND, LEAST)


def assert_near(ours: Tensor, expected: Tensor) -> None:
    """In all: single numbers next to a knot may be off."""
    assert ours.shape == expected.shape
    assert (ours - expected).norm() <= 3e-4 * expected.norm() + 1e-5


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("bins", [2, 3, 8, 16, 37])
@pytest.mark.parametrize("shape", [(1,), (7, 3), (2, 1500, 3)])
def test_values_and_gradients_are_those_of_the_plain_version(shape: tuple[int, ...], bins: int) -> None:
    parts = inputs(shape, bins)
    assert cpu_spline._fits(parts[0], parts[1:])
    wide = [part.detach().double().requires_grad_() for part in parts]
    for ours, expected in zip(
        (*bent(parts), *gradients(parts)), (*bent(wide), *gradients(wide)), strict=True
    ):
        assert_near(ours, expected)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("bins", [2, 8, 37])
@pytest.mark.parametrize("shape", [(1,), (2, 1500, 3)])
def test_the_inverse_and_its_gradients_are_those_of_the_plain_version(
    shape: tuple[int, ...], bins: int
) -> None:
    parts = inputs(shape, bins)
    wide = [part.detach().double().requires_grad_() for part in parts]
    found, expected = unbent(parts), unbent(wide)
    assert_near(found, expected)
    found = torch.autograd.grad((found**3).sum(), parts)
    expected = torch.autograd.grad((expected**3).sum(), wide)
    for ours, other in zip(found, expected, strict=True):
        assert_near(ours, other)


def test_the_inverse_of_steep_splines_leads_back() -> None:
    parts = [part.detach() for part in inputs((4000,), 8, spread=6.0)]
    y, _ = bent([unbent(parts), *parts[1:]])
    with plain():
        plain_y, _ = bent([unbent(parts), *parts[1:]])
    assert (y - parts[0]).abs().mean() < 1.5 * (plain_y - parts[0]).abs().mean()


def test_it_is_as_exact_as_the_plain_version_in_float32() -> None:
    parts = inputs((4000,), 8, spread=3.0)
    with torch.no_grad():
        y, log_slope = bent(parts)
        with plain():
            plain_y, plain_log = bent(parts)
            wide_y, wide_log = bent([part.double() for part in parts])
    for ours, other, truth in ((y, plain_y, wide_y), (log_slope, plain_log, wide_log)):
        assert (ours - truth).abs().mean() < 1.5 * (other - truth).abs().mean()


def test_edges() -> None:
    x = torch.tensor([-BOUND, BOUND, -BOUND - 1e-3, 100.0, -torch.inf, torch.nan])
    parts = [x, *(part.detach() for part in inputs((6,), 4)[1:])]
    y, log_slope = bent(parts)
    torch.testing.assert_close(y[:5], x[:5])
    assert torch.equal(log_slope[2:5], torch.zeros(3))
    assert y[5].isnan()
    torch.testing.assert_close(unbent(parts)[:5], x[:5])
    assert unbent(parts)[5].isnan()
    huge = [x[:4], *(1e30 * part[:4] for part in parts[1:])]
    assert all(part.isfinite().all() for part in bent(huge))
    assert unbent(huge).isfinite().all()
    assert bent([part[:0] for part in parts])[0].shape == (0,)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, for tangents
def test_second_derivatives_and_tangents_are_those_of_the_plain_version() -> None:
    parts = inputs((5, 2), 4)

    def inverse_curvature() -> tuple[Tensor, ...]:
        (slope,) = torch.autograd.grad((unbent(parts) ** 2).sum(), parts[0], create_graph=True)
        return torch.autograd.grad(slope.square().sum(), parts)

    def curvature() -> tuple[Tensor, ...]:
        y, log_slope = bent(parts)
        (slope,) = torch.autograd.grad((y**2 + log_slope).sum(), parts[0], create_graph=True)
        return torch.autograd.grad(slope.square().sum(), parts)

    ours = curvature(), inverse_curvature()
    with plain():
        expected = curvature(), inverse_curvature()
    torch.testing.assert_close(ours, expected, rtol=1e-2, atol=1e-2)
    with forward_ad.dual_level():
        x = forward_ad.make_dual(parts[0].detach(), torch.ones(5, 2))
        y, _ = bent([x, *(part.detach() for part in parts[1:])])
        assert forward_ad.unpack_dual(y).tangent is not None


def test_transposed_numbers_are_taken() -> None:
    parts = [part.detach() for part in inputs((6, 5), 4)]
    turned = [parts[0], *(part.transpose(0, 1).contiguous().transpose(0, 1) for part in parts[1:])]
    slanted = [parts[0], *(part.movedim(-1, 0).contiguous().movedim(0, -1) for part in parts[1:])]
    for other in (turned, slanted):
        assert torch.equal(bent(other)[0], bent(parts)[0])

"""Normal densities and affine maps of a network's output, against torch's distributions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

from ciflows.core.density import log_normal, place_normal
from ciflows.layers.affine import affine

SHAPES = {  # x, and a network's output for it
    "vectors": ((4, 3), (4, 6)),
    "draws of one row": ((2, 4, 3), (4, 6)),
    "one x for all": ((3,), (4, 6)),
    "images": ((2, 2, 3, 3), (2, 4, 3, 3)),
}


def event(shapes: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], int]:
    """Shape of one x, and its dimensions."""
    dims = 3 if len(shapes[1]) == 4 else 1
    return shapes[0][-dims:], dims


def numbers(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).double().requires_grad_() for shape in shapes]


def check(function: Callable[..., object], *inputs: Tensor) -> None:
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_a_normal_density(shapes: tuple[tuple[int, ...], ...]) -> None:
    (x, moments), (shape, dims) = numbers(*shapes), event(shapes)
    mean, log_std = moments.chunk(2, dim=-dims)
    expected = Normal(mean, log_std.exp()).log_prob(x).flatten(-dims).sum(-1)
    torch.testing.assert_close(log_normal(x, moments, shape), expected)
    check(lambda x, moments: log_normal(x, moments, shape), x, moments)


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("shifted", [False, True])
def test_a_draw_and_its_density(shapes: tuple[tuple[int, ...], ...], shifted: bool) -> None:
    shape, dims = event(shapes)
    whole = (*torch.broadcast_shapes(shapes[0][:-dims], shapes[1][:-dims]), *shape)
    epsilon, moments, shift = numbers(whole, shapes[1], whole)
    epsilon = epsilon.detach()
    x, value = place_normal(epsilon, moments, shape, shift if shifted else None)
    mean, log_std = moments.chunk(2, dim=-dims)
    torch.testing.assert_close(x, mean + log_std.exp() * epsilon + (shift if shifted else 0))
    assert torch.equal(value, log_normal(x, moments, shape))
    if shifted:
        check(lambda moments, shift: place_normal(epsilon, moments, shape, shift), moments, shift)
    else:
        check(lambda moments: place_normal(epsilon, moments, shape), moments)


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_an_affine_map(shapes: tuple[tuple[int, ...], ...]) -> None:
    (x, parameters), (shape, dims) = numbers(*shapes), event(shapes)
    s, t = parameters.chunk(2, dim=-dims)
    z, log_det = affine(x, parameters, shape)
    torch.testing.assert_close(z, s.exp() * (x + t))
    torch.testing.assert_close(log_det, s.flatten(-dims).sum(-1).expand(log_det.shape))
    assert log_det.shape == z.shape[: z.ndim - dims]
    check(lambda x, parameters: affine(x, parameters, shape), x, parameters)


def test_a_second_derivative_where_the_parameters_are_made_of_x() -> None:
    (x,) = numbers((3, 2))
    check(lambda x: log_normal(x, torch.cat([x.sin(), x.cos()], -1), (2,)), x)

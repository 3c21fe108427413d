"""What every layer promises, checked on each one in the dictionary of constructors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.autograd.functional import jacobian
from torch.testing import assert_close

from ciflows import Indexed
from ciflows.core.density import Density
from ciflows.core.layer import Bijection, Layer, join
from ciflows.core.noise import Noise
from ciflows.layers import Flatten, Permutation, Residual, Series, Squeeze
from constructors import LAYERS, build

KEEP_VOLUMES = (Flatten, Permutation, Squeeze)
every_layer = pytest.mark.parametrize("name", LAYERS)


class SameNumbers(Noise):
    """Gives every row the same numbers, so that a batch can be compared with a loop over its rows."""

    def normal(self, shape: Sequence[int], like: Tensor) -> Tensor:
        return torch.linspace(-1.0, 0.7, shape[-1]).to(like).expand(tuple(shape))

    def uniform(self, shape: Sequence[int], like: Tensor) -> Tensor:
        return torch.linspace(0.1, 0.8, shape[-1]).to(like).expand(tuple(shape))

    def geometric(self, p: float) -> int:
        return 3


class Recorder(Noise):
    """Keeps the indices that were drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[Tensor] = []

    def posterior(self, density: Density, leading: torch.Size, context: Tensor) -> tuple[Tensor, Tensor]:
        u, log_q = super().posterior(density, leading, context)
        self.drawn.append(u)
        return u, log_q


def inputs(name: str, *leading: int, seed: int = 2) -> tuple[Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    case = LAYERS[name]
    x = case.domain(torch.randn(*leading, *case.shape, generator=generator).double())
    if case.context_shape is None:
        return x, None
    return x, torch.randn(*leading, *case.context_shape, generator=generator).double()


def leading_of(layer: Layer, x: Tensor) -> torch.Size:
    return x.shape[: x.ndim - len(layer.shape)]


def at_noise_side(layer: Layer, x: Tensor) -> Tensor:
    """Points z (*, noise_shape) to decode: the numbers of x, as many as it takes."""
    leading = leading_of(layer, x)
    numbers = x.reshape(*leading, -1)[..., : math.prod(layer.noise_shape)]
    return numbers.reshape(*leading, *layer.noise_shape)


def as_bijection(layer: Layer, x: Tensor, context: Tensor | None) -> tuple[Bijection, Tensor | None]:
    """The layer, or its family with an index held fixed, and what either takes as context."""
    if isinstance(layer, Bijection):
        return layer, context
    if isinstance(layer, Indexed):
        dims = len(layer.shape)
        u = layer.posterior.draw(leading_of(layer, x), join(x, context, dims)).detach()
        return layer.family, join(u, context, dims)
    pytest.skip("no bijection inside")


def autograd_log_det(bijection: Bijection, x: Tensor, context: Tensor | None) -> Tensor:
    """log|det Dz/Dx| (rows,) of each row, from its Jacobian by automatic differentiation."""
    values = []
    for i in range(len(x)):
        given = None if context is None else context[i]
        matrix = jacobian(lambda v, c=given: bijection.encode(v, c)[0], x[i])
        size = x[i].numel()
        values.append(torch.linalg.slogdet(matrix.reshape(size, size)).logabsdet)
    return torch.stack(values)


@every_layer
def test_says_what_it_takes(name: str) -> None:
    layer = build(name)
    assert layer.shape == LAYERS[name].shape
    assert layer.context_shape == LAYERS[name].context_shape
    assert all(callable(getattr(layer, method)) for method in layer.pure)


@every_layer
def test_decode_undoes_encode(name: str) -> None:
    layer, (x, context) = build(name), inputs(name, 50)
    bijection, context = as_bijection(layer, x, context)
    z, _ = bijection.encode(x, context)
    assert z.shape != x.shape or (z - x).abs().max() > 0.01
    assert_close(bijection.decode(z, context), x, rtol=1e-12, atol=1e-12)
    z = at_noise_side(layer, x)
    assert_close(bijection.encode(bijection.decode(z, context), context)[0], z, rtol=1e-12, atol=1e-12)


@every_layer
def test_log_det_is_that_of_the_jacobian(name: str) -> None:
    layer, (x, context) = build(name), inputs(name, 7)
    if layer.noisy or (isinstance(layer, Residual) and isinstance(layer.log_det, Series)):
        pytest.skip("an estimate: see test_residual.py, test_residual_images.py")
    bijection, context = as_bijection(layer, x, context)
    log_det = bijection.encode(x, context)[1]
    assert log_det.abs().max() > 1e-3 or isinstance(layer, KEEP_VOLUMES)
    assert_close(log_det, autograd_log_det(bijection, x, context), rtol=1e-12, atol=1e-12)


@every_layer
def test_log_weight_of_an_index_is_algorithm_1(name: str) -> None:
    layer, (x, context) = build(name), inputs(name, 7)
    if not isinstance(layer, Indexed) or not layer.prior.exact:
        pytest.skip("no index, or one whose density takes draws")
    recorder = Recorder()
    z, log_weight = layer.encode(x, context, recorder)
    (u,) = recorder.drawn
    dims = len(layer.shape)
    log_det = autograd_log_det(layer.family, x, join(u, context, dims))
    log_p = layer.prior.log_weight(u, join(z, context, dims))
    log_q = layer.posterior.log_weight(u, join(x, context, dims))
    assert_close(log_weight, log_det + log_p - log_q, rtol=1e-12, atol=1e-11)


@every_layer
def test_leading_dimensions_equal_a_loop(name: str) -> None:
    layer, (x, context) = build(name), inputs(name, 3, 4)
    z, log_weight = layer.encode(x, context, SameNumbers())
    y = at_noise_side(layer, x)
    back = layer.decode(y, context, SameNumbers())
    assert log_weight.shape == (3, 4)
    assert z.shape == (3, 4, *layer.noise_shape)
    for i in range(3):
        for j in range(4):
            given = None if context is None else context[i, j]
            one, one_weight = layer.encode(x[i, j], given, SameNumbers())
            assert_close(z[i, j], one, rtol=1e-12, atol=1e-12)
            assert_close(log_weight[i, j], one_weight, rtol=1e-12, atol=1e-12)
            alone = layer.decode(y[i, j], given, SameNumbers())
            assert_close(back[i, j], alone, rtol=1e-12, atol=1e-12)


@every_layer
def test_a_context_is_shared_over_leading_dimensions(name: str) -> None:
    layer, (x, context) = build(name), inputs(name, 3, 4)
    if context is None:
        pytest.skip("takes no context")
    for shared in (context[0], context[0, 0]):
        full = shared.expand_as(context)
        encoded = layer.encode(x, shared, SameNumbers()), layer.decode(x, shared, SameNumbers())
        expected = layer.encode(x, full, SameNumbers()), layer.decode(x, full, SameNumbers())
        assert_close(encoded, expected, rtol=1e-12, atol=1e-12)


@every_layer
def test_rows_are_independent(name: str) -> None:
    layer, (x, context) = build(name), inputs(name, 5)
    other = x.clone()
    other[0] = LAYERS[name].domain(torch.tensor(3.0))
    sides = [(layer.encode, x, other)]
    sides += [(layer.decode, at_noise_side(layer, x), at_noise_side(layer, other))]
    for way, one, two in sides:
        before, after = way(one, context, SameNumbers()), way(two, context, SameNumbers())
        before = before if isinstance(before, tuple) else (before,)
        after = after if isinstance(after, tuple) else (after,)
        assert (before[0][0] - after[0][0]).abs().max() > 0.01
        for one, two in zip(before, after, strict=True):
            assert_close(one[1:], two[1:], rtol=1e-12, atol=1e-12)


@every_layer
def test_every_parameter_gets_a_gradient(name: str) -> None:
    layer, (x, context) = build(name), inputs(name, 100)
    if not list(layer.parameters()):
        pytest.skip("has no parameters")
    z, log_weight = layer.encode(x, context)
    (z.square().sum() + log_weight.sum()).backward()
    masks = dict(layer.named_buffers())
    for label, parameter in layer.named_parameters():
        assert parameter.grad is not None, label
        used = masks.get(label.removesuffix("weight") + "mask", torch.ones(()).bool())
        assert bool((parameter.grad != 0)[used.expand_as(parameter)].all()), label
        assert bool(parameter.grad.isfinite().all()), label


@every_layer
def test_state_survives_a_file(name: str, tmp_path: Path) -> None:
    layer, other, (x, context) = build(name), build(name, seed=5), inputs(name, 6)
    if not layer.state_dict():
        pytest.skip("has no state")
    y = at_noise_side(layer, x)
    expected = layer.encode(x, context, SameNumbers()), layer.decode(y, context, SameNumbers())
    assert not all(map(torch.equal, other.encode(x, context, SameNumbers()), expected[0]))
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    other.load_state_dict(load_file(tmp_path / "layer.safetensors"))
    loaded = other.encode(x, context, SameNumbers()), other.decode(y, context, SameNumbers())
    assert_close(loaded, expected, rtol=0, atol=0)


@every_layer
@pytest.mark.parametrize("way", ["encode", "decode", "initialise"])
def test_wrong_shapes_are_refused(name: str, way: str) -> None:
    layer, (x, context) = build(name), inputs(name, 6)
    act = getattr(layer, way)
    if way == "decode":
        x = at_noise_side(layer, x)
    wanted = ", ".join(["*", *map(str, layer.noise_shape if way == "decode" else layer.shape)])
    with pytest.raises(ValueError, match=rf"expected shape \({wanted}\)".replace("*", r"\*")):
        act(torch.cat([x, x[..., :1]], dim=-1), context)
    if context is not None:
        with pytest.raises(ValueError, match="needs a context"):
            act(x)
        with pytest.raises(ValueError, match=r"context: expected shape"):
            act(x, context[..., :1])


@every_layer
def test_inputs_are_left_alone(name: str) -> None:
    layer, (x, context) = build(name), inputs(name, 6)
    before = x.clone(), None if context is None else context.clone()
    z, _ = layer.encode(x, context)
    kept = z.clone()
    layer.decode(z, context)
    assert torch.equal(x, before[0])
    assert torch.equal(z, kept)
    assert context is None or torch.equal(context, before[1])


@every_layer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_far_tails_stay_finite(name: str, dtype: torch.dtype) -> None:
    layer, (x, context) = build(name).to(dtype), inputs(name, 6)
    far = LAYERS[name].domain(1e3 * torch.randn_like(x).sign()).to(dtype).requires_grad_()
    context = None if context is None else context.to(dtype)
    z, log_weight = layer.encode(far, context)
    back = layer.decode(at_noise_side(layer, far), context)
    (z.sum() + log_weight.sum() + back.sum()).backward()
    assert back.dtype == (layer.input_dtype or dtype)
    for value in (z, log_weight, back, far.grad, *(p.grad for p in layer.parameters())):
        assert value is not None
        assert value is back or value.dtype == dtype
        assert bool(value.isfinite().all())

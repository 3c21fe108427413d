"""What the tests are run on: every layer by name, and flows whose likelihood is known.

A new layer adds one line to `LAYERS`; tests/test_layers.py then checks all that a layer promises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal, Transform
from torch.distributions.transforms import AffineTransform, ComposeTransform
from zuko.flows import MaskedAutoregressiveTransform
from zuko.transforms import MonotonicRQSTransform

from ciflows import Flow, Indexed
from ciflows.core.density import ConditionalNormal
from ciflows.core.layer import Layer, Shape
from ciflows.layers import (
    ActNorm,
    Affine,
    AutoregressiveSpline,
    BatchNorm,
    Coupling,
    Flatten,
    LogDet,
    Logit,
    LULinear,
    MaskedBijection,
    Permutation,
    Residual,
    Roulette,
    Scale,
    Series,
    Squeeze,
    Standardise,
    ZukoBijection,
    as_bijection,
)
from ciflows.layers.dequantise import Dequantise
from ciflows.layers.split import Split
from ciflows.networks import (
    MLP,
    LipschitzConvNet,
    LipschitzMLP,
    MaskedResidualNet,
    ResNet,
    converge_norms,
)
from ciflows.tables.cells import Cells
from ciflows.tables.column_layer import ColumnLayer
from ciflows.tables.jumps import Jumps
from ciflows.tables.marginals import Smooth
from ciflows.tables.without_tails import WithoutTails
from ciflows.tables.wrapped import Wrapped

M = TypeVar("M", bound=nn.Module)


class Case(NamedTuple):
    """How to make a layer, and what it takes.

    Attributes:
        make: Makes the layer.
        shape: Shape of one x.
        context_shape: Shape of one context; None where there is none.
        domain: Brings any number to where the layer is defined.
    """

    make: Callable[[], Layer]
    shape: Shape
    context_shape: Shape | None = None
    domain: Callable[[Tensor], Tensor] = torch.clone


def affine(features: int, context_features: int, layers: int = 1) -> Affine:
    return Affine(features, MLP(context_features, 2 * features, [8] * layers), context_features)


def smooth() -> Smooth:
    """No bound, a lower one, an upper one and both, with tails."""
    inf = math.inf
    marginal = Smooth(torch.tensor([-inf, 0.0, -inf, -0.5]), torch.tensor([inf, inf, 2.0, 1.5]))
    marginal.tail.copy_(torch.tensor([0.0, 0.3, 2.0, 0.0]))
    marginal.scale.copy_(0.5 + torch.rand(4))
    return marginal


def atoms() -> Jumps:
    marginal = Jumps(smooth(), torch.tensor([[0.5, 0.75]] * 4))
    marginal.probabilities.copy_(0.3 * torch.rand(4, 2))
    return marginal


def cells() -> Cells:
    marginal = Cells(torch.tensor([4, 4]))
    marginal.probabilities.copy_(torch.rand(2, 4).softmax(-1))
    return marginal


def lattice() -> Smooth:
    bounds = torch.tensor([-math.inf, 0.0]), torch.tensor([math.inf, 5.0])
    marginal = Smooth(*bounds, step=torch.ones(2), origin=torch.zeros(2))
    marginal.scale.copy_(0.5 + torch.rand(2))
    return marginal


def circles() -> Wrapped:
    marginal = Wrapped(torch.zeros(2), torch.ones(2))
    marginal.centre.copy_(torch.rand(2))
    marginal.scale.copy_(0.4 + 0.1 * torch.rand(2))  # several turns are likely
    return marginal


def normal(features: int, context_features: int, layers: int = 1) -> ConditionalNormal:
    network = MLP(context_features, 2 * features, [8] * layers)
    return ConditionalNormal(network, features, context_features)


def residual(features: int, context_features: int = 0) -> Residual:
    return Residual(LipschitzMLP(features, [8, 8], context_features=context_features))


def residual_image(shape: Shape, log_det: LogDet | None = None) -> Residual:
    return Residual(LipschitzConvNet(shape, hidden=4), log_det)


def zuko(features: int, context_features: int = 0, **options: Any) -> ZukoBijection:
    smooth = {"hidden_features": (8, 8), "activation": nn.Tanh}
    transform = MaskedAutoregressiveTransform(features, context_features, **smooth, **options)
    return ZukoBijection(transform, features, context_features)


def masked(features: int, context_features: int = 0, **options: Any) -> MaskedBijection:
    return MaskedBijection(
        zuko(features, context_features, **options).transform, features, context_features
    )


def batch_norm(shape: Shape, affine: bool = True) -> BatchNorm:
    """One that has seen a batch, so that its running averages are not those of the start."""
    layer = BatchNorm(shape, affine=affine)
    layer.initialise(torch.randn(*shape) + 2 * torch.randn(50, *shape))
    return layer


def spline(features: int, context_features: int = 0, **options: Any) -> AutoregressiveSpline:
    """Smooth, so that no unit is dead and every parameter counts."""
    options = {"hidden": 8, "blocks": 2, "activation": torch.tanh} | options
    network = MaskedResidualNet(features, 3 * 4 - 1, context_features=context_features, **options)
    return AutoregressiveSpline(features, network, bins=4, bound=1.5)


def resnet(in_channels: int, out_channels: int) -> ResNet:
    """Smooth, so that no unit is dead, and with the running averages of some batch."""
    network = ResNet(in_channels, out_channels, hidden=3, blocks=1, activation=torch.tanh)
    network.train()(1 + 2 * torch.randn(50, in_channels, 4, 4))
    return network


def coupling(shape: Shape, mask: str, flip: bool = False, context_channels: int = 0) -> Coupling:
    half = shape[0] // 2
    stays, changes = (shape[0] - half, half) if flip else (half, shape[0] - half)
    if mask == "checkerboard":
        stays = changes = shape[0]
    context = (context_channels, *shape[1:]) if context_channels else 0
    return Coupling(shape, resnet(stays + context_channels, 2 * changes), mask, flip, context)


def image_affine(shape: Shape, context_channels: int) -> Affine:
    return Affine(shape, resnet(context_channels, 2 * shape[0]), (context_channels, *shape[1:]))


def image_normal(shape: Shape, context_channels: int) -> ConditionalNormal:
    network = resnet(context_channels, 2 * shape[0])
    return ConditionalNormal(network, shape, (context_channels, *shape[1:]))


def indexed_image(shape: Shape, context_channels: int = 0) -> Indexed:
    """With u of one channel."""
    u, given = (1, *shape[1:]), shape[0] + context_channels
    context = (context_channels, *shape[1:]) if context_channels else None
    family = image_affine(shape, 1 + context_channels)
    return Indexed(family, image_normal(u, given), image_normal(u, given), context)


class SinhArcsinh(nn.Module):
    """z = sinh(e^a asinh(x) + b): a module that knows nothing of ciflows; c is its context."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(features))
        self.b = nn.Parameter(torch.zeros(features))

    def forward(self, x: Tensor, c: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y = self.a.exp() * x.asinh() + self._shift(c)
        return y.sinh(), (self.a + y.cosh().log() - 0.5 * (1 + x**2).log()).sum(-1)

    def inverse(self, z: Tensor, c: Tensor | None = None) -> Tensor:
        return ((z.asinh() - self._shift(c)) / self.a.exp()).sinh()

    def _shift(self, c: Tensor | None) -> Tensor:
        return self.b if c is None else self.b + c.tanh().sum(-1, keepdim=True)


def torch_transform(shape: Shape) -> Transform:
    """Of all numbers onto all numbers, whatever the precision."""
    first = AffineTransform(torch.randn(shape), 1.7)
    return ComposeTransform([first, AffineTransform(0.5, -2.0)])


SPLINE = {"univariate": partial(MonotonicRQSTransform, bound=1.5), "shapes": [(4,), (4,), (3,)]}


LAYERS: dict[str, Case] = {
    "affine": Case(lambda: affine(2, 3), (2,), (3,)),
    "standardise": Case(lambda: Standardise(torch.randn(3), 0.5 + torch.rand(3)), (3,)),
    "actnorm": Case(lambda: ActNorm((3,)), (3,)),
    "actnorm, images": Case(lambda: ActNorm((3, 4, 4)), (3, 4, 4)),
    "batch norm": Case(lambda: batch_norm((3,)), (3,)),
    "batch norm, images": Case(lambda: batch_norm((3, 4, 4)), (3, 4, 4)),
    "batch norm, not affine": Case(lambda: batch_norm((3,), affine=False), (3,)),
    "permutation": Case(lambda: Permutation(torch.randperm(5)), (5,)),
    "LU": Case(lambda: LULinear(5), (5,)),
    "LU, one feature": Case(lambda: LULinear(1), (1,)),
    "residual": Case(lambda: residual(2), (2,)),
    "residual, one feature": Case(lambda: residual(1), (1,)),
    "residual, twenty features": Case(lambda: residual(20), (20,)),
    "residual, context": Case(lambda: residual(2, 3), (2,), (3,)),
    "residual, roulette": Case(lambda: Residual(LipschitzMLP(3, [8]), Roulette()), (3,)),
    "residual, series": Case(lambda: Residual(LipschitzMLP(3, [8]), Series(probes=5)), (3,)),
    "residual, images": Case(lambda: residual_image((2, 4, 4)), (2, 4, 4)),
    "residual, images, series": Case(lambda: residual_image((1, 3, 4), Series(probes=5)), (1, 3, 4)),
    "residual, images, roulette": Case(lambda: residual_image((2, 3, 3), Roulette()), (2, 3, 3)),
    "zuko, autoregressive": Case(lambda: zuko(3), (3,)),
    "zuko, coupling": Case(lambda: zuko(4, passes=2), (4,)),
    "zuko, spline": Case(lambda: zuko(3, **SPLINE), (3,)),
    "zuko, one feature": Case(lambda: zuko(1, **SPLINE), (1,)),
    "zuko, context": Case(lambda: zuko(2, 3), (2,), (3,)),
    "masked": Case(lambda: masked(3, order=[1, 2, 0], **SPLINE), (3,)),
    "masked, coupling": Case(lambda: masked(5, passes=2), (5,)),
    "masked, context": Case(lambda: masked(2, 3), (2,), (3,)),
    "own module": Case(lambda: as_bijection(SinhArcsinh(3), 3), (3,)),
    "own module, context": Case(lambda: as_bijection(SinhArcsinh(2), 2, 3), (2,), (3,)),
    "indexed module": Case(
        lambda: Indexed(as_bijection(SinhArcsinh(2), 2, 1), normal(1, 2), normal(1, 2)), (2,)
    ),
    "torch transform": Case(lambda: as_bijection(torch_transform((3,)), 3), (3,)),
    "torch transform, images": Case(
        lambda: as_bijection(torch_transform((2, 2, 2)), (2, 2, 2)), (2, 2, 2)
    ),
    "spline": Case(lambda: spline(3), (3,)),
    "spline, order": Case(lambda: spline(3, order=[2, 0, 1]), (3,)),
    "spline, one feature": Case(lambda: spline(1), (1,)),
    "spline, context": Case(lambda: spline(2, 3), (2,), (3,)),
    "spline, one feature, context": Case(lambda: spline(1, 3), (1,), (3,)),
    "spline, dropout": Case(lambda: spline(3, dropout=0.5), (3,)),
    "spline, ten features": Case(lambda: spline(10, hidden=20, blocks=1), (10,)),
    "indexed spline": Case(lambda: Indexed(spline(2, 1), normal(1, 2), normal(1, 2)), (2,)),
    "indexed zuko": Case(lambda: Indexed(zuko(2, 1), normal(1, 2), normal(1, 2)), (2,)),
    "indexed affine": Case(lambda: Indexed(affine(2, 1), normal(1, 2), normal(1, 2)), (2,)),
    "indexed affine, context": Case(
        lambda: Indexed(affine(2, 1 + 3), normal(1, 2 + 3), normal(1, 2 + 3), (3,)), (2,), (3,)
    ),
    "indexed residual": Case(lambda: Indexed(residual(2, 2), normal(2, 2), normal(2, 2)), (2,)),
    "indexed, flow as prior": Case(
        lambda: Indexed(affine(2, 1), Flow([residual(1, 2), affine(1, 2)]), normal(1, 2)), (2,)
    ),
    "indexed, CIF as prior": Case(
        lambda: Indexed(
            affine(2, 1),
            Flow([Indexed(affine(1, 1 + 2), normal(1, 1 + 2), normal(1, 1 + 2), (2,))]),
            normal(1, 2),
        ),
        (2,),
    ),
    "indexed, flow as posterior": Case(
        lambda: Indexed(affine(2, 1), normal(1, 2), Flow([residual(1, 2), affine(1, 2)])), (2,)
    ),
    "affine, images": Case(lambda: image_affine((2, 4, 4), 3), (2, 4, 4), (3, 4, 4)),
    "standardise, images": Case(lambda: Standardise(*(1 + torch.rand(2, 1, 2, 2))), (1, 2, 2)),
    "scale": Case(lambda: Scale((2, 4, 4), 0.3), (2, 4, 4)),
    "squeeze": Case(lambda: Squeeze((3, 4, 2)), (3, 4, 2)),
    "flatten": Case(lambda: Flatten((3, 4, 2)), (3, 4, 2)),
    "logit": Case(lambda: Logit((2, 3, 3), 0.05), (2, 3, 3), domain=torch.sigmoid),
    "logit, small alpha": Case(lambda: Logit((3,), 1e-6), (3,), domain=torch.sigmoid),
    "coupling, checkerboard": Case(lambda: coupling((2, 4, 4), "checkerboard"), (2, 4, 4)),
    "coupling, checkerboard, flipped": Case(
        lambda: coupling((1, 3, 5), "checkerboard", flip=True), (1, 3, 5)
    ),
    "coupling, channels": Case(lambda: coupling((3, 4, 4), "channel"), (3, 4, 4)),
    "coupling, channels, flipped": Case(lambda: coupling((3, 4, 4), "channel", flip=True), (3, 4, 4)),
    "coupling, features": Case(lambda: Coupling((5,), MLP(2, 2 * 3, [8]), "channel"), (5,)),
    "coupling, context": Case(
        lambda: coupling((2, 3, 3), "checkerboard", context_channels=2), (2, 3, 3), (2, 3, 3)
    ),
    "coupling, channels, context": Case(
        lambda: coupling((2, 3, 3), "channel", flip=True, context_channels=1), (2, 3, 3), (1, 3, 3)
    ),
    "split": Case(lambda: Split((3, 4, 4)), (3, 4, 4)),
    "split, features": Case(lambda: Split((5,), normal(2, 3)), (5,)),
    "split, conditional": Case(lambda: Split((4, 3, 3), image_normal((2, 3, 3), 2)), (4, 3, 3)),
    "split, flow as conditional": Case(
        lambda: Split((4, 2, 2), Flow([coupling((2, 2, 2), "channel", context_channels=2)])), (4, 2, 2)
    ),
    "without tails": Case(
        lambda: WithoutTails(torch.tensor([0.0, 0.5, 3.0]), torch.rand(3), 0.5 + torch.rand(3)), (3,)
    ),
    "columns, smooth": Case(
        lambda: ColumnLayer(4, [([0, 1, 2, 3], smooth())]), (4,), domain=torch.sigmoid
    ),
    "columns, atoms": Case(
        lambda: ColumnLayer(4, [([0, 1, 2, 3], atoms())]),
        (4,),
        domain=torch.sigmoid,
    ),
    "columns, cells": Case(
        lambda: ColumnLayer(2, [([1, 0], cells())]),
        (2,),
        domain=lambda x: x.round().clamp(0, 3),
    ),
    "columns, lattice": Case(
        lambda: ColumnLayer(2, [([0, 1], lattice())]),
        (2,),
        domain=lambda x: x.round().clamp(0, 3),
    ),
    "columns, circles": Case(
        lambda: ColumnLayer(2, [([0, 1], circles())]),
        (2,),
        domain=torch.sigmoid,
    ),
    "dequantise": Case(lambda: Dequantise((2, 3, 3)), (2, 3, 3), domain=torch.round),
    "dequantise, variational": Case(
        lambda: Dequantise((1, 4, 4), image_normal((1, 4, 4), 1), levels=4),
        (1, 4, 4),
        domain=torch.round,
    ),
    "dequantise, flow": Case(
        lambda: Dequantise((1, 4, 4), Flow([coupling((1, 4, 4), "checkerboard", False, 1)]), levels=4),
        (1, 4, 4),
        domain=torch.round,
    ),
    "indexed images": Case(lambda: indexed_image((2, 3, 3)), (2, 3, 3)),
    "indexed images, context": Case(lambda: indexed_image((2, 3, 3), 2), (2, 3, 3), (2, 3, 3)),
    "indexed coupling": Case(
        lambda: Indexed(
            coupling((1, 4, 4), "checkerboard", context_channels=1),
            image_normal((1, 4, 4), 1),
            image_normal((1, 4, 4), 1),
        ),
        (1, 4, 4),
    ),
}


def build(name: str, seed: int = 0) -> Layer:
    """A layer from the dictionary, in evaluation mode and float64, where no parameter is special."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return generic(LAYERS[name].make(), size=0.5, seed=seed + 1).eval()


def generic(module: M, size: float = 0.3, seed: int = 1) -> M:
    """Give all parameters values where none is special, whatever they start from; in float64."""
    module.double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(size * torch.randn(parameter.shape, generator=generator))
    converge_norms(module, tolerance=1e-12)
    return module


class LinearGaussian(NamedTuple):
    """x = e^{-s} z - (b u + c) with u ~ N(a·z + a0, e^{2r}), u one number: Gaussian if z is."""

    s: Tensor
    b: Tensor
    c: Tensor
    a: Tensor
    a0: Tensor
    r: Tensor

    @classmethod
    def random(cls, features: int, seed: int) -> LinearGaussian:
        generator = torch.Generator().manual_seed(seed)
        s, b, c, a = torch.randn(4, features, generator=generator, dtype=torch.float64)
        a0, r = torch.randn(2, 1, generator=generator, dtype=torch.float64)
        return cls(0.3 * s, b, c, 0.5 * a, a0, 0.3 * r)

    def push(self, z: MultivariateNormal) -> MultivariateNormal:
        """The density of x, for z with the given one."""
        matrix = torch.diag(torch.exp(-self.s)) - torch.outer(self.b, self.a)
        noise = torch.exp(2 * self.r) * torch.outer(self.b, self.b)
        return MultivariateNormal(
            matrix @ z.mean - self.b * self.a0 - self.c,
            matrix @ z.covariance_matrix @ matrix.T + noise,
        )

    def layer(self, z: MultivariateNormal, off: float = 0.0) -> Indexed:
        """The layer, with the exact p(u | x) as its posterior, or one that is off by so much."""
        x = self.push(z)
        matrix = torch.diag(torch.exp(-self.s)) - torch.outer(self.b, self.a)
        cross = matrix @ z.covariance_matrix @ self.a - torch.exp(2 * self.r) * self.b
        gain = torch.linalg.solve(x.covariance_matrix, cross)
        offset = self.a @ z.mean + self.a0 - gain @ x.mean
        variance = self.a @ z.covariance_matrix @ self.a + torch.exp(2 * self.r) - gain @ cross
        d, zeros = len(self.s), torch.zeros_like(self.s)
        return Indexed(
            Affine(d, _linear(torch.cat([zeros, self.b])[:, None], [self.s, self.c]), 1),
            ConditionalNormal(_linear(torch.stack([self.a, zeros]), [self.a0, self.r]), 1, d),
            ConditionalNormal(
                _linear(torch.stack([gain, zeros]), [offset + off, variance.log() / 2 + off]), 1, d
            ),
        )


def _linear(weight: Tensor, bias: Sequence[Tensor]) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], dtype=torch.float64)
    linear.weight.data, linear.bias.data = weight.clone(), torch.cat(list(bias)).clone()
    return linear


def linear_gaussian_flow(
    depth: int, off: float = 0.0, features: int = 2
) -> tuple[Flow, MultivariateNormal]:
    """A CIF of some layers, and the density that it has in closed form."""
    z = MultivariateNormal(torch.zeros(features).double(), torch.eye(features).double())
    layers: list[Layer] = []
    for seed in range(depth):
        numbers = LinearGaussian.random(features, seed)
        layers.insert(0, numbers.layer(z, off))
        z = numbers.push(z)
    return Flow(layers).double(), z

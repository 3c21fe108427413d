"""Residual blocks on images: norms of convolutions, estimated log-determinants and their errors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.functional import jacobian
from torch.testing import assert_close

from ciflows import Flow, Indexed
from ciflows.core.density import ConditionalNormal
from ciflows.core.evaluate import log_mean_exp
from ciflows.core.layer import Layer, Shape
from ciflows.core.noise import Noise
from ciflows.diagnostics import LogDetError, log_det_error
from ciflows.layers import (
    ActNorm,
    Affine,
    Exact,
    LogDet,
    Residual,
    Roulette,
    Series,
    default_log_det,
)
from ciflows.networks import LipschitzConvNet, LipschitzMLP, converge_norms
from ciflows.networks.lipschitz import (
    LipschitzNetwork,
    Spectral,
    SpectralLinear,
    iterate_norms,
    lipswish,
    spectral_maps,
)
from ciflows.networks.lipschitz_conv import SpectralConv

KAPPA = 0.9
IMAGE = (1, 4, 4)


def spectral(module: nn.Module) -> list[Spectral]:
    return [part for part in module.modules() if isinstance(part, Spectral)]


def strong(shape: Shape, kernels: tuple[int, ...] = (3, 1, 3)) -> LipschitzConvNet:
    """A network at its bound: weights so large that every norm is cut down."""
    network = LipschitzConvNet(shape, 6, kernels, KAPPA).double()
    with torch.no_grad():
        for part in spectral(network):
            part.weight.normal_(std=10)
            part.bias.normal_()
    converge_norms(network, 1e-9)
    return network


def steep(
    shape: Shape, seed: int = 0, sign: int = -1, blur: float = 0.15, beta: float = 2.0
) -> LipschitzConvNet:
    """g(x) = ∓c x, blurred, for large x, with c near its bound without blur: its whole series counts."""
    generator = torch.Generator().manual_seed(seed)
    network = LipschitzConvNet(shape, shape[0], kappa=KAPPA).double()
    with torch.no_grad():
        network.beta.fill_(beta)
        for part, scale in zip(spectral(network), (10, 10, 10 * sign), strict=True):
            weight = blur * torch.randn(part.weight.shape, generator=generator)
            weight.reshape(shape[0], shape[0], -1)[..., weight[0, 0].numel() // 2] += torch.eye(shape[0])
            part.weight.copy_(scale * weight)
            part.bias.fill_(0.5)
    converge_norms(network, 1e-9)
    return network


def points(rows: int, shape: Shape, mean: float = 1.0) -> Tensor:
    numbers = torch.randn(rows, *shape, generator=torch.Generator().manual_seed(1))
    return mean + (1.0 if mean == 0 else 0.5) * numbers.double()


def matrix(conv: SpectralConv) -> Tensor:
    """The convolution as a matrix, from the images of unit vectors."""
    d = conv.v.numel()
    images = torch.eye(d).to(conv.weight).reshape(d, *conv.v.shape)
    weight = conv.weight.detach()
    return F.conv2d(images, weight, padding=weight.shape[-1] // 2).flatten(1).T


# -- norms ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "out_channels", "kernel"),
    [((1, 5, 5), 4, 3), ((4, 5, 5), 1, 3), ((2, 3, 6), 3, 5), ((3, 1, 1), 2, 3), ((1, 1, 4), 1, 3)],
)
def test_norms_of_convolutions_are_their_largest_singular_values(
    shape: Shape, out_channels: int, kernel: int
) -> None:
    convolutions = nn.ModuleList(SpectralConv(shape, out_channels, kernel, 0.5) for _ in range(3))
    for scale, conv in enumerate(convolutions, start=1):
        nn.init.normal_(conv.get_parameter("weight"), std=scale)
    converge_norms(convolutions, 1e-6)
    for conv in convolutions:
        assert isinstance(conv, SpectralConv)
        norm = torch.linalg.svdvals(matrix(conv))[0]
        assert_close(conv._norm().detach(), norm, rtol=1e-3, atol=0)
        with torch.no_grad():
            conv.weight.copy_(conv.scaled_weight())
        assert torch.linalg.svdvals(matrix(conv))[0] == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize("kind", ["flat", "normal", "centred", "drifted"])
@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 16, 16), (3, 8, 8), (4, 7, 7), (2, 3, 9)])
def test_true_norms_end_below_their_share_of_kappa(shape: Shape, kind: str) -> None:
    """By dense singular values, after the same `converge_norms` in float32 as before an evaluation."""
    torch.manual_seed(0)
    network = LipschitzConvNet(shape, hidden=12, kappa=KAPPA)
    with torch.no_grad():
        for part in spectral(network):
            if kind == "normal":
                part.weight.normal_()
            else:
                nn.init.orthogonal_(part.weight)
            if kind == "centred":  # close to a multiple of the identity: all singular values are near
                part.weight.normal_(std=0.02)
                middle = part.weight.reshape(*part.weight.shape[:2], -1)
                middle[..., middle.shape[-1] // 2].fill_diagonal_(1.0)
            if kind == "drifted":  # as in training, where u and v follow slowly
                for _ in range(10):
                    part.weight.add_(0.02 * part.weight.std() * torch.randn_like(part.weight))
                    iterate_norms([part], iterations=5)
            part.weight.mul_(10)
    converge_norms(network)
    for part in spectral(network):
        with torch.no_grad():
            part.weight.copy_(part.scaled_weight())
        dense = matrix(part) if isinstance(part, SpectralConv) else part.weight.detach()
        norm, share = torch.linalg.svdvals(dense.double())[0].item(), KAPPA ** (1 / 3)
        assert 0.995 * share < norm <= share


def test_a_convolution_within_its_bound_is_left_alone() -> None:
    conv = SpectralConv((2, 4, 4), 3, 3, bound=0.5)
    nn.init.constant_(conv.weight, 0.01)
    converge_norms(conv)
    assert torch.equal(conv.scaled_weight(), conv.weight)


def test_power_iterations_move_both_kinds_towards_the_norm() -> None:
    network = LipschitzConvNet((2, 5, 5), hidden=16)
    conv, middle, _ = spectral(network)
    assert isinstance(conv, SpectralConv)
    assert isinstance(middle, SpectralLinear)
    for part in (conv, middle):
        nn.init.normal_(part.weight)
    norms = [torch.linalg.svdvals(m)[0] for m in (matrix(conv), middle.weight.detach())]

    def errors() -> list[float]:
        parts = zip(norms, (conv, middle), strict=True)
        return [float(norm - part._norm().detach()) for norm, part in parts]

    steps = [errors()]
    for _ in range(4):
        for maps in spectral_maps(network):
            iterate_norms(maps, iterations=5)
        steps.append(errors())
    for column in zip(*steps, strict=True):
        assert list(column) == sorted(column, reverse=True)
        assert column[-1] < 0.1 * column[0]


@pytest.mark.parametrize("kernels", [(3, 1, 3), (1,), (3,), (3, 3), (5, 1)])
def test_lipschitz_constant_stays_below_kappa(kernels: tuple[int, ...]) -> None:
    shape, rows = (2, 4, 4), 200
    network = strong(shape, kernels)
    x = 5 * torch.randn(rows, *shape).double()
    with torch.no_grad():
        other = x + torch.randn_like(x)
        ratio = (network(other)[0] - network(x)[0]).flatten(1).norm(dim=1) / (other - x).flatten(1).norm(
            dim=1
        )
        columns = torch.eye(32).double().reshape(32, 1, *shape).expand(32, rows, *shape)
        jacobians = network(x, columns)[1].flatten(2).permute(1, 2, 0)
    assert torch.linalg.matrix_norm(jacobians, ord=2).max() <= KAPPA
    assert ratio.max() <= KAPPA
    assert ratio.max() > 0.02 * KAPPA


def test_the_lipschitz_bound_is_not_idle() -> None:
    shape = (2, 4, 4)
    far = torch.full((1, *shape), 100.0).double()
    slope = torch.linalg.matrix_norm(dense_jacobian(steep(shape, blur=0.0), far), ord=2)
    assert 0.7 * KAPPA < slope.item() <= KAPPA


def dense_jacobian(network: LipschitzConvNet, x: Tensor) -> Tensor:
    """Dg(x) (rows, d, d), by automatic differentiation."""
    d = math.prod(network.shape)
    return torch.stack([jacobian(lambda v: network(v)[0], row).reshape(d, d) for row in x])


def test_tangents_are_products_with_the_jacobian() -> None:
    network = strong((2, 3, 4))
    x, directions = torch.randn(5, 2, 3, 4).double(), torch.randn(3, 5, 2, 3, 4).double()
    expected = torch.einsum("rij,krj->kri", dense_jacobian(network, x), directions.flatten(2))
    assert_close(network(x, directions)[1].flatten(2), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("tangents", [0, 2])
def test_lipswish_has_the_gradient_it_claims_for_images(tangents: int) -> None:
    stack = torch.randn(1 + tangents, 2, 3, 2, 2).double().requires_grad_()
    bias = torch.randn(3, 1, 1).double().requires_grad_()
    beta = torch.tensor(0.8).double().requires_grad_()
    assert torch.autograd.gradcheck(lipswish, (stack, bias, beta))


def test_what_makes_no_network_is_refused() -> None:
    with pytest.raises(ValueError, match="odd"):
        LipschitzConvNet((1, 4, 4), 4, kernels=(3, 2))
    with pytest.raises(ValueError, match="channels, height, width"):
        LipschitzConvNet((4,), 4)
    with pytest.raises(ValueError, match="LipschitzConvNet: kappa"):
        LipschitzConvNet((1, 4, 4), 4, kappa=1.0)


# -- estimated log-determinants ---------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [Roulette(), Series(probes=1, tolerance=1e-4)])
def test_estimates_are_unbiased_in_value_and_gradient_for_weighted_rows(strategy: LogDet) -> None:
    shape, rows, copies = (1, 3, 3), 3, 100
    network, x = steep(shape), points(rows, shape).requires_grad_()
    row_weights = torch.tensor([3.0, -1.0, 0.5]).double()
    parameters = [p for name, p in network.named_parameters() if name != "convolutions.2.bias"]

    def value_and_gradient(log_det: Tensor) -> Tensor:
        gradient = torch.autograd.grad(row_weights @ log_det, [*parameters, x])
        return torch.cat([log_det.detach(), *(part.flatten() for part in gradient)])

    draws, noise = [], Noise.seeded(0)
    for draw in range(80):
        told = noise.about(torch.arange(copies * rows).reshape(copies, rows, 1) + 1000 * draw, (1,))
        log_det = strategy(network, x.expand(copies, *x.shape), None, told)[1]
        draws.append(value_and_gradient(log_det.mean(0)))
    exact = value_and_gradient(Exact()(network, x, None, noise)[1])
    std, mean = torch.std_mean(torch.stack(draws), dim=0)
    std_error = std / len(draws) ** 0.5
    assert bool(((mean - exact).abs() <= 4.5 * std_error + 1e-4).all())
    assert std_error.norm() < 0.07 * exact.norm()


@pytest.mark.parametrize("shape", [(2, 3, 3), (1, 4, 4)])
def test_series_goes_to_the_exact_value_as_probes_grow(shape: Shape) -> None:
    network, x = steep(shape), points(40, shape)
    exact = Exact()(network, x, None, Noise())[1].detach()
    assert exact.abs().min() > 1

    def error(probes: int) -> float:
        with torch.no_grad():
            values = Series(probes, tolerance=1e-3)(network, x, None, Noise())[1]
        return float((values - exact).square().mean().sqrt())

    few, many = error(2), error(128)
    assert few / many == pytest.approx(8, rel=0.4)
    assert many < 0.05 * exact.abs().mean()


@pytest.mark.parametrize("tolerance", [1.0, 1e-2, 1e-4])
def test_series_leaves_out_less_than_its_tolerance(tolerance: float) -> None:
    network, x = steep((1, 4, 4)), points(50, (1, 4, 4))
    with torch.no_grad():
        cut, whole = (
            Series(2, limit)(network, x, None, Noise())[1] for limit in (tolerance, tolerance * 1e-8)
        )
    error = (cut - whole).abs().max()
    assert 1e-6 * tolerance < error <= tolerance


def test_series_without_convergence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ciflows.layers.log_det.MAX_TERMS", 3)
    with pytest.raises(RuntimeError, match="converge_norms"):
        Series()(steep((1, 4, 4)), points(1, (1, 4, 4)), None, Noise())


@pytest.mark.parametrize("make", [lambda n: Roulette(n, p=1), lambda n: Series(1, 10.0**-n)])
def test_memory_does_not_grow_with_the_terms(make: Callable[[int], LogDet]) -> None:
    network, x = steep((2, 4, 4)), points(3, (2, 4, 4))
    calls: list[None] = []
    network.register_forward_hook(lambda *_: calls.append(None))

    def saved(n: int) -> int:
        sizes: list[int] = []

        def pack(tensor: Tensor) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        calls.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            make(n)(network, x, None, Noise())
        return sum(sizes)

    few, few_calls = saved(2), len(calls)
    many, many_calls = saved(9), len(calls)
    assert many == few > 0
    assert many_calls > few_calls + 4


def test_a_roulette_without_chance_draws_no_number_of_terms() -> None:
    class NoTerms(Noise):
        def geometric(self, p: float) -> int:
            raise AssertionError("drawn on the host: no CUDA graph could hold it")

    network, x = steep((1, 3, 3)), points(2, (1, 3, 3))
    fixed = [Roulette(n, p=1)(network, x, None, NoTerms(gen(0)))[1] for n in (1, 2, 80)]
    whole = Roulette(80)(network, x, None, Noise(gen(0)))[1]
    assert_close(fixed[2], whole, rtol=0, atol=1e-4)
    assert (fixed[0] - fixed[1]).abs().max() > 0.01


def gen(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_default_is_exact_up_to_a_hundred_dimensions() -> None:
    assert isinstance(default_log_det((100,)), Exact)
    first, second = (default_log_det((101,), layer) for layer in (0, 1))
    assert isinstance(first, Series)
    assert isinstance(second, Series)
    assert first.seed != second.seed
    assert isinstance(Residual(LipschitzConvNet((1, 10, 10), 2)).log_det, Exact)
    assert isinstance(Residual(LipschitzConvNet((1, 8, 13), 2)).log_det, Series)
    assert isinstance(Residual(LipschitzMLP(101, [4])).log_det, Series)


@pytest.mark.parametrize(("probes", "tolerance"), [(0, 1e-3), (4, 0.0)])
def test_impossible_series_are_refused(probes: int, tolerance: float) -> None:
    with pytest.raises(ValueError, match="at least one probe"):
        Series(probes, tolerance)


# -- the inverse ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 4, 4), (1, 2, 3), (3, 6, 6)])
def test_decode_reaches_rounding_error(shape: Shape) -> None:
    layer, x = Residual(steep(shape)), points(20, shape).reshape(4, 5, *shape)
    with torch.no_grad():
        assert_close(layer.decode(layer.encode(x)[0]), x, rtol=0, atol=1e-13 * math.prod(shape))


@pytest.mark.parametrize("shape", [(1, 3, 4), (1, 8, 13)])  # by a matrix, and by a series
def test_decode_has_the_gradient_of_the_inverse(shape: Shape) -> None:
    layer, d = Residual(steep(shape)), math.prod(shape)
    x = points(1, shape)[0]
    z = layer.encode(x)[0].detach()
    there = jacobian(lambda v: layer.encode(v)[0], x).reshape(d, d)
    weights = torch.randn(shape).double()
    z.requires_grad_()
    total = (weights * layer.decode(z)).sum()
    gradient, first, *_ = torch.autograd.grad(total, [z, *layer.parameters()])
    assert_close(there.T @ gradient.flatten(), weights.flatten(), rtol=0, atol=1e-11)
    assert bool(first.any())


# -- probes -----------------------------------------------------------------------------------------


def test_signs_are_independent_and_fair() -> None:
    x = torch.randn(40, 50)
    signs = torch.stack([Noise().signs(x, (50,), range(6), seed) for seed in range(5)]).flatten(0, 2)
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    assert signs.mean().abs() < 4 / math.sqrt(signs.numel())
    for vectors in (signs, signs.T):  # between rows, numbers and seeds; and between places
        n, d = vectors.shape
        products = (vectors @ vectors.T / math.sqrt(d))[tuple(torch.triu_indices(n, n, 1))]
        assert products.std() == pytest.approx(1, rel=0.05)
        assert products.abs().max() < 6


def test_signs_belong_to_the_datum() -> None:
    x = torch.randn(6, 3)
    noise = Noise().about(x, (3,))
    later = torch.randn(4, 6, 2, 2)  # what layers made of four copies of x
    signs = noise.signs(later, (2, 2), range(3), seed=7)
    assert torch.equal(signs, signs[:, :1].expand_as(signs))
    alone = Noise().about(x[2:3], (3,)).signs(later[0, 2:3], (2, 2), range(3), seed=7)
    assert torch.equal(alone[:, 0], signs[:, 0, 2])
    inner = noise.about(later, (2, 2)).signs(later, (2, 2), range(3), seed=7)
    assert torch.equal(inner, signs)
    assert not torch.equal(noise.signs(later, (2, 2), range(3), seed=8), signs)


def plain(shape: Shape = IMAGE, blocks: int = 2) -> Flow:
    return Flow([Residual(steep(shape, seed)) for seed in range(blocks)]).eval()


class Pointwise(nn.Module):
    """Maps images x to the two channels a x and b x + c."""

    def __init__(self, a: float, b: float, c: float = 0.0) -> None:
        super().__init__()
        self.numbers = nn.Parameter(torch.tensor([a, b, c]))

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.numbers
        return torch.cat([a * x, b * x + c], dim=-3)


def cif(shift: float = 1.5, gain: float = -0.45, log_std: float = -0.6) -> Flow:
    """A small convolutional CIF: each block's Jacobian depends on the u that shifts what comes to it."""
    layers: list[Layer] = []
    for seed in range(3):
        family = Affine(IMAGE, Pointwise(0.0, shift), IMAGE)
        prior = ConditionalNormal(Pointwise(0.0, 0.0), IMAGE, IMAGE)
        posterior = ConditionalNormal(Pointwise(gain, 0.0, log_std), IMAGE, IMAGE)
        network = steep(IMAGE, seed, sign=(-1) ** (seed + 1), beta=5.0)
        layers += [Indexed(family, prior, posterior), Residual(network)]
    return Flow(layers).float().eval()


def with_series(flow: Flow, probes: int, tolerance: float = 1e-2, seed: int = 0) -> Flow:
    """The same flow, its log-determinants estimated with some probes."""
    for index, block in enumerate(residual_blocks(flow)):
        block.log_det = Series(probes, tolerance, seed=1000 * seed + index)
    return flow


def residual_blocks(flow: Flow) -> list[Residual]:
    return [block for block in flow.modules() if isinstance(block, Residual)]


def test_a_likelihood_does_not_depend_on_neighbours_or_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    flow, x = with_series(plain(), probes=4), points(7, IMAGE)
    together = flow.log_prob(x)
    assert_close(flow.log_prob(x[4:5]), together[4:5], rtol=0, atol=1e-12)
    assert_close(flow.log_prob(x.flip(0)).flip(0), together, rtol=0, atol=1e-12)
    monkeypatch.setattr("ciflows.core.evaluate.rows_at_once", lambda shape, device: 3)
    assert_close(flow.log_prob(x), together, rtol=0, atol=1e-12)
    assert_close(flow.log_prob(x, samples=50), together, rtol=0, atol=1e-12)


# -- what the probes leave in a reported likelihood -------------------------------------------------


class Trial(NamedTuple):
    """What one set of probes gives: how far off the exact mean log_prob it is, and what it tells."""

    off: float
    told: LogDetError


@pytest.fixture(scope="module")
def trials() -> list[Trial]:
    """The same points and draws of u each time, with two probes from a seed of their own."""
    x, m, flow = points(40, IMAGE, mean=0.0).float(), 8, cif()
    truth = flow.estimate(x, m, seed=0).log_prob.mean()
    found = []
    for seed in range(25):
        with_series(flow, probes=2, seed=seed)
        mean = flow.estimate(x, m, seed=0).log_prob.mean()
        found.append(Trial((mean - truth).item(), log_det_error(flow, x, m, seed=0, groups=2)))
    return found


def test_reported_likelihood_is_right_within_its_stated_error(trials: list[Trial]) -> None:
    """Issue 5: where the exact value can be had, the estimate less its bias is it, within the errors."""
    for off, told in trials:
        assert abs(off - told.bias) < 3.5 * math.hypot(told.std_error, told.bias_error)
        assert told.bias_error < told.std_error < 0.2
        assert told.truncation == pytest.approx(3 * 1e-2)


def test_stated_error_is_the_spread_over_probes(trials: list[Trial]) -> None:
    spread = torch.tensor([trial.off for trial in trials]).std().item()
    told = [trial.told.std_error for trial in trials]
    assert sum(told) / len(told) == pytest.approx(spread, rel=0.35)


def test_stated_bias_is_the_mean_over_probes(trials: list[Trial]) -> None:
    off = torch.tensor([trial.off for trial in trials])
    told = torch.tensor([trial.told.bias for trial in trials])
    std_error = off.std().item() / math.sqrt(len(off))
    assert off.mean().item() == pytest.approx(told.mean().item(), abs=3 * std_error)
    assert told.mean() > 2 * std_error  # though shared by all copies, the probes do raise it
    spread = sum(trial.told.bias_error for trial in trials) / len(trials)
    assert told.std().item() == pytest.approx(spread, rel=0.5)


def test_errors_that_blocks_have_in_common_add_up() -> None:
    """Blocks that are equal and have equal probes err alike: the error counts each, not their root."""
    shape, rows = (1, 3, 3), 200
    x = points(rows, shape).float()
    same = [Residual(ZeroValued(steep(shape))) for _ in range(4)]
    errors = []
    for seeds in ([0, 0, 0, 0], [0, 1, 2, 3]):
        for block, seed in zip(same, seeds, strict=True):
            block.log_det = Series(2, 1e-2, seed)
        told = log_det_error(Flow(same).float().eval(), x, samples=1, groups=2)
        errors.append(told.std_error)
    assert errors[0] == pytest.approx(2 * errors[1], rel=0.2)


class ZeroValued(LipschitzNetwork):
    """Another network's Jacobian at 1, with a value of 0, so that x passes unchanged."""

    def __init__(self, network: LipschitzConvNet) -> None:
        super().__init__(network.shape, network.kappa)
        self.network = network

    def forward(
        self, x: Tensor, directions: Tensor | None = None, context: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        _, tangents = self.network(torch.ones_like(x), directions, context)
        return torch.zeros_like(x), tangents


def test_independent_noise_would_raise_the_result() -> None:
    """The trap that shared probes avoid, on a model where u changes little: see docs/likelihoods.md."""
    x, m, flow = points(40, IMAGE).float(), 20, cif(shift=0.05, gain=0.0, log_std=0.0)
    with torch.no_grad():
        truth = flow.log_weights(x, m, noise=Noise.seeded(0))
        shared = with_series(flow, probes=1).log_weights(x, m, noise=Noise.seeded(0))
        for block in residual_blocks(flow):
            block.log_det = Roulette(20)
        fresh = flow.log_weights(x, m, noise=Noise.seeded(0))
    error, exact = shared - truth, log_mean_exp(truth)
    assert error.std(0).mean() < 0.2 * error.mean(0).std()  # the same in all copies, but not in all rows
    assert (log_mean_exp(shared) - exact - error.mean(0)).abs().max() < 0.3
    assert (log_mean_exp(fresh) - exact).mean() > 2


def test_an_exact_flow_has_no_probe_error() -> None:
    assert log_det_error(plain(), points(3, IMAGE)) == (0, 0, 0, 0)


def test_groups_have_to_divide_the_probes() -> None:
    flow, x = with_series(plain(), probes=6), points(3, IMAGE)
    with pytest.raises(ValueError, match="6 probes do not make 4 groups"):
        log_det_error(flow, x)
    before = [block.log_det for block in residual_blocks(flow)]
    log_det_error(flow, x, samples=1, groups=3)
    after = [block.log_det for block in residual_blocks(flow)]
    assert all(one is other for one, other in zip(before, after, strict=True))


# -- the paper's sizes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "hidden", "fc_hidden", "k", "count"),
    [
        pytest.param((1, 28, 28), 128, 64, 4, 821_262, id="MNIST, small"),
        pytest.param((3, 32, 32), 128, 64, 4, 2_407_754, id="CIFAR-10, small"),
        pytest.param((1, 28, 28), 256, 128, 6, 2_648_746, id="MNIST, big"),
        pytest.param((3, 32, 32), 256, 128, 6, 6_181_090, id="CIFAR-10, big"),
    ],
)
def test_parameter_counts_are_the_authors(
    shape: Shape, hidden: int, fc_hidden: int, k: int, count: int
) -> None:
    """Three scales of k convolutional blocks, four fully connected ones with two hidden layers, and
    ActNorm at the front and after each block."""
    channels, height, width = shape
    scales = [(channels * 4**i, height // 2**i, width // 2**i) for i in range(3)]
    parts: list[nn.Module] = [ActNorm(shape)]
    for scale in itertools.chain.from_iterable([scale] * k for scale in scales):
        # sizes are all that counts here, and small images take less time to start
        parts += [LipschitzConvNet((scale[0], 1, 1), hidden), ActNorm(scale)]
    flat = math.prod(shape)
    for _ in range(4):
        parts += [LipschitzMLP(flat, [fc_hidden, fc_hidden], 0.98), ActNorm((flat,))]
    unused = 2 * (3 * k + 4)  # theirs hold two scalars a block that nothing reads
    assert sum(p.numel() for part in parts for p in part.parameters()) == count - unused

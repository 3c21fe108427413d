"""Layers of images: what stays and what changes, whole multi-scale flows, and discrete probabilities."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor, nn
from torch.autograd.functional import jacobian
from torch.testing import assert_close

from ciflows import Flow, Indexed
from ciflows.core.density import ConditionalNormal, Density, StandardNormal
from ciflows.core.layer import Layer, Shape
from ciflows.core.noise import Noise
from ciflows.core.objectives import ELBO, IWAE, DReG, Objective
from ciflows.layers import (
    ActNorm,
    Affine,
    BatchNorm,
    Coupling,
    Logit,
    Residual,
    Roulette,
    Scale,
    Squeeze,
    Standardise,
)
from ciflows.layers.dequantise import Dequantise
from ciflows.layers.split import Split
from ciflows.networks import MLP, LipschitzMLP, ResNet, fold
from constructors import affine, batch_norm, coupling, generic, image_normal, normal, resnet

every_objective = pytest.mark.parametrize("objective", [ELBO(), IWAE(3), DReG(3)])


# -- networks ---------------------------------------------------------------------------------------


def parameters_of(parts: list[Layer]) -> int:
    return sum(p.numel() for part in parts for p in part.parameters())


def realnvp(shape: Shape, blocks: int, indexed: bool) -> list[Layer]:
    """The couplings of the paper's RealNVP, each with its batch norm, and an index where asked for."""
    channels, height, width = shape
    small = (4 * channels, height // 2, width // 2)
    half = (2 * channels, *small[1:])
    steps = [(shape, channels)] * 3 + [(small, 2 * channels)] * 3 + [(half, 2 * channels)] * 4
    layers: list[Layer] = []
    for now, stays in steps:
        mask = "channel" if now == small else "checkerboard"
        layers.append(Coupling(now, ResNet(stays, 2 * stays, 64, blocks), mask))
        layers.append(BatchNorm(now, affine=not indexed))
        if indexed:
            u = (1, *now[1:])
            p, q = (ConditionalNormal(ResNet(now[0], 2, 64, 2), u, now) for _ in range(2))
            layers.append(Indexed(Affine(now, ResNet(1, 2 * now[0], 8, 2), u), p, q))
    return layers


@pytest.mark.parametrize(
    ("shape", "blocks", "indexed", "count"),
    [
        ((1, 28, 28), 8, False, 5_932_116),
        ((1, 28, 28), 4, False, 2_972_756),
        ((1, 28, 28), 4, True, 5_988_872),
        ((3, 32, 32), 8, False, 5_956_348),
        ((3, 32, 32), 4, False, 2_996_988),
        ((3, 32, 32), 4, True, 6_067_016),
    ],
)
def test_networks_have_as_many_parameters_as_the_papers(
    shape: Shape, blocks: int, indexed: bool, count: int
) -> None:
    with torch.device("meta"):
        assert parameters_of(realnvp(shape, blocks, indexed)) == count


@pytest.mark.parametrize("training", [True, False])
def test_draws_in_front_are_more_rows(training: bool) -> None:
    network, x = generic(resnet(2, 3)).train(training), torch.randn(3, 5, 2, 4, 4).double()
    rows = network(x.flatten(0, 1)).reshape(3, 5, 3, 4, 4)
    assert_close(network(x), rows, rtol=0, atol=1e-12)
    assert network(x[0, 0]).shape == (3, 4, 4)
    assert fold(network, x[:, :0]).shape == (3, 0, 3, 4, 4)


def test_outputs_are_bounded_and_may_start_at_zero() -> None:
    network, x = generic(resnet(2, 3)), 100 * torch.randn(50, 2, 4, 4).double()
    bound = (network.scale.abs() + network.shift.abs()).expand(3, 4, 4)
    assert bool((network(x).abs() <= bound).all())
    assert not ResNet(2, 3, hidden=4, zero_last=True)(x.float()).any()


def test_mixed_precision_is_for_training_alone() -> None:
    torch.manual_seed(0)
    network, x = ResNet(1, 2, hidden=8, blocks=1), torch.randn(6, 1, 4, 4)
    results = {}
    for network.mixed in (False, True):
        results[network.mixed] = network.train()(x)
    assert results[True].dtype == torch.float32
    assert 0 < (results[True] - results[False]).abs().max() < 0.05
    network.eval()
    for network.mixed in (False, True):
        results[network.mixed] = network(x)
    assert torch.equal(results[True], results[False])


def test_a_network_that_was_trained_can_be_copied() -> None:
    network, x = ResNet(1, 2, hidden=4, blocks=1).train(), torch.randn(6, 1, 4, 4)
    network(x).sum().backward()
    twin = copy.deepcopy(network).eval()
    assert torch.equal(twin(x), network.eval()(x))


# -- bijections -------------------------------------------------------------------------------------


def test_squeeze_gives_each_pixel_of_four_a_channel() -> None:
    x = torch.arange(2 * 4 * 6.0).reshape(2, 4, 6)
    z, log_det = Squeeze((2, 4, 6)).encode(x)
    places = itertools.product(range(2), range(2), range(2))
    expected = [x[channel, row::2, column::2] for channel, row, column in places]
    assert torch.equal(z, torch.stack(expected))
    assert log_det.item() == 0
    with pytest.raises(ValueError, match=r"even height and width; got \(1, 3, 4\)"):
        Squeeze((1, 3, 4))


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("mask", ["checkerboard", "channel"])
def test_a_coupling_starts_as_the_identity_and_can_leave_it(mask: str, flip: bool) -> None:
    channels = 4 if mask == "checkerboard" else 2
    network = ResNet(channels, 2 * channels, hidden=4, blocks=1, zero_last=True)
    layer, x = Coupling((4, 6, 6), network, mask, flip), torch.randn(5, 4, 6, 6)
    z, log_det = layer.encode(x)
    assert torch.equal(z, x)
    assert not log_det.any()
    (z.square().sum() - log_det.sum()).backward()
    assert network.last.weight.grad is not None
    assert bool((network.last.weight.grad != 0).all())


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("mask", ["checkerboard", "channel"])
def test_a_coupling_keeps_one_part_and_changes_the_other(mask: str, flip: bool) -> None:
    layer = generic(coupling((3, 4, 4), mask, flip), size=0.8).eval()
    x = torch.randn(9, 3, 4, 4).double()
    stays = torch.zeros(3, 4, 4).bool()
    if mask == "checkerboard":
        stays[:, ::2, ::2] = stays[:, 1::2, 1::2] = True
    else:
        stays[:1] = True
    stays = ~stays if flip else stays
    z, _ = layer.encode(x)
    assert torch.equal(z[:, stays], x[:, stays])
    assert bool((z != x)[:, ~stays].all())
    other = torch.where(stays, x, torch.randn_like(x))
    gain = (layer.encode(other)[0] - z)[:, ~stays] / (other - x)[:, ~stays]
    assert bool((gain > 0).all())  # s and t were those of what stays
    assert_close(layer.encode(other)[1], gain.log().sum(-1), rtol=0, atol=1e-8)


def test_couplings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="a single channel cannot be split"):
        Coupling((1, 4, 4), resnet(1, 2), "channel")
    with pytest.raises(ValueError, match="a checkerboard needs images"):
        Coupling((4,), MLP(4, 8), "checkerboard")
    with pytest.raises(ValueError, match='mask must be "checkerboard" or "channel"; got "rows"'):
        Coupling((2, 4, 4), resnet(2, 4), "rows")  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"Coupling, its network's output: expected shape \(\*, 4, 3, 3\)"
    ):
        Coupling((2, 3, 3), resnet(2, 2)).encode(torch.zeros(5, 2, 3, 3))


def test_outputs_that_would_broadcast_are_refused() -> None:
    with pytest.raises(ValueError, match="Affine, its network's output"):
        Affine(3, MLP(1, 2), 1).encode(torch.zeros(5, 3), torch.zeros(5, 1))
    with pytest.raises(ValueError, match="ConditionalNormal, its network's output"):
        ConditionalNormal(MLP(1, 2), 3, 1).log_weight(torch.zeros(5, 3), torch.zeros(5, 1))


@pytest.mark.parametrize("alpha", [1e-6, 1e-5, 0.05])
def test_the_logit_keeps_its_digits_at_both_ends(alpha: float) -> None:
    layer, x = Logit((1,), alpha), torch.linspace(0, 1, 257)[:, None].requires_grad_()
    z, log_det = layer.encode(x)
    exact_z, exact_log_det = layer.encode(x.detach().double())
    assert_close(z.double(), exact_z, rtol=1e-5, atol=1e-6)
    assert_close(log_det.double(), exact_log_det, rtol=1e-5, atol=1e-5)
    assert z[-1].item() == pytest.approx(math.log1p(-alpha) - math.log(alpha), rel=1e-6)
    assert_close(z.flip(0), -z, rtol=1e-5, atol=1e-6)
    assert_close(layer.decode(z), x, rtol=0, atol=1e-6)
    (z.sum() + log_det.sum()).backward()
    assert x.grad is not None
    assert bool(x.grad.isfinite().all())


def test_numbers_that_make_no_bijection_are_refused() -> None:
    for alpha in (0.0, 0.5):
        with pytest.raises(ValueError, match="alpha must lie between 0 and 1/2"):
            Logit((1,), alpha)
    with pytest.raises(ValueError, match="the factor must be positive; got 0"):
        Scale((1,), 0)


# -- split, and whole multi-scale flows --------------------------------------------------------------


def multiscale(conditional: Density | None = None) -> Flow:
    """Two scales over 1×4×4, with all that may stand in them."""
    layers: list[Layer] = [
        ActNorm((1, 4, 4)),
        coupling((1, 4, 4), "checkerboard"),
        batch_norm((1, 4, 4)),
        coupling((1, 4, 4), "checkerboard", flip=True),
        Squeeze((1, 4, 4)),
        coupling((4, 2, 2), "channel"),
        ActNorm((4, 2, 2)),
        coupling((4, 2, 2), "channel", flip=True),
        Split((4, 2, 2), conditional),
        coupling((2, 2, 2), "checkerboard"),
    ]
    return generic(Flow(layers)).eval()


def learned() -> ConditionalNormal:
    return image_normal((2, 2, 2), 2)


def standard() -> StandardNormal:
    return StandardNormal((2, 2, 2))


every_conditional = pytest.mark.parametrize("make", [standard, learned])


class Replay(Noise):
    """Gives the numbers that it was made with."""

    def __init__(self, numbers: Tensor) -> None:
        super().__init__()
        self.numbers = numbers

    def normal(self, shape: object, like: Tensor) -> Tensor:
        assert self.numbers.shape == shape
        return self.numbers


def to_normal(flow: Flow, x: Tensor) -> tuple[Tensor, Tensor]:
    """x as standard normal numbers: what reaches the base, and what leaves at the split."""
    noise = torch.zeros(0)
    for layer in flow.layers:
        if isinstance(layer, Split):
            z, noise = x[..., :2, :, :], x[..., 2:, :, :]
            if isinstance(layer.conditional, ConditionalNormal):
                mean, log_std = layer.conditional.network(z).chunk(2, dim=-3)
                noise = (noise - mean) * torch.exp(-log_std)
        x, _ = layer.encode(x)
    return x, noise


@every_conditional
def test_a_multiscale_density_is_that_of_the_whole_map(make: type[Density]) -> None:
    flow, x = multiscale(make()), torch.randn(5, 1, 4, 4).double()
    assert flow.exact

    def whole(one: Tensor) -> Tensor:
        return torch.cat([part.flatten() for part in to_normal(flow, one)])

    expected = []
    for one in x:
        log_det = torch.linalg.slogdet(jacobian(whole, one).reshape(16, 16)).logabsdet
        expected.append(StandardNormal((16,)).log_weight(whole(one)) + log_det)
    assert_close(flow.log_prob(x), torch.stack(expected), rtol=0, atol=1e-10)
    assert_close(flow.log_weights(x, 3), flow.log_prob(x).expand(3, 5), rtol=0, atol=1e-12)


@every_conditional
def test_a_multiscale_flow_comes_back(make: type[Density]) -> None:
    flow, x = multiscale(make()), 2 * torch.randn(5, 1, 4, 4).double()
    z, noise = to_normal(flow, x)
    for layer in reversed(flow.layers):
        z = layer.decode(z, noise=Replay(noise))
    assert_close(z, x, rtol=0, atol=1e-10)


def test_normalisation_inside_starts_from_the_data() -> None:
    flow, x = multiscale().train(), 100 + 30 * torch.randn(200, 1, 4, 4).double()
    flow.initialise(x)
    for layer in flow.layers:
        x, _ = layer.encode(x)
        if isinstance(layer, ActNorm | BatchNorm):
            means = x.transpose(0, 1).flatten(1).mean(1)
            shift = layer.shift.flatten() if isinstance(layer, BatchNorm) else torch.zeros_like(means)
            assert_close(means, shift, rtol=0, atol=1e-8)


def test_a_split_says_what_it_is() -> None:
    noisy = Flow([Residual(LipschitzMLP(2, [8]), Roulette())]).train()
    indexed = Flow([Indexed(affine(2, 1), normal(1, 2), normal(1, 2))])
    flags = [(s.exact, s.noisy) for s in (Split((4,), c) for c in (None, normal(2, 2), noisy, indexed))]
    assert flags == [(True, False), (True, False), (False, True), (False, False)]
    with pytest.raises(ValueError, match=r"expected a density over \(2, 3, 3\)"):
        Split((4, 3, 3), standard())
    with pytest.raises(ValueError, match="a single channel cannot be split"):
        Split((1, 3, 3))


def test_what_leaves_a_split_is_drawn_from_its_conditional() -> None:
    layer, z = generic(Split((4, 2, 2), learned())).eval(), torch.randn(2, 2, 2).double()
    x = layer.decode(z.expand(20_000, 2, 2, 2), noise=Noise.seeded(0))
    mean, log_std = layer.conditional.network(z).chunk(2, dim=-3)
    assert torch.equal(x[:, :2], z.expand(20_000, 2, 2, 2))
    assert_close((x[:, 2:].mean(0) - mean) / log_std.exp(), torch.zeros_like(z), rtol=0, atol=0.04)
    assert_close(x[:, 2:].std(0) / log_std.exp(), torch.ones_like(z), rtol=0, atol=0.04)


# -- dequantisation ---------------------------------------------------------------------------------


def wide_posterior(shape: Shape) -> ConditionalNormal:
    """Wide enough for weights of bounded size: σ(w) has to reach all of [0, 1]."""
    posterior = generic(image_normal(shape, shape[0]), seed=3)
    with torch.no_grad():
        posterior.network.shift[shape[0] :] = math.log(2)
    return posterior


def dequantisers(shape: Shape, levels: int) -> dict[str, Dequantise]:
    posterior = wide_posterior(shape)
    return {"uniform": Dequantise(shape), "variational": Dequantise(shape, posterior, levels)}


every_kind = pytest.mark.parametrize("kind", ["uniform", "variational"])


def discrete_flow(kind: str, levels: int) -> Flow:
    """Two scales over 1×2×2 images of some levels."""
    layers: list[Layer] = [
        Scale((1, 2, 2), 1 / levels),
        Logit((1, 2, 2), 1e-6),
        coupling((1, 2, 2), "checkerboard"),
        Squeeze((1, 2, 2)),
        coupling((4, 1, 1), "channel", flip=True),
        Split((4, 1, 1), image_normal((2, 1, 1), 2)),
        coupling((2, 1, 1), "channel"),
    ]
    rest = generic(Flow(layers), size=0.4)
    return Flow([dequantisers((1, 2, 2), levels)[kind]], base=rest).double().eval()


def all_images(levels: int) -> Tensor:
    """Every 1×2×2 image."""
    values = torch.arange(levels).double()
    return torch.cartesian_prod(*[values] * 4).reshape(-1, 1, 2, 2)


@every_kind
@pytest.mark.parametrize("levels", [2, 3])
def test_probabilities_of_all_images_sum_to_one(kind: str, levels: int) -> None:
    flow = discrete_flow(kind, levels)
    estimate = flow.estimate(all_images(levels), samples=1000, seed=0)
    p = estimate.log_prob.exp()
    error = (p * estimate.std_error).square().sum().sqrt()
    assert not flow.exact
    assert error < 0.01
    assert (p.sum() - 1).abs() < 4 * error


@every_kind
def test_samples_match_the_probabilities(kind: str) -> None:
    flow, n = discrete_flow(kind, 2), 20_000
    images = all_images(2)
    with torch.no_grad():
        expected = n * flow.log_prob(images, samples=40_000, seed=1).exp()
    x = flow.sample(n, seed=1)
    counts = (x[:, None] == images).flatten(2).all(-1).sum(0)
    assert counts.sum() == n
    assert expected.max() > 2 * expected.min()
    statistic = ((counts - expected).square() / expected).sum().item()
    assert chi2.sf(statistic, df=len(images) - 1) > 1e-3


@every_kind
def test_probabilities_are_integrals(kind: str) -> None:
    """Of independent normal pixels, P(x) is a product of differences of Φ."""
    mean, scale = torch.tensor([0.7, 1.5, 2.5, 1.0]), torch.tensor([1.0, 0.8, 2.0, 1.5])
    mean, scale = mean.reshape(1, 2, 2).double(), scale.reshape(1, 2, 2).double()
    layer = dequantisers((1, 2, 2), 4)[kind]
    flow, x = Flow([layer, Standardise(mean, scale)]).double().eval(), all_images(4)
    phi = torch.special.ndtr
    truth = (phi((x + 1 - mean) / scale) - phi((x - mean) / scale)).log().flatten(1).sum(-1)
    estimate = flow.estimate(x, samples=500, seed=0)
    errors = (estimate.log_prob - truth) / estimate.std_error
    assert errors.abs().max() < 5
    assert 0.5 < errors.square().mean() < 2
    assert estimate.elbo.mean() < truth.mean()


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dequantised_pixels_stay_their_own(kind: str, dtype: torch.dtype) -> None:
    class Extreme(Noise):
        """The numbers nearest to the ends of what can be drawn."""

        def uniform(self, shape: object, like: Tensor) -> Tensor:
            below = torch.nextafter(torch.ones_like(like), torch.zeros_like(like))
            return torch.where(like % 2 == 0, below, 0.0)

        def normal(self, shape: object, like: Tensor) -> Tensor:
            return 100 * torch.where(like * 256 % 2 == 0, torch.ones_like(like), -1.0)

    layer = dequantisers((1, 16, 16), 256)[kind].to(dtype).eval()
    x = torch.arange(256).to(dtype).reshape(1, 16, 16)
    before = x.clone()
    z, log_weight = layer.encode(x, noise=Extreme())
    assert torch.equal(layer.decode(z), x)
    assert bool(((z >= x) & (z < x + 1)).all())
    assert bool(log_weight.isfinite())
    assert torch.equal(x, before)
    pixels = Flow([Scale((1, 16, 16), 1 / 256), Logit((1, 16, 16), 1e-6)]).to(dtype)
    assert bool(pixels.log_prob(z).isfinite())


def test_a_dequantising_posterior_has_to_be_exact() -> None:
    indexed = Flow([Indexed(affine(2, 1 + 2), normal(1, 4), normal(1, 4), (2,))])
    with pytest.raises(ValueError, match="Dequantise: the posterior's density must be exact"):
        Dequantise((2,), indexed)


@pytest.mark.parametrize("draws", [1, 4])
def test_dreg_reaches_the_dequantising_posterior(draws: int) -> None:
    """All gradients but those of q are IWAE's; those of q agree on average."""
    flow, x = discrete_flow("variational", 3), torch.randint(3, (40, 1, 2, 2)).double()
    names = [name for name, _ in flow.named_parameters()]
    of_q = ["posterior." in name for name in names]
    assert any(of_q)

    def gradients(objective: Objective, rows: Tensor, seed: int) -> tuple[Tensor, list[Tensor]]:
        values = objective(flow, rows, noise=Noise.seeded(seed))
        return values, list(torch.autograd.grad(values.mean(), list(flow.parameters())))

    iwae, dreg = (gradients(objective, x, seed=0) for objective in (IWAE(draws), DReG(draws)))
    assert_close(dreg[0], iwae[0], rtol=0, atol=1e-11)
    for is_q, one, two in zip(of_q, iwae[1], dreg[1], strict=True):
        assert is_q or torch.allclose(one, two, rtol=0, atol=1e-11)

    def of_posterior(objective: Objective, seed: int) -> Tensor:
        _, parts = gradients(objective, x[:2].repeat(50, 1, 1, 1), seed)
        return torch.cat([part.flatten() for is_q, part in zip(of_q, parts, strict=True) if is_q])

    first = torch.stack([of_posterior(IWAE(draws), seed) for seed in range(40)])
    second = torch.stack([of_posterior(DReG(draws), seed) for seed in range(40, 80)])
    error = ((first.var(0) + second.var(0)) / 40).sqrt()
    assert bool(((first.mean(0) - second.mean(0)).abs() < 5 * error + 1e-12).all())
    assert first.mean(0).norm() > 2 * error.norm()


# -- indices ----------------------------------------------------------------------------------------


class AsImages(nn.Module):
    """A network of vectors, for images of as many numbers."""

    def __init__(self, network: nn.Module, shape: Shape) -> None:
        super().__init__()
        self.network = network
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x.flatten(-3)).unflatten(-1, self.shape)


def as_images(layer: Indexed) -> Indexed:
    """The same layer over 1×2×2 images, with u of one channel, by the same networks."""
    networks = (layer.family.network, layer.prior.network, layer.posterior.network)
    family, prior, posterior = (AsImages(network, (2, 2, 2)) for network in networks)
    shape = (1, 2, 2)
    return Indexed(
        Affine(shape, family, shape),
        ConditionalNormal(prior, shape, shape),
        ConditionalNormal(posterior, shape, shape),
    )


@every_objective
def test_indexed_images_are_indexed_vectors(objective: Objective) -> None:
    layers = [Indexed(affine(4, 4), normal(4, 4), normal(4, 4)) for _ in range(2)]
    vectors = generic(Flow(layers))
    images = Flow([as_images(layer) for layer in layers]).double()
    x = torch.randn(6, 4).double()
    values = [
        objective(flow, x.reshape(6, *flow.shape), noise=Noise.seeded(0)) for flow in (vectors, images)
    ]
    assert_close(values[0], values[1], rtol=0, atol=1e-12)
    parameters = list(vectors.parameters())
    gradients = [torch.autograd.grad(value.sum(), parameters) for value in values]
    assert_close(gradients[0], gradients[1], rtol=0, atol=1e-11)
    drawn = vectors.sample(5, seed=0), images.sample(5, seed=0).flatten(1)
    assert_close(drawn[0], drawn[1], rtol=0, atol=1e-12)


def test_a_context_has_to_fit_beside_images() -> None:
    family, prior = Affine((1, 2, 2), resnet(2, 2), (2, 2, 2)), image_normal((1, 2, 2), 2)
    with pytest.raises(ValueError, match=r"a context of shape \(3,\) cannot be joined"):
        Indexed(family, prior, prior, context_shape=(3,))

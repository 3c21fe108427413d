"""Residual blocks: log-determinants, Lipschitz bounds, the inverse, and the paper's sizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.functional import jacobian
from torch.testing import assert_close

from ciflows import Flow, Indexed, build_model
from ciflows.core.hook import plain
from ciflows.core.noise import Noise
from ciflows.errors import InversionError
from ciflows.layers import Exact, Residual, Roulette
from ciflows.networks import MLP, LipschitzMLP, converge_norms
from ciflows.networks.lipschitz import SpectralLinear, iterate_norms, lipswish
from constructors import build, generic, residual

KAPPA = 0.9


class Terms(Noise):
    """Noise with a given number of random terms."""

    def __init__(self, terms: int, seed: int = 0) -> None:
        super().__init__(torch.Generator().manual_seed(seed))
        self.terms = terms

    def geometric(self, p: float) -> int:
        return self.terms


def strong(features: int, hidden: list[int], seed: int, context_features: int = 0) -> LipschitzMLP:
    """A network at its bound: weights so large that every norm is cut down."""
    network = LipschitzMLP(features, hidden, KAPPA, context_features)
    torch.manual_seed(seed)
    with torch.no_grad():
        for linear in spectral(network):
            linear.weight.normal_(std=10)
            linear.bias.normal_()
        if network.context is not None:
            network.context.weight.normal_()
    converge_norms(network)
    return network


def steep(features: int, seed: int = 0) -> LipschitzMLP:
    """g with a Jacobian near -0.9 Q, Q a rotation, wherever x is positive: as steep as g can be."""
    network = LipschitzMLP(features, [], KAPPA)
    torch.manual_seed(seed)
    with torch.no_grad():
        nn.init.orthogonal_(spectral(network)[0].weight, gain=-10)
    converge_norms(network)
    return network


def spectral(module: nn.Module) -> list[SpectralLinear]:
    return [part for part in module.modules() if isinstance(part, SpectralLinear)]


def jacobians(network: LipschitzMLP, x: Tensor) -> Tensor:
    """Dg(x) (rows, d, d), by automatic differentiation."""
    return torch.stack([jacobian(lambda v: network(v)[0], row) for row in x])


# -- log-determinants -------------------------------------------------------------------------------


@pytest.mark.parametrize("features", [1, 2, 5, 20])
def test_exact_log_det_is_that_of_autograd(features: int) -> None:
    x = torch.randn(6, features).double()
    for network in (strong(features, [16, 16], seed=0).double(), steep(features).double()):
        g, log_det = Exact()(network, x, None, Noise())
        expected = torch.linalg.slogdet(torch.eye(features) + jacobians(network, x)).logabsdet
        assert_close(log_det, expected, rtol=0, atol=1e-11)
        assert_close(g, network(x)[0])
    assert expected.abs().max() > 0.3


def test_tangents_are_products_with_the_jacobian() -> None:
    network = strong(3, [16, 16], seed=0).double()
    x, directions = torch.randn(6, 3).double(), torch.randn(2, 6, 3).double()
    expected = torch.einsum("rij,krj->kri", jacobians(network, x), directions)
    assert_close(network(x, directions)[1], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("tangents", [0, 2])
def test_lipswish_has_the_gradient_it_claims(tangents: int) -> None:
    stack = torch.randn(1 + tangents, 4, 3).double().requires_grad_()
    bias = torch.randn(3).double().requires_grad_()
    beta = torch.tensor(0.8).double().requires_grad_()
    assert torch.autograd.gradcheck(lipswish, (stack, bias, beta))
    assert torch.autograd.gradgradcheck(lipswish, (stack, bias, beta))


@pytest.mark.parametrize("name", ["resflow", "cif-resflow"])
def test_second_derivatives_of_a_likelihood_are_those_of_differences(name: str) -> None:
    flow = generic(build_model(name, features=2, layers=2, hidden=[8, 8]), seed=2)
    x, step = torch.tensor([[0.3, -0.4]]).double().requires_grad_(), 1e-5

    def slope(x: Tensor, create_graph: bool = False) -> Tensor:
        value = flow.log_weight(x, noise=Noise.seeded(0)).sum()
        return torch.autograd.grad(value, x, create_graph=create_graph)[0][0]

    rows = [torch.autograd.grad(part, x, retain_graph=True)[0][0] for part in slope(x, True)]
    shifts = step * torch.eye(2).double()
    differences = [(slope(x + shift) - slope(x - shift)) / (2 * step) for shift in shifts]
    assert_close(torch.stack(rows), torch.stack(differences), rtol=1e-5, atol=1e-7)


def results(network: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
    """A network's outputs, and the gradient of their sum with unequal weights."""
    y = network(*inputs)
    y = y if isinstance(y, Tensor) else torch.cat([y[0][None], y[1]])
    loss = (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum()
    wanted = [part for part in (*inputs, *network.parameters()) if part.requires_grad]
    return [y, *torch.autograd.grad(loss, wanted)]


@pytest.mark.parametrize("hidden", [[], [4], [4, 3]])
def test_a_perceptron_s_fast_version_agrees_with_its_layers(hidden: list[int]) -> None:
    network, x = MLP(2, 3, hidden), torch.randn(4, 5, 2, requires_grad=True)
    fast = results(network, [x])
    with plain():
        for one, other in zip(fast, results(network, [x]), strict=True):
            assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("context_features", [0, 3])
@pytest.mark.parametrize("features", [1, 2, 20])
def test_a_lipschitz_network_s_fast_version_agrees_with_its_layers(
    features: int, context_features: int
) -> None:
    network = generic(LipschitzMLP(features, [16, 16], KAPPA, context_features)).float()
    inputs = [torch.randn(4, 5, features, requires_grad=True), torch.randn(3, 4, 5, features)]
    if context_features:
        inputs.append(torch.randn(5, context_features, requires_grad=True))
    fast = results(network, inputs)
    with plain():
        for one, other in zip(fast, results(network, inputs), strict=True):
            assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_roulette_is_unbiased_in_value_and_gradient_for_weighted_rows() -> None:
    network = generic(LipschitzMLP(3, [6], kappa=0.8))
    first, last = spectral(network)
    with torch.no_grad():  # J near -0.4 I: terms far down the series still count
        first.weight.copy_(nn.init.orthogonal_(torch.empty(6, 3)) + 0.1 * torch.randn(6, 3))
        last.weight.copy_(-first.weight.T + 0.1 * torch.randn(3, 6))
        first.bias.fill_(1.0)
    converge_norms(network)
    x = (1 + 0.5 * torch.randn(4, 3)).double().requires_grad_()
    row_weights = torch.tensor([3.0, -1.0, 0.5, 0.0]).double()
    *parameters, last_bias = network.named_parameters()
    assert last_bias[0] == "linears.1.bias"  # g's own offset, which no determinant sees
    wanted = [*(parameter for _, parameter in parameters), x]

    def value_and_gradient(log_det: Tensor) -> Tensor:
        gradient = torch.autograd.grad(row_weights @ log_det, wanted)
        return torch.cat([log_det.detach(), *(part.flatten() for part in gradient)])

    copies, noise = 32, Noise.seeded(0)
    draws = []
    for _ in range(600):
        log_det = Roulette()(network, x.expand(copies, 4, 3), None, noise)[1]
        draws.append(value_and_gradient(log_det.mean(0)))
    exact = value_and_gradient(Exact()(network, x, None, noise)[1])
    std, mean = torch.std_mean(torch.stack(draws), dim=0)
    error = (mean - exact).abs()
    std_error = std / len(draws) ** 0.5
    assert bool((error <= 4 * std_error + 1e-12).all())
    assert std_error.norm() < 0.05 * exact.norm()


def test_roulette_gives_each_row_its_own_gradient() -> None:
    network = generic(LipschitzMLP(3, [6]))
    x, row_weights = torch.randn(4, 3).double(), torch.tensor([3.0, -1.0, 0.5, 0.0]).double()
    log_det = Roulette()(network, x, None, Terms(2))[1]
    parameters = [p for name, p in network.named_parameters() if name != "linears.1.bias"]
    together = torch.autograd.grad(row_weights @ log_det, parameters, retain_graph=True)
    alone = [torch.autograd.grad(one, parameters, retain_graph=True) for one in log_det]
    for index, gradient in enumerate(together):
        rows = torch.stack([row[index] for row in alone])
        assert_close(gradient, torch.tensordot(row_weights, rows, dims=1), rtol=0, atol=1e-12)


def test_roulette_memory_does_not_grow_with_its_terms() -> None:
    network, x = generic(LipschitzMLP(3, [6])), torch.randn(4, 3).double()

    def saved(exact_terms: int) -> int:
        sizes: list[int] = []

        def pack(tensor: Tensor) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            Roulette(exact_terms)(network, x, None, Terms(1))
        return sum(sizes)

    assert saved(2) == saved(20) > 0


def test_noisy_log_dets_are_kept_out_of_a_log_mean_exp() -> None:
    flow = build_model("resflow", features=2, layers=1, hidden=[8], log_det="roulette")
    x = torch.randn(3, 2)
    with pytest.raises(ValueError, match="noisy"):
        flow.train().log_prob(x)
    assert flow.eval().log_prob(x).shape == (3,)


def test_a_posterior_that_turns_noisy_is_noticed() -> None:
    layer = build("indexed, flow as posterior")
    assert isinstance(layer, Indexed)
    assert not layer.noisy
    block = next(part for part in layer.posterior.modules() if isinstance(part, Residual))
    block.training_log_det = Roulette()
    assert layer.train().noisy
    assert not layer.eval().noisy


# -- Lipschitz bounds -------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden", [[], [32], [128] * 4])
@pytest.mark.parametrize("features", [1, 2, 5])
def test_lipschitz_constant_stays_below_kappa(features: int, hidden: list[int]) -> None:
    network = strong(features, hidden, seed=1).double()
    x = 5 * torch.randn(2000, features).double()
    identity = torch.eye(features).double()[:, None].expand(features, *x.shape)
    with torch.no_grad():
        g, tangents = network(x, identity)
        other = x + torch.randn_like(x)
        ratio = (network(other)[0] - g).norm(dim=-1) / (other - x).norm(dim=-1)
    slope = torch.linalg.matrix_norm(tangents.movedim(0, -1), ord=2).max()
    assert slope <= KAPPA
    assert ratio.max() <= KAPPA
    if not hidden:
        assert slope > 0.97 * KAPPA  # one activation's steepest point: the bound is not idle


@pytest.mark.parametrize("shape", [(1, 1), (2, 128), (128, 2), (128, 128), (63, 128)])
def test_converged_norms_are_the_largest_singular_values(shape: tuple[int, int]) -> None:
    linears = nn.ModuleList(SpectralLinear(*shape, bound=0.5) for _ in range(3))
    for linear in spectral(linears):
        nn.init.normal_(linear.weight, std=10)
    converge_norms(linears)
    for linear in spectral(linears):
        norm = torch.linalg.svdvals(linear.weight.detach())[0]
        assert_close(linear.u @ linear.weight.detach() @ linear.v, norm, rtol=1e-3, atol=0)
        assert torch.linalg.svdvals(linear.scaled_weight().detach())[0] <= 0.5 * (1 + 1e-3)


def test_a_weight_within_its_bound_is_left_alone() -> None:
    linear = SpectralLinear(4, 3, bound=0.5)
    nn.init.constant_(linear.weight, 0.01)
    converge_norms(linear)
    assert torch.equal(linear.scaled_weight(), linear.weight)


def test_a_network_that_starts_at_zero_keeps_its_bound() -> None:
    network = LipschitzMLP(2, [8], last_std=0.0)
    with torch.no_grad():
        spectral(network)[-1].weight.normal_(std=10)
    converge_norms(network)
    assert torch.linalg.svdvals(spectral(network)[-1].scaled_weight().detach())[0] < 1


def test_forward_changes_no_buffers() -> None:
    network = LipschitzMLP(2, [8, 8]).train()
    with torch.no_grad():
        for linear in spectral(network):
            linear.weight.normal_(std=10)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    network(torch.randn(5, 2))[0].sum().backward()
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_power_iterations_move_towards_the_norm() -> None:
    linear = SpectralLinear(64, 64, bound=0.9)
    nn.init.normal_(linear.weight)
    norm = torch.linalg.svdvals(linear.weight.detach())[0]

    def error() -> float:
        return float(norm - linear.u @ linear.weight.detach() @ linear.v)

    errors = [error()]
    for _ in range(4):
        iterate_norms([linear], iterations=5)
        errors.append(error())
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.1 * errors[0]


# -- the inverse ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("features", [1, 2, 5, 20])
@pytest.mark.parametrize("hidden", [[], [32], [64, 64]])
def test_decode_reaches_rounding_error(features: int, hidden: list[int], dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    networks = [strong(features, hidden, seed) for seed in range(4)]
    for network in [*networks, steep(features)]:
        layer = Residual(network.to(dtype), max_iterations=200)
        for scale in (0.1, 10.0, 1e4):
            z = scale * torch.randn(100, features, dtype=dtype)
            with torch.no_grad():
                x = layer.decode(z)
                residual_ = (layer.encode(x)[0] - z).norm(dim=-1)
            assert bool((residual_ <= 40 * eps * z.norm(dim=-1).clamp(min=1)).all())


def test_decode_goes_on_where_a_plain_step_raises_the_largest_entry() -> None:
    """A turn by 45°: each plain step shortens the residual, but may make its largest entry larger."""
    network = LipschitzMLP(2, [], KAPPA).double()
    turn = torch.tensor([[1.0, -1.0], [1.0, 1.0]]).double()
    with torch.no_grad():
        spectral(network)[0].weight.copy_(10 * turn)
    converge_norms(network)
    z = torch.cartesian_prod(*[torch.linspace(-50, 50, 21).double()] * 2)
    layer = Residual(network, max_iterations=100)
    with torch.no_grad():
        assert_close(layer.encode(layer.decode(z))[0], z, rtol=0, atol=1e-12)


def test_decode_needs_fewer_evaluations_than_plain_iteration() -> None:
    layer = Residual(steep(2).double())
    calls = [0]

    def count(*_: object) -> None:
        calls[0] += 1

    z = 3 * torch.randn(200, 2).double()
    with torch.no_grad():
        layer.network.register_forward_hook(count)
        x = layer.decode(z)
        accelerated, calls[0], plain = calls[0], 0, z
        while (plain - x).abs().max() > 1e-12:
            plain = z - layer.network(plain)[0]
    assert calls[0] > 100
    assert accelerated < calls[0] / 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_decode_stops_at_rounding_error_under_a_large_context(dtype: torch.dtype) -> None:
    layer = Residual(strong(2, [32], seed=0, context_features=3).to(dtype), max_iterations=200)
    z, context = torch.randn(200, 2, dtype=dtype), 1e3 * torch.randn(200, 3, dtype=dtype)
    with torch.no_grad():
        x = layer.decode(z, context)
        assert_close(layer.encode(x, context)[0], z, rtol=0, atol=1e5 * torch.finfo(dtype).eps)


def test_a_failed_inverse_names_its_layer_and_residual() -> None:
    blocks = [Residual(steep(2, seed)) for seed in range(3)]
    blocks[1].max_iterations = 2
    with pytest.raises(InversionError, match=r"layer 1, Residual: \d+ of 50 .* residual \d"):
        Flow(blocks).sample(50, seed=0)


@pytest.mark.parametrize("features", [1, 2, 5])
def test_decode_has_the_gradient_of_the_inverse(features: int) -> None:
    layer = Residual(steep(features).double())
    for x in torch.randn(3, features).double():
        z = layer.encode(x)[0].detach()
        there, back = jacobian(lambda v: layer.encode(v)[0], x), jacobian(layer.decode, z)
        assert_close(back @ there, torch.eye(features).double(), rtol=0, atol=1e-10)


def test_decode_passes_gradients_to_parameters_and_context() -> None:
    """encode(decode(z)) = z for all parameters and contexts: all gradients cancel but z's own."""
    layer = generic(residual(2, context_features=3))
    z, context = torch.randn(5, 2).double(), torch.randn(5, 3).double().requires_grad_()
    z.requires_grad_()
    weights = torch.randn(5, 2).double()
    wanted = [context, *layer.parameters()]
    x = layer.decode(z, context)
    one_way = torch.autograd.grad((weights * x).sum(), wanted, retain_graph=True)
    assert all(bool(gradient.any()) for gradient in one_way)
    total = (weights * layer.encode(x, context)[0]).sum()
    gradient_z, *others = torch.autograd.grad(total, [z, *wanted])
    assert_close(gradient_z, weights, rtol=0, atol=1e-10)
    for gradient in others:
        assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-10)


# -- the paper's sizes ------------------------------------------------------------------------------

NETS = {name: [10, 10] for name in ("affine_hidden", "prior_hidden", "posterior_hidden")}


@pytest.mark.parametrize(
    ("features", "index_features", "cif", "plain"),
    [
        pytest.param(2, 1, 506_830, 501_850, id="2-D"),
        pytest.param(6, 2, 519_330, 512_130, id="POWER"),
        pytest.param(8, 2, 525_310, 517_270, id="GAS"),
        pytest.param(21, 5, 565_800, 550_680, id="HEPMASS"),
        pytest.param(43, 10, 634_280, 607_220, id="MINIBOONE"),
        pytest.param(63, 15, 696_780, 658_620, id="BSDS300"),
    ],
)
def test_parameter_counts_are_the_authors(
    features: int, index_features: int, cif: int, plain: int
) -> None:
    unused = 2 * 10  # theirs hold two scalars a block that nothing reads

    def count(flow: Flow) -> int:
        return sum(parameter.numel() for parameter in flow.parameters())

    assert count(build_model("resflow", features=features)) == plain - unused
    indexed = build_model("cif-resflow", features=features, index_features=index_features, **NETS)
    assert count(indexed) == cif - unused

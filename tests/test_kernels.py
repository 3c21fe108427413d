"""The GPU's kernels against the plain versions of the same networks.

They run on a GPU; and, slowly, anywhere that triton is installed, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import zuko
from torch import Tensor

import ciflows
from ciflows import kernels
from ciflows.kernels import normal
from ciflows.networks import MLP, LipschitzMLP, MaskedMLP, converge_norms
from ciflows.networks.lipschitz import scaled_weights
from ciflows.networks.mlp import stacked_maps
from ciflows.noise import RowNoise
from ciflows.precision import float32_products
from ciflows.prepared import detached, giving

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytestmark = pytest.mark.skipif(
    not kernels.INSTALLED or not (torch.cuda.is_available() or INTERPRETED),
    reason="needs triton, and CUDA or TRITON_INTERPRET=1",
)

if kernels.INSTALLED:
    from ciflows.kernels import gpu, gpu_normal
    from ciflows.kernels.gpu_log_det import log_det


def results(values: tuple[Tensor, ...], inputs: list[Tensor]) -> list[Tensor]:
    """Values, and the gradient of their sum with unequal weights in all inputs."""
    weights = [torch.linspace(-1, 1, value.numel(), device=DEVICE).view_as(value) for value in values]
    loss = sum((value * weight).sum() for value, weight in zip(values, weights, strict=True))
    return [*values, *torch.autograd.grad(loss, inputs)]


def check(plain: tuple[Tensor, ...], fused: tuple[Tensor, ...], inputs: list[Tensor]) -> None:
    for expected, value in zip(results(plain, inputs), results(fused, inputs), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    with float32_products():
        yield


@pytest.mark.parametrize(
    ("features", "hidden", "leading"),
    [(2, [32, 32, 32, 32], (37,)), (6, [50, 50], (2, 20)), (17, [32, 32, 32], (5,))],
)
def test_a_lipschitz_network_and_its_jacobian(
    features: int, hidden: list[int], leading: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    network = LipschitzMLP(features, hidden, last_std=0.5).to(DEVICE)
    x = torch.randn(*leading, features, device=DEVICE, requires_grad=True)
    directions = torch.eye(features, device=DEVICE).reshape(features, *[1] * len(leading), features)
    directions = directions.expand(features, *leading, features)
    plain = network._plain(torch.cat([x[None], directions]), None)
    check(plain, network._fused(x, directions), [x, *network.parameters()])


def test_networks_whose_weights_are_scaled_together() -> None:
    torch.manual_seed(0)
    networks = [LipschitzMLP(2, [32, 32, 32], last_std=0.5).to(DEVICE) for _ in range(2)]
    networks.append(LipschitzMLP(2, [16, 16], last_std=0.5).to(DEVICE))
    inputs = [torch.randn(20, 2, device=DEVICE, requires_grad=True)]
    for network in networks:
        inputs += network.parameters()
    alone = tuple(network._fused(inputs[0], None)[0] for network in networks)
    with giving(scaled_weights(networks)):
        together = tuple(network._fused(inputs[0], None)[0] for network in networks)
    check(alone, together, inputs)
    assert "given" not in networks[0].__dict__


def test_a_lipschitz_network_alone() -> None:
    torch.manual_seed(0)
    network = LipschitzMLP(3, [32, 32], last_std=0.5).to(DEVICE)
    x = torch.randn(20, 3, device=DEVICE, requires_grad=True)
    plain, fused = network._plain(x[None], None), network._fused(x, None)
    assert fused[1].shape == (0, 20, 3)
    check(plain[:1], fused[:1], [x, *network.parameters()])


@pytest.mark.parametrize(("features", "points"), [(2, 37), (6, 20), (17, 9)])
@pytest.mark.parametrize("gradients", [False, True])
def test_wide_tiles_where_no_gradient_is_wanted(
    features: int, points: int, gradients: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none where one is: the way back would take what was saved for tiles of another size."""
    for name, value in {"FEW_ROWS": 0, "MANY_ROWS": 0, "_has_wide_products": lambda x: True}.items():
        monkeypatch.setattr(gpu, name, value)
    rows = []
    launch = gpu.launch

    def note(kernel: Any, grid: tuple[int, ...], *given: Any, **options: Any) -> None:
        if "R" in options and "S" in options:
            rows.append(options["R"] * options["S"])
        launch(kernel, grid, *given, **options)

    monkeypatch.setattr(gpu, "launch", note)
    torch.manual_seed(0)
    network = LipschitzMLP(features, [32, 32, 32], last_std=0.5).to(DEVICE)
    x = torch.randn(points, features, device=DEVICE, requires_grad=True)
    directions = torch.eye(features, device=DEVICE)[:, None].expand(features, points, features)
    with torch.set_grad_enabled(gradients):
        plain = network._plain(torch.cat([x[None], directions]), None)
        fused = network._fused(x, directions)
    if gradients:
        check(plain, fused, [x, *network.parameters()])
    for expected, value in zip(plain, fused, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)
    assert set(rows) == {32 if gradients else 64}


@pytest.mark.parametrize(
    ("sizes", "leading"),
    [((2, 4, [10, 10]), (37,)), ((1, 2, [64, 64, 64]), (3, 5)), ((3, 2, [200, 200]), (20,))],
)
def test_a_perceptron(sizes: tuple[int, int, list[int]], leading: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    network = MLP(*sizes).to(DEVICE)
    x = torch.randn(*leading, sizes[0], device=DEVICE, requires_grad=True)
    check((network._plain(x),), (network._fused(x),), [x, *network.parameters()])


def test_a_masked_network() -> None:
    torch.manual_seed(0)
    adjacency = torch.ones(3, 3).tril(-1).bool().repeat_interleave(2, 0)
    network = MaskedMLP(zuko.nn.MaskedMLP(adjacency, [50, 50])).to(DEVICE)
    x = torch.randn(20, 3, device=DEVICE, requires_grad=True)
    check((network._plain(x),), (network._fused(x),), [x, *network.parameters()])


@pytest.mark.parametrize(
    ("features", "x", "halves"), [(1, (600,), (600,)), (2, (3, 5), (3, 5)), (5, (3, 7), (7,))]
)
def test_normal_densities_and_affine_maps(
    features: int, x: tuple[int, ...], halves: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    point, shift = torch.randn(2, *x, features, device=DEVICE)
    epsilon = torch.randn(*x, features, device=DEVICE)
    output = torch.randn(*halves, 2 * features, device=DEVICE)
    for tensor in (point, shift, output):
        tensor.requires_grad_()
    plain, fused = (
        normal._plain_log_normal(point, output, point.shape[-1:]),
        gpu_normal.log_normal(point, output),
    )
    check((plain,), (fused,), [point, output])
    for moved, used in itertools.product((None, shift), (slice(2), slice(1), slice(1, 2))):
        inputs = [output] if moved is None else [output, moved]
        expected = normal._plain_place_normal(epsilon, output, epsilon.shape[-1:], moved)
        check(expected[used], gpu_normal.place_normal(epsilon, output, moved)[used], inputs)
    check(
        normal._plain_affine(point, output, point.shape[-1:]),
        gpu_normal.affine(point, output),
        [point, output],
    )


def test_a_gradient_that_all_rows_share() -> None:
    torch.manual_seed(0)
    point, output = torch.randn(9, 2, device=DEVICE), torch.randn(9, 4, device=DEVICE).requires_grad_()
    values = (
        normal._plain_log_normal(point, output, point.shape[-1:]),
        gpu_normal.log_normal(point, output),
    )
    plain, fused = (torch.autograd.grad(value.sum(), output)[0] for value in values)
    torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-5)


def test_a_shift_that_all_rows_share() -> None:
    torch.manual_seed(0)
    epsilon, output = torch.randn(3, 5, 2, device=DEVICE), torch.randn(5, 4, device=DEVICE)
    shift = torch.randn(2, device=DEVICE).requires_grad_()
    plain = normal._plain_place_normal(epsilon, output, epsilon.shape[-1:], shift)
    check(plain, gpu_normal.place_normal(epsilon, output, shift), [shift])


def twice() -> dict[str, Callable[[Tensor], Tensor]]:
    network, output = MLP(2, 2, [8, 8]).to(DEVICE), torch.randn(5, 4, device=DEVICE)
    identity = torch.eye(2, device=DEVICE)[:, None]
    return {
        "a network": lambda x: network._fused(x),
        "a determinant": lambda x: log_det(identity + 0.1 * x),
        "a density": lambda x: gpu_normal.log_normal(x, output),
        "a draw": lambda x: gpu_normal.place_normal(output[:, :2], torch.cat([x, x], -1), None)[1],
        "a map": lambda x: gpu_normal.affine(output[:, :2], torch.cat([x, x], -1))[1],
    }


@pytest.mark.parametrize("name", ["a network", "a determinant", "a density", "a draw", "a map"])
def test_a_second_derivative_is_refused(name: str) -> None:
    """Where it is not, torch takes it for zero."""
    function, x = twice()[name], torch.randn(5, 2, device=DEVICE)
    with pytest.raises(RuntimeError, match="second derivatives on a CPU"):
        torch.autograd.functional.hessian(lambda x: function(x).square().sum(), x)


def test_networks_whose_maps_are_stacked_together() -> None:
    torch.manual_seed(0)
    networks = [MLP(2, 4, sizes).to(DEVICE) for sizes in ([8, 8], [8, 8], [16, 16, 16])]
    inputs = [torch.randn(20, 2, device=DEVICE, requires_grad=True)]
    for network in networks:
        inputs += network.parameters()
    alone = tuple(network._fused(inputs[0]) for network in networks)
    with giving(stacked_maps(networks)):
        together = tuple(network._fused(inputs[0]) for network in networks)
        with detached(networks[0]):
            constant = networks[0]._fused(inputs[0])
    torch.testing.assert_close(constant, alone[0])
    check(alone, together, inputs)
    first, second, _ = (part for part in networks[0] if isinstance(part, torch.nn.Linear))
    inner = [second.weight, first.bias, second.bias]
    assert torch.autograd.grad(constant.sum(), inner, allow_unused=True) == (None,) * 3


@pytest.mark.parametrize("features", [2, 3, 17, 43])
def test_log_determinants(features: int) -> None:
    torch.manual_seed(0)
    jacobian = torch.randn(5, features, features, device=DEVICE)
    jacobian *= 0.9 / torch.linalg.matrix_norm(jacobian, 2)[:, None, None]
    matrix = torch.eye(features, device=DEVICE)[:, None] + jacobian.movedim(1, 0)
    matrix.requires_grad_()
    plain = torch.linalg.slogdet(matrix.movedim(0, -2)).logabsdet
    check((plain,), (log_det(matrix),), [matrix])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="without CUDA none fits")
@pytest.mark.parametrize(
    ("sizes", "tangents"),
    [
        ((2, 257, 257, 2), 0),
        ((2, 129, 129, 2), 2),
        ((2, 32, 64, 2), 0),
        ((65, 32, 32, 65), 0),
        ((2, 32, 2), 0),
    ],
)
def test_other_sizes_are_left_to_torch(sizes: tuple[int, ...], tangents: int) -> None:
    assert not kernels.fits(torch.zeros(3, sizes[0], device=DEVICE), sizes, tangents)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_likelihoods_and_samples_of_a_flow_are_those_of_a_cpu() -> None:
    sizes = {"layers": 3, "hidden": [32, 32, 32]}
    flow = ciflows.build_model("cif-resflow", features=2, seed=0, **sizes).eval()  # type: ignore[arg-type]
    for network in (part for part in flow.modules() if isinstance(part, LipschitzMLP)):
        torch.nn.init.orthogonal_(network.linears[-1].get_parameter("weight"))
    converge_norms(flow)
    x = torch.randn(50, 2)
    expected = flow.estimate(x, 20, noise=RowNoise(0))
    flow = flow.cuda()
    assert len([part for part in flow.modules() if isinstance(part, LipschitzMLP) and part.fused]) == 3
    estimate = flow.estimate(x.cuda(), 20, noise=RowNoise(0))
    torch.testing.assert_close(estimate.log_prob.cpu(), expected.log_prob, rtol=1e-4, atol=1e-4)
    samples = flow.sample(50, seed=0)
    assert not any("given" in part.__dict__ for part in flow.modules())
    assert flow.estimate(samples, 20, seed=0).log_prob.isfinite().all()

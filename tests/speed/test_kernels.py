"""The GPU's kernels against the plain versions of the same networks.

They run on a GPU; and, slowly, anywhere that triton is installed, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import zuko
from torch import Tensor

import ciflows
from ciflows import Flow, Indexed
from ciflows.core.density import log_normal, place_normal
from ciflows.core.hook import on, plain
from ciflows.core.layer import Layer
from ciflows.core.noise import Noise, RowNoise
from ciflows.core.precision import float32_products
from ciflows.core.rows import Rows
from ciflows.layers import LULinear
from ciflows.layers.affine import affine
from ciflows.networks import MLP, LipschitzMLP, MaskedMLP, converge_norms
from ciflows.speed import gpu
from ciflows.speed.stacked import CACHE, caching, is_kernel, prepared
from ciflows.training import TrainingSettings
from ciflows.training.step import Step
from constructors import affine as affine_layer
from constructors import generic, normal, residual, spline

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytestmark = pytest.mark.skipif(
    not gpu.INSTALLED or not (torch.cuda.is_available() or gpu.INTERPRETED),
    reason="needs triton, and CUDA or TRITON_INTERPRET=1",
)

if gpu.INSTALLED:
    from ciflows.speed import gpu_chain, gpu_normal
    from ciflows.speed.gpu_log_det import log_det


@pytest.fixture(autouse=True)
def _spoilt_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What memory holds before a kernel writes to it must not matter."""
    new_empty = Tensor.new_empty

    def spoilt(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        made = new_empty(self, *args, **kwargs)
        return made.fill_(math.nan) if made.is_floating_point() else made

    if gpu.INTERPRETED:
        monkeypatch.setattr(Tensor, "new_empty", spoilt)


def results(values: tuple[Tensor, ...], inputs: list[Tensor]) -> list[Tensor]:
    """Values, and the gradient of their sum with unequal weights in all inputs."""
    weights = [torch.linspace(-1, 1, value.numel(), device=DEVICE).view_as(value) for value in values]
    loss = sum((value * weight).sum() for value, weight in zip(values, weights, strict=True))
    return [*values, *torch.autograd.grad(loss, inputs)]


def check(plain: tuple[Tensor, ...], fused: tuple[Tensor, ...], inputs: list[Tensor]) -> None:
    for expected, value in zip(results(plain, inputs), results(fused, inputs), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())


def both(function: Callable[..., Any], *args: Any) -> list[tuple[Tensor, ...]]:
    """What a function gives in plain torch, and with kernels."""
    with plain():
        values = [function(*args)]
    values.append(function(*args))
    return [(value,) if isinstance(value, Tensor) else value for value in values]


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
    check(*both(network, x, directions), [x, *network.parameters()])


def test_networks_whose_weights_are_scaled_together() -> None:
    torch.manual_seed(0)
    networks = [LipschitzMLP(2, [32, 32, 32], last_std=0.5).to(DEVICE) for _ in range(2)]
    networks.append(LipschitzMLP(2, [16, 16], last_std=0.5).to(DEVICE))
    inputs = [torch.randn(20, 2, device=DEVICE, requires_grad=True)]
    for network in networks:
        inputs += network.parameters()
    alone = tuple(network(inputs[0])[0] for network in networks)
    with caching(prepared(networks)):
        together = tuple(network(inputs[0])[0] for network in networks)
    check(alone, together, inputs)
    assert CACHE not in networks[0].__dict__


def test_a_lipschitz_network_alone() -> None:
    torch.manual_seed(0)
    network = LipschitzMLP(3, [32, 32], last_std=0.5).to(DEVICE)
    x = torch.randn(20, 3, device=DEVICE, requires_grad=True)
    expected, fused = both(network, x)
    assert fused[1].shape == (0, 20, 3)
    check(expected[:1], fused[:1], [x, *network.parameters()])


@pytest.mark.parametrize(("features", "points"), [(2, 37), (6, 20), (17, 9)])
@pytest.mark.parametrize("gradients", [False, True])
def test_wide_tiles_where_no_gradient_is_wanted(
    features: int, points: int, gradients: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none where one is: the backward pass would read what was saved for tiles of another size."""
    for name, value in {"FEW_ROWS": 0, "MANY_ROWS": 0, "_has_wide_products": lambda x: True}.items():
        monkeypatch.setattr(gpu_chain, name, value)
    plans: list[int] = []
    make = gpu_chain.Plan.of

    def note(*args: Any) -> Any:
        plan = make(*args)
        plans.append(plan.rows)
        return plan

    monkeypatch.setattr(gpu_chain.Plan, "of", note)
    torch.manual_seed(0)
    network = LipschitzMLP(features, [32, 32, 32], last_std=0.5).to(DEVICE)
    x = torch.randn(points, features, device=DEVICE, requires_grad=True)
    directions = torch.eye(features, device=DEVICE)[:, None].expand(features, points, features)
    with torch.set_grad_enabled(gradients):
        expected, fused = both(network, x, directions)
    if gradients:
        check(expected, fused, [x, *network.parameters()])
    for one, other in zip(expected, fused, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)
    assert set(plans) == {32 if gradients else 64}


@pytest.mark.parametrize(
    ("sizes", "leading"),
    [((2, 4, [10, 10]), (37,)), ((1, 2, [64, 64, 64]), (3, 5)), ((3, 2, [200, 200]), (10,))],
)
def test_a_perceptron(sizes: tuple[int, int, list[int]], leading: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    network = MLP(*sizes).to(DEVICE)
    x = torch.randn(*leading, sizes[0], device=DEVICE, requires_grad=True)
    check(*both(network, x), [x, *network.parameters()])


def test_a_masked_network() -> None:
    torch.manual_seed(0)
    adjacency = torch.ones(3, 3).tril(-1).bool().repeat_interleave(2, 0)
    network = MaskedMLP(zuko.nn.MaskedMLP(adjacency, [50, 50])).to(DEVICE)
    x = torch.randn(20, 3, device=DEVICE, requires_grad=True)
    check(*both(network, x), [x, *network.parameters()])


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
    shape = point.shape[-1:]
    check(*both(log_normal, point, output, shape), [point, output])
    for moved, used in itertools.product((None, shift), (slice(2), slice(1), slice(1, 2))):
        inputs = [output] if moved is None else [output, moved]
        expected, fused = both(place_normal, epsilon, output, shape, moved)
        check(expected[used], fused[used], inputs)
    check(*both(affine, point, output, shape), [point, output])


def test_a_gradient_that_all_rows_share() -> None:
    torch.manual_seed(0)
    point, output = torch.randn(9, 2, device=DEVICE), torch.randn(9, 4, device=DEVICE).requires_grad_()
    values = both(log_normal, point, output, (2,))
    expected, fused = (torch.autograd.grad(value.sum(), output)[0] for (value,) in values)
    torch.testing.assert_close(fused, expected, rtol=1e-4, atol=1e-5)


def test_a_shift_that_all_rows_share() -> None:
    torch.manual_seed(0)
    epsilon, output = torch.randn(3, 5, 2, device=DEVICE), torch.randn(5, 4, device=DEVICE)
    shift = torch.randn(2, device=DEVICE).requires_grad_()
    check(*both(place_normal, epsilon, output, (2,), shift), [shift])


def twice() -> dict[str, Callable[[Tensor], Tensor]]:
    network, output = MLP(2, 2, [8, 8]).to(DEVICE), torch.randn(5, 4, device=DEVICE)
    identity = torch.eye(2, device=DEVICE)[:, None]
    return {
        "a network": network,
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
    alone = tuple(network(inputs[0]) for network in networks)
    fixed = {name: value.detach() for name, value in networks[0].named_parameters()}
    with caching(prepared(networks)):
        together = tuple(network(inputs[0]) for network in networks)
        constant = torch.func.functional_call(networks[0], fixed, (inputs[0],))
    torch.testing.assert_close(constant, alone[0])
    check(alone, together, inputs)
    unused = torch.autograd.grad(constant.sum(), list(networks[0].parameters()), allow_unused=True)
    assert unused == (None,) * 6


@pytest.mark.parametrize("features", [2, 3, 17, 43])
def test_log_determinants(features: int) -> None:
    torch.manual_seed(0)
    jacobian = torch.randn(5, features, features, device=DEVICE)
    jacobian *= 0.9 / torch.linalg.matrix_norm(jacobian, 2)[:, None, None]
    matrix = torch.eye(features, device=DEVICE)[:, None] + jacobian.movedim(1, 0)
    matrix.requires_grad_()
    plain = torch.linalg.slogdet(matrix.movedim(0, -2)).logabsdet
    check((plain,), (log_det(matrix),), [matrix])


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
    assert not gpu.fits_chain(torch.zeros(3, sizes[0], device=DEVICE), sizes, tangents)


@pytest.mark.parametrize("objective", ["elbo", "dreg"])
def test_gradients_of_a_step_are_the_plain_ones(objective: str) -> None:
    """With flows for prior and posterior, a context, dropout, and all that is prepared."""
    torch.manual_seed(0)
    update = {"objective": objective, "draws": 2, "precision": "float32", "clip": math.inf}
    settings, x, context = TrainingSettings(**update), torch.randn(9, 2), torch.randn(9, 1)
    first = Indexed(
        affine_layer(2, 2),
        Flow([spline(1, 3, dropout=0.2, hidden=12)]),
        Flow([spline(1, 3)]),
        context_shape=(1,),
    )
    fused = Indexed(affine_layer(2, 1, layers=2), normal(1, 2, layers=2), normal(1, 2, layers=2))
    inner = Flow([residual(2), LULinear(2), fused])
    flow = generic(Flow([first, LULinear(2)], inner)).float().to(DEVICE).train()
    batch, grads = Rows(x, context).to(DEVICE), []
    for with_speed in (False, True):
        flow_copy = copy.deepcopy(flow)
        step = Step(flow_copy, settings, Noise.seeded(0, DEVICE))
        with nullcontext() if with_speed else plain():
            loss = step(batch)
        grads.append([loss, *(p.grad for p in flow_copy.parameters())])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-4)


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
    assert sum(isinstance(part, LipschitzMLP) and is_kernel(part) for part in flow.modules()) == 3
    estimate = flow.estimate(x.cuda(), 20, noise=RowNoise(0))
    torch.testing.assert_close(estimate.log_prob.cpu(), expected.log_prob, rtol=1e-4, atol=1e-4)
    samples = flow.sample(50, seed=0)
    assert not any(CACHE in part.__dict__ for part in flow.modules())
    assert flow.estimate(samples, 20, seed=0).log_prob.isfinite().all()


@pytest.mark.filterwarnings("ignore")  # of torch's compiler, about itself
@pytest.mark.parametrize(
    ("name", "options"), [("cif-maf", {}), ("cif-nsf", {"residual": True, "linear": True})]
)
def test_layers_share_what_torch_compiles(name: str, options: dict[str, Any]) -> None:
    """With kernels and cached weights inside: a captured step compiles each kind of layer once."""
    flow = ciflows.build_model(name, features=3, layers=3, seed=0, **options).to(DEVICE).train()
    x = torch.randn(8, 3, device=DEVICE, requires_grad=True)
    pure = [
        (part, method)
        for part in flow.modules()
        if isinstance(part, Layer) and "Permutation" not in type(part).__name__
        for method in part.pure
    ]
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    def log_weight() -> Tensor:
        with on(flow):
            return flow.log_weight(x, noise=Noise.seeded(0, DEVICE))

    expected = log_weight()
    for part, method in pure:
        part.__dict__[method] = torch.compile(getattr(part, method), backend=backend, fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(log_weight(), expected, rtol=1e-4, atol=1e-4)
    assert len(pure) >= 3
    assert len(graphs) == len({(type(part), method) for part, method in pure})

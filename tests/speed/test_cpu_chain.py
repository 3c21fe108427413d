"""Chains in C: against the plain version in float64, at the edges of numbers, without a compiler."""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
import zuko
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from ciflows.core.hook import plain
from ciflows.networks import MLP, LipschitzMLP
from ciflows.networks.masked import MaskedMLP
from ciflows.speed import cpu_chain
from ciflows.speed.cpu_chain import plain_chain, thread_memory

COMPILER = shlex.split(os.environ.get("CC", "cc"))[0]
compiled = pytest.mark.skipif(shutil.which(COMPILER) is None, reason="There is no C compiler.")

SHAPES = {  # tangents, rows, widths
    "a residual block": (2, 100, [2, 128, 128, 128, 128, 2]),
    "six features": (6, 70, [6, 64, 64, 6]),
    "more tangents than a tile has rows": (100, 3, [5, 33, 5]),
    "a value alone": (0, 1000, [2, 64, 64, 2]),
    "widths of no number of vectors": (1, 97, [3, 130, 7, 33, 3]),
    "one layer": (2, 1, [17, 17]),
    "one of all": (0, 1, [1, 1]),
    "no rows": (1, 0, [2, 8, 2]),
}


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def numbers(tangents: int, rows: int, widths: Sequence[int]) -> list[Tensor]:
    """A stack, weights and biases, of float32."""
    weights = [torch.randn(after, before) / before**0.5 for before, after in itertools.pairwise(widths)]
    biases = [torch.randn(width) for width in widths[1:]]
    parts = [torch.randn(1 + tangents, rows, widths[0]), *weights, *biases]
    return [part.requires_grad_() for part in parts]


def chain(stack: Tensor, *maps: Tensor, activation: str = "silu") -> Tensor:
    assert cpu_chain.fits(stack, maps)
    return cpu_chain.chain(activation, stack, maps)


def doubles(parts: Sequence[Tensor]) -> list[Tensor]:
    return [part.detach().double().requires_grad_() for part in parts]


def spoil_memory() -> None:
    """What was left in the memory that is used again must not matter."""
    thread_memory.get(2**20).fill_(torch.nan)


@compiled
@pytest.mark.parametrize("activation", ["silu", "tanh", "relu"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_values_and_gradients_are_those_of_the_plain_version(
    shape: tuple[int, int, list[int]], activation: str, threads: int
) -> None:
    parts = numbers(*shape)
    spoil_memory()
    y, wide = chain(*parts, activation=activation), doubles(parts)
    expected, grad = plain_chain(activation, *wide), torch.randn_like(y)
    with torch.no_grad():
        assert torch.equal(chain(*parts, activation=activation), y)
    assert_near(y, expected)
    spoil_memory()
    by_parts = torch.autograd.grad(y, parts, grad)
    for one, other in zip(by_parts, torch.autograd.grad(expected, wide, grad.double()), strict=True):
        assert_near(one, other)


def assert_near(one: Tensor, other: Tensor) -> None:
    assert one.dtype == torch.float32
    assert one.shape == other.shape
    if one.numel():
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()


@compiled
@pytest.mark.parametrize("wanted", [0, 1, 3], ids=["stack", "weight", "bias"])
def test_one_gradient_alone(wanted: int) -> None:
    parts = numbers(1, 9, [2, 5, 2])
    expected = torch.autograd.grad(chain(*parts).sum(), parts)[wanted]
    for index, part in enumerate(parts):
        part.requires_grad_(index == wanted)
    (grad,) = torch.autograd.grad(chain(*parts).sum(), parts[wanted])
    assert torch.equal(grad, expected)


@compiled
def test_tensors_whose_numbers_do_not_lie_side_by_side() -> None:
    stack, *maps = numbers(2, 9, [3, 8, 3])
    other = stack.detach().transpose(0, 1).contiguous().transpose(0, 1)
    turned = [part.detach().mT.contiguous().mT if part.ndim == 2 else part for part in maps]
    assert torch.equal(chain(other, *turned), chain(stack, *maps))


@compiled
def test_second_derivatives() -> None:
    parts = numbers(1, 4, [2, 5, 2])

    def second(parts: list[Tensor]) -> tuple[Tensor, ...]:
        plain = parts[0].dtype == torch.float64
        y = plain_chain("silu", *parts) if plain else chain(*parts)
        first = torch.autograd.grad(y.square().sum(), parts, create_graph=True)
        return torch.autograd.grad(sum(part.square().sum() for part in first), parts)

    for one, other in zip(second(parts), second(doubles(parts)), strict=True):
        assert_near(one, other)


@compiled
def test_silu_and_its_slope_over_all_numbers() -> None:
    edges = [0.0, 1e-30, 87.0, 87.5, 88.3, 88.7, 88.8, 89.5, 1e4, 3e38]
    y = torch.cat([torch.linspace(-120, 120, 4001), torch.tensor(edges), -torch.tensor(edges)])
    stack = torch.stack([y, torch.ones_like(y)])[..., None]
    value, slope = chain(stack, torch.ones(1, 1), torch.zeros(1))[..., 0]
    wide = y.double().requires_grad_()
    silu = torch.nn.functional.silu(wide)
    (steep,) = torch.autograd.grad(silu.sum(), wide)
    assert (value - silu).abs().le(3e-7 * silu.abs() + 1e-30).all()
    assert (slope - steep).abs().max() < 1e-6


def maps_of(network: nn.Module) -> list[Tensor]:
    linears = [part for part in network.modules() if isinstance(part, nn.Linear)]
    return [*(part.weight for part in linears), *(part.bias for part in linears)]


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "tanh": lambda: MLP(3, 3, hidden=[8, 8]),
    "silu": lambda: LipschitzMLP(3, hidden=[8, 8]),
    "relu": lambda: MaskedMLP(zuko.nn.MaskedMLP(torch.ones(3, 3).tril(-1).bool(), [8, 8])),
}


@compiled
@pytest.mark.parametrize("activation", NETWORKS)
def test_networks_go_through_it(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network, x, real = NETWORKS[activation](), torch.randn(2, 5, 3), cpu_chain.chain
    asked: list[str] = []

    def listened(activation: str, stack: Tensor, maps: Sequence[Tensor]) -> Tensor:
        asked.append(activation)
        return real(activation, stack, maps)

    monkeypatch.setattr(cpu_chain, "chain", listened)
    y = network(x)
    assert asked == [activation]
    with plain():
        torch.testing.assert_close(network(x), y)
    assert asked == [activation]


@compiled
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_spoils_its_own_row_alone(value: float) -> None:
    stack, *maps = numbers(2, 50, [2, 33, 33, 2])
    before = chain(stack, *maps)
    with torch.no_grad():
        stack[0, 7, 0] = value
    after = chain(stack, *maps)
    rest = [row for row in range(50) if row != 7]
    assert torch.equal(after[:, rest], before[:, rest])
    assert not after[:, 7].isfinite().all()
    (by_stack, *_) = torch.autograd.grad(after.sum(), [stack, *maps])
    assert by_stack[:, rest].isfinite().all()


@compiled
def test_biases_of_each_row_and_other_numbers_are_left_to_torch() -> None:
    stack, *maps = numbers(1, 6, [2, 8, 2])
    assert not cpu_chain.fits(stack.double(), [part.double() for part in maps])
    assert not cpu_chain.fits(stack, [*maps[:2], maps[2].expand(6, 8), maps[3]])
    stack, *maps = numbers(0, 1, [2, cpu_chain.WIDEST + 1, 2])
    assert not cpu_chain.fits(stack, maps)


@compiled
@pytest.mark.parametrize("shape", [(5, 4), (5, 300), (3,), (2, 2, 5, 4)])
def test_what_does_not_fit_together_is_refused(shape: tuple[int, ...]) -> None:
    network, x = MLP(3, 3, hidden=[8, 8]), torch.randn(shape)
    maps = maps_of(network)
    assert not cpu_chain.fits(x, maps)
    if x.shape[-1] != 3:
        with pytest.raises(RuntimeError, match="shapes"):
            network(x)


@compiled
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, by torch
@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_what_torch_has_to_see_is_left_to_it(activation: str) -> None:
    network, x = NETWORKS[activation]().requires_grad_(False), torch.randn(5, 3)
    y, jacobian = network(x), torch.autograd.functional.jacobian(network, x).sum(2)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(network(forward_ad.make_dual(x, torch.ones(5, 3)))).tangent
        torch.testing.assert_close(tangent, jacobian.sum(-1))
    torch.testing.assert_close(torch.func.vmap(network)(x[:, None])[:, 0], y)
    with torch.autocast("cpu"):
        assert not cpu_chain.fits(x, maps_of(network))
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        assert network(fake.from_tensor(x)).shape == (5, 3)


@compiled
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torch_compiles_networks() -> None:
    network, x = NETWORKS["tanh"](), torch.randn(5, 3)
    compiled = torch.compile(network, backend="eager")
    torch.testing.assert_close(compiled(x), network(x))


@compiled
def test_memory_of_inference_mode_serves_outside_of_it() -> None:
    with torch.inference_mode():
        LipschitzMLP(2, hidden=[cpu_chain.WIDEST] * 4)(torch.randn(10, 2))
    network = LipschitzMLP(2, hidden=[16, 16], context_features=3)
    network(torch.randn(10, 2), None, torch.randn(10, 3))[0].sum().backward()


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nothing is compiled yet, here or in the cache."""
    monkeypatch.setenv("CIFLOWS_CACHE", str(tmp_path / "cache"))
    cpu_chain._load.cache_clear()
    yield
    cpu_chain._load.cache_clear()


@pytest.mark.usefixtures("no_library")
@pytest.mark.parametrize("compiler", ["/no/such/compiler", "false"])
@pytest.mark.parametrize("activation", NETWORKS)
def test_without_a_compiler_torch_does_it(
    activation: str, compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setattr(cpu_chain, "chain", lambda *_: pytest.fail("There is nothing to call."))
    assert bool(NETWORKS[activation]()(torch.randn(5, 3))[0].isfinite().all())


@compiled
def test_torch_does_it_where_its_work_is_counted() -> None:
    network = NETWORKS["tanh"]()
    with plain(), FlopCounterMode(display=False) as counter:
        network(torch.randn(5, 3))
    assert counter.get_total_flops() == 2 * 5 * (3 * 8 + 8 * 8 + 8 * 3)


@compiled
@pytest.mark.usefixtures("no_library")
def test_it_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu_chain.library() is not None
    (path,) = (tmp_path / "cache" / "kernels").iterdir()
    cpu_chain._load.cache_clear()
    run = cpu_chain._run

    def run_once(command: Sequence[str]) -> str:
        return run(command) if "--version" in command else pytest.fail("again")

    monkeypatch.setattr(cpu_chain, "_run", run_once)
    assert cpu_chain.library() is not None
    assert [*path.parent.iterdir()] == [path]


@compiled
@pytest.mark.usefixtures("no_library")
def test_a_damaged_library_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu_chain.library() is not None
    (path,) = (tmp_path / "cache" / "kernels").iterdir()
    other = tmp_path / "other" / "kernels" / path.name
    other.parent.mkdir(parents=True, mode=0o700)
    other.touch(mode=0o700)
    monkeypatch.setenv("CIFLOWS_CACHE", str(tmp_path / "other"))
    cpu_chain._load.cache_clear()
    assert cpu_chain.library() is not None
    assert other.stat().st_size == path.stat().st_size


@compiled
@pytest.mark.usefixtures("no_library")
def test_a_library_that_others_may_write_is_not_loaded(tmp_path: Path) -> None:
    assert cpu_chain.library() is not None
    (path,) = (tmp_path / "cache" / "kernels").iterdir()
    path.chmod(0o777)
    cpu_chain._load.cache_clear()
    assert cpu_chain.library() is None


@pytest.mark.usefixtures("no_library")
def test_without_a_home_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("CIFLOWS_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert cpu_chain.library() is None

"""The optimiser: Adam as torch has it, and Muon."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ciflows.training.optimizer import ADAM_SHARE, Optimizer, orthogonalised


@pytest.fixture
def parameters() -> list[nn.Parameter]:
    shapes = [(20, 20), (3,), (16, 40), (20, 20), (2, 20), (), (16, 2, 3, 3), (16, 1, 3, 3)]
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


@pytest.fixture(params=[True, False], ids=["fused", "plain"])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Optimizer]:
    """The optimiser; with torch's private kernel for Adam, and where a release has none."""
    if not request.param:
        monkeypatch.delattr(torch, "_fused_adamw_")
    return Optimizer


def is_muons(p: Tensor) -> bool:
    return p.ndim > 1 and min(p.flatten(1).shape) >= 16


def give_gradients(parameters: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator)


@pytest.mark.parametrize("shape", [(3, 20, 20), (2, 40, 16), (2, 16, 40)])
def test_singular_values_come_near_one_and_vectors_stay(shape: tuple[int, int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    u, _, v = torch.linalg.svd(torch.randn(shape, generator=generator), full_matrices=False)
    values = torch.logspace(-2, 2, u.shape[2])
    made = u.mT @ orthogonalised(u * values @ v) @ v.mT
    seen = made.diagonal(dim1=1, dim2=2)
    assert seen[:, values > 1].min() > 0.65
    assert seen.max() < 1.25
    assert (made - torch.diag_embed(seen)).abs().max() < 1e-4


def test_without_muon_it_is_torchs_adam(
    parameters: list[nn.Parameter], make: Callable[..., Optimizer]
) -> None:
    copies = [nn.Parameter(p.detach().clone()) for p in parameters]
    ours = make(parameters, 0.1, weight_decay=0.3)
    theirs = torch.optim.AdamW(copies, lr=0.1, weight_decay=0.3)
    for seed in range(3):
        for some in (parameters, copies):
            give_gradients(some, seed)
        ours.step()
        theirs.step()
    for p, copy in zip(parameters, copies, strict=True):
        torch.testing.assert_close(p, copy)


def test_muon_has_the_matrices_and_adam_the_rest(
    parameters: list[nn.Parameter], make: Callable[..., Optimizer]
) -> None:
    copies = [nn.Parameter(p.detach().clone()) for p in parameters]
    before = [p.detach().clone() for p in parameters]
    ours, adam = make(parameters, 0.1, muon=True), make(copies, 0.1)
    for some, optimizer in ((parameters, ours), (copies, adam)):
        give_gradients(some, seed=1)
        optimizer.step()
    for p, copy, old in zip(parameters, copies, before, strict=True):
        if is_muons(p):
            assert p.grad is not None
            rows = p.grad.flatten(1)
            size = 0.1 * ADAM_SHARE * max(rows.shape) ** 0.5
            change = -size * orthogonalised(rows[None])[0]  # the momentum has its direction
            torch.testing.assert_close(p.detach(), old + change.view_as(p), atol=1e-4, rtol=1e-4)
        else:
            torch.testing.assert_close(p, copy)


def test_muons_steps_may_be_larger(
    parameters: list[nn.Parameter], make: Callable[..., Optimizer]
) -> None:
    copies = [nn.Parameter(p.detach().clone()) for p in parameters]
    before = [p.detach().clone() for p in parameters]
    for some, muon_step in ((parameters, 0.2), (copies, 0.6)):
        optimizer = make(some, 0.1, muon=True, muon_step=muon_step)
        give_gradients(some, seed=1)
        optimizer.step()
    for p, copy, old in zip(parameters, copies, before, strict=True):
        factor = 3 if is_muons(p) else 1
        torch.testing.assert_close(copy - old, factor * (p - old))


def test_steps_of_both_have_about_one_size(
    parameters: list[nn.Parameter], make: Callable[..., Optimizer]
) -> None:
    before = [p.detach().clone() for p in parameters]
    optimizer = make(parameters, 0.1, muon=True)
    for seed in range(30):
        give_gradients(parameters, seed)
        optimizer.step()
    pairs = list(zip(parameters, before, strict=True))
    moved = {
        muon: torch.cat([(p - old).flatten() for p, old in pairs if is_muons(p) is muon])
        for muon in (True, False)
    }
    ratio = moved[True].square().mean().sqrt() / moved[False].square().mean().sqrt()
    assert 0.3 < ratio < 3


def test_momentum_remembers_earlier_gradients(
    parameters: list[nn.Parameter], make: Callable[..., Optimizer]
) -> None:
    optimizer = make(parameters, 0.1, muon=True)
    give_gradients(parameters, seed=1)
    optimizer.step()
    before = parameters[0].detach().clone()
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert (parameters[0] - before).norm() > 0.01


def test_what_has_no_gradient_stays(
    parameters: list[nn.Parameter], make: Callable[..., Optimizer]
) -> None:
    optimizer = make(parameters, 0.1, muon=True)
    give_gradients(parameters, seed=1)
    optimizer.zero_grad()
    assert all(p.grad is None for p in parameters)
    before = [p.detach().clone() for p in parameters]
    optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(parameters, before, strict=True))


def test_weights_of_both_decay(parameters: list[nn.Parameter], make: Callable[..., Optimizer]) -> None:
    before = [p.detach().clone() for p in parameters]
    optimizer = make(parameters, 0.1, weight_decay=0.5, muon=True)
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for p, old in zip(parameters, before, strict=True):
        torch.testing.assert_close(p.detach(), 0.95 * old)


def test_a_set_rate_is_that_of_both(
    parameters: list[nn.Parameter], make: Callable[..., Optimizer]
) -> None:
    before = [p.detach().clone() for p in parameters]
    optimizer = make(parameters, 0.1, muon=True)
    optimizer.set_rate(0.0)
    give_gradients(parameters, seed=1)
    optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(parameters, before, strict=True))
    optimizer.set_rate(0.01)
    optimizer.step()
    assert not any(torch.equal(p, old) for p, old in zip(parameters, before, strict=True))


def test_matrices_alone_need_no_adam(make: Callable[..., Optimizer]) -> None:
    matrix = nn.Parameter(torch.eye(16))
    optimizer = make([matrix], 0.1, muon=True)
    matrix.grad = torch.eye(16)
    optimizer.step()
    assert not torch.equal(matrix, torch.eye(16))
    assert list(optimizer.state()) == ["muon.0"]


def test_gradients_are_clipped_together(
    parameters: list[nn.Parameter], make: Callable[..., Optimizer]
) -> None:
    optimizer = make(parameters, 0.1, muon=True)
    give_gradients(parameters, seed=1)
    grads = [p.grad.clone() for p in parameters if p.grad is not None]
    norm = torch.cat([grad.flatten() for grad in grads]).norm()
    torch.testing.assert_close(optimizer.step(clip=0.5), norm)
    state = optimizer.state()
    torch.testing.assert_close(state["adam.1.mean"], 0.1 * grads[1] * 0.5 / norm)
    torch.testing.assert_close(state["muon.3"], 0.05 * grads[3] * 0.5 / norm)
    give_gradients(parameters, seed=1)
    optimizer.step(clip=1e9)
    torch.testing.assert_close(state["adam.1.mean"], 0.1 * grads[1] * (0.45 / norm + 1))


def test_another_optimizer_goes_on_with_its_state(
    parameters: list[nn.Parameter], make: Callable[..., Optimizer]
) -> None:
    copies = [nn.Parameter(torch.zeros_like(p)) for p in parameters]
    first, second = (make(some, 0.1, 0.3, muon=True) for some in (parameters, copies))
    give_gradients(parameters, seed=0)
    first.step(clip=3.0)
    pairs = [*zip(parameters, copies, strict=True)]
    pairs += [(first.state()[name], value) for name, value in second.state().items()]
    for one, other in pairs:
        other.detach().copy_(one.detach())
    for seed in range(1, 4):
        for some, optimizer in ((parameters, first), (copies, second)):
            give_gradients(some, seed)
            some[1].grad = None  # counts as 0, whatever its moments are
            optimizer.step(clip=3.0)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_a_gradient_that_is_not_finite_leaves_no_trace(
    parameters: list[nn.Parameter], make: Callable[..., Optimizer]
) -> None:
    optimizer = make(parameters, 0.1, muon=True)
    tensors = [*(p.detach() for p in parameters), *optimizer.state().values()]
    before = [tensor.clone() for tensor in tensors]
    give_gradients(parameters, seed=1)
    parameters[1].grad = torch.full((3,), torch.nan)
    assert optimizer.step(clip=1.0).isnan()
    for tensor, old in zip(tensors, before, strict=True):
        tensor.copy_(old)
    give_gradients(parameters, seed=1)
    assert optimizer.step(clip=1.0).isfinite()
    assert all(p.isfinite().all() for p in parameters)


def test_parameters_of_several_types(make: Callable[..., Optimizer]) -> None:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2).double())]
    optimizer = make(parameters, 0.1)
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    torch.testing.assert_close(parameters[1].detach(), torch.full((2,), -0.1).double())
    torch.testing.assert_close(parameters[0].detach(), torch.full((2,), -0.1))

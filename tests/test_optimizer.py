"""The optimiser: Adam as torch has it, and Muon."""

import pytest
import torch
from torch import Tensor, nn

from ciflows.training.optimizer import ADAM_SHARE, Optimizer, orthogonalised


@pytest.fixture
def parameters() -> list[nn.Parameter]:
    shapes = [(20, 20), (3,), (16, 40), (20, 20), (2, 20), ()]
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def is_muons(p: Tensor) -> bool:
    return p.ndim == 2 and min(p.shape) >= 16


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


def test_without_muon_it_is_torchs_adam(parameters: list[nn.Parameter]) -> None:
    copies = [nn.Parameter(p.detach().clone()) for p in parameters]
    ours = Optimizer(parameters, 0.1, weight_decay=0.3)
    theirs = torch.optim.AdamW(copies, lr=0.1, weight_decay=0.3)
    for seed in range(3):
        for some in (parameters, copies):
            give_gradients(some, seed)
        ours.step()
        theirs.step()
    for p, copy in zip(parameters, copies, strict=True):
        torch.testing.assert_close(p, copy)


def test_muon_has_the_matrices_and_adam_the_rest(parameters: list[nn.Parameter]) -> None:
    copies = [nn.Parameter(p.detach().clone()) for p in parameters]
    before = [p.detach().clone() for p in parameters]
    ours, adam = Optimizer(parameters, 0.1, muon=True), Optimizer(copies, 0.1)
    for some, optimizer in ((parameters, ours), (copies, adam)):
        give_gradients(some, seed=1)
        optimizer.step()
    for p, copy, old in zip(parameters, copies, before, strict=True):
        if is_muons(p):
            assert p.grad is not None
            size = 0.1 * ADAM_SHARE * max(p.shape) ** 0.5
            expected = old - size * orthogonalised(p.grad[None])[0]  # the momentum has its direction
            torch.testing.assert_close(p.detach(), expected, atol=1e-4, rtol=1e-4)
        else:
            torch.testing.assert_close(p, copy)


def test_steps_of_both_have_about_one_size(parameters: list[nn.Parameter]) -> None:
    before = [p.detach().clone() for p in parameters]
    optimizer = Optimizer(parameters, 0.1, muon=True)
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


def test_momentum_remembers_earlier_gradients(parameters: list[nn.Parameter]) -> None:
    optimizer = Optimizer(parameters, 0.1, muon=True)
    give_gradients(parameters, seed=1)
    optimizer.step()
    before = parameters[0].detach().clone()
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert (parameters[0] - before).norm() > 0.01


def test_what_has_no_gradient_stays(parameters: list[nn.Parameter]) -> None:
    optimizer = Optimizer(parameters, 0.1, muon=True)
    give_gradients(parameters, seed=1)
    optimizer.zero_grad()
    assert all(p.grad is None for p in parameters)
    before = [p.detach().clone() for p in parameters]
    optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(parameters, before, strict=True))


def test_weights_of_both_decay(parameters: list[nn.Parameter]) -> None:
    before = [p.detach().clone() for p in parameters]
    optimizer = Optimizer(parameters, 0.1, weight_decay=0.5, muon=True)
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for p, old in zip(parameters, before, strict=True):
        torch.testing.assert_close(p.detach(), 0.95 * old)


def test_a_set_rate_is_that_of_both(parameters: list[nn.Parameter]) -> None:
    before = [p.detach().clone() for p in parameters]
    optimizer = Optimizer(parameters, 0.1, muon=True)
    optimizer.set_rate(0.0)
    give_gradients(parameters, seed=1)
    optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(parameters, before, strict=True))
    optimizer.set_rate(0.01)
    optimizer.step()
    assert not any(torch.equal(p, old) for p, old in zip(parameters, before, strict=True))


def test_matrices_alone_need_no_adam() -> None:
    matrix = nn.Parameter(torch.eye(16))
    optimizer = Optimizer([matrix], 0.1, muon=True)
    matrix.grad = torch.eye(16)
    optimizer.step()
    assert not torch.equal(matrix, torch.eye(16))
    assert list(optimizer.state()) == ["muon.0"]

"""The GPU's kernels against the plain versions of the same networks.

They run on a GPU; and, slowly, anywhere that triton is installed, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ciflows import kernels
from ciflows.networks import MLP, LipschitzMLP

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytestmark = pytest.mark.skipif(
    not kernels.INSTALLED or not (torch.cuda.is_available() or INTERPRETED),
    reason="needs triton, and CUDA or TRITON_INTERPRET=1",
)


def results(run: Callable[[], tuple[Tensor, ...]], inputs: list[Tensor]) -> list[Tensor]:
    """Values, and the gradient of their sum with unequal weights in all inputs."""
    values = run()
    weights = [torch.linspace(-1, 1, value.numel(), device=DEVICE).view_as(value) for value in values]
    loss = sum((value * weight).sum() for value, weight in zip(values, weights, strict=True))
    return [*values, *torch.autograd.grad(loss, inputs)]


def check(
    run: Callable[[], tuple[Tensor, ...]], inputs: list[Tensor], patch: pytest.MonkeyPatch
) -> None:
    used = []

    def fits(*_: object) -> bool:
        used.append(True)
        return True

    torch.set_float32_matmul_precision("highest")
    patch.setattr(kernels, "fits", lambda *_: False)
    plain = results(run, inputs)
    patch.setattr(kernels, "fits", fits)
    fused = results(run, inputs)
    assert used
    for expected, value in zip(plain, fused, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize(
    ("features", "hidden", "leading"),
    [(2, [32, 32, 32, 32], (37,)), (6, [50, 50], (2, 20)), (17, [32, 32, 32], (5,))],
)
def test_a_lipschitz_network_and_its_jacobian(
    features: int, hidden: list[int], leading: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    network = LipschitzMLP(features, hidden, last_std=0.5).to(DEVICE)
    x = torch.randn(*leading, features, device=DEVICE, requires_grad=True)
    directions = torch.eye(features, device=DEVICE).reshape(features, *[1] * len(leading), features)
    directions = directions.expand(features, *leading, features)
    check(lambda: network(x, directions), [x, *network.parameters()], monkeypatch)


@pytest.mark.parametrize(
    ("sizes", "leading"), [((2, 4, [10, 10]), (37,)), ((1, 2, [64, 64, 64]), (3, 5))]
)
def test_a_perceptron(
    sizes: tuple[int, int, list[int]], leading: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    network = MLP(*sizes).to(DEVICE)
    x = torch.randn(*leading, sizes[0], device=DEVICE, requires_grad=True)
    check(lambda: (network(x),), [x, *network.parameters()], monkeypatch)


@pytest.mark.parametrize("sizes", [(2, 256, 256, 2), (2, 32, 64, 2), (65, 32, 32, 65), (2, 32, 2)])
def test_other_sizes_are_left_to_torch(sizes: tuple[int, ...]) -> None:
    assert not kernels.fits(torch.zeros(3, sizes[0], device=DEVICE), sizes)

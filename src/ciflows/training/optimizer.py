"""How weights take their steps: all with Adam, or the matrices inside networks with Muon."""

from __future__ import annotations

__all__ = ["Optimizer", "orthogonalised"]

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ciflows.groups import grouped

MOMENTUM = 0.95
ADAM_SHARE = 0.2  # root mean square of Adam's steps, about, in units of its rate
LEAST_SIDE = 16
TINY = 1e-12


class Optimizer:
    """Adam; and Muon for matrices, where it is asked for.

    Muon (Jordan et al., 2024) makes the momentum of a matrix orthogonal before it is taken off: of all
    steps of one spectral norm that is the steepest, and no direction has to wait for the leading ones.
    So it suits networks whose spectral norms are bounded. Its steps are given the size of Adam's (Liu et
    al., 2025), so that one learning rate serves both. Matrices of one shape take theirs together.

    Arguments:
        parameters: What is trained.
        rate: The learning rate at the start.
        weight_decay: Share of each weight that is taken off at a step, times the learning rate.
        muon: Whether matrices of at least 16 rows and columns are Muon's.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        rate: float,
        weight_decay: float = 0.0,
        muon: bool = False,
    ) -> None:
        self.parameters = parameters
        self.weight_decay = weight_decay
        device = parameters[0].device
        matrices = [p for p in parameters if muon and p.ndim == 2 and min(p.shape) >= LEAST_SIDE]
        self.matrices = grouped(matrices, lambda p: p.shape)
        self.momenta = [some[0].new_zeros(len(some), *some[0].shape) for some in self.matrices]
        held = {id(p) for p in matrices}
        self.others = [p for p in parameters if id(p) not in held]
        self.adam = torch.optim.AdamW(
            # large ones share kernels, and do not wait in turn
            [{"params": sorted(self.others, key=torch.numel)}],
            lr=torch.tensor(rate, device=device),
            weight_decay=weight_decay,
            fused=True,
            capturable=device.type == "cuda",
        )
        self.rate: Tensor = self.adam.param_groups[0]["lr"]
        for p in self.others:  # made here, not at the first step, so that they can be restored
            self.adam.state[p] = {
                "step": torch.zeros((), device=device),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }

    def state(self) -> dict[str, Tensor]:
        """What a step changes beside the parameters, by name."""
        adam = {
            f"adam.{index}.{name}": value
            for index, p in enumerate(self.others)
            for name, value in self.adam.state[p].items()
        }
        return adam | {f"muon.{index}": value for index, value in enumerate(self.momenta)}

    def set_rate(self, rate: float) -> None:
        self.rate.fill_(rate)

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        self.adam.step()
        for matrices, momentum in zip(self.matrices, self.momenta, strict=True):
            grad = torch.stack([torch.zeros_like(p) if p.grad is None else p.grad for p in matrices])
            momentum.lerp_(grad, 1 - MOMENTUM)
            size = ADAM_SHARE * max(momentum.shape[1:]) ** 0.5
            change = orthogonalised(grad.lerp(momentum, MOMENTUM)) * (-size * self.rate)
            values = [p.detach() for p in matrices]
            if self.weight_decay:
                torch._foreach_mul_(values, 1 - self.rate * self.weight_decay)
            torch._foreach_add_(values, list(change.unbind()))


def orthogonalised(matrices: Tensor) -> Tensor:
    """Matrices (n, rows, columns) with singular values brought near 1, and with the vectors they had.

    Five steps of a Newton-Schulz iteration with the coefficients of Jordan et al.: all but the smallest
    singular values end between 0.7 and 1.2, which is near enough for a step, and quick.
    """
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + TINY)
    for _ in range(5):
        gram = x @ x.mT
        gram = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, gram, x, beta=3.4445)
    return x.mT if tall else x

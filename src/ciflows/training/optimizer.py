"""How weights take their steps: all with Adam, or the matrices inside networks with Muon."""

from __future__ import annotations

__all__ = ["Optimizer", "orthogonalised"]

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from ciflows.groups import grouped

MOMENTUM = 0.95
ADAM_SHARE = 0.2  # root mean square of Adam's steps, about, in units of its rate
LEAST_SIDE = 16
TINY = 1e-12
ALIGNMENT = 64  # numbers in a row: each tensor begins at a multiple of this, as kernels like it


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
        in_a_row: Whether parameters move into one piece of memory, where a GPU gives all of them their
            step at once; apart, hundreds of small ones keep it waiting. (`spread` undoes it.)
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        rate: float,
        weight_decay: float = 0.0,
        muon: bool = False,
        in_a_row: bool = False,
    ) -> None:
        self.parameters = parameters
        self.weight_decay = weight_decay
        matrices = [p for p in parameters if muon and p.ndim == 2 and min(p.shape) >= LEAST_SIDE]
        self.matrices = grouped(matrices, lambda p: p.shape)
        self.momenta = [some[0].new_zeros(len(some), *some[0].shape) for some in self.matrices]
        held = {id(p) for p in matrices}
        self.others = [p for p in parameters if id(p) not in held]
        alike = len({p.dtype for p in parameters}) == 1
        self.row = _Row(self.others, self.matrices) if in_a_row and alike and self.others else None
        adams = self.others if self.row is None else [self.row.others]
        self.adam = _Adam(adams, weight_decay)
        self.rate = torch.tensor(rate, device=parameters[0].device)

    def state(self) -> dict[str, Tensor]:
        """What a step changes beside the parameters, by name; the same names in a row and apart."""
        if self.row is None:
            moments = self.adam.moments
        else:
            step, *rows = self.adam.moments[0].values()
            parts = zip(*(_cut(row, self.others) for row in rows), strict=True)
            moments = [{"step": step, "exp_avg": m, "exp_avg_sq": v} for m, v in parts]
        adam = {
            f"adam.{i}.{name}": value for i, each in enumerate(moments) for name, value in each.items()
        }
        return adam | {f"muon.{index}": value for index, value in enumerate(self.momenta)}

    def set_rate(self, rate: float) -> None:
        self.rate.fill_(rate)

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.grad = None

    @torch.no_grad()
    def step(self, clip: float = math.inf) -> Tensor:
        """Take a step with gradients of this norm at most; what norm they had (). None counts as 0."""
        for p in self.parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        if self.row is None:
            norm = torch.nn.utils.clip_grad_norm_(self.parameters, clip)
            grads = [torch.stack([cast(Tensor, p.grad) for p in some]) for some in self.matrices]
        else:
            norm, grads = self.row.gather(clip), self.row.grads
        self.adam.step(self.rate)
        for matrices, grad, momentum in zip(self.matrices, grads, self.momenta, strict=True):
            momentum.lerp_(grad, 1 - MOMENTUM)
            size = ADAM_SHARE * max(momentum.shape[1:]) ** 0.5
            change = orthogonalised(grad.lerp(momentum, MOMENTUM)) * (-size * self.rate)
            values = [p.detach() for p in matrices]
            if self.weight_decay:
                torch._foreach_mul_(values, 1 - self.rate * self.weight_decay)
            torch._foreach_add_(values, list(change.unbind()))
        return norm

    def spread(self) -> None:
        """Give each parameter memory of its own again, for a life without this optimiser."""
        if self.row is not None:
            for p in self.parameters:
                p.data = p.detach().clone()


class _Adam:
    """`torch.optim.AdamW` with its defaults, to the last bit: the kernel that it calls, and its state.

    (That class would first import the whole of torch's compiler, which takes longer than many steps.)
    """

    def __init__(self, parameters: Sequence[nn.Parameter], weight_decay: float) -> None:
        self.weight_decay = weight_decay
        self.moments = [
            {
                "step": torch.zeros((), device=p.device),
                "exp_avg": torch.zeros_like(p, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(p, requires_grad=False),
            }
            for p in parameters
        ]
        pairs = zip(parameters, self.moments, strict=True)
        each = [(p, *moments.values()) for p, moments in pairs]
        alike = grouped(each, lambda tensors: tensors[0].dtype)
        self.groups = [tuple(zip(*some, strict=True)) for some in alike]

    def step(self, rate: Tensor) -> None:
        for values, steps, means, squares in self.groups:
            grads = [cast(Tensor, p.grad) for p in values]
            torch._foreach_add_(steps, 1)
            torch._fused_adamw_(
                values, grads, means, squares, [], steps, lr=rate, beta1=0.9, beta2=0.999, eps=1e-8,
                weight_decay=self.weight_decay, amsgrad=False, maximize=False,
            )  # fmt: skip


class _Row:
    """Parameters in one row of numbers, and their gradients in another.

    Arguments:
        others: Parameters that come first, and take their step together.
        matrices: Groups of matrices of one shape.

    Attributes:
        others: The first part of the row, with its gradient.
        grads: The gradients of each group (matrices, rows, columns).
    """

    def __init__(
        self, others: Sequence[nn.Parameter], matrices: Sequence[Sequence[nn.Parameter]]
    ) -> None:
        self.parameters = [*others, *(p for some in matrices for p in some)]
        total = sum(map(_room, self.parameters))
        values = self.parameters[0].new_zeros(total)
        for p, place in zip(self.parameters, _cut(values, self.parameters), strict=True):
            place.copy_(p.detach())
            p.data = place
        self.gradient = torch.zeros_like(values)
        self.places = _cut(self.gradient, self.parameters)
        start = sum(map(_room, others))
        self.others = nn.Parameter(values[:start])
        self.others.grad = self.gradient[:start]
        self.grads = []
        for some in matrices:
            shape, room = some[0].shape, _room(some[0])
            end = start + len(some) * room
            each = self.gradient[start:end].view(len(some), room)[:, : some[0].numel()]
            self.grads.append(each.unflatten(1, shape))
            start = end

    def gather(self, clip: float) -> Tensor:
        """Bring the gradients of all parameters here, to this norm at most; what norm they had ()."""
        self.gradient.zero_()  # between parameters too, where one that was not finite left its mark
        torch._foreach_copy_(self.places, [cast(Tensor, p.grad) for p in self.parameters])
        norm = self.gradient.norm()
        self.gradient.mul_((clip / (norm + TINY)).clamp(max=1.0))
        return norm


def _room(p: Tensor) -> int:
    return math.ceil(p.numel() / ALIGNMENT) * ALIGNMENT


def _cut(row: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """What of a row belongs to each of the tensors that stand in it first, with their shapes."""
    parts = row[: sum(map(_room, like))].split([_room(p) for p in like])
    return [part[: p.numel()].view(p.shape) for part, p in zip(parts, like, strict=True)]


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

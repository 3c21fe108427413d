"""How weights take their steps: all with Adam, or the matrices inside networks with Muon."""

from __future__ import annotations

__all__ = ["Adam", "Optimizer", "gradients", "orthogonalised"]

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from ciflows.core.groups import grouped

BETAS = 0.9, 0.999
EPSILON = 1e-8
MOMENTUM = 0.95
ADAM_SHARE = 0.2  # root mean square of Adam's steps, about, in units of its rate
LEAST_SIDE = 16
TINY = 1e-12


class Optimizer:
    """Adam; and Muon for matrices, if you ask for it.

    Muon (Jordan et al., 2024) makes the momentum of a matrix orthogonal before the step: of all steps of
    one spectral norm that is the steepest, and no direction has to wait for the leading ones. So it
    suits networks whose spectral norms are bounded. By default its steps have the size of Adam's (Liu
    et al., 2025), so that one learning rate serves both. Matrices of one shape take their steps
    together; those of a convolution have a row for each channel that comes out.

    Arguments:
        weight_decay: Share of each weight that a step removes, times the learning rate.
        muon: Whether matrices of at least 16 rows and columns are Muon's.
        muon_step: Root mean square of a step of Muon's, in units of the learning rate.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        rate: float,
        weight_decay: float = 0.0,
        muon: bool = False,
        muon_step: float = ADAM_SHARE,
    ) -> None:
        self.parameters = parameters
        self.weight_decay, self.muon_step = weight_decay, muon_step
        matrices = [p for p in parameters if muon and p.ndim > 1 and min(_rows(p).shape) >= LEAST_SIDE]
        self.matrices = grouped(matrices, lambda p: p.shape)
        self.momenta = [some[0].new_zeros(len(some), *_rows(some[0]).shape) for some in self.matrices]
        held = {id(p) for p in matrices}
        others = [p for p in parameters if id(p) not in held]
        self.places = {id(p): place for place, p in enumerate(parameters)}
        self.others = grouped(others, lambda p: p.dtype)
        self.adams = [Adam(self._pack(some), weight_decay) for some in self.others]
        self.rate = torch.tensor(rate, device=parameters[0].device)

    def state(self) -> dict[str, Tensor]:
        """What a step changes beside the parameters, by name."""
        pairs = [zip(*pair, strict=True) for pair in zip(self.matrices, self.momenta, strict=True)]
        state = {f"muon.{self.places[id(p)]}": momentum for some in pairs for p, momentum in some}
        for some, adam in zip(self.others, self.adams, strict=True):
            for p, *moments in zip(some, *self._moments(some, adam), strict=True):
                names = (f"adam.{self.places[id(p)]}.{name}" for name in ("step", "mean", "square"))
                state |= zip(names, moments, strict=True)
        return state

    def set_rate(self, rate: float) -> None:
        self.rate.fill_(rate)

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.grad = None

    @torch.no_grad()
    def step(self, clip: float = math.inf) -> Tensor:
        """Take a step with gradients clipped to this norm; their norm before (). None counts as 0."""
        for p in self.parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        norm, rows, stacks = self._gather(clip)
        for some, adam, grads in zip(self.others, self.adams, rows, strict=True):
            self._step_adam(some, adam, grads)
        for matrices, momentum, grad in zip(self.matrices, self.momenta, stacks, strict=True):
            momentum.lerp_(grad, 1 - MOMENTUM)
            size = self.muon_step * max(momentum.shape[1:]) ** 0.5
            change = orthogonalised(grad.lerp(momentum, MOMENTUM)) * (-size * self.rate)
            values = [p.detach() for p in matrices]
            if self.weight_decay:
                torch._foreach_mul_(values, 1 - self.rate * self.weight_decay)
            torch._foreach_add_(values, list(change.view(-1, *values[0].shape).unbind()))
        return norm

    def _pack(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors as Adam gets them."""
        return [*tensors]

    def _moments(self, some: Sequence[Tensor], adam: Adam) -> tuple[list[Tensor], ...]:
        """Adam's counts, means and squares of these parameters."""
        return adam.counts, adam.means, adam.squares

    def _gather(self, clip: float) -> tuple[Tensor, list[list[Tensor]], list[Tensor]]:
        """The gradients' norm; the clipped gradients, packed for Adam; those of Muon's matrices."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, clip)
        return norm, [self._pack(gradients(some)) for some in self.others], self._stack()

    def _stack(self) -> list[Tensor]:
        return [torch.stack([_rows(grad) for grad in gradients(some)]) for some in self.matrices]

    def _step_adam(self, some: Sequence[Tensor], adam: Adam, grads: list[Tensor]) -> None:
        adam.step([*some], grads, self.rate)


def _rows(tensor: Tensor) -> Tensor:
    """A weight as a matrix, with a row for each feature or channel that comes out."""
    return tensor.flatten(1)


def gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Their gradients, of which none is None."""
    return [cast(Tensor, p.grad) for p in parameters]


class Adam:
    """`torch.optim.AdamW` with its defaults, for tensors of one type.

    That class imports torch's compiler, which takes a second: longer than a small model's first step. So
    this calls the kernel that it calls; if a release of torch lacks it, plain operations run.
    """

    def __init__(self, values: Sequence[Tensor], weight_decay: float) -> None:
        self.weight_decay = weight_decay
        self.counts = [torch.zeros((), device=value.device) for value in values]
        self.means = [torch.zeros_like(value, requires_grad=False) for value in values]
        self.squares = [torch.zeros_like(value, requires_grad=False) for value in values]

    def step(self, values: list[Tensor], grads: list[Tensor], rate: Tensor) -> None:
        torch._foreach_add_(self.counts, 1)
        if hasattr(torch, "_fused_adamw_"):
            torch._fused_adamw_(
                values, grads, self.means, self.squares, [], self.counts, lr=rate,
                beta1=BETAS[0], beta2=BETAS[1], eps=EPSILON, weight_decay=self.weight_decay,
                amsgrad=False, maximize=False,
            )  # fmt: skip
            return
        parts = zip(values, grads, self.means, self.squares, self.counts, strict=True)
        for value, grad, mean, square, count in parts:
            shrunk, shrunk_square = (1 - beta ** count.double() for beta in BETAS)
            mean.lerp_(grad, 1 - BETAS[0])
            square.lerp_(grad.square(), 1 - BETAS[1])
            value.mul_(1 - rate * self.weight_decay)
            value.sub_(rate / shrunk * mean / (square / shrunk_square).sqrt().add_(EPSILON))


def orthogonalised(matrices: Tensor) -> Tensor:
    """Matrices (n, rows, columns) with singular values near 1, and the same singular vectors.

    Five steps of a Newton-Schulz iteration with the coefficients of Jordan et al.: all but the smallest
    singular values end between 0.7 and 1.2, which is enough for a step, and quick.
    """
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + TINY)
    for _ in range(5):
        gram = x @ x.mT
        gram = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, gram, x, beta=3.4445)
    return x.mT if tall else x

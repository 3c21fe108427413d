"""Log-determinants log|det(I + J)| of residual blocks x + g(x), J = Dg(x): exact, and estimated.

Both need of g only the products J v that it carries along with its value (networks/lipschitz.py).
"""

from __future__ import annotations

__all__ = ["Exact", "LogDet", "Roulette", "with_jacobian"]

from typing import Protocol

import torch
from torch import Tensor, nn

from ciflows.noise import Noise

ELIMINATION_LIMIT = 16


class LogDet(Protocol):
    """A way to get g(x) (*, d) together with log|det(I + Dg(x))| (*)."""

    @property
    def noisy(self) -> bool:
        """Whether the values are random estimates."""
        ...

    def __call__(
        self, network: nn.Module, x: Tensor, context: Tensor | None, noise: Noise
    ) -> tuple[Tensor, Tensor]: ...


class Exact:
    """The determinant of the whole Jacobian, from d products; for d up to about a hundred."""

    noisy = False

    def __call__(
        self, network: nn.Module, x: Tensor, context: Tensor | None, noise: Noise
    ) -> tuple[Tensor, Tensor]:
        g, matrix = with_jacobian(network, x, context)
        return g, log_det(matrix)


class Roulette:
    """The power series Σ (-1)^(k+1) tr(J^k) / k, cut off at random without bias (Chen et al., 2019).

    The first `exact_terms` terms are always computed; further ones with a geometric number, each
    divided by the probability of being reached; traces by one Gaussian probe v, E[vᵀ A v] = tr A.

    Gradients come from the Neumann series of the same terms, d log det = Σ (-1)^j tr(dJ J^j): all powers
    J^j v are taken without a graph, and one product J w is differentiated, so memory does not grow with
    the terms. Each row's gradient is its own, so that rows may be weighted differently.

    Arguments:
        exact_terms: Number of terms always computed (the paper: 2 in training, 20 in testing).
        p: Parameter of the geometric distribution.
    """

    noisy = True

    def __init__(self, exact_terms: int = 2, p: float = 0.5) -> None:
        self.exact_terms = exact_terms
        self.p = p

    def __call__(
        self, network: nn.Module, x: Tensor, context: Tensor | None, noise: Noise
    ) -> tuple[Tensor, Tensor]:
        probe = noise.normal(x.shape, like=x)
        terms = self.exact_terms + noise.geometric(self.p)
        value, series, power = x.new_zeros(()), torch.zeros_like(x), probe
        with torch.no_grad():
            for k in range(1, terms + 1):
                coefficient = (-1) ** (k + 1) / self._survival(k)
                series = series + coefficient * power
                power = network(x, power[None], context)[1][0]
                value = value + coefficient / k * (probe * power).sum(-1)
        g, products = network(x, series[None], context)
        slope = (probe * products[0]).sum(-1)
        return g, value + (slope - slope.detach())

    def _survival(self, k: int) -> float:
        """P(term k is computed): 1 up to the first random one, then falling geometrically."""
        return float((1 - self.p) ** max(0, k - self.exact_terms - 1))


def with_jacobian(network: nn.Module, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
    """g(x) (*, d) and the Jacobian I + J of x + g(x), as (d, *, d) with the inputs first."""
    d = x.shape[-1]
    identity = torch.eye(d, dtype=x.dtype, device=x.device).reshape(d, *[1] * (x.ndim - 1), d)
    g, jacobian = network(x, identity.expand(d, *x.shape), context)
    return g, identity + jacobian


def log_det(matrix: Tensor) -> Tensor:
    """log det A (*) for A (d, *, d), rows first, near the identity: no pivots, so it can be captured.

    Each step takes out one row and column and leaves the Schur complement of the rest.
    """
    if matrix.shape[-1] > ELIMINATION_LIMIT:
        return torch.linalg.slogdet(matrix.movedim(0, -2)).logabsdet
    total = matrix.new_zeros(())
    while True:
        pivot = matrix[0, ..., 0]
        total = total + pivot.abs().log()
        if len(matrix) == 1:
            return total
        ratio = matrix[1:, ..., 0] / pivot
        matrix = matrix[1:, ..., 1:] - ratio[..., None] * matrix[0, ..., 1:]

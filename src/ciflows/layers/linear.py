"""Linear maps: permutations, and matrices in triangular factors."""

from __future__ import annotations

__all__ = ["LULinear", "Permutation"]


import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ciflows.core.hook import replaceable
from ciflows.core.layer import Bijection, check_order
from ciflows.core.noise import Noise


class Permutation(Bijection):
    """z_i = x_{order_i}, for a fixed order of the features.

    Arguments:
        order: Each of 0, ..., features - 1 once: (features,); `torch.randperm` makes a random one.

    Example:
        >>> layer = Permutation(torch.tensor([2, 0, 1]))
        >>> layer.encode(torch.tensor([10.0, 11.0, 12.0]))[0]
        tensor([12., 10., 11.])
    """

    def __init__(self, order: Tensor) -> None:
        check_order(order, "Permutation")
        super().__init__(tuple(order.shape))
        self.order = nn.Buffer(order.long().clone())

    def _encode(self, x: Tensor, context: Tensor | None, noise: Noise) -> tuple[Tensor, Tensor]:
        return x.index_select(-1, self.order), x.new_zeros(x.shape[:-1])

    def _decode(self, z: Tensor, context: Tensor | None, noise: Noise) -> Tensor:
        return torch.zeros_like(z).index_copy(-1, self.order, z)


class LULinear(Bijection):
    """z = L U x + b, with L unit lower and U upper triangular (Oliva et al., 2018).

    The diagonal of U is the exponential of a parameter, so that log_det is this parameter's sum and no
    determinant is computed. Starts as the identity.

    Example:
        >>> layer = LULinear(6)
        >>> sum(p.numel() for p in layer.parameters())
        42
    """

    pure = ("_encode",)

    def __init__(self, features: int) -> None:
        super().__init__((features,))
        below = features * (features - 1) // 2
        self.lower = nn.Parameter(torch.zeros(below))
        self.upper = nn.Parameter(torch.zeros(below))
        self.log_diagonal = nn.Parameter(torch.zeros(features))
        self.bias = nn.Parameter(torch.zeros(features))
        rows, columns = torch.tril_indices(features, features, offset=-1)
        self.rows = nn.Buffer(rows, persistent=False)
        self.columns = nn.Buffer(columns, persistent=False)

    def _encode(self, x: Tensor, context: Tensor | None, noise: Noise) -> tuple[Tensor, Tensor]:
        return F.linear(x, self.product(), self.bias), self.log_diagonal.sum().expand(x.shape[:-1])

    def _decode(self, z: Tensor, context: Tensor | None, noise: Noise) -> Tensor:
        lower, upper = self.factors()
        # points are rows: z - b = x Uᵀ Lᵀ
        rows = (z - self.bias).reshape(-1, *self.shape)
        rows = torch.linalg.solve_triangular(lower.mT, rows, upper=True, left=False, unitriangular=True)
        rows = torch.linalg.solve_triangular(upper.mT, rows, upper=False, left=False)
        return rows.reshape(z.shape)

    @replaceable
    def product(self) -> Tensor:
        """L U (features, features)."""
        lower, upper = self.factors()
        return lower @ upper

    def factors(self) -> tuple[Tensor, Tensor]:
        """L and U (features, features)."""
        diagonal = torch.exp(self.log_diagonal)
        lower, upper = torch.diag(torch.ones_like(diagonal)), torch.diag(diagonal)
        lower[self.rows, self.columns] = self.lower
        upper[self.columns, self.rows] = self.upper
        return lower, upper

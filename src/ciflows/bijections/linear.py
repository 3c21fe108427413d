"""Linear maps: permutations, matrices in triangular factors, and the same for the channels of images."""

from __future__ import annotations

__all__ = ["InvertibleConv", "LULinear", "Permutation", "lu_products"]

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ciflows.groups import grouped
from ciflows.layers import Bijection, Shape, check_order
from ciflows.noise import Noise


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
        self.order: Tensor
        self.register_buffer("order", order.long().clone())

    def _encode(self, x: Tensor, context: Tensor | None, noise: Noise) -> tuple[Tensor, Tensor]:
        return x.index_select(-1, self.order), x.new_zeros(x.shape[:-1])

    def _decode(self, z: Tensor, context: Tensor | None, noise: Noise) -> Tensor:
        return torch.zeros_like(z).index_copy(-1, self.order, z)


class LULinear(Bijection):
    """z = L U x + b, with L unit lower and U upper triangular (Oliva et al., 2018).

    The diagonal of U is the exponential of a parameter, so that log_det is this parameter's sum and no
    determinant is computed. Starts as the identity.

    Arguments:
        features: Size of x.

    Example:
        >>> layer = LULinear(6)
        >>> sum(p.numel() for p in layer.parameters())
        42
    """

    def __init__(self, features: int) -> None:
        super().__init__((features,))
        below = features * (features - 1) // 2
        self.lower = nn.Parameter(torch.zeros(below))
        self.upper = nn.Parameter(torch.zeros(below))
        self.log_diagonal = nn.Parameter(torch.zeros(features))
        self.bias = nn.Parameter(torch.zeros(features))
        self.rows: Tensor
        self.columns: Tensor
        rows, columns = torch.tril_indices(features, features, offset=-1)
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("columns", columns, persistent=False)

    @property
    def pure(self) -> tuple[str, ...]:
        return ("_encode",)

    def _encode(self, x: Tensor, context: Tensor | None, noise: Noise) -> tuple[Tensor, Tensor]:
        product: Tensor | None = self.__dict__.get("given")
        product = torch.matmul(*_factors([self]))[0] if product is None else product
        return F.linear(x, product, self.bias), self.log_diagonal.sum().expand(x.shape[:-1])

    def _decode(self, z: Tensor, context: Tensor | None, noise: Noise) -> Tensor:
        lower, upper = (factor[0] for factor in _factors([self]))
        # rows stand on the left: z - b = x Uᵀ Lᵀ
        rows = (z - self.bias).reshape(-1, *self.shape)
        rows = torch.linalg.solve_triangular(lower.mT, rows, upper=True, left=False, unitriangular=True)
        rows = torch.linalg.solve_triangular(upper.mT, rows, upper=False, left=False)
        return rows.reshape(z.shape)


def lu_products(layers: Sequence[LULinear]) -> dict[nn.Module, Tensor]:
    """L U of several layers, of all of one size at once."""
    made: dict[nn.Module, Tensor] = {}
    for some in grouped(layers, lambda layer: layer.shape):
        made |= zip(some, torch.matmul(*_factors(some)).unbind(), strict=True)
    return made


def _factors(layers: Sequence[LULinear]) -> tuple[Tensor, Tensor]:
    """L and U (layers, features, features) of layers of one size."""
    diagonals = torch.exp(torch.stack([layer.log_diagonal for layer in layers]))
    lower, upper = torch.diag_embed(torch.ones_like(diagonals)), torch.diag_embed(diagonals)
    rows, columns = layers[0].rows, layers[0].columns
    lower[:, rows, columns] = torch.stack([layer.lower for layer in layers])
    upper[:, columns, rows] = torch.stack([layer.upper for layer in layers])
    return lower, upper


class InvertibleConv(Bijection):
    """A 1×1 convolution z = L U P x + b of each pixel's channels (Kingma and Dhariwal, 2018).

    P is a fixed permutation; L and U are those of `LULinear`, the identity at the start.

    Arguments:
        shape: Shape of one x: (channels, height, width).
        order: The permutation of the channels (channels,); a random one where None.

    Example:
        >>> layer = InvertibleConv((12, 16, 16))
        >>> z, log_det = layer.encode(torch.randn(5, 12, 16, 16))
        >>> z.shape, log_det.shape
        (torch.Size([5, 12, 16, 16]), torch.Size([5]))
    """

    def __init__(self, shape: Shape, order: Tensor | None = None) -> None:
        super().__init__(shape)
        order = torch.randperm(shape[0]) if order is None else order
        if len(shape) != 3 or order.shape != (shape[0],):
            raise ValueError(
                "InvertibleConv: expected a shape (channels, height, width) and the order of as many "
                f"channels; got {tuple(shape)} and an order of shape {tuple(order.shape)}."
            )
        self.permutation = Permutation(order)
        self.linear = LULinear(shape[0])

    def _encode(self, x: Tensor, context: Tensor | None, noise: Noise) -> tuple[Tensor, Tensor]:
        pixels, _ = self.permutation.encode(x.movedim(-3, -1))
        z, log_det = self.linear.encode(pixels)
        return z.movedim(-1, -3), log_det.sum((-2, -1))

    def _decode(self, z: Tensor, context: Tensor | None, noise: Noise) -> Tensor:
        pixels = self.permutation.decode(self.linear.decode(z.movedim(-3, -1)))
        return pixels.movedim(-1, -3)

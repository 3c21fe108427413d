"""The same bits for a row in every batch, on a CPU: whatever its place and the other rows.

Three things round a row's numbers in other ways in other batches:

    products                    a BLAS has other kernels for few rows or columns, and at a tile's edge
    functions such as sigmoid   torch has a vector version, and another one for the last few numbers
    sums of transposed numbers  torch adds the last few columns up in another order

In this context products have at least ROWS rows and COLUMNS columns, such functions see whole vectors
alone, and what is summed up is contiguous. `tests/core/test_same_bits.py` looks whether that is enough.
"""

from __future__ import annotations

__all__ = ["SameBits"]

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

ROWS, COLUMNS = 64, 16
VECTORS = 32  # numbers: two vectors of the widest kind
PIECE = 2**15  # numbers that torch does not share among threads
MATMUL = {torch.matmul, Tensor.matmul, Tensor.__matmul__}
SUMS: set[Callable[..., Any]] = {
    getattr(place, name)
    for name in ("sum", "mean", "logsumexp", "softmax", "log_softmax", "cumsum", "prod")
    for place in (torch, Tensor)
} | {F.softmax, F.log_softmax}
FUNCTIONS: set[Callable[..., Any]] = {
    getattr(place, name)
    for name in ("sigmoid", "sinh", "cosh", "exp2", "logit", "logaddexp", "pow", "atan2", "hypot")
    for place in (torch, Tensor)
} | {F.softplus, F.silu, F.elu, F.gelu, F.mish, F.logsigmoid, Tensor.__pow__}


class SameBits(TorchFunctionMode):
    """A context in which each row of a batch gets the bits that it would get in any other batch.

    Example:
        >>> x, weight = torch.randn(100, 7), torch.randn(5, 7)
        >>> with SameBits():
        ...     whole, one = F.linear(x, weight), F.linear(x[41:42], weight)
        >>> torch.equal(whole[41:42], one)
        True
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not args or not isinstance(args[0], Tensor) or not args[0].is_cpu:
            return func(*args, **kwargs)
        if func is F.linear:
            return linear(*args, **kwargs)
        if func in MATMUL and args[0].ndim >= args[1].ndim > 1:
            return matmul(*args)
        if func in FUNCTIONS and args[0].is_floating_point():
            return by_vectors(func, args, kwargs)
        if func in SUMS:
            return func(args[0].contiguous(), *args[1:], **kwargs)
        return func(*args, **kwargs)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """W x + b, padded where it is small: (*, in) -> (*, out)."""
    rows, columns = x.shape[:-1].numel(), len(weight)
    flat, more = x.reshape(rows, x.shape[-1]), max(0, COLUMNS - columns)
    if rows < ROWS:
        flat = F.pad(flat, (0, 0, 0, ROWS - rows))
    if more:
        weight, bias = F.pad(weight, (0, 0, 0, more)), None if bias is None else F.pad(bias, (0, more))
    y = F.linear(flat, weight, bias)
    return y[:rows, :columns].contiguous().reshape(*x.shape[:-1], columns)


def matmul(x: Tensor, matrix: Tensor) -> Tensor:
    """x M, padded where it is small: one matrix for all rows, or one for each first index of both."""
    if matrix.ndim == 2:
        return linear(x, matrix.mT)
    matrices = matrix.expand(len(x), *matrix.shape[1:])
    return torch.stack([matmul(*each) for each in zip(x, matrices, strict=True)])


def by_vectors(func: Callable[..., Tensor], args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """A function of each number, of whole vectors of them: (*) -> (*)."""
    tensors = torch.broadcast_tensors(*(part for part in args if isinstance(part, Tensor)))
    others = [part for part in args if not isinstance(part, Tensor)]
    shape, size = tensors[0].shape, tensors[0].numel()
    flat = [part.reshape(-1) for part in tensors]
    if size % VECTORS:
        flat = [F.pad(part, (0, -size % VECTORS)) for part in flat]
    if torch.get_num_threads() == 1 or size <= PIECE:
        return func(*flat, *others, **kwargs)[:size].reshape(shape)
    pieces = zip(*(part.split(PIECE) for part in flat), strict=True)
    return torch.cat([func(*piece, *others, **kwargs) for piece in pieces])[:size].reshape(shape)

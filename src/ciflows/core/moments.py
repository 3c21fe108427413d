"""Mean and variance of a batch, of which other processes may hold the rest."""

from __future__ import annotations

__all__ = ["Gather", "batch_moments"]

from collections.abc import Callable

import torch
from torch import Tensor

# Stacks the tensors (k,) of all processes that share a batch, differentiably: (processes, k).
Gather = Callable[[Tensor], Tensor]


def batch_moments(rows: Tensor, gather: Gather | None = None) -> tuple[Tensor, Tensor, Tensor | int]:
    """Mean and variance (channels,) of rows (rows, channels, *), and how many numbers each is of.

    Of parts with n_i numbers, means m_i and variances v_i the whole has (Chan et al., 1979)

        n = Σ n_i,  m = Σ n_i m_i / n,  v = Σ n_i (v_i + (m_i - m)²) / n

    Arguments:
        gather: Stacks what all processes have of it; None if all rows are here.
    """
    channels, over = rows.shape[1], (0, *range(2, rows.ndim))
    count = rows.numel() // channels
    variance, mean = torch.var_mean(rows, over, correction=0)
    if gather is None:
        return mean, variance, count
    parts = gather(torch.cat([mean, variance, rows.new_tensor([count])]))
    means, variances, counts = parts.split([channels, channels, 1], dim=1)
    n = counts.sum()
    mean = (counts * means).sum(0) / n
    return mean, (counts * (variances + (means - mean).square())).sum(0) / n, n

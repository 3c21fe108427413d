"""How heavy the tail of importance weights is (as in PSIS; Vehtari et al., 2024).

The largest T of m weights, less the next one, are fitted by a generalised Pareto distribution

    P(excess > y) = (1 + k y / σ)^(-1/k).

Moments of order 1/k and above do not exist. Above k = 1/2 the weights have no variance; above 0.7 a
standard error that is computed from them cannot be trusted for any practical number of draws.
"""

from __future__ import annotations

__all__ = ["add_up", "pareto_k", "tail_size"]

import math

import torch
from torch import Tensor

FEWEST = 5  # a tail of fewer weights says nothing
PRIOR_DRAWS, PRIOR_K = 10, 0.5  # the fit counts as if so many more tail weights had this k
ALIKE = 2.0  # if the largest weight is below this many times the mean, no tail matters
AT_ONCE = 2**22  # numbers that one piece of the fit may hold


def add_up(values: Tensor) -> Tensor:
    """Σ over the first dimension, rounded in one way for each of the others: (k, *) -> (*).

    `Tensor.sum` rounds otherwise where there are few columns, and for columns at the edge.
    """
    while len(values) > 1:
        half = len(values) // 2
        pairs = values[:half] + values[half : 2 * half]
        values = torch.cat([pairs, values[2 * half :]]) if len(values) % 2 else pairs
    return values[0]


def tail_size(samples: int) -> int:
    """How many of the largest weights to fit: min(m / 5, 3 √m)."""
    return int(min(samples / 5, 3 * math.sqrt(samples)))


def pareto_k(largest: Tensor, log_mean: Tensor, samples: int) -> Tensor:
    """The tail's k of each row: NaN for too few draws, 0 if no weight is twice the mean.

    Arguments:
        largest: The largest log-weights of each row, largest first (at least tail_size + 1, rows).
        log_mean: The log of the mean of all of a row's weights (rows,).
        samples: Number of draws that they come from.

    Example:
        >>> tail = torch.arange(1, 402) ** -0.5  # P(w > t) is as t^-2, so that k = 1/2
        >>> k = pareto_k(torch.log(tail)[:, None], torch.tensor([-2.3]), 400)
        >>> bool(abs(k - 0.5) < 0.1)
        True
    """
    size = tail_size(samples)
    if size < FEWEST:
        return torch.full_like(log_mean, math.nan)
    peak = largest[0].clamp(min=torch.finfo(largest.dtype).min)
    weights = torch.exp((largest[: size + 1] - peak).double())
    excess = (weights[:-1] - weights[-1]).flip(0).clamp(min=1e-300)
    rows = max(1, AT_ONCE // (size * _grid_size(size)))
    k = torch.cat([_fit(part) for part in excess.flatten(1).mT.contiguous().split(rows)])
    k = k.reshape(log_mean.shape).to(log_mean.dtype)
    return torch.where(largest[0] - log_mean > math.log(ALIKE), k, 0.0)


def _grid_size(size: int) -> int:
    return 30 + int(math.sqrt(size))


def _fit(excess: Tensor) -> Tensor:
    """k of excesses (rows, T) in rising order: a mean over a grid (Zhang and Stephens, 2009)."""
    size = excess.shape[1]
    steps = torch.arange(1, _grid_size(size) + 1, device=excess.device).double()
    quartile = excess[:, int(size / 4 + 0.5) - 1, None]
    theta = 1 / excess[:, -1:] + (1 - torch.sqrt(len(steps) / (steps - 0.5))) / (3 * quartile)
    k = torch.log1p(-theta[..., None] * excess[:, None]).mean(-1)
    log_likelihood = size * (torch.log(-theta / k) - k - 1)
    best = (theta * torch.softmax(log_likelihood, -1)).sum(-1, keepdim=True)
    k = torch.log1p(-best * excess).mean(-1)
    return (size * k + PRIOR_DRAWS * PRIOR_K) / (size + PRIOR_DRAWS)

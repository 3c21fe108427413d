"""Samples that belong to the rows of a context, whatever other rows are in the batch."""

from __future__ import annotations

__all__ = ["sample_rows"]

import torch
from torch import Tensor

from ciflows.core.evaluate import rows_at_once
from ciflows.core.flow import Flow
from ciflows.core.hook import on
from ciflows.core.noise import RowNoise
from ciflows.core.precision import float32_products


@torch.no_grad()
@float32_products()
def sample_rows(
    flow: Flow, n: int, context: Tensor, seed: int | None, numbers: Tensor | None = None
) -> Tensor:
    """Draw n points for each context: (rows, context_features) -> (n, rows, *shape).

    The draws of a row depend on the seed and its context alone, so that they are the same in every
    batch, up to rounding. Rows with the same context have the same draws, unless they have numbers.

    Arguments:
        numbers: A number for each row (rows,): rows that differ in it have independent draws.

    Example:
        >>> from ciflows import build_model
        >>> flow = build_model("nsf", features=2, context_features=1, layers=1, hidden=[4]).eval()
        >>> context = torch.tensor([[0.0], [1.0], [0.0]])
        >>> x = sample_rows(flow, 5, context, seed=0)
        >>> x.shape, torch.allclose(x[:, 0], x[:, 2]), torch.allclose(x[:, 0], x[:, 1])
        (torch.Size([5, 3, 2]), True, False)
    """
    context = context.to(flow.device, flow.dtype)
    keys = context.double()
    if numbers is not None:
        keys = torch.cat([keys, numbers.to(keys)[:, None]], dim=-1)
    noise = RowNoise(seed).about(keys, (keys.shape[-1],))
    step = max(1, rows_at_once(flow.shape, flow.device) // max(1, len(context)))
    with on(flow):
        parts = [
            flow.draw((min(step, n - start), len(context)), context, noise.from_draw(start))
            for start in range(0, n, step)
        ]
    return torch.cat(parts)

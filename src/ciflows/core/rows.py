"""Rows of data, with their contexts and weights."""

from __future__ import annotations

__all__ = ["Rows"]

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ciflows.core.flow import Flow


@dataclass(frozen=True)
class Rows:
    """Points, with optional contexts and weights.

    Attributes:
        x: Points (rows, *shape).
        context: Their contexts (rows, context_features); None if the density has none.
        weight: How much each counts (rows,); None if all count the same.

    Example:
        >>> rows = Rows(torch.randn(5, 2), weight=torch.arange(5.0))
        >>> len(rows[1:3]), rows[1:3].weight
        (2, tensor([1., 2.]))
    """

    x: Tensor
    context: Tensor | None = None
    weight: Tensor | None = None

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, some: slice | Tensor) -> Rows:
        return self.map(lambda part: part[some])

    @classmethod
    def of(cls, x: Tensor | Rows) -> Rows:
        """Points alone as rows; rows as they are."""
        return x if isinstance(x, Rows) else cls(x)

    def map(self, change: Callable[[Tensor], Tensor]) -> Rows:
        """The rows with a function applied to points, contexts and weights."""
        context = None if self.context is None else change(self.context)
        return Rows(change(self.x), context, None if self.weight is None else change(self.weight))

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Rows:
        """The rows on a device, in a type."""
        return self.map(lambda part: part.to(device, dtype))

    def on(self, flow: Flow) -> Rows:
        """The same where a flow is, in the types that it takes: a table's values stay in float64."""
        rows = self.to(flow.device, flow.dtype)
        return replace(rows, x=self.x.to(flow.device, flow.input_dtype))

    def clone(self) -> Rows:
        """A copy in memory of its own."""
        return self.map(torch.clone)

    def copy_(self, other: Rows) -> None:
        """Copy the numbers of other rows into these."""
        for own, new in zip(self._parts(), other._parts(), strict=True):
            own.copy_(new)

    def _parts(self) -> list[Tensor]:
        return [part for part in (self.x, self.context, self.weight) if part is not None]

    def mean(self, values: Tensor) -> Tensor:
        """The mean of values (rows,) over the rows, weighted if they have weights."""
        if self.weight is None:
            return values.mean()
        return self.weighted(values).sum() / self.weight.sum()

    def weighted(self, values: Tensor) -> Tensor:
        """Values (rows,) times the rows' weights, if they have any."""
        return values if self.weight is None else self.weight * values

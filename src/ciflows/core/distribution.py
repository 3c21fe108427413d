"""A flow as a `torch.distributions.Distribution`."""

from __future__ import annotations

__all__ = ["FlowDistribution"]

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints

from ciflows.core.flow import Flow
from ciflows.core.layer import check_shape, leading_shape
from ciflows.core.noise import Noise


class FlowDistribution(Distribution):
    """p(x | context) with the methods of torch's distributions.

    Of a plain flow `log_prob` is exact. Of a flow with indices it is an importance-sampling estimate
    from `samples` draws, a lower bound on average (`exact` is False): right to train and to report with,
    but wrong in variational inference, where draws are weighed by their own density. There use
    `flow.rsample_with_log_weight`.

    Arguments:
        flow: The flow.
        context: Context (*, context_shape) of a conditional density; * is the batch shape.
        samples: Draws for each log-likelihood of a flow with indices.
        seed: Seed of these draws; with one, `log_prob` is a smooth function of x.

    Example:
        >>> import ciflows
        >>> flow = ciflows.build_model("nsf", features=2, context_features=3, layers=2, hidden=[8])
        >>> p = flow.distribution(torch.zeros(5, 3))
        >>> p.batch_shape, p.event_shape, p.exact
        (torch.Size([5]), torch.Size([2]), True)
        >>> x = p.rsample((4,))
        >>> x.shape, p.log_prob(x).shape
        (torch.Size([4, 5, 2]), torch.Size([4, 5]))
    """

    arg_constraints: ClassVar[dict[str, constraints.Constraint]] = {}

    def __init__(
        self, flow: Flow, context: Tensor | None = None, samples: int = 100, seed: int | None = None
    ) -> None:
        self.flow, self.context, self.samples, self.seed = flow, context, samples, seed
        super().__init__(flow.leading_of(context), torch.Size(flow.shape), validate_args=False)

    def __repr__(self) -> str:
        shapes = f"batch_shape={tuple(self.batch_shape)}, event_shape={tuple(self.event_shape)}"
        how = "exact" if self.exact else f"estimated from {self.samples} draws"
        return f"FlowDistribution({shapes}, log_prob {how})"

    @property
    def exact(self) -> bool:
        """Whether `log_prob` is the log-density itself rather than an estimate of it."""
        return self.flow.exact

    @property
    def has_rsample(self) -> bool:  # type: ignore[override]
        return self.flow.reparameterised

    @property
    def support(self) -> constraints.Constraint:
        return constraints.independent(constraints.real, len(self.event_shape))

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draw x (*sample_shape, *batch_shape, *event_shape) as a function of the parameters."""
        if not self.has_rsample:
            raise NotImplementedError("This flow's samples have no gradient: call sample.")
        return self.flow.draw(self._leading(sample_shape), self.context)

    @torch.no_grad()
    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw x (*sample_shape, *batch_shape, *event_shape)."""
        return self.flow.draw(self._leading(sample_shape), self.context)

    def log_prob(self, value: Tensor) -> Tensor:
        """log p(x | context), or its estimate: (*, *batch_shape, *event_shape) -> (*, *batch_shape)."""
        check_shape(value, self.flow.shape, "FlowDistribution")
        leading = leading_shape(value, self.flow.shape)
        value = value.expand(*torch.broadcast_shapes(leading, self.batch_shape), *self.event_shape)
        noise = Noise.seeded(self.seed, value.device)  # draws that stay where x moves
        return self.flow.estimate(value, self.samples, context=self.context, noise=noise).log_prob

    def expand(self, batch_shape: Any, _instance: Any = None) -> FlowDistribution:
        """The same density with a larger batch shape."""
        if _instance is not None:
            raise NotImplementedError("FlowDistribution: a subclass has to expand itself.")
        new = type(self)(self.flow, self.context, self.samples, self.seed)
        if self.context is not None and self.flow.context_shape is not None:
            new.context = self.context.expand(*batch_shape, *self.flow.context_shape)
        new._batch_shape = torch.Size(batch_shape)
        return new

    def _leading(self, sample_shape: Any) -> torch.Size:
        return torch.Size((*sample_shape, *self.batch_shape))

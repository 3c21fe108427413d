"""Flows as guides of Pyro models.

A guide's samples need weights that bound their density from above, so it is not `flow.distribution()`
that stands in it but a sample with its own log-weight:

    x, log_weight = flow.rsample_with_log_weight(1)
    pyro.sample("x", Delta(x[0], log_weight[0], event_dim=1))

`AutoFlow` does this for all of a model's variables at once. In the model itself, not in its guide, a
flow is a `PyroFlow`:

    pyro.sample("y", PyroFlow(flow, context), obs=y)
"""

from __future__ import annotations

__all__ = ["AutoFlow", "PyroFlow", "WeighedSamples"]

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import constraints

from ciflows.core.distribution import FlowDistribution
from ciflows.core.flow import Flow
from ciflows.errors import UserError, missing_package

try:
    from pyro.distributions import TorchDistribution
    from pyro.distributions.torch_distribution import TorchDistributionMixin
    from pyro.infer.autoguide import AutoContinuous
except ModuleNotFoundError as error:
    raise UserError(missing_package(error)) from error


class AutoFlow(AutoContinuous):
    """A guide over all continuous variables of a model, each mapped to all real numbers by Pyro.

    Train it with `SVI(model, guide, optimizer, Trace_ELBO(num_particles, vectorize_particles=True))`;
    the bound holds for flows with indices too.

    Arguments:
        model: The model.
        build: Makes the flow for a number of variables.
    """

    def __init__(self, model: Callable[..., Any], build: Callable[[int], Flow]) -> None:
        super().__init__(model)
        self.build = build

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        super()._setup_prototype(*args, **kwargs)
        self.flow = self.build(self.latent_dim)
        if self.flow.shape != (self.latent_dim,):
            raise UserError(
                f"AutoFlow: the model has {self.latent_dim} variables; got a flow of shape "
                f"{self.flow.shape}."
            )

    def get_posterior(self, *args: Any, **kwargs: Any) -> WeighedSamples:
        """All variables (latent_dim,) at once."""
        return WeighedSamples(self.flow)


class PyroFlow(FlowDistribution, TorchDistributionMixin):  # type: ignore[misc, override, unused-ignore]
    """`flow.distribution(context)` with what Pyro asks of a model's distributions.

    Arguments are those of `FlowDistribution`. `log_prob` of a flow with indices bounds log p(x) from
    below on average, and so does a bound that contains it; a guide needs the other side, see `AutoFlow`.
    """


class WeighedSamples(TorchDistribution):
    """Samples of a flow whose log-density is their own log-weight; other points have none here.

    Arguments:
        flow: The flow.
        batch_shape: Shape of independent samples.
    """

    arg_constraints: ClassVar[dict[str, constraints.Constraint]] = {}
    support = constraints.real_vector
    has_rsample = True

    def __init__(self, flow: Flow, batch_shape: torch.Size = torch.Size()) -> None:  # noqa: B008
        self.flow = flow
        self.last: tuple[Tensor, Tensor] | None = None
        super().__init__(batch_shape, torch.Size(flow.shape), validate_args=False)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draw x (*sample_shape, *batch_shape, features), differentiably."""
        self.flow.check_rsample()
        self.last = self.flow.draw_with_log_weight((*sample_shape, *self.batch_shape))
        return self.last[0]

    def log_prob(self, value: Tensor) -> Tensor:
        """The log-weights of the last samples."""
        if self.last is None or value is not self.last[0]:
            raise UserError("A guide knows the weights of its own last samples alone.")
        return self.last[1]

    def expand(self, batch_shape: Any, _instance: Any = None) -> WeighedSamples:
        return WeighedSamples(self.flow, torch.Size(batch_shape))

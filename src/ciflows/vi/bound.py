"""The bound that variational inference maximises, and its gradients."""

from __future__ import annotations

__all__ = ["Bound", "LogDensity", "call_log_density"]

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ciflows.core.evaluate import log_mean_exp
from ciflows.core.flow import Flow
from ciflows.core.indexed import Indexed
from ciflows.core.layer import beside_event, leading_shape
from ciflows.core.noise import Noise
from ciflows.core.proposals import RecordingNoise, ReplayNoise, SplitNoise
from ciflows.errors import UserError

LogDensity = Callable[..., Tensor]
MOST_OFF = 10.0  # from the mean log-ratio: what is further off counts as this, or few samples would rule


class Bound:
    """log (1/K) Σ_k exp(log π(x_k) - W_k), one value a row, with gradients.

    Gradients are path-wise where that is possible: the flow's parameters act through the samples (x, u)
    alone, and log p(x, u) is evaluated there with all of them detached. What that leaves out is zero on
    average, and pure noise (Roeder et al., 2017; with K > 1 the gradients in x are weighted once more,
    Tucker et al., 2019). It is done

    - for plain flows, always;
    - for flows with indices where K = M = 1: q(u | x) is not what u was drawn from, so that it keeps the
      gradients of its parameters, and of the layers that make its context.

    Otherwise, and where q shares parameters with the rest, gradients are the plain ones: right too, with
    more noise.

    Arguments:
        log_density: log π: x (rows, *shape) -> (rows,), or x and context -> (rows,) for a flow with
            context. With K = 1 it may be estimated from some of the data, without bias.
        flow: The flow.
        draws: K, samples of x in a bound.
        inner: M, draws of u for each x, as in `Flow.rsample_with_log_weight`.

    Example:
        >>> import ciflows
        >>> flow = ciflows.build_model("cif-nsf", features=2, layers=1, hidden=[8])
        >>> Bound(lambda x: -x.square().sum(-1), flow, draws=3)(5).shape
        torch.Size([5])
    """

    def __init__(self, log_density: LogDensity, flow: Flow, draws: int = 1, inner: int = 1) -> None:
        if draws < 1:
            raise UserError(f"A bound takes at least one draw of x; got {draws}.")
        if draws > 1 and flow.noisy:
            raise UserError("Bounds with several draws need exact log-determinants: call flow.eval().")
        self.log_density, self.flow = log_density, flow
        self.draws, self.inner, self.power = draws, inner, 1.0
        flow.check_rsample(inner)
        self.fixed = [flow.get_parameter(name) for name in _names_without_posteriors(flow)]
        several = not flow.exact and (draws > 1 or inner > 1)
        self.path_wise = bool(self.fixed) and not several

    def __call__(self, batch: int, context: Tensor | None = None, noise: Noise | None = None) -> Tensor:
        """Bounds (batch,) from fresh samples; the context has a row for each: (batch, context_shape)."""
        make = self._path_wise_ratio if self.path_wise else self._plain_ratio
        return log_mean_exp(make(batch, context, noise or Noise()))

    def by_weights(self, batch: int, noise: Noise | None = None) -> Tensor:
        """Bounds (batch,) whose gradients take no path through the samples, for K = M = 1.

            ∇ = (r - mean of r) ∇ log p(x, u) + ∇ log q(u | x),   r = log π(x) - W

        (VarGrad; Richter et al., 2020). It makes samples likelier whose ratio r is above the mean. So it
        moves mass between modes, where the gradient of a path does so only by the few samples that lie
        between them, and which clipping and Adam make light of. It too is zero for a perfect fit.
        Ratios further than 10 from the mean count as 10 from it: that biases gradients of a poor fit.
        """
        self.check_by_weights()
        record = RecordingNoise((noise or Noise()).generator)
        with torch.no_grad():
            x = self.flow.draw((batch,), None, record)
        split = SplitNoise(record)
        log_weight = self.flow.log_weight(x, None, split)
        with torch.no_grad():
            log_ratio = self._log_target(x, None) - log_weight
            off = (log_ratio - log_ratio.mean()).clamp(-MOST_OFF, MOST_OFF)
        surrogate = (off - off.mean()) * log_weight + sum(split.log_qs)
        return log_ratio + surrogate - surrogate.detach()

    def check_by_weights(self) -> None:
        """Refuse `by_weights` where its gradients would be wrong."""
        if self.draws > 1 or self.inner > 1 or self.flow.noisy:
            raise UserError(
                "Gradients by weights, as for balance > 0, need draws = inner = 1 and exact "
                "log-determinants."
            )
        if self.flow.context_shape is not None:
            raise UserError(
                "Gradients by weights, as for balance > 0, compare samples of one density: they are not "
                "for flows with a context."
            )

    def _plain_ratio(self, batch: int, context: Tensor | None, noise: Noise) -> Tensor:
        """log π(x) - W (draws, batch)."""
        n = self.draws if context is not None else self.draws * batch
        x, log_weight = self.flow.rsample_with_log_weight(n, context, inner=self.inner, noise=noise)
        return (self._log_target(x, context) - log_weight).reshape(self.draws, batch)

    def _path_wise_ratio(self, batch: int, context: Tensor | None, noise: Noise) -> Tensor:
        record = RecordingNoise(noise.generator)
        x = self.flow.draw((self.draws, batch), context, record)
        x = x.view_as(x)  # what is hooked below is this use of x, not the way it was drawn
        with _without_gradients(self.fixed):
            log_weight = self.flow.log_weight(x, context, ReplayNoise(record))
        log_ratio = self._log_target(x, context) - log_weight
        if self.draws > 1 and x.requires_grad:
            share = beside_event(torch.softmax(log_ratio.detach(), dim=0), self.flow.shape)
            x.register_hook(lambda grad: grad * share)
        return log_ratio

    def _log_target(self, x: Tensor, context: Tensor | None) -> Tensor:
        return self.power * call_log_density(self.log_density, x, self.flow, context)


def _names_without_posteriors(flow: Flow) -> list[str]:
    """Names of all parameters but those of q; none where a q is used twice or shares some."""
    parts = flow.named_modules(remove_duplicate=False)
    indexed = {name: part for name, part in parts if isinstance(part, Indexed)}
    if len({part.posterior for part in indexed.values()}) < len(indexed):
        return []
    starts = tuple(f"{name}.posterior." for name in indexed)
    named = list(flow.named_parameters(remove_duplicate=False))
    inside = {id(p) for name, p in named if name.startswith(starts)}
    outside = {id(p) for name, p in named if not name.startswith(starts)}
    others = [n for n, _ in flow.named_parameters() if not n.startswith(starts)]
    return [] if inside & outside else others


@contextmanager
def _without_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Let nothing that is computed meanwhile have gradients by these parameters."""
    trained = [p for p in parameters if p.requires_grad]
    try:
        for p in trained:
            p.requires_grad_(False)
        yield
    finally:
        for p in trained:
            p.requires_grad_(True)


def call_log_density(log_density: LogDensity, x: Tensor, flow: Flow, context: Tensor | None) -> Tensor:
    """log π of x (*, shape) -> (*), from a function of rows; refuses what cannot be right."""
    leading = leading_shape(x, flow.shape)
    given = [x.reshape(-1, *flow.shape)]
    if context is not None and flow.context_shape is not None:
        given.append(context.expand(*leading, *flow.context_shape).reshape(-1, *flow.context_shape))
    value = log_density(*given)
    if not isinstance(value, Tensor) or value.shape != (leading.numel(),):
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise UserError(f"log_density: expected one value a row, ({leading.numel()},); got {shape}.")
    if x.requires_grad and not value.requires_grad:
        raise UserError(
            "log_density: its values have no gradient in x. Make them by torch's operations."
        )
    return value.reshape(leading)

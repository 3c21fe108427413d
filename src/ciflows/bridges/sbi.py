"""Flows as the density estimators of sbi (simulation-based inference), for NPE and NLE.

NPE(prior, density_estimator=posterior_nn("cif-nsf"))
NLE(prior, density_estimator=likelihood_nn("cif-nsf"))
"""

from __future__ import annotations

__all__ = ["FlowEstimator", "likelihood_nn", "posterior_nn"]

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ciflows.core.evaluate import log_mean_exp
from ciflows.core.flow import Flow
from ciflows.core.layer import Bijection, Layer
from ciflows.core.noise import RowNoise
from ciflows.errors import UserError, missing_package
from ciflows.layers import Logit, Standardise
from ciflows.models import build_model
from ciflows.models.registry import get_model

try:
    from sbi.neural_nets.estimators.base import ConditionalDensityEstimator
    from sbi.utils.sbiutils import standardizing_net
except ModuleNotFoundError as error:
    raise UserError(missing_package(error)) from error

Bounds = tuple[Tensor, Tensor]
Builder = Callable[[Tensor, Tensor], "FlowEstimator"]
N = TypeVar("N", bound="_InputNoise")
EDGE = 1e-6  # share of the box that samples may pass its bounds by


class _InputNoise(RowNoise):
    """Noise that belongs to the input alone: with the condition in it a likelihood would jump."""

    def about(self: N, x: Tensor, shape: Sequence[int], context: Tensor | None = None) -> N:
        return super().about(x, shape)


class FlowEstimator(ConditionalDensityEstimator):
    """A flow as sbi's density of inputs given conditions.

    Its loss is IWAE's bound; for plain flows that is the log-density. Its log-densities are exact for
    plain flows, and else estimates whose draws belong to the input: the same in every call, and smooth
    in the condition, as a sampler or an optimiser needs them.

    Arguments:
        flow: p(input | embedded condition).
        embedding_net: Maps conditions (rows, *condition_shape) to vectors.
        condition_shape: Shape of one condition.
        draws: Draws of the indices in training.
        samples: Draws for each reported log-density.
    """

    def __init__(
        self,
        flow: Flow,
        embedding_net: nn.Module,
        condition_shape: torch.Size,
        draws: int = 5,
        samples: int = 100,
    ) -> None:
        super().__init__(flow, torch.Size(flow.shape), condition_shape)
        self.flow, self._embedding_net = flow, embedding_net
        self.draws, self.samples = draws, samples

    @property
    def embedding_net(self) -> nn.Module:
        return self._embedding_net

    def loss(self, input: Tensor, condition: Tensor, **_: Any) -> Tensor:
        """-log p(input | condition), or its bound, of rows: (rows,)."""
        context = self._embedding_net(condition)
        return -log_mean_exp(self.flow.log_weights(input, self.draws, context))

    def log_prob(self, input: Tensor, condition: Tensor, **_: Any) -> Tensor:
        """log p(input | condition) (samples, rows), as sbi has the dimensions."""
        input, condition, _ = self._broadcast_and_align(input, condition)
        leading = input.shape[: input.ndim - len(self.input_shape)]
        context = self._embedding_net(condition.reshape(-1, *self.condition_shape))
        samples = self.draws if self.training else self.samples
        noise = None if self.training else _InputNoise(0)
        rows = input.reshape(-1, *self.input_shape)
        return self.flow.estimate(rows, samples, context=context, noise=noise).log_prob.reshape(leading)

    @torch.no_grad()
    def sample(self, sample_shape: torch.Size, condition: Tensor, **_: Any) -> Tensor:
        """Draw inputs (*sample_shape, rows, *input_shape) for conditions (rows, *condition_shape)."""
        context = self._embedding_net(condition)
        return self.flow.draw((*sample_shape, len(context)), context)


def posterior_nn(
    model: str = "cif-nsf",
    *,
    bounds: Bounds | None = None,
    embedding_net: nn.Module | None = None,
    draws: int = 5,
    samples: int = 100,
    **settings: Any,
) -> Builder:
    """What `NPE(density_estimator=...)` takes: builds p(θ | x) from first simulations.

    Arguments:
        model: A name that `ciflows models` prints.
        bounds: Lower and upper bounds of θ, both (parameters,), of a prior on a box. The flow then ends
            there, to a millionth of the box, and sbi has next to nothing to reject.
        embedding_net: Maps x, standardised, to vectors.
        draws: Draws of the indices in training (IWAE).
        samples: Draws for each reported log-density.
        settings: Settings of the model; five layers of [50, 50] where they are not said, as in sbi.
    """
    settings = _settings(model, settings)

    def build(theta: Tensor, x: Tensor) -> FlowEstimator:
        flow, embed = _conditional(model, theta, x, bounds, embedding_net, settings)
        return FlowEstimator(flow, embed, x[0].shape, draws, samples)

    return build


def likelihood_nn(
    model: str = "cif-nsf",
    *,
    embedding_net: nn.Module | None = None,
    draws: int = 5,
    samples: int = 100,
    **settings: Any,
) -> Builder:
    """What `NLE(density_estimator=...)` takes: builds p(x | θ); arguments as in `posterior_nn`."""
    settings = _settings(model, settings)

    def build(theta: Tensor, x: Tensor) -> FlowEstimator:
        flow, embed = _conditional(model, x, theta, None, embedding_net, settings)
        return FlowEstimator(flow, embed, theta[0].shape, draws, samples)

    return build


def _settings(model: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with sbi's sizes where none are said; a wrong name is refused before training."""
    known = get_model(model).settings.model_fields
    sizes = {"layers": 5, "hidden": [50, 50]}
    return {name: value for name, value in sizes.items() if name in known} | settings


def _conditional(
    model: str,
    inputs: Tensor,
    conditions: Tensor,
    bounds: Bounds | None,
    embedding_net: nn.Module | None,
    settings: dict[str, Any],
) -> tuple[Flow, nn.Module]:
    """p(input | condition), standardised on both sides, and the conditions' embedding."""
    if inputs.ndim != 2:
        raise UserError(f"Flows in sbi take vectors; got inputs of shape {tuple(inputs.shape[1:])}.")
    embed = nn.Sequential(standardizing_net(conditions), embedding_net or nn.Flatten())
    with torch.no_grad():
        context = embed(conditions[:2])
    first = _bounded(inputs, bounds)
    z = inputs
    for layer in first:
        z = layer.encode(z)[0]
    scaled = Standardise(z.mean(0), z.std(0).clamp(min=1e-7))
    seed = int(torch.randint(2**31, ()))  # sbi's users seed torch
    flow = build_model(
        model, features=inputs.shape[1], context_features=context.shape[1], seed=seed, **settings
    )
    layers: list[Layer] = [*first, scaled, *flow.layers]
    return Flow(layers, flow.base), embed


def _bounded(inputs: Tensor, bounds: Bounds | None) -> list[Bijection]:
    """From a box to all numbers."""
    if bounds is None:
        return []
    low, high = (torch.as_tensor(bound).to(inputs) for bound in bounds)
    width, shape = high - low, inputs.shape[1:]
    if not low.shape == high.shape == shape or not bool((width.isfinite() & (width > 0)).all()):
        raise UserError(
            f"posterior_nn: expected finite bounds, low < high, both of shape {tuple(shape)}; got "
            f"{low.tolist()} and {high.tolist()}."
        )
    if bool(((inputs < low) | (inputs > high)).any()):
        raise UserError("posterior_nn: some parameters of the simulations are outside the bounds.")
    return [Standardise(low, width), Logit(tuple(low.shape), EDGE)]

"""Flows: a list of layers over a base density. Algorithm 1 of the paper, and sampling.

How draws become reported likelihoods is in `ciflows.core.evaluate`.
"""

from __future__ import annotations

__all__ = ["Flow"]

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ciflows.core import evaluate, rsample
from ciflows.core.density import Density, StandardNormal
from ciflows.core.evaluate import Estimate
from ciflows.core.hook import on, replaceable
from ciflows.core.layer import (
    Layer,
    Shape,
    check_layer,
    check_shape,
    common_context,
    leading_shape,
    module_list,
)
from ciflows.core.noise import Noise, RowNoise, TemperedNoise
from ciflows.core.precision import float32_products
from ciflows.errors import InversionError

if TYPE_CHECKING:
    from ciflows.core.distribution import FlowDistribution


class Flow(Density):
    """A density built from layers, data side first, over a base density.

    With bijections alone this is a normalising flow and every likelihood is exact. With indexed layers
    it is a continuously indexed flow, and likelihoods are importance-sampling estimates, each with its
    error. A flow is itself a density: it can be another flow's base, or an index's distribution.

    Arguments:
        layers: The layers, in the order in which data pass them.
        base: The density at the noise side; N(0, I) by default.

    Example:
        >>> import ciflows
        >>> flow = ciflows.build_model("cif-resflow", features=2, layers=2, hidden=[16], seed=0)
        >>> estimate = flow.estimate(torch.zeros(3, 2), samples=50)
        >>> estimate.log_prob.shape, bool((estimate.elbo <= estimate.log_prob).all())
        (torch.Size([3]), True)
        >>> flow.sample(4, seed=0).shape
        torch.Size([4, 2])
    """

    def __init__(self, layers: Sequence[Layer], base: Density | None = None) -> None:
        if not layers and base is None:
            raise ValueError("Flow: give at least one layer or a base.")
        for number, layer in enumerate(layers):
            check_layer(layer, f"Flow, layer {number}")
        base = StandardNormal(layers[-1].noise_shape) if base is None else base
        context_shape = common_context([*layers, base], "Flow: its layers")
        super().__init__(layers[0].shape if layers else base.shape, context_shape)
        for index, (before, after) in enumerate(zip(layers, [*layers, base][1:], strict=True)):
            if before.noise_shape != after.shape:
                raise ValueError(
                    f"Flow: layer {index} ({type(before).__name__}) gives {before.noise_shape}, "
                    f"but what follows it ({type(after).__name__}) expects {after.shape}."
                )
        if layers and layers[-1].noise_range and isinstance(base, StandardNormal):
            raise ValueError(
                f"Flow: N(0, I) has all real numbers, and the last layer gives {layers[-1].noise_range} "
                "alone: take the inverse (layers map data to noise), add a layer, or name another base."
            )
        self.layers = module_list(layers)
        self.base = base

    @property
    def exact(self) -> bool:
        """Whether likelihoods need no draws, as those of a plain normalising flow."""
        return all(part.exact for part in self._parts())

    @property
    def noisy(self) -> bool:
        """Whether some log-determinant is estimated with noise of its own."""
        return any(part.noisy for part in self._parts())

    @property
    def discrete(self) -> bool:
        """Whether some x have probabilities, as integers do, and no density or gradient."""
        return any(layer.discrete for layer in self.layers)

    @property
    def reparameterised(self) -> bool:
        """Whether samples are differentiable functions of the parameters and of fixed noise."""
        return all(part.reparameterised for part in self._parts())

    @property
    def device(self) -> torch.device:
        return next(tensor.device for tensor in self._tensors())

    @property
    def dtype(self) -> torch.dtype:
        return next(tensor.dtype for tensor in self._tensors() if tensor.is_floating_point())

    @property
    def input_dtype(self) -> torch.dtype:
        """The type of the points that it takes: that of its weights, or float64 for a table's values."""
        first = self.layers[0].input_dtype if len(self.layers) else None
        return first or self.dtype

    def unrolled(self) -> tuple[list[Layer], Density]:
        """All layers, those of a base that is a flow too, and the last base."""
        if not isinstance(self.base, Flow):
            return list(self.layers), self.base
        below, base = self.base.unrolled()
        return [*self.layers, *below], base

    @torch.no_grad()
    def initialise(self, x: Tensor, context: Tensor | None = None, noise: Noise | None = None) -> None:
        """Initialise each layer in turn from a first batch (*, shape).

        Layers inside other layers, such as an index's family, are not initialised.
        """
        check_shape(x, self.shape, "Flow")
        if x.numel() == 0:
            raise ValueError("Flow: cannot initialise from a batch without rows.")
        noise = noise or Noise()
        layers, inner = list(self.layers), isinstance(self.base, Flow)
        while layers and not inner and not layers[-1].starts_from_data:
            layers.pop()  # no later layer needs their output
        for layer in layers:
            layer.initialise(x, context)
            x, _ = layer.encode(x, context, noise)
        if isinstance(self.base, Flow):
            self.base.initialise(x, context, noise)

    # -- differentiable, for training ----------------------------------------------------------------

    def log_weight(self, x: Tensor, context: Tensor | None = None, noise: Noise | None = None) -> Tensor:
        """Algorithm 1: one unbiased draw of the ELBO of each x (*, shape) -> (*); training uses this."""
        return self._encode(self._parts(), x, context, self._noise_about(x, context, noise))[0]

    def log_weights(
        self,
        x: Tensor,
        samples: int = 1,
        context: Tensor | None = None,
        noise: Noise | None = None,
    ) -> Tensor:
        """Draws of log p(x, u) - log q(u | x): (*, shape) -> (samples, *).

        Layers before the first index do not depend on it and run once for all draws.
        """
        evaluate.check_samples(samples)
        return torch.cat(list(self.weight_chunks(x, samples, context, noise)))

    def weight_chunks(
        self,
        x: Tensor,
        samples: int,
        context: Tensor | None = None,
        noise: Noise | None = None,
    ) -> Iterator[Tensor]:
        """Yield the `log_weights` as tensors (k, *), with no more rows at once than fit well."""
        parts, noise = self._parts(), self._noise_about(x, context, noise)
        first = next((i for i, part in enumerate(parts) if not part.exact), len(parts))
        shared, z = self._encode(parts[:first], x, context, noise)
        leading = x.shape[: x.ndim - len(self.shape)]
        if first == len(parts):
            yield shared.expand(samples, *leading)
            return
        step = max(1, evaluate.rows_at_once(self.shape, x.device) // max(1, leading.numel()))
        step = samples if torch.is_grad_enabled() else step
        for start in range(0, samples, step):
            k = min(step, samples - start)
            copies, drawn = z.expand(k, *z.shape).contiguous(), noise.from_draw(start)
            yield shared + self._encode(parts[first:], copies, context, drawn)[0]

    # -- reporting: chunked, without gradients -------------------------------------------------------

    def log_prob(
        self,
        x: Tensor,
        samples: int = 100,
        context: Tensor | None = None,
        seed: int | None = None,
    ) -> Tensor:
        """The estimate of log p(x) from importance sampling (section 3.2): (*, shape) -> (*).

        Exact, whatever `samples`, for a plain flow. See `estimate` for the error of the others, and for
        gradients.
        """
        return self.estimate(x, samples, context=context, seed=seed).log_prob

    @float32_products()
    def estimate(
        self,
        x: Tensor,
        samples: int = 100,
        *,
        std_error: float | None = None,
        min_samples: int = evaluate.FIRST_DRAWS,
        max_samples: int = 10_000,
        context: Tensor | None = None,
        seed: int | None = None,
        noise: Noise | None = None,
    ) -> Estimate:
        """Estimate log p(x) with its Monte-Carlo error and bias, for each x (*, shape).

        A row's draws depend on the seed and the row alone, so that its estimate is the same in every
        batch and order, up to rounding.

        If gradients are enabled and x, its context or a parameter asks for them, `log_prob` and `elbo`
        have them (IWAE's, for a flow with indices), and all draws are in memory at once. Under
        `torch.no_grad()` memory does not grow with the draws. For a smooth function of x, with the same
        draws wherever x moves, pass noise=Noise.seeded(seed).

        Arguments:
            samples: Draws for each point, if there is no tolerance.
            std_error: Draw until each point's standard error is at most this, up to `max_samples`.
                Points with heavy-tailed weights (`pareto_k` above 0.7) get more draws, some of them from
                a widened q. A warning counts the points that miss the tolerance.
            min_samples: The fewest draws for one point, with `std_error`.
            max_samples: The most draws for one point, with `std_error`.
            context: Context (*, context_shape) of a conditional density; broadcast with x.
            seed: Seed of the draws; None for a random one.
            noise: Where the draws come from, in place of a seed.
        """
        noise = noise or (Noise() if self.exact else RowNoise(seed))
        limits = std_error, min_samples, max_samples
        with on(self):
            return evaluate.estimate(self, x, samples, *limits, context, noise)

    @torch.no_grad()
    @float32_products()
    def sample(
        self,
        n: int,
        context: Tensor | None = None,
        seed: int | None = None,
        temperature: float = 1.0,
    ) -> Tensor:
        """Draw n points (n, shape), or n for each context: (*, context_shape) -> (n, *, shape).

        Arguments:
            temperature: Factor of all normal numbers drawn; 1 samples the model itself.
        """
        if n < 1:
            raise ValueError(f"Flow.sample: n must be at least 1; got {n}.")
        noise = Noise.seeded(seed, self.device)
        if temperature != 1:
            noise = TemperedNoise(noise.generator, temperature)
        each = self.leading_of(context)
        step = max(1, evaluate.rows_at_once(self.shape, self.device) // max(1, each.numel()))
        sizes = [min(step, n - start) for start in range(0, n, step)]
        with on(self):
            return torch.cat([self.draw((size, *each), context, noise) for size in sizes])

    def draw(self, leading: Shape, context: Tensor | None = None, noise: Noise | None = None) -> Tensor:
        noise = noise or Noise()
        x = self.base.draw(leading, context, noise)
        context = self._expanded(context, leading)
        for index, layer in self._backwards():
            with _naming(index, layer):
                x = layer.decode(x, context, noise)
        return x

    def draw_with_log_weight(
        self, leading: Shape, context: Tensor | None = None, noise: Noise | None = None
    ) -> tuple[Tensor, Tensor]:
        noise = noise or Noise()
        x, total = self.base.draw_with_log_weight(leading, context, noise)
        context = self._expanded(context, leading)
        for index, layer in self._backwards():
            with _naming(index, layer):
                x, log_weight = layer.decode_with_log_weight(x, context, noise)
            total = total + log_weight
        return x, total

    def rsample_with_log_weight(
        self,
        n: int,
        context: Tensor | None = None,
        *,
        inner: int = 1,
        seed: int | None = None,
        noise: Noise | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Draw n points, differentiably, each with a log-weight W that replaces log p(x).

            x, u_1 ~ p(x, u),  u_m ~ q(u | x),  W = log (1/M) Σ_m p(x, u_m) / q(u_m | x)

        For any density π(x) / Z, known without Z: E[log π(x) - W] <= log Z, E[exp(log π(x) - W)] = Z.
        A plain flow has W = log p(x). Do not use `log_prob` here: it bounds log p(x) from below.

        Arguments:
            n: How many, for each context: (*, context_shape) -> x (n, *, shape) and W (n, *).
            inner: M, draws of u for each x: the bound tightens with it. A plain flow needs 1.
            noise: Where the draws come from, in place of a seed.
        """
        noise = noise or Noise.seeded(seed, self.device)
        return rsample.rsample_with_log_weight(self, n, context, inner, noise)

    def check_rsample(self, inner: int = 1) -> None:
        """Refuse a flow without differentiable samples or without weights for them."""
        rsample.check_rsample(self, inner)

    def distribution(
        self, context: Tensor | None = None, samples: int = 100, seed: int | None = None
    ) -> FlowDistribution:
        """This density, for a context (*, context_shape), as a `torch.distributions.Distribution`.

        Arguments:
            context: Context of a conditional density; its leading dimensions are the batch shape.
            samples: Draws for each log-likelihood of a flow with indices.
        """
        from ciflows.core.distribution import FlowDistribution

        return FlowDistribution(self, context, samples, seed)

    def leading_of(self, context: Tensor | None) -> torch.Size:
        """The dimensions * of a context (*, context_shape), which must be what the flow takes."""
        self.check_context(context)
        if context is None or self.context_shape is None:
            return torch.Size()
        return leading_shape(context, self.context_shape)

    # -- private -------------------------------------------------------------------------------------

    def check_context(self, context: Tensor | None) -> None:
        """Refuse a context that is missing, not used, or of another shape."""
        if self.context_shape is None and context is not None:
            raise ValueError("Flow: you passed a context, but none of its layers takes one.")
        if self.context_shape is not None and context is None:
            raise ValueError(f"Flow: it needs a context, of shape (*, {self.context_shape[0]}).")
        if self.context_shape is not None and context is not None:
            check_shape(context, self.context_shape, "Flow, context")

    def _noise_about(self, x: Tensor, context: Tensor | None, noise: Noise | None) -> Noise:
        """The noise for rows x and, if the flow uses one, their context."""
        if context is not None and self.context_shape is not None:
            context = context.flatten(context.ndim - len(self.context_shape))
        else:
            context = None
        return (noise or Noise()).about(x, self.shape, context)

    def _expanded(self, context: Tensor | None, leading: Shape) -> Tensor | None:
        if context is None or self.context_shape is None:
            return context
        return context.expand(*leading, *self.context_shape)

    def _backwards(self) -> Iterator[tuple[int, Layer]]:
        """The layers and their places, noise side first."""
        return reversed(list(enumerate(self.layers)))

    def _tensors(self) -> Iterator[Tensor]:
        return itertools.chain(self.parameters(), self.buffers())

    def _parts(self) -> list[Layer | Density]:
        return [*self.layers, self.base]

    def _encode(
        self, parts: Sequence[Layer | Density], x: Tensor, context: Tensor | None, noise: Noise
    ) -> tuple[Tensor, Tensor]:
        """Pass x through some of the parts: the sum of their log-weights (*), and the last output."""
        log_weights = [x.new_zeros(())]
        for part in parts:
            x, log_weight = encode_part(part, x, context, noise)
            log_weights.append(log_weight)
        return add_log_weights(log_weights), x


@replaceable
def encode_part(
    part: Layer | Density, x: Tensor, context: Tensor | None, noise: Noise
) -> tuple[Tensor, Tensor]:
    """Pass x through a layer, or to the base: what it becomes, and its log-weight (*)."""
    if isinstance(part, Layer):
        return part.encode(x, context, noise)
    return x, part.log_weight(x, context, noise)


@replaceable
def add_log_weights(log_weights: Sequence[Tensor]) -> Tensor:
    """The sum of log-weights, each (*) or ()."""
    return sum(log_weights[1:], log_weights[0])


@contextmanager
def _naming(index: int, layer: Layer) -> Iterator[None]:
    """Name the layer whose inversion failed."""
    try:
        yield
    except InversionError as error:
        raise InversionError(f"layer {index}, {type(layer).__name__}: {error}") from None

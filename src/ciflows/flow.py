"""Flows: a list of layers over a base density, and the likelihoods they give."""

from __future__ import annotations

__all__ = ["Flow"]

import itertools
import warnings
from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import BatchNorm1d, BatchNorm2d

from ciflows.concurrency import beside, called, rejoin
from ciflows.densities import Density, StandardNormal
from ciflows.errors import InversionError
from ciflows.estimate import Estimate, RunningEstimate
from ciflows.layers import Layer, Shape, check_shape
from ciflows.noise import Noise, TemperedNoise
from ciflows.precision import float32_products
from ciflows.prepared import prepared

FIRST_DRAWS = 16


class Flow(Density):
    """A density built from layers, data side first, over a base density.

    With bijections alone this is a normalising flow and every likelihood is exact. With indexed layers
    it is a continuously indexed flow, and likelihoods are importance-sampling estimates, each with its
    error. A flow is itself a density: it can be another flow's base, or an index's distribution.

    Arguments:
        layers: The layers, in the order in which data pass them.
        base: The density at the noise side; N(0, I) where none is given.

    Example:
        >>> import ciflows
        >>> flow = ciflows.build_model("cif-resflow", features=2, layers=2, hidden=[16], seed=0)
        >>> log_prob, elbo, std_error, effective_samples = flow.estimate(torch.zeros(3, 2), samples=50)
        >>> log_prob.shape, bool((elbo <= log_prob).all())
        (torch.Size([3]), True)
        >>> flow.sample(4, seed=0).shape
        torch.Size([4, 2])
    """

    def __init__(self, layers: Sequence[Layer], base: Density | None = None) -> None:
        if not layers and base is None:
            raise ValueError("Flow: give at least one layer or a base.")
        base = StandardNormal(layers[-1].noise_shape) if base is None else base
        super().__init__(layers[0].shape if layers else base.shape, _common_context([*layers, base]))
        for index, (before, after) in enumerate(zip(layers, [*layers, base][1:], strict=True)):
            if before.noise_shape != after.shape:
                raise ValueError(
                    f"Flow: layer {index} ({type(before).__name__}) gives {before.noise_shape}, "
                    f"but what follows it ({type(after).__name__}) expects {after.shape}."
                )
        self.layers = nn.ModuleList(layers)
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
    def device(self) -> torch.device:
        return next(tensor.device for tensor in self._tensors())

    @property
    def dtype(self) -> torch.dtype:
        return next(tensor.dtype for tensor in self._tensors() if tensor.is_floating_point())

    @torch.no_grad()
    def initialise(self, x: Tensor, context: Tensor | None = None, noise: Noise | None = None) -> None:
        """Let the layers set what depends on data from a first batch (*, shape), each in its turn.

        Those inside other ones, such as an index's family, keep what they have.
        """
        check_shape(x, self.shape, "Flow")
        if x.numel() == 0:
            raise ValueError("Flow: a batch without rows gives it no start.")
        noise = noise or Noise()
        layers, inner = list(cast(Sequence[Layer], self.layers)), isinstance(self.base, Flow)
        while layers and not inner and not layers[-1].starts_from_data:
            layers.pop()  # what lies behind all that is to be set need not be computed
        for layer in layers:
            layer.initialise(x, context)
            x, _ = layer.encode(x, context, noise)
        if isinstance(self.base, Flow):
            self.base.initialise(x, context, noise)

    # -- differentiable: what training uses ---------------------------------------------------------

    def log_weight(self, x: Tensor, context: Tensor | None = None, noise: Noise | None = None) -> Tensor:
        """Algorithm 1: one unbiased draw of the ELBO of each x (*, shape) -> (*)."""
        noise = (noise or Noise()).about(x, self.shape)
        return self._encode(self._parts(), x, context, noise)[0]

    def log_weights(
        self,
        x: Tensor,
        samples: int = 1,
        context: Tensor | None = None,
        noise: Noise | None = None,
    ) -> Tensor:
        """Draws of log p(x, u) - log q(u | x): (*, shape) -> (samples, *).

        What stands before the first index does not depend on it and is computed once for all draws.
        """
        _check_samples(samples)
        chunks = self._weight_chunks(x, samples, context, noise or Noise())
        return torch.cat(list(chunks))

    def elbo(
        self,
        x: Tensor,
        samples: int = 1,
        context: Tensor | None = None,
        noise: Noise | None = None,
    ) -> Tensor:
        """The evidence lower bound, averaged over draws: (*, shape) -> (*)."""
        return self.log_weights(x, samples, context, noise).mean(0)

    # -- reporting: chunked, without gradients -------------------------------------------------------

    def log_prob(
        self,
        x: Tensor,
        samples: int = 100,
        context: Tensor | None = None,
        seed: int | None = None,
    ) -> Tensor:
        """The estimate of log p(x) from importance sampling (section 3.2): (*, shape) -> (*).

        Exact, whatever `samples`, for a plain flow. See `estimate` for the error of the others.
        """
        return self.estimate(x, samples, context=context, seed=seed).log_prob

    @torch.no_grad()
    @float32_products()
    def estimate(
        self,
        x: Tensor,
        samples: int = 100,
        *,
        std_error: float | None = None,
        max_samples: int = 10_000,
        context: Tensor | None = None,
        seed: int | None = None,
        noise: Noise | None = None,
    ) -> Estimate:
        """Estimate log p(x) with its Monte-Carlo error, for each x (*, shape).

        Arguments:
            x: Points (*, shape).
            samples: Draws for each point, where no tolerance is given.
            std_error: Draw as many times as each point needs for a standard error of about this, up to
                `max_samples`; points that would need more are counted in a warning.
            max_samples: The most draws for one point where `std_error` is given.
            context: Context (*, context_shape) of a conditional density.
            seed: Seed of the draws.
            noise: Where the draws come from, in place of a seed; with `RowNoise` a point's estimate does
                not depend on the others.
        """
        _check_samples(min(samples, max_samples))
        if std_error is not None and not std_error > 0:
            raise ValueError(f"Flow: a standard error to reach must be above 0; got {std_error}.")
        check_shape(x, self.shape, "Flow")
        if x.dtype != self.dtype:
            raise ValueError(f"Flow: its weights are {self.dtype}, the points {x.dtype}: convert one.")
        if any(_is_unsettled(part) for part in self.modules()):
            raise ValueError(
                "Flow: in training mode its batch norms or dropped units make a point's likelihood "
                "depend on more than the point: call eval() first."
            )
        if self.noisy:
            raise ValueError(
                "Flow: its log-determinants are noisy estimates, and their noise would raise a "
                "log-mean-exp over draws. Evaluate in eval() mode with exact log-determinants "
                "(or, to compare with the paper's own scheme, call diagnostics.paper_log_prob)."
            )
        noise = noise or Noise.seeded(seed, x.device)
        leading = x.shape[: x.ndim - len(self.shape)]
        self._check_context(context)
        if not leading.numel():
            return Estimate(*(x.new_empty(leading) for _ in Estimate._fields))
        rows = x.reshape(-1, *self.shape)
        if context is not None and self.context_shape is not None:
            context = context.expand(*leading, *self.context_shape).reshape(-1, *self.context_shape)
        with prepared(self):
            if self.exact:
                result = self._evaluate_rows(rows, samples, context, noise)
            elif std_error is None:
                result = self._estimate_rows(rows, samples, context, noise)
            else:
                result = self._estimate_until(rows, std_error, max_samples, context, noise)
        return Estimate(*(column.reshape(leading) for column in result))

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
            n: How many.
            context: Context of a conditional density.
            seed: Seed of the draws.
            temperature: Factor of all normal numbers drawn; samples of the model itself have 1.
        """
        if n < 1:
            raise ValueError(f"Flow.sample: n must be at least 1; got {n}.")
        noise = Noise.seeded(seed, self.device)
        if temperature != 1:
            noise = TemperedNoise(noise.generator, temperature)
        each: Shape = ()
        self._check_context(context)
        if context is not None and self.context_shape is not None:
            each = tuple(context.shape[: context.ndim - len(self.context_shape)])
        step = max(1, _rows_at_once(self.shape, self.device) // max(1, torch.Size(each).numel()))
        sizes = [min(step, n - start) for start in range(0, n, step)]
        with prepared(self):
            return torch.cat([self.draw((size, *each), context, noise) for size in sizes])

    def draw(
        self,
        leading: torch.Size | tuple[int, ...],
        context: Tensor | None = None,
        noise: Noise | None = None,
    ) -> Tensor:
        noise = noise or Noise()
        x = self.base.draw(leading, context, noise)
        if context is not None and self.context_shape is not None:
            context = context.expand(*leading, *self.context_shape)
        for index in reversed(range(len(self.layers))):
            layer = self.layers[index]
            try:
                x = cast(Layer, layer).decode(x, context, noise)
            except InversionError as error:
                raise InversionError(f"layer {index}, {type(layer).__name__}: {error}") from None
        return x

    # -- inside --------------------------------------------------------------------------------------

    def _check_context(self, context: Tensor | None) -> None:
        if self.context_shape is None and context is not None:
            raise ValueError("Flow: it was given a context, but none of its layers takes one.")
        if self.context_shape is not None and context is None:
            raise ValueError(f"Flow: it needs a context, of shape (*, {self.context_shape[0]}).")
        if self.context_shape is not None and context is not None:
            check_shape(context, self.context_shape, "Flow, context")

    def _tensors(self) -> Iterator[Tensor]:
        return itertools.chain(self.parameters(), self.buffers())

    def _parts(self) -> list[Layer | Density]:
        return [*cast(Sequence[Layer], self.layers), self.base]

    def _encode(
        self, parts: Sequence[Layer | Density], x: Tensor, context: Tensor | None, noise: Noise
    ) -> tuple[Tensor, Tensor]:
        """Pass x through some of the parts: their log-weights added up (*), and what x became."""
        total = x.new_zeros(())
        for part in parts:
            with called(part):
                if isinstance(part, Layer):
                    x, log_weight = part.encode(x, context, noise)
                else:
                    log_weight = part.log_weight(x, context, noise)
                with beside(part, total, log_weight):
                    total = total + log_weight
        rejoin()
        return total, x

    def _weight_chunks(
        self, x: Tensor, samples: int, context: Tensor | None, noise: Noise
    ) -> Iterator[Tensor]:
        """Yield all log-weights as tensors (k, *), with no more rows at once than fit well."""
        parts, noise = self._parts(), noise.about(x, self.shape)
        first = next((i for i, part in enumerate(parts) if not part.exact), len(parts))
        shared, z = self._encode(parts[:first], x, context, noise)
        leading = x.shape[: x.ndim - len(self.shape)]
        if first == len(parts):
            yield shared.expand(samples, *leading)
            return
        step = max(1, _rows_at_once(self.shape, x.device) // max(1, leading.numel()))
        step = samples if torch.is_grad_enabled() else step
        for start in range(0, samples, step):
            k = min(step, samples - start)
            copies, drawn = z.expand(k, *z.shape).contiguous(), noise.from_draw(start)
            yield shared + self._encode(parts[first:], copies, context, drawn)[0]

    def _chunks(self, rows: Tensor, context: Tensor | None) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield rows and their context, some at a time."""
        step = _rows_at_once(self.shape, rows.device)
        for start in range(0, len(rows), step):
            some = slice(start, start + step)
            yield rows[some], None if context is None else context[some]

    def _evaluate_rows(
        self, rows: Tensor, samples: int, context: Tensor | None, noise: Noise
    ) -> Estimate:
        """The exact log-likelihoods of a flow without an index: all draws are alike."""
        parts = [self.log_weight(*some, noise) for some in self._chunks(rows, context)]
        log_prob = torch.cat(parts)
        none, all_ = torch.zeros_like(log_prob), torch.full_like(log_prob, samples)
        return Estimate(log_prob, log_prob.clone(), none, all_)

    def _estimate_rows(
        self, rows: Tensor, samples: int, context: Tensor | None, noise: Noise
    ) -> Estimate:
        parts = []
        for some, given in self._chunks(rows, context):
            running = RunningEstimate()
            for log_weights in self._weight_chunks(some, samples, given, noise):
                running.add(log_weights)
            parts.append(running.result())
        return Estimate(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def _estimate_until(
        self,
        rows: Tensor,
        std_error: float,
        max_samples: int,
        context: Tensor | None,
        noise: Noise,
    ) -> Estimate:
        """Double each row's draws until their standard error is small enough; then draw as many anew.

        The draws that decide may not be the ones reported. The error is relative to the mean, so it is
        small where the mean came out large: stopping there would raise the estimate on average.
        """
        samples, late = min(FIRST_DRAWS, max_samples), 0
        result = Estimate(*(rows.new_full((len(rows),), torch.nan) for _ in Estimate._fields))
        pending = torch.arange(len(rows), device=rows.device)
        while len(pending):
            small = self._estimate_some(rows, pending, samples, context, noise).std_error <= std_error
            if samples >= max_samples:
                late = int((~small).sum())
                small = torch.ones_like(small)
            ready = pending[small]
            if len(ready):
                fresh = self._estimate_some(rows, ready, samples, context, noise.from_draw(max_samples))
                for column, values in zip(result, fresh, strict=True):
                    column[ready] = values
            pending, samples = pending[~small], min(2 * samples, max_samples)
        if late:
            warnings.warn(
                f"{late} of {len(rows)} points still have a standard error above {std_error} after "
                f"{max_samples} draws (the largest: {result.std_error.max():.3g}). Raise max_samples.",
                stacklevel=5,
            )
        return result

    def _estimate_some(
        self, rows: Tensor, some: Tensor, samples: int, context: Tensor | None, noise: Noise
    ) -> Estimate:
        given = None if context is None else context[some]
        return self._estimate_rows(rows[some], samples, given, noise)


def _rows_at_once(shape: Shape, device: torch.device) -> int:
    """How many rows to push through the layers together: enough to be quick, few enough to fit.

    A residual block carries a tangent for each feature, so that a row of vectors costs as many. Networks
    of images hold a hundred channels or so for each pixel, and a few tangents: below 1 GB on a CPU.
    """
    if len(shape) == 3:
        return max(1, (2**20 if device.type == "cuda" else 2**16) // (shape[1] * shape[2]))
    size = 1 + torch.Size(shape).numel()
    return max(1, 2**20 // size if device.type == "cuda" else min(3000, 2**17 // size))


def _is_unsettled(part: nn.Module) -> bool:
    """Whether a part depends, in training mode, on the other rows of a batch or on units dropped."""
    if not part.training:
        return False
    batchwise = isinstance(part, BatchNorm1d | BatchNorm2d) or getattr(part, "batchwise", False)
    return batchwise or getattr(part, "dropout", 0.0) > 0


def _check_samples(samples: int) -> None:
    if samples < 1:
        raise ValueError(f"Flow: samples must be at least 1; got {samples}.")


def _common_context(parts: Sequence[Layer | Density]) -> Shape | None:
    shapes = {part.context_shape for part in parts} - {None}
    if len(shapes) > 1:
        raise ValueError(f"Flow: its layers expect contexts of different shapes: {shapes}.")
    return shapes.pop() if shapes else None

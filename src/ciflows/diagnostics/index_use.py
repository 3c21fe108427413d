"""What a flow's indices do: what they cost, how far they move the data, and what they are worth.

An index u is idle where the bijections F(·; u) do not depend on it. Then the CIF is a plain flow that
takes longer. Two comparisons tell how far an index is from that. Both replace u by something that knows
nothing of the row, drop p(u | z) and q(u | x), and so compare with another normalised density:

    permuted   p̃(x) = ∫ r(u) p(x; u) du,  r the posterior q averaged over all rows
    frozen     p̃(x) = p(x; ū),            ū the mean of r: a plain flow

where p(x; u) is the density of the plain flow with u fixed. An idle index loses nothing in either.
"""

from __future__ import annotations

__all__ = [
    "IndexActivity",
    "IndexUse",
    "IndexWorth",
    "IndicesUse",
    "index_activity",
    "index_use",
    "index_words",
    "index_worth",
]

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ciflows.core.evaluate import log_mean_exp
from ciflows.core.flow import Flow
from ciflows.core.indexed import Indexed
from ciflows.core.layer import check_shape, join
from ciflows.core.noise import Noise
from ciflows.core.precision import float32_products

IDLE = 0.01  # nats: less is worth nobody's time


class IndexUse(NamedTuple):
    """How much one index does, averaged over rows. Likelihoods are in nats; errors are standard errors.

    Attributes:
        layer: Where the index is in the flow; "all" for all of them together.
        kl: E log q(u | x) - log p(u | z), what the ELBO pays for u.
        effect: How far a draw of u ~ q(u | x) moves z: the root mean square over rows and features of
            z's standard deviation under q, in units of the feature's standard deviation over the data.
        permuted: What log p(x) loses when u is drawn from the posteriors of other rows.
        frozen: What log p(x) loses when u is the same for all rows.
    """

    layer: str
    kl: float
    kl_error: float
    effect: float
    permuted: float
    permuted_error: float
    frozen: float
    frozen_error: float


class IndicesUse(NamedTuple):
    """What `index_use` found.

    Attributes:
        indices: One for each index, data side first.
        total: All indices together: KLs added up, the largest effect, all of them replaced at once.
    """

    indices: tuple[IndexUse, ...]
    total: IndexUse


class IndexActivity(NamedTuple):
    """What all indices of a flow do together, as far as one pass tells; as in `IndexUse`.

    Attributes:
        index_kl: What the ELBO pays for all u.
        index_effect: The largest of their effects.
    """

    index_kl: float
    index_effect: float


class IndexWorth(NamedTuple):
    """What a flow's indices are worth.

    Attributes:
        nats: What they add to the mean of log p(x).
        std_error: Standard error of that over rows.
    """

    nats: float
    std_error: float

    @property
    def idle(self) -> bool:
        """Whether they add nothing that two standard errors, or a hundredth of a nat, would show."""
        return not self.nats > max(IDLE, 2 * self.std_error)

    def sentence(self, plain: str = "the flow without it") -> str:
        """The worth in words."""
        if self.idle:
            return f"The index is idle: {plain} gives the same in about half of the time."
        return f"The index is worth {self.nats:.2f} ± {self.std_error:.2f} nats a row."


@torch.no_grad()
@float32_products()
def index_use(
    flow: Flow, x: Tensor, context: Tensor | None = None, samples: int = 20, seed: int | None = 0
) -> IndicesUse:
    """Measure what each index of a flow does at rows x (rows, shape).

    Arguments:
        samples: Draws of u for each row. Each index takes two passes of as many draws.

    Example:
        >>> import ciflows
        >>> flow = ciflows.build_model("cif-nsf", features=2, layers=2, hidden=[16], seed=0).eval()
        >>> use = index_use(flow, torch.randn(50, 2))
        >>> len(use.indices), use.total.effect  # an index starts idle
        (2, 0.0)
    """
    passes = _Passes(flow, x, context, samples, seed)
    places = range(len(passes.names))
    indices = tuple(passes.use(passes.names[place], [place]) for place in places)
    return IndicesUse(indices, passes.use("all", places))


@torch.no_grad()
@float32_products()
def index_activity(flow: Flow, x: Tensor, context: Tensor | None = None) -> IndexActivity | None:
    """What all indices do at rows x (rows, shape), in one pass of two draws: cheap enough for training.

    None for a flow without an index, over images, or with noisy log-determinants, and for a single row.
    """
    if not _has_index(flow) or flow.noisy or len(flow.shape) > 1 or len(x) < 2:
        return None
    drawn = _Passes(flow, x, context, samples=2, seed=0).own
    return IndexActivity(torch.stack(drawn.kl).sum(0).mean().item(), max(drawn.effect))


def index_words(model: str, metrics: Mapping[str, Any]) -> str:
    """What the index of a finished run is worth, in a sentence; "" if that is not known.

    Arguments:
        model: The model's name, such as cif-nsf.
        metrics: The content of the run's metrics.json.
    """
    plain, worth = model.removeprefix("cif-"), metrics.get("index_worth") or {}
    if metrics.get("indexed") and None not in (worth.get("nats"), worth.get("std_error")):
        return f"{IndexWorth(**worth).sentence(plain)} We measured it on validation rows in training."
    if metrics.get("story"):
        return str(metrics["story"])
    total = (metrics.get("index") or {}).get("total")
    if not total or None in (total["permuted"], total["permuted_error"]):
        return ""
    lost = IndexWorth(total["permuted"], total["permuted_error"])
    if lost.idle:
        return lost.sentence(plain)
    loss = f"{lost.nats:.2f} ± {lost.std_error:.2f}"
    return f"With another row's index, a row loses {loss} nats. A plain flow might make up for some."


@torch.no_grad()
@float32_products()
def index_worth(
    flow: Flow,
    x: Tensor,
    context: Tensor | None = None,
    plain: Flow | None = None,
    samples: int = 20,
    seed: int | None = 0,
) -> IndexWorth:
    """What the indices of a flow add to the mean of log p over rows x (rows, shape).

    Arguments:
        plain: A flow without indices that was trained as long, to compare with. Without it the flow is
            compared with itself at a frozen u, which says too much: the other layers have come to rely
            on u, and would do better had they been trained without.
    """
    if plain is None:
        passes = _Passes(flow, x, context, samples, seed)
        return IndexWorth(*passes.loss(passes.frozen(range(len(passes.names)))))
    _check(flow, x)
    with_index = flow.estimate(x, samples, context=context, seed=seed).log_prob
    without = plain.estimate(x, samples, context=context, seed=seed).log_prob
    return IndexWorth(*_mean(with_index - without))


class _Drawn(NamedTuple):
    """One pass: log-weights (samples, rows); of each index u, its log q - log p, and its effect."""

    log_weights: Tensor
    u: list[Tensor]
    kl: list[Tensor]
    effect: list[float]


class _Passes:
    """Passes rows through a flow, with u of its own for each row or with other ones."""

    def __init__(
        self, flow: Flow, x: Tensor, context: Tensor | None, samples: int, seed: int | None
    ) -> None:
        _check(flow, x)
        self.layers, self.base = flow.unrolled()
        self.x, self.samples = x, samples
        self.context = None if context is None else context.expand(samples, *context.shape)
        self.noise = Noise.seeded(seed, x.device)
        self.names = [
            f"{place} {type(layer.family).__name__}"
            for place, layer in enumerate(self.layers)
            if isinstance(layer, Indexed)
        ]
        self.own = self.run({})
        self.log_prob = log_mean_exp(self.own.log_weights.double())

    def run(self, replaced: Mapping[int, Tensor]) -> _Drawn:
        """Draw u ~ q(u | x), but for the indices whose u are given (samples, rows, index)."""
        x = self.x.expand(self.samples, *self.x.shape).contiguous()
        drawn = _Drawn(x.new_zeros(x.shape[:2]), [], [], [])
        with self.noise.rewound():
            noise = self.noise.about(self.x, self.x.shape[1:])
            for layer in self.layers:
                context = self.context if layer.context_shape is not None else None
                if isinstance(layer, Indexed):
                    given = replaced.get(len(drawn.u))
                    x, log_weight = _encode(layer, x, context, noise, given, drawn)
                else:
                    x, log_weight = layer.encode(x, context, noise)
                drawn.log_weights.add_(log_weight)
            context = self.context if self.base.context_shape is not None else None
            drawn.log_weights.add_(self.base.log_weight(x, context, noise))
        return drawn

    def use(self, name: str, some: Sequence[int]) -> IndexUse:
        """What some of the indices do, replaced together."""
        kl = torch.stack([self.own.kl[place] for place in some]).sum(0).mean(0)
        effect = max(self.own.effect[place] for place in some)
        permuted, frozen = self.loss(self.permuted(some)), self.loss(self.frozen(some))
        return IndexUse(name, *_mean(kl), effect, *permuted, *frozen)

    def loss(self, replaced: Mapping[int, Tensor]) -> tuple[float, float]:
        """What log p loses with these u, on average over rows, and its standard error."""
        return _mean(self.log_prob - log_mean_exp(self.run(replaced).log_weights.double()))

    def frozen(self, some: Sequence[int]) -> dict[int, Tensor]:
        return {i: self.own.u[i].mean((0, 1)).expand_as(self.own.u[i]) for i in some}

    def permuted(self, some: Sequence[int]) -> dict[int, Tensor]:
        """For each row the u of other rows: another one in each draw, as far as there are as many."""
        rows = len(self.x)
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(0)).to(self.x.device)
        draws = torch.arange(self.samples, device=self.x.device)[:, None]
        shift = 1 + draws % (rows - 1)
        other = order[(order.argsort() + shift) % rows]
        return {i: self.own.u[i][draws, other] for i in some}


def _encode(
    layer: Indexed, x: Tensor, context: Tensor | None, noise: Noise, given: Tensor | None, drawn: _Drawn
) -> tuple[Tensor, Tensor]:
    """Encode and note down what u does; a given u counts without p(u | z) and q(u | x)."""
    dims, leading = len(layer.shape), x.shape[:2]
    u, log_q = noise.posterior(layer.posterior, leading, join(x, context, dims))
    used = u if given is None else given
    z, log_det = layer.family.encode(x, join(used, context, dims), noise)
    kl = log_q - layer.prior.log_weight(used, join(z, context, dims), noise)
    drawn.u.append(u)
    drawn.kl.append(kl)
    other = layer.posterior.draw(leading, join(x, context, dims), noise)
    drawn.effect.append(_effect(z, layer.family.encode(x, join(other, context, dims), noise)[0]))
    return z, log_det - kl if given is None else log_det


def _effect(z: Tensor, other: Tensor) -> float:
    """The spread of z between two draws of u for the same rows, in units of z's spread over rows."""
    z, other = z.flatten(2), other.flatten(2)
    moved = 0.5 * (z - other).square().mean((0, 1))
    return (moved / z.var((0, 1)).clamp(min=torch.finfo(z.dtype).tiny)).mean().sqrt().item()


def _has_index(flow: Flow) -> bool:
    return any(isinstance(layer, Indexed) for layer in flow.unrolled()[0])


def _mean(values: Tensor) -> tuple[float, float]:
    """The mean of values (rows,), and its standard error."""
    spread, mean = torch.std_mean(values.double())
    return mean.item(), spread.item() / math.sqrt(len(values))


def _check(flow: Flow, x: Tensor) -> None:
    check_shape(x, flow.shape, "index_use")
    if not _has_index(flow):
        raise ValueError("index_use: the flow has no index. Models with one have names like cif-nsf.")
    if x.ndim != len(flow.shape) + 1 or len(x) < 2:
        raise ValueError(f"index_use: expected at least two rows; got shape {tuple(x.shape)}.")
    if flow.noisy:
        raise ValueError("index_use: log-determinants must be exact; call flow.eval() first.")

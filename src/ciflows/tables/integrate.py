"""Rows with gaps under a table's density: log p of what is there, and draws of what is not.

Each row gets a proposal for its missing scores (see `ciflows.tables.completion`). Trial draws tell how
many of them count. Where few do, the proposal is fitted anew to them, weighted, in a few rounds; the
first rounds take a power of the weights below 1 so that some tens of draws count (population Monte
Carlo; Cappé et al., 2008). Reported numbers come from fresh draws alone. All of a row's draws depend on
the seed and the row, not on other rows.
"""

from __future__ import annotations

__all__ = ["GapFlow", "Plan"]

import math
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ciflows.core.evaluate import Estimate, rows_at_once
from ciflows.core.flow import Flow
from ciflows.core.noise import Noise, RowNoise, random_seed
from ciflows.core.rows import Rows
from ciflows.layers.gaussian_mixture import fit_mixture
from ciflows.tables.column_layer import ColumnLayer
from ciflows.tables.completion import Completion, GapProposal

Score = Callable[[Flow, Rows], Estimate]
POOL, CONTEXT_POOL = 4000, 1000  # samples of the model that the first proposal is fitted to
COMPONENTS, CONTEXT_COMPONENTS, ROW_COMPONENTS = (1, 4, 16), (1, 4), 3
TRIAL, ROUND = 128, 512  # draws of a first trial, and of each round in which a proposal is adapted
GOOD = 0.1  # share of effective draws from which on a proposal is good enough
FEWEST = 10  # effective draws of a round without which a row is refused
ROUNDS = 6
TRIAL_DRAW, CHOICE_DRAW = 2**40, 2**50  # where the numbers of trial draws and of choices begin
POOL_SEED = 0


class Plan(NamedTuple):
    """Rows that share a proposal.

    Attributes:
        places: Which rows (rows,).
        flow: The flow with a `Completion` for its first layer.
        share: Share of each row's trial draws that count (rows,).
    """

    places: Tensor
    flow: Flow
    share: Tensor


class GapFlow:
    """A table's density of rows in which values may be missing (NaN).

    Arguments:
        flow: The flow, in eval mode; its first layer is a `ColumnLayer`.
    """

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        first, *rest = flow.layers
        self.columns, self.layers = cast(ColumnLayer, first), rest
        self.inner = Flow(rest, flow.base).eval()

    @torch.no_grad()
    def estimate(self, rows: Rows, score: Score, score_gaps: Score, seed: int) -> Estimate:
        """Estimate log p of the values that are there; NaN where too few draws count.

        A row in which all is missing has log p = 0.

        Arguments:
            rows: The rows.
            score: Estimates log p of rows under a flow.
            score_gaps: The same, for the rows with gaps.
            seed: Seed of the trial draws.
        """
        rows = rows.on(self.flow)
        blank = torch.zeros(len(rows), dtype=self.flow.dtype, device=self.flow.device)
        result = Estimate(*(column.clone() for column in Estimate.exact(blank, 1)))
        whole = (~rows.x.isnan().any(1)).nonzero()[:, 0]
        if len(whole):
            _put(result, whole, score(self.flow, rows[whole]))
        for plan in self.plans(rows, seed):
            part = score_gaps(plan.flow, rows[plan.places])
            hopeless = (plan.share < FEWEST / ROUND) & (part.log_prob > -torch.inf)
            part = Estimate(*(torch.where(hopeless, math.nan, column) for column in part))
            _put(result, plan.places, part)
        return result

    @torch.no_grad()
    def impute(self, rows: Rows, n: int = 1, seed: int | None = None) -> tuple[Tensor, Tensor]:
        """Draw what is missing: n copies of the rows (n, rows, features), and which rows failed (rows,).

        Of a row's weighted draws n are chosen by their weights. Equal rows get different draws.

        Arguments:
            rows: The rows.
            n: How many draws for each gap.
            seed: Seed of the draws; a random one if None.
        """
        rows, seed = rows.on(self.flow), random_seed() if seed is None else seed
        drawn = rows.x.expand(n, *rows.x.shape).clone()
        failed = torch.zeros(len(rows), dtype=torch.bool, device=rows.x.device)
        wanted = max(64, 16 * n)  # effective draws to choose from
        for plan in self.plans(rows, seed, blank=True):
            enough = plan.share >= FEWEST / ROUND
            failed[plan.places] = ~enough
            # few different numbers: rows go in batches
            draws = 2 ** torch.log2(wanted / plan.share[enough]).ceil().long()
            for count in draws.unique().tolist():
                step = max(1, rows_at_once(self.flow.shape, rows.x.device) // count)
                for places in plan.places[enough][draws == count].split(step):
                    drawn[:, places] = _choose(plan.flow, rows, places, count, n, seed)
        return drawn, failed

    def plans(self, rows: Rows, seed: int, blank: bool = False) -> Iterator[Plan]:
        """A plan for each row with gaps; rows whose first proposal is good share one.

        Arguments:
            rows: The rows, where the flow is.
            seed: Seed of the trial draws.
            blank: Whether rows in which all is missing take part.
        """
        missing = rows.x.isnan()
        wanted = missing.any(1) if blank else missing.any(1) & ~missing.all(1)
        places = wanted.nonzero()[:, 0]
        for some, flow in self._first_flows(rows, places):
            first, which = _distinct(rows.x[some])
            share = _trial(flow, rows[some[first]], seed)
            good = share >= GOOD
            if bool(good.any()):
                yield Plan(some[good[which]], flow, share[which][good[which]])
            for number in (~good).nonzero()[:, 0]:
                plan = self._adapted(rows[some[first[number]][None]], flow, seed)
                places = some[which == number]
                yield Plan(places, plan.flow, plan.share.expand(len(places)))

    def _first_flows(self, rows: Rows, places: Tensor) -> Iterator[tuple[Tensor, Flow]]:
        """The rows of some places, with the flow that completes them; one flow for each context."""
        if not len(places):
            return
        if rows.context is None:
            yield places, self._completing(self._proposal)
            return
        contexts, which = torch.unique(rows.context[places], dim=0, return_inverse=True)
        for number, context in enumerate(contexts):
            z = self.inner.sample(CONTEXT_POOL, context[None], seed=POOL_SEED)[:, 0]
            proposal = self._fitted(z, CONTEXT_COMPONENTS)
            yield places[which == number], self._completing(proposal)

    @cached_property
    def _proposal(self) -> GapProposal:
        """The proposal that is fitted to samples of the model."""
        return self._fitted(self.inner.sample(POOL, seed=POOL_SEED), COMPONENTS)

    def _fitted(self, z: Tensor, components: tuple[int, ...]) -> GapProposal:
        """The best of some mixtures fitted to scores z (rows, features), on a fifth that is held out."""
        z = z.double().cpu()
        held_out, train = z[::5], z[torch.arange(len(z)) % 5 > 0]
        mixtures = [fit_mixture(train, number, prior=z.shape[1]) for number in components]
        scores = [mixture.double().log_weight(held_out).mean().item() for mixture in mixtures]
        return self._moved(GapProposal.of(mixtures[scores.index(max(scores))]))

    def _moved(self, proposal: GapProposal) -> GapProposal:
        parts = (proposal.log_shares.exp(), proposal.means, proposal.covariances)
        return GapProposal(*(part.to(self.flow.device) for part in parts))

    def _completing(self, proposal: GapProposal) -> Flow:
        return Flow([Completion(self.columns, proposal), *self.layers], self.flow.base).eval()

    def _adapted(self, row: Rows, flow: Flow, seed: int) -> Plan:
        """The plan of one row whose first proposal is not good: the best of some rounds."""
        place = torch.zeros(1, dtype=torch.long)
        best = Plan(place, flow, torch.zeros(1, dtype=torch.float64, device=row.x.device))
        for number in range(1, ROUNDS + 1):
            z, log_weight = _weighted_draws(flow, row, ROUND, _trial_noise(seed, number))
            share = _effective(log_weight) / ROUND
            if bool(share > best.share):
                best = Plan(place, flow, share)
            if bool(share >= GOOD) or bool(share == 0):
                break
            proposal = self._refitted(z[:, 0], log_weight[:, 0], row.x[0].isnan())
            flow = self._completing(proposal)
        return best

    def _refitted(self, z: Tensor, log_weight: Tensor, missing: Tensor) -> GapProposal:
        """A proposal for one row's missing scores, fitted to weighted draws z (draws, features)."""
        weight = _tempered(log_weight.double(), 20 + 5 * int(missing.sum())).cpu()
        drawn, share = z[:, missing].double().cpu(), (weight / weight.sum())[:, None]
        mean = (share * drawn).sum(0)
        scale = (share * (drawn - mean).square()).sum(0).sqrt().clamp(min=1e-6)
        mixture = fit_mixture((drawn - mean) / scale, ROW_COMPONENTS, float(len(mean)), weight)
        return self._moved(_embedded(GapProposal.of(mixture), mean, scale, missing.cpu()))


def _put(result: Estimate, places: Tensor, part: Estimate) -> None:
    for column, values in zip(result, part, strict=True):
        column[places] = values


def _trial_noise(seed: int, number: int = 0) -> RowNoise:
    return RowNoise(seed).from_draw(TRIAL_DRAW * (1 + number))


def _trial(flow: Flow, rows: Rows, seed: int) -> Tensor:
    """Share of each row's trial draws that count (rows,); 0 where none has any weight."""
    places = torch.arange(len(rows)).split(rows_at_once(flow.shape, rows.x.device))
    chunks = (rows[some] for some in places)
    noise = _trial_noise(seed)
    drawn = [flow.log_weights(some.x, TRIAL, some.context, noise) for some in chunks]
    return torch.cat([_effective(log_weights) for log_weights in drawn]) / TRIAL


def _distinct(x: Tensor) -> tuple[Tensor, Tensor]:
    """Where each different row of x (rows, features) is first, and which of them each row is."""
    bits = x.contiguous().view(torch.int64)  # gaps are equal there, which NaN is not
    different, which = torch.unique(bits, dim=0, return_inverse=True)
    places = torch.arange(len(x), device=x.device)
    first = torch.full((len(different),), len(x), device=x.device).scatter_reduce(
        0, which, places, "amin"
    )
    return first, which


def _effective(log_weight: Tensor) -> Tensor:
    """Effective number of draws (draws, rows) -> (rows,); 0 where none has any weight."""
    return (1 / torch.softmax(log_weight.double(), 0).square().sum(0)).nan_to_num()


def _weighted_draws(flow: Flow, rows: Rows, draws: int, noise: Noise) -> tuple[Tensor, Tensor]:
    """Complete scores (draws, rows, features) and their log-weights (draws, rows)."""
    completion, *rest = flow.layers
    noise = noise.about(rows.x, flow.shape, rows.context)
    copies = rows.x.expand(draws, *rows.x.shape).contiguous()
    z, log_weight = completion.encode(copies, rows.context, noise)
    return z, log_weight + Flow(rest, flow.base).log_weight(z, rows.context, noise)


def _choose(flow: Flow, rows: Rows, places: Tensor, count: int, n: int, seed: int) -> Tensor:
    """n completions of some rows, chosen from `count` weighted draws: (n, rows, features)."""
    some = rows[places]
    noise = RowNoise(seed).about(some.x, flow.shape, places[:, None])  # equal rows differ by place
    z, log_weight = _weighted_draws(flow, some, count, noise)
    below = torch.softmax(log_weight.double(), 0).cumsum(0)
    choice = noise.from_draw(CHOICE_DRAW)
    steps = (torch.arange(n, device=z.device)[:, None] + choice.uniform((1, len(some)), below)) / n
    chosen = torch.searchsorted(below.T.contiguous(), steps.T.contiguous()).clamp(max=count - 1)
    z = z.transpose(0, 1)[torch.arange(len(some), device=z.device)[:, None], chosen]
    filled = flow.layers[0].decode(z.transpose(0, 1).contiguous(), noise=choice)
    return torch.where(some.x.isnan(), filled, some.x)


def _tempered(log_weight: Tensor, fewest: int) -> Tensor:
    """The weights (draws,) to the largest power, at most 1, for which `fewest` draws count."""
    low, high, power = 0.0, 1.0, 1.0
    for _ in range(20):
        enough = bool(_effective(power * log_weight[:, None]) >= fewest)
        low, high = (power, high) if enough else (low, power)
        power = (low + high) / 2
    return torch.softmax(low * log_weight, 0)


def _embedded(fitted: GapProposal, mean: Tensor, scale: Tensor, missing: Tensor) -> GapProposal:
    """A proposal of the missing scores alone as one over all: the others are independent, N(0, 1)."""
    components, features = len(fitted.means), len(missing)
    means = torch.zeros(components, features, dtype=torch.float64)
    means[:, missing] = mean + scale * fitted.means
    covariances = torch.eye(features, dtype=torch.float64).repeat(components, 1, 1)
    gaps = missing.nonzero()[:, 0]
    covariances[:, gaps[:, None], gaps] = scale[:, None] * scale * fitted.covariances
    return GapProposal(fitted.log_shares.exp(), means, covariances)

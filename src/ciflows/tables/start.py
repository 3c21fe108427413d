"""A model over a table's columns: marginals and a base to start from, both fitted to training rows.

Layers of a model that start as the identity stand between the two and are trained.
"""

from __future__ import annotations

__all__ = ["column_layer", "few_rows", "fit_base", "fit_without_tails", "start_as_identity"]

import copy
import math
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from ciflows.core.flow import Flow
from ciflows.core.indexed import Indexed
from ciflows.core.layer import Layer
from ciflows.core.noise import Noise
from ciflows.core.rows import Rows
from ciflows.layers import AutoregressiveSpline, ZukoBijection
from ciflows.layers.gaussian_mixture import GaussianMixture, fit_mixture
from ciflows.tables.cells import Cells
from ciflows.tables.circular import Circular
from ciflows.tables.column import Column, Number
from ciflows.tables.column_layer import ColumnLayer
from ciflows.tables.jumps import Jumps
from ciflows.tables.lattice import Lattice
from ciflows.tables.marginals import Marginal, Smooth
from ciflows.tables.rounded import Rounded
from ciflows.tables.schema import Schema
from ciflows.tables.tails import choose_tail, spread
from ciflows.tables.without_tails import WithoutTails, find_tails
from ciflows.tables.wrapped import Wrapped

FIT_ROWS = 200_000
SEED = 0
BASE_ROWS, BASE_VALIDATION, BASE_DRAWS = 10_000, 2000, 10
COMPONENTS = (1, 2, 3, 5, 8, 12, 20, 30)
FEW_ROWS = 5000  # with more a flow soon finds what a mixture would, and is less misled by chance
# rows of the common covariance for each component, in multiples of the features
PRIORS = (0.3, 1.0, 3.0)
SMOOTHING = 0.5  # rows added to each level, atom or tail: one that was not seen is rare, not impossible
FITTED = ("nearest", "inner", "centre", "scale", "tail", "mean", "std")  # by a smooth map, to data
NARROWEST, WIDEST = 1e-3, 0.5  # scale of a circular column's scores, in periods
MOST_SMOOTHING = 5.0  # rows added to a column in all
HEAVY = 30.0  # standard deviations: a row so far away has no place in a mixture of Gaussians


def column_layer(schema: Schema, rows: Rows | None = None) -> ColumnLayer:
    """The layer that maps a table's values to scores, each column on its own.

    Arguments:
        rows: Training rows, to which the marginals are fitted; None where their numbers will be loaded.
    """
    parts: list[tuple[list[int], Marginal]] = []
    for places in _alike(schema.columns):
        marginal = _marginal([schema.columns[place] for place in places])
        parts.append((places, marginal))
        if rows is not None:
            some = rows[:FIT_ROWS]
            _fit(marginal, some.x[:, places].double(), _weights(some))
    return ColumnLayer(len(schema.columns), parts)


def _alike(columns: Sequence[Column]) -> list[list[int]]:
    """Places of columns that one marginal maps together: few values; atoms, a grid, a circle or none."""
    groups: dict[tuple[bool, ...], list[int]] = {}
    for place, column in enumerate(columns):
        groups.setdefault(_kind(column), []).append(place)
    return [groups[kind] for kind in sorted(groups, reverse=True)]


def _kind(column: Column) -> tuple[bool, ...]:
    if column.levels is not None or not isinstance(column, Number):
        return True, False, False, False
    return False, bool(column.atoms), column.grid > 0, isinstance(column, Circular)


def _marginal(columns: Sequence[Column]) -> Marginal:
    if columns[0].levels is not None:
        return _cells(columns)
    if isinstance(columns[0], Circular):
        circles = [cast(Circular, column) for column in columns]
        rows = [(column.low, column.period, column.step, column.origin) for column in circles]
        return Wrapped(*torch.tensor(rows, dtype=torch.float64).unbind(1))
    numbers = [cast(Number, column) for column in columns]
    smooth: Smooth | Rounded = _smooth(numbers)
    if numbers[0].grid:
        grid, origin = (
            torch.tensor([getattr(column, name) for column in numbers], dtype=torch.float64)
            for name in ("grid", "grid_origin")
        )
        smooth = Rounded(cast(Smooth, smooth), grid, origin)
    most = max(len(column.atoms) for column in numbers)
    if not most:
        return smooth
    atoms = [[*column.atoms, *[math.nan] * (most - len(column.atoms))] for column in numbers]
    return Jumps(smooth, torch.tensor(atoms, dtype=torch.float64))


def _cells(columns: Sequence[Column]) -> Cells:
    def of(name: str, default: float) -> Tensor:
        values = [getattr(c, name) if isinstance(c, Lattice) else default for c in columns]
        return torch.tensor(values, dtype=torch.float64)

    below, above = of("below", 0.0), of("above", 0.0)
    levels = torch.tensor([column.levels or 0 for column in columns])
    return Cells((levels + below + above).long(), of("origin", 0.0), of("step", 1.0), below, above)


def _smooth(columns: Sequence[Number]) -> Smooth:
    """A lattice's domain ends one step after its last value, and leaves out the cells of its atoms."""
    rows = []
    for column in columns:
        step, origin = (column.step, column.origin) if isinstance(column, Lattice) else (0.0, 0.0)
        first, last = column.low in column.atoms, column.high not in column.atoms
        low = -math.inf if column.low is None else column.low + step * first
        high = math.inf if column.high is None else column.high + step * last
        rows.append((low, high, step, origin))
    return Smooth(*torch.tensor(rows, dtype=torch.float64).unbind(1))


def _weights(rows: Rows) -> Tensor:
    """Weights (rows,) that are 1 on average."""
    if rows.weight is None:
        return torch.ones(len(rows), dtype=torch.float64)
    weight = rows.weight.double()
    return weight * (len(rows) / weight.sum())


@torch.no_grad()
def _fit(marginal: Marginal, x: Tensor, weight: Tensor) -> None:
    """Fit a marginal to values x (rows, columns)."""
    if isinstance(marginal, Cells):
        _fit_cells(marginal, x, weight)
    elif isinstance(marginal, Jumps):
        places, hit = marginal.find(x)
        for column in range(marginal.columns):
            on = hit[:, column]
            others = ~on if int((~on).sum()) > 1 else torch.ones_like(on)  # atoms may be all there is
            _fit_rest(marginal.rest, column, x[others, column], weight[others])
            _fit_atoms(marginal, column, places[on, column], weight, on)
    elif isinstance(marginal, Wrapped):
        _fit_wrapped(marginal, x, weight)
    elif isinstance(marginal, Smooth | Rounded):
        for place in range(marginal.columns):
            _fit_rest(marginal, place, x[:, place], weight)


def _fit_atoms(marginal: Jumps, column: int, places: Tensor, weight: Tensor, on: Tensor) -> None:
    """Fit the probabilities of one column's atoms to the rows that are at one.

    Where values are atoms because they were seen twice, new rows are at atoms less often. Values seen
    once or never have a probability of (n₁ + 2 n₂) / n together (Good and Turing), with nₖ the number of
    values seen k times; the atoms have what is left.

    Arguments:
        places: Places of the atoms (rows at one,).
        weight: Weights of all rows (rows,).
        on: Whether each row is at an atom (rows,).
    """
    atoms = int((~marginal.atoms[column].isnan()).sum())
    seen = torch.bincount(places, minlength=atoms)
    counts, others = torch.bincount(places, weight[on], atoms), float(weight[~on].sum())
    moved = min(2 * int((seen == 2).sum()), 0.9 * float(counts.sum()))
    if moved:
        lowered = counts - min(1.0, moved / atoms) * counts / seen.clamp(min=1)
        counts = lowered * (counts.sum() - moved) / lowered.sum()
        smoothed = counts + torch.where(seen > 0, 0.0, SMOOTHING)
    else:
        smoothed = counts + SMOOTHING
    marginal.probabilities[column].zero_()
    marginal.probabilities[column, :atoms] = smoothed / (smoothed.sum() + others + moved + SMOOTHING)


def _fit_rest(marginal: Smooth | Rounded, place: int, x: Tensor, weight: Tensor) -> None:
    """Fit one column of a map for all that is no atom to values x (rows,)."""
    if isinstance(marginal, Rounded):
        x = _fit_share(marginal, place, x, weight)
        marginal = marginal.rest
    _fit_smooth(marginal, place, x, weight)


def _fit_share(marginal: Rounded, place: int, x: Tensor, weight: Tensor) -> Tensor:
    """Fit the share of rounded values, and spread them over the cells of what they may have been."""
    grid, step = marginal.grid[place], marginal.step[place]
    on = marginal.on_grid(x[:, None].expand(-1, marginal.columns))[:, place]
    by_chance = float(step / grid)
    rows = float(weight.sum()) + 2 * SMOOTHING
    share = (float(weight[on].sum()) + SMOOTHING) / rows
    marginal.share[place] = min(
        max((share - by_chance) / (1 - by_chance), SMOOTHING / rows), 1.0 - SMOOTHING / rows
    )
    v = torch.rand(len(x), generator=torch.Generator().manual_seed(SEED + 1), dtype=torch.float64)
    moved = torch.where(on, x + grid * (v - 0.5), x)
    inside = (moved > marginal.low[place]) & (moved < marginal.high[place] - step)
    return torch.where(inside, moved, x)


def _fit_smooth(marginal: Smooth, place: int, x: Tensor, weight: Tensor) -> None:
    """Fit one column of a smooth map to values x (rows,), as a map of that column alone."""
    only = slice(place, place + 1)
    one = Smooth(*(part[only] for part in (marginal.low, marginal.high, marginal.step, marginal.origin)))
    _fit_column(one, x[:, None], weight)
    for name in FITTED:
        getattr(marginal, name)[only] = getattr(one, name)


def _fit_column(one: Smooth, x: Tensor, weight: Tensor) -> None:
    """Fit a smooth map of one column: middle, spread and tail, then mean 0 and variance 1."""
    v = torch.rand(len(x), 1, generator=torch.Generator().manual_seed(SEED), dtype=torch.float64)
    x = x + one.step * v.clamp(2.0**-30, 1 - 2.0**-30)
    gaps = torch.stack([x - one.low, one.high - x])
    gaps = gaps[(gaps > 0) & gaps.isfinite()]
    if len(gaps):
        one.nearest.fill_(0.5 * gaps.min())
        one.inner.copy_(x[(x > one.low) & (x < one.high)].median())
    y = one._unbounded(x)[0][:, 0].numpy()
    middle, scale = spread(y)
    one.centre.fill_(middle)
    one.scale.fill_(scale)
    one.tail.fill_(choose_tail((y - middle) / scale)[0])
    t, share = one.scores(x)[0][:, 0], weight / weight.sum()
    mean = (share * t).sum()
    one.mean.fill_(mean)
    one.std.fill_((share * (t - mean).square()).sum().sqrt().clamp(min=1e-6))


def _fit_wrapped(marginal: Wrapped, x: Tensor, weight: Tensor) -> None:
    """The wrapped normal with the circular mean and the mean resultant length of the values."""
    turn = marginal.period / (2 * math.pi)
    angle, share = (x + 0.5 * marginal.step - marginal.low) / turn, (weight / weight.sum())[:, None]
    cosine, sine = (share * torch.cos(angle)).sum(0), (share * torch.sin(angle)).sum(0)
    length = torch.hypot(cosine, sine).clamp(1e-12, 1 - 1e-12)
    scale = turn * torch.sqrt(-2 * torch.log(length))
    marginal.centre.copy_(marginal.low + turn * torch.atan2(sine, cosine))
    marginal.scale.copy_(scale.clamp(NARROWEST * marginal.period, WIDEST * marginal.period))


def _fit_cells(marginal: Cells, x: Tensor, weight: Tensor) -> None:
    """Cells as large as the levels are frequent; those that were not seen get part of a row each."""
    cells, _ = marginal.cell(x)
    for place in range(marginal.columns):
        levels = int(marginal.last[place]) + 1
        counts = torch.bincount(cells[:, place].long(), weight, levels)
        counts += min(SMOOTHING, MOST_SMOOTHING / levels)
        marginal.probabilities[place].zero_()
        marginal.probabilities[place, :levels] = counts / counts.sum()


def start_as_identity(flow: Flow) -> bool:
    """Let all layers of a model start as the identity, and tell whether they do, but for indices."""
    for layer in flow.layers:
        if isinstance(layer, ZukoBijection | AutoregressiveSpline):
            linear = [part for part in layer.modules() if isinstance(part, nn.Linear)]
            # with one feature there is no network, only the numbers that it would give
            for parameter in (linear[-1] if linear else layer).parameters():
                nn.init.zeros_(parameter)
    x = torch.randn(8, *flow.shape, generator=torch.Generator().manual_seed(SEED)).to(flow.dtype)
    context = None if flow.context_shape is None else x.new_zeros(8, *flow.context_shape)
    with torch.no_grad():
        z = x
        for layer in flow.layers:
            if not isinstance(layer, Indexed):
                z, _ = layer.encode(z, context, Noise.seeded(SEED))
    return z.shape == x.shape and torch.allclose(z, x, atol=1e-4)


def fit_base(layer: ColumnLayer, train: Rows, validation: Rows, few: bool) -> GaussianMixture:
    """The mixture that is best in validation, of few and many components, alike and unlike.

    Unless the rows are few it is one Gaussian: a flow that starts from many mostly stays closer to the
    training rows than is good, where there are enough rows to find clusters by itself.
    """
    return _best_mixture(_encode([layer], train, validation), COMPONENTS if few else (1,))


def fit_without_tails(
    layer: ColumnLayer, base: GaussianMixture, train: Rows, validation: Rows
) -> tuple[WithoutTails, GaussianMixture] | None:
    """A mixture over scores with the tails of the file, if validation prefers it to that over `base`.

    All of it is on the CPU, as the rows are, wherever the layer and the base may be.
    """
    straight = find_tails(layer)
    if straight is None:
        return None
    layer, base = copy.deepcopy(layer).cpu(), copy.deepcopy(base).cpu()
    before = _encode([layer], train, validation)
    straight.standardise(before.z)
    encoded = _encode([layer, straight], train, validation)
    if not encoded.z.abs().max() < HEAVY:
        return None
    mixture = _best_mixture(encoded, COMPONENTS)
    return (straight, mixture) if encoded.score(mixture) > before.score(base) else None


def few_rows(rows: int) -> bool:
    """Whether a table is small: several flows are worth a try, over a mixture and beside it."""
    return rows <= FEW_ROWS


class _Encoded(NamedTuple):
    """Some training and validation rows, as a mixture of Gaussians gets them.

    Attributes:
        z: Training rows (rows, features).
        weight: Their weights (rows,), if they count differently.
        held_out: Validation rows, with weights.
        draws: Scores and log-weights of the validation rows, several times where they are drawn.
    """

    z: Tensor
    weight: Tensor | None
    held_out: Rows
    draws: list[tuple[Tensor, Tensor]]

    @torch.no_grad()
    def score(self, mixture: GaussianMixture) -> float:
        """The mean log-likelihood of the validation rows."""
        dtype = mixture.means.dtype
        log_weights = torch.stack([mixture.log_weight(z.to(dtype)) + log for z, log in self.draws])
        log_prob = torch.logsumexp(log_weights, 0) - math.log(len(self.draws))
        return self.held_out.mean(log_prob).item()


@torch.no_grad()
def _encode(layers: Sequence[Layer], train: Rows, validation: Rows) -> _Encoded:
    noise, rows, held_out = Noise.seeded(SEED), train[:BASE_ROWS], validation[:BASE_VALIDATION]

    def encode(x: Tensor) -> tuple[Tensor, Tensor]:
        log_weights = []
        for layer in layers:
            x, log_weight = layer.encode(x, noise=noise)
            log_weights.append(log_weight)
        return x, sum(log_weights[1:], log_weights[0])

    z, _ = encode(rows.x)
    count = 1 if all(layer.exact for layer in layers) else BASE_DRAWS
    return _Encoded(z, rows.weight, held_out, [encode(held_out.x) for _ in range(count)])


def _best_mixture(encoded: _Encoded, choices: Sequence[int]) -> GaussianMixture:
    features = encoded.z.shape[1]
    best, best_score, worse = GaussianMixture(1, features), -math.inf, 0
    for components in choices:
        if worse == 2 or (components > 1 and 10 * components > len(encoded.z)):
            break
        worse += 1
        for prior in PRIORS:
            mixture = fit_mixture(encoded.z, components, prior * features, encoded.weight)
            score = encoded.score(mixture)
            if score > best_score:
                best, best_score, worse = mixture, score, 0
    return best

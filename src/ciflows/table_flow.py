"""From a table's codes to the noise: the layers that a schema asks for, and a base to start from.

Both are fitted to the training rows: each column's transform on its own, then a mixture of Gaussians to
all of them together. Layers of a model that start as the identity stand between the two and are trained.
"""

from __future__ import annotations

__all__ = ["column_layers", "fit_base", "start_as_identity", "table_flow"]

import math
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from ciflows.bijections import Standardise, ZukoBijection
from ciflows.columns import Bounded, Cells, HalfBounded, On, Tame, Units
from ciflows.data.schema import Column, Schema
from ciflows.data.survey import choose_tail
from ciflows.dequantise import Dequantise
from ciflows.flow import Flow
from ciflows.gaussian_mixture import GaussianMixture, fit_mixture
from ciflows.layers import Layer
from ciflows.noise import Noise
from ciflows.rows import Rows

FIT_ROWS = 200_000
SEED = 0
BASE_ROWS, BASE_VALIDATION, BASE_DRAWS = 10_000, 2000, 10
COMPONENTS = (1, 2, 3, 5, 8, 12, 20, 30)
MIXTURE_ROWS = 2000  # with more the layers find what a mixture would, and are less misled by chance
# rows of the common covariance for each component, in multiples of the features
PRIORS = (0.3, 1.0, 3.0)
SMOOTHING = 0.5  # rows added to each level: one that was not seen is rare, not impossible


def column_layers(schema: Schema, rows: Rows | None = None) -> list[Layer]:
    """Layers that make of each column one that is about N(0, 1), in the order in which data pass them.

    Arguments:
        schema: What the columns are.
        rows: Training rows, to which the marginal transforms are fitted; None where their numbers will
            be loaded.
    """
    columns = schema.columns
    build = _Builder(len(columns), None if rows is None else rows[:FIT_ROWS])
    build.add(range(len(columns)), lambda x: Units(torch.tensor([c.scale for c in columns])))
    build.add(_where(columns, lambda c: c.dequantised), lambda x: Dequantise((x.shape[1],)))
    bounded = _where(columns, lambda c: c.levels is None and c.width is not None)
    widths = [columns[place].width for place in bounded]
    build.add(bounded, lambda x: Bounded(torch.tensor(widths)))
    half = _where(columns, lambda c: c.levels is None and c.width is None and _has_bound(c))
    build.add(half, lambda x: HalfBounded(x.shape[1]))
    smooth = _where(columns, lambda c: c.levels is None)
    build.add(smooth, _tame)
    build.add(smooth, build.standardise)
    cells = _where(columns, lambda c: c.levels is not None)
    build.add(cells, lambda x: build.cells(x, [columns[place] for place in cells]))
    return build.layers


def table_flow(flow: Flow, schema: Schema, components: int) -> Flow:
    """A model over a table's columns, as it is before anything is fitted or loaded.

    Arguments:
        flow: The model, over features of variance 1.
        schema: What the columns are.
        components: How many Gaussians the base is a mixture of; 0 for the model's own base.
    """
    base = GaussianMixture(components, flow.shape[0]) if components else flow.base
    return Flow([*column_layers(schema), *cast(Sequence[Layer], flow.layers)], base)


def start_as_identity(flow: Flow) -> bool:
    """Let all layers of a model start as the identity, and tell whether they do."""
    for layer in flow.layers:
        if isinstance(layer, ZukoBijection):
            linear = [part for part in layer.modules() if isinstance(part, nn.Linear)]
            # of one feature alone there is no network, only the numbers that it would give
            for parameter in (linear[-1] if linear else layer).parameters():
                nn.init.zeros_(parameter)
    x = torch.randn(8, *flow.shape, generator=torch.Generator().manual_seed(SEED)).to(flow.dtype)
    context = None if flow.context_shape is None else x.new_zeros(8, *flow.context_shape)
    with torch.no_grad():
        z = x
        for layer in cast(Sequence[Layer], flow.layers):
            z, _ = layer.encode(z, context, Noise.seeded(SEED))
    return z.shape == x.shape and torch.allclose(z, x, atol=1e-4)


@torch.no_grad()
def fit_base(layers: Sequence[Layer], train: Rows, validation: Rows) -> GaussianMixture:
    """The mixture that is best in validation, of few and many components, alike and unlike.

    Of more than `MIXTURE_ROWS` rows it is one Gaussian: a flow that starts from many of them stays
    closer to the training rows than is good, where there are enough rows to find clusters by itself.

    Arguments:
        layers: The columns' layers, fitted.
        train: Training rows; some of them will do.
        validation: Validation rows.
    """
    noise, z = Noise.seeded(SEED), train.x[:BASE_ROWS].float()
    weight = None if train.weight is None else train.weight[:BASE_ROWS]
    for layer in layers:
        z, _ = layer.encode(z, noise=noise)
    held_out = validation[:BASE_VALIDATION]
    best, best_score, worse = GaussianMixture(1, z.shape[1]), -math.inf, 0
    for components in COMPONENTS if len(train) <= MIXTURE_ROWS else (1,):
        if worse == 2 or (components > 1 and 10 * components > len(z)):
            break
        worse += 1
        for prior in PRIORS:
            mixture = fit_mixture(z, components, prior * z.shape[1], weight)
            whole = Flow(layers, mixture).eval()
            estimate = whole.estimate(held_out.x.float(), BASE_DRAWS, seed=SEED)
            score = held_out.mean(estimate.log_prob).item()
            if score > best_score:
                best, best_score, worse = mixture, score, 0
    return best


def _where(columns: Sequence[Column], wanted: Callable[[Column], bool]) -> list[int]:
    return [place for place, column in enumerate(columns) if wanted(column)]


def _has_bound(column: Column) -> bool:
    return column.low is not None or column.high is not None


class _Builder:
    """Adds layers one by one, each fitted to what the ones before make of the training rows."""

    def __init__(self, features: int, rows: Rows | None) -> None:
        self.features = features
        # rows of ones, where nothing is fitted: they have the right shape
        self.fitted = rows is not None
        self.x = torch.ones(2, features) if rows is None else rows.x.float()
        self.weight = None if rows is None else rows.weight
        self.noise = Noise.seeded(SEED)
        self.layers: list[Layer] = []

    def add(self, places: Sequence[int], make: Callable[[Tensor], Layer]) -> None:
        """Add a layer over the columns at some places, if there are any."""
        if not places:
            return
        layer = make(self.x[:, list(places)])
        whole = layer if len(places) == self.features else On(self.features, places, layer)
        self.layers.append(whole)
        if self.fitted:
            self.x = whole.encode(self.x, noise=self.noise)[0]

    def standardise(self, x: Tensor) -> Layer:
        """To mean 0 and variance 1, weighted."""
        if not self.fitted:
            return Standardise(torch.ones(x.shape[1]), torch.ones(x.shape[1]))
        weight = torch.ones(len(x), 1) if self.weight is None else self.weight[:, None]
        x, share = x.double(), (weight / weight.sum()).double()
        mean = (share * x).sum(0)
        variance = (share * (x - mean).square()).sum(0)
        return Standardise(mean.float(), variance.sqrt().clamp(min=1e-6).float())

    def cells(self, x: Tensor, columns: Sequence[Column]) -> Layer:
        """Cells as large as the levels are frequent."""
        most = max(column.levels or 0 for column in columns)
        table = torch.zeros(len(columns), most, dtype=torch.float64)
        weight = (
            torch.ones(len(x)) if self.weight is None else self.weight * (len(x) / self.weight.sum())
        )
        for index, column in enumerate(columns):
            assert column.levels is not None
            seen = x[:, index].long().clamp(0, column.levels - 1)
            counts = torch.bincount(seen, weight.double(), column.levels)
            counts += _prior(counts, column)
            table[index, : column.levels] = counts / counts.sum()
        return Cells(table)


def _prior(counts: Tensor, column: Column) -> Tensor:
    """Rows to add to each level: the same inside what was seen, ever fewer outside where no bound is."""
    if column.kind == "categorical" or not counts.any():
        return torch.full_like(counts, SMOOTHING)
    seen = counts.nonzero()
    level = torch.arange(len(counts))
    below = (seen.min() - level).clamp(min=0) * (column.low is None)
    above = (level - seen.max()).clamp(min=0) * (column.high is None)
    return SMOOTHING * 0.5 ** (below + above).double()


def _tame(x: Tensor) -> Layer:
    values = x.double().numpy()
    quarter, centre, three = np.quantile(values, [0.25, 0.5, 0.75], axis=0)
    spread = (three - quarter) / 1.35
    scale = np.where(spread > 0, spread, np.maximum(values.std(0), 1e-6))
    tails = [choose_tail(column)[0] for column in ((values - centre) / scale).T]
    return Tame(*(torch.tensor(part, dtype=torch.float32) for part in (centre, scale, tails)))

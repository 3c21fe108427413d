"""What a table's density has to pass before anything is reported of it: its mass is 1."""

from __future__ import annotations

__all__ = ["SelfTest", "check_mass", "column_mass"]

import math
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ciflows.core.flow import Flow
from ciflows.core.noise import Noise
from ciflows.errors import UserError
from ciflows.tables.cells import Cells
from ciflows.tables.column_layer import ColumnLayer
from ciflows.tables.jumps import Jumps
from ciflows.tables.marginals import Marginal, Smooth, log_normal, normal_between
from ciflows.tables.rounded import Rounded
from ciflows.tables.wrapped import Wrapped

POINTS = 8001
REACH = 10.0
BEYOND = 1000
DRAWS, SEED = 2000, 0
SAMPLES = 8
TOLERANCE = 0.01
STD_ERRORS = 5.0
FEWEST = 100  # effective draws from which on the mass of the whole tells anything


class SelfTest(NamedTuple):
    """The mass of a table's density.

    Attributes:
        columns: Mass of each column's marginal by quadrature (features,).
        total: Mass of the whole density, by importance sampling from independent columns.
        effective: Effective number of the draws that it is from.
    """

    columns: tuple[float, ...]
    total: float
    total_error: float
    effective: float


@torch.no_grad()
def check_mass(flow: Flow, context: Tensor | None = None) -> SelfTest:
    """Measure the mass of a trained table's density, and refuse one that is not 1.

    With z ~ N(0, I) for the columns' scores the mean of p(z) / N(z; 0, I) is the mass of p. Where
    columns depend strongly few draws count and the mean comes out low; high it comes by chance alone.

    Arguments:
        flow: The flow, in eval() mode, whose first layer is a table's `ColumnLayer`.
        context: Contexts (rows, context_shape) of a conditional density, to take in turn.
    """
    layer = cast(ColumnLayer, flow.layers[0])
    columns = column_mass(layer)
    inner = Flow(list(flow.layers)[1:], flow.base).eval()
    noise = Noise.seeded(SEED, flow.device)
    z = noise.normal((DRAWS, *flow.shape), like=next(iter(flow.parameters())))
    if context is not None:
        context = context[torch.arange(DRAWS) % len(context)]
    log_prob = inner.estimate(z, SAMPLES, context=context, seed=SEED).log_prob.double()
    ratio = torch.exp(log_prob - log_normal(z.double()).sum(-1))
    error = ratio.std().item() / math.sqrt(DRAWS)
    effective = (ratio.sum().square() / ratio.square().sum().clamp(min=1e-300)).item()
    result = SelfTest(columns, ratio.mean().item(), error, effective)
    wrong = [mass for mass in columns if abs(mass - 1) > TOLERANCE]
    if wrong or (effective > FEWEST and result.total - 1 > max(STD_ERRORS * error, TOLERANCE)):
        raise UserError(
            f"The density fails its self-test: masses of columns {columns}, in all {result.total:.4f} ± "
            f"{error:.4f}. Please report this with your table's description."
        )
    return result


@torch.no_grad()
def column_mass(layer: ColumnLayer) -> tuple[float, ...]:
    """The mass of each column's marginal: a sum over its values, or an integral (trapezoid rule)."""
    masses = torch.zeros(layer.shape[0], dtype=torch.float64)
    for places, marginal in zip(layer.places, layer.marginals, strict=True):
        masses[places] = _mass(marginal).cpu()
    return tuple(masses.tolist())


def _mass(marginal: Marginal) -> Tensor:
    if isinstance(marginal, Cells):
        return _mass_of_cells(marginal)
    if isinstance(marginal, Jumps):
        atoms = marginal.atoms.nan_to_num().T
        z, log_weight = marginal.encode(atoms, Noise())
        there = marginal.probabilities.T > 0
        on_atoms = torch.where(there, torch.exp(log_normal(z) + log_weight), 0.0).sum(0)
        places = torch.where(there, normal_between(*marginal.rest.edges(atoms)), 0.0).sum(0)
        return on_atoms + (1 - marginal.probabilities.sum(-1)) * (_mass(marginal.rest) - places)
    if isinstance(marginal, Rounded):
        return marginal.share + (1 - marginal.share) * _mass_of_smooth(marginal.rest)
    if isinstance(marginal, Wrapped):
        part = torch.arange(POINTS, dtype=torch.float64, device=marginal.low.device) / POINTS
        x = marginal.low + part[:, None] * marginal.period
        return torch.exp(marginal.log_density(x)).mean(0) * marginal.period
    return _mass_of_smooth(cast(Smooth, marginal))


def _mass_of_smooth(marginal: Smooth) -> Tensor:
    mass = _trapezoid(marginal, POINTS)
    if bool(((mass - 1).abs() > TOLERANCE / 10).any()):  # a map that bends much asks for a finer grid
        mass = _trapezoid(marginal, 50 * POINTS)
    return mass


def _trapezoid(marginal: Smooth, points: int) -> Tensor:
    """The integral over values; where float64 has no value between two scores, their own mass."""
    grid = torch.linspace(-REACH, REACH, points, dtype=torch.float64, device=marginal.low.device)
    x = marginal.values(grid[:, None].expand(-1, marginal.columns))
    z, log_slope = marginal.scores(x)
    log_density, width = log_normal(z) + log_slope, x.diff(dim=0)
    between = torch.special.ndtr(grid).diff()[:, None]
    precision = torch.finfo(x.dtype)
    near = width <= 8 * precision.eps * x[1:].abs().clamp(min=precision.tiny / precision.eps)
    ends = torch.stack([log_density[1:], log_density[:-1]])
    area = 0.5 * torch.exp(ends + torch.log(width)).sum(0)  # a density may be above all of float64
    return torch.where(near, between, area).nan_to_num().sum(0)


def _mass_of_cells(marginal: Cells) -> Tensor:
    """The sum over all levels, and over many values of each tail with what is left of it."""
    most = int(marginal.last.max()) + 1
    steps = torch.arange(-BEYOND, most + BEYOND, dtype=torch.float64, device=marginal.last.device)
    x = marginal.origin + marginal.step * steps[:, None]
    z, log_weight = marginal.encode(x, Noise())
    _, beyond = marginal.cell(x)
    p = torch.exp(log_normal(z) + log_weight)
    farthest = torch.stack([beyond[0], beyond[-1]])
    left = torch.stack([p[0], p[-1]]) * (farthest + 1)
    return p.sum(0) + torch.where(torch.stack([p[0], p[-1]]) > 0, left, 0.0).sum(0)

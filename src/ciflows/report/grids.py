"""What a report is made from: trained runs, and their densities on a grid.

Densities are evaluated at the middles of a grid's cells, so that their sum times a cell's area is the
model's mass in the window. Few draws do not bias it, since p(x) itself is estimated without bias; sharp
edges that fall between the middles of cells may, by a per cent or so.
"""

from __future__ import annotations

__all__ = [
    "DensityGrid",
    "Entry",
    "Window",
    "density_grid",
    "density_grids",
    "find_window",
    "in_plane",
    "on_device",
    "shared_top",
    "true_grid",
]

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ciflows.flow import Flow

if TYPE_CHECKING:
    from ciflows.data import Dataset, Synthetic

Array = NDArray[np.float64]
Window = tuple[float, float, float, float]

GRID_SIDE = 160
GRID_DRAWS = 8


class Entry(NamedTuple):
    """One trained run.

    Attributes:
        name: What the report calls it.
        flow: The trained flow.
        dataset: The data it was trained and tested on.
        metrics: The content of metrics.json.
        history: The rows of metrics.jsonl.
        config: The resolved configuration, as TOML.
    """

    name: str
    flow: Flow
    dataset: Dataset
    metrics: dict[str, Any]
    history: list[dict[str, Any]]
    config: str


class DensityGrid(NamedTuple):
    """A density p on the middles of the cells of a square grid.

    Attributes:
        window: What it covers: (x_low, x_high, y_low, y_high).
        density: Values (side, side), the lowest row first.
        samples: Draws for each value; 1 where it is exact.
    """

    window: Window
    density: Array
    samples: int

    @property
    def mass(self) -> float:
        """The integral over the window."""
        x_low, x_high, y_low, y_high = self.window
        return float(self.density.mean() * (x_high - x_low) * (y_high - y_low))


def density_grid(
    flow: Flow, window: Window, side: int = GRID_SIDE, samples: int = GRID_DRAWS, seed: int = 0
) -> DensityGrid:
    """A flow's density on a grid, from a few draws for each value where it is no plain flow."""
    samples = 1 if flow.exact else samples
    points = on_device(grid_points(window, side), flow)
    log_prob = flow.log_prob(points, samples, seed=seed).double().cpu()
    return DensityGrid(window, torch.exp(log_prob).reshape(side, side).numpy(), samples)


def density_grids(entries: Sequence[Entry], seed: int = 0) -> list[DensityGrid | None]:
    """The grid of each entry, None where its data are not in the plane: for reports and pictures."""
    return [
        density_grid(entry.flow, find_window(entry.dataset), seed=seed)
        if in_plane(entry.dataset)
        else None
        for entry in entries
    ]


def true_grid(truth: Synthetic, side: int = GRID_SIDE) -> DensityGrid | None:
    """The true density on a grid, where it is known."""
    if truth.log_density is None:
        return None
    log_density = truth.log_density(grid_points(truth.window, side)).double()
    return DensityGrid(truth.window, torch.exp(log_density).reshape(side, side).numpy(), 1)


def grid_points(window: Window, side: int) -> Tensor:
    """The middles of the cells (side², 2), row by row from below."""
    x_low, x_high, y_low, y_high = window
    middles = (torch.arange(side, dtype=torch.float64) + 0.5) / side
    y, x = torch.meshgrid(
        y_low + (y_high - y_low) * middles, x_low + (x_high - x_low) * middles, indexing="ij"
    )
    return torch.stack([x, y], dim=-1).reshape(-1, 2)


def find_window(dataset: Dataset) -> Window:
    """What a plot of data in the plane should show: nearly all of them, and some room around."""
    if dataset.truth is not None:
        return dataset.truth.window
    some = dataset.train[:100_000].double()
    ends = torch.quantile(some, torch.tensor([0.002, 0.998], dtype=some.dtype), dim=0)
    room = 0.15 * (ends[1] - ends[0]).clamp(min=1e-6)
    (x_low, y_low), (x_high, y_high) = (ends[0] - room).tolist(), (ends[1] + room).tolist()
    return (x_low, x_high, y_low, y_high)


def in_plane(dataset: Dataset) -> bool:
    return tuple(dataset.train.shape[1:]) == (2,)


def on_device(x: Tensor, flow: Flow) -> Tensor:
    """x where the flow is, in its precision."""
    return x.to(flow.device, flow.dtype)


def shared_top(grids: Iterable[DensityGrid]) -> float:
    """The density at the upper end of a colour scale for all of some grids.

    Nearly the largest value: a few cells of one model should not darken all the others.
    """
    return max(float(np.quantile(grid.density, 0.998)) for grid in grids)

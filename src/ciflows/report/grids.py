"""What a report is made from: trained runs, and their densities on a grid.

Densities are evaluated at the middles of a grid's cells, so that their sum times a cell's area is the
model's mass in the window. Few draws do not bias it, since p(x) itself is estimated without bias, if not
log p(x); sharp edges that fall between the middles of cells may, by a per cent or so.
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
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ciflows.core.flow import Flow
from ciflows.files import typed_path
from ciflows.tables.real import Real

if TYPE_CHECKING:
    from ciflows.datasets import Dataset, Synthetic

Array = NDArray[np.float64]
Window = tuple[float, float, float, float]

GRID_SIDE = 120  # edges at whole numbers then fall between cells in most windows
FINER = 5  # points a side of each cell for a true density
GRID_DRAWS = 400_000  # for all cells together: seconds for a small flow, within a minute for a large one
FEWEST_DRAWS, MOST_DRAWS = 16, 100
PILOTS = 20_000


class Entry(NamedTuple):
    """One trained run.

    Attributes:
        name: What the report calls it.
        dataset: The data it was trained and tested on.
        metrics: The content of metrics.json.
        config: The resolved configuration, as TOML.
        folder: The run folder, as you would type it.
        options: What the command line says of a table, such as "--given age".
    """

    name: str
    flow: Flow
    dataset: Dataset
    metrics: dict[str, Any]
    history: list[dict[str, Any]]
    config: str
    folder: str = "RUN"
    options: str = ""

    def command(self, verb: str, *words: str) -> str:
        """A command on the data, ready to be pasted: `ciflows VERB DATA WORDS OPTIONS`."""
        return " ".join(["ciflows", verb, typed_path(self.dataset.name), *words, self.options]).rstrip()

    def score_command(self, *words: str) -> str:
        """The command that scores the data with this run."""
        return " ".join(["ciflows score", self.folder, typed_path(self.dataset.name), *words])


class DensityGrid(NamedTuple):
    """A density p on the middles of the cells of a square grid.

    Attributes:
        window: What it covers: (x_low, x_high, y_low, y_high).
        density: Values (side, side), the lowest row first.
        samples: Draws for each value where the model has mass; 1 where it is exact.
    """

    window: Window
    density: Array
    samples: int

    @property
    def mass(self) -> float:
        """The integral over the window; NaN where a value is."""
        x_low, x_high, y_low, y_high = self.window
        return float(self.density.mean() * (x_high - x_low) * (y_high - y_low))


def density_grid(flow: Flow, window: Window, side: int = GRID_SIDE, seed: int = 0) -> DensityGrid:
    """A flow's density on a grid; if it needs draws, most of them go to cells that hold mass.

    Off the data q(u | x) was never trained and single draws have huge weights: speckle. Samples of the
    model decide which cells get more draws. The weights themselves must not: cells whose draws missed
    the mass would stay without it, and p(x) would be biased.
    """
    points = on_device(grid_points(window, side), flow)
    if flow.exact:
        return DensityGrid(window, _density(flow, points, 1, seed).reshape(side, side), 1)
    near = _cells_with_mass(flow.sample(PILOTS, seed=seed).double().cpu(), window, side)
    rest = FEWEST_DRAWS * int((~near).sum())
    samples = int(np.clip((GRID_DRAWS - rest) // max(1, near.sum()), FEWEST_DRAWS, MOST_DRAWS))
    density = np.empty(side * side)
    density[near] = _density(flow, points[torch.from_numpy(near)], samples, seed)
    density[~near] = _density(flow, points[torch.from_numpy(~near)], FEWEST_DRAWS, seed)
    return DensityGrid(window, density.reshape(side, side), samples)


def density_grids(entries: Sequence[Entry], seed: int = 0) -> list[DensityGrid | None]:
    """The grid of each entry, None where its data are not in the plane: for reports and pictures."""
    return [
        density_grid(entry.flow, find_window(entry.dataset), seed=seed)
        if in_plane(entry.dataset)
        else None
        for entry in entries
    ]


def true_grid(truth: Synthetic) -> DensityGrid | None:
    """The true density on a grid, where it is known: means over FINER² points of each cell."""
    if truth.log_density is None:
        return None
    density = torch.exp(truth.log_density(grid_points(truth.window, GRID_SIDE * FINER)).double())
    means = density.reshape(GRID_SIDE, FINER, GRID_SIDE, FINER).mean(dim=(1, 3))
    return DensityGrid(truth.window, means.numpy(), 1)


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
    """Whether points have a place in the plane: two numbers each, given nothing."""
    schema = dataset.schema
    real = schema is None or all(
        isinstance(column, Real) and not column.atoms for column in schema.columns
    )
    return dataset.shape == (2,) and real and (schema is None or not schema.given)


def on_device(x: Tensor, flow: Flow) -> Tensor:
    """x where the flow is, in the type that it takes."""
    return x.to(flow.device, flow.input_dtype)


def shared_top(grids: Iterable[DensityGrid]) -> float:
    """The density at the upper end of a colour scale for all of some grids.

    Nearly the largest value: a few cells of one model should not darken all the others.
    """
    finite = [grid.density[np.isfinite(grid.density)] for grid in grids]
    top = max((float(np.quantile(values, 0.998)) for values in finite if len(values)), default=0.0)
    return top if top > 0 else 1.0


@torch.no_grad()
def _density(flow: Flow, points: Tensor, samples: int, seed: int) -> Array:
    return torch.exp(flow.log_prob(points, samples, seed=seed).double()).cpu().numpy()


def _cells_with_mass(samples: Tensor, window: Window, side: int) -> NDArray[np.bool_]:
    """Which cells (side²) have a sample of the model in them or within two cells."""
    x = samples.numpy()
    x_low, x_high, y_low, y_high = window
    counts = np.histogram2d(x[:, 1], x[:, 0], side, [[y_low, y_high], [x_low, x_high]])[0]
    around = F.max_pool2d(torch.from_numpy(counts)[None], 5, 1, 2)
    return (around > 0).flatten().numpy()

"""Runs whose law is known, built by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ciflows import Flow, Run
from ciflows.layers import Affine
from ciflows.layers.linear import LULinear
from ciflows.runs.config import resolve
from ciflows.tables import Schema
from ciflows.tables.categorical import Categorical
from ciflows.tables.cells import Cells
from ciflows.tables.circular import Circular
from ciflows.tables.column_layer import ColumnLayer
from ciflows.tables.jumps import Jumps
from ciflows.tables.lattice import Lattice
from ciflows.tables.marginals import Smooth
from ciflows.tables.real import Real
from ciflows.tables.wrapped import Wrapped

Array = NDArray[np.float64]


class Moments(NamedTuple):
    """Means (rows, columns) and covariances (rows, columns, columns) of a, b given x."""

    mean: Array
    covariance: Array

    @property
    def std(self) -> Array:
        return np.sqrt(np.diagonal(self.covariance, axis1=-2, axis2=-1))


def make_run(flow: Flow, schema: Schema) -> Run:
    about = {"columns": list(schema.names), "schema": schema.model_dump(mode="json")}
    return Run(Path("nowhere"), resolve("annulus", "maf"), flow.eval(), about, {}, [])


def gaussian_run() -> Run:
    """a, b | x ~ N(m(x), D(x) C D(x)); see `moments`."""
    network = nn.Linear(1, 4)
    network.weight.data = torch.tensor([[-0.3], [0.0], [-2.0], [1.0]])
    network.bias.data = torch.tensor([0.0, -1.0, -1.0, 0.5])
    mix = LULinear(2)
    mix.lower.data = torch.tensor([-0.8])
    schema = Schema(
        columns=(Real(name="a", dtype="Float64"), Real(name="b", dtype="Float64")),
        given=(Real(name="x", dtype="Float64"),),
        order=("x", "a", "b"),
    )
    return make_run(Flow([Affine(2, network, 1), mix]).double(), schema)


def moments(x: Any) -> Moments:
    """The law of `gaussian_run`: y = D(c) w + m(c), w = (L U)⁻¹ z, c = arcsinh(x)."""
    c = np.arcsinh(np.asarray(x, dtype=np.float64))
    mean = np.stack([2 * c + 1, -c - 0.5], axis=-1)
    scale = np.stack([np.exp(0.3 * c), np.full_like(c, np.e)], axis=-1)
    inverse = np.linalg.inv(np.array([[1.0, 0.0], [-0.8, 1.0]]))
    covariance = scale[:, :, None] * (inverse @ inverse.T) * scale[:, None, :]
    return Moments(mean, covariance)


def draw_known(x: Array, seed: int) -> Array:
    """Draws (rows, 2) from the law of `gaussian_run`, by numpy."""
    law = moments(x)
    z = np.random.default_rng(seed).normal(size=(len(x), 2))
    return law.mean + (np.linalg.cholesky(law.covariance) @ z[..., None])[..., 0]


def circle_run() -> Run:
    """hour ~ N(0.5, 2²) around a clock of 24, y ~ N(0, 1)."""
    hour = Wrapped(torch.tensor([0.0]), torch.tensor([24.0]))
    hour.centre.fill_(0.5)
    hour.scale.fill_(2.0)
    y = Smooth(torch.tensor([-torch.inf]), torch.tensor([torch.inf]))
    schema = Schema(
        columns=(Circular(name="hour", dtype="Float64", high=24.0), Real(name="y", dtype="Float64")),
        order=("hour", "y"),
    )
    return make_run(Flow([ColumnLayer(2, [([0], hour), ([1], y)])]), schema)


def discrete_run() -> Run:
    """spend: 0 with 0.4, else exp(N(0, 1)); count: 0, ..., 4 alike; city: two alike."""
    smooth = Smooth(torch.tensor([0.0]), torch.tensor([torch.inf]))
    spend = Jumps(smooth, torch.tensor([[0.0]]))
    spend.probabilities.fill_(0.4)
    layer = ColumnLayer(
        3, [([0], spend), ([1], Cells(torch.tensor([5]))), ([2], Cells(torch.tensor([2])))]
    )
    schema = Schema(
        columns=(
            Real(name="spend", dtype="Float64", low=0.0, atoms=(0.0,)),
            Lattice(name="count", dtype="Int64", step=1.0, origin=0.0, count=5, low=0.0, high=4.0),
            Categorical(name="city", dtype="String", categories=["Bonn", "Oslo"]),
        ),
        order=("spend", "count", "city"),
    )
    return make_run(Flow([layer]), schema)

"""The cases: models at the sizes of the paper's authors, and growth of cost with one size."""

from __future__ import annotations

__all__ = ["CASES", "GROWING", "GROWTH", "Case", "Growth", "growing_case"]

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """A model of one size on data of one shape.

    Attributes:
        name: Model and shape, to read.
        model: The model.
        features: Features of one point.
        settings: Settings of the model.
        batch: Points in a training step.
        draws: Draws of the index for each likelihood, m.
        peer: The library with a flow of equal size, if any.
        plain: Settings of the flow without an index and with the same f, to compare with.
        authors: The data set with these settings in the authors' code, if any.
    """

    name: str
    model: str
    features: int
    settings: dict[str, Any] = field(default_factory=dict)
    batch: int = 1000
    draws: int = 10
    peer: str | None = None
    plain: dict[str, Any] | None = None
    authors: str | None = None


def _nets(affine: list[int], prior: list[int], posterior: list[int]) -> dict[str, Any]:
    return {"affine_hidden": affine, "prior_hidden": prior, "posterior_hidden": posterior}


_SMALL = _nets([10, 10], [10, 10], [10, 10])
_MAF_2D: dict[str, Any] = {"layers": 5, "hidden": [50] * 4}
_MAF = {"layers": 10, "hidden": [100, 100]}
_WIDE_MAF = {"layers": 10, "hidden": [512, 512]}
_NSF = {"layers": 10, "hidden": [256, 256], "bins": 8}
_SMALL_NSF = {"layers": 10, "hidden": [64, 64], "bins": 4}
_DURKAN = {"residual": True, "linear": True, "bound": 3.0}

# Plain flows are as zuko has them: without the authors' batch norms, and splines without the residual
# networks and LU maps that CIFs of splines have here.
CASES = [
    Case("resflow, 2-D", "resflow", 2, peer="normflows", authors="2uniforms"),
    Case(
        "cif-resflow, 2-D",
        "cif-resflow",
        2,
        {"index_features": 1, **_SMALL},
        draws=100,
        peer="normflows",
        authors="2uniforms",
    ),
    Case("maf, 2-D", "maf", 2, _MAF_2D, peer="zuko"),
    Case(
        "cif-maf, 2-D",
        "cif-maf",
        2,
        {**_MAF_2D, "index_features": 1, **_nets([10, 10], [50] * 4, [50] * 4)},
        draws=100,
        plain=_MAF_2D,
        authors="2uniforms",
    ),
    Case("nsf, 2-D", "nsf", 2, {"layers": 5, "hidden": [50, 50], "bins": 8}, peer="zuko"),
    Case("resflow, POWER", "resflow", 6, peer="normflows", authors="power"),
    Case(
        "cif-resflow, POWER",
        "cif-resflow",
        6,
        {"index_features": 2, **_SMALL},
        peer="normflows",
        authors="power",
    ),
    Case("maf, POWER", "maf", 6, _MAF, peer="zuko"),
    Case(
        "cif-maf, POWER",
        "cif-maf",
        6,
        {**_MAF, "index_features": 2, **_nets([100, 100], [200, 200], [200, 200])},
        plain=_MAF,
        authors="power",
    ),
    Case("cif-maf, POWER, default sizes", "cif-maf", 6, plain={}),
    Case("nsf, POWER", "nsf", 6, _NSF, batch=512, peer="zuko"),
    Case(
        "cif-nsf, POWER",
        "cif-nsf",
        6,
        {**_NSF, **_DURKAN, "index_features": 2, **_nets([100] * 3, [200] * 3, [10, 10])},
        batch=512,
        authors="power",
    ),
    Case("resflow, MINIBOONE", "resflow", 43, peer="normflows", authors="miniboone"),
    Case(
        "cif-resflow, MINIBOONE",
        "cif-resflow",
        43,
        {"index_features": 10, **_SMALL},
        peer="normflows",
        authors="miniboone",
    ),
    Case(
        "cif-resflow, MINIBOONE, estimated log-dets",
        "cif-resflow",
        43,
        {"index_features": 10, "log_det": "roulette", **_SMALL},
        peer="normflows",
        authors="miniboone",
    ),
    Case("maf, MINIBOONE", "maf", 43, _WIDE_MAF, peer="zuko"),
    Case(
        "cif-maf, MINIBOONE",
        "cif-maf",
        43,
        {**_WIDE_MAF, "index_features": 10, **_nets([128] * 2, [128] * 2, [128] * 2)},
        plain=_WIDE_MAF,
        authors="miniboone",
    ),
    Case("nsf, MINIBOONE", "nsf", 43, _SMALL_NSF, batch=64, peer="zuko"),
    Case(
        "cif-nsf, MINIBOONE",
        "cif-nsf",
        43,
        {**_SMALL_NSF, **_DURKAN, "hidden": [64], "index_features": 10}
        | _nets([25] * 3, [50] * 3, [10, 10]),
        batch=64,
        authors="miniboone",
    ),
]


@dataclass(frozen=True)
class Growth:
    """A size to vary, all else being equal, and the work whose cost it changes.

    Attributes:
        size: The size: a field of a case, or a setting of its model.
        values: Its values.
        work: What is timed.
    """

    size: str
    values: tuple[int, ...]
    work: str


GROWTH = [
    Growth("layers", (2, 5, 10, 20), "step"),
    Growth("features", (2, 4, 8, 16, 32), "step"),
    Growth("batch", (100, 300, 1000, 3000), "step"),
    Growth("draws", (1, 3, 10, 30), "log_prob"),
]
GROWING = {
    "cif-resflow": {"layers": 10, "index_features": 1, **_SMALL},
    "cif-maf": {"layers": 10, "hidden": [128, 128], "index_features": 1},
}


def growing_case(model: str, growth: Growth, value: int) -> Case:
    """A two-dimensional model, of which one size has another value."""
    sizes: dict[str, Any] = {"features": 2, "batch": 1000, "draws": 10}
    settings = dict(GROWING[model])
    (sizes if growth.size in sizes else settings)[growth.size] = value
    return Case(f"{model}, {growth.size} = {value}", model, settings=settings, **sizes)

"""The list of models, and the door to build one."""

from __future__ import annotations

__all__ = ["MODELS", "Model", "build_model", "get_model"]

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ciflows.errors import UserError, nearest
from ciflows.flow import Flow
from ciflows.models import autoregressive, resflow
from ciflows.settings import Settings, parse_settings


class Model(NamedTuple):
    """A named family of flows.

    Attributes:
        summary: What it is, in one line.
        settings: The class of its settings.
        build: Makes the layers for (features, context_features, settings).
    """

    summary: str
    settings: type[Settings]
    build: Callable[[int, int, Any], Flow]


MODELS: dict[str, Model] = {
    "resflow": Model(
        "residual flow: blocks x + g(x) with Lip g < 1; exact likelihoods",
        resflow.ResFlowSettings,
        resflow.build,
    ),
    "cif-resflow": Model(
        "residual flow with a continuous index after each block (the paper's CIF-ResFlow)",
        resflow.CIFResFlowSettings,
        resflow.build,
    ),
    "maf": Model(
        "masked autoregressive flow; samples in as many passes as features",
        autoregressive.MAFSettings,
        autoregressive.build,
    ),
    "cif-maf": Model(
        "masked autoregressive flow with a continuous index after each layer",
        autoregressive.CIFMAFSettings,
        autoregressive.build,
    ),
    "nsf": Model(
        "neural spline flow, autoregressive or coupling; the latter is quick to sample",
        autoregressive.NSFSettings,
        autoregressive.build,
    ),
    "cif-nsf": Model(
        "neural spline flow with a continuous index after each layer",
        autoregressive.CIFNSFSettings,
        autoregressive.build,
    ),
    "realnvp": Model(
        "affine couplings; quick both ways",
        autoregressive.RealNVPSettings,
        autoregressive.build,
    ),
    "cif-realnvp": Model(
        "affine couplings with a continuous index after each",
        autoregressive.CIFRealNVPSettings,
        autoregressive.build,
    ),
}


def get_model(name: str) -> Model:
    """Look up a model, or name the nearest ones."""
    if name not in MODELS:
        raise UserError(f"There is no model {name!r}. {nearest(name, MODELS)}")
    return MODELS[name]


def build_model(
    name: str, *, features: int, context_features: int = 0, seed: int = 0, **settings: Any
) -> Flow:
    """Build a model by name, with fresh parameters that depend on `seed` alone.

    Arguments:
        name: A name that `ciflows models` prints.
        features: Size of one data point.
        context_features: Size of the context, for a conditional density.
        seed: Seed of the initial parameters.
        settings: Settings of that model; `ciflows models NAME` lists them.

    Example:
        >>> flow = build_model("resflow", features=2, layers=2, hidden=[16, 16])
        >>> flow.exact
        True
    """
    model = get_model(name)
    if features < 1:
        raise UserError(f"A model needs at least one feature; got {features}.")
    parsed = parse_settings(model.settings, settings, f"model {name}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model.build(features, context_features, parsed)

"""The list of models, and the door to build one."""

from __future__ import annotations

__all__ = ["MODELS", "Model", "build_model", "get_model"]

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ciflows.errors import UserError, nearest
from ciflows.flow import Flow
from ciflows.models import autoregressive, identity, mixture, resflow, zuko
from ciflows.models.indices import IndexSettings
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


def _pair(
    name: str,
    summary: str,
    build: Callable[[int, int, Any], Flow],
    settings: type[Settings],
    indexed: type[Settings] | None = None,
) -> dict[str, Model]:
    """A flow, and the same one with an index after each layer (`indexed`: its settings, if others)."""
    kind = indexed or settings
    doc = f"{(kind.__doc__ or '').rstrip('.')}, with an index after each layer."
    both = type(f"CIF{kind.__name__}", (kind, IndexSettings), {"__doc__": doc, "__module__": __name__})
    return {
        name: Model(summary, settings, build),
        f"cif-{name}": Model(f"{name} with a continuous index after each layer", both, build),
    }


MODELS: dict[str, Model] = {
    **_pair(
        "resflow",
        "residual flow: blocks x + g(x) with Lip g < 1; samples by iteration",
        resflow.build,
        resflow.ResFlowSettings,
    ),
    **_pair(
        "maf",
        "masked autoregressive flow; samples in as many passes as features",
        autoregressive.build,
        autoregressive.PlainMAFSettings,
        autoregressive.MAFSettings,
    ),
    **_pair(
        "nsf",
        "neural spline flow; samples in as many passes as features, coupling=true in two",
        autoregressive.build,
        autoregressive.NSFSettings,
    ),
    **_pair(
        "realnvp",
        "affine couplings; quick both ways",
        autoregressive.build,
        autoregressive.RealNVPSettings,
    ),
    "cif-id-1": Model(
        "the paper's ablation: f the identity, z = x + u",
        identity.Id1Settings,
        identity.build_sum,
    ),
    "cif-id-2": Model(
        "the paper's ablation: f the identity, z = x + t(u)",
        identity.Id2Settings,
        identity.build_translation,
    ),
    "cif-id-3": Model(
        "the paper's ablation: f the identity, z = e^s(u) (x + t(u))",
        identity.Id3Settings,
        identity.build_affine,
    ),
    "vae": Model(
        "variational autoencoder: a CIF of one layer whose index does not depend on z",
        identity.VAESettings,
        identity.build_vae,
    ),
    "mixture": Model(
        "mixture of masked autoregressive flows: one layer with a discrete index, summed exactly",
        mixture.MixtureSettings,
        mixture.build,
    ),
    **_pair(
        "naf",
        "neural autoregressive flow; samples by bisection, right within [-10, 10]",
        zuko.build_naf,
        zuko.NAFSettings,
    ),
    **_pair(
        "unaf",
        "unconstrained neural autoregressive flow; samples by bisection, right within [-10, 10]",
        zuko.build_unaf,
        zuko.NAFSettings,
    ),
    **_pair(
        "sospf",
        "sums of squared polynomials; samples by bisection, right within [-10, 10]",
        zuko.build_sospf,
        zuko.SOSPFSettings,
    ),
    **_pair(
        "bpf",
        "Bernstein polynomials; samples by bisection",
        zuko.build_bpf,
        zuko.BPFSettings,
    ),
    **_pair(
        "gf",
        "Gaussianization flow: feature by feature, with rotations between; samples by bisection",
        zuko.build_gf,
        zuko.GFSettings,
    ),
    **_pair(
        "cnf",
        "continuous flow: solves a differential equation for each point, slow both ways",
        zuko.build_cnf,
        zuko.CNFSettings,
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

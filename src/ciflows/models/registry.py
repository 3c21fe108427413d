"""The list of models, and the door to build one."""

from __future__ import annotations

__all__ = ["MODELS", "Model", "build_model", "get_model"]

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch

from ciflows.errors import UserError, nearest
from ciflows.flow import Flow
from ciflows.layers import Shape
from ciflows.models import autoregressive, identity, images, mixture, resflow, zuko
from ciflows.models.indices import IndexSettings
from ciflows.settings import Settings, parse_settings


class Model(NamedTuple):
    """A named family of flows.

    Attributes:
        summary: What it is, in one line.
        settings: The class of its settings.
        build: Makes the layers for (features, context_features, settings), or for (shape, settings) of
            images.
        takes: What it is a density over.
        training: Settings of training that suit it better than the general ones.
        evaluation: Settings of evaluation, likewise.
    """

    summary: str
    settings: type[Settings]
    build: Callable[..., Flow]
    takes: Literal["vectors", "images"] = "vectors"
    training: Mapping[str, Any] = {}
    evaluation: Mapping[str, Any] = {}


def _pair(
    name: str,
    summary: str,
    build: Callable[..., Flow],
    settings: type[Settings],
    indexed: type[Settings] | None = None,
    index: type[Settings] = IndexSettings,
    **about: Any,
) -> dict[str, Model]:
    """A flow, and the same one with an index after each layer (`indexed`: its settings, if others)."""
    kind = indexed or settings
    doc = f"{(kind.__doc__ or '').rstrip('.')}, with an index after each layer."
    both = type(f"CIF{kind.__name__}", (kind, index), {"__doc__": doc, "__module__": __name__})
    return {
        name: Model(summary, settings, build, **about),
        f"cif-{name}": Model(f"{name} with a continuous index after each layer", both, build, **about),
    }


# Of images a step has few, and one draw of each: the paper's ways, in sizes that a CPU can bear.
_OF_IMAGES: dict[str, Any] = {
    "takes": "images",
    "training": {
        "objective": "elbo",
        "batch_size": 64,
        "learning_rate": 1e-3,
        "validation_points": 1000,
        "validation_samples": 1,
    },
    "evaluation": {"samples": 5},
}

# Matrices whose spectral norm is bounded train best by steps of that norm (docs/results.md).
_BOUNDED = {"optimizer": "muon", "learning_rate": 1e-2, "clip": 5.0}

MODELS: dict[str, Model] = {
    **_pair(
        "resflow",
        "residual flow: blocks x + g(x) with Lip g < 1; samples by iteration",
        resflow.build,
        resflow.ResFlowSettings,
        training=_BOUNDED,
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
        "neural autoregressive flow; samples by bisection in [-10, 10], at each layer",
        zuko.build_naf,
        zuko.NAFSettings,
    ),
    **_pair(
        "unaf",
        "unconstrained neural autoregressive flow; very slow to sample, in [-10, 10] at each layer",
        zuko.build_unaf,
        zuko.NAFSettings,
    ),
    **_pair(
        "sospf",
        "sums of squared polynomials; samples by bisection in [-10, 10], at each layer",
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
        "Gaussianization flow: by feature, with rotations between; no density far from the data",
        zuko.build_gf,
        zuko.GFSettings,
    ),
    **_pair(
        "cnf",
        "continuous flow: solves a differential equation for each point, slow both ways",
        zuko.build_cnf,
        zuko.CNFSettings,
    ),
    **_pair(
        "realnvp-image",
        "images: ten couplings at two scales; quick both ways",
        images.build_realnvp,
        images.RealNVPImageSettings,
        index=images.ImageIndexSettings,
        **_OF_IMAGES,
    ),
    **_pair(
        "resflow-image",
        "images: convolutional residual blocks at three scales; samples by iteration",
        images.build_resflow,
        images.ResFlowImageSettings,
        index=images.ResFlowIndexSettings,
        **_OF_IMAGES,
    ),
}


def get_model(name: str) -> Model:
    """Look up a model, or name the nearest ones."""
    if name not in MODELS:
        raise UserError(f"There is no model {name!r}. {nearest(name, MODELS)}")
    return MODELS[name]


def build_model(
    name: str,
    *,
    features: int | None = None,
    shape: Shape | None = None,
    context_features: int = 0,
    seed: int = 0,
    **settings: Any,
) -> Flow:
    """Build a model by name, with fresh parameters that depend on `seed` alone.

    Arguments:
        name: A name that `ciflows models` prints.
        features: Size of one data point: the same as shape=(features,).
        shape: Shape of one data point; (channels, height, width) for images.
        context_features: Size of the context, for a conditional density.
        seed: Seed of the initial parameters.
        settings: Settings of that model; `ciflows models NAME` lists them.

    Example:
        >>> flow = build_model("resflow", features=2, layers=2, hidden=[16, 16])
        >>> flow.exact
        True
        >>> build_model("realnvp-image", shape=(1, 8, 8), blocks=1, channels=8).sample(2).shape
        torch.Size([2, 1, 8, 8])
    """
    model = get_model(name)
    shape = _point_shape(name, features, shape)
    parsed = parse_settings(model.settings, settings, f"model {name}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if model.takes == "vectors":
            return model.build(shape[0], context_features, parsed)
        if context_features:
            raise UserError(f"{name} takes no context: it is a density over images alone.")
        return model.build(shape, parsed)


def _point_shape(name: str, features: int | None, shape: Shape | None) -> Shape:
    """The shape of one point, of the kind that a model takes."""
    if (features is None) == (shape is None):
        raise UserError("Give either the number of features of one point or its shape.")
    shape = (features,) if features is not None else tuple(shape or ())
    if not shape or min(shape) < 1:
        raise UserError(f"A model needs at least one feature; got the shape {shape}.")
    if len(shape) not in (1, 3):
        raise UserError(f"Points are vectors or images (channels, height, width); got shape {shape}.")
    kind = "vectors" if len(shape) == 1 else "images"
    if MODELS[name].takes != kind:
        size = "×".join(map(str, shape))
        suitable = [other for other, model in MODELS.items() if model.takes == kind]
        raise UserError(
            f"{name} takes {MODELS[name].takes}, and the data are {kind} of size {size}. "
            f"{nearest(name, suitable)}"
        )
    return shape

"""The list of models, and `build_model`, which builds them by name.

`ciflows models` prints the list and `ciflows models NAME` a model's settings.

    over vectors, also with an index after each layer, as cif-NAME
        maf, nsf, realnvp     masked networks: affine or spline, autoregressive or coupling
        resflow               residual blocks with a bounded Lipschitz constant
        naf, unaf, sospf, bpf, gf, cnf    zuko's other flows
    over vectors
        mixture               a discrete index over masked autoregressive flows, summed exactly
        vae                   one indexed layer whose index does not depend on z
        cif-id-1, -2, -3      the paper's ablation: indices alone
    over images, also as cif-NAME
        realnvp-image         couplings at two scales
        resflow-image         convolutional residual blocks at three scales

A CIF's settings are its flow's and its index's in one class; its builder gets them as `index` too.
"""

from __future__ import annotations

__all__ = ["MODELS", "Model", "build_model", "get_model"]

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from ciflows.core.flow import Flow
from ciflows.core.layer import Shape
from ciflows.errors import UserError, nearest
from ciflows.models import (
    ablation,
    discrete,
    maf,
    nsf,
    realnvp,
    realnvp_image,
    resflow,
    resflow_image,
    vae,
    zuko_flows,
)
from ciflows.models.catalogue import SUMMARIES
from ciflows.settings import Settings, parse_settings


class Model(NamedTuple):
    """A named family of flows.

    Attributes:
        build: Makes the flow from (features, context_features, settings), or from (shape, settings) for
            images; where `indexed`, from one argument more: the settings of the index.
        indexed: Whether `settings` hold an index's settings too, which `build` gets.
        takes: What it is a density over.
        training: Training settings that suit it better than the defaults.
        evaluation: Evaluation settings that do.
    """

    summary: str
    build: Callable[..., Flow]
    settings: type[Settings]
    indexed: bool = False
    takes: Literal["vectors", "images"] = "vectors"
    training: Mapping[str, Any] = {}
    evaluation: Mapping[str, Any] = {}


def _one(name: str, build: Callable[..., Flow], settings: type[Settings]) -> dict[str, Model]:
    return {name: Model(SUMMARIES[name], build, settings)}


def _pair(
    name: str, build: Callable[..., Flow], plain: type[Settings], indexed: type[Settings], **about: Any
) -> dict[str, Model]:
    """A flow, and the same flow with an index after each layer."""
    cif = f"cif-{name}"
    return {
        name: Model(SUMMARIES[name], build, plain, **about),
        cif: Model(SUMMARIES[cif], build, indexed, indexed=True, **about),
    }


def _zuko(
    transforms: Callable[..., zuko_flows.Transforms], plain: type[Settings], indexed: type[Settings]
) -> dict[str, Model]:
    """A flow of zuko's, named as the function that makes its transforms."""
    return _pair(transforms.__name__, partial(zuko_flows.build, transforms), plain, indexed)


# For images, in sizes that suit a CPU. Both count: small models (500 to 900 steps on Fashion-MNIST) gain
# most from this rate in place of 1e-3, and 0.05 to 0.1 bits more from Muon in place of Adam.
_OF_IMAGES: dict[str, Any] = {
    "takes": "images",
    "training": {
        "objective": "elbo",
        "batch_size": 64,
        "optimizer": "muon",
        "learning_rate": 1e-2,
        "validation_points": 1000,
        "validation_samples": 1,
    },
    "evaluation": {"samples": 5},
}

# Matrices whose spectral norm is bounded train best by steps of that norm (docs/results.md).
_BOUNDED = {"optimizer": "muon", "learning_rate": 1e-2, "clip": 5.0}

_RESFLOW = resflow.ResFlowSettings, resflow.CIFResFlowSettings
_REALNVP_IMAGE = realnvp_image.RealNVPImageSettings, realnvp_image.CIFRealNVPImageSettings
_RESFLOW_IMAGE = resflow_image.ResFlowImageSettings, resflow_image.CIFResFlowImageSettings

MODELS: dict[str, Model] = {
    **_pair("resflow", resflow.build, *_RESFLOW, training=_BOUNDED),
    **_pair("maf", maf.build, maf.PlainMAFSettings, maf.CIFMAFSettings),
    **_pair("nsf", nsf.build, nsf.NSFSettings, nsf.CIFNSFSettings),
    **_pair("realnvp", realnvp.build, realnvp.RealNVPSettings, realnvp.CIFRealNVPSettings),
    **_one("cif-id-1", ablation.build_sum, ablation.Id1Settings),
    **_one("cif-id-2", ablation.build_translation, ablation.Id2Settings),
    **_one("cif-id-3", ablation.build_affine, ablation.Id2Settings),
    **_one("vae", vae.build, vae.VAESettings),
    **_one("mixture", discrete.build, discrete.MixtureSettings),
    **_zuko(zuko_flows.naf, zuko_flows.NAFSettings, zuko_flows.CIFNAFSettings),
    **_zuko(zuko_flows.unaf, zuko_flows.NAFSettings, zuko_flows.CIFNAFSettings),
    **_zuko(zuko_flows.sospf, zuko_flows.SOSPFSettings, zuko_flows.CIFSOSPFSettings),
    **_zuko(zuko_flows.bpf, zuko_flows.BPFSettings, zuko_flows.CIFBPFSettings),
    **_zuko(zuko_flows.gf, zuko_flows.GFSettings, zuko_flows.CIFGFSettings),
    **_zuko(zuko_flows.cnf, zuko_flows.CNFSettings, zuko_flows.CIFCNFSettings),
    **_pair("realnvp-image", realnvp_image.build, *_REALNVP_IMAGE, **_OF_IMAGES),
    **_pair("resflow-image", resflow_image.build, *_RESFLOW_IMAGE, **_OF_IMAGES),
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
    if model.takes == "images" and context_features:
        raise UserError(f"{name} takes no context: it is a density over images alone.")
    sizes = (shape[0], context_features) if model.takes == "vectors" else (shape,)
    index = (parsed,) if model.indexed else ()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model.build(*sizes, parsed, *index)


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

"""Other flows of the zuko library, layer by layer, so that each can have an index.

Zuko puts squashing or rotating maps between its layers; here each joins the layer after it. Zuko's
limits: an autoregressive inverse takes as many passes as features; the inverses of NAF, UNAF and SOSPF
search for x in [-10, 10] only, so keep data standardised; CNF solves a differential equation for each
point and is slow; GF, whose scalar maps end at about ±4.9, has no density (log p = -inf) far from the
data, and cannot invert all of its inner values. A warning counts the points that were not inverted.
"""

from __future__ import annotations

__all__ = [
    "BPFSettings",
    "CIFBPFSettings",
    "CIFCNFSettings",
    "CIFGFSettings",
    "CIFNAFSettings",
    "CIFSOSPFSettings",
    "CNFSettings",
    "GFSettings",
    "NAFSettings",
    "SOSPFSettings",
    "bpf",
    "build",
    "cnf",
    "gf",
    "naf",
    "sospf",
    "unaf",
]

from collections.abc import Callable, Sequence
from typing import Any

import zuko
from pydantic import Field
from zuko.flows import FFJTransform, UnconditionalTransform
from zuko.lazy import LazyTransform

from ciflows.core.flow import Flow
from ciflows.core.layer import Bijection
from ciflows.layers import ZukoBijection
from ciflows.models.index import IndexSettings, with_index
from ciflows.settings import Settings, Sizes


class _LayerSettings(Settings):
    layers: int = Field(3, ge=1, description="number of layers")
    hidden: Sizes = Field([64, 64], description="hidden sizes of each layer's network")


class NAFSettings(_LayerSettings):
    """Settings of a neural autoregressive flow, whose scalar maps are monotonic networks."""

    signal: int = Field(16, ge=1, description="numbers that a feature's map gets from those before it")
    scalar_hidden: Sizes = Field([64, 64], description="hidden sizes of the scalar maps")


class SOSPFSettings(_LayerSettings):
    """Settings of a flow of integrated sums of squared polynomials."""

    degree: int = Field(4, ge=1, description="degree of the polynomials")
    polynomials: int = Field(3, ge=1, description="number of squares in a sum")


class BPFSettings(_LayerSettings):
    """Settings of a flow of Bernstein polynomials."""

    degree: int = Field(16, ge=1, description="degree of the polynomials")


class GFSettings(_LayerSettings):
    """Settings of a Gaussianization flow."""

    components: int = Field(8, ge=1, description="components of each feature's mixture")


class CNFSettings(_LayerSettings):
    """Settings of a continuous normalising flow."""

    layers: int = Field(1, ge=1, description="number of equations, solved one after the other")
    frequencies: int = Field(3, ge=1, description="frequencies that encode time")
    tolerance: float = Field(1e-5, gt=0, description="relative tolerance of the solver")


class CIFNAFSettings(NAFSettings, IndexSettings):
    """Settings of a neural autoregressive flow with an index after each layer."""


class CIFSOSPFSettings(SOSPFSettings, IndexSettings):
    """Settings of a flow of sums of squares with an index after each layer."""


class CIFBPFSettings(BPFSettings, IndexSettings):
    """Settings of a flow of Bernstein polynomials with an index after each layer."""


class CIFGFSettings(GFSettings, IndexSettings):
    """Settings of a Gaussianization flow with an index after each layer."""


class CIFCNFSettings(CNFSettings, IndexSettings):
    """Settings of a continuous normalising flow with an index after each equation."""


Transforms = Sequence[LazyTransform]


def build(
    transforms: Callable[..., Transforms],
    features: int,
    context_features: int,
    settings: Settings,
    index: IndexSettings | None = None,
) -> Flow:
    """Build a flow from zuko's transforms: layers alone, or each followed by an indexed affine map."""
    steps: list[list[Bijection]] = [[]]
    for transform in transforms(features, context_features, settings):
        between = isinstance(transform, UnconditionalTransform)
        steps[-1].append(ZukoBijection(transform, features, 0 if between else context_features))
        if not between:
            steps.append([])
    return Flow(with_index(steps[:-1], features, context_features, index))


def naf(features: int, context_features: int, settings: NAFSettings) -> Transforms:
    """A neural autoregressive flow (Huang et al., 2018)."""
    return zuko.flows.NAF(features, context_features, **_neural(settings)).transform.transforms


def unaf(features: int, context_features: int, settings: NAFSettings) -> Transforms:
    """An unconstrained neural autoregressive flow (Wehenkel and Louppe, 2019)."""
    return zuko.flows.UNAF(features, context_features, **_neural(settings)).transform.transforms


def _neural(settings: NAFSettings) -> dict[str, Any]:
    return {
        "transforms": settings.layers,
        "signal": settings.signal,
        "network": {"hidden_features": settings.scalar_hidden},
        "hidden_features": settings.hidden,
    }


def sospf(features: int, context_features: int, settings: SOSPFSettings) -> Transforms:
    """A flow of sums of squares (Jaini et al., 2019)."""
    sizes = (features, context_features, settings.degree, settings.polynomials)
    options = {"transforms": settings.layers, "hidden_features": settings.hidden}
    return zuko.flows.SOSPF(*sizes, **options).transform.transforms


def bpf(features: int, context_features: int, settings: BPFSettings) -> Transforms:
    """A flow of Bernstein polynomials (Ramasinghe et al., 2021)."""
    sizes = (features, context_features, settings.degree)
    options = {"transforms": settings.layers, "hidden_features": settings.hidden}
    return zuko.flows.BPF(*sizes, **options).transform.transforms


def gf(features: int, context_features: int, settings: GFSettings) -> Transforms:
    """A Gaussianization flow (Meng et al., 2020)."""
    sizes = (features, context_features, settings.layers, settings.components)
    options = {"hidden_features": settings.hidden} if context_features else {}
    return zuko.flows.GF(*sizes, **options).transform.transforms


def cnf(features: int, context_features: int, settings: CNFSettings) -> Transforms:
    """A continuous normalising flow with exact traces (Chen et al., 2018)."""
    return [
        FFJTransform(
            features,
            context_features,
            freqs=settings.frequencies,
            rtol=settings.tolerance,
            atol=settings.tolerance / 10,
            hidden_features=settings.hidden,
        )
        for _ in range(settings.layers)
    ]

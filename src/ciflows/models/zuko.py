"""Other flows of the zuko library, layer by layer, so that an index can stand between them.

Zuko puts squashing or rotating maps between its layers; here they go with the layer after them. Limits
that are zuko's: an autoregressive inverse takes as many passes as features; those of NAF, UNAF and SOSPF
look for x in [-10, 10] alone, so keep data standardised; CNF solves an equation for every point and is
slow; training is captured as a CUDA graph only where that can be done; and GF, whose scalar maps end at
about ±4.9, has no density (log p = -inf) far from the data, and cannot invert all of its inner values.
Points that were not inverted are counted in a warning.
"""

from __future__ import annotations

__all__ = [
    "BPFSettings",
    "CNFSettings",
    "GFSettings",
    "NAFSettings",
    "SOSPFSettings",
    "build_bpf",
    "build_cnf",
    "build_gf",
    "build_naf",
    "build_sospf",
    "build_unaf",
]

from collections.abc import Sequence

import zuko
from pydantic import Field
from zuko.flows import FFJTransform, UnconditionalTransform
from zuko.lazy import LazyTransform

from ciflows.bijections import ZukoBijection
from ciflows.flow import Flow
from ciflows.layers import Bijection
from ciflows.models.indices import with_index
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

    layers: int = Field(1, ge=1, description="number of equations, one after the other")
    frequencies: int = Field(3, ge=1, description="frequencies that time is given in")
    tolerance: float = Field(1e-5, gt=0, description="relative tolerance of the solver")


def build_naf(features: int, context_features: int, settings: NAFSettings) -> Flow:
    """A neural autoregressive flow (Huang et al., 2018)."""
    return _neural(zuko.flows.NAF, features, context_features, settings)


def build_unaf(features: int, context_features: int, settings: NAFSettings) -> Flow:
    """An unconstrained neural autoregressive flow (Wehenkel and Louppe, 2019)."""
    return _neural(zuko.flows.UNAF, features, context_features, settings)


def build_sospf(features: int, context_features: int, settings: SOSPFSettings) -> Flow:
    """A flow of sums of squares (Jaini et al., 2019)."""
    flow = zuko.flows.SOSPF(
        features,
        context_features,
        settings.degree,
        settings.polynomials,
        transforms=settings.layers,
        hidden_features=settings.hidden,
    )
    return _layers(flow.transform.transforms, features, context_features, settings)


def build_bpf(features: int, context_features: int, settings: BPFSettings) -> Flow:
    """A flow of Bernstein polynomials (Ramasinghe et al., 2021)."""
    flow = zuko.flows.BPF(
        features,
        context_features,
        settings.degree,
        transforms=settings.layers,
        hidden_features=settings.hidden,
    )
    return _layers(flow.transform.transforms, features, context_features, settings)


def build_gf(features: int, context_features: int, settings: GFSettings) -> Flow:
    """A Gaussianization flow (Meng et al., 2020)."""
    options = {"hidden_features": settings.hidden} if context_features else {}
    flow = zuko.flows.GF(features, context_features, settings.layers, settings.components, **options)
    return _layers(flow.transform.transforms, features, context_features, settings)


def build_cnf(features: int, context_features: int, settings: CNFSettings) -> Flow:
    """A continuous normalising flow with exact traces (Chen et al., 2018)."""
    transforms = [
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
    return _layers(transforms, features, context_features, settings)


def _neural(
    kind: type[zuko.flows.NAF], features: int, context_features: int, settings: NAFSettings
) -> Flow:
    flow = kind(
        features,
        context_features,
        settings.layers,
        signal=settings.signal,
        network={"hidden_features": settings.scalar_hidden},
        hidden_features=settings.hidden,
    )
    return _layers(flow.transform.transforms, features, context_features, settings)


def _layers(
    transforms: Sequence[LazyTransform], features: int, context_features: int, settings: Settings
) -> Flow:
    steps: list[list[Bijection]] = [[]]
    for transform in transforms:
        between = isinstance(transform, UnconditionalTransform)
        given = 0 if between else context_features
        steps[-1].append(ZukoBijection(transform, features, given))
        if not between:
            steps.append([])
    return Flow(with_index(steps[:-1], features, context_features, settings))

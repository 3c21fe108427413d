"""Bijections: layers with an inverse and a log-determinant; `as_bijection` wraps yours."""

from ciflows.layers.affine import Affine, Scale, Standardise
from ciflows.layers.coupling import Coupling
from ciflows.layers.linear import LULinear, Permutation
from ciflows.layers.log_det import Exact, LogDet, Roulette, Series, default_log_det
from ciflows.layers.logit import Logit
from ciflows.layers.normalise import ActNorm, BatchNorm
from ciflows.layers.reshape import Flatten, Squeeze
from ciflows.layers.residual import Residual
from ciflows.layers.splines import AutoregressiveSpline
from ciflows.layers.wrap import ModuleBijection, as_bijection
from ciflows.layers.zuko import MaskedBijection, ZukoBijection

__all__ = [
    "ActNorm",
    "Affine",
    "AutoregressiveSpline",
    "BatchNorm",
    "Coupling",
    "Exact",
    "Flatten",
    "LULinear",
    "LogDet",
    "Logit",
    "MaskedBijection",
    "ModuleBijection",
    "Permutation",
    "Residual",
    "Roulette",
    "Scale",
    "Series",
    "Squeeze",
    "Standardise",
    "ZukoBijection",
    "as_bijection",
    "default_log_det",
]

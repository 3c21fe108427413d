"""Bijections: layers with a closed or numerical inverse and a log-determinant."""

from ciflows.bijections.affine import Affine, Scale, Standardise
from ciflows.bijections.autoregressive import AutoregressiveSpline
from ciflows.bijections.coupling import Coupling
from ciflows.bijections.linear import InvertibleConv, LULinear, Permutation
from ciflows.bijections.log_det import Exact, LogDet, Roulette, Series, default_log_det
from ciflows.bijections.logit import Logit
from ciflows.bijections.normalise import ActNorm, BatchNorm
from ciflows.bijections.reshape import Flatten, Squeeze
from ciflows.bijections.residual import Residual
from ciflows.bijections.zuko import ZukoBijection

__all__ = [
    "ActNorm",
    "Affine",
    "AutoregressiveSpline",
    "BatchNorm",
    "Coupling",
    "Exact",
    "Flatten",
    "InvertibleConv",
    "LULinear",
    "LogDet",
    "Logit",
    "Permutation",
    "Residual",
    "Roulette",
    "Scale",
    "Series",
    "Squeeze",
    "Standardise",
    "ZukoBijection",
    "default_log_det",
]

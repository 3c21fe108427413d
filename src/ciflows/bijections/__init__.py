"""Bijections: layers with a closed or numerical inverse and a log-determinant."""

from ciflows.bijections.affine import Affine, Standardise
from ciflows.bijections.autoregressive import AutoregressiveSpline
from ciflows.bijections.linear import LULinear, Permutation
from ciflows.bijections.log_det import Exact, LogDet, Roulette
from ciflows.bijections.normalise import ActNorm, BatchNorm
from ciflows.bijections.residual import Residual
from ciflows.bijections.zuko import ZukoBijection

__all__ = [
    "ActNorm",
    "Affine",
    "AutoregressiveSpline",
    "BatchNorm",
    "Exact",
    "LULinear",
    "LogDet",
    "Permutation",
    "Residual",
    "Roulette",
    "Standardise",
    "ZukoBijection",
]

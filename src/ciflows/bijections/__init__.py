"""Bijections: layers with a closed or numerical inverse and a log-determinant."""

from ciflows.bijections.affine import Affine, Standardise
from ciflows.bijections.log_det import Exact, LogDet, Roulette
from ciflows.bijections.residual import Residual
from ciflows.bijections.zuko import ZukoBijection

__all__ = ["Affine", "Exact", "LogDet", "Residual", "Roulette", "Standardise", "ZukoBijection"]

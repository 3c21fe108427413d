"""Continuously indexed flows: densities for data that a single bijection cannot fit."""

from ciflows.flow import Flow
from ciflows.indexed import Indexed, interleave
from ciflows.models import build_model
from ciflows.run import Run, fit, load_run

__all__ = ["Flow", "Indexed", "Run", "build_model", "fit", "interleave", "load_run"]

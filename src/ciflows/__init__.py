"""Continuously indexed flows: densities for data that a single bijection cannot fit."""

from ciflows.estimate import Estimate
from ciflows.flow import Flow
from ciflows.indexed import Indexed, interleave
from ciflows.models import build_model
from ciflows.run import Run, load_run

__all__ = ["Estimate", "Flow", "Indexed", "Run", "build_model", "interleave", "load_run"]

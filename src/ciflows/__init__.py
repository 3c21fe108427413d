"""Continuously indexed flows: densities for data that a single bijection cannot fit."""

from typing import TYPE_CHECKING, Any

from ciflows.estimate import Estimate
from ciflows.flow import Flow
from ciflows.indexed import Indexed, interleave
from ciflows.models import build_model

if TYPE_CHECKING:
    from ciflows.run import Run, load_run

__all__ = ["Estimate", "Flow", "Indexed", "Run", "build_model", "interleave", "load_run"]


def __getattr__(name: str) -> Any:
    """Runs are imported when they are asked for: models alone need neither tables nor pictures."""
    if name not in ("Run", "load_run"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ciflows import run

    return getattr(run, name)

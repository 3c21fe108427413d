"""Continuously indexed flows: densities for data that a single bijection cannot fit."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ciflows.core.evaluate import Estimate
    from ciflows.core.flow import Flow
    from ciflows.core.indexed import Indexed, interleave
    from ciflows.estimator import CIFDensity
    from ciflows.models import build_model
    from ciflows.runs.api import fit
    from ciflows.runs.run import Run, load_run

__all__ = [
    "CIFDensity",
    "Estimate",
    "Flow",
    "Indexed",
    "Run",
    "__version__",
    "build_model",
    "fit",
    "interleave",
    "load_run",
]

__version__ = "0.1.0"

_HOMES = {
    "CIFDensity": "estimator",
    "Estimate": "core.evaluate",
    "Flow": "core.flow",
    "Indexed": "core.indexed",
    "Run": "runs.run",
    "build_model": "models",
    "fit": "runs.api",
    "interleave": "core.indexed",
    "load_run": "runs.run",
}


def __getattr__(name: str) -> Any:
    """Import a name on first use: `ciflows --help` does not wait for torch, nor a model for tables."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

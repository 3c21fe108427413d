"""Continuously indexed flows: densities for data that a single bijection cannot fit."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ciflows.estimate import Estimate
    from ciflows.estimator import CIFDensity
    from ciflows.fitting import fit
    from ciflows.flow import Flow
    from ciflows.indexed import Indexed, interleave
    from ciflows.models import build_model
    from ciflows.run import Run, load_run

__all__ = [
    "CIFDensity",
    "Estimate",
    "Flow",
    "Indexed",
    "Run",
    "build_model",
    "fit",
    "interleave",
    "load_run",
]

_HOMES = {
    "CIFDensity": "estimator",
    "Estimate": "estimate",
    "Flow": "flow",
    "Indexed": "indexed",
    "Run": "run",
    "build_model": "models",
    "fit": "fitting",
    "interleave": "indexed",
    "load_run": "run",
}


def __getattr__(name: str) -> Any:
    """Imported when asked for: `ciflows --help` need not wait for torch, nor a model for tables."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

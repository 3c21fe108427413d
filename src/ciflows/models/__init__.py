"""Models by name: each turns frozen settings into a `Flow`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ciflows.models.registry import MODELS, Model, build_model, get_model

__all__ = ["MODELS", "Model", "build_model", "get_model"]


def __getattr__(name: str) -> Any:
    """Import the models when they are needed: their names (`catalogue`) do not need torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.registry"), name)

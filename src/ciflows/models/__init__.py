"""Models by name: each turns frozen settings into a `Flow`."""

from ciflows.models.registry import MODELS, Model, build_model, get_model

__all__ = ["MODELS", "Model", "build_model", "get_model"]

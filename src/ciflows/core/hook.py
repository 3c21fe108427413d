"""Where plain functions ask for faster versions: the only place that reaches `ciflows.speed`.

Everything below `training` is plain torch. A function marked `replaceable` is computed by `speed` where
that has a faster version of it; without the `speed` folder the function itself runs, with the same
results up to rounding.
"""

from __future__ import annotations

__all__ = ["on", "plain", "replaceable", "replaceable_names"]

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from importlib import import_module
from typing import Any, TypeVar, cast

from torch import nn

F = TypeVar("F", bound=Callable[..., Any])

replaceable_names: set[str] = set()
_versions: Mapping[str, Callable[..., Any]] | None = None  # None until the first call


def replaceable(function: F) -> F:
    """Let `speed` replace a function; its version gets this one first, then the arguments."""
    name = function.__qualname__
    replaceable_names.add(name)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        version = (_load() if _versions is None else _versions).get(name)
        if version is None:
            return function(*args, **kwargs)
        return version(function, *args, **kwargs)

    return cast(F, call)


def on(module: nn.Module) -> AbstractContextManager[None]:
    """Prepare a module's weights for several uses, between which nothing changes them."""
    prepare = (_load() if _versions is None else _versions).get("on")
    return nullcontext() if prepare is None else prepare(module)


@contextmanager
def plain() -> Iterator[None]:
    """Run the plain functions for a while, in all threads: to count their operations or to compare."""
    global _versions
    before, _versions = _versions, {}
    try:
        yield
    finally:
        _versions = before


def _load() -> Mapping[str, Callable[..., Any]]:
    global _versions
    try:
        _versions = import_module("ciflows.speed").VERSIONS
    except ModuleNotFoundError as error:
        if error.name != "ciflows.speed":
            raise
        _versions = {}
    return _versions

"""Packages that not every installation has: each is imported when one of its names is first used."""

from __future__ import annotations

__all__ = ["polars"]

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any


class _Package(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self.__name__), name)


if TYPE_CHECKING:
    import polars as polars
else:
    polars = _Package("polars")

"""Packages that not every installation has: each is imported when one of its names is first used."""

from __future__ import annotations

__all__ = ["polars"]

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ciflows.errors import missing_package


class _Package(ModuleType):
    def __getattr__(self, name: str) -> Any:
        try:
            package = import_module(self.__name__)
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(missing_package(error), name=error.name) from error
        return getattr(package, name)


if TYPE_CHECKING:
    import polars as polars
else:
    polars = _Package("polars")

"""Frozen settings, checked when they are made; an unknown key gets the nearest valid name."""

from __future__ import annotations

__all__ = ["Seed", "Settings", "Sizes", "parse_settings"]

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from ciflows.errors import UserError, nearest

Seed = Annotated[int, Field(ge=0, lt=2**31)]
Sizes = list[PositiveInt]


class Settings(BaseModel):
    """A frozen set of named settings."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


S = TypeVar("S", bound=Settings)


def parse_settings(kind: type[S], values: Mapping[str, Any], where: str) -> S:
    """Make settings from plain values, or say which value is wrong and why.

    Arguments:
        kind: The class of settings.
        values: Their values by name.
        where: What the settings belong to, for the error message.
    """
    for key in values:
        if key not in kind.model_fields:
            raise UserError(f"{where}: no setting {key!r}. {nearest(key, kind.model_fields)}")
    try:
        return kind(**values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or where
        raise UserError(f"{where}: {key} = {first['input']!r}: {first['msg'].rstrip('.')}.") from None

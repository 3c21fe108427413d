"""The parts of a page: blocks of words, pictures and tables, and numbers set as they are in print."""

from __future__ import annotations

__all__ = ["NOTHING", "Block", "Picture", "Scale", "Table", "make_picture", "set_error", "set_number"]

import base64
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from ciflows.report.plots import DARK, LIGHT, Draw, draw_panel

NOTHING = "—"
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


class Picture(NamedTuple):
    """A panel in both themes, as data addresses; sizes in CSS pixels."""

    light: str
    dark: str
    alt: str
    caption: str
    note: str
    width: int
    height: int


class Scale(NamedTuple):
    """A colour scale for a row of panels, drawn by the page itself.

    Attributes:
        label: What it measures.
        colours: Evenly spaced colours from its lower to its upper end.
        ticks: Positions in per cent, with their numbers.
    """

    label: str
    colours: list[str]
    ticks: list[tuple[float, str]]


class Table(NamedTuple):
    """Rows of words.

    Attributes:
        columns: The heads of the columns.
        rows: Each row begins with its name.
        folded: What it is called if it is folded away; "" if it is open.
        meanings: What each row means, in small print below its name.
    """

    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    folded: str = ""
    meanings: Sequence[str] = ()


class Block(NamedTuple):
    """A heading with what belongs to it, in this order."""

    title: str
    words: str = ""
    pictures: Sequence[Picture] = ()
    scale: Scale | None = None
    tables: Sequence[Table] = ()
    steps: Sequence[tuple[str, str]] = ()

    @property
    def filled(self) -> bool:
        """Whether there is more than a heading."""
        return any(self[1:])


def make_picture(
    draw: Draw, size: tuple[float, float], alt: str, caption: str = "", note: str = ""
) -> Picture:
    """A panel of a size in inches, drawn in both themes."""
    light, dark = (png_address(draw_panel(draw, theme, size)) for theme in (LIGHT, DARK))
    return Picture(light, dark, alt, caption, note, int(100 * size[0]), int(100 * size[1]))


def png_address(png: bytes) -> str:
    """A PNG file as an address that a page can hold."""
    return "data:image/png;base64," + base64.b64encode(png).decode()


def set_number(value: Any, form: str) -> str:
    """A number as it is set in print; a dash for one that is missing, null or not a number."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return NOTHING
    digits, e, exponent = form.format(value).partition("e")
    power = f"×10{str(int(exponent)).translate(SUPERSCRIPTS)}" if e else ""
    return digits.removesuffix(".").replace("-", "−").replace("inf", "∞") + power


def set_error(value: float | None, error: float | None, form: str) -> str:
    """A number and its standard error."""
    number = set_number(value, form)
    return number if number == NOTHING else f"{number} ± {set_number(error, form).removeprefix('+')}"

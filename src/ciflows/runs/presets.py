"""The configurations that come with the package: presets, and the experiments of the paper."""

from __future__ import annotations

__all__ = ["presets", "shipped"]

from importlib import resources
from pathlib import Path


def presets() -> dict[str, str]:
    """The presets: name -> first line of its comment."""
    texts = sorted(shipped("presets").items())
    return {name: text.splitlines()[0].lstrip("# ") for name, text in texts}


def shipped(*folders: str) -> dict[str, str]:
    """The TOML files in some folders of the package: name -> text.

    Arguments:
        folders: "presets", "experiments" or both.
    """
    files = [file for folder in folders for file in (resources.files("ciflows") / folder).iterdir()]
    tables = [file for file in files if file.name.endswith(".toml")]
    return {Path(file.name).stem: file.read_text(encoding="utf-8") for file in tables}

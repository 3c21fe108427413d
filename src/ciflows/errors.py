"""Errors, each in one sentence that the user can act on."""

from __future__ import annotations

__all__ = [
    "EXTRAS",
    "GapsError",
    "InversionError",
    "LostProcessError",
    "UserError",
    "missing_package",
    "nearest",
    "system_words",
]

from collections.abc import Iterable
from difflib import get_close_matches

# The extra that installs an optional package, by the name to import.
EXTRAS = {
    "polars": "tables",
    "jinja2": "report",
    "matplotlib": "report",
    "optuna": "search",
    "sqlalchemy": "search",
    "PIL": "paper",
    "h5py": "paper",
    "tensorboard": "tensorboard",
    "sklearn": "sklearn",
    "sbi": "sbi",
    "pyro": "pyro",
    "ray": "ray",
    "pyarrow": "ray",
}


class UserError(Exception):
    """A mistake that the user can correct. The command line prints it without a traceback.

    Arguments:
        message: What is wrong, and what to do.
        command: A command that helps, which the command line prints after the message.
    """

    def __init__(self, message: str, command: str | None = None) -> None:
        super().__init__(message)
        self.command = command


class LostProcessError(UserError):
    """Another process that trained with this one has ended."""


class GapsError(UserError):
    """Missing values alone, which could be integrated over."""


class InversionError(RuntimeError):
    """A layer's numerical inverse did not reach its tolerance."""


def missing_package(error: ModuleNotFoundError) -> str:
    """The command that installs the package of a failed import.

    Example:
        >>> missing_package(ModuleNotFoundError(name="matplotlib.figure"))
        'matplotlib is not installed. Run: pip install "ciflows[report]"'
    """
    name = (error.name or "").partition(".")[0]
    wanted = f"ciflows[{EXTRAS[name]}]" if name in EXTRAS else name
    return f'{name} is not installed. Run: pip install "{wanted}"'


def nearest(name: str, known: Iterable[str]) -> str:
    """Suggest the valid names closest to a wrong one.

    Example:
        >>> nearest("resflw", ["resflow", "maf"])
        'Did you mean resflow?'
        >>> nearest("xyz", ["resflow", "maf"])
        'Known: maf, resflow.'
    """
    known = sorted(known)
    close = get_close_matches(name, known, n=3, cutoff=0.5)
    if close:
        return f"Did you mean {' or '.join(close)}?"
    return f"Known: {', '.join(known)}."


def system_words(error: OSError) -> str:
    """What the system refused, such as to write to a full disk.

    Example:
        >>> system_words(OSError(28, "No space left on device", "scores.csv"))
        'scores.csv: No space left on device. What was written before is kept.'
    """
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}. What was written before is kept."

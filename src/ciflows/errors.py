"""What can go wrong, told in one sentence that can be acted on."""

from __future__ import annotations

__all__ = ["InversionError", "UserError", "nearest"]

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(Exception):
    """Something the user can put right. The command line prints it without a traceback."""


class InversionError(RuntimeError):
    """A layer's numerical inverse did not reach its tolerance."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The valid names that a wrong one may have meant.

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

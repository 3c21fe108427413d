"""Notebooks as Markdown, with the outputs that they were saved with: what the site shows of them."""

from __future__ import annotations

__all__ = ["as_markdown"]

import base64
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

COLAB = "https://colab.research.google.com/github/ciflows/ciflows/blob/main/docs/notebooks"


def as_markdown(text: str, name: str, pictures: Path) -> str:
    """A notebook's JSON as Markdown; its pictures are written into a folder, as NAME-1.png and so on.

    Arguments:
        text: The notebook.
        name: Its name, without a suffix.
        pictures: The folder for its pictures, below the sources of the site.
    """
    first, *cells = json.loads(text)["cells"]
    where = f"{COLAB}/{name}.ipynb"
    links = (
        f"{{download}}`Download this notebook <{name}.ipynb>`, or [open it in Colab]({where}) and run "
        '`%pip install "ciflows[all] @ git+https://github.com/ciflows/ciflows"` first.'
    )
    parts = [_source(first), links]
    shown = 0
    for cell in cells:
        code = cell["cell_type"] == "code"
        parts.append(_fence("python", _source(cell)) if code else _source(cell))
        for picture, printed in _shown(cell.get("outputs", ())):
            if picture:
                shown += 1
                pictures.mkdir(parents=True, exist_ok=True)
                (pictures / f"{name}-{shown}.png").write_bytes(base64.b64decode(picture))
                parts.append(f"![what the code above draws](/_build/notebooks/{name}-{shown}.png)")
            else:
                parts.append(_fence("text", printed.rstrip()))
    return "\n\n".join(parts) + "\n"


def _source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"]).strip()


def _shown(outputs: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """A picture or a text for each output; what is printed in a row is one text."""
    printed = ""
    for output in outputs:
        data = output.get("data", {})
        if output.get("name") != "stderr" and "image/png" not in data:
            printed += "".join(output.get("text") or data.get("text/plain", ""))
        if "image/png" in data:
            if printed.strip():
                yield "", printed
            printed = ""
            yield data["image/png"], ""
    if printed.strip():
        yield "", printed


def _fence(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"

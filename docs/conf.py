"""How the pages are built: `make docs`. Needs no network."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel

import ciflows

if TYPE_CHECKING:
    from sphinx.application import Sphinx

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from notebook import as_markdown  # noqa: E402

project = "ciflows"
author = "the authors of ciflows"
version = release = ciflows.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
source_suffix = {".rst": "restructuredtext", ".md": "markdown", ".ipynb": "markdown"}
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme = "furo"
html_title = f"ciflows {version}"
html_show_sphinx = html_show_copyright = False
pygments_style = "tango"
highlight_language = "none"  # blocks that name no language are shell commands and formulas
copybutton_prompt_text = "$ "
copybutton_exclude = ".linenos, .gp, .go"

myst_heading_anchors = 3
myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_type_aliases = {name: name for name in ("Array", "ArrayLike", "Shape", "TableLike")}
python_use_unqualified_type_names = True
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_use_ivar = True
default_role = "py:obj"  # what stands in `backticks` in a docstring is a link where it names something
nitpicky = True
# Others' classes have their pages on the network, `x` may be an argument, a type variable has no page;
# all else that is ours must be found.
nitpick_ignore_regex = [("py:.*", r"(?!ciflows\.).*"), ("py:.*", r".*\.[A-Z]")]


def escape(line: str) -> str:
    """A line of plain text in reStructuredText: (*, features) is no emphasis and p(u|z) no link."""
    return re.sub(r"(`[^`]*`)|([*|_\\])", lambda found: found[1] or "\\" + found[2], line)


def as_rest(lines: Sequence[str]) -> Iterator[str]:
    """Our docstrings, plain text to be read in an editor, as reStructuredText.

    What is indented after a blank line and a colon is a formula or a drawing, kept as it stands.
    """
    block: int | None = None  # how far the text is indented that a block stands under
    before = text = ""
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if block is not None and line.strip() and indent <= block:
            block = None
        if block is None and line.strip() and not before.strip() and text.rstrip().endswith(":"):
            under = len(text) - len(text.lstrip())
            if indent > under:
                block = under
                yield from (" " * under + "::", "")
        code = block is not None or line.lstrip().startswith((">>>", "..."))
        yield line if code else escape(line)
        before = line
        text = line if line.strip() else text


def plain_docstrings(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    if isinstance(obj, type) and issubclass(obj, BaseModel):
        fields = obj.model_fields.items()
        lines += ["Arguments:", *(f"    {key}: {field.description}" for key, field in fields), ""]
    # An empty comment first: napoleon takes what stands before a colon there for a property's type.
    lines[:] = [*(["..", ""] if what == "property" else []), *as_rest(lines)]


def plain_aliases(
    app: Sphinx, what: str, name: str, obj: object, options: object, *signature: str | None
) -> tuple[str | None, ...]:
    """A signature and what is returned, with an alias by its name where it is a part of a union too."""
    return tuple(text and re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", text) for text in signature)


def skip_fields(
    app: Sphinx, what: str, name: str, obj: object, skip: bool, options: object
) -> bool | None:
    """Leave out a NamedTuple's fields, of which the class's docstring tells, and what is pydantic's."""
    return True if type(obj).__name__ == "_tuplegetter" or name == "model_config" else None


def with_options_as_code(line: str) -> str:
    """A line of Markdown with --options in backticks, where they are not in code already."""
    if line.startswith(("    ", "$")):
        return line
    parts = line.split("`")
    parts[::2] = [re.sub(r"--[a-z][a-z-]*", r"`\g<0>`", part) for part in parts[::2]]
    return "`".join(parts)


def as_shell(found: re.Match[str]) -> str:
    """Indented examples as a block of commands, which wraps."""
    lines = [unescape(line.strip()) for line in found[0].splitlines() if line.strip()]
    return "\n".join(["```console", *lines, "```", "", ""])


def write_commands(app: Sphinx) -> None:
    """The reference of the command line, from the command line itself."""
    words = ["typer", "ciflows.cli", "utils", "docs", "--name", "ciflows"]
    done = subprocess.run([sys.executable, "-m", *words], check=True, capture_output=True, text=True)
    (HERE / "_build").mkdir(exist_ok=True)
    each = done.stdout.index("\n## ")  # what comes before is a list of the commands
    text = "\n".join(map(with_options_as_code, done.stdout[each:].splitlines()))
    text = re.sub(r"(?m)(?:^    .*\n+)+", as_shell, text)
    (HERE / "_build" / "commands.md").write_text(text, encoding="utf-8")


def read_notebook(app: Sphinx, page: str, source: list[str]) -> None:
    """Give Sphinx the Markdown of a notebook in place of its JSON."""
    if page.startswith("notebooks/"):
        source[0] = as_markdown(source[0], Path(page).name, HERE / "_build" / "notebooks")


def setup(app: Sphinx) -> None:
    app.connect("source-read", read_notebook)
    app.connect("autodoc-process-docstring", plain_docstrings, priority=400)  # before napoleon
    app.connect("autodoc-process-signature", plain_aliases)
    app.connect("autodoc-skip-member", skip_fields)
    app.connect("builder-inited", write_commands)

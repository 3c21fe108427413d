"""The pages of docs/: every block of code on them runs.

The `python` blocks of a page and the commands of its `console` blocks run in their order, in an empty
folder, with a few steps, draws and points in place of thousands. `shell` blocks and indented ones, the
README's too, tell of hours on a GPU or of files that are not here: bash runs them with a `ciflows` that
only notes its arguments, and the command line then has to take those as far as the training.
`text` blocks are no code.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from markdown_it import MarkdownIt
from typer.testing import CliRunner

import benchmarks.__main__ as benchmarks
import benchmarks.paper.__main__ as paper
import benchmarks.tables.__main__ as tables
import ciflows.runs.fit
import ciflows.training
import ciflows.vi
from ciflows import Flow
from ciflows.datasets import dataset
from ciflows.report import grids
from ciflows.runs import check, p_values
from ciflows.training import fit_flow

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = {page.stem: page for page in sorted([*DOCS.glob("*.md"), *DOCS.glob("results/*.md")])}
NOTEBOOKS = sorted(DOCS.glob("notebooks/*.ipynb"))
STEPS, DRAWS = 4, 4
NOT_RUN = ("cd", "git", "pip")  # they need the network, or change the machine
WORK = (
    "ciflows.runs.fit.fit",
    "ciflows.runs.fit.resume",
    "ciflows.runs.run.load_run",
    "ciflows.runs.compare.compare_models",
    "ciflows.runs.search.run_search",
    "benchmarks.__main__._measure",
    "benchmarks.paper.__main__._prepare_data",
    "benchmarks.paper.__main__.write_pages",
    "ciflows.runs.score.score_data",
    "ciflows.runs.sample_files.sample_data",
    "ciflows.runs.engines.load_run",
)
STAND_IN = """#!{python}
import json, sys
with open({notes!r}, "a") as file:
    file.write(json.dumps([{name!r}, *sys.argv[1:]]) + "\\n")
"""


class Block(NamedTuple):
    """A block of code: its language, its text, and the line of the page that it begins after."""

    language: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    tokens = MarkdownIt().parse(page.read_text(encoding="utf-8"))
    found = [token for token in tokens if token.type in ("fence", "code_block")]
    return [
        Block(token.info.strip() or "shell", token.content, token.map[0] + (token.type == "fence"))
        for token in found
        if token.map is not None
    ]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training takes a few steps, likelihoods a few draws, and built-in sets have a few points."""

    def fit(flow: Any, train: Any, validation: Any, settings: Any, **options: Any) -> Any:
        few = {"steps": min(STEPS, settings.steps), "validate_every": STEPS, "max_minutes": None}
        return fit_flow(flow, train, validation, settings.model_copy(update=few), **options)

    def estimate(flow: Flow, x: Any, samples: int = 100, **options: Any) -> Any:
        return whole_estimate(flow, x, min(DRAWS, samples), **options)

    def fit_density(*args: Any, steps: int = 1, **options: Any) -> Any:
        return whole_fit_density(*args, steps=min(STEPS, steps), **options)

    whole_estimate, whole_fit_density = Flow.estimate, ciflows.vi.fit
    monkeypatch.setattr(ciflows.vi, "fit", fit_density)
    for module in (ciflows.runs.fit, ciflows.training):
        monkeypatch.setattr(module, "fit_flow", fit)
    monkeypatch.setattr(Flow, "estimate", estimate)
    for module in (check, p_values):
        monkeypatch.setattr(module, "SAMPLES_A_ROW", 10)
    monkeypatch.setattr(grids, "GRID_SIDE", 20)
    monkeypatch.setattr(dataset, "SYNTHETIC_SIZES", (500, 50, 100))


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.usefixtures("quick", "data_folder")
def test_page_runs(name: str, command: Callable[..., str]) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(PAGES[name]):
        if block.language == "python":
            source = "\n" * block.line + block.text
            exec(compile(source, PAGES[name], "exec"), names)
        elif block.language == "console":
            for line in re.findall(r"^\$ (.*)$", block.text, re.MULTILINE):
                run(shlex.split(line, comments=True), command)
        else:
            assert block.language in ("shell", "text") or block.language.startswith("{"), block


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.usefixtures("quick", "data_folder")
def test_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_notebook(path, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.usefixtures("data_folder")
def test_whole_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_notebook(path, tmp_path, monkeypatch)


def run_notebook(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the cells of a notebook in their order, without Jupyter."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{path}, cell {number}", "exec"), names)
    pyplot.close("all")


@pytest.mark.parametrize("page", [*PAGES.values(), ROOT / "README.md"], ids=lambda page: page.stem)
@pytest.mark.usefixtures("data_folder")
def test_long_commands_are_understood(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Callable[..., str]
) -> None:
    def end(*_: Any, **__: Any) -> None:
        raise typer.Exit

    for work in WORK:
        monkeypatch.setattr(work, end)
    monkeypatch.chdir(ROOT)
    for block in blocks(page):
        if block.language == "shell":
            for words in called(block.text.replace(".venv/bin/", ""), tmp_path):
                run(words, command)


def run(words: list[str], command: Callable[..., str]) -> None:
    """Run a `ciflows` command; see that another one is at least there."""
    if words[0] == "ciflows":
        command(*words[1:])
    elif words[0] == "torchrun":
        command(*words[words.index("ciflows") + 1 :])
    elif words[0] == "make":
        assert re.search(rf"^{words[1]}:.*##", (ROOT / "Makefile").read_text(), re.MULTILINE), words
    elif words[:3] == ["python", "-m", "benchmarks"]:
        done = CliRunner().invoke(benchmarks.app, words[3:], catch_exceptions=False)
        assert done.exit_code == 0, done.output
    elif words[:3] == ["python", "-m", "benchmarks.paper"]:
        done = CliRunner().invoke(paper.app, words[3:], catch_exceptions=False)
        assert done.exit_code == 0, done.output
    elif words[:3] == ["python", "-m", "benchmarks.tables"]:
        assert tables.read_options(words[3:]).seconds > 0
    elif words[0] == "python":
        assert (ROOT / words[1]).is_file(), words
    else:
        assert words[0] in NOT_RUN, words


def called(script: str, folder: Path) -> list[list[str]]:
    """The commands that a script calls, each with its arguments, none of them run."""
    notes, path = folder / "notes", folder / "bin"
    notes.write_text("")
    path.mkdir(exist_ok=True)
    for name in ("ciflows", "make", "python", "torchrun"):
        (path / name).write_text(STAND_IN.format(python=sys.executable, notes=str(notes), name=name))
        (path / name).chmod(0o755)
    bash = [shutil.which("bash") or "bash", "-ec", script]
    done = subprocess.run(bash, env={"PATH": str(path)}, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, (script, done.stderr)
    return [json.loads(line) for line in notes.read_text().splitlines()]

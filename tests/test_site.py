"""The site: notebooks as pages, charts from their tables, and what a search of the built pages finds."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
import textwrap
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ciflows import Flow
from ciflows.models.catalogue import SUMMARIES

DOCS = Path(__file__).parent.parent / "docs"
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)
WORDS = {
    "quantile": "questions",
    "calibration": "questions",
    "cite": "cite",
    "bibtex": "cite",
    "missing": "missing",
    "GPU": "install",
    "model": "which-model",
    "outlier": "anomalies",
    "anomaly": "anomalies",
    "interval": "conditional",
    "conditional": "conditional",
}


def load(path: Path) -> ModuleType:
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_notebook_becomes_markdown_with_its_outputs(tmp_path: Path) -> None:
    outputs = [
        {"output_type": "stream", "name": "stdout", "text": ["printed\n"]},
        {"output_type": "stream", "name": "stderr", "text": ["a warning"]},
        {"output_type": "display_data", "data": {"image/png": PIXEL, "text/plain": ["<Figure>"]}},
    ]
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "words"]},
        {"cell_type": "code", "source": ["print(1)"], "outputs": outputs},
    ]
    page = load(DOCS / "notebook.py").as_markdown(json.dumps({"cells": cells}), "some", tmp_path)
    assert page.startswith("# Title\nwords\n")
    assert "some.ipynb" in page
    assert "```python\nprint(1)\n```\n\n```text\nprinted\n```" in page
    assert "a warning" not in page
    assert "<Figure>" not in page
    assert (tmp_path / "some-1.png").read_bytes().startswith(b"\x89PNG")


def test_saved_notebooks_have_all_their_outputs() -> None:
    for path in (DOCS / "notebooks").glob("*.ipynb"):
        cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), path.stem
        kinds = {output["output_type"] for cell in cells for output in cell["outputs"]}
        assert {"stream", "display_data"} <= kinds <= {"stream", "display_data", "execute_result"}, (
            path.stem
        )
        assert all(output.get("name") != "stderr" for cell in cells for output in cell["outputs"]), (
            path.stem
        )


def test_charts_are_drawn_from_the_tables_of_the_benchmark(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    charts = load(DOCS / "examples" / "bench_charts.py")
    assert charts.number("1,652 (1,607–1,700), m = 10") == 1652
    assert charts.number("–") is None
    charts.main(DOCS / "performance-tables.md", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"costs.png", "beside-others.png"}


def test_roulette_has_the_right_mean() -> None:
    pytest.importorskip("matplotlib")
    roulette = load(DOCS / "examples" / "roulette.py")
    assert roulette.estimates(0.6, 0.5, 100_000).mean().item() == pytest.approx(0.470, abs=0.005)


def test_every_model_is_on_the_page_that_helps_to_choose() -> None:
    page = (DOCS / "which-model.md").read_text(encoding="utf-8")
    assert not [
        name for name in SUMMARIES if name.removeprefix("cif-") not in page and "cif-id" not in name
    ]


def test_the_page_on_cifs_shows_the_loop_as_it_is() -> None:
    page = (DOCS / "what-is-a-cif.md").read_text(encoding="utf-8")
    loop = inspect.getsource(Flow._encode).partition('"""')[2].partition('"""')[2]
    assert f"```text\n{textwrap.dedent(loop).strip()}\n```" in page


@pytest.mark.slow
def test_the_site_is_built_and_searched(tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    words = [
        "-W",
        "--keep-going",
        "--quiet",
        "-d",
        str(tmp_path / "trees"),
        str(DOCS),
        str(tmp_path / "html"),
    ]
    done = subprocess.run([sys.executable, "-m", "sphinx", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "html" / "searchindex.js").read_text()
    index = json.loads(re.search(r"setIndex\((.*)\)", text, re.DOTALL)[1])  # type: ignore[index]
    for word, page in WORDS.items():
        assert page in found_pages(index, word), word
    assert "Which model?" in index["titles"]


def found_pages(index: dict[str, Any], word: str) -> list[str]:
    """The pages that a search of the site finds for a word: by index entries, then by its stem."""
    from sphinx.search.en import SearchEnglish

    stem = SearchEnglish({}).stem(word.lower())
    places: list[int] = [place for place, *_ in index["indexentries"].get(word.lower(), [])]
    for terms in (index["terms"], index["titleterms"]):
        found = terms.get(stem, [])
        places += [found] if isinstance(found, int) else found
    return [index["docnames"][place] for place in places]

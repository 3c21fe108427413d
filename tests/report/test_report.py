"""The report: what it says, that it needs nothing else, and that a browser shows it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ciflows import Flow, build_model
from ciflows.datasets import Dataset, Synthetic, get_synthetic
from ciflows.errors import UserError
from ciflows.layers import Standardise
from ciflows.report import DensityGrid, Entry, compare_picture, density_grids, write_report
from ciflows.report.comparison import _result
from ciflows.report.grids import (
    FEWEST_DRAWS,
    GRID_DRAWS,
    MOST_DRAWS,
    _cells_with_mass,
    density_grid,
    grid_points,
    shared_top,
    true_grid,
)
from ciflows.report.page import set_error, set_number
from ciflows.report.pictures import _loss_words, _scale
from ciflows.report.plots import first_shown, history_curve

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PNG = b"\x89PNG\r\n\x1a\n"


def make_dataset(
    points: Tensor, truth: Synthetic | None = None, name: str = "<set> & co", mark: str = "0"
) -> Dataset:
    columns = tuple(f"column {i}" for i in range(points.shape[1]))
    third = len(points) // 3
    return Dataset(
        name, points[:third], points[third : 2 * third], points[2 * third :], columns, 7, mark, truth
    )


def make_entry(name: str, dataset: Dataset, log_prob: float = -1.9375, **model: Any) -> Entry:
    features = dataset.train.shape[1]
    flow = build_model(name, features=features, layers=2, hidden=[8], **model).eval()
    metrics = {
        "test": {
            "log_prob": log_prob,
            "std_error": 0.0123,
            "monte_carlo_error": 0.00456,
            "elbo": log_prob - 0.25,
            "effective_samples": 41.7,
            "samples": 77,
            "points": len(dataset.test),
        },
        "limit": None if dataset.truth is None else dataset.truth.limit,
        "gap": None if dataset.truth is None else 0.5512,
        "leaked_mass": None if dataset.truth is None else 0.1234,
        "leaked_mass_std_error": None if dataset.truth is None else 0.0032,
        "parameters": 123456,
        "seconds": 59.6,
        "steps": 1000,
        "device": "CPU, 2 threads",
    }
    history: list[dict[str, Any]] = [
        {"step": 50 * i, "loss": 3 / i, "learning_rate": 0.1, "seconds": 1.0} for i in range(1, 21)
    ]
    for row in history[9::10]:
        row["validation"] = -row["loss"]
    return Entry(name, flow, dataset, metrics, history, f'model = "{name}"\nnote = "a < b"\n')


@pytest.fixture(scope="module")
def entries() -> list[Entry]:
    truth = get_synthetic("two-uniforms")
    dataset = make_dataset(truth.sample(900, seed=0), truth)
    return [make_entry("resflow", dataset), make_entry("cif-resflow", dataset, -1.7188)]


@pytest.fixture(scope="module")
def report(entries: list[Entry], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(path, entries, "A title with <b>marks</b>")
    return path


class _Page(HTMLParser):
    """The page's words, addresses and tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self.alts: list[str | None] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.append(tag)
        self.addresses += [values[key] or "" for key in ("src", "srcset", "href") if key in values]
        if tag == "img":
            self.alts.append(values.get("alt"))

    def handle_data(self, data: str) -> None:
        self.words += data + " "


def test_report_needs_nothing_else(report: Path) -> None:
    text = report.read_text()
    page = _Page(text)
    assert page.addresses
    assert all(address.startswith(("data:", "#")) for address in page.addresses)
    assert "script" not in page.tags
    assert not re.search(r"url\(|@import", text)
    assert text.startswith("<!doctype html>")


def test_report_tells_the_numbers(report: Path) -> None:
    words = " ".join(_Page(report.read_text()).words.split())
    for number in (
        "−1.938 ± 0.012",  # test log-likelihood and its standard error
        "−1.719 ± 0.012",
        "0.0046",  # Monte-Carlo error
        "−1.969",  # ELBO
        "77",  # draws
        "41.7",  # effective draws
        "−1.386",  # limit
        "0.551",  # gap
        "12.34% ± 0.32%",  # leaked mass
        "123,456",
        "60 s",
    ):
        assert number in words, number
    assert "The best of 2, cif-resflow: does not fit yet, 0.551 nats below the best possible" in words
    assert re.search(r"test log-likelihood \D+ −1\.938 ± 0\.012 −1\.719 ± 0\.012", words)
    assert re.search(r"draws m \D+ 77 Monte", words)  # an exact model has no column there
    assert "what training maximises" not in words
    assert "1 Indexed Affine" in words  # every layer has its row
    assert "its bound holds everywhere 100 none known" in words  # (1 / (1 - 0.9))²


def test_report_quotes_what_it_is_given(report: Path) -> None:
    page = _Page(report.read_text())
    assert "b" not in page.tags[: page.tags.index("h1") + 1]
    assert "A title with <b>marks</b>" in page.words
    assert "<set> & co" in page.words
    assert 'note = "a < b"' in page.words


def test_every_picture_has_words(report: Path) -> None:
    alts = _Page(report.read_text()).alts
    assert len(alts) == 2 + 3 + 3 + 3 + 2 + 1  # scores, maps, samples, training, draws
    assert all(alts)
    assert len(set(alts)) == len(alts)


def test_rows_of_maps_share_a_colour_scale(report: Path) -> None:
    text = report.read_text()
    assert text.count('class="scale" role="img"') == 2
    assert text.count("linear-gradient(to right, #440154, ") == 2  # viridis, from its dark end
    linear, log = _scale(0.25, log=False), _scale(0.25, log=True)
    assert linear.ticks == [
        (0, "0"),
        (20, "0.05"),
        (40, "0.1"),
        (60, "0.15"),
        (80, "0.2"),
        (100, "0.25"),
    ]
    assert [number for _, number in log.ticks] == ["0.001", "0.01", "0.1"]
    assert log.ticks[-1][0] == pytest.approx(100 * (1 + np.log10(0.1 / 0.25) / 3), abs=0.01)
    assert "below 0.00025" in log.label
    assert "above 0.25" in log.label


def test_loss_caption_says_what_is_compared(entries: list[Entry]) -> None:
    plain, indexed = entries
    words = _loss_words([plain, indexed._replace(config='[training]\nobjective = "dreg"\ndraws = 7\n')])
    assert "the exact log-likelihood for resflow; a lower bound from 7 draws (dreg)" in words
    assert "compare models by their validation" in words
    assert "validation" not in _loss_words([plain, plain])
    elbo = indexed._replace(config='[training]\nobjective = "elbo"\ndraws = 7\n')
    assert "from one draw (the ELBO)." in _loss_words([elbo])


def test_nulls_are_dashes(entries: list[Entry], tmp_path: Path) -> None:
    whole, broken = entries
    nulls = dict.fromkeys(broken.metrics["test"]) | {"samples": 77}
    history = [{"step": i, "loss": None, "validation": None} for i in range(3)]
    metrics = {**broken.metrics, "test": nulls, "gap": None, "leaked_mass_std_error": None}
    broken = broken._replace(metrics=metrics, history=history)
    grids = _flat_grids(entries)
    write_report(tmp_path / "report.html", [whole, broken], "Nulls", grids=grids)
    words = " ".join(_Page((tmp_path / "report.html").read_text()).words.split())
    assert "The best of 2, resflow: does not fit yet" in words
    assert re.search(r"It reaches −1\.938 .* −1\.938 ± 0\.012 — limit .* 0\.551 — leaked", words)
    assert "12.34% ± 0.32% 12.34% ± — parameters" in words
    assert "None" not in words
    compare_picture(tmp_path / "picture.png", [whole, broken], grids=grids)
    assert _result(broken) == "log-likelihood — nats\nleaked mass 12.3% ± —"
    assert _result(whole) == "log-likelihood −1.938 ± 0.012 nats\nleaked mass 12.3% ± 0.3%"
    write_report(tmp_path / "all.html", [broken._replace(metrics={**metrics, "test": None})], "All")
    assert "reaches" not in (tmp_path / "all.html").read_text()
    assert "does not fit yet" not in (tmp_path / "all.html").read_text()


def test_report_is_the_same_again(entries: list[Entry], report: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.html"
    write_report(again, entries, "A title with <b>marks</b>", grids=density_grids(entries))
    assert again.read_bytes() == report.read_bytes()


def test_report_leaves_flows_in_their_mode(tmp_path: Path) -> None:
    dataset = make_dataset(torch.randn(60, 3))
    entry = make_entry("resflow", dataset, log_det="roulette")
    entry.flow.train()  # its likelihoods are refused in this mode
    write_report(tmp_path / "report.html", [entry], "t")
    assert entry.flow.training


@pytest.mark.parametrize("features", [1, 3, 14])
def test_other_dimensions_get_columns(features: int, tmp_path: Path) -> None:
    dataset = make_dataset(torch.randn(90, features))
    entry = make_entry("cif-resflow", dataset)
    write_report(tmp_path / "report.html", [entry], "Other data")
    page = _Page((tmp_path / "report.html").read_text())
    shown = [alt for alt in page.alts if alt is not None and "Distribution of" in alt]
    assert len(shown) == min(features, 12)
    assert ("The 2 columns that fit best are left out" in page.words) == (features == 14)
    assert ("Pairs of columns" in page.words) == (features > 1)
    assert not any(alt is not None and "Heat map" in alt for alt in page.alts)
    assert not {"gap", "leaked", "limit"} & set(page.words.split("<body>")[-1].split())  # of 2-D sets


def test_plane_without_a_truth(tmp_path: Path) -> None:
    points = torch.randn(300, 2) * torch.tensor([1.0, 50.0])
    entry = make_entry("resflow", make_dataset(points))
    write_report(tmp_path / "report.html", [entry], "A table")
    alts = _Page((tmp_path / "report.html").read_text()).alts
    assert "Heat map of the density: resflow" in alts
    assert "Heat map of the density: truth" not in alts


def test_several_data_sets_get_sections(tmp_path: Path) -> None:
    several = [
        make_entry("resflow", make_dataset(torch.randn(60, 3), name=name, mark=name))
        for name in ("first", "second")
    ]
    write_report(tmp_path / "report.html", several, "Two sets")
    words = _Page((tmp_path / "report.html").read_text()).words
    assert words.count("Data:") == 2


def test_empty_metrics_and_history_are_no_obstacle(tmp_path: Path) -> None:
    entry = make_entry("resflow", make_dataset(torch.randn(60, 3)))
    write_report(tmp_path / "report.html", [entry._replace(metrics={}, history=[])], "Bare")
    assert "Training loss" not in (tmp_path / "report.html").read_text()


def test_a_report_on_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at least one run"):
        write_report(tmp_path / "report.html", [], "Nothing")
    with pytest.raises(UserError, match="two features"):
        compare_picture(
            tmp_path / "picture.png", [make_entry("resflow", make_dataset(torch.randn(60, 3)))]
        )
    assert not list(tmp_path.iterdir())


def _flat_grids(entries: list[Entry]) -> list[DensityGrid]:
    truth = entries[0].dataset.truth
    assert truth is not None
    return [DensityGrid(truth.window, np.full((20, 20), value), 1) for value in (0.1, 0.2)]


def test_compare_picture(entries: list[Entry], tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    compare_picture(path, entries, grids=_flat_grids(entries))
    assert path.read_bytes().startswith(PNG)
    width, height = (int.from_bytes(path.read_bytes()[i : i + 4], "big") for i in (16, 20))
    assert 1.2 * height < width < 1.7 * height  # truth and two models, in two rows
    assert width > 1600  # sharp at twice 800 pixels


def test_compare_picture_of_several_data_sets(entries: list[Entry], tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    other = make_entry("resflow", make_dataset(torch.randn(300, 2)))
    grid = DensityGrid((-3.0, 3.0, -3.0, 3.0), np.full((20, 20), 0.1), 1)
    compare_picture(path, [*entries, other, other, other], grids=[*_flat_grids(entries), *[grid] * 3])
    width, height = (int.from_bytes(path.read_bytes()[i : i + 4], "big") for i in (16, 20))
    assert 2 * height < width < 3.2 * height  # four columns, and one row for each set


def test_compare_picture_without_a_truth(tmp_path: Path) -> None:
    entry = make_entry("resflow", make_dataset(torch.randn(300, 2)))
    compare_picture(tmp_path / "picture.png", [entry])
    assert (tmp_path / "picture.png").read_bytes().startswith(PNG)
    assert _result(entry) == "log-likelihood −1.938 ± 0.012 nats"


def test_grid_is_the_density_and_integrates_to_one() -> None:
    flow = Flow([Standardise(torch.tensor([1.0, 0.0]), torch.tensor([0.5, 1.0]))])
    grid = density_grid(flow, (-3, 5, -6, 6), side=80)
    assert grid.mass == pytest.approx(1, abs=1e-4)
    row, column = divmod(int(grid.density.argmax()), 80)
    assert {row, column} <= {39, 40}
    assert grid.density[40, 45] < grid.density[45, 40]  # wider upward: rows are y, from below
    assert grid.density.max() == pytest.approx(1 / (2 * np.pi * 0.5), rel=0.05)


def test_draws_go_where_the_mass_is(entries: list[Entry], monkeypatch: pytest.MonkeyPatch) -> None:
    flow, window = entries[1].flow, (-4.0, 4.0, -4.0, 4.0)
    counts: list[tuple[int, int]] = []
    log_prob = flow.log_prob

    def counted(x: Tensor, samples: int, seed: int) -> Tensor:
        counts.append((len(x), samples))
        return log_prob(x, samples, seed=seed)

    monkeypatch.setattr(flow, "log_prob", counted)
    grid = density_grid(flow, window, side=60)
    (near, most), (rest, fewest) = counts
    assert near + rest == 60 * 60
    assert FEWEST_DRAWS == fewest < most == grid.samples == MOST_DRAWS  # few cells: all they may have
    assert grid.mass == pytest.approx(1, abs=0.03)
    counts.clear()
    grid = density_grid(flow, window)
    assert sum(cells * samples for cells, samples in counts) <= GRID_DRAWS
    assert FEWEST_DRAWS < grid.samples < MOST_DRAWS


def test_cells_with_mass_are_those_near_samples() -> None:
    flow = Flow([Standardise(torch.tensor([2.0, -1.0]), torch.tensor([0.1, 0.1]))])
    near = _cells_with_mass(flow.sample(20_000, seed=0), (-3, 3, -3, 3), side=60)
    distance = (grid_points((-3, 3, -3, 3), 60) - torch.tensor([2.0, -1.0])).norm(dim=-1).numpy()
    assert near[distance < 0.3].all()
    assert not near[distance > 1.0].any()


def test_true_grid_and_shared_scale() -> None:
    grid = true_grid(get_synthetic("two-uniforms"))
    assert grid is not None
    assert grid.mass == pytest.approx(1, abs=1e-9)  # the boxes' edges fall between cells
    assert shared_top([grid]) == pytest.approx(0.25)
    assert true_grid(get_synthetic("moons")) is None
    lines = true_grid(get_synthetic("two-lines"))
    assert lines is not None
    assert lines.mass == pytest.approx(1, abs=0.05)  # narrower than a cell, and not lost
    holes = grid._replace(density=np.where(grid.density > 0, grid.density, np.nan))
    assert shared_top([holes, grid]) == pytest.approx(0.25)
    assert shared_top([grid._replace(density=np.full((2, 2), np.nan))]) == 1


def test_a_chart_leaves_out_only_a_start_that_dwarfs_the_rest() -> None:
    steps = np.arange(1.0, 101.0)
    steep = 2 + 100 * np.exp(-2 * steps) + 0.1 / steps
    assert first_shown([(steps, -steps)]) == 0
    assert first_shown([(steps, steep)]) == 6
    assert first_shown([(steps[:5], steep[:5])]) == 0
    assert first_shown([(np.array([]), np.array([]))]) == 0


def test_history_curve_averages_blocks_and_skips_gaps() -> None:
    history = [{"step": i, "loss": float(i), "validation": None} for i in range(1000)]
    history[0]["loss"] = float("nan")
    steps, values = history_curve(history, "loss", most=10)
    assert len(steps) == 10
    assert np.allclose(steps, values)
    assert len(history_curve(history, "validation")[0]) == 0


@pytest.mark.parametrize(
    ("value", "form", "words"),
    [
        (None, "{:.3f}", "—"),
        (float("nan"), "{:.3f}", "—"),
        (-1.5, "{:.2f}", "−1.50"),
        (2.5e-7, "{:.1e}", "2.5×10⁻⁷"),
        (1e10, "{:.3g}", "1×10¹⁰"),
        (float("inf"), "{:.3g}", "∞"),
    ],
)
def test_numbers_are_set_in_print(value: float | None, form: str, words: str) -> None:
    assert set_number(value, form) == words


def test_errors_are_set_in_print() -> None:
    assert set_error(-1.5, 0.25, "{:.2f}") == "−1.50 ± 0.25"
    assert set_error(-1.5, None, "{:.2f}") == "−1.50 ± —"
    assert set_error(None, 0.25, "{:.2f}") == "—"


# -- in a browser ------------------------------------------------------------------------------------

PROBE = """<script>addEventListener("load", () => {
  for (const details of document.querySelectorAll("details")) details.open = true;
  const seen = (node) => node.checkVisibility() && node.getBoundingClientRect().height > 20;
  document.body.dataset.probe = JSON.stringify({
    images: [...document.images].map((image) => image.naturalWidth),
    dark: [...document.images].filter((image) => image.currentSrc !== image.src).length,
    tables: [...document.querySelectorAll("table")].map(seen),
    width: innerWidth,
    overflow: document.documentElement.scrollWidth - innerWidth,
  });
})</script></body>"""


def open_in_browser(page: Path, folder: Path, *flags: str) -> tuple[dict[str, Any], list[str]]:
    """Load a page in headless Chromium: what a probe found in it, and the console's lines."""
    assert CHROMIUM is not None
    probed = folder / "probed.html"
    probed.write_text(page.read_text().replace("</body>", PROBE))
    words = [
        *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
        *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
        *("--disable-sync", f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr"),
        *("--virtual-time-budget=10000", *flags, "--dump-dom", probed.as_uri()),
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    found = re.search(r'data-probe="([^"]*)"', done.stdout)
    assert found is not None, done.stderr[-2000:]
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(found.group(1).replace("&quot;", '"')), console


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium to open the report in")


@needs_chromium
@pytest.mark.parametrize("dark", [False, True])
def test_browser_shows_the_report(report: Path, tmp_path: Path, dark: bool) -> None:
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    found, console = open_in_browser(report, tmp_path, "--window-size=1280,900", scheme)
    assert console == []
    assert len(found["images"]) == 14
    assert min(found["images"]) > 400
    assert found["dark"] == (14 if dark else 0)
    assert len(found["tables"]) == 5  # results, trust, whole maps, layers of two models
    assert all(found["tables"])
    assert found["overflow"] <= 0


@needs_chromium
def test_page_does_not_overflow_on_a_phone(report: Path, tmp_path: Path) -> None:
    found, _ = open_in_browser(report, tmp_path, "--window-size=390,800")
    assert found["width"] < 600
    assert found["overflow"] <= 0


@needs_chromium
def test_browser_would_tell_of_a_broken_page(tmp_path: Path) -> None:
    page = tmp_path / "broken.html"
    page.write_text(
        '<!doctype html><body><img src="data:image/png;base64,AAAA"><table hidden><tr><td>1</table>'
        "<script>missing()</script></body>"
    )
    found, console = open_in_browser(page, tmp_path)
    assert found["images"] == [0]
    assert found["tables"] == [False]
    assert any("missing is not defined" in line for line in console)

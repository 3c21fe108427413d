"""The HTML report: one file that needs nothing else, for readers who have not read the paper."""

from __future__ import annotations

__all__ = ["write_report"]

import base64
import math
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import resources
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jinja2 import Environment, StrictUndefined, Template
from matplotlib.axes import Axes
from torch import Tensor

from ciflows.diagnostics import Lipschitz, RoundTrip, Stretch, draws_curve, lipschitz, round_trip
from ciflows.errors import UserError
from ciflows.files import write_text
from ciflows.indexed import Indexed
from ciflows.layers import Bijection
from ciflows.report.grids import (
    DensityGrid,
    Entry,
    density_grids,
    find_window,
    in_plane,
    on_device,
    shared_top,
    true_grid,
)
from ciflows.report.plots import (
    CHART,
    DARK,
    LIGHT,
    PANEL,
    SCALE,
    Draw,
    Theme,
    draw_density,
    draw_draws,
    draw_history,
    draw_marginal,
    draw_panel,
    draw_samples,
    draw_scale,
)

if TYPE_CHECKING:
    from ciflows.data import Dataset

SAMPLES = 2000
CURVE_POINTS = 250
LAYER_POINTS = 250
MOST_MARGINALS = 12
NOTHING = "–"
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


class Table(NamedTuple):
    """Rows of words, the first of each being the row's name."""

    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


class Details(NamedTuple):
    """Something long about one model, folded away."""

    name: str
    table: Table


class Section(NamedTuple):
    """All of the report that concerns one data set."""

    dataset: Dataset
    sizes: str
    lead: str
    headline: Table
    exact: bool
    known_support: bool
    densities: list[Picture]
    densities_scale: list[Picture]
    log_densities: list[Picture]
    log_scale: list[Picture]
    grid_draws: int
    samples: list[Picture]
    marginals: list[Picture]
    left_out: int
    training: list[Picture]
    draws: list[Picture]
    constants: Table
    layers: list[Details]


def write_report(
    path: Path,
    entries: Sequence[Entry],
    title: str,
    seed: int = 0,
    grids: Sequence[DensityGrid | None] | None = None,
) -> None:
    """Write a report on some trained runs, as one HTML file.

    Arguments:
        path: The file to write.
        entries: The runs; those on the same data are set side by side.
        title: Its heading.
        seed: Seed of all draws that pictures and diagnostics need.
        grids: What `density_grids` gave for these entries, where it has been called already.
    """
    if not entries:
        raise UserError("A report needs at least one run.")
    with _evaluating(entries):
        pairs = list(zip(entries, grids or density_grids(entries, seed), strict=True))
        groups: dict[str, list[tuple[Entry, DensityGrid | None]]] = {}
        for entry, grid in pairs:
            groups.setdefault(entry.dataset.fingerprint, []).append((entry, grid))
        sections = [_section(group, seed) for group in groups.values()]
    page = _template().render(
        title=title, sections=sections, entries=entries, environment=_environment(), seed=seed
    )
    write_text(Path(path), page)


def _section(group: Sequence[tuple[Entry, DensityGrid | None]], seed: int) -> Section:
    entries = [entry for entry, _ in group]
    grids = [grid for _, grid in group if grid is not None]
    dataset = entries[0].dataset
    drawn = [entry.flow.sample(SAMPLES, seed=seed).cpu() for entry in entries]
    plane = in_plane(dataset)
    maps, scale = _densities(entries, grids, log=False) if plane else ([], [])
    log_maps, log_scale = _densities(entries, grids, log=True) if plane else ([], [])
    constants, layers = _diagnostics(entries, seed)
    return Section(
        dataset=dataset,
        sizes=_sizes(dataset),
        lead=_lead(entries),
        headline=_headline(entries),
        exact=all(entry.flow.exact for entry in entries),
        known_support=dataset.truth is not None and dataset.truth.contains is not None,
        densities=maps,
        densities_scale=scale,
        log_densities=log_maps,
        log_scale=log_scale,
        grid_draws=max([grid.samples for grid in grids], default=1),
        samples=_samples(entries, drawn) if plane else [],
        marginals=[] if plane else _marginals(entries, drawn),
        left_out=max(0, dataset.train[0].numel() - MOST_MARGINALS),
        training=_training(entries),
        draws=_draws(entries, seed),
        constants=constants,
        layers=layers,
    )


# -- numbers -----------------------------------------------------------------------------------------


def _headline(entries: Sequence[Entry]) -> Table:
    """One row a model; columns that are empty for all of them are left out."""
    cells = [_headline_row(entry) for entry in entries]
    columns = [name for name in cells[0] if any(row[name] != NOTHING for row in cells)]
    return Table(
        ("model", *columns),
        [
            (entry.name, *(row[name] for name in columns))
            for entry, row in zip(entries, cells, strict=True)
        ],
    )


def _headline_row(entry: Entry) -> dict[str, str]:
    metrics, test, exact = entry.metrics, entry.metrics.get("test") or {}, entry.flow.exact
    leaked = _number(metrics.get("leaked_mass"), "{:.2%}")
    return {
        "parameters": _number(metrics.get("parameters"), "{:,}"),
        "test log-likelihood": _with_error(test.get("log_prob"), test.get("std_error")),
        "Monte-Carlo error": "exact" if exact else _number(test.get("monte_carlo_error"), "{:.2g}"),
        "ELBO": _number(test.get("elbo"), "{:.3f}"),
        "draws m": "none" if exact else _number(test.get("samples"), "{:,}"),
        "effective draws": NOTHING if exact else _number(test.get("effective_samples"), "{:.1f}"),
        "limit": _number(metrics.get("limit"), "{:.3f}"),
        "gap": _number(metrics.get("gap"), "{:.3f}"),
        "leaked mass": leaked
        if leaked == NOTHING
        else f"{leaked} ± {_number(metrics.get('leaked_mass_std_error'), '{:.2%}')}",
        "training": _seconds(metrics.get("seconds")),
    }


def _lead(entries: Sequence[Entry]) -> str:
    """The result in one sentence."""
    scored = [entry for entry in entries if entry.metrics.get("test")]
    if not scored:
        return ""
    best = max(scored, key=lambda entry: float(entry.metrics["test"]["log_prob"]))
    test = best.metrics["test"]
    reached = f"{_with_error(test['log_prob'], test.get('std_error'))} nats for each test point"
    gap = best.metrics.get("gap")
    words = f", {gap:.3f} below the best that any model can" if gap is not None and gap > 0 else ""
    if len(entries) == 1:
        return f"{best.name} reaches {reached}{words}."
    return f"The best of {len(entries)}, {best.name}, reaches {reached}{words}."


def _diagnostics(entries: Sequence[Entry], seed: int) -> tuple[Table, list[Details]]:
    """Constants and round trips of whole maps, and folded away those of every layer."""
    names = ("largest σ", "smallest σ", "bi-Lipschitz constant", "its bound", "round trip")
    whole, layers = Table(("model", *names), []), []
    for entry in entries:
        if not all(isinstance(layer, Bijection | Indexed) for layer in entry.flow.layers):
            continue
        x = on_device(entry.dataset.test[:LAYER_POINTS], entry.flow)
        constants, trip = lipschitz(entry.flow, x, seed=seed), round_trip(entry.flow, x, seed=seed)
        whole.rows.append((entry.name, *_stretch_cells(constants.whole, trip.whole)))
        layers.append(Details(entry.name, _layer_table(names, constants, trip)))
    return whole, layers


def _layer_table(names: tuple[str, ...], constants: Lipschitz, trip: RoundTrip) -> Table:
    rows = [
        (stretch.layer, *_stretch_cells(stretch, error))
        for stretch, error in zip(constants.layers, trip.layers, strict=True)
    ]
    return Table(("layer", *names), rows)


def _stretch_cells(stretch: Stretch, error: float) -> tuple[str, ...]:
    values = (stretch.largest, stretch.smallest, stretch.constant, stretch.bound)
    return (*(_number(value, "{:#.3g}") for value in values), _number(error, "{:.1e}"))


def _sizes(dataset: Dataset) -> str:
    parts = (dataset.train, dataset.validation, dataset.test)
    counts = [f"{len(part):,}" for part in parts]
    d = dataset.train[0].numel()
    return (
        f"{d} feature{'s' if d != 1 else ''}; {counts[0]} points to train on, "
        f"{counts[1]} for validation, {counts[2]} for the test"
    )


# -- pictures ----------------------------------------------------------------------------------------


def _densities(
    entries: Sequence[Entry], grids: Sequence[DensityGrid], log: bool
) -> tuple[list[Picture], list[Picture]]:
    """The true density, where it is known, and each model's, on one scale; and the scale."""
    dataset = entries[0].dataset
    truth = None if dataset.truth is None else true_grid(dataset.truth)
    top = shared_top(grids if truth is None else [truth, *grids])
    dots = None if log else dataset.test
    kind = "log density" if log else "density"
    named = [(entry.name, grid, _mass(grid)) for entry, grid in zip(entries, grids, strict=True)]
    if truth is not None:
        named.insert(0, ("truth", truth, ""))
    pictures = [
        _picture(
            _plain(partial(draw_density, grid=grid, top=top, log=log, dots=dots)),
            PANEL,
            f"Heat map of the {kind}: {name}",
            name,
            note,
        )
        for name, grid, note in named
    ]
    scale = _plain(partial(draw_scale, top=top, log=log))
    return pictures, [_picture(scale, SCALE, f"Colour scale of the {kind}, up to {top:.3g}")]


def _mass(grid: DensityGrid) -> str:
    return f"mass in the window: {grid.mass:.3f}"


def _samples(entries: Sequence[Entry], drawn: Sequence[Tensor]) -> list[Picture]:
    dataset = entries[0].dataset
    contains = None if dataset.truth is None else dataset.truth.contains
    window = find_window(dataset)
    pictures = []
    names = ["data", *(entry.name for entry in entries)]
    for name, points in zip(names, [dataset.test[:SAMPLES], *drawn], strict=True):
        inside = None if contains is None else contains(points)
        out = None if inside is None else int((~inside).sum())
        note = f"{len(points):,} points" if out is None else f"{out:,} of {len(points):,} outside"
        draw = partial(draw_samples, points=points, inside=inside, window=window)
        pictures.append(_picture(draw, PANEL, f"Scatter plot of {name}: {note}", name, note))
    return pictures


def _marginals(entries: Sequence[Entry], drawn: Sequence[Tensor]) -> list[Picture]:
    dataset = entries[0].dataset
    data, models = dataset.test.flatten(1), [points.flatten(1) for points in drawn]
    columns = [*dataset.columns, *(f"x{i + 1}" for i in range(data.shape[1]))][: data.shape[1]]
    pictures = []
    for index, column in enumerate(columns[:MOST_MARGINALS]):
        samples = [(e.name, x[:, index]) for e, x in zip(entries, models, strict=True)]
        draw = partial(draw_marginal, column=column, data=data[:, index], samples=samples)
        pictures.append(_picture(draw, PANEL, f"Histograms of {column}, data and samples"))
    return pictures


def _training(entries: Sequence[Entry]) -> list[Picture]:
    limit = entries[0].metrics.get("limit")
    loss = partial(draw_history, entries=entries, key="loss")
    validation = partial(draw_history, entries=entries, key="validation", limit=limit)
    pictures = []
    if any(row.get("loss") is not None for entry in entries for row in entry.history):
        caption = "Training loss: the negative of what is maximised, so lower is better."
        pictures.append(_picture(loss, CHART, "Training loss against the step", caption))
    if any(row.get("validation") is not None for entry in entries for row in entry.history):
        caption = "Validation log-likelihood: higher is better. The best weights are kept."
        alt = "Validation log-likelihood against the step"
        pictures.append(_picture(validation, CHART, alt, caption))
    return pictures


def _draws(entries: Sequence[Entry], seed: int) -> list[Picture]:
    """log_prob against m; nothing to see where every model is exact."""
    if all(entry.flow.exact for entry in entries):
        return []
    curves = [
        draws_curve(e.flow, on_device(e.dataset.test[:CURVE_POINTS], e.flow), seed=seed) for e in entries
    ]
    draw = partial(draw_draws, names=[entry.name for entry in entries], curves=curves)
    points = min(CURVE_POINTS, len(entries[0].dataset.test))
    caption = f"Log-likelihood of the first {points} test points against the number of draws m."
    return [_picture(draw, CHART, "Log-likelihood against the number of draws", caption)]


def _plain(draw: Callable[[Axes], None]) -> Draw:
    """A panel that looks the same in every theme but for its frame."""

    def themed(axes: Axes, theme: Theme) -> None:
        draw(axes)

    return themed


def _picture(
    draw: Draw, size: tuple[float, float], alt: str, caption: str = "", note: str = ""
) -> Picture:
    light, dark = (
        "data:image/png;base64," + base64.b64encode(draw_panel(draw, theme, size)).decode()
        for theme in (LIGHT, DARK)
    )
    return Picture(light, dark, alt, caption, note, int(100 * size[0]), int(100 * size[1]))


# -- inside ------------------------------------------------------------------------------------------


@contextmanager
def _evaluating(entries: Sequence[Entry]) -> Iterator[None]:
    """Put flows into eval mode for a while."""
    before = [entry.flow.training for entry in entries]
    try:
        for entry in entries:
            entry.flow.eval()
        yield
    finally:
        for entry, training in zip(entries, before, strict=True):
            entry.flow.train(training)


def _template() -> Template:
    text = (resources.files("ciflows.report") / "template.html").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(text)


def _environment() -> list[tuple[str, str]]:
    try:
        own = version("ciflows")
    except PackageNotFoundError:
        own = "not installed"
    return [
        ("ciflows", own),
        ("PyTorch", torch.__version__),
        ("Python", platform.python_version()),
        ("machine", platform.platform()),
    ]


def _number(value: Any, form: str) -> str:
    """A number as it is set in print."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return NOTHING
    digits, e, exponent = form.format(value).partition("e")
    power = f"×10{str(int(exponent)).translate(SUPERSCRIPTS)}" if e else ""
    return digits.removesuffix(".").replace("-", "−").replace("inf", "∞") + power


def _with_error(value: float | None, error: float | None) -> str:
    number = _number(value, "{:.3f}")
    return number if error is None else f"{number} ± {_number(error, '{:.3f}')}"


def _seconds(value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{value:.0f} s" if value < 600 else f"{value / 60:.0f} min"

"""The HTML report: one file that needs nothing else, for readers who have not read the paper."""

from __future__ import annotations

__all__ = ["write_report"]

import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from jinja2 import Environment, StrictUndefined, Template

from ciflows.errors import UserError
from ciflows.files import write_text
from ciflows.report import pictures, tables
from ciflows.report.grids import FEWEST_DRAWS, DensityGrid, Entry, density_grids, in_plane
from ciflows.report.images import GRID_IMAGES, image_pictures, reconstructions
from ciflows.report.own_tables import TableReport, draw_samples, table_report
from ciflows.report.pictures import MOST_MARGINALS, Picture, Scale
from ciflows.report.tables import LAYER_POINTS, Details, Table

if TYPE_CHECKING:
    from ciflows.data import Dataset

SAMPLES = 2000


class Section(NamedTuple):
    """All of the report that concerns one data set."""

    dataset: Dataset
    sizes: str
    lead: str
    headline: Table
    exact: bool
    known_support: bool
    densities: list[Picture]
    densities_scale: Scale | None
    log_densities: list[Picture]
    log_scale: Scale | None
    grid_draws: int
    fewest_draws: int
    samples: list[Picture]
    images: list[Picture]
    reconstructions: Table
    marginals: list[Picture]
    table: TableReport | None
    left_out: int
    training: list[Picture]
    draws: list[Picture]
    layer_points: int
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
        title=title,
        sections=sections,
        entries=entries,
        estimated=any(entry.metrics.get("log_det") for entry in entries),
        environment=_environment(),
        seed=seed,
    )
    write_text(Path(path), page)


def _section(group: Sequence[tuple[Entry, DensityGrid | None]], seed: int) -> Section:
    entries = [entry for entry, _ in group]
    grids = [grid for _, grid in group if grid is not None]
    dataset = entries[0].dataset
    samples = GRID_IMAGES if dataset.images else SAMPLES
    drawn = [draw_samples(entry, samples, seed) for entry in entries]
    table = None if dataset.schema is None else table_report(entries, drawn, seed)
    plane = in_plane(dataset)
    maps, scale = pictures.densities(entries, grids, log=False) if plane else ([], None)
    log_maps, log_scale = pictures.densities(entries, grids, log=True) if plane else ([], None)
    constants, layers = tables.diagnose(entries, seed)
    return Section(
        dataset=dataset,
        sizes=tables.sizes(dataset),
        lead=tables.lead(entries),
        headline=tables.headline(entries),
        exact=all(entry.flow.exact for entry in entries),
        known_support=dataset.truth is not None and dataset.truth.contains is not None,
        densities=maps,
        densities_scale=scale,
        log_densities=log_maps,
        log_scale=log_scale,
        grid_draws=max([grid.samples for grid in grids], default=1),
        fewest_draws=FEWEST_DRAWS,
        samples=pictures.samples(entries, drawn) if plane else [],
        images=image_pictures(entries, drawn) if dataset.images else [],
        reconstructions=reconstructions(entries, seed) if dataset.images else Table((), []),
        marginals=[] if plane or dataset.images or table else pictures.marginals(entries, drawn),
        table=table,
        left_out=max(0, dataset.train[0].numel() - MOST_MARGINALS),
        training=pictures.training(entries),
        draws=pictures.draws(entries, seed),
        layer_points=min(LAYER_POINTS, len(dataset.test)),
        constants=constants,
        layers=layers,
    )


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

"""The HTML report: one file that needs nothing else. The verdict comes first, then the evidence."""

from __future__ import annotations

__all__ = ["write_report"]

import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from jinja2 import Environment, StrictUndefined, Template

from ciflows import __version__
from ciflows.errors import UserError
from ciflows.files import write_text
from ciflows.report.columns import columns_block, compare_columns, draw_samples, pairs_block
from ciflows.report.coverage_pages import coverage_block
from ciflows.report.grids import DensityGrid, Entry, density_grids, in_plane
from ciflows.report.page import Block
from ciflows.report.pictures import (
    density_blocks,
    draws_picture,
    images_block,
    samples_block,
    training_block,
)
from ciflows.report.scores import calibration_block, rows_block, score_rows
from ciflows.report.summaries import index_block, map_block, results_table, sizes, trust_table
from ciflows.report.verdict import Verdict, judge

if TYPE_CHECKING:
    from ciflows.datasets import Dataset

SAMPLES = 2000
TRUST = (
    "Some densities have no formula, above all those with an index: we average over m random draws. Too "
    "few draws make a model look worse than it is, on average, never better. A model that is not listed "
    "is exact."
)

EXACT = "Yes: it is exact. Only the choice of test rows adds an error."


class Section(NamedTuple):
    """All of the report that concerns one data set."""

    dataset: Dataset
    sizes: str
    verdict: Verdict
    blocks: list[Block]


def write_report(
    path: Path,
    entries: Sequence[Entry],
    title: str,
    seed: int = 0,
    grids: Sequence[DensityGrid | None] | None = None,
) -> list[str]:
    """Write a report on some trained runs, as one HTML file; return its verdict on each data set.

    Arguments:
        entries: The runs; those on the same data are set side by side.
        grids: What `density_grids` gave for these entries, if it has been called already.
    """
    if not entries:
        raise UserError("A report needs at least one run.")
    with _evaluating(entries):
        groups: dict[str, list[tuple[Entry, DensityGrid | None]]] = {}
        for entry, grid in zip(entries, grids or density_grids(entries, seed), strict=True):
            groups.setdefault(entry.dataset.fingerprint, []).append((entry, grid))
        sections = [_section(group, seed) for group in groups.values()]
    facts = {
        "ciflows": __version__,
        "PyTorch": torch.__version__,
        "Python": platform.python_version(),
        "machine": platform.platform(),
        "seed of the draws": str(seed),
    }
    page = _template().render(title=title, sections=sections, entries=entries, facts=facts)
    write_text(Path(path), page)
    named = [(Path(section.dataset.name).stem, section.verdict.headline) for section in sections]
    return [f"{name}: {headline}" for name, headline in named if headline]


def _section(group: Sequence[tuple[Entry, DensityGrid | None]], seed: int) -> Section:
    entries = [entry for entry, _ in group]
    dataset = entries[0].dataset
    if dataset.images:
        verdict, blocks = judge(entries, None, []), [images_block(entries, seed)]
    else:
        columns = compare_columns(entries, seed)
        scores = [score_rows(entry, seed) for entry in entries]
        verdict, blocks = judge(entries, columns, scores), [calibration_block(entries, scores)]
        if dataset.schema is not None:
            blocks += [coverage_block(entries, seed)]
        if in_plane(dataset):
            drawn = [draw_samples(entry, SAMPLES, None, seed) for entry in entries]
            blocks += density_blocks(entries, [grid for _, grid in group if grid is not None])
            blocks += [samples_block(entries, drawn)]
        if dataset.truth is None:
            blocks += [columns_block(columns), pairs_block(columns), rows_block(entries, scores)]
    words = EXACT if all(entry.flow.exact for entry in entries) else TRUST
    trust = Block("Can you trust the log-likelihood?", words, draws_picture(entries, seed))
    if words == TRUST:
        trust = trust._replace(tables=[trust_table(entries)])
    blocks = [
        Block("Results", tables=[results_table(entries)]),
        *blocks,
        index_block(entries),
        trust,
        training_block(entries),
        map_block(entries, seed),
        verdict.next_block(),
    ]
    return Section(dataset, sizes(dataset), verdict, [block for block in blocks if block.filled])


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

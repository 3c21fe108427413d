"""The report's tables: rows of numbers, set as they are in print."""

from __future__ import annotations

__all__ = ["Details", "Table", "diagnose", "headline", "lead", "set_error", "set_number", "sizes"]

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ciflows.diagnostics import Lipschitz, RoundTrip, Stretch, is_chain, lipschitz, round_trip
from ciflows.report.grids import Entry, on_device

if TYPE_CHECKING:
    from ciflows.data import Dataset

LAYER_POINTS = 250
NOTHING = "—"
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


class Table(NamedTuple):
    """Rows of words, the first of each being the row's name."""

    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


class Details(NamedTuple):
    """Something long about one model, folded away."""

    name: str
    table: Table


def headline(entries: Sequence[Entry]) -> Table:
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
    bits, probes = metrics.get("bits_per_dim"), metrics.get("log_det") or {}
    leaked, leaked_error = metrics.get("leaked_mass"), metrics.get("leaked_mass_std_error")
    return {
        "parameters": set_number(metrics.get("parameters"), "{:,}"),
        "bits per dimension": set_error(bits, metrics.get("bits_per_dim_std_error"), "{:.3f}"),
        "test log-likelihood": set_error(test.get("log_prob"), test.get("std_error"), "{:.3f}"),
        "probes' error": set_number(probes.get("std_error"), "{:.2g}"),
        "probes' bias": set_number(probes.get("bias"), "{:.2g}"),
        "Monte-Carlo error": "none" if exact else set_number(test.get("monte_carlo_error"), "{:.2g}"),
        "ELBO": set_number(test.get("elbo"), "{:.3f}"),
        "draws m": "exact" if exact else set_number(test.get("samples"), "{:,}"),
        "effective draws": NOTHING if exact else set_number(test.get("effective_samples"), "{:.1f}"),
        "limit": set_number(metrics.get("limit"), "{:.3f}"),
        "gap": set_number(metrics.get("gap"), "{:.3f}"),
        "leaked mass": set_error(leaked, leaked_error, "{:.2%}"),
        "training": _seconds(metrics.get("seconds")),
    }


def lead(entries: Sequence[Entry]) -> str:
    """The result in one sentence."""
    tests = [(entry, entry.metrics.get("test") or {}) for entry in entries]
    scored = [(entry, test) for entry, test in tests if _known(test.get("log_prob"))]
    if not scored:
        return ""
    best, test = max(scored, key=lambda pair: float(pair[1]["log_prob"]))
    reached = set_error(test["log_prob"], test.get("std_error"), "{:.3f}")
    gap = best.metrics.get("gap") or 0.0
    words = f", {gap:.3f} below the best that any model can" if gap > 0 else ""
    bits = best.metrics.get("bits_per_dim")
    words += f", that is {bits:.3f} bits per dimension" if _known(bits) else ""
    who = best.name if len(entries) == 1 else f"The best of {len(entries)}, {best.name},"
    return f"{who} reaches {reached} nats for each test point{words}."


def diagnose(entries: Sequence[Entry], seed: int) -> tuple[Table, list[Details]]:
    """Constants and round trips of whole maps, and folded away those of every layer."""
    names = ("largest σ", "smallest σ", "bi-Lipschitz constant", "its bound", "round trip")
    whole, layers = Table(("model", *names), []), []
    for entry in entries:
        if not is_chain(entry.flow):
            continue
        x = on_device(entry.dataset.test[:LAYER_POINTS], entry.flow)
        constants, trip = lipschitz(entry.flow, x, seed=seed), round_trip(entry.flow, x, seed=seed)
        whole.rows.append((entry.name, *_stretch_cells(constants.whole, trip.whole)))
        layers.append(Details(entry.name, _layer_table(names, constants, trip)))
    return whole, layers


def sizes(dataset: Dataset) -> str:
    """The data's dimension and the sizes of its parts, in words."""
    parts = (dataset.train, dataset.validation, dataset.test)
    counts = [f"{len(part):,}" for part in parts]
    return (
        f"{_size(dataset)}; {counts[0]} points to train on, {counts[1]} for validation, "
        f"{counts[2]} for the test"
    )


def _size(dataset: Dataset) -> str:
    if dataset.images:
        channels, height, width = dataset.shape
        colours = "grey" if channels == 1 else f"{channels} channels"
        return f"Images of {width}×{height} pixels, {colours}"
    return f"{dataset.features} feature{'s' if dataset.features != 1 else ''}"


def set_number(value: Any, form: str) -> str:
    """A number as it is set in print; a dash for one that is missing, null or not a number."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return NOTHING
    digits, e, exponent = form.format(value).partition("e")
    power = f"×10{str(int(exponent)).translate(SUPERSCRIPTS)}" if e else ""
    return digits.removesuffix(".").replace("-", "−").replace("inf", "∞") + power


def set_error(value: float | None, error: float | None, form: str) -> str:
    """A number and its standard error."""
    number = set_number(value, form)
    return number if number == NOTHING else f"{number} ± {set_number(error, form)}"


def _known(value: Any) -> bool:
    return value is not None and math.isfinite(value)


def _layer_table(names: tuple[str, ...], constants: Lipschitz, trip: RoundTrip) -> Table:
    rows = [
        (stretch.layer, *_stretch_cells(stretch, error))
        for stretch, error in zip(constants.layers, trip.layers, strict=True)
    ]
    return Table(("layer", *names), rows)


def _stretch_cells(stretch: Stretch, error: float) -> tuple[str, ...]:
    seen = (stretch.largest, stretch.smallest, stretch.constant)
    bound = "none known" if stretch.bound is None else set_number(stretch.bound, "{:#.3g}")
    return (*(set_number(value, "{:#.3g}") for value in seen), bound, set_number(error, "{:.1e}"))


def _seconds(value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{value:.0f} s" if value < 600 else f"{value / 60:.0f} min"

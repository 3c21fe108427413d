"""The report's tables: the result, what it can be trusted for, the index, and how the map stretches."""

from __future__ import annotations

__all__ = ["index_block", "index_words", "map_block", "results_table", "sizes", "trust_table"]

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ciflows.diagnostics import (
    IndexWorth,
    Stretch,
    is_chain,
    lipschitz,
    reconstruction_error,
    round_trip,
)
from ciflows.diagnostics.index_use import index_words as worth_in_words
from ciflows.errors import InversionError
from ciflows.report.grids import Entry, on_device
from ciflows.report.page import NOTHING, Block, Table, set_error, set_number

if TYPE_CHECKING:
    from ciflows.datasets import Dataset

LAYER_POINTS, ROUND_TRIPS = 250, 16


class Row(NamedTuple):
    """One row of a table over models.

    Attributes:
        name: Its name.
        meaning: What the number says.
        form: How to set the number.
        where: Its place in metrics.json, with that of its standard error if it has one.
    """

    name: str
    meaning: str
    form: str
    where: str

    def cell(self, entry: Entry) -> str:
        value, *error = (_look_up(entry.metrics, path) for path in self.where.split(" ± "))
        return set_error(value, error[0], self.form) if error else set_number(value, self.form)


LOG_PROB, DIFFERENCE = "test.log_prob ± test.std_error", "difference.log_prob ± difference.std_error"
MASS = "self_test.total ± self_test.total_error"
RESULTS = (
    Row("test log-likelihood", "mean of test rows in nats: higher is better", "{:.3f}", LOG_PROB),
    Row("difference", "to the first model, paired by test rows", "{:+.3f}", DIFFERENCE),
    Row("bits per dimension", "lower is better", "{:.3f}", "bits_per_dim ± bits_per_dim_std_error"),
    Row("limit", "the best possible log-likelihood", "{:.3f}", "limit"),
    Row("gap", "shortfall from the limit", "{:.3f}", "gap"),
    Row(
        "leaked mass",
        "samples outside the support of the data",
        "{:.2%}",
        "leaked_mass ± leaked_mass_std_error",
    ),
    Row("mass", "integral of the density: 1 up to its error", "{:.2f}", MASS),
    Row("parameters", "", "{:,}", "parameters"),
    Row("training time", "", "{:,.0f} s", "seconds"),
)
TRUST = (
    Row("draws m", "draws of the index for each row", "{:,}", "test.samples"),
    Row("Monte-Carlo error", "nats that the draws add", "{:.2g}", "test.monte_carlo_error"),
    Row("bias", "error of the mean of m draws, in nats; below 0: too low", "{:.2g}", "test.bias"),
    Row("ELBO", "the same from one draw; lower by what q(u | x) misses", "{:.3f}", "test.elbo"),
    Row("effective draws", "how many of the m carry weight", "{:.1f}", "test.effective_samples"),
    Row("heavy tails", "rows with k̂ > 0.7: their errors may be larger", "{:.1%}", "test.pareto_share"),
    Row(
        "sandwich",
        "how far the log-likelihood may be too low, in nats",
        "{:.2g}",
        "sandwich.gap ± sandwich.std_error",
    ),
    Row("probes' error", "from estimated log-determinants, in nats", "{:.2g}", "log_det.std_error"),
    Row("probes' bias", "likewise", "{:.2g}", "log_det.bias"),
)


def results_table(entries: Sequence[Entry]) -> Table:
    """How good each model is."""
    return _across(entries, RESULTS)


def trust_table(entries: Sequence[Entry]) -> Table:
    """How far log-likelihoods may be off, for models that are not exact."""
    return _across([entry for entry in entries if not entry.flow.exact], TRUST)


def _across(entries: Sequence[Entry], rows: Sequence[Row]) -> Table:
    """A column for each model, without rows that are empty for all of them."""
    cells = [(row.name, *(row.cell(entry) for entry in entries)) for row in rows]
    kept = [any(cell != NOTHING for cell in line[1:]) for line in cells]
    meanings = [row.meaning for row in itertools.compress(rows, kept)]
    columns = ("", *(entry.name for entry in entries))
    return Table(columns, list(itertools.compress(cells, kept)), meanings=meanings)


def _look_up(metrics: dict[str, Any], path: str) -> Any:
    value: Any = metrics
    for key in path.split("."):
        value = (value or {}).get(key)
    return value


# -- the index ---------------------------------------------------------------------------------------


def index_block(entries: Sequence[Entry]) -> Block:
    """What the index is worth, and what each of them does."""
    heads = ("KL", "effect", "loss if permuted", "loss if frozen")
    tables = []
    for entry in entries:
        if use := entry.metrics.get("index"):
            rows = [_index_row(index) for index in (*use["indices"], use["total"])]
            tables.append(Table(("index", *heads), rows, f"{entry.name}: what each index does"))
    words = " ".join(filter(None, (index_words(entry, entries) for entry in entries)))
    if tables:
        words += (
            " KL is what an index costs in the ELBO. Effect is how far it moves points, in standard "
            "deviations. The losses are in nats a row: permuted, if each row gets another row's index; "
            "frozen, if all rows share one, which overstates its worth, since other layers rely on it."
        )
    return Block("Is the index worth it?", words, tables=tables)


def _index_row(use: dict[str, Any]) -> tuple[str, ...]:
    cells = [set_error(use[key], use[f"{key}_error"], "{:.2f}") for key in ("kl", "permuted", "frozen")]
    return use["layer"], cells[0], set_number(use["effect"], "{:.2f}"), *cells[1:]


def index_words(entry: Entry, entries: Sequence[Entry]) -> str:
    """What the index of a model is worth, in a sentence; "" if that is not known.

    A run that was trained in stages differs from its plain flow in more than the index: in its start, in
    its optimiser. There only what the stages measured counts.
    """
    plain = entry.name.removeprefix("cif-")
    if plain == entry.name:
        return ""
    if entry.metrics.get("story"):
        return worth_in_words(entry.name, entry.metrics)
    metrics = {other.name: other.metrics for other in entries}
    for model, other, sign in ((entry.name, plain, 1), (plain, entry.name, -1)):
        paired = metrics.get(model, {}).get("difference") or {}
        if paired.get("reference") == other and paired["log_prob"] is not None:
            gain = set_error(sign * paired["log_prob"], paired["std_error"], "{:+.3f}")
            return f"The index changes the test log-likelihood by {gain} nats a row."
    return worth_in_words(entry.name, entry.metrics)


def measured_worth(entry: Entry) -> IndexWorth | None:
    """What training in stages found the index to be worth, if it was measured."""
    worth = entry.metrics.get("index_worth") or {}
    return None if None in (worth.get("nats"), worth.get("std_error")) else IndexWorth(**worth)


# -- the map -----------------------------------------------------------------------------------------


def map_block(entries: Sequence[Entry], seed: int) -> Block:
    """How far maps stretch space and how well they invert: in all, and folded away by layer."""
    if entries[0].dataset.images:
        return Block("Reconstruction", RECONSTRUCTION, tables=[_reconstructions(entries, seed)])
    chains = [entry for entry in entries if is_chain(entry.flow)]
    if not chains:
        return Block("Stretching and inversion")
    whole, layers = [], []
    for entry in chains:
        x = on_device(entry.dataset.test[:LAYER_POINTS], entry.flow)
        constants, trip = lipschitz(entry.flow, x, seed=seed), round_trip(entry.flow, x, seed=seed)
        whole.append(_stretch_cells(constants.whole, trip.whole))
        pairs = zip(constants.layers, trip.layers, strict=True)
        rows = [(stretch.layer, *_stretch_cells(stretch, error)) for stretch, error in pairs]
        layers.append(Table(("layer", *STRETCHES), rows, f"{entry.name}: layers, data side first"))
    names = ("", *(entry.name for entry in chains))
    cells = list(zip(STRETCHES, *whole, strict=True))
    tables = [Table(names, cells, meanings=list(STRETCHES.values())), *layers]
    return Block("Stretching and inversion", STRETCHING, tables=tables)


STRETCHING = (
    "How far does the map from data to noise stretch small steps? A bijection that stretches by a "
    "bounded factor cannot tear a Gaussian into pieces or open a hole in it without leaking mass. With "
    "an index, each u has its own bijection and none has to tear anything; we show one u for each point."
)
STRETCHES = {
    "largest σ": "singular value of the Jacobian, at some test points",
    "smallest σ": "likewise",
    "bi-Lipschitz constant": "the larger of the largest σ and 1 / smallest σ",
    "its bound": "holds everywhere",
    "round trip": "largest error after mapping points to noise and back",
}
RECONSTRUCTION = "The largest error after mapping test images to noise and back, in levels of a pixel."


def _reconstructions(entries: Sequence[Entry], seed: int) -> Table:
    rows = []
    for entry in entries:
        x = on_device(entry.dataset.test[:ROUND_TRIPS], entry.flow)
        try:
            error = set_number(reconstruction_error(entry.flow, x, seed), "{:.1e}")
        except InversionError:
            error = NOTHING
        rows.append((entry.name, error))
    return Table(("model", "largest error, in levels"), rows)


def _stretch_cells(stretch: Stretch, error: float) -> tuple[str, ...]:
    seen = (stretch.largest, stretch.smallest, stretch.constant)
    bound = "none known" if stretch.bound is None else set_number(stretch.bound, "{:#.3g}")
    return (*(set_number(value, "{:#.3g}") for value in seen), bound, set_number(error, "{:.1e}"))


def sizes(dataset: Dataset) -> str:
    """The data's dimension and the sizes of its parts, in words."""
    train, validation, test = (
        f"{len(part):,}" for part in (dataset.train, dataset.validation, dataset.test)
    )
    if dataset.images:
        channels, height, width = dataset.shape
        colours = "grey" if channels == 1 else f"{channels} channels"
        what = f"Images of {width}×{height} pixels, {colours}"
    else:
        what = f"{dataset.features} column{'s' if dataset.features != 1 else ''}"
    return f"{what}; {train} rows to train, {validation} to validate, {test} to test"

"""The verdict: what a report finds, good or bad, in words; and what to try next."""

from __future__ import annotations

__all__ = ["Finding", "Verdict", "judge"]

import math
from collections.abc import Sequence
from typing import NamedTuple

from ciflows.files import parse_toml
from ciflows.models.catalogue import index_pair
from ciflows.report.columns import Columns
from ciflows.report.grids import Entry
from ciflows.report.page import Block, set_error, set_number
from ciflows.report.plots import history_curve
from ciflows.report.scores import Scores
from ciflows.report.summaries import index_words, measured_worth

SMALL = 0.02  # nats, and shares of mass: less is no concern
MANY = 0.02  # a share of suspicious rows that speaks against the model, not the rows
LOOSE = 0.1  # nats that draws may hide


class Finding(NamedTuple):
    """One thing that a report finds.

    Attributes:
        good: Whether it is as it should be.
        words: A sentence; "" if there is only advice.
        short: The same for the headline; "" if it is not worth a place there.
        advice: What to try, if anything.
        command: The command for it.
    """

    good: bool
    words: str
    short: str = ""
    advice: str = ""
    command: str = ""


class Verdict(NamedTuple):
    """The best model, what was found of it, and the command that uses it."""

    headline: str
    findings: list[Finding]
    command: str

    @property
    def good(self) -> bool:
        return all(finding.good for finding in self.findings)

    def next_block(self) -> Block:
        """What to try next."""
        steps = [(f.advice, f.command) for f in self.findings if f.advice]
        usual = ("Nothing stands out. Use the model: score new rows, or draw some.", self.command)
        return Block("What to try next", steps=steps or [usual])


def judge(entries: Sequence[Entry], columns: Columns | None, scores: Sequence[Scores]) -> Verdict:
    """Judge the model with the best test log-likelihood.

    Arguments:
        columns: Their samples beside the data; None for images.
        scores: Scores of each; none for images.
    """
    best = max(range(len(entries)), key=lambda k: _log_prob(entries[k]))
    entry, metrics = entries[best], entries[best].metrics
    findings = [_reached(entry)] if math.isfinite(_log_prob(entry)) else []
    if entry.dataset.weights is not None and not entry.dataset.weights[2].any():
        findings, columns = [Finding(True, "All test rows have weight 0.", "not tested")], None
    if columns is not None:
        fit = _calibration(scores[best], columns, best)
        findings += [fit if metrics.get("gap") is None else fit._replace(short="")]  # the gap says more
    if columns is not None and entry.dataset.truth is None:
        findings += [*_columns(columns, best), *_rows(scores[best], entry)]
    findings += [*_leak(entry), *_draws(entry), *_index(entry, entries), *_training(entry)]
    shorts = [finding.short for finding in findings if finding.short]
    name = entry.name if len(entries) == 1 else f"The best of {len(entries)}, {entry.name}"
    return Verdict(f"{name}: {'; '.join(shorts)}." if shorts else "", findings, entry.score_command())


def _log_prob(entry: Entry) -> float:
    value = (entry.metrics.get("test") or {}).get("log_prob")
    return -math.inf if value is None or not math.isfinite(value) else float(value)


def _reached(entry: Entry) -> Finding:
    metrics, test = entry.metrics, entry.metrics["test"]
    reached = set_error(test["log_prob"], test.get("std_error"), "{:.3f}")
    words = f"It reaches {reached} nats a test row"
    gap, bits = metrics.get("gap"), metrics.get("bits_per_dim")
    if bits is not None:
        bits_words = f"{set_number(bits, '{:.3f}')} bits per dimension"
        return Finding(True, f"{words}, that is {bits_words}.", bits_words)
    if gap is None:
        return Finding(True, f"{words}.")
    below = f"{set_number(max(0.0, gap), '{:.3f}')} nats below the best possible"
    good = gap < LOOSE
    return Finding(good, f"{words}, {below}.", f"{'fits' if good else 'does not fit yet'}, {below}")


def _calibration(scores: Scores, columns: Columns, model: int) -> Finding:
    difference = set_number(scores.difference, "{:.2f}")
    half = 2 * len(columns.misfits(model)) >= len(columns.features)
    if scores.calibrated:
        words = f"Test rows score like samples of the model (largest difference {difference})."
        return Finding(True, words, "does not fit" if half else "fits")
    how, advice = (
        ("lower", "The model is overconfident: give it more rows, or use a smaller network.")
        if scores.narrow
        else ("higher", "The model is too wide: train it for more steps, or use more layers.")
    )
    words = f"Test rows score {how} than samples of the model (largest difference {difference})."
    return Finding(False, words, "does not fit", advice)


def _columns(columns: Columns, model: int) -> list[Finding]:
    misfits, count = columns.misfits(model), len(columns.features)
    if not misfits:
        worst = set_number(columns.differences[:, model].max(), "{:.2f}")
        which = "The column matches" if count == 1 else f"All {count} columns match"
        return [Finding(True, f"{which} the test rows (largest difference {worst}).")]
    named = ", ".join(misfits[:4]) + (" and others" if len(misfits) > 4 else "")
    verb = "does" if len(misfits) == 1 else "do"
    short = f"{len(misfits)} of {count} columns {verb} not" if count > 1 else ""
    words = f"{short or 'The column does not'} match the test rows: {named}."
    advice = (
        f"Look at the pictures of {named}. Set bounds, atoms or a step for them, or train for longer."
    )
    return [Finding(False, words, short, advice)]


def _rows(scores: Scores, entry: Entry) -> list[Finding]:
    count, rows = int(scores.suspicious.sum()), len(scores.test)
    if count == 0:
        return [Finding(True, f"None of {rows:,} test rows is suspicious.", "no suspicious rows")]
    short = f"{count} suspicious row{'s' if count > 1 else ''}"
    words = f"{count} of {rows:,} test rows score below everything that the model draws."
    if count > max(1.0, MANY * rows):
        return [Finding(False, f"{words} With so many, doubt the model, not the rows.", short)]
    advice = "Check the suspicious rows below for mistakes. Score all of your rows:"
    return [Finding(False, words, short, advice, entry.score_command())]


def _leak(entry: Entry) -> list[Finding]:
    leaked = entry.metrics.get("leaked_mass")
    if leaked is None:
        return []
    short = f"{set_number(leaked, '{:.1%}')} of its mass leaks"
    words = f"{short} outside the support of the data."
    plain = not entry.name.startswith("cif-")
    advice = (
        "Add an index, which lets mass tear apart:" if plain else "Train for longer: mass still leaks."
    )
    command = entry.command("fit", f"--model cif-{entry.name}") if plain else ""
    return [Finding(True, words)] if leaked < SMALL else [Finding(False, words, short, advice, command)]


def _draws(entry: Entry) -> list[Finding]:
    between = entry.metrics.get("sandwich") or {}
    gap, error = between.get("gap"), between.get("std_error")
    if gap is None:
        return _few_draws(entry)
    least, most = (gap + sign * 2 * (error or 0.0) for sign in (-1, 1))
    hidden = set_number(most, "{:.2g}")
    if least < LOOSE:
        words = f"You can trust the log-likelihood: it is less than {hidden} nats too low."
        return [Finding(True, words)]
    words = f"The log-likelihood may be up to {hidden} nats too low: the model may be better than shown."
    advice = "Evaluate with more draws:"
    return [Finding(False, words, "", advice, entry.score_command("--samples 1000"))]


def _few_draws(entry: Entry) -> list[Finding]:
    """A finding if most draws carry no weight, where nothing else bounds the log-likelihood."""
    test = entry.metrics.get("test") or {}
    draws, effective = test.get("samples"), test.get("effective_samples")
    if draws is None or effective is None or effective >= draws / 2:
        return []
    words = (
        f"Only {effective:.1f} of {draws:g} draws are effective: the log-likelihood is a lower bound."
    )
    command = entry.score_command("--samples 100")
    return [Finding(False, words, "", "Evaluate with more draws:", command)]


def _index(entry: Entry, entries: Sequence[Entry]) -> list[Finding]:
    pair, worth = index_pair(entry.name), measured_worth(entry)
    named = {other.name: other for other in entries}
    if pair is None:
        return []
    words = index_words(named.get(pair[1], entry), entries)
    if worth or {*pair} <= {*named}:
        return [Finding(True, words)]
    alike = ["--set staged=false"] if entry.dataset.schema else []  # or other things would differ too
    command = entry.command("compare", *pair, *alike)
    return [Finding(True, words, "", "See what an index is worth here:", command)]


def _training(entry: Entry) -> list[Finding]:
    steps, values = history_curve(entry.history, "validation")
    if len(values) < 4:
        return []
    late = values[steps >= 0.75 * steps[-1]]
    if late.argmax() == len(late) - 1 and late[-1] - values[steps < 0.75 * steps[-1]].max() > SMALL:
        words = "Validation was still rising when training ended."
        command = _longer(entry, 2 * steps[-1])
        return [Finding(False, words, "still learning", "Train for longer:", command)]
    peak = values.argmax()
    if steps[peak] < 0.5 * steps[-1] and values[peak] - late.mean() > SMALL:
        words = (
            f"Validation peaked at step {steps[peak]:,.0f} of {steps[-1]:,.0f}; those weights are kept."
        )
        advice = "The model overfits after that step: try dropout, weight_decay or fewer layers."
        return [Finding(False, words, "", advice)]
    return [Finding(True, "Training settled.")]


def _longer(entry: Entry, steps: float) -> str:
    """The command that trains the same model anew for some steps, or for twice the minutes it had."""
    minutes = parse_toml(entry.config, "config.toml").get("training", {}).get("max_minutes")
    limit = [] if minutes is None else [f"--max-minutes {2 * minutes:g}"]
    settings = [f"--config {entry.folder}/config.toml", f"--set steps={steps:.0f}", *limit]
    return entry.command("fit", *settings, f"--out {entry.folder}-longer")

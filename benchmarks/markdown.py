"""A benchmark's result as Markdown, and its place in a document."""

from __future__ import annotations

__all__ = ["to_markdown", "update_document"]

from collections.abc import Iterable
from pathlib import Path

from benchmarks.results import WORKS, Result, Row, Side, Timing, spread
from ciflows.errors import UserError
from ciflows.files import write_text

NAMES = {"plain": "ours without an index", "authors": "the authors' code"}


def to_markdown(result: Result) -> str:
    """Machine, absolute times, ratios and notes."""
    machine = result.machine
    threads = f", {machine.threads} thread{'s' * (machine.threads > 1)}" * (machine.kind == "cpu")
    parts = [
        f"{machine.device}{threads} ({machine.system}, {machine.cores} cores), torch {machine.torch}, "
        f"Python {machine.python}, ciflows {machine.ciflows}; {machine.date}.",
        f"Median milliseconds (quartiles). Likelihoods and samples are of {result.points} points. "
        "“× products” is the time over that of the model's matrix products alone, at the rate "
        "measured in between.",
        _table(["model", "parameters", "batch", "to first step"], (_sizes(row) for row in result.rows)),
        *(part for work in WORKS for part in _work(result, work)),
    ]
    ratios = [line for row in result.rows for line in _ratios(row)]
    if ratios:
        parts += [
            "Time of others over ours, in the same run and in turns: above 1 ours is faster. Median "
            "(quartiles) of the repetitions' ratios.",
            _table(["model", "beside", *WORKS.values()], (line[:5] for line in ratios)),
            "Memory of a step, and the error of a round trip: theirs / ours.",
            _table(
                ["model", "beside", "MiB of a step", "round trip"],
                (line[:2] + line[5:] for line in ratios),
            ),
        ]
    parts += [f"- {note}" for note in result.notes]
    return "\n\n".join(parts) + "\n"


def update_document(path: Path, result: Result) -> None:
    """Write a result into a document, between the marks of its kind of device."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    begin, end = (f"<!-- bench {result.machine.kind}: {edge} -->" for edge in ("begin", "end"))
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise UserError(f"{path} has no part between {begin} and {end}.")
    write_text(path, f"{before}{begin}\n\n{to_markdown(result)}\n{end}{after}")


def _sizes(row: Row) -> list[str]:
    ours = _ours(row)
    return [row.case, f"{ours.parameters:,}", str(row.batch), f"{ours.start_s:.1f} s"]


def _work(result: Result, work: str) -> tuple[str, str]:
    """The heading of one kind of work, and its table."""
    heading = f"**{WORKS[work].capitalize()}**"
    return heading, _table(
        ["model", "ms", "× products", "MiB"], (_times(row, work) for row in result.rows)
    )


def _times(row: Row, work: str) -> list[str]:
    timing, over = _ours(row).works.get(work), row.over_products(work)
    draws = f", m = {row.draws}" if work == "log_prob" and row.model.startswith("cif-") else ""
    return [
        row.case,
        "–" if timing is None else _quartiles(timing) + draws,
        "–" if over is None else f"{over:.1f}",
        "–" if timing is None or timing.mib is None else f"{timing.mib:.0f}",
    ]


def _ours(row: Row) -> Side:
    ours = row.side("ours")
    assert ours is not None
    return ours


def _ratios(row: Row) -> Iterable[list[str]]:
    ours = row.side("ours")
    for side in row.sides:
        if side is ours or ours is None:
            continue
        cells = [row.case, NAMES.get(side.name, side.name)]
        for work in WORKS:
            ratios = [] if _unlike(row, side.name, work) else row.ratios(side.name, work)
            if not ratios:
                cells.append("–")
                continue
            median, low, high = spread(ratios)
            cells.append(f"{median:.2f} ({low:.2f}–{high:.2f})")
        memory = [_memory(one) for one in (side, ours)]
        cells.append(" / ".join("–" if mib is None else f"{mib:.0f}" for mib in memory))
        errors = [one.round_trip for one in (side, ours)]
        cells.append(" / ".join("–" if error is None else f"{error:.0e}" for error in errors))
        yield cells


def _memory(side: Side) -> float | None:
    return side.works["step"].mib if "step" in side.works else None


def _unlike(row: Row, name: str, work: str) -> bool:
    """Whether the other likelihood takes one pass and ours several draws."""
    return work == "log_prob" and row.model.startswith("cif-") and name != "authors"


def _quartiles(timing: Timing) -> str:
    median, low, high = spread(timing.ms)
    digits = 0 if median >= 100 else 1
    return f"{median:,.{digits}f} ({low:,.{digits}f}–{high:,.{digits}f})"


def _table(headings: list[str], rows: Iterable[list[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

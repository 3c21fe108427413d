"""What commands print: messages, tables of results, JSON."""

from __future__ import annotations

__all__ = [
    "be_quiet",
    "console",
    "fail",
    "next_commands",
    "number",
    "say",
    "show_columns",
    "show_index",
    "show_json",
    "show_next",
    "show_rows",
    "show_search",
    "show_settings",
    "show_validation",
]

import json
import sys
from collections.abc import Mapping, Sequence
from shlex import quote
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ciflows.files import typed_path
from ciflows.progress import sparkline

if TYPE_CHECKING:
    from ciflows.runs.run import Run
    from ciflows.runs.search import SearchResult
    from ciflows.tables.column import Column

console = Console(emoji=False)


def say(message: str) -> None:
    """Print a message, as it is."""
    console.print(message, markup=False, highlight=False, soft_wrap=True)


def be_quiet(*switches: bool) -> None:
    """Print no progress and no messages from here on, if any switch is on; errors are printed still."""
    console.quiet = any(switches)


def show_json(value: Any) -> None:
    """Print JSON, also if everything else is quiet; numbers that are not finite become null."""
    from ciflows.files import finite

    sys.stdout.write(json.dumps(finite(value), indent=2, allow_nan=False) + "\n")


def fail(message: str, command: str | None = None) -> None:
    """Print an error in one sentence, perhaps with a command that helps, and exit."""
    text = f"[red]Error:[/red] {escape(message)}"
    text += f" Try '{escape(command)}'." if command else ""
    Console(stderr=True, emoji=False).print(text, highlight=False, soft_wrap=True)
    sys.exit(1)


def show_rows(rows: Sequence[dict[str, Any]]) -> None:
    """Print the rows of compare.json as a table, then one line on each estimate."""
    from ciflows.runs.metrics import read_summary

    table = Table(title="Test log-likelihood, nats per point", title_justify="left")
    images = rows[0].get("bits_per_dim") is not None
    table.box, table.padding = None, (0, 1 if images else 2, 0, 0)
    columns = [name for name in _cells(rows[0], images) if _is_shown(name, rows, images)]
    for name in columns:
        table.add_column(name, justify="left" if name == "model" else "right", no_wrap=True)
    for row in rows:
        cells = _cells(row, images)
        table.add_row(*(cells[name] for name in columns))
    console.print(table)
    for row in rows:
        say(f"{row['model']}: {read_summary(row)}, ELBO {number(row['elbo'])}.")
        if row["difference"]:
            say(f"{row['model']}: {_difference(row)}.")
    if rows[0]["limit"] is not None:
        say(f"gap: shortfall from {rows[0]['limit']:.4f}, the best possible value.")
    if rows[0]["leaked_mass"] is not None:
        say("leak: share of the model's samples outside the support of the data.")


def show_validation(history: Sequence[Mapping[str, Any]]) -> None:
    """Print the course of validation as a line of bars."""
    values = [row["validation"] for row in history if row.get("validation") is not None]
    if len(values) > 2:
        say(f"Validation {sparkline(values)} from {values[0]:.4f}, best {max(values):.4f}.")


def show_index(run: Run) -> None:
    """Print what the index of a run is worth, if it has one."""
    from ciflows.diagnostics.index_use import index_words

    words = index_words(run.config.model, run.metrics)
    if words and words != run.metrics.get("story"):  # which training has told
        say(words)


def show_settings(title: str, settings: Mapping[str, Mapping[str, Any]]) -> None:
    """Print settings with their defaults and meanings."""
    table = Table("setting", "default", "meaning", title=title, title_justify="left")
    for key, facts in settings.items():
        default = "none" if facts["default"] is None else str(facts["default"])
        table.add_row(key, escape(default), facts["meaning"])
    console.print(table)


def show_next(run: Run) -> None:
    """Print the three commands that a user is most likely to type after a fit."""
    say("Next:")
    for command in next_commands(run):
        say(f"  {command}")


def next_commands(run: Run) -> list[str]:
    """Commands to score, sample and compare a run, ready to be pasted."""
    from ciflows.models.catalogue import index_pair
    from ciflows.runs.config import default_model

    folder, data, model = typed_path(str(run.path)), typed_path(run.config.data), run.config.model
    pair = index_pair(model) or (model, default_model(run.config.data))
    count = "-n 16" if run.images else "-n 1000"
    given = [] if run.schema is None else [f"{c.name}={_example(c)}" for c in run.schema.given]
    return [
        f"ciflows score {folder} {data}",
        f"ciflows sample {folder} {count}" + (f" --given {quote(','.join(given))}" if given else ""),
        " ".join(["ciflows compare", data, *pair, *run.config.table.as_options()]),
    ]


def _example(column: Column) -> str:
    """A value to condition on, as you would type it."""
    if isinstance(centre := getattr(column, "centre", None), float):
        return f"{centre:g}"
    return next((word for word in column.words if "," not in word), column.words[0])


def show_search(result: SearchResult) -> None:
    """Print the candidates of a search, and its result in one line."""
    keys = list(result.settings)
    table = Table(title="Validation log-likelihood, nats per point", title_justify="left")
    table.box, table.padding = None, (0, 2, 0, 0)
    for column in (*keys, "log p(x)", "state", "folder"):
        table.add_column(escape(column), justify="right" if column == "log p(x)" else "left")
    for row in result.candidates:
        values = [escape(str(row.settings[key])) for key in keys]
        table.add_row(*values, number(row.validation), row.state, row.folder)
    if result.candidates:
        console.print(table)
    for failed in result.failed_seeds:
        say(f"Seed {failed.seed} failed: {failed.reason}")
    say(_headline(result))


def show_columns(first: str, second: str, rows: dict[str, str]) -> None:
    """Print names and what they mean."""
    table = Table(first, second)
    for key, value in rows.items():
        table.add_row(key, value)
    console.print(table)


def number(value: float | None, form: str = "{:.4f}") -> str:
    """A number, or a dash if there is none."""
    return "–" if value is None else form.format(value)


def _cells(row: dict[str, Any], images: bool) -> dict[str, str]:
    """A row's cells by the names of their columns."""
    nats = "{:.1f}" if images else "{:.4f}"  # an image has hundreds of nats
    bits = [number(row.get(f"bits_per_dim{part}"), "{:.3f}") for part in ("", "_std_error")]
    return {
        "model": row["model"],
        "weights": f"{row['parameters']:,}",
        "log p(x)": f"{number(row['log_prob'], nats)} ± {number(row['std_error'], nats)}",
        "difference": _gain(row),
        "bits/dim": " ± ".join(bits),
        "gap": number(row["gap"]),
        "leak": number(row["leaked_mass"], "{:.2%}"),
        "time": f"{row['seconds']:.0f} s",
    }


def _is_shown(name: str, rows: Sequence[dict[str, Any]], images: bool) -> bool:
    """Whether any row has something to say in a column."""
    keys = {"difference": "difference", "gap": "gap", "leak": "leaked_mass"}
    if name in keys:
        return any(row[keys[name]] is not None for row in rows)
    return images or name != "bits/dim"


def _gain(row: dict[str, Any]) -> str:
    difference = row["difference"]
    if not difference:
        return "–"
    return f"{number(difference['log_prob'], '{:+.4f}')} ± {number(difference['std_error'])}"


def _difference(row: dict[str, Any]) -> str:
    return f"difference to {row['difference']['reference']}: {_gain(row)} nats, paired over rows"


def _headline(result: SearchResult) -> str:
    """The result of a search in one line, as in a paper's table."""
    count = f"{len(result.seeds)} seed{'s' if len(result.seeds) > 1 else ''}"
    error = "" if result.std_error is None else f" ± {result.std_error:.3f}"
    paper = result.published
    line = f"{result.experiment} on {result.data}: {result.log_prob:.3f}{error} over {count}"
    if paper.log_prob is None:
        return line
    error = "" if paper.std_error is None else f" ± {paper.std_error:.2f}"
    return f"{line} (paper: {paper.log_prob:.2f}{error})"

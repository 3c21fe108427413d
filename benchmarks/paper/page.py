"""The page of results: its chart, its table, and a page of runs for each table in the appendix."""

from __future__ import annotations

__all__ = ["TITLES", "figures_table", "runs_part", "write_pages"]

from collections.abc import Sequence
from pathlib import Path

from benchmarks.paper.chart import draw_chart
from benchmarks.paper.figures import Figure, Result
from ciflows.files import write_text

PAGE, APPENDIX, CHART = "results.md", "results", "figures/results.png"
TINY = (
    "These are **tiny runs on made-up data**, which show that the queue works from its first run to "
    "this page. Their figures mean nothing.\n\n"
)
TITLES = ["data", "row", "ours", "seeds", "steps", "CIF − plain", "the paper", "its CIF − plain"]


def write_pages(
    folder: Path, figures: Sequence[Figure], results: Sequence[Result] = (), tiny: bool = False
) -> list[Path]:
    """Write the chart, the page and the appendix; a page that exists keeps its text around the marks.

    Arguments:
        folder: The folder of the pages, such as docs.
        figures: The figures of the page.
        results: The finished runs, for the appendix.
        tiny: Whether the runs are tiny ones, which the page then says.
    """
    files = [folder / CHART, folder / PAGE]
    draw_chart(files[0], figures)
    title = f"# Results\n\n![Every row: the paper's plain flow and CIF, and ours]({CHART})"
    _write_part(files[1], "results", (TINY if tiny else "") + figures_table(figures), title)
    for name in dict.fromkeys(result.job.table.name for result in results):
        some = [result for result in results if result.job.table.name == name]
        files.append(folder / APPENDIX / f"{name}.md")
        text = (TINY if tiny else "") + runs_part(some)
        _write_part(files[-1], "runs", text, f"# {some[0].job.table.title}", "## The queue's runs")
    return files


def figures_table(figures: Sequence[Figure]) -> str:
    """One table of all figures, and their notes."""
    lines = [TITLES, ["---"] * len(TITLES)]
    before = ""
    for figure in figures:
        place = f"{figure.table}/{figure.data}"
        name = f"[{figure.data}]({APPENDIX}/{figure.table}.md)" if place != before else ""
        lines.append([name, *_cells(figure, figures)])
        before = place
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    notes = "".join(f"- {one.data}, {one.row}: {one.note}\n" for one in figures if one.note)
    return f"{table}\n" + (f"\n{notes}" if notes else "")


def runs_part(results: Sequence[Result]) -> str:
    """One table of a table's runs, then the commands that train them one by one."""
    titles = [
        "data",
        "row",
        "seed",
        "weights",
        "steps",
        "seconds",
        "log p(x)",
        "ELBO",
        "effective draws",
    ]
    bits = results[0].metrics["bits_per_dim"] is not None
    titles += ["bits per dimension"] if bits else []
    lines = [titles, ["---"] * len(titles), *(_run_cells(result, bits) for result in results)]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    machines = {f"{one.metrics['device']} ({one.machine})": None for one in results}
    first = {(one.job.row.name, one.job.data): one.job for one in reversed(results)}
    commands = "\n".join(job.command() for job in reversed(first.values()))
    only = f"{'--quick ' if results[0].job.quick else ''}--only {results[0].job.table.name}/"
    return (
        f"± is the standard error over the test points. Machine: {'; '.join(machines)}.\n\n{table}\n\n"
        "All of them, or the first seed of each row by itself:\n\n"
        f"```shell\npython -m benchmarks.paper {only}\n{commands}\n```\n"
    )


def _cells(figure: Figure, figures: Sequence[Figure]) -> list[str]:
    plain = next((one for one in figures if _is_plain_of(one, figure)), None)
    paper = _text(figure.paper, figure.paper_error)
    gain = None if plain is None else _difference(figure.value, plain.value)
    paper_gain = None if plain is None else _difference(figure.paper, plain.paper)
    comparable = figure.comparable or figure.paper is None
    return [
        figure.row,
        _text(figure.value, figure.error) + (" bits" if figure.bits and figure.value else ""),
        str(figure.seeds) if figure.value is not None else "–",
        figure.steps or "–",
        _signed(gain, figure.value),
        paper if comparable else f"({paper}: not comparable)",
        _signed(paper_gain if comparable else None, figure.paper),
    ]


def _is_plain_of(one: Figure, figure: Figure) -> bool:
    return (one.table, one.data, one.row) == (figure.table, figure.data, figure.pair)


def _difference(value: float | None, other: float | None) -> float | None:
    return None if value is None or other is None else value - other


def _signed(value: float | None, like: float | None) -> str:
    """A difference, with as many digits as the figures have that it is of."""
    if value is None:
        return "–"
    return f"{value:+.{_digits(like)}f}".replace("-", "−")


def _digits(value: float | None) -> int:
    return 1 if value is not None and abs(value) >= 100 else 3


def _text(value: float | None, error: float | None) -> str:
    if value is None:
        return "–"
    digits = _digits(value)
    shown = f"{value:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")
    return shown.replace("-", "−")


def _run_cells(result: Result, bits: bool) -> list[str]:
    job, metrics = result.job, result.metrics
    test = metrics["test"]
    cells = [
        job.data,
        job.row.label,
        str(job.seed),
        f"{metrics['parameters']:,}",
        f"{metrics['steps']:,}",
    ]
    cells += [f"{metrics['seconds']:,.0f}", _text(test["log_prob"], test["std_error"])]
    effective = test.get("effective_samples")
    exact = test.get("samples") == 1 or effective is None
    cells += [_text(test["elbo"], None), "exact" if exact else f"{effective:.0f} of {test['samples']}"]
    shown = _text(metrics["bits_per_dim"], metrics["bits_per_dim_std_error"])
    return [*cells, shown] if bits else cells


def _write_part(path: Path, name: str, text: str, title: str, heading: str | None = None) -> None:
    """Replace what stands between a page's marks; a page without them gets them at its end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    page = path.read_text(encoding="utf-8") if path.exists() else f"{title}\n"
    if begin not in page or end not in page:
        page = f"{page.rstrip()}\n\n{f'{heading}{chr(10)}{chr(10)}' if heading else ''}{begin}\n{end}\n"
    before, rest = page.split(begin, 1)
    write_text(path, f"{before}{begin}\n\n{text}\n{end}{rest.split(end, 1)[1]}")

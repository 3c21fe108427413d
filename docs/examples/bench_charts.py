"""Two charts from the tables of docs/performance-tables.md: what each family costs; others beside us.

python docs/examples/bench_charts.py docs/performance-tables.md docs/figures
"""

import re
import sys
from pathlib import Path

from matplotlib.figure import Figure

BLUE, ORANGE, GREY = "#1f5fa8", "#d9702b", "0.6"
WORKS = ("Training step", "Log-likelihood", "Sampling")
FAMILIES = ("maf", "nsf", "resflow")


def tables(text: str) -> list[list[list[str]]]:
    """The cells of each table of a page, headings first."""
    found = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    return [
        [[cell.strip() for cell in line.strip("|\n").split(" | ")] for line in table.splitlines()]
        for table in found
    ]


def number(cell: str) -> float | None:
    """The median that a cell begins with: 1,652 (1,607–1,700), m = 10."""
    found = re.match(r"[\d,.]+", cell)
    return float(found[0].replace(",", "")) if found else None


def draw_costs(works: list[dict[str, str]]) -> Figure:
    """Milliseconds of each family on POWER, without and with an index."""
    figure = Figure(figsize=(9, 2.8), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    for axes, title, cells in zip(panels, WORKS, works, strict=True):
        for shift, prefix, color, label in (
            (0.2, "", BLUE, "plain"),
            (-0.2, "cif-", ORANGE, "with an index"),
        ):
            times = [number(cells[f"{prefix}{name}, POWER"]) for name in FAMILIES]
            places = [place + shift for place in range(len(FAMILIES))]
            bars = axes.barh(places, times, 0.38, color=color, label=label)
            axes.bar_label(bars, [f"{time:,.0f}" for time in times], padding=3, fontsize=8)
        axes.set(xscale="log", xlim=(3, 6000), title=f"{title}, ms")
        axes.set_yticks(range(len(FAMILIES)), FAMILIES)
        axes.spines[["top", "right"]].set_visible(False)
    panels[2].legend(frameon=False, fontsize=8)
    return figure


def draw_others(ratios: list[list[str]]) -> Figure:
    """Time of zuko and normflows over ours, a dot for each model and kind of work."""
    rows = [row for row in ratios if row[1] in ("zuko", "normflows")]
    figure = Figure(figsize=(8, 0.3 * len(rows) + 1), layout="constrained")
    axes = figure.add_subplot()
    for work, color, mark in zip(WORKS, (BLUE, ORANGE, GREY), "os^", strict=True):
        times = [number(row[2 + WORKS.index(work)]) for row in rows]
        shown = [(time, place) for place, time in enumerate(times) if time is not None]
        axes.plot(*zip(*shown, strict=True), mark, color=color, label=work.lower())
    axes.axvline(1, color="black", lw=0.8)
    axes.set_yticks(range(len(rows)), [f"{model}  ({beside})" for model, beside, *_ in rows])
    axes.set(xscale="log", xlabel="their time over ours: right of 1 ours is faster")
    axes.set_xticks([0.125, 0.25, 0.5, 1, 2, 4, 8], ["1/8", "1/4", "1/2", "1", "2", "4", "8"])
    axes.minorticks_off()
    axes.invert_yaxis()
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def main(page: Path, folder: Path) -> None:
    _, *works, ratios, _ = tables(page.read_text(encoding="utf-8").partition("bench cpu: end")[0])
    draw_costs([{row[0]: row[1] for row in work[2:]} for work in works]).savefig(
        folder / "costs.png", dpi=130
    )
    draw_others(ratios[2:]).savefig(folder / "beside-others.png", dpi=130)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

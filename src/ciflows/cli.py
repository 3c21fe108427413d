"""The command line: fit, compare, score, sample, report, models, data."""

from __future__ import annotations

__all__ = ["app", "main"]

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table as RichTable

from ciflows.errors import UserError

app = typer.Typer(
    help="Densities for data that a single bijection cannot fit: continuously indexed flows.\n\n"
    "Start with:  ciflows compare two-uniforms resflow cif-resflow --config demo",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
console = Console()

ConfigOption = Annotated[
    list[str] | None,
    typer.Option("--config", "-c", help="A TOML file or a preset (see 'ciflows models'); may repeat."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", help="One setting, as key=value: --set layers=5; may repeat."),
]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
SeedOption = Annotated[int, typer.Option(help="Seed of parameters, data order and draws.")]
PrecisionOption = Annotated[str | None, typer.Option(help="float32, float64 or tf32.")]
MinutesOption = Annotated[
    float | None, typer.Option(help="End within so many minutes; the schedule is fitted to them.")
]
SamplesOption = Annotated[
    int, typer.Option("--samples", "-m", help="Draws of the index for each point.")
]


@app.command()
def fit(
    data: Annotated[
        str | None, typer.Argument(help="A built-in set (see 'ciflows data') or a table's path.")
    ] = None,
    model: Annotated[str, typer.Option("--model", help="See 'ciflows models'.")] = "cif-resflow",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The run folder to make.")] = None,
    config: ConfigOption = None,
    settings: SetOption = None,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
    precision: PrecisionOption = None,
    max_minutes: MinutesOption = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the run in this folder instead.")
    ] = None,
) -> None:
    """Train one model and test it.

    The run folder then holds the configuration, the weights, the metrics and all else about the run.
    Killed at any moment, it can go on with --resume and ends as it would have ended.

        ciflows fit annulus --model cif-resflow --set steps=5000

        ciflows fit people.csv --max-minutes 10

        ciflows fit --resume runs/annulus-cif-resflow-0
    """
    from ciflows import run as runs

    if resume is not None:
        if data is not None:
            raise UserError("Give either data to fit or --resume RUN, not both.")
        _show_run(runs.resume(resume, device=device, console=console))
        return
    if data is None:
        raise UserError("Give the data to fit: a name from 'ciflows data', or a table's path.")
    resolved = _resolve(data, model, seed, config, settings, precision, max_minutes)
    folder = out or Path("runs") / f"{Path(data).stem}-{model}-{seed}"
    _show_run(runs.fit(resolved, folder, device=device, console=console))


@app.command()
def compare(
    data: Annotated[str, typer.Argument(help="A built-in set or a table's path.")],
    models: Annotated[list[str], typer.Argument(help="Models to compare.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for all of it.")] = None,
    config: ConfigOption = None,
    settings: SetOption = None,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
    precision: PrecisionOption = None,
    max_minutes: MinutesOption = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with what is in the folder already.")
    ] = False,
) -> None:
    """Train several models on the same data: one table, one picture, one report.

    Leaves compare.json, compare.png, report.html and one run folder for each model. A setting given with
    --set holds for every model that has it.
    """
    from ciflows.comparing import compare_models

    configs = [_resolve(data, model, seed, config, settings, precision, max_minutes) for model in models]
    folder = out or Path("runs") / f"{Path(data).stem}-compared-{seed}"
    rows = compare_models(configs, folder, device=device, resume=resume, console=console)
    _show_rows(rows)
    console.print(f"Wrote {folder / 'compare.json'}, compare.png and report.html.")


@app.command()
def score(
    run: Annotated[Path, typer.Argument(help="A finished run's folder.")],
    data: Annotated[
        str, typer.Argument(help="A table's path, or a built-in set's name (its test part).")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="A .csv or .parquet file.")] = Path(
        "scores.csv"
    ),
    samples: SamplesOption = 100,
    std_error: Annotated[
        float | None, typer.Option(help="Draw until each row's standard error is at most this.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    device: DeviceOption = "auto",
) -> None:
    """Write log p(x) of each row, with its standard error and the effective number of draws.

    The lowest scores are the likeliest anomalies.
    """
    from ciflows.scoring import score_data

    summary = score_data(run, data, out, samples, std_error, seed, device, console)
    console.print(
        f"log-likelihood {summary.log_prob:.4f} ± {summary.std_error:.4f} "
        f"over {summary.points} rows; wrote {out}."
    )


@app.command()
def sample(
    run: Annotated[Path, typer.Argument(help="A finished run's folder.")],
    n: Annotated[int, typer.Option("-n", help="How many points.", min=1)] = 1000,
    out: Annotated[Path, typer.Option("--out", "-o", help="A .csv or .parquet file.")] = Path(
        "samples.csv"
    ),
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    device: DeviceOption = "auto",
) -> None:
    """Draw new points from a trained model into a table with the data's columns."""
    from ciflows.scoring import sample_data

    sample_data(run, n, out, seed, device)
    console.print(f"Wrote {n} points to {out}.")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Finished runs on the same data.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The file; in the first run's folder if not given."),
    ] = None,
    device: DeviceOption = "auto",
) -> None:
    """Write one self-contained HTML file: densities, samples, curves, tables and diagnostics."""
    from ciflows.comparing import report_runs

    path = out or runs[0] / "report.html"
    report_runs(runs, path, device)
    console.print(f"Wrote {path}.")


@app.command()
def models(
    name: Annotated[str | None, typer.Argument(help="Show this model's settings.")] = None,
) -> None:
    """List the models and presets, or one model's settings with their defaults."""
    from ciflows.config import presets
    from ciflows.models import MODELS, get_model
    from ciflows.settings import Settings
    from ciflows.training import EvaluationSettings, TrainingSettings

    if name is None:
        _two_columns("model", "what it is", {key: model.summary for key, model in MODELS.items()})
        _two_columns("preset", "use with --config", presets())
        return
    kinds: dict[str, type[Settings]] = {
        f"{name}: architecture": get_model(name).settings,
        "training": TrainingSettings,
        "evaluation": EvaluationSettings,
    }
    for title, kind in kinds.items():
        table = RichTable("setting", "default", "meaning", title=title, title_justify="left")
        for key, field in kind.model_fields.items():
            table.add_row(key, str(field.default), field.description)
        console.print(table)


@app.command("data")
def data_() -> None:
    """List the built-in data sets, with the best log-likelihood that any model can reach."""
    from ciflows.data import SYNTHETIC

    table = RichTable("data", "best nats", "what it is")
    for name, truth in SYNTHETIC.items():
        table.add_row(name, "" if truth.limit is None else f"{truth.limit:.4f}", truth.summary)
    console.print(table)


def _resolve(
    data: str,
    model: str,
    seed: int,
    config: list[str] | None,
    settings: list[str] | None,
    precision: str | None,
    max_minutes: float | None,
) -> Any:
    from ciflows.config import read_config, read_overrides, resolve
    from ciflows.data import SYNTHETIC

    options = {"precision": precision, "max_minutes": max_minutes}
    given = {key: value for key, value in options.items() if value is not None}
    layers = [
        *(read_config(name) for name in config or []),
        read_overrides(model, settings or []),
        {"training": given},
    ]
    name = data if data in SYNTHETIC or not Path(data).exists() else str(Path(data).resolve())
    return resolve(name, model, seed, layers)


def _show_run(run: Any) -> None:
    from ciflows.run import comparison_row

    _show_rows([comparison_row(run)])
    console.print(f"The run is in {run.path}.")


def _show_rows(rows: list[dict[str, Any]]) -> None:
    table = RichTable(title="Test log-likelihood, nats per point", title_justify="left")
    for column in ("model", "parameters", "log p(x)", "ELBO", "draws", "gap to limit", "leaked", "time"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for row in rows:
        gap, leak = row["gap"], row["leaked_mass"]
        table.add_row(
            row["model"],
            f"{row['parameters']:,}",
            f"{row['log_prob']:.4f} ± {row['std_error']:.4f}",
            f"{row['elbo']:.4f}",
            str(row["samples"]),
            "" if gap is None else f"{gap:.4f}",
            "" if leak is None else f"{leak:.2%}",
            f"{row['seconds']:.0f} s",
        )
    console.print(table)


def _two_columns(first: str, second: str, rows: dict[str, str]) -> None:
    table = RichTable(first, second)
    for key, value in rows.items():
        table.add_row(key, value)
    console.print(table)


def main() -> None:
    """Run the command line; a user's mistake ends in one sentence and exit code 1."""
    try:
        app()
    except UserError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        _fail("Interrupted. What was trained is kept: go on with --resume.", code=130)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}.")


def _fail(message: str, code: int = 1) -> None:
    Console(stderr=True).print(f"[red]Error:[/red] {message}", highlight=False, soft_wrap=True)
    sys.exit(code)

"""The command line: fit, compare, search, score, sample, report, models, data, bench."""

from __future__ import annotations

__all__ = ["app", "main"]

import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from ciflows.errors import InversionError, UserError

if TYPE_CHECKING:
    from ciflows.config import RunConfig
    from ciflows.run import Run
    from ciflows.search import SearchResult

app = typer.Typer(
    help="Densities for data that a single bijection cannot fit: continuously indexed flows.\n\n"
    "Start with:  ciflows compare two-uniforms resflow cif-resflow --config demo",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
console = Console(emoji=False)

ConfigOption = Annotated[
    list[str] | None,
    typer.Option("--config", "-c", metavar="FILE", help="A TOML file or a preset's name; may repeat."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        metavar="KEY=VALUE",
        help="One setting, such as layers=5; may repeat. 'ciflows models NAME' lists them all.",
    ),
]
SEEDS: dict[str, Any] = {"min": 0, "max": 2**31 - 1}
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
SeedOption = Annotated[
    int | None, typer.Option(help="Seed of parameters, data order and draws; 0 if not given.", **SEEDS)
]
DrawSeedOption = Annotated[int, typer.Option(help="Seed of the draws.", **SEEDS)]
TableOption = Annotated[Path, typer.Option("--out", "-o", help="A .csv or .parquet file.")]
SamplesOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        help="A .csv or .parquet file; a .png or .npy one for images. samples.csv or .png if not given.",
    ),
]
PrecisionOption = Annotated[str | None, typer.Option(help="float32, float64, tf32 or mixed.")]
MinutesOption = Annotated[
    float | None,
    typer.Option(help="Train each model for so many minutes at most; the schedule is fitted to them."),
]


def _set_data_folder(folder: Path | None) -> None:
    """Name the data folder, for the processes that this one starts too."""
    if folder is not None:
        os.environ["CIFLOWS_DATA"] = str(folder.absolute())


ColumnsOption = Annotated[
    str | None, typer.Option(metavar="A,B,...", help="Columns of a table to take; all if not given.")
]
ExcludeOption = Annotated[
    str | None, typer.Option(metavar="A,B,...", help="Columns of a table to leave out.")
]
GivenOption = Annotated[
    str | None,
    typer.Option(metavar="A,B,...", help="Columns to condition on: the density is p(the rest | these)."),
]
WeightsOption = Annotated[
    str | None, typer.Option(metavar="COLUMN", help="The column with the weight of each row.")
]
BoundsOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="COLUMN=LOW:HIGH", help="Limits of a column, either end may be missing; may repeat."
    ),
]
CategoricalOption = Annotated[
    str | None, typer.Option(metavar="A,B,...", help="Columns of numbers that are only names.")
]
MissingOption = Annotated[
    str | None, typer.Option(metavar="refuse|drop", help="What to do with rows that have gaps.")
]


def _table(bounds: list[str] | None, **words: str | None) -> dict[str, Any]:
    """The settings of a table that were given as options."""
    table: dict[str, Any] = {name: value for name, value in words.items() if value is not None}
    pairs = [word.partition("=") for word in bounds or []]
    for column, equals, _ in pairs:
        if not equals:
            raise UserError(f"--bounds {column}: write it as COLUMN=LOW:HIGH.")
    return table | ({"bounds": {column: ends for column, _, ends in pairs}} if pairs else {})


DataFolderOption = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        metavar="DIR",
        help="The folder with the files of built-in sets; CIFLOWS_DATA or ./data if not given.",
        callback=_set_data_folder,
        expose_value=False,
    ),
]


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        console.print(f"ciflows {version('ciflows')}")
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[bool, typer.Option("--version", help="Show it.", callback=_version)] = False,
) -> None: ...


@app.command()
def fit(
    data: Annotated[
        str | None,
        typer.Argument(
            help="A built-in set (see 'ciflows data'), a table's path or a folder of images."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="See 'ciflows models'; if not given, cif-nsf for a table, cif-resflow for a built-in "
            "set and cif-realnvp-image for images."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The run folder; runs/DATA-MODEL-SEED if not given."),
    ] = None,
    config: ConfigOption = None,
    settings: SetOption = None,
    seed: SeedOption = None,
    device: DeviceOption = "auto",
    precision: PrecisionOption = None,
    max_minutes: MinutesOption = None,
    report: Annotated[bool, typer.Option(help="Write report.html into the run folder.")] = True,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the run in this folder, as it was begun.")
    ] = None,
    columns: ColumnsOption = None,
    exclude: ExcludeOption = None,
    given: GivenOption = None,
    weights: WeightsOption = None,
    bounds: BoundsOption = None,
    categorical: CategoricalOption = None,
    missing: MissingOption = None,
    _: DataFolderOption = None,
) -> None:
    """Train one model and test it.

    The run folder then holds the configuration, the weights, the metrics, a report and all else about
    the run. Killed at any moment it can go on with --resume, and ends as it would have ended (but for
    --max-minutes, which goes by the clock).

        ciflows fit annulus --set steps=5000

        ciflows fit people.csv

        ciflows fit people.parquet --given age,sex --bounds share=0:1 --missing drop

        ciflows fit mnist --model realnvp-image --max-minutes 60

        ciflows fit --resume runs/annulus-cif-resflow-0
    """
    from ciflows import run as runs

    words = {"columns": columns, "exclude": exclude, "given": given, "weights": weights}
    table = _table(bounds, categorical=categorical, missing=missing, **words)
    if resume is not None:
        others = [data, model, out, config, settings, seed, precision, max_minutes]
        if table or any(value is not None for value in others):
            raise UserError("--resume goes on as the run was begun: leave out data and settings.")
        with _resumable(f"ciflows fit --resume {resume}"):
            finished = runs.resume(resume, device=device, console=console)
    else:
        resolved = _resolve(data, model, seed, config, settings, precision, max_minutes, table=table)
        name = f"{Path(resolved.data).stem}-{resolved.model}-{resolved.seed}"
        folder = out or Path("runs") / name
        with _resumable(f"ciflows fit --resume {folder}", folder):
            finished = runs.fit(resolved, folder, device=device, console=console)
    _show_rows([runs.comparison_row(finished)])
    _say(f"The run is in {finished.path}.")
    if report:
        _write_report([finished], finished.path / "report.html")


@app.command()
def compare(
    data: Annotated[str, typer.Argument(help="A built-in set, a table's path or a folder of images.")],
    models: Annotated[list[str], typer.Argument(help="Models to compare.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for all of it; runs/DATA-compared-SEED.")
    ] = None,
    config: ConfigOption = None,
    settings: SetOption = None,
    seed: SeedOption = None,
    device: DeviceOption = "auto",
    precision: PrecisionOption = None,
    max_minutes: MinutesOption = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with what is in the folder already.")
    ] = False,
    columns: ColumnsOption = None,
    exclude: ExcludeOption = None,
    given: GivenOption = None,
    weights: WeightsOption = None,
    bounds: BoundsOption = None,
    categorical: CategoricalOption = None,
    missing: MissingOption = None,
    _: DataFolderOption = None,
) -> None:
    """Train several models on the same data: one table, one picture, one report.

    Leaves compare.json, compare.png, report.html and one run folder for each model. What is given with
    --set holds for every model that has such a setting.

        ciflows compare two-uniforms resflow cif-resflow --config demo
    """
    from ciflows.comparing import compare_models

    words = {"columns": columns, "exclude": exclude, "given": given, "weights": weights}
    table = _table(bounds, categorical=categorical, missing=missing, **words)
    configs = [
        _resolve(data, model, seed, config, settings, precision, max_minutes, models, table)
        for model in models
    ]
    folder = out or Path("runs") / f"{Path(data).stem}-compared-{configs[0].seed}"
    with _resumable("the same command and --resume"):
        rows, files = compare_models(configs, folder, device=device, resume=resume, console=console)
    _show_rows(rows)
    _say(f"Wrote {', '.join(str(folder / name) for name in files)}.")


@app.command()
def search(
    experiment: Annotated[str, typer.Argument(help=r"A TOML file with a model and tables \[on.DATA].")],
    data: Annotated[
        str | None, typer.Argument(help="One of its data sets; may be left out if it has one only.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder for all of it; runs/search-EXPERIMENT-DATA."),
    ] = None,
    sampler: Annotated[
        str, typer.Option(help="grid: every combination in order; random or tpe: some of them.")
    ] = "grid",
    trials: Annotated[
        int | None, typer.Option(help="How many combinations random and tpe try; 20 if not given.")
    ] = None,
    prune: Annotated[
        bool | None,
        typer.Option(
            "--prune/--no-prune",
            help="End trials that fall behind the median of the others; if not given, all but a grid's.",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Test what is chosen with so many seeds.")] = 3,
    workers: Annotated[int, typer.Option(help="How many processes share the work.")] = 1,
    settings: SetOption = None,
    seed: SeedOption = None,
    device: DeviceOption = "auto",
    precision: PrecisionOption = None,
    max_minutes: MinutesOption = None,
    _: DataFolderOption = None,
) -> None:
    """Choose an experiment's settings from its grid, then test them over several seeds.

    They are chosen by validation log-likelihood alone, never by the test's. Each trial is a run folder,
    and search.json has the result: the mean over seeds ± its standard error, beside the paper's. Killed
    at any moment, the same command goes on; given again in other shells, also of other machines on the
    same folder, it shares the work.

        ciflows search experiments/maf.toml power --workers 2

        ciflows search experiments/maf.toml power --sampler tpe --trials 6 --max-minutes 30
    """
    from ciflows.config import read_overrides
    from ciflows.experiments import read_experiment
    from ciflows.search import plan_search, run_search

    given = read_experiment(experiment)
    overrides = read_overrides(given.model, settings or [])
    overrides["training"] = overrides.get("training", {}) | _training(precision, max_minutes)
    seed = given.values.get("seed", 0) if seed is None else seed
    options: dict[str, Any] = {"sampler": sampler, "trials": trials, "prune": prune, "seed": seed}
    plan = plan_search(given, data, overrides=overrides, **options)
    folder = out or Path("runs") / f"search-{given.name}-{Path(plan.data).stem}"
    with _resumable("the same command"):
        result = run_search(plan, folder, seeds=seeds, workers=workers, device=device, console=console)
    _show_search(result)
    _say(f"Wrote {folder / 'search.json'}.")


@app.command()
def score(
    run: Annotated[Path, typer.Argument(help="A finished run's folder.")],
    data: Annotated[
        str, typer.Argument(help="A table, a folder of images, or a built-in set (its test part).")
    ],
    out: TableOption = Path("scores.csv"),
    samples: Annotated[
        int, typer.Option("--samples", "-m", help="Draws of the index for each row.", min=1)
    ] = 100,
    std_error: Annotated[
        float | None,
        typer.Option(help="Instead, draw until each row's standard error is about this.", min=1e-6),
    ] = None,
    max_samples: Annotated[
        int, typer.Option(help="The most draws for one row with --std-error.", min=1)
    ] = 10_000,
    seed: DrawSeedOption = 0,
    device: DeviceOption = "auto",
    _: DataFolderOption = None,
) -> None:
    """Write log p(x) of each row, with its standard error and the effective number of draws.

    The lowest scores are the likeliest anomalies.

        ciflows score runs/people new.csv --out scores.parquet --std-error 0.05
    """
    from ciflows.scoring import score_data

    summary, bits = score_data(
        run, data, out, samples, std_error, seed, device, console, max_samples=max_samples
    )
    mean = f"{summary.log_prob:.4f} ± {summary.std_error:.4f}"
    mean += "" if bits is None else f" ({bits:.4f} bits per dimension)"
    _say(f"Mean log-likelihood {mean} over {summary.points} rows. Wrote {out}.")


@app.command()
def sample(
    run: Annotated[Path, typer.Argument(help="A finished run's folder.")],
    n: Annotated[
        int | None,
        typer.Option("-n", help="How many points; 1000, or 1 for each row of --given.", min=1),
    ] = None,
    out: SamplesOption = None,
    given: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|A=1,B=x",
            help="For a conditional density: a table with the given columns, or one value for each.",
        ),
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="Below 1: likelier and more alike; the model itself has 1.", min=1e-6)
    ] = 1.0,
    seed: DrawSeedOption = 0,
    device: DeviceOption = "auto",
) -> None:
    """Draw new points from a trained model into a table with the data's columns, or a grid of images.

    ciflows sample runs/people -n 500 --out new-people.csv

    ciflows sample runs/people -n 100 --given age=40,sex=f

    ciflows sample runs/mnist -n 16 --out digits.png --temperature 0.8
    """
    from ciflows.scoring import sample_data

    count, written = sample_data(run, n, out, seed, device, temperature, given)
    _say(f"Wrote {count} points to {written}.")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Finished runs.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="An .html file, or a .png for the picture of densities alone."),
    ] = None,
    device: DeviceOption = "auto",
    _: DataFolderOption = None,
) -> None:
    """Write one self-contained HTML file: densities, samples, curves, tables and diagnostics.

    Without --out it goes into the first run's folder. Runs may be on several data sets.

        ciflows report runs/annulus-resflow-0 runs/annulus-cif-resflow-0 --out both.html
    """
    from ciflows.run import load_run

    if out is not None and (out.exists() or out.suffix not in (".html", ".png")):
        raise UserError(f"{out}: give an .html or .png file that does not exist yet.")
    _write_report([load_run(folder, device) for folder in runs], out or runs[0] / "report.html")


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
    model = get_model(name)
    kinds: dict[str, tuple[type[Settings], Mapping[str, Any]]] = {
        f"{name}: architecture": (model.settings, {}),
        "training": (TrainingSettings, model.training),
        "evaluation": (EvaluationSettings, model.evaluation),
    }
    for title, (kind, suited) in kinds.items():
        table = RichTable("setting", "default", "meaning", title=title, title_justify="left")
        for key, field in kind.model_fields.items():
            default = suited.get(key, field.default)
            table.add_row(key, escape("none" if default is None else str(default)), field.description)
        console.print(table)


@app.command("data")
def data_(_: DataFolderOption = None) -> None:
    """List the built-in data sets, with the best log-likelihood that any model can reach where known."""
    from ciflows.data import BENCHMARKS, SYNTHETIC, data_folder, describe_benchmark

    table = RichTable("data", "best nats", "what it is")
    for name, truth in SYNTHETIC.items():
        best = "unknown" if truth.limit is None else f"{truth.limit + 0.0:.4f}"
        table.add_row(name, best, truth.summary)
    console.print(table)
    table, places = RichTable("data", "size", "train / validation / test", "what it is"), {}
    for name, benchmark in BENCHMARKS.items():
        size, rows, places[name] = describe_benchmark(name)
        table.add_row(name, size, rows, benchmark.summary)
    console.print(table)
    folder = data_folder().absolute()
    _say(f"Their files are looked for in {folder}; --data-dir or CIFLOWS_DATA names another folder.")
    for name, where in places.items():
        _say(f"{name}: {where}")


@app.command()
def bench(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the results.")] = Path(
        "runs/bench"
    ),
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    threads: Annotated[int, typer.Option(help="Threads of each library on a CPU.", min=1)] = 1,
    repeats: Annotated[int, typer.Option(help="How often each work is repeated.", min=1)] = 9,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="WORDS", help="Cases whose names contain these words; may repeat."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Three repetitions, and nothing of how cost grows.")
    ] = False,
    growth: Annotated[bool, typer.Option(help="Measure how cost grows with each size.")] = True,
    peers: Annotated[
        bool,
        typer.Option(
            help="Compare with zuko and normflows, installed into an environment of their own."
        ),
    ] = True,
    authors: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Compare with the authors' code in this checkout of github.com/jrmcornish/cif too; "
            "with the Python of its .venv, if it has one.",
        ),
    ] = None,
    document: Annotated[
        Path | None,
        typer.Option(help="Put the tables into this document too, such as docs/performance.md."),
    ] = None,
    show: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Show an earlier bench.json; measure nothing.")
    ] = None,
) -> None:
    """Time training steps, likelihoods and samples of the models, beside other libraries.

    All sides of a comparison work in turns, so that what disturbs one disturbs the others; look at the
    ratios, since absolute times vary from machine to machine and from minute to minute.

        ciflows bench --quick --only resflow

        ciflows bench --device cuda --no-peers

        ciflows bench --show runs/bench/bench.json --document docs/performance.md
    """
    from ciflows.bench import BenchSettings, command, read_result

    if show is not None:
        result = read_result(show)
    else:
        settings = BenchSettings(
            device=device,
            threads=threads,
            repeats=3 if quick else repeats,
            only=tuple(only or ()),
            growth=growth and not quick,
            authors=authors,
            peers=None,
        )
        try:
            result = command.bench(out, settings, peers, console, _say)
        except KeyboardInterrupt:
            _say(f"Interrupted; what was measured is in {out / 'bench.json'}, if anything was.")
            raise typer.Exit(130) from None
    files = command.show(result, out, document, console)
    _say(f"Wrote {', '.join(map(str, files))}.")


def _resolve(
    data: str | None,
    model: str | None,
    seed: int | None,
    config: list[str] | None,
    settings: list[str] | None,
    precision: str | None,
    max_minutes: float | None,
    others: Sequence[str] = (),
    table: dict[str, Any] | None = None,
) -> RunConfig:
    """The configuration that the options of `fit` and `compare` mean."""
    from ciflows.config import default_model, read_config, read_overrides, resolve, suited_settings

    files = [read_config(name) for name in config or []]
    named = {key: value for file in files for key, value in file.items()}
    data = data or named.get("data")
    if data is None:
        raise UserError(
            "Give the data to fit: a name from 'ciflows data', a table or a folder of images."
        )
    model = model or named.get("model") or default_model(data)
    given = {"training": _training(precision, max_minutes), "table": table or {}}
    layers = [*suited_settings(data), *files, read_overrides(model, settings or [], others), given]
    for name, file in zip(config or [], files, strict=True):
        if file.get("on") and data not in file["on"]:
            _say(f"Note: {name} has nothing on {data}: its general settings are used.")
    return resolve(data, model, named.get("seed", 0) if seed is None else seed, layers)


def _training(precision: str | None, max_minutes: float | None) -> dict[str, Any]:
    """The settings of training that have options of their own, as far as they are given."""
    options = {"precision": precision, "max_minutes": max_minutes}
    return {key: value for key, value in options.items() if value is not None}


@contextmanager
def _resumable(how: str, folder: Path | None = None) -> Iterator[None]:
    """Tell how to go on after an interruption; the same command, where there is no folder yet."""
    try:
        yield
    except KeyboardInterrupt:
        how = "the same command" if folder is not None and not folder.exists() else how
        _say(f"Interrupted; nothing is lost: go on with {how}.")
        raise typer.Exit(130) from None


def _write_report(runs: Sequence[Run], path: Path) -> None:
    from ciflows.comparing import report_runs

    report_runs(runs, path)
    _say(f"Wrote {path}.")


def _show_rows(rows: Sequence[dict[str, Any]]) -> None:
    table = RichTable(title="Test log-likelihood, nats per point", title_justify="left")
    images = rows[0].get("bits_per_dim") is not None
    table.box, table.padding = None, (0, 1 if images else 2, 0, 0)
    own = ("bits/dim",) if images else ("gap", "leak")
    nats = "{:.1f}" if images else "{:.4f}"  # of hundreds of pixels together
    for column in ("model", "weights", "log p(x)", "ELBO", "m", *own, "time"):
        table.add_column(column, justify="left" if column == "model" else "right", no_wrap=True)
    for row in rows:
        bits = [_number(row.get(f"bits_per_dim{part}"), "{:.3f}") for part in ("", "_std_error")]
        table.add_row(
            row["model"],
            f"{row['parameters']:,}",
            f"{_number(row['log_prob'], nats)} ± {_number(row['std_error'], nats)}",
            _number(row["elbo"], nats),
            str(row["samples"]),
            *(
                [" ± ".join(bits)]
                if images
                else [_number(row["gap"]), _number(row["leaked_mass"], "{:.2%}")]
            ),
            f"{row['seconds']:.0f} s",
        )
    console.print(table)
    if rows[0]["limit"] is not None:
        _say(f"gap: to {rows[0]['limit']:.4f}, the best that any model can reach.  m: draws a point.")
    if rows[0]["leaked_mass"] is not None:
        _say("leak: share of the model's samples outside the support of the data.")


def _show_search(result: SearchResult) -> None:
    keys = list(result.settings)
    table = RichTable(title="Validation log-likelihood, nats per point", title_justify="left")
    table.box, table.padding = None, (0, 2, 0, 0)
    for column in (*keys, "log p(x)", "state", "folder"):
        table.add_column(escape(column), justify="right" if column == "log p(x)" else "left")
    for row in result.candidates:
        values = [escape(str(row.settings[key])) for key in keys]
        table.add_row(*values, _number(row.validation), row.state, row.folder)
    if result.candidates:
        console.print(table)
    for failed in result.failed_seeds:
        _say(f"Seed {failed.seed} failed: {failed.reason}")
    _say(_headline(result))


def _headline(result: SearchResult) -> str:
    """A search's result in one line, as a table of a paper has it."""
    count = f"{len(result.seeds)} seed{'s' if len(result.seeds) > 1 else ''}"
    error = "" if result.std_error is None else f" ± {result.std_error:.3f}"
    paper = result.published
    line = f"{result.experiment} on {result.data}: {result.log_prob:.3f}{error} over {count}"
    if paper.log_prob is None:
        return line
    error = "" if paper.std_error is None else f" ± {paper.std_error:.2f}"
    return f"{line} (paper: {paper.log_prob:.2f}{error})"


def _number(value: float | None, form: str = "{:.4f}") -> str:
    return "–" if value is None else form.format(value)


def _two_columns(first: str, second: str, rows: dict[str, str]) -> None:
    table = RichTable(first, second)
    for key, value in rows.items():
        table.add_row(key, value)
    console.print(table)


def _say(message: str) -> None:
    console.print(message, markup=False, highlight=False, soft_wrap=True)


def main() -> None:
    """Run the command line; what goes wrong ends in one sentence and a non-zero exit code."""
    warnings.showwarning = lambda message, *_, **__: _say(f"Note: {message}")
    try:
        app()
    except (UserError, InversionError) as error:
        _fail(str(error))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}. What was written before is kept.")
    except Exception as error:
        if os.environ.get("CIFLOWS_DEBUG"):
            raise
        _fail(f"{type(error).__name__}: {error} (CIFLOWS_DEBUG=1 shows where; please report it).")


def _fail(message: str) -> None:
    text = f"[red]Error:[/red] {escape(message)}"
    Console(stderr=True, emoji=False).print(text, highlight=False, soft_wrap=True)
    sys.exit(1)

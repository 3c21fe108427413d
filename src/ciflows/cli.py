"""The command line: fit, compare, search, score, impute, sample, report, check, models, data."""

from __future__ import annotations

__all__ = ["app", "main"]

import inspect
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ciflows import __version__
from ciflows import cli_options as options
from ciflows.cli_options import resolve_config, table_settings, training_settings
from ciflows.cli_output import (
    be_quiet,
    console,
    fail,
    say,
    show_columns,
    show_index,
    show_json,
    show_next,
    show_rows,
    show_search,
    show_settings,
    show_validation,
)
from ciflows.errors import (
    EXTRAS,
    InversionError,
    LostProcessError,
    UserError,
    missing_package,
    system_words,
)

if TYPE_CHECKING:
    from ciflows.runs.engines import Engine
    from ciflows.runs.parts import Job
    from ciflows.runs.run import Run

app = typer.Typer(
    help="How likely is each row of your data? Densities of tables, images and point clouds by "
    "continuously indexed flows.\n\n"
    "Your table:  ciflows fit people.csv\n\n"
    "A demo:  ciflows compare two-uniforms resflow cif-resflow --config demo",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        say(f"ciflows {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    _: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version)
    ] = False,
) -> None:
    if _is_one_of_several() and context.invoked_subcommand != "fit":
        raise UserError(f"{context.invoked_subcommand} runs in one process: leave out torchrun.")


@app.command()
def fit(
    data: Annotated[
        str | None,
        typer.Argument(
            help="A table's path, a folder (or a quoted pattern) of Parquet files, a folder of images, "
            "or a built-in set ('ciflows data')."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="A name from 'ciflows models'. Default: cif-nsf for a table, cif-resflow for a "
            "built-in set, cif-realnvp-image for images."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The run folder. Default: runs/DATA-MODEL-SEED.")
    ] = None,
    config: options.Config = None,
    settings: options.Set = None,
    seed: options.Seed = None,
    device: options.Device = "auto",
    precision: options.Precision = None,
    max_minutes: options.Minutes = None,
    report: Annotated[bool, typer.Option(help="Write report.html into the run folder.")] = True,
    resume: Annotated[
        Path | None, typer.Option(help="Resume the run in this folder, with its own settings.")
    ] = None,
    columns: options.Columns = None,
    exclude: options.Exclude = None,
    given: options.Given = None,
    weights: options.Weights = None,
    bounds: options.Bounds = None,
    atoms: options.Atoms = None,
    step: options.Step = None,
    circular: options.Circular = None,
    group: options.Group = None,
    categorical: options.Categorical = None,
    missing: options.Missing = None,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
    _: options.DataFolder = None,
) -> None:
    """How are my data distributed? Train one model and test it.

    You get a run folder with configuration, weights, metrics and report. If the run is killed, --resume
    continues it to the same result (except with --max-minutes, which goes by the clock).

        ciflows fit people.csv

        ciflows fit people.parquet --given age,sex --bounds share=0:1 --missing drop

        ciflows fit annulus --set steps=5000

        ciflows fit mnist --model realnvp-image --max-minutes 60

        ciflows fit --resume runs/annulus-cif-resflow-0
    """
    from ciflows.runs import fit as runs
    from ciflows.runs.compare import comparison_row
    from ciflows.tables.many_files import data_name
    from ciflows.training.processes import here

    processes = here()
    be_quiet(quiet, as_json, not processes.main)
    table = table_settings(
        columns=columns, exclude=exclude, given=given, weights=weights, bounds=bounds, atoms=atoms,
        step=step, circular=circular, group=group, categorical=categorical, missing=missing,
    )  # fmt: skip
    training = training_settings(precision, max_minutes)
    if resume is not None:
        others = [data, model, out, config, settings, seed]
        if table or training or any(value is not None for value in others):
            raise UserError("--resume uses the data and settings of the run: leave yours out.")
        with _resumable(processes.command(f"ciflows fit --resume {resume}")):
            finished = runs.resume(resume, device=device, console=console, processes=processes)
    else:
        resolved = resolve_config(data, model, seed, config, settings, training, table)
        folder = out or Path("runs") / f"{data_name(resolved.data)}-{resolved.model}-{resolved.seed}"
        with _resumable(processes.command(f"ciflows fit --resume {folder}"), folder):
            finished = runs.fit(resolved, folder, device=device, console=console, processes=processes)
    if not processes.main:
        return
    show_rows([comparison_row(finished)])
    show_validation(finished.history)
    show_index(finished)
    verdicts: list[str] = []
    if report:
        try:
            verdicts = _write_report([finished], finished.path / "report.html")
        except ModuleNotFoundError as error:
            say(f"No report: {missing_package(error)}")
    if as_json:
        show_json({"run": str(finished.path), "verdict": "".join(verdicts) or None, **finished.metrics})
    show_next(finished)


@app.command()
def compare(
    data: Annotated[str, typer.Argument(help="A table's path, a folder of images, or a built-in set.")],
    models: Annotated[
        list[str], typer.Argument(help="Names from 'ciflows models'; the first is the reference.")
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The folder to write. Default: runs/DATA-compared-SEED."),
    ] = None,
    config: options.Config = None,
    settings: options.Set = None,
    seed: options.Seed = None,
    device: options.Device = "auto",
    precision: options.Precision = None,
    max_minutes: options.Minutes = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the comparison in the folder.")
    ] = False,
    columns: options.Columns = None,
    exclude: options.Exclude = None,
    given: options.Given = None,
    weights: options.Weights = None,
    bounds: options.Bounds = None,
    atoms: options.Atoms = None,
    step: options.Step = None,
    circular: options.Circular = None,
    group: options.Group = None,
    categorical: options.Categorical = None,
    missing: options.Missing = None,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
    _: options.DataFolder = None,
) -> None:
    """Which model fits my data best? Train several and compare them on the same test rows.

    You get compare.json, report.html, a run folder for each model and, for 2-D data, compare.png.
    Differences to the first model have paired standard errors. A --set applies to every model that has
    the setting.

        ciflows compare people.csv nsf cif-nsf

        ciflows compare two-uniforms resflow cif-resflow --config demo
    """
    from ciflows.runs.compare import compare_models
    from ciflows.tables.many_files import data_name

    be_quiet(quiet, as_json)
    table = table_settings(
        columns=columns, exclude=exclude, given=given, weights=weights, bounds=bounds, atoms=atoms,
        step=step, circular=circular, group=group, categorical=categorical, missing=missing,
    )  # fmt: skip
    training = training_settings(precision, max_minutes)
    configs = [
        resolve_config(data, model, seed, config, settings, training, table, models) for model in models
    ]
    folder = out or Path("runs") / f"{data_name(data)}-compared-{configs[0].seed}"
    with _resumable("the same command and --resume"):
        rows, files = compare_models(configs, folder, device=device, resume=resume, console=console)
    if as_json:
        show_json(rows)
    show_rows(rows)
    say(f"Wrote {', '.join(str(folder / name) for name in files)}.")


@app.command()
def search(
    experiment: Annotated[
        str,
        typer.Argument(
            help=r"A row of the paper by name, or a TOML file with a model and tables \[on.DATA]."
        ),
    ],
    data: Annotated[
        str | None, typer.Argument(help="One of its data sets; needed if it has several.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The folder to write. Default: runs/search-EXPERIMENT-DATA."),
    ] = None,
    sampler: Annotated[
        str, typer.Option(help="grid: every combination in order; random or tpe: some of them.")
    ] = "grid",
    trials: Annotated[
        int | None, typer.Option(help="How many combinations random and tpe try. Default: 20.")
    ] = None,
    prune: Annotated[
        bool | None,
        typer.Option(
            "--prune/--no-prune",
            help="Stop trials that fall behind the median of the others. Default: on, except for grid.",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds to test the chosen settings with.")] = 3,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Number of processes that share the work and the GPUs. Default: one for each GPU."
        ),
    ] = None,
    settings: options.Set = None,
    seed: options.Seed = None,
    device: options.Device = "auto",
    precision: options.Precision = None,
    max_minutes: options.Minutes = None,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
    _: options.DataFolder = None,
) -> None:
    """Which settings are best? Search an experiment's grid, then test the winner over several seeds.

    Settings are chosen by validation log-likelihood; test rows play no part. Each trial is a run
    folder. search.json has the result, mean over seeds ± standard error, beside the paper's. Run the
    same command again to continue a killed search, or in another shell to share the work.

    Do you have several GPUs? Tables and 2-D sets take only 1 to 3 ms a step: use the GPUs here, for
    seeds and grids, rather than for one run with torchrun. Try two workers for each GPU.

        ciflows search maf power --workers 2

        ciflows search maf power --sampler tpe --trials 6 --max-minutes 30
    """
    from ciflows.files import read_json
    from ciflows.runs.config import read_overrides
    from ciflows.runs.experiments import read_experiment
    from ciflows.runs.search import plan_search, run_search

    be_quiet(quiet, as_json)
    found = read_experiment(experiment)
    overrides = read_overrides(found.model, settings or [])
    training = overrides.get("training", {}) | training_settings(precision, max_minutes)
    overrides["training"] = training
    seed = found.values.get("seed", 0) if seed is None else seed
    plan = plan_search(
        found, data, overrides=overrides, sampler=sampler, trials=trials, prune=prune, seed=seed
    )
    folder = out or Path("runs") / f"search-{found.name}-{Path(plan.data).stem}"
    with _resumable("the same command"):
        result = run_search(plan, folder, seeds=seeds, workers=workers, device=device, console=console)
    if as_json:
        show_json(read_json(folder / "search.json"))
    show_search(result)
    say(f"Wrote {folder / 'search.json'}.")


@app.command()
def score(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    data: Annotated[
        str, typer.Argument(help="A table, a folder of images, or a built-in set (its test part).")
    ],
    out: options.Table = Path("scores.csv"),
    samples: Annotated[
        int | None,
        typer.Option(
            "--samples",
            "-m",
            help="Draws of the index for each row. Default: as many as a standard error of 0.1 nats "
            "takes, at most 100.",
            min=1,
        ),
    ] = None,
    std_error: Annotated[
        float | None,
        typer.Option(help="Instead, draw until each row's standard error is about this.", min=1e-6),
    ] = None,
    max_samples: Annotated[
        int, typer.Option(help="The most draws for one row with --std-error.", min=1)
    ] = 10_000,
    p_value: Annotated[
        bool,
        typer.Option(
            "--p-value", help="Add how unusual each row is: the share of samples that are no likelier."
        ),
    ] = False,
    n: Annotated[
        int | None,
        typer.Option(
            "-n",
            help="Samples for --p-value. Default: 2000; 100 for each row of a conditional density.",
            min=2,
        ),
    ] = None,
    missing: Annotated[
        str,
        typer.Option(
            metavar="refuse|integrate", help="Missing values: refuse them, or integrate over them."
        ),
    ] = "refuse",
    seed: options.DrawSeed = 0,
    key: options.Key = None,
    on_bad_row: options.BadRow = "null",
    engine: options.Engine = "local",
    ray_address: options.RayAddress = None,
    workers: options.Workers = None,
    resume: options.ResumeJob = False,
    device: options.Device = "auto",
    quiet: options.Quiet = False,
    as_json: options.Json = False,
    _: options.DataFolder = None,
) -> None:
    """Which rows are unusual? Write log p(x) of each row, with its standard error.

    The lowest scores are the likeliest anomalies. Beside each score is the row's number, from 0, or the
    columns of --key. --p-value adds the share of the model's own samples that are no likelier than the
    row. A row's score depends only on the row and the seed.

    If the run was trained with weights and the data have that column, the printed mean is weighted.

        ciflows score runs/people new.csv --out scores.parquet

        ciflows score runs/people new.csv --std-error 0.05

        ciflows score runs/people new.csv --p-value --key id,name

    Many Parquet files become a folder of scores, on this machine or on a cluster. --resume continues a
    killed job:

        ciflows score runs/people 'big/*.parquet' --out scores --engine ray
    """
    from ciflows.runs.engines import Engine
    from ciflows.runs.score import ScoreSettings, score_data

    be_quiet(quiet, as_json)
    settings = ScoreSettings(samples, std_error, max_samples, seed, on_bad_row, missing)
    worker = Engine(engine, ray_address, workers)
    keys = tuple(key.split(",")) if key else ()
    if worker.check(out):
        from ciflows.runs.parts import plan_scores

        if p_value:
            raise UserError("--p-value writes one file: give --out a suffix, such as .csv.")
        loaded = worker.load(run, device)
        _make_parts(loaded, plan_scores(loaded, data, out, settings, keys), worker, resume, as_json)
        return
    if resume:
        raise UserError("--resume continues a folder of files: give --out without a suffix.")
    scored = score_data(run, data, out, settings, device, console, key=keys, p_value=p_value, n=n)
    if as_json:
        show_json({"out": str(out), **scored._asdict(), "summary": scored.summary._asdict()})
    bits = "" if scored.bits_per_dim is None else f", {scored.bits_per_dim:.4f} bits per dimension"
    say(f"Mean log-likelihood {scored.summary}{bits}.")
    if scored.impossible:
        say(f"{scored.impossible:,} rows have density 0: out of a column's bounds, or too far off.")
    if scored.weights:
        say(f"The mean is weighted by {scored.weights}.")
    elif scored.missing_weights:
        say(f"The mean is not weighted: {data} has no column {scored.missing_weights}.")
    if scored.bad:
        say(f"{scored.bad} rows could not be scored: {scored.bad_file} lists them.")
    if scored.failed:
        say(
            f"{scored.failed} rows could not be scored: too few effective draws of their missing values."
        )
    say(f"Wrote {out}.")


@app.command()
def impute(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    data: Annotated[Path, typer.Argument(help="A table with missing values.")],
    out: options.Table = Path("imputed.csv"),
    n: Annotated[int, typer.Option("-n", help="How many draws for each missing value.", min=1)] = 1,
    seed: options.DrawSeed = 0,
    device: options.Device = "auto",
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """What could the missing values be? Draw them, conditioned on the values that are there.

    Columns that the table lacks are drawn too. With -n above 1 the output stacks the filled tables; its
    first column, draw, numbers them.

        ciflows impute runs/people gaps.csv -n 5 --out filled.parquet
    """
    from ciflows.runs.sample_files import impute_data

    be_quiet(quiet, as_json)
    count, gaps = impute_data(run, data, n, out, seed, device)
    if as_json:
        show_json({"out": str(out), "rows": count, "gaps": gaps})
    found = ", ".join(f"{name} ({number})" for name, number in gaps.items())
    say(f"Wrote {count} rows to {out}. Filled in: {found or 'nothing, since no value was missing'}.")


@app.command()
def sample(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    n: Annotated[
        int | None,
        typer.Option("-n", help="How many rows. Default: 1000, or 1 per row of --given.", min=1),
    ] = None,
    out: options.Samples = None,
    given: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|A=1,B=x",
            help="What to condition on: a table with the given columns, or a value for each.",
        ),
    ] = None,
    temperature: Annotated[
        float,
        typer.Option(help="Below 1: likelier, less varied rows. 1: the model itself.", min=1e-6),
    ] = 1.0,
    seed: options.DrawSeed = 0,
    engine: options.Engine = "local",
    ray_address: options.RayAddress = None,
    workers: options.Workers = None,
    resume: options.ResumeJob = False,
    device: options.Device = "auto",
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """What would new data look like? Draw rows with the columns of the data, or a grid of images.

    If --out has no suffix, it becomes a folder of Parquet files, written here or on a cluster.

        ciflows sample runs/people -n 500 --out new-people.csv

        ciflows sample runs/people -n 100 --given age=40,sex=f

        ciflows sample runs/mnist -n 16 --out digits.png --temperature 0.8

        ciflows sample runs/people -n 100000000 --out many --engine ray
    """
    from ciflows.runs.engines import Engine
    from ciflows.runs.sample_files import sample_data

    be_quiet(quiet, as_json)
    worker, where = Engine(engine, ray_address, workers), out or Path("samples.csv")
    if worker.check(where):
        from ciflows.runs.parts import plan_samples

        if given is not None:
            raise UserError("--given writes one file: give --out a suffix, such as .csv.")
        loaded = worker.load(run, device)
        job = plan_samples(loaded, n or 1000, where, seed, temperature)
        _make_parts(loaded, job, worker, resume, as_json)
        return
    count, written = sample_data(run, n, out, seed, device, temperature, given)
    if as_json:
        show_json({"out": str(written), "points": count})
    say(f"Wrote {count} rows to {written}.")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of finished runs.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="An .html file, or a .png file for the densities alone."),
    ] = None,
    device: options.Device = "auto",
    quiet: options.Quiet = False,
    as_json: options.Json = False,
    _: options.DataFolder = None,
) -> None:
    """How good is a run? Write one HTML file: the verdict, then the evidence, then what to try next.

    Without --out it goes into the first run's folder. Runs may be on several data sets.

        ciflows report runs/annulus-resflow-0 runs/annulus-cif-resflow-0 --out both.html
    """
    from ciflows.runs.run import load_run

    if out is not None and (out.exists() or out.suffix not in (".html", ".png")):
        raise UserError(f"{out}: give an .html or .png file that does not exist yet.")
    be_quiet(quiet, as_json)
    out = out or runs[0] / "report.html"
    verdicts = _write_report([load_run(folder, device) for folder in runs], out)
    if as_json:
        show_json({"out": str(out), "verdicts": verdicts})


@app.command()
def check(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    data: Annotated[
        str | None,
        typer.Argument(help="A table, or a built-in set. Default: the test rows of the run's own data."),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The folder for coverage.json, .csv and .png.")
    ] = Path("check"),
    samples: Annotated[
        int | None,
        typer.Option(
            "-n", help="Samples. Default: 2000; 200 for each row of a conditional density.", min=2
        ),
    ] = None,
    rows: Annotated[
        int, typer.Option(help="Check at most this many rows, evenly spread.", min=2)
    ] = 5000,
    seed: options.DrawSeed = 0,
    device: options.Device = "auto",
    quiet: options.Quiet = False,
    as_json: options.Json = False,
    _: options.DataFolder = None,
) -> None:
    """Is the model calibrated? Check its intervals and regions on rows it has not seen.

    Intervals of 50, 80, 90 and 95 % should hold that share of the rows. You see whether they do for each
    column and, by highest-density regions, for the joint density, and which columns are off.

        ciflows check runs/people new.csv
    """
    from ciflows.runs.check import check_data, write_picture
    from ciflows.runs.run import load_run

    be_quiet(quiet, as_json)
    coverage = check_data(load_run(run, device), data, out, samples, rows, seed)
    if as_json:
        show_json({"out": str(out), **coverage.as_dict()})
    say(str(coverage))
    try:
        write_picture(coverage, out)
    except ModuleNotFoundError as error:
        say(f"No picture: {missing_package(error)}")
    say(f"Wrote {', '.join(str(path) for path in sorted(out.iterdir()))}.")


@app.command()
def models(
    name: Annotated[str | None, typer.Argument(help="Show this model's settings.")] = None,
    as_json: options.Json = False,
) -> None:
    """Which models are there? List them and the presets, or one model's settings.

    Change a setting with --set, as in ciflows fit people.csv --set layers=5.

        ciflows models

        ciflows models cif-nsf
    """
    be_quiet(as_json)
    if name is None:
        from ciflows.models.catalogue import SUMMARIES
        from ciflows.runs.presets import presets

        if as_json:
            show_json({"models": SUMMARIES, "presets": presets()})
        show_columns("model", "what it is", SUMMARIES)
        show_columns("preset", "use with --config", presets())
        return
    from ciflows.models import get_model
    from ciflows.settings import Settings
    from ciflows.training.settings import EvaluationSettings, TrainingSettings

    model = get_model(name)
    kinds: dict[str, tuple[type[Settings], Mapping[str, Any]]] = {
        "architecture": (model.settings, {}),
        "training": (TrainingSettings, model.training),
        "evaluation": (EvaluationSettings, model.evaluation),
    }
    settings = {
        title: {
            key: {"default": suited.get(key, field.default), "meaning": field.description}
            for key, field in kind.model_fields.items()
        }
        for title, (kind, suited) in kinds.items()
    }
    if as_json:
        show_json(settings)
    for title, rows in settings.items():
        show_settings(f"{name}: {title}", rows)


@app.command("data")
def data_(as_json: options.Json = False, _: options.DataFolder = None) -> None:
    """Which data sets are built in? List them, with the best possible log-likelihood if it is known.

    Some are read from files. The list says where to get them and where to put them.

        ciflows data
    """
    from ciflows.datasets import BENCHMARKS, SYNTHETIC, data_folder, describe_benchmark

    be_quiet(as_json)
    folder = data_folder().absolute()
    places = {name: describe_benchmark(name) for name in BENCHMARKS}
    if as_json:
        drawn = {name: {"limit": t.limit, "summary": t.summary} for name, t in SYNTHETIC.items()}
        files = {
            name: {"size": size, "rows": rows, "file": where, "summary": BENCHMARKS[name].summary}
            for name, (size, rows, where) in places.items()
        }
        show_json({"drawn": drawn, "files": files, "folder": str(folder)})
    table = Table("data", "best nats", "what it is")
    for name, truth in SYNTHETIC.items():
        best = "unknown" if truth.limit is None else f"{truth.limit + 0.0:.4f}"
        table.add_row(name, best, truth.summary)
    console.print(table)
    table = Table("data", "size", "train / validation / test", "what it is")
    for name, (size, rows, _where) in places.items():
        table.add_row(name, size, rows, BENCHMARKS[name].summary)
    console.print(table)
    say(f"Put their files into {folder}, or name another folder with --data-dir or CIFLOWS_DATA.")
    for name, (*_facts, where) in places.items():
        say(f"{name}: {where}")


def _unwrap(text: str) -> str:
    """A docstring with each paragraph on one line, to fill any terminal, and a $ before its examples."""
    paragraphs = [p.replace("\n", " ").strip() for p in inspect.cleandoc(text).split("\n\n")]
    return "\n\n".join(f"    $ {p}" if p.startswith("ciflows ") else p for p in paragraphs)


for _command in app.registered_commands:
    _command.help = _unwrap((_command.callback and _command.callback.__doc__) or "")


@contextmanager
def _resumable(how: str, folder: Path | None = None) -> Iterator[None]:
    """Say how to continue after an interruption: with the same command, if there is no folder yet."""
    try:
        yield
    except LostProcessError as error:
        error.command = how if folder is None or folder.exists() else None
        raise
    except KeyboardInterrupt:
        how = "the same command" if folder is not None and not folder.exists() else how
        say(f"Interrupted; nothing is lost. Continue with {how}.")
        raise typer.Exit(130) from None


def _make_parts(run: Run, job: Job, engine: Engine, resume: bool, as_json: bool = False) -> None:
    """Make a folder of many files, and say what is in it."""
    from ciflows.runs.engines import run_job

    with _resumable("the same command and --resume"):
        made = run_job(run, job, engine, resume, console)
    if as_json:
        show_json({"out": job.out, **made._asdict()})
    if made.reused:
        say(f"{made.reused} parts were there already.")
    if made.log_prob is not None:
        error = "" if made.std_error is None else f" ± {made.std_error:.4f}"
        say(f"Mean log-likelihood {made.log_prob:.4f}{error}, not weighted.")
    if made.impossible:
        say(f"{made.impossible:,} rows have density 0: out of a column's bounds, or too far off.")
    if made.late:
        say(
            f"{made.late:,} rows ended above the standard error that you asked for: pass a smaller "
            "--std-error or a larger --max-samples to have fewer."
        )
    if made.bad:
        say(f"{made.bad} rows could not be scored: {made.bad_file} lists them.")
    say(f"Wrote {made.rows} rows to {job.out}.")


def _write_report(runs: Sequence[Run], path: Path) -> list[str]:
    """Write a report; print and return its verdict on each data set."""
    from ciflows.runs.compare import report_runs

    verdicts = report_runs(runs, path)
    for verdict in verdicts:
        say(f"Verdict on {verdict}")
    say(f"Wrote {path}.")
    return verdicts


def _is_one_of_several() -> bool:
    """Whether torchrun started this process with others."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", 1)) > 1


@contextmanager
def _together() -> Iterator[None]:
    """Join the processes that torchrun started, if there are any."""
    if not _is_one_of_several():
        yield
        return
    from ciflows.training.processes import join_processes

    with join_processes():
        yield


def main() -> None:
    """Run the command line; an error prints one sentence and exits with a non-zero code."""
    be_quiet(False)
    warnings.showwarning = lambda message, *_, **__: say(f"Note: {message}")
    try:
        with _together():
            app()
    except UserError as error:
        fail(str(error), error.command)
    except InversionError as error:
        fail(str(error))
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRAS:
            raise
        fail(missing_package(error))
    except OSError as error:
        fail(system_words(error))
    except Exception as error:
        if os.environ.get("CIFLOWS_DEBUG"):
            raise
        fail(f"{type(error).__name__}: {error} (CIFLOWS_DEBUG=1 shows where; please report it).")

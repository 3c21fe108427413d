"""The options that commands share, and the settings that they mean."""

from __future__ import annotations

__all__ = ["resolve_config", "table_settings", "training_settings"]  # and each option by its name

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ciflows.cli_output import say
from ciflows.errors import UserError

if TYPE_CHECKING:
    from ciflows.runs.config import RunConfig

SEEDS: dict[str, Any] = {"min": 0, "max": 2**31 - 1}


def _set_data_folder(folder: Path | None) -> None:
    """Set the data folder for this process and its children."""
    if folder is not None:
        os.environ["CIFLOWS_DATA"] = str(folder.absolute())


Config = Annotated[
    list[str] | None,
    typer.Option("--config", "-c", metavar="FILE", help="A TOML file or a preset; may repeat."),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        metavar="KEY=VALUE",
        help="One setting, such as layers=5; may repeat. 'ciflows models NAME' lists all.",
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Seed = Annotated[
    int | None, typer.Option(help="Seed of parameters, data order and draws. Default: 0.", **SEEDS)
]
DrawSeed = Annotated[int, typer.Option(help="Seed of the draws.", **SEEDS)]
Table = Annotated[Path, typer.Option("--out", "-o", help="A .csv or .parquet file.")]
Samples = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        help="A .csv or .parquet file; for images .png or .npy. Default: samples.csv or samples.png.",
    ),
]
Precision = Annotated[str | None, typer.Option(help="float32, float64, tf32 or mixed.")]
Minutes = Annotated[
    float | None,
    typer.Option(help="Train each model for at most this long; the schedule adapts."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
Json = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON and nothing else, for scripts.")
]
Columns = Annotated[
    str | None, typer.Option(metavar="A,B,...", help="Columns of a table to use. Default: all.")
]
Exclude = Annotated[str | None, typer.Option(metavar="A,B,...", help="Columns of a table to leave out.")]
Given = Annotated[
    str | None,
    typer.Option(metavar="A,B,...", help="Columns to condition on: the density is p(the rest | these)."),
]
Weights = Annotated[
    str | None, typer.Option(metavar="COLUMN", help="The column with the weight of each row.")
]
Bounds = Annotated[
    list[str] | None,
    typer.Option(
        metavar="COLUMN=LOW:HIGH", help="Bounds of a column; either end may be empty. May repeat."
    ),
]
Atoms = Annotated[
    list[str] | None,
    typer.Option(
        metavar="COLUMN=A,B,...",
        help="Values that have a probability instead of a density, such as spend=0; spend=none for "
        "none. May repeat.",
    ),
]
Step = Annotated[
    list[str] | None,
    typer.Option(
        metavar="COLUMN=STEP",
        help="The step between a column's values, such as price=0.05; 0 for a density. May repeat.",
    ),
]
Circular = Annotated[
    list[str] | None,
    typer.Option(
        metavar="COLUMN=LOW:HIGH",
        help="A column that wraps around, such as hour=0:24 or angle=0:360. May repeat.",
    ),
]
Group = Annotated[
    str | None,
    typer.Option(
        metavar="COLUMN",
        help="Never split rows with the same value here over train, validation and test.",
    ),
]
Categorical = Annotated[
    str | None, typer.Option(metavar="A,B,...", help="Columns of numbers that are category labels.")
]
Missing = Annotated[
    str | None,
    typer.Option(metavar="refuse|drop", help="What to do with rows that miss a value. Default: refuse."),
]
Engine = Annotated[
    str, typer.Option(metavar="local|ray", help="Where to run: in this process, or on Ray.")
]
RayAddress = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="A Ray cluster, such as auto. Default: Ray on this machine."),
]
Workers = Annotated[
    int | None,
    typer.Option(help="Ray workers. Default: one for each core, or for each GPU.", min=1),
]
ResumeJob = Annotated[
    bool, typer.Option("--resume", help="Continue in the folder of --out; keep its finished parts.")
]
Key = Annotated[
    str | None,
    typer.Option(
        metavar="A,B,...",
        help="Columns to write beside the scores. Default: the number of the row.",
    ),
]
BadRow = Annotated[
    str,
    typer.Option(
        "--on-bad-row",
        metavar="fail|null|drop",
        help="What to do with rows that cannot be scored; null and drop list them in a file.",
    ),
]
DataFolder = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        metavar="DIR",
        help="The folder with the files of built-in data sets. Default: CIFLOWS_DATA, or ./data.",
        callback=_set_data_folder,
        expose_value=False,
    ),
]


def table_settings(**options: list[str] | str | None) -> dict[str, Any]:
    """The settings of a table that the user gave as options."""
    forms = {"bounds": "LOW:HIGH", "atoms": "A,B,...", "step": "STEP", "circular": "LOW:HIGH"}
    table: dict[str, Any] = {}
    for name, value in options.items():
        if name not in forms and value is not None:
            table[name] = value
        elif value:
            pairs = [word.partition("=") for word in value]
            for column, equals, _ in pairs:
                if not equals:
                    raise UserError(f"--{name} {column}: write it as COLUMN={forms[name]}.")
            table[name] = {column: value for column, _, value in pairs}
    return table


def training_settings(precision: str | None, max_minutes: float | None) -> dict[str, Any]:
    """The settings of training that have options of their own."""
    options = {"precision": precision, "max_minutes": max_minutes}
    return {key: value for key, value in options.items() if value is not None}


def resolve_config(
    data: str | None,
    model: str | None,
    seed: int | None,
    config: list[str] | None,
    settings: list[str] | None,
    training: dict[str, Any],
    table: dict[str, Any],
    others: Sequence[str] = (),
) -> RunConfig:
    """The configuration that the options of `fit` and `compare` mean.

    Defaults come first, then the files of --config, then --set, then options of their own.

    Arguments:
        data: The data; those that a file names if None.
        model: The model; likewise, or the one suited to the data.
        seed: The seed; likewise, or 0.
        config: Names of presets and files.
        settings: The arguments of --set.
        training: Settings of training from options of their own.
        table: Settings of the table from options of their own.
        others: The models that the same settings are for.
    """
    from ciflows.runs.config import default_model, read_config, read_overrides, resolve, suited_settings

    files = [read_config(name) for name in config or []]
    named = {key: value for file in files for key, value in file.items()}
    data = data or named.get("data")
    if data is None:
        raise UserError(
            "Name the data to fit: a table, a folder of images, or a set from 'ciflows data'."
        )
    model = model or named.get("model") or default_model(data)
    own = {"training": training, "table": table}
    layers = [*suited_settings(data), *files, read_overrides(model, settings or [], others), own]
    for name, file in zip(config or [], files, strict=True):
        if file.get("on") and data not in file["on"]:
            say(f"Note: {name} has no settings for {data}: its general settings are used.")
    return resolve(data, model, named.get("seed", 0) if seed is None else seed, layers)

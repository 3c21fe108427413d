"""A run's configuration: presets, files and single settings merged and checked."""

from __future__ import annotations

__all__ = [
    "RunConfig",
    "default_model",
    "place_settings",
    "read_config",
    "read_overrides",
    "resolve",
    "suited_settings",
]

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import Field

from ciflows.datasets import check_drawn, holds_images, holds_table, is_built_in
from ciflows.errors import UserError, nearest
from ciflows.files import parse_toml
from ciflows.models import MODELS, get_model
from ciflows.runs.presets import shipped
from ciflows.settings import Seed, Settings, parse_settings
from ciflows.tables import PLAIN_TABLE, TableSettings
from ciflows.tables.many_files import is_pattern
from ciflows.training import EvaluationSettings, TrainingSettings

SECTIONS = ("architecture", "training", "evaluation", "table")
NAMES = {"data": str, "model": str, "seed": int}
# Settings that came later, and what runs of earlier versions did.
LATER = {"training": {"flips": False, "muon_step": 0.2}}
PER_DATA = ("grid", "paper")  # what an experiment's [on.DATA] may hold beside settings


class RunConfig(Settings):
    """Everything that determines a run's result."""

    data: str = Field(description="name of a built-in set, or path of a table or a folder of images")
    model: str = Field(description="name of a model")
    seed: Seed = Field(0, description="seed of parameters, data order and draws")
    architecture: dict[str, Any] = Field(description="settings of the model")
    training: TrainingSettings = Field(description="settings of training")
    evaluation: EvaluationSettings = Field(description="settings of the test")
    table: TableSettings = Field(PLAIN_TABLE, description="which columns of a table, and how")

    def to_toml(self) -> str:
        """The configuration as TOML: every setting, and those of the table that are not defaults."""
        values = self.model_dump(exclude={"table"})
        table = self.table.model_dump(exclude_defaults=True)
        return tomli_w.dumps(_without_none(values | ({"table": table} if table else {})))

    @classmethod
    def from_toml(cls, text: str, where: str) -> RunConfig:
        """Read what `to_toml` wrote. All settings must be there: no default may slip in.

        Those that earlier versions did not have get the values that stand for what these did.
        """
        values = _check_keys(parse_toml(text, where), where)
        values |= {section: later | values.get(section, {}) for section, later in LATER.items()}
        config = _merge(**{key: values[key] for key in NAMES if key in values}, layers=[values])
        if parse_toml(config.to_toml(), where) != values:
            raise UserError(f"{where} is damaged, or was written by another version of ciflows.")
        return config


def default_model(data: str) -> str:
    """The model for some data, if the user names none."""
    if holds_images(data):
        return "cif-realnvp-image"
    return "cif-nsf" if holds_table(data) else "cif-resflow"


def suited_settings(data: str) -> list[dict[str, Any]]:
    """Default settings for some data: the preset "table" for a table."""
    return [read_config("table")] if holds_table(data) else []


def read_config(name: str) -> dict[str, Any]:
    """Read a configuration: a preset by name, or a TOML file, such as a run's config.toml."""
    known = shipped("presets", "experiments")
    if name in known:
        text = known[name]
    elif Path(name).is_file():
        try:
            text = Path(name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise UserError(f"{name} is not a TOML file.") from None
    else:
        raise UserError(f"There is no preset, experiment or file {name!r}. {nearest(name, known)}")
    return _check_keys(parse_toml(text, name), name)


def read_overrides(model: str, overrides: Sequence[str], others: Sequence[str] = ()) -> dict[str, Any]:
    """Parse the `key=value` arguments of the command line; the section of a key is found.

    Arguments:
        others: Other models that they are for: settings that only those have are ignored.
    """
    values: dict[str, Any] = {}
    for word in overrides:
        key, equals, text = word.partition("=")
        if not equals:
            raise UserError(f"--set {word}: write it as key=value.")
        values[key] = _parse_value(text)
    return place_settings(model, values, others, "--set")


def place_settings(
    model: str, settings: Mapping[str, Any], others: Sequence[str] = (), where: str = "settings"
) -> dict[str, Any]:
    """Sort settings into their sections; `section.key` names the section.

    Arguments:
        others: Other models that they are for: settings that only those have are ignored.
    """
    fields = {
        "architecture": get_model(model).settings.model_fields,
        "training": TrainingSettings.model_fields,
        "evaluation": EvaluationSettings.model_fields,
        "table": TableSettings.model_fields,
    }
    elsewhere = {key for other in others for key in get_model(other).settings.model_fields}
    values: dict[str, Any] = {}
    for key, value in settings.items():
        if key == "seed":
            raise UserError(
                f"{where} seed: the seed of the run is no setting; that of the test is evaluation.seed.",
                command="--seed N",
            )
        section, _, name = key.rpartition(".")
        places = [s for s in SECTIONS if name in fields[s] and section in ("", s)]
        if places:
            values.setdefault(places[0], {})[name] = value
        elif not (name in elsewhere and section in ("", "architecture")):
            known = [f for s in SECTIONS for f in fields[s]]
            raise UserError(f"{where} {key}: {model} has no setting {key!r}. {nearest(name, known)}")
    return values


def resolve(data: str, model: str, seed: int = 0, layers: Sequence[Mapping[str, Any]] = ()) -> RunConfig:
    """Merge configurations, later ones over earlier ones, and check the result.

    A table [architecture.MODEL] counts for that model only, and [on.DATA] for that data set only. The
    path of a file becomes absolute.
    """
    config = _merge(data, model, seed, layers)
    if is_built_in(data) or not (Path(data).exists() or is_pattern(data)):
        return config
    return config.model_copy(update={"data": str(Path(data).resolve())})


def _merge(
    data: str = "", model: str = "", seed: int = 0, layers: Sequence[Mapping[str, Any]] = ()
) -> RunConfig:
    suited = get_model(model)
    merged: dict[str, dict[str, Any]] = {
        "architecture": {},
        "training": dict(suited.training),
        "evaluation": dict(suited.evaluation),
        "table": {},
    }
    for layer in (part for whole in layers for part in (whole, whole.get("on", {}).get(data, {}))):
        for section in SECTIONS:
            values = layer.get(section, {})
            merged[section] |= {key: value for key, value in values.items() if key not in MODELS}
        merged["architecture"] |= layer.get("architecture", {}).get(model, {})
    architecture = parse_settings(suited.settings, merged["architecture"], f"model {model}")
    training = parse_settings(TrainingSettings, merged["training"], "training")
    if getattr(architecture, "log_det", None) == "roulette" and training.several_draws:
        raise UserError(
            f"objective = {training.objective!r} needs exact log-determinants: noise in estimated ones "
            "would raise its bound. Set objective=elbo, or another log_det."
        )
    if training.training_points is not None:
        check_drawn(data)
    evaluation = parse_settings(EvaluationSettings, merged["evaluation"], "evaluation")
    table = parse_settings(TableSettings, merged["table"], "table")
    whole = {
        **{"data": data, "model": model, "seed": seed, "architecture": architecture.model_dump()},
        **{"training": training, "evaluation": evaluation, "table": table},
    }
    return parse_settings(RunConfig, whole, "run")


def _check_keys(values: dict[str, Any], where: str) -> dict[str, Any]:
    for key, value in values.items():
        if key not in (*SECTIONS, *NAMES, "on"):
            raise UserError(f"{where}: no section [{key}]. {nearest(key, (*SECTIONS, 'on'))}")
        if not isinstance(value, NAMES.get(key, dict)):
            raise UserError(f"{where}: {key} = {value!r} is of the wrong type.")
    for name, table in values.get("on", {}).items():
        for key, value in table.items() if isinstance(table, dict) else {name: table}.items():
            if key not in (*SECTIONS, *PER_DATA) or not isinstance(value, dict):
                raise UserError(f"{where}: [on.{name}] takes tables: {', '.join(SECTIONS + PER_DATA)}.")
    for key, value in values.get("architecture", {}).items():
        if isinstance(value, dict) != (key in MODELS):
            raise UserError(f"{where}: [architecture.{key}]: {nearest(key, MODELS)}")
    return values


def _parse_value(text: str) -> Any:
    """A TOML value; anything else is a string."""
    try:
        return parse_toml(f"value = {text}", text)["value"]
    except UserError:
        return text


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_none(value) if isinstance(value, Mapping) else value
        for key, value in values.items()
        if value is not None
    }

"""A run's configuration: from presets, files and single settings to one frozen whole."""

from __future__ import annotations

__all__ = [
    "RunConfig",
    "default_model",
    "place_settings",
    "presets",
    "read_config",
    "read_overrides",
    "resolve",
    "suited_settings",
]

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import Field

from ciflows.data import (
    PLAIN_TABLE,
    TableSettings,
    check_drawn,
    holds_images,
    holds_table,
    is_built_in,
)
from ciflows.errors import UserError, nearest
from ciflows.files import parse_toml
from ciflows.models import MODELS, get_model
from ciflows.settings import Seed, Settings, parse_settings
from ciflows.training import EvaluationSettings, TrainingSettings

SECTIONS = ("architecture", "training", "evaluation", "table")
NAMES = {"data": str, "model": str, "seed": int}
PER_DATA = ("grid", "paper")  # what an experiment says of a data set beside the settings for it


class RunConfig(Settings):
    """All that decides a run's result."""

    data: str = Field(description="name of a built-in set, or path of a table or of a folder of images")
    model: str = Field(description="name of a model")
    seed: Seed = Field(0, description="seed of the parameters, the order of the data, the draws")
    architecture: dict[str, Any] = Field(description="settings of the model")
    training: TrainingSettings = Field(description="settings of training")
    evaluation: EvaluationSettings = Field(description="settings of the test")
    table: TableSettings = Field(PLAIN_TABLE, description="which columns of a table, and how")

    def to_toml(self) -> str:
        """The configuration as TOML, every setting written out; of the table, what was asked for."""
        values = self.model_dump(exclude={"table"})
        table = self.table.model_dump(exclude_defaults=True)
        return tomli_w.dumps(_without_none(values | ({"table": table} if table else {})))

    @classmethod
    def from_toml(cls, text: str, where: str) -> RunConfig:
        """Read back what `to_toml` wrote; nothing may be missing, so that no default slips in."""
        values = _check_keys(parse_toml(text, where), where)
        config = _lay_over(**{key: values[key] for key in NAMES if key in values}, layers=[values])
        if parse_toml(config.to_toml(), where) != values:
            raise UserError(f"{where} is damaged, or was written by another version of ciflows.")
        return config


def default_model(data: str) -> str:
    """The model to fit where none is named."""
    if holds_images(data):
        return "cif-realnvp-image"
    return "cif-nsf" if holds_table(data) else "cif-resflow"


def suited_settings(data: str) -> list[dict[str, Any]]:
    """The settings that lie below all others: those of the preset "table" for a table of one's own."""
    return [read_config("table")] if holds_table(data) else []


def presets() -> dict[str, str]:
    """The configurations that come with the package: name -> first line of its comment."""
    folder = resources.files("ciflows") / "presets"
    texts = {Path(f.name).stem: f.read_text() for f in folder.iterdir() if f.name.endswith(".toml")}
    return {name: text.splitlines()[0].lstrip("# ") for name, text in sorted(texts.items())}


def read_config(name: str) -> dict[str, Any]:
    """A configuration's values, from a preset's name or a TOML file's path (a run's own will do)."""
    if name in presets():
        text = (resources.files("ciflows") / "presets" / f"{name}.toml").read_text()
    elif Path(name).is_file():
        try:
            text = Path(name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise UserError(f"{name} is not a TOML file.") from None
    else:
        raise UserError(f"There is no preset or file {name!r}. {nearest(name, presets())}")
    return _check_keys(parse_toml(text, name), name)


def read_overrides(model: str, overrides: Sequence[str], others: Sequence[str] = ()) -> dict[str, Any]:
    """Turn `key=value` words into a configuration's values; a bare key finds its own section.

    Arguments:
        model: The model they are for.
        overrides: The words.
        others: Models that the same words are for too: what only those have is passed over here.
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
    """Put settings into the sections they belong to; `section.key` names its own.

    Arguments:
        model: The model they are for.
        settings: Values by key.
        others: Models that the same settings are for too: what only those have is passed over here.
        where: Where they come from, for the error.
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
            raise UserError(f"{where} seed: use --seed for the run's seed, or evaluation.seed.")
        section, _, name = key.rpartition(".")
        places = [s for s in SECTIONS if name in fields[s] and section in ("", s)]
        if places:
            values.setdefault(places[0], {})[name] = value
        elif not (name in elsewhere and section in ("", "architecture")):
            known = [f for s in SECTIONS for f in fields[s]]
            raise UserError(f"{where} {key}: {model} has no setting {key!r}. {nearest(name, known)}")
    return values


def resolve(data: str, model: str, seed: int = 0, layers: Sequence[Mapping[str, Any]] = ()) -> RunConfig:
    """Lay configurations over each other, the last one on top, and check the whole.

    A table inside [architecture] that bears a model's name counts for that model alone, and one inside
    [on] that bears a data set's name for that data set alone. A file is named by its whole path.
    """
    config = _lay_over(data, model, seed, layers)
    if is_built_in(data) or not Path(data).exists():
        return config
    return config.model_copy(update={"data": str(Path(data).resolve())})


def _lay_over(
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
    if getattr(architecture, "log_det", None) == "roulette" and training.objective != "elbo":
        raise UserError(
            f"Estimated log-determinants would raise the bound of objective = {training.objective!r} by "
            "their own noise: set objective=elbo, or another log_det."
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
            raise UserError(f"{where}: {key} = {value!r} is not what belongs there.")
    for name, table in values.get("on", {}).items():
        for key, value in table.items() if isinstance(table, dict) else {name: table}.items():
            if key not in (*SECTIONS, *PER_DATA) or not isinstance(value, dict):
                raise UserError(f"{where}: [on.{name}] takes tables: {', '.join(SECTIONS + PER_DATA)}.")
    for key, value in values.get("architecture", {}).items():
        if isinstance(value, dict) != (key in MODELS):
            raise UserError(f"{where}: [architecture.{key}]: {nearest(key, MODELS)}")
    return values


def _parse_value(text: str) -> Any:
    """A value as TOML would have it; what is no TOML value is a word."""
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

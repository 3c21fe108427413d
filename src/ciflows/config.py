"""A run's configuration: from presets, files and single settings to one frozen whole."""

from __future__ import annotations

__all__ = ["RunConfig", "presets", "resolve"]

import sys
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import Field

from ciflows.errors import UserError, nearest
from ciflows.models import MODELS, get_model
from ciflows.settings import Settings, parse_settings
from ciflows.training import EvaluationSettings, TrainingSettings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SECTIONS = ("architecture", "training", "evaluation")


class RunConfig(Settings):
    """All that decides a run's result."""

    data: str = Field(description="name of a built-in set, or path of a table")
    model: str = Field(description="name of a model")
    seed: int = Field(0, ge=0, description="seed of the parameters, the order of the data, the draws")
    architecture: dict[str, Any] = Field(description="settings of the model")
    training: TrainingSettings = Field(description="settings of training")
    evaluation: EvaluationSettings = Field(description="settings of the test")

    def to_toml(self) -> str:
        """The configuration as TOML, every setting written out."""
        return tomli_w.dumps(_without_none(self.model_dump()))

    @classmethod
    def from_toml(cls, text: str, where: str) -> RunConfig:
        """Read back what `to_toml` wrote."""
        values = _parse_toml(text, where)
        known = {key: values[key] for key in ("data", "model", "seed") if key in values}
        return resolve(**known, layers=[{key: values.get(key, {}) for key in SECTIONS}])


def presets() -> dict[str, str]:
    """The configurations that come with the package: name -> first line of its comment."""
    folder = resources.files("ciflows") / "presets"
    texts = {Path(f.name).stem: f.read_text() for f in folder.iterdir() if f.name.endswith(".toml")}
    return {name: text.splitlines()[0].lstrip("# ") for name, text in sorted(texts.items())}


def read_config(name: str) -> dict[str, Any]:
    """A configuration's values, from a preset's name or a TOML file's path."""
    if name in presets():
        text = (resources.files("ciflows") / "presets" / f"{name}.toml").read_text()
    elif Path(name).is_file():
        text = Path(name).read_text()
    else:
        raise UserError(f"There is no preset or file {name!r}. {nearest(name, presets())}")
    values = _parse_toml(text, name)
    for key in values:
        if key not in SECTIONS:
            raise UserError(f"{name}: no section [{key}]. {nearest(key, SECTIONS)}")
    return values


def read_overrides(model: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Turn `key=value` words into a configuration's values; a bare key finds its own section."""
    fields = {
        "architecture": get_model(model).settings.model_fields,
        "training": TrainingSettings.model_fields,
        "evaluation": EvaluationSettings.model_fields,
    }
    others = {key for other in MODELS.values() for key in other.settings.model_fields}
    values: dict[str, Any] = {}
    for word in overrides:
        key, equals, text = word.partition("=")
        section, _, name = key.rpartition(".")
        if not equals:
            raise UserError(f"--set {word}: write it as key=value.")
        places = [s for s in SECTIONS if name in fields[s] and section in ("", s)]
        if not places:
            if name in others and section in ("", "architecture"):
                continue  # another model's setting: `compare` sets it where it has a meaning
            known = [f for s in SECTIONS for f in fields[s]]
            raise UserError(f"--set {word}: no setting {key!r}. {nearest(name, known)}")
        values.setdefault(places[0], {})[name] = _parse_value(text)
    return values


def resolve(
    data: str = "",
    model: str = "",
    seed: int = 0,
    layers: Sequence[Mapping[str, Any]] = (),
) -> RunConfig:
    """Lay configurations over each other, the last one on top, and check the whole.

    A table inside [architecture] that bears a model's name counts for that model alone.
    """
    merged: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    kind = get_model(model).settings
    for layer in layers:
        for section in SECTIONS:
            values = dict(layer.get(section, {}))
            own = values.get(model, {})
            merged[section] |= {k: v for k, v in values.items() if k not in MODELS} | own
    architecture = parse_settings(kind, merged["architecture"], f"model {model}")
    training = parse_settings(TrainingSettings, merged["training"], "training")
    if getattr(architecture, "log_det", "exact") != "exact" and training.objective != "elbo":
        raise UserError(
            f"Estimated log-determinants would raise the bound of objective = {training.objective!r} by "
            "their own noise: set objective=elbo, or log_det=exact."
        )
    return RunConfig(
        data=data,
        model=model,
        seed=seed,
        architecture=architecture.model_dump(),
        training=training,
        evaluation=parse_settings(EvaluationSettings, merged["evaluation"], "evaluation"),
    )


def _parse_toml(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{where} is not valid TOML: {error}.") from None


def _parse_value(text: str) -> Any:
    """A value as TOML would have it; what is no TOML value is a word."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_none(value) if isinstance(value, Mapping) else value
        for key, value in values.items()
        if value is not None
    }

"""The plan of a search: the combinations of settings, and the order in which they are tried."""

from __future__ import annotations

__all__ = ["SAMPLERS", "Plan", "plan_search"]

import hashlib
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ciflows.errors import UserError, nearest
from ciflows.runs.config import RunConfig, place_settings
from ciflows.runs.experiments import Experiment

SAMPLERS = ("grid", "random", "tpe")
TRIALS = 20


@dataclass(frozen=True)
class Plan:
    """A search over an experiment's grid on one data set; `plan_search` makes one.

    Attributes:
        choices: The combinations of settings to choose from.
        overrides: Sections of a configuration that override all others.
        seed: Seed of all trials, and first seed of the test.
        sampler: One of `SAMPLERS`.
        trials: Number of combinations to try.
    """

    experiment: Experiment
    data: str
    choices: list[dict[str, Any]]
    overrides: Mapping[str, Any]
    seed: int
    sampler: str
    trials: int
    prune: bool

    @property
    def title(self) -> str:
        return f"{self.experiment.name} on {self.data}"

    @property
    def options(self) -> dict[str, dict[str, Any]]:
        """The values of each setting, by the text that Optuna stores for them."""
        keys = self.choices[0]
        return {key: {_word(choice[key]): choice[key] for choice in self.choices} for key in keys}

    @property
    def words(self) -> list[dict[str, str]]:
        """The choices, in the texts of `options`."""
        return [{key: _word(value) for key, value in choice.items()} for choice in self.choices]

    def queue(self) -> list[dict[str, str]]:
        """The trials in order; an empty one lets Optuna choose."""
        if self.sampler == "tpe":
            return [{}] * self.trials
        words = self.words
        if self.sampler == "random":
            random.Random(self.seed).shuffle(words)
        return words[: self.trials]

    def config(self, choice: Mapping[str, Any], seed: int | None = None) -> RunConfig:
        """The run configuration of a choice."""
        seed = self.seed if seed is None else seed
        return self.experiment.config(self.data, seed, choice, self.overrides)

    def identity(self) -> dict[str, Any]:
        """What must be equal for a search to continue in the same folder."""
        configs = "\n".join(self.config(choice).to_toml() for choice in self.choices)
        return {
            "experiment": self.experiment.name,
            "data set": self.data,
            "seed": self.seed,
            "sampler": self.sampler,
            "number of trials": self.trials,
            "pruning": self.prune,
            "settings": hashlib.sha256(configs.encode()).hexdigest(),
        }


def plan_search(
    experiment: Experiment,
    data: str | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
    seed: int = 0,
    sampler: str = "grid",
    trials: int | None = None,
    prune: bool | None = None,
) -> Plan:
    """Plan and check a search.

    Arguments:
        data: One of its data sets; optional if there is only one.
        overrides: Sections of a configuration that override all others, and leave the grid.
        sampler: grid tries every combination in order, random a random subset; tpe learns from earlier
            trials which to try next. None tries a combination twice.
        trials: Number of trials for random and tpe; default 20, at most the number of combinations.
        prune: Whether to stop trials that fall behind; by default random and tpe do.
    """
    if sampler not in SAMPLERS:
        raise UserError(f"There is no sampler {sampler!r}. {nearest(sampler, SAMPLERS)}")
    if trials is not None and (sampler == "grid" or trials < 1):
        raise UserError("The number of trials must be above 0, and needs the sampler random or tpe.")
    data = _only_data(experiment) if data is None else data
    overrides = overrides or {}
    choices = _choices(experiment, data, overrides)
    count = len(choices) if sampler == "grid" else min(trials or TRIALS, len(choices))
    plan = Plan(
        experiment=experiment,
        data=data,
        choices=choices,
        overrides=overrides,
        seed=seed,
        sampler=sampler,
        trials=count if choices[0] else 0,
        prune=sampler != "grid" if prune is None else prune,
    )
    for choice in choices:
        plan.config(choice)
    experiment.published(data)
    return plan


def _only_data(experiment: Experiment) -> str:
    if len(experiment.data) > 1:
        raise UserError(f"{experiment.name}: name one of its data sets: {', '.join(experiment.data)}.")
    return experiment.data[0]


def _choices(experiment: Experiment, data: str, overrides: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The grid's combinations, each once, without the settings that are overridden."""
    fixed = {key for key in experiment.grid(data) if _is_overridden(experiment.model, key, overrides)}
    choices = [
        {key: value for key, value in choice.items() if key not in fixed}
        for choice in experiment.candidates(data)
    ]
    return list({_word(choice): choice for choice in choices}.values())


def _is_overridden(model: str, key: str, overrides: Mapping[str, Any]) -> bool:
    placed = place_settings(model, {key: None}, where="grid:")
    return any(placed[section].keys() & overrides.get(section, {}) for section in placed)


def _word(value: Any) -> str:
    return json.dumps(value, default=str)

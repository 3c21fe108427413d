"""What a search is to do: which settings it may choose, in which order it tries them."""

from __future__ import annotations

__all__ = ["SAMPLERS", "Plan", "plan_search"]

import hashlib
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ciflows.config import RunConfig, place_settings
from ciflows.errors import UserError, nearest
from ciflows.experiments import Experiment

SAMPLERS = ("grid", "random", "tpe")
TRIALS = 20


@dataclass(frozen=True)
class Plan:
    """A search over an experiment's grid on one data set; `plan_search` makes one.

    Attributes:
        experiment: What is searched.
        data: One of its data sets.
        choices: The combinations of settings to choose from.
        overrides: Sections of a configuration that go on top of everything.
        seed: Seed of all trials, and the first seed of the chosen settings.
        sampler: One of `SAMPLERS`.
        trials: How many of the choices are tried.
        prune: Whether a trial that falls behind the others is ended.
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
        """The values of each setting, under words that Optuna can keep and a reader can read."""
        keys = self.choices[0]
        return {key: {_word(choice[key]): choice[key] for choice in self.choices} for key in keys}

    @property
    def words(self) -> list[dict[str, str]]:
        """The choices in the words of `options`."""
        return [{key: _word(value) for key, value in choice.items()} for choice in self.choices]

    def queue(self) -> list[dict[str, str]]:
        """The trials in their order; an empty one where Optuna is to choose."""
        if self.sampler == "tpe":
            return [{}] * self.trials
        words = self.words
        if self.sampler == "random":
            random.Random(self.seed).shuffle(words)
        return words[: self.trials]

    def config(self, choice: Mapping[str, Any], seed: int | None = None) -> RunConfig:
        """The configuration of a run with one of the choices."""
        seed = self.seed if seed is None else seed
        return self.experiment.config(self.data, seed, choice, self.overrides)

    def identity(self) -> dict[str, Any]:
        """What must be the same for a search to go on."""
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
    """Plan a search, or say what is wrong with it.

    Arguments:
        experiment: What to search.
        data: One of its data sets; may be left out where it has one only.
        overrides: Sections of a configuration that go on top; what they set is not searched over.
        seed: Seed of all trials.
        sampler: grid tries every combination in order, random some of them, tpe those that the trials
            before it speak for; none takes a combination twice.
        trials: How many, for random and tpe; 20 if not given, and at most as many as there are
            combinations.
        prune: Whether to end trials that fall behind; if not given, all but a grid's.
    """
    if sampler not in SAMPLERS:
        raise UserError(f"There is no sampler {sampler!r}. {nearest(sampler, SAMPLERS)}")
    if trials is not None and (sampler == "grid" or trials < 1):
        raise UserError("--trials takes a number above 0, with --sampler random or tpe.")
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
    """The grid's combinations, each once, without the settings that are given already."""
    fixed = {key for key in experiment.grid(data) if _is_given(experiment.model, key, overrides)}
    choices = [
        {key: value for key, value in choice.items() if key not in fixed}
        for choice in experiment.candidates(data)
    ]
    return list({_word(choice): choice for choice in choices}.values())


def _is_given(model: str, key: str, overrides: Mapping[str, Any]) -> bool:
    placed = place_settings(model, {key: None}, where="grid:")
    return any(placed[section].keys() & overrides.get(section, {}) for section in placed)


def _word(value: Any) -> str:
    return json.dumps(value, default=str)

"""Experiments: one row of a table over several data sets, with what the paper says of it.

An experiment is a TOML file that `--config` takes too. Beside the settings of a run, which hold for all
data sets, a table [on.NAME] has those for one of them; in it, `grid` lists values to search over, and
`paper` the published figures:

    model = "maf"

    [training]
    learning_rate = 1e-3

    [on.power]
    architecture = { hidden = [200, 200] }
    grid = { layers = [5, 10, 20] }
    paper = { log_prob = 0.19, std_error = 0.02, parameters = 440_240 }
"""

from __future__ import annotations

__all__ = ["Experiment", "Published", "read_experiment"]

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from ciflows.errors import UserError, nearest
from ciflows.runs.config import RunConfig, place_settings, read_config, resolve
from ciflows.settings import Settings, parse_settings


class Published(Settings):
    """What the paper, or its authors' code, says of an experiment on one data set."""

    log_prob: float | None = Field(None, description="mean test log-likelihood over seeds, in nats")
    std_error: float | None = Field(None, description="its standard error over seeds")
    bits_per_dim: float | None = Field(
        None, description="mean test bits per dimension over seeds, of images"
    )
    bits_per_dim_std_error: float | None = Field(None, description="its standard error over seeds")
    parameters: int | None = Field(None, description="number of parameters of the settings as they are")


@dataclass(frozen=True)
class Experiment:
    """A model with its settings on several data sets."""

    name: str
    model: str
    values: Mapping[str, Any]

    @property
    def data(self) -> list[str]:
        """The data sets that it has settings for."""
        return list(self.values["on"])

    def published(self, data: str) -> Published:
        """The published figures for a data set."""
        return parse_settings(Published, self._on(data).get("paper", {}), f"{self.name}, paper")

    def grid(self, data: str) -> dict[str, list[Any]]:
        """The settings to search over, each with its values."""
        grid: dict[str, list[Any]] = self._on(data).get("grid", {})
        for key, values in grid.items():
            if not isinstance(values, list) or not values:
                raise UserError(
                    f"{self.name}: grid on {data}: {key} = {values!r} is not a list of values."
                )
        return grid

    def candidates(self, data: str) -> list[dict[str, Any]]:
        """All combinations of the grid's values; one empty choice where there is no grid."""
        grid = self.grid(data)
        return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]

    def config(
        self,
        data: str,
        seed: int = 0,
        choice: Mapping[str, Any] | None = None,
        overrides: Mapping[str, Any] | None = None,
    ) -> RunConfig:
        """The configuration of one run.

        Arguments:
            choice: Values of settings, such as one of the grid's combinations.
            overrides: Sections of a configuration that go on top of everything.
        """
        self._on(data)
        chosen = place_settings(self.model, choice or {}, where=f"{self.name}, grid:")
        return resolve(data, self.model, seed, [self.values, chosen, overrides or {}])

    def _on(self, data: str) -> dict[str, Any]:
        if data not in self.values["on"]:
            raise UserError(f"{self.name} has nothing on {data!r}. {nearest(data, self.data)}")
        table: dict[str, Any] = self.values["on"][data]
        return table


def read_experiment(path: Path | str) -> Experiment:
    """Read an experiment's file, or say what is missing in it.

    Arguments:
        path: A TOML file with a model and at least one table [on.NAME].
    """
    values = read_config(str(path))
    if "model" not in values or not values.get("on"):
        raise UserError(f"{path} is no experiment: it needs a model and a table [on.NAME] at least.")
    return Experiment(Path(path).stem, values["model"], values)

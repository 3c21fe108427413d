"""Settings of training and evaluation, one sentence each."""

from __future__ import annotations

__all__ = ["EvaluationSettings", "TrainingSettings", "suited_to_rows"]

import math
from typing import Literal

from pydantic import Field, field_validator

from ciflows.core.objectives import OBJECTIVES, Objective
from ciflows.errors import nearest
from ciflows.settings import Seed, Settings

LEAST_RATE = 0.001
VALIDATE_PASSES, LEAST_BETWEEN = 5, 10


class TrainingSettings(Settings):
    """How a flow is trained."""

    steps: int = Field(10_000, ge=1, description="optimiser steps")
    training_points: int | None = Field(
        None, ge=1, description="points to draw for training on a built-in 2-D set; 10,000 if none"
    )
    batch_size: int = Field(1000, ge=1, description="points in one step")
    flips: bool = Field(
        False, description="show each image mirrored left to right, in half of the passes by chance"
    )
    optimizer: Literal["adam", "muon", "auto"] = Field(
        "adam",
        description="adam; muon for matrices and convolutions (from 16 × 16), adam for the rest; auto: "
        "muon unless adam is far ahead early on, where a large table trains in stages; adam elsewhere",
    )
    muon_step: float = Field(
        0.2,
        gt=0,
        description="size of Muon's steps, in units of the learning rate; Adam's are about 0.2",
    )
    learning_rate: float = Field(
        4e-3, ge=0, lt=10, description="largest learning rate; 0 sets it by the number of training rows"
    )
    schedule: Literal["cosine", "constant"] = Field(
        "cosine", description="the learning rate falls to 0 along a cosine, or stays constant"
    )
    warm_up: int = Field(0, ge=0, description="steps over which the learning rate rises at the start")
    weight_decay: float = Field(
        0.0, ge=0, description="share of each weight removed per step, times the learning rate"
    )
    clip: float = Field(1.0, gt=0, description="largest norm of the gradient; inf for no clipping")
    staged: bool = Field(
        False,
        description="train the flow without an index first, add the index, keep it if validation gains",
    )
    objective: str = Field(
        "dreg", description="elbo, iwae or dreg; for a plain flow all are its log-likelihood"
    )
    draws: int = Field(5, ge=1, description="draws of the index for iwae and dreg; elbo takes one")
    power_iterations: int = Field(
        1, ge=0, description="power iterations for the spectral norms after each step"
    )
    validate_every: int = Field(500, ge=1, description="steps between validations")
    validation_samples: int = Field(20, ge=1, description="draws for each validation point")
    validation_points: int = Field(
        10_000, ge=1, description="validation points to use, the same each time"
    )
    keep: Literal["best", "last"] = Field(
        "best", description="final weights: the best in validation, or the last"
    )
    average: float = Field(
        0.0, ge=0, lt=1, description="validate and keep weights averaged with this decay; 0 for none"
    )
    patience: int | None = Field(
        None, ge=1, description="stop after this many validations without improvement; never if none"
    )
    checkpoint_seconds: float = Field(
        30.0, ge=0, description="seconds between checkpoints: about the most that a crash can cost"
    )
    precision: Literal["float32", "float64", "tf32", "mixed"] = Field(
        "tf32",
        description="arithmetic; on a GPU tf32 trains with shorter products, mixed also has ResNets of "
        "images in bfloat16; tests and log-determinants keep float32",
    )
    max_minutes: float | None = Field(
        None, gt=0, description="longest time to train, in minutes; the schedule is fitted to it"
    )

    @field_validator("objective")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in OBJECTIVES:
            raise ValueError(f"there is no objective {name!r}. {nearest(name, OBJECTIVES)}")
        return name

    @property
    def several_draws(self) -> bool:
        """Whether the objective takes several draws, and so needs exact log-determinants."""
        return bool(OBJECTIVES[self.objective].several_draws)

    def make_objective(self) -> Objective:
        """The objective, with its number of draws."""
        kind = OBJECTIVES[self.objective]
        return kind(self.draws) if self.several_draws else kind()


def suited_to_rows(settings: TrainingSettings, rows: int) -> TrainingSettings:
    """Settings whose learning rate is 0, with one that suits the number of training rows.

        learning_rate = 0.001 √(rows / 500), from 0.001 to 0.005

    A flow overfits few rows within a few passes: its steps are small there, and validations come at
    least every five passes. With many rows steps of 0.001 only waste time.

    Example:
        >>> suited_to_rows(TrainingSettings(learning_rate=0, batch_size=256), 8000).learning_rate
        0.004
    """
    if settings.learning_rate > 0:
        return settings
    rate = LEAST_RATE * min(5.0, max(1.0, math.sqrt(rows / 500)))
    passes = VALIDATE_PASSES * max(1, rows // settings.batch_size)
    every = min(settings.validate_every, max(LEAST_BETWEEN, passes))
    return settings.model_copy(update={"learning_rate": rate, "validate_every": every})


class EvaluationSettings(Settings):
    """How a trained flow is tested."""

    samples: int = Field(100, ge=1, description="draws of the index for each test point")
    points: int | None = Field(
        None, ge=1, description="test points to use, evenly spread over all; all if none"
    )
    seed: Seed = Field(0, description="seed of the draws; write it as evaluation.seed")

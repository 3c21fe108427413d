"""Settings of training and evaluation, a sentence each."""

from __future__ import annotations

__all__ = ["EvaluationSettings", "TrainingSettings"]

from typing import Literal

from pydantic import Field

from ciflows.objectives import ELBO, IWAE, DReG, Objective
from ciflows.settings import Seed, Settings


class TrainingSettings(Settings):
    """How a flow is trained."""

    steps: int = Field(10_000, ge=1, description="optimiser steps")
    training_points: int | None = Field(
        None, ge=1, description="points to draw for training on a built-in 2-D set; its 10,000 if none"
    )
    batch_size: int = Field(1000, ge=1, description="points in one step")
    optimizer: Literal["adam", "muon"] = Field(
        "adam", description="what takes the steps: adam, or muon for matrices (from 16 × 16) beside it"
    )
    learning_rate: float = Field(4e-3, gt=0, lt=10, description="the optimiser's largest step size")
    schedule: Literal["cosine", "constant"] = Field(
        "cosine", description="how the step size goes: down to 0 along a cosine, or not at all"
    )
    warm_up: int = Field(0, ge=0, description="steps over which the step size rises at the start")
    weight_decay: float = Field(
        0.0, ge=0, description="share of each weight taken off per step, times the step size"
    )
    clip: float = Field(1.0, gt=0, description="largest norm of the whole gradient; inf for none")
    objective: Literal["elbo", "iwae", "dreg"] = Field(
        "dreg", description="what is maximised; for a plain flow all three are its log-likelihood"
    )
    draws: int = Field(5, ge=1, description="draws of the index for iwae and dreg; elbo takes one")
    power_iterations: int = Field(
        1, ge=0, description="power iterations for the spectral norms after each step"
    )
    validate_every: int = Field(500, ge=1, description="steps between validations")
    validation_samples: int = Field(20, ge=1, description="draws for each validation point")
    validation_points: int = Field(
        10_000, ge=1, description="validation points looked at, the same ones each time"
    )
    keep: Literal["best", "last"] = Field(
        "best", description="which weights to end with: those best in validation, or the last ones"
    )
    average: float = Field(
        0.0, ge=0, lt=1, description="validate and keep weights averaged with this decay; 0 for none"
    )
    patience: int | None = Field(
        None, ge=1, description="stop after so many validations without a better one; or never"
    )
    checkpoint_seconds: float = Field(
        30.0, ge=0, description="seconds between checkpoints: about the most that a crash can cost"
    )
    precision: Literal["float32", "float64", "tf32", "mixed"] = Field(
        "tf32",
        description="arithmetic; tf32 trains with products of fewer bits on a GPU, mixed has ResNets of "
        "images in bfloat16 too; both test with all bits, and have log-determinants in float32",
    )
    max_minutes: float | None = Field(
        None, gt=0, description="train for so many minutes at most, with the schedule fitted to them"
    )

    def make_objective(self) -> Objective:
        if self.objective == "elbo":
            return ELBO()
        return IWAE(self.draws) if self.objective == "iwae" else DReG(self.draws)


class EvaluationSettings(Settings):
    """How a trained flow is judged on the test data."""

    samples: int = Field(100, ge=1, description="draws of the index for each test point")
    points: int | None = Field(
        None, ge=1, description="test points looked at, evenly spread over them; all if not given"
    )
    seed: Seed = Field(0, description="seed of the draws; write it as evaluation.seed")

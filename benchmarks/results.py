"""The result of a benchmark, and its file."""

from __future__ import annotations

__all__ = ["WORKS", "Grown", "Machine", "Result", "Row", "Side", "Timing", "read_result"]

import statistics
from pathlib import Path
from typing import NamedTuple

from pydantic import Field, ValidationError

from ciflows.errors import UserError
from ciflows.files import write_text
from ciflows.settings import Settings

WORKS = {"step": "training step", "log_prob": "log-likelihood", "sample": "sampling"}


class Spread(NamedTuple):
    """A median with its quartiles."""

    median: float
    low: float
    high: float


def spread(values: list[float]) -> Spread:
    """The median and the quartiles of some measurements."""
    if len(values) < 2:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)


class Timing(Settings):
    """Repeated measurements of one operation."""

    ms: list[float] = Field(description="milliseconds of each repetition")
    mib: float | None = Field(None, description="peak MiB beyond what was allocated before")
    gflop: float | None = Field(None, description="10⁹ operations in the matrix products of one call")


class Side(Settings):
    """A model of one library."""

    name: str = Field(description="ours, plain (ours without an index), a library, or authors")
    parameters: int
    start_s: float = Field(description="seconds from building the model to the end of its first step")
    torch: str
    works: dict[str, Timing] = Field(description="by work: step, log_prob, sample")
    round_trip: float | None = Field(None, description="largest error of one layer's inverse")


class Row(Settings):
    """A case with all its sides, which took turns."""

    case: str
    model: str
    features: int
    batch: int
    draws: int
    gflops: list[float] = Field(description="10⁹ operations per second of matrix products")
    sides: list[Side]

    def side(self, name: str) -> Side | None:
        return next((side for side in self.sides if side.name == name), None)

    def ratios(self, name: str, work: str) -> list[float]:
        """Time of another side over ours, for each repetition."""
        ours, other = self.side("ours"), self.side(name)
        if ours is None or other is None or work not in ours.works or work not in other.works:
            return []
        return [b / a for a, b in zip(ours.works[work].ms, other.works[work].ms, strict=True)]

    def over_products(self, work: str) -> float | None:
        """Time over that of the matrix products alone, at the rate measured in between."""
        ours = self.side("ours")
        timing = None if ours is None else ours.works.get(work)
        if timing is None or not timing.gflop:
            return None
        alone = 1e3 * timing.gflop / statistics.median(self.gflops)
        return statistics.median(timing.ms) / alone


class Grown(Settings):
    """The cost of one operation at one value of a size."""

    model: str
    size: str
    value: int
    work: str
    timing: Timing


class Machine(Settings):
    """The machine of a benchmark."""

    device: str
    kind: str = Field(description="cpu or cuda")
    threads: int
    cores: int
    system: str
    python: str
    torch: str
    ciflows: str
    date: str


class Result(Settings):
    """A benchmark, complete or interrupted."""

    machine: Machine
    points: int = Field(description="points in a likelihood and in a sample")
    rows: list[Row]
    growth: list[Grown]
    notes: list[str] = Field(description="what failed, and why")

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, self.model_dump_json(indent=1) + "\n")


def read_result(path: Path) -> Result:
    """Read what `Result.write` wrote."""
    try:
        return Result.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"There is no file {path}.") from None
    except ValidationError:
        raise UserError(f"{path} is not a benchmark's result, or of another version.") from None

"""Scores and samples by Ray Data: actors, each of which holds the model once, on all of its machines."""

from __future__ import annotations

__all__ = ["make_parts_with_ray", "score_dataset", "start_ray"]

import logging
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ciflows.errors import UserError, system_words
from ciflows.optional import polars as pl
from ciflows.runs.parts import Job, Part, make_part
from ciflows.runs.run import Run, load_run
from ciflows.runs.score import ScoreSettings, check_key, score_frame
from ciflows.tables.faults import check_types
from ciflows.tables.schema import check_columns

if TYPE_CHECKING:
    import pyarrow as pa
    import ray.data

BATCH = 10_000
ANSWER_SECONDS = 10.0


class PartMaker:
    """Makes parts of a job, in a process of Ray.

    Arguments:
        job: The job.
    """

    def __init__(self, job: Job) -> None:
        self.job, self.run = job, _load(job.run)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        errors = [self._make(number) for number in batch["number"]]
        return {"number": batch["number"], "error": errors}

    def _make(self, number: int) -> str:
        try:
            make_part(self.run, self.job, self.job.parts[number])
        except UserError as error:  # as text: what the user did wrong, no process may try again
            return str(error)
        except OSError as error:  # nor where a disk is full
            return system_words(error)
        return ""


class BatchScorer:
    """Scores batches of a dataset, in a process of Ray.

    Arguments:
        run: The run folder.
        settings: How to score.
        key: The columns to carry over; all of them if None.
    """

    def __init__(self, run: str, settings: ScoreSettings, key: Sequence[str] | None) -> None:
        self.run, self.settings, self.key = _load(run), settings, key

    def __call__(self, batch: pa.Table) -> pa.Table:
        frame = pl.DataFrame(pl.from_arrow(batch))
        scores = score_frame(self.run, frame, self.settings)
        kept = frame.drop(scores.columns, strict=False) if self.key is None else frame.select(self.key)
        whole = pl.concat([kept, scores], how="horizontal")
        return (whole.drop_nulls("log_prob") if self.settings.on_bad_row == "drop" else whole).to_arrow()


def make_parts_with_ray(
    job: Job, parts: Sequence[Part], workers: int | None = None, quiet: bool = False
) -> None:
    """Make parts of a job with Ray; a process that dies is started again, and its part made again.

    Arguments:
        job: The job.
        parts: Those of its parts that are to be made.
        workers: How many processes; one for each core, or for each GPU, if None.
        quiet: Whether Ray shows no progress.
    """
    import ray

    ray.data.DataContext.get_current().enable_progress_bars = not quiet
    if quiet:
        logging.getLogger("ray.data").setLevel(logging.ERROR)
    numbers = [{"number": part.number} for part in parts]
    made = ray.data.from_items(numbers, override_num_blocks=len(parts)).map_batches(
        PartMaker, fn_constructor_args=(job,), batch_size=1, **_pool(workers, len(parts))
    )
    for row in made.iter_rows():
        if row["error"]:
            raise UserError(row["error"])


def score_dataset(
    run: Run,
    dataset: ray.data.Dataset,
    settings: ScoreSettings,
    key: Sequence[str] | None = None,
    workers: int | None = None,
) -> ray.data.Dataset:
    """The rows of a dataset with their scores, as a dataset that Ray computes when it is used.

    Arguments:
        run: The run.
        dataset: A dataset whose columns are checked now.
        settings: How to score.
        key: The columns to carry over; all of them if None.
        workers: How many processes, fewer than there are cores; as Ray sees fit if None.
    """
    import ray.data

    if run.schema is None:
        raise UserError("Only a run over a table scores a dataset.")
    if not isinstance(dataset, ray.data.Dataset):
        raise UserError(f"Expected a ray.data.Dataset; got a {type(dataset).__name__}. Try run.scores.")
    key = [key] if isinstance(key, str) else key
    check_key(key or [])
    schema = dataset.schema()
    if schema is not None:
        head = pl.DataFrame(pl.from_arrow(schema.base_schema.empty_table()))
        check_columns(head, key or [])
        check_types(run.schema, head, settings.integrate)
    arguments = (str(run.path.absolute()), settings, key)
    return dataset.map_batches(
        BatchScorer,
        fn_constructor_args=arguments,
        batch_size=BATCH,
        batch_format="pyarrow",
        **_pool(workers),
    )


def _load(folder: str) -> Run:
    torch.set_num_threads(1)
    return load_run(Path(folder), "auto")


def start_ray(address: str | None, workers: int | None) -> None:
    """Connect to a cluster, or start one on this machine, unless that is done already.

    Arguments:
        address: The cluster, such as auto or ray://host:10001; this machine alone if None.
        workers: Cores of this machine that Ray may use; all if None.
    """
    import ray

    if ray.is_initialized():
        return
    if address is None:
        # without "local" Ray would join a cluster that happens to run here
        ray.init("local", num_cpus=workers, include_dashboard=False, logging_level=logging.WARNING)
        return
    try:
        _check_answer(address)
        ray.init(address=address, logging_level=logging.WARNING)
    except (OSError, ValueError) as error:
        raise UserError(f"No Ray cluster answers at {address}: start one, or correct it.") from error


def _check_answer(address: str) -> None:
    """Knock at host:port: Ray itself would try for ten minutes or more."""
    host, colon, port = address.rpartition(":")
    if colon and "://" not in address:
        socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS).close()


def _pool(workers: int | None, most: int | None = None) -> dict[str, Any]:
    """How many actors, and what each needs: a GPU where there are some, else a core.

    Arguments:
        workers: How many; as many as there are GPUs or cores if None.
        most: The most that have something to do. If None, others read and write beside them, and need
            cores too: then there may be fewer.
    """
    import ray
    from ray.data import ActorPoolStrategy

    has = ray.cluster_resources() if ray.is_initialized() else {}
    kind = "GPU" if has.get("GPU") else "CPU"
    count = workers or max(1, int(has.get(kind, 1)))
    needs = {"num_gpus": 1} if kind == "GPU" else {"num_cpus": 1}
    if most is None and has.get("CPU") == 1:
        needs["num_cpus"] = 0  # or the only core would wait for data that nobody reads
    if most is None and workers is None:
        return {"compute": ActorPoolStrategy(min_size=1, max_size=count), **needs}
    return {"compute": ActorPoolStrategy(size=count if most is None else min(count, most)), **needs}

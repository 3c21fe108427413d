"""Ray: the same bits as one process, whoever makes the parts and whatever dies."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import polars as pl
import pytest
from test_parts import files, read, run, spoil
from test_score import people

from ciflows.errors import UserError
from ciflows.runs import cluster
from ciflows.runs.engines import Engine, run_job
from ciflows.runs.parts import plan_scores
from ciflows.runs.run import Run
from ciflows.runs.score import ScoreSettings, score_frame

__all__ = ["files", "run"]
ray = pytest.importorskip("ray", reason='ray is not installed: pip install "ciflows[ray]"')
# Ray's own modules warn of what is to change in them
pytestmark = pytest.mark.filterwarnings(
    "ignore::Warning:ray.*", "ignore::ResourceWarning", "ignore:.*standard error above"
)
WORKER = "ray::MapWorker"


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield
    ray.shutdown()


def workers() -> list[int]:
    """The processes of this test's own Ray that hold a model."""
    mine = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            title, parent = (folder / "cmdline").read_text(), _parent(int(folder.name))
            if title.startswith(WORKER) and _parent(parent) == os.getpid():
                mine.append(int(folder.name))
        except (OSError, StopIteration):
            continue  # it has ended meanwhile
    return mine


def _parent(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("PPid:")).split()[1])


def test_two_workers_score_and_sample_as_one_process_does(
    files: pl.DataFrame, run: Run, tmp_path: Path, command: Callable[..., str]
) -> None:
    spoil(files[:150]).write_parquet(tmp_path / "big" / "0.parquet")
    words = ["score", "run", "big", "--std-error", "0.3", "--max-samples", "40"]
    one = command(*words, "--out", "one")
    two = command(*words, "--out", "two", "--engine", "ray", "--workers", "2")
    assert "3 rows could not be scored" in one
    assert "3 rows could not be scored" in two
    assert read(tmp_path / "one").equals(read(tmp_path / "two"))
    command("sample", "run", "-n", "250", "--out", "samples")
    command("sample", "run", "-n", "250", "--out", "ray-samples", "--engine", "ray", "--workers", "1")
    assert read(tmp_path / "samples").equals(read(tmp_path / "ray-samples"))
    ray_alone = ["--engine", "ray", "--workers", "1"]
    fail = command(*words, "--out", "x", *ray_alone, "--on-bad-row", "fail", code=1)
    assert "0.parquet: missing or infinite values in height (2)" in fail


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds processes by /proc")
@pytest.mark.usefixtures("files")
def test_a_worker_that_is_killed_changes_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Console

    monkeypatch.chdir(tmp_path)
    settings, quiet = ScoreSettings(samples=800), Console(quiet=True)
    killed: list[int] = []

    def kill() -> None:
        deadline = time.monotonic() + 600
        while not list(tmp_path.glob("ray/part-*")) and time.monotonic() < deadline:
            time.sleep(0.01)
        for pid in workers()[:1]:
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    killer = threading.Thread(target=kill)
    killer.start()
    job = plan_scores(run, "big", tmp_path / "ray", settings, ("id",))
    made = run_job(run, job, Engine("ray", workers=1), False, quiet)
    killer.join()
    assert len(killed) == 1
    assert made.rows == 400
    expected = plan_scores(run, "big", tmp_path / "local", settings, ("id",))
    run_job(run, expected, Engine(), False, quiet)
    assert read(tmp_path / "ray").equals(read(tmp_path / "local"))


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("address", ["127.0.0.1:1", "localhost:none"])
def test_a_cluster_that_does_not_answer_is_told_before_anything_is_written(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Callable[..., str]
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    words = ["score", "run", "big", "--out", "x", "--engine", "ray", "--ray-address", address]
    assert f"No Ray cluster answers at {address}" in command(*words, code=1)
    assert not (tmp_path / "x").exists()


def test_without_an_address_no_other_cluster_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda address=None, **_: asked.append(address))
    cluster.start_ray(None, 1)
    assert asked == ["local"]


@pytest.mark.usefixtures("files")
def test_a_full_disk_is_told_in_a_sentence(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "part-000000.parquet")

    monkeypatch.setattr(cluster, "make_part", fail)
    job = plan_scores(run, str(tmp_path / "big"), tmp_path / "out", ScoreSettings(), ())
    (error,) = cluster.PartMaker(job)({"number": [0]})["error"]
    assert error == "part-000000.parquet: No space left on device. What was written before is kept."


def test_a_dataset_is_scored(run: Run, tmp_path: Path) -> None:
    table = spoil(people(200, seed=4))
    dataset = ray.data.from_arrow([table[:70].to_arrow(), table[70:].to_arrow()])
    with pytest.raises(UserError, match="lacks the column"):
        run.score_dataset(dataset.drop_columns(["height"]))
    with pytest.raises(UserError, match=r"Expected a ray.data.Dataset; got a DataFrame"):
        run.score_dataset(table)
    assert run.score_dataset(dataset, samples=6, workers=1, key="id").count() == 200
    scored = run.score_dataset(dataset, samples=6, workers=1).to_pandas()
    expected = score_frame(run, table, ScoreSettings(6))
    assert pl.DataFrame(scored[["id", *expected.columns]]).sort("id").drop("id").equals(expected)


def test_the_example_of_a_dataset(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "docs" / "examples"))
    import score_ray

    table = spoil(people(200, seed=4))
    table.write_parquet(tmp_path / "people.parquet")
    score_ray.score_files(str(run.path), str(tmp_path / "people.parquet"), str(tmp_path / "out"))
    scores = score_frame(run, table, ScoreSettings(std_error=0.1))
    expected = pl.concat([table[["id"]], scores], how="horizontal")
    assert read(tmp_path / "out").sort("id").equals(expected)

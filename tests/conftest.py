"""What every test starts from: one thread a process, so that `pytest -n` does not fight over cores,
and the same random numbers whatever ran before."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ciflows import cli

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def _warn_always() -> Iterator[None]:
    """Torch warns of memory that it may not write to, but only once a process."""
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


@pytest.fixture
def data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data folder and an empty cache, in place of the user's."""
    folder = tmp_path / "data"
    folder.mkdir()
    monkeypatch.setenv("CIFLOWS_DATA", str(folder))
    monkeypatch.setenv("CIFLOWS_CACHE", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Runs the command in this process and an empty folder; what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def main(*words: str, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["ciflows", *words])
        with pytest.raises(SystemExit) as end:
            cli.main()
        printed = capsys.readouterr()
        assert (end.value.code or 0) == code, printed
        return printed.out + printed.err

    return main

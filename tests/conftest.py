"""What every test starts from: one thread a process, so that `pytest -n` does not fight over cores,
and the same random numbers whatever ran before."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)

"""The rows of each step: every row once an epoch, and images mirrored on request."""

import pytest
import torch
from torch import Tensor

import ciflows
from ciflows.core.flow import Flow
from ciflows.core.rows import Rows
from ciflows.errors import UserError
from ciflows.layers import Squeeze
from ciflows.training import TrainingSettings, fit_flow
from ciflows.training.batches import Batches

ALL = slice(0, 4)


def images(rows: int) -> Rows:
    """Images of one column of 1 and one of 2, each with its number in the corner."""
    x = torch.zeros(rows, 1, 2, 2)
    x[:, :, :, 0], x[:, :, :, 1] = 1, 2
    x[:, 0, 0, :] += 10 * torch.arange(rows)[:, None]
    return Rows(x)


def flow() -> Flow:
    return Flow([Squeeze((1, 2, 2))])


def epoch(batches: Batches, number: int, steps: int = 10) -> Tensor:
    return torch.cat([batches.of_step(number * steps + step).x for step in range(steps)])


def test_each_epoch_has_every_row_once_in_another_order() -> None:
    rows = images(40)
    batches = Batches(rows, flow(), 4, ALL, seed=0)
    first, second = epoch(batches, 0), epoch(batches, 1)
    for one in (first, second):
        assert torch.equal(one[one[:, 0, 0, 0].argsort()], rows.x)
    assert not torch.equal(first, second)


def test_flips_mirror_half_of_the_images_and_others_in_each_epoch() -> None:
    rows = images(400)
    batches = Batches(rows, flow(), 4, ALL, seed=0, flips=True)
    seen = []
    for number in range(2):
        x = epoch(batches, number, 100)
        x = x[x[:, 0, 0, 0].div(10).floor().argsort()]
        mirrored = x[:, 0, 1, 0] == 2
        assert torch.equal(torch.where(mirrored[:, None, None, None], x.flip(-1), x), rows.x)
        assert 150 < mirrored.sum() < 250
        seen.append(mirrored)
    assert 150 < (seen[0] != seen[1]).sum() < 250


def test_processes_share_the_mirrored_batch_of_one() -> None:
    rows = images(40)
    whole = Batches(rows, flow(), 4, ALL, seed=3, flips=True).of_step(11).x
    shares = [Batches(rows, flow(), 4, slice(k, k + 2), seed=3, flips=True) for k in (0, 2)]
    assert torch.equal(torch.cat([share.of_step(11).x for share in shares]), whole)


def test_tables_cannot_be_mirrored() -> None:
    plain, x = ciflows.build_model("maf", features=2, layers=1, hidden=[8]), torch.randn(20, 2)
    with pytest.raises(UserError, match="flips = true mirrors images"):
        fit_flow(plain, x, x, TrainingSettings(steps=2, flips=True))

"""Small networks as one GPU kernel forward and three backward: a chain of maps with tangents.

    h₁ = W₁ a(x) + b₁        hₗ = Wₗ a(hₗ₋₁) + bₗ         y = Wₙ a(hₙ₋₁) + bₙ
    t₁ = W₁ (a'(x) ⊙ v)      tₗ = Wₗ (a'(hₗ₋₁) ⊙ tₗ₋₁)     for each direction v

Layer by layer, networks of this size are bound by kernel launches. Here a program takes a tile of rows
through the whole chain and waits for no other. A point has S rows in a tile: its value first, then S - 1
of its tangents, so that one product with a weight serves them all. More tangents are taken in groups,
each with the value again. The gradient of the value is linear in the tangents' part of it, so that in
the backward pass each group has its own share; the shares are added at the end, in a fixed order.

This computes `networks.LipschitzMLP` (a = LipSwish), `networks.MLP` (tanh) and `networks.MaskedMLP`
(ReLU); the last two have no tangents, and no activation before W₁.
"""

# mypy: ignore-errors

from __future__ import annotations

__all__ = ["chain"]

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ciflows.speed.gpu import operation
from ciflows.speed.gpu_chain_kernels import backward_kernel, forward_kernel, middle_kernel, sum_kernel

SLOTS = 16  # rows of one point in a tile, at most
FEW_ROWS = 4096  # up to here the smallest tiles keep more of a GPU busy
MANY_ROWS = 65_536  # from here on the widest do
HOPPER = 9  # the compute capability with products of 64 rows, twice as quick; others have not been tried
PART = 64  # hidden units that are held together
SPLITS = 16  # programs that share the sum over rows of one weight's gradient
CHUNK = 64  # rows that are multiplied together in that sum
SUMMED = 32  # columns of a program that adds parts


def chain(
    x: Tensor,
    directions: Tensor | None,
    first: Tensor,
    middle: Tensor,
    last: Tensor,
    biases: Tensor,
    last_bias: Tensor,
    activation: str,
    beta: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """y (*, outputs) and the tangents (k, *, outputs), differentiable in all but the directions.

    Arguments:
        x: Inputs (*, inputs).
        directions: The directions (k, *, inputs) of the tangents; none if None.
        first: W₁ (H, inputs).
        middle: W₂, ..., Wₙ₋₁ (n - 2, H, H).
        last: Wₙ (outputs, H).
        biases: b₁, ..., bₙ₋₁ (n - 1, H).
        last_bias: bₙ (outputs,).
        activation: What a is: "lipswish", before each map; "tanh" or "relu", between maps.
        beta: The β of each LipSwish (n,).
    """
    leading = x.shape[:-1]
    rows = x.reshape(-1, x.shape[-1])
    slots = x.new_zeros(0, *rows.shape) if directions is None else directions.flatten(1, -2)
    beta = x.new_zeros(0) if beta is None else beta
    save = torch.is_grad_enabled()
    y, tangents, _ = _chain(rows, slots, first, middle, last, biases, last_bias, beta, activation, save)
    return y.reshape(*leading, -1), tangents.reshape(len(slots), *leading, y.shape[-1])


@dataclass(frozen=True)
class Plan:
    """How a chain is cut up.

    Attributes:
        points: Points in a tile.
        slots: Rows of a point in a tile.
        tiles: Tiles of points.
        groups: Groups of tangents.
        sizes: Hidden units, inputs and outputs; and in how many parts of which size the first are held,
            and the others, padded to what products take. Units that are not there have no weights, so
            that their values stay 0.
    """

    points: int
    slots: int
    tiles: int
    groups: int
    sizes: dict[str, int]

    @staticmethod
    def of(x: Tensor, directions: Tensor, first: Tensor, last: Tensor, save: bool = True) -> Plan:
        n, k = len(x), len(directions)
        slots = min(SLOTS, triton.next_power_of_2(1 + k))
        groups = triton.cdiv(k, slots - 1) if k else 1
        wide = k > 0 and not save and _has_wide_products(x)
        rows = max(slots, _tile_rows(n * slots * groups, wide))
        true = {"HIDDEN": len(first), "INPUTS": first.shape[1], "OUTPUTS": len(last)}
        hidden, inputs, outputs = (max(16, triton.next_power_of_2(size)) for size in true.values())
        part = min(PART, hidden)
        sizes = true | {"N": hidden // part, "B": part, "P": inputs, "Q": outputs}
        return Plan(rows // slots, slots, triton.cdiv(n, rows // slots), groups, sizes)

    @property
    def grid(self) -> tuple[int, int]:
        return self.tiles, self.groups

    @property
    def programs(self) -> int:
        return self.tiles * self.groups

    @property
    def rows(self) -> int:
        return self.points * self.slots

    @property
    def hidden(self) -> int:
        return self.sizes["N"] * self.sizes["B"]

    def cuts(self, maps: int) -> list[int]:
        """Sizes of the gradients in a row: of the middle, first and last maps, the biases, beta."""
        hidden, inputs, outputs = (self.sizes[name] for name in ("HIDDEN", "INPUTS", "OUTPUTS"))
        middle, first, last = maps * hidden * hidden, hidden * inputs, outputs * hidden
        return [middle, first, last, (maps + 1) * hidden, outputs, maps + 2]


def _tile_rows(rows: int, wide: bool) -> int:
    """Rows of a tile: where there are few, the fewest that products take; where very many, 64.

    Those are for a GPU that has products of so many, and for a forward pass alone (`wide`): what is
    saved for the backward pass has the tiles that suit it.
    """
    if rows <= FEW_ROWS:
        return 16
    return 64 if wide and rows > MANY_ROWS else 32


def _has_wide_products(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.get_device_capability(x.device)[0] == HOPPER


def _sum(one: Tensor, other: Tensor) -> Tensor:
    """The sums of two tensors over their first dimension, in one row."""
    columns = [part[0].numel() for part in (one, other)]
    total = one.new_empty(sum(columns))
    blocks = sum(triton.cdiv(size, SUMMED) for size in columns)
    sum_kernel[(blocks,)](one, other, total, len(one), len(other), *columns, R=64, C=SUMMED)
    return total


def _mode(sizes: dict[str, int], activation: str) -> dict[str, str | int]:
    """How programs work."""
    return {
        "ACTIVATION": activation,
        "PRECISION": _precision(),
        "num_warps": 4,
        "num_stages": 2 if sizes["N"] <= 2 else 1,  # fetch the next weight early, where two have room
    }


def _precision() -> str:
    """How products are taken: three of TF32 numbers keep the bits of a float32 one."""
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _outputs(x, directions, first, last, biases, save):
    plan = Plan.of(x, directions, first, last, save)
    y, tangents = x.new_empty(len(x), len(last)), x.new_empty(len(directions), len(x), len(last))
    shape = (len(biases), plan.programs, plan.rows, plan.hidden) if save else (0,)
    return plan, (y, tangents, x.new_empty(shape))


def _with_dense_rows(directions: Tensor) -> Tensor:
    """Directions whose numbers lie side by side; all rows may share them, as the identity's do."""
    return directions if directions.stride(-1) == 1 else directions.contiguous()


def _fake_backward(grad_y, grad_t, x, directions, first, middle, last, beta, activation, saved):
    cuts = Plan.of(x, directions, first, last).cuts(len(middle))
    return x.new_empty(x.shape), x.new_empty(sum(cuts))


@operation(_fake_backward)
def _chain_backward(
    grad_y: Tensor, grad_t: Tensor, x: Tensor, directions: Tensor, first: Tensor, middle: Tensor,
    last: Tensor, beta: Tensor, activation: str, saved: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradient of x, and all others in one row (cut up by `_backward`)."""
    x, first, middle, last = x.contiguous(), first.contiguous(), middle.contiguous(), last.contiguous()
    grad_y, directions = grad_y.contiguous(), _with_dense_rows(directions)
    plan, maps = Plan.of(x, directions, first, last), len(middle)
    grad_x = x.new_empty(plan.groups, *x.shape)
    acts, grads = (x.new_empty(maps, plan.programs, plan.hidden, plan.rows) for _ in range(2))
    parts = x.new_empty(plan.programs, sum(plan.cuts(maps)[1:]))
    splits = min(SPLITS, triton.cdiv(plan.programs * plan.rows, CHUNK))
    middles = x.new_empty(splits, *middle.shape)
    with torch.cuda.device_of(x):
        backward_kernel[plan.grid](
            grad_y, grad_t, x, directions, first, middle, last, beta, saved, grad_x, acts, grads, parts,
            len(x), len(directions), maps, directions.stride(0), directions.stride(1), *grad_t.stride(),
            **plan.sizes, R=plan.points, S=plan.slots,
            **_mode(plan.sizes, activation),
        )  # fmt: skip
        sizes = {name: plan.sizes[name] for name in ("HIDDEN", "N", "B")}
        middle_kernel[(maps * sizes["N"] ** 2, splits)](
            acts, grads, middles, plan.programs, maps, **sizes, M=plan.rows, C=CHUNK,
            PRECISION=_precision(),
        )  # fmt: skip
        return grad_x[0] if plan.groups == 1 else grad_x.sum(0), _sum(middles, parts)


def _keep(ctx, inputs, output):
    x, directions, first, middle, last, _, _, beta, ctx.activation, _ = inputs
    ctx.save_for_backward(x, directions, first, middle, last, beta, output[2])
    ctx.set_materialize_grads(False)  # that of what is saved would be many zeros


def _backward(ctx, grad_y, grad_t, _):
    x, directions, first, middle, last, beta, saved = ctx.saved_tensors
    if grad_y is None:
        grad_y = x.new_zeros(len(x), len(last))
    if grad_t is None:
        grad_t = x.new_zeros(len(directions), len(x), len(last))
    grad_x, row = _chain_backward(
        grad_y, grad_t, x, directions, first, middle, last, beta, ctx.activation, saved
    )
    cuts = Plan.of(x, directions, first, last).cuts(len(middle))
    by_middle, by_first, by_last, by_biases, by_last_bias, by_beta = row.split(cuts)
    return (
        grad_x,
        None,
        by_first.view_as(first),
        by_middle.view_as(middle),
        by_last.view_as(last),
        by_biases.view(-1, len(first)),
        by_last_bias,
        by_beta if beta.numel() else None,
        None,
        None,
    )


def _fake(x, directions, first, middle, last, biases, last_bias, beta, activation, save):
    return _outputs(x, directions, first, last, biases, save)[1]


@operation(_fake, _backward, _keep)
def _chain(
    x: Tensor, directions: Tensor, first: Tensor, middle: Tensor, last: Tensor, biases: Tensor,
    last_bias: Tensor, beta: Tensor, activation: str, save: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """y, the tangents, and where saved all h and t for the backward pass (n - 1, programs, rows, H).

    Middle weights are stacked (n - 2, H, H), and so are all biases but the last (n - 1, H); beta is
    empty but for LipSwish.
    """
    x, first, middle, last = x.contiguous(), first.contiguous(), middle.contiguous(), last.contiguous()
    biases, directions = biases.contiguous(), _with_dense_rows(directions)
    plan, (y, tangents, saved) = _outputs(x, directions, first, last, biases, save)
    with torch.cuda.device_of(x):
        forward_kernel[plan.grid](
            x, directions, first, middle, last, biases, last_bias, beta, y, tangents, saved,
            len(x), len(directions), len(middle), directions.stride(0), directions.stride(1),
            **plan.sizes, R=plan.points, S=plan.slots, SAVE=save,
            **_mode(plan.sizes, activation),
        )  # fmt: skip
    return y, tangents, saved

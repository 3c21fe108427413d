"""Small networks as one GPU kernel each way: a chain of linear maps, with tangents carried along.

    h₁ = W₁ a(x) + b₁        hₗ = Wₗ a(hₗ₋₁) + bₗ         y = Wₙ a(hₙ₋₁) + bₙ
    t₁ = W₁ (a'(x) ⊙ v)      tₗ = Wₗ (a'(hₗ₋₁) ⊙ tₗ₋₁)     for each direction v

Run layer by layer, networks of this size keep a GPU waiting for the start of kernels. Here a program
takes a few rows through the whole chain, the value and one of its tangents together, and waits for no
other one. On the way back the gradient of the value is linear in what the tangents bend it by, so that
each program goes back with its own share of it; the shares are added at the end, in a fixed order.

`networks.MLP` (a = tanh, none before W₁, no tangents) and `networks.LipschitzMLP` (a = LipSwish) come
here where they can; their own forward says the same in plain torch.
"""

# ruff: noqa: N803
# mypy: ignore-errors
# Triton's functions are no Python: constants are in capitals, and types are those of its compiler.

from __future__ import annotations

__all__ = ["chain"]

from collections.abc import Sequence

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

SCALE: tl.constexpr = tl.constexpr(1 / 1.1)  # that of `networks.lipschitz.LipSwish`
ROWS = 16  # of a program: the fewest that a product takes, so that small batches keep all of a GPU busy
SPLITS = 32  # programs that share the sum over rows of one weight's gradient


def chain(
    x: Tensor,
    directions: Tensor | None,
    first: Tensor,
    middle: Tensor,
    last: Tensor,
    biases: Sequence[Tensor],
    beta: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """y (*, outputs) and the tangents (k, *, outputs), differentiable in all but the directions.

    Arguments:
        x: Inputs (*, inputs).
        directions: The directions (k, *, inputs) of the tangents; none where None.
        first: W₁ (H, inputs).
        middle: W₂, ..., Wₙ₋₁ (n - 2, H, H).
        last: Wₙ (outputs, H).
        biases: b₁, ..., bₙ.
        beta: Those of LipSwish before each map (n,); None for tanh between maps.
    """
    leading = x.shape[:-1]
    rows = x.reshape(-1, x.shape[-1])
    slots = x.new_zeros(0, *rows.shape) if directions is None else directions.flatten(1, -2)
    beta = x.new_zeros(()) if beta is None else beta
    between = torch.stack(biases[:-1])
    more = max(32, triton.next_power_of_2(len(first))) - len(first)
    if more:  # units without weights, whose values and tangents stay 0
        first, last = F.pad(first, (0, 0, 0, more)), F.pad(last, (0, more))
        middle, between = F.pad(middle, (0, more, 0, more)), F.pad(between, (0, more))
    save = torch.is_grad_enabled()
    y, tangents, _ = _chain(rows, slots, first, middle, last, between, biases[-1], beta, save)
    return y.reshape(*leading, -1), tangents.reshape(len(slots), *leading, y.shape[-1])


@triton.jit
def _activate(h, beta, LIPSWISH: tl.constexpr):
    """a(h) and a'(h)."""
    if LIPSWISH:
        bh = beta * h
        s = tl.sigmoid(bh)
        value = h * s * SCALE
        slope = s * (1 + bh * (1 - s)) * SCALE
    else:
        value = 2 * tl.sigmoid(2 * h) - 1
        slope = 1 - value * value
    return value, slope


@triton.jit
def _bend(h, beta):
    """∂a/∂β = h² σ' / 1.1 and ∂a'/∂β = h σ' (2 + βh (1 - 2σ)) / 1.1 of LipSwish, each less a factor h.

    With β in place of that factor the second is a''.
    """
    bh = beta * h
    s = tl.sigmoid(bh)
    steep = s * (1 - s) * SCALE
    return h * steep, (2 + bh * (1 - 2 * s)) * steep


@triton.jit
def _load(pointer, rows, columns, stride, row_mask, column_mask):
    """A tile (rows, columns), zero where there is nothing."""
    at = pointer + rows[:, None] * stride + columns[None, :]
    return tl.load(at, mask=row_mask[:, None] & column_mask[None, :], other=0.0)


@triton.jit
def _store(pointer, tile, rows, columns, stride, row_mask, column_mask):
    at = pointer + rows[:, None] * stride + columns[None, :]
    tl.store(at, tile, mask=row_mask[:, None] & column_mask[None, :])


@triton.jit
def _product(
    low, high, weight_ptr, columns, stride, is_column, B: tl.constexpr, PRECISION: tl.constexpr
):
    """The columns of [low, high] Wᵀ for the two halves (R, B) of a tile, W (columns, 2 B)."""
    units = tl.arange(0, B)
    at = weight_ptr + columns[None, :] * stride + units[:, None]
    block = tl.load(at, mask=is_column[None, :], other=0.0)
    total = tl.dot(low, block, input_precision=PRECISION)
    block = tl.load(at + B, mask=is_column[None, :], other=0.0)
    return tl.dot(high, block, total, input_precision=PRECISION)


@triton.jit
def _adjoint(
    low, high, weight_ptr, columns, stride, is_column, B: tl.constexpr, PRECISION: tl.constexpr
):
    """The columns of [low, high] W for the two halves (R, B) of a tile, W (2 B, columns)."""
    units = tl.arange(0, B)
    at = weight_ptr + units[:, None] * stride + columns[None, :]
    block = tl.load(at, mask=is_column[None, :], other=0.0)
    total = tl.dot(low, block, input_precision=PRECISION)
    block = tl.load(at + B * stride, mask=is_column[None, :], other=0.0)
    return tl.dot(high, block, total, input_precision=PRECISION)


# Tiles of hidden units are held in two halves, `low` and `high`, which keeps them in registers; and the
# loops over the middle maps, which are not unrolled, end each turn with its products: triton then gives
# each warp some of their columns.


@triton.jit
def _forward_kernel(
    x_ptr, v_ptr, first_ptr, middle_ptr, last_ptr, biases_ptr, last_bias_ptr, beta_ptr,
    y_ptr, t_ptr, saved_ptr, n, k, inputs, outputs, v_slot, v_row,
    MIDDLE: tl.constexpr, B: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, R: tl.constexpr,
    LIPSWISH: tl.constexpr, TANGENT: tl.constexpr, SAVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: R rows and one of their tangents, from x to y."""
    H: tl.constexpr = 2 * B
    slot = tl.program_id(1)
    rows = tl.program_id(0) * R + tl.arange(0, R)
    low, high, ins, outs = tl.arange(0, B), tl.arange(B, H), tl.arange(0, P), tl.arange(0, Q)
    is_row, is_unit, is_in, is_out = rows < n, low < B, ins < inputs, outs < outputs

    value = _load(x_ptr, rows, ins, inputs, is_row, is_in)
    first_low = tl.trans(_load(first_ptr, low, ins, inputs, is_unit, is_in))
    first_high = tl.trans(_load(first_ptr, high, ins, inputs, is_unit, is_in))
    t_low = tl.zeros((R, B), dtype=tl.float32)
    t_high = tl.zeros((R, B), dtype=tl.float32)
    if LIPSWISH:
        value, steer = _activate(value, tl.load(beta_ptr), LIPSWISH)
    if TANGENT:
        v = _load(v_ptr + slot * v_slot, rows, ins, v_row, is_row, is_in) * steer
        t_low = tl.dot(v, first_low, input_precision=PRECISION)
        t_high = tl.dot(v, first_high, input_precision=PRECISION)
    h_low = tl.dot(value, first_low, input_precision=PRECISION)
    h_high = tl.dot(value, first_high, input_precision=PRECISION)

    for layer in range(MIDDLE + 1):
        h_low += tl.load(biases_ptr + layer * H + low)[None, :]
        h_high += tl.load(biases_ptr + layer * H + high)[None, :]
        if SAVE:
            saved = saved_ptr + layer * (1 + k) * n * H
            _store(saved, h_low, rows, low, H, is_row & (slot == 0), is_unit)
            _store(saved, h_high, rows, high, H, is_row & (slot == 0), is_unit)
            if TANGENT:
                _store(saved, t_low, (1 + slot) * n + rows, low, H, is_row, is_unit)
                _store(saved, t_high, (1 + slot) * n + rows, high, H, is_row, is_unit)
        beta = tl.load(beta_ptr + (layer + 1) * LIPSWISH)
        h_low, slope_low = _activate(h_low, beta, LIPSWISH)
        h_high, slope_high = _activate(h_high, beta, LIPSWISH)
        if TANGENT:
            t_low *= slope_low
            t_high *= slope_high
        if layer < MIDDLE:
            weight = middle_ptr + layer * H * H
            after_low = _product(h_low, h_high, weight, low, H, is_unit, B, PRECISION)
            h_high = _product(h_low, h_high, weight, high, H, is_unit, B, PRECISION)
            h_low = after_low
            if TANGENT:
                after_low = _product(t_low, t_high, weight, low, H, is_unit, B, PRECISION)
                t_high = _product(t_low, t_high, weight, high, H, is_unit, B, PRECISION)
                t_low = after_low

    y = _product(h_low, h_high, last_ptr, outs, H, is_out, B, PRECISION)
    y += tl.load(last_bias_ptr + outs, mask=is_out, other=0.0)[None, :]
    _store(y_ptr, y, rows, outs, outputs, is_row & (slot == 0), is_out)
    if TANGENT:
        t = _product(t_low, t_high, last_ptr, outs, H, is_out, B, PRECISION)
        _store(t_ptr, t, slot * n + rows, outs, outputs, is_row, is_out)


@triton.jit
def _through(g, gt, h, t, beta, LIPSWISH: tl.constexpr, TANGENT: tl.constexpr):
    """From the gradients of a(h) and a'(h) t to those of h and t, and to β's from each place."""
    _, slope = _activate(h, beta, LIPSWISH)
    grad_h = g * slope
    by_beta = grad_h
    if LIPSWISH:
        swell, bent = _bend(h, beta)
        by_beta = g * swell * h
        if TANGENT:
            bent *= gt * t
            grad_h += bent * beta
            by_beta += bent * h
            gt *= slope
    return grad_h, gt, by_beta


@triton.jit
def _backward_kernel(
    grad_y_ptr, grad_t_ptr, x_ptr, v_ptr, first_ptr, middle_ptr, last_ptr, beta_ptr, saved_ptr,
    grad_x_ptr, grads_ptr, parts_ptr, n, k, inputs, outputs, v_slot, v_row, t_slot, t_row, t_column,
    MIDDLE: tl.constexpr, B: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, R: tl.constexpr,
    LIPSWISH: tl.constexpr, TANGENT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: the same rows and tangent, from the gradients of y to those of x.

    The gradients of all h and t go to `grads` (n - 1, slots + k, rows, H), the shares of those of h
    first; a program's part of the gradients of the first and last map, the biases and beta to `parts`.
    """
    H: tl.constexpr = 2 * B
    slot, slots = tl.program_id(1), tl.num_programs(1)
    rows = tl.program_id(0) * R + tl.arange(0, R)
    low, high, ins, outs = tl.arange(0, B), tl.arange(B, H), tl.arange(0, P), tl.arange(0, Q)
    is_row, is_unit, is_in, is_out = rows < n, low < B, ins < inputs, outs < outputs
    t_rows = (1 + slot) * n + rows
    part = parts_ptr + (tl.program_id(0) * slots + slot) * (
        H * P + Q * H + (MIDDLE + 1) * H + Q + MIDDLE + 2
    )
    part_last = part + H * P
    part_biases = part_last + Q * H
    part_last_bias = part_biases + (MIDDLE + 1) * H
    part_beta = part_last_bias + Q

    grad_y = _load(grad_y_ptr, rows, outs, outputs, is_row & (slot == 0), is_out)
    tl.store(part_last_bias + outs, tl.sum(grad_y, axis=0))
    saved = saved_ptr + MIDDLE * (1 + k) * n * H
    last_low = _load(last_ptr, outs, low, H, is_out, is_unit)
    last_high = _load(last_ptr, outs, high, H, is_out, is_unit)
    beta = tl.load(beta_ptr + (MIDDLE + 1) * LIPSWISH)
    value, slope_low = _activate(_load(saved, rows, low, H, is_row, is_unit), beta, LIPSWISH)
    by_last_low = tl.dot(tl.trans(grad_y), value, input_precision=PRECISION)
    value, slope_high = _activate(_load(saved, rows, high, H, is_row, is_unit), beta, LIPSWISH)
    by_last_high = tl.dot(tl.trans(grad_y), value, input_precision=PRECISION)
    g_low = tl.dot(grad_y, last_low, input_precision=PRECISION)
    g_high = tl.dot(grad_y, last_high, input_precision=PRECISION)
    gt_low = tl.zeros((R, B), dtype=tl.float32)
    gt_high = tl.zeros((R, B), dtype=tl.float32)
    if TANGENT:
        at = grad_t_ptr + slot * t_slot + rows[:, None] * t_row + outs[None, :] * t_column
        grad_t = tl.load(at, mask=is_row[:, None] & is_out[None, :], other=0.0)
        t = _load(saved, t_rows, low, H, is_row, is_unit) * slope_low
        by_last_low = tl.dot(tl.trans(grad_t), t, by_last_low, input_precision=PRECISION)
        t = _load(saved, t_rows, high, H, is_row, is_unit) * slope_high
        by_last_high = tl.dot(tl.trans(grad_t), t, by_last_high, input_precision=PRECISION)
        gt_low = tl.dot(grad_t, last_low, input_precision=PRECISION)
        gt_high = tl.dot(grad_t, last_high, input_precision=PRECISION)
    tl.store(part_last + outs[:, None] * H + low[None, :], by_last_low)
    tl.store(part_last + outs[:, None] * H + high[None, :], by_last_high)

    for back in range(MIDDLE + 1):
        layer = MIDDLE - back
        saved = saved_ptr + layer * (1 + k) * n * H
        grads = grads_ptr + layer * (slots + k) * n * H
        beta = tl.load(beta_ptr + (layer + 1) * LIPSWISH)
        h = _load(saved, rows, low, H, is_row, is_unit)
        t = h
        if TANGENT:
            t = _load(saved, t_rows, low, H, is_row, is_unit)
        g_low, gt_low, by_beta = _through(g_low, gt_low, h, t, beta, LIPSWISH, TANGENT)
        total = tl.sum(by_beta)
        h = _load(saved, rows, high, H, is_row, is_unit)
        t = h
        if TANGENT:
            t = _load(saved, t_rows, high, H, is_row, is_unit)
        g_high, gt_high, by_beta = _through(g_high, gt_high, h, t, beta, LIPSWISH, TANGENT)
        total += tl.sum(by_beta)
        _store(grads, g_low, slot * n + rows, low, H, is_row, is_unit)
        _store(grads, g_high, slot * n + rows, high, H, is_row, is_unit)
        tl.store(part_biases + layer * H + low, tl.sum(g_low, axis=0))
        tl.store(part_biases + layer * H + high, tl.sum(g_high, axis=0))
        if LIPSWISH:
            tl.store(part_beta + layer + 1, total)
        if TANGENT:
            _store(grads, gt_low, (slots + slot) * n + rows, low, H, is_row, is_unit)
            _store(grads, gt_high, (slots + slot) * n + rows, high, H, is_row, is_unit)
        if layer > 0:
            weight = middle_ptr + (layer - 1) * H * H
            after_low = _adjoint(g_low, g_high, weight, low, H, is_unit, B, PRECISION)
            g_high = _adjoint(g_low, g_high, weight, high, H, is_unit, B, PRECISION)
            g_low = after_low
            if TANGENT:
                after_low = _adjoint(gt_low, gt_high, weight, low, H, is_unit, B, PRECISION)
                gt_high = _adjoint(gt_low, gt_high, weight, high, H, is_unit, B, PRECISION)
                gt_low = after_low

    x = _load(x_ptr, rows, ins, inputs, is_row, is_in)
    by_x = _adjoint(g_low, g_high, first_ptr, ins, inputs, is_in, B, PRECISION)
    value_in, v, by_v = x, x, x
    by_first_low = tl.zeros((B, P), dtype=tl.float32)
    by_first_high = tl.zeros((B, P), dtype=tl.float32)
    if LIPSWISH:
        beta = tl.load(beta_ptr)
        value_in, steer = _activate(x, beta, LIPSWISH)
        if TANGENT:
            v = _load(v_ptr + slot * v_slot, rows, ins, v_row, is_row, is_in)
            by_v = _adjoint(gt_low, gt_high, first_ptr, ins, inputs, is_in, B, PRECISION)
            by_first_low = tl.dot(tl.trans(gt_low), v * steer, input_precision=PRECISION)
            by_first_high = tl.dot(tl.trans(gt_high), v * steer, input_precision=PRECISION)
        by_x, _, by_first_beta = _through(by_x, by_v, x, v, beta, LIPSWISH, TANGENT)
        tl.store(part_beta, tl.sum(by_first_beta))
    by_first_low = tl.dot(tl.trans(g_low), value_in, by_first_low, input_precision=PRECISION)
    by_first_high = tl.dot(tl.trans(g_high), value_in, by_first_high, input_precision=PRECISION)
    tl.store(part + low[:, None] * P + ins[None, :], by_first_low)
    tl.store(part + high[:, None] * P + ins[None, :], by_first_high)
    _store(grad_x_ptr, by_x, slot * n + rows, ins, inputs, is_row, is_in)


@triton.jit
def _middle_kernel(
    saved_ptr, grads_ptr, beta_ptr, parts_ptr, n, k, slots,
    MIDDLE: tl.constexpr, H: tl.constexpr, R: tl.constexpr,
    LIPSWISH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: its share of the rows in the gradient Σ gₗ₊₁ a(hₗ)ᵀ of one middle weight."""
    layer, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    units = tl.arange(0, H)
    is_unit = units < H
    saved = saved_ptr + layer * (1 + k) * n * H
    grads = grads_ptr + (layer + 1) * (slots + k) * n * H
    beta = tl.load(beta_ptr + (layer + 1) * LIPSWISH)
    total = tl.zeros((H, H), dtype=tl.float32)
    for start in range(split * R, n, splits * R):
        rows = start + tl.arange(0, R)
        is_row = rows < n
        value, slope = _activate(_load(saved, rows, units, H, is_row, is_unit), beta, LIPSWISH)
        for slot in range(slots):
            g = _load(grads, slot * n + rows, units, H, is_row, is_unit)
            total += tl.dot(tl.trans(g), value, input_precision=PRECISION)
        for slot in range(k):
            g = _load(grads, (slots + slot) * n + rows, units, H, is_row, is_unit)
            t = _load(saved, (1 + slot) * n + rows, units, H, is_row, is_unit)
            total += tl.dot(tl.trans(g), t * slope, input_precision=PRECISION)
    at = (split * MIDDLE + layer) * H * H + units[:, None] * H + units[None, :]
    tl.store(parts_ptr + at, total)


@triton.jit
def _sum_kernel(parts_ptr, total_ptr, rows, columns, R: tl.constexpr, C: tl.constexpr):
    """The sums (columns,) of parts (rows, columns)."""
    at = tl.program_id(0) * C + tl.arange(0, C)
    total = tl.zeros((C,), dtype=tl.float32)
    for start in range(0, rows, R):
        each = start + tl.arange(0, R)
        total += tl.sum(_load(parts_ptr, each, at, columns, each < rows, at < columns), axis=0)
    tl.store(total_ptr + at, total, mask=at < columns)


def _sum(parts: Tensor) -> Tensor:
    """The sum over the first dimension."""
    total = torch.empty_like(parts[0])
    columns = total.numel()
    _sum_kernel[(triton.cdiv(columns, 128),)](parts, total, len(parts), columns, R=32, C=128)
    return total


def _sizes(first: Tensor, last: Tensor) -> dict[str, int]:
    """Half the hidden units, inputs and outputs padded to what products take, and a program's rows."""
    inputs, outputs = (max(16, triton.next_power_of_2(size)) for size in (first.shape[1], len(last)))
    return {"B": len(first) // 2, "P": inputs, "Q": outputs, "R": ROWS}


def _mode(first: Tensor, beta: Tensor) -> dict[str, bool | str | int]:
    """How programs work: three products of TF32 numbers keep the bits of a float32 one."""
    exact = torch.get_float32_matmul_precision() == "highest"
    return {
        "LIPSWISH": beta.ndim > 0,
        "PRECISION": "tf32x3" if exact else "tf32",
        "num_warps": 8 if len(first) > 64 else 4,
    }


def _grid(x: Tensor, directions: Tensor) -> tuple[int, int]:
    return triton.cdiv(len(x), ROWS), max(1, len(directions))


@torch.library.custom_op("ciflows::chain", mutates_args=())
def _chain(
    x: Tensor, directions: Tensor, first: Tensor, middle: Tensor, last: Tensor, biases: Tensor,
    last_bias: Tensor, beta: Tensor, save: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """y, the tangents, and all h and t for the way back (n - 1, 1 + k, rows, H) where they are saved.

    Middle weights are stacked (n - 2, H, H), and so are all biases but the last (n - 1, H); beta is ()
    for tanh.
    """
    x, first, middle, last = x.contiguous(), first.contiguous(), middle.contiguous(), last.contiguous()
    biases, directions = biases.contiguous(), _with_dense_rows(directions)
    n, k, sizes = len(x), len(directions), _sizes(first, last)
    y, tangents = x.new_empty(n, len(last)), x.new_empty(k, n, len(last))
    saved = x.new_empty(len(biases), 1 + k, n, len(first)) if save else x.new_empty(0)
    with torch.cuda.device_of(x):
        _forward_kernel[_grid(x, directions)](
            x, directions, first, middle, last, biases, last_bias, beta, y, tangents, saved,
            n, k, x.shape[1], len(last), directions.stride(0), directions.stride(1),
            MIDDLE=len(middle), **sizes, TANGENT=k > 0, SAVE=save, **_mode(first, beta),
        )  # fmt: skip
    return y, tangents, saved


@_chain.register_fake
def _(x, directions, first, middle, last, biases, last_bias, beta, save):
    n, k = len(x), len(directions)
    saved = x.new_empty(len(biases), 1 + k, n, len(first)) if save else x.new_empty(0)
    return x.new_empty(n, len(last)), x.new_empty(k, n, len(last)), saved


@torch.library.custom_op("ciflows::chain_backward", mutates_args=())
def _chain_backward(
    grad_y: Tensor, grad_t: Tensor, x: Tensor, directions: Tensor, first: Tensor, middle: Tensor,
    last: Tensor, beta: Tensor, saved: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, of the middle weights, and of all others in one row (cut up by `_backward`)."""
    x, first, middle, last = x.contiguous(), first.contiguous(), middle.contiguous(), last.contiguous()
    grad_y, directions = grad_y.contiguous(), _with_dense_rows(directions)
    n, k, sizes = len(x), len(directions), _sizes(first, last)
    tiles, slots = grid = _grid(x, directions)
    hidden, maps = len(first), len(middle)
    grad_x = x.new_empty(slots, *x.shape)
    grads = x.new_empty(maps + 1, slots + k, n, hidden)
    parts = x.new_empty(tiles * slots, sum(_cuts(sizes, maps)))
    splits = min(SPLITS, tiles)
    middles = x.new_empty(splits, *middle.shape)
    with torch.cuda.device_of(x):
        _backward_kernel[grid](
            grad_y, grad_t, x, directions, first, middle, last, beta, saved, grad_x, grads, parts,
            n, k, x.shape[1], len(last), directions.stride(0), directions.stride(1), *grad_t.stride(),
            MIDDLE=maps, **sizes, TANGENT=k > 0, **_mode(first, beta),
        )  # fmt: skip
        _middle_kernel[(maps, splits)](
            saved, grads, beta, middles, n, k, slots,
            MIDDLE=maps, H=hidden, R=sizes["R"], **_mode(first, beta),
        )  # fmt: skip
        return grad_x[0] if slots == 1 else _sum(grad_x), _sum(middles), _sum(parts)


@_chain_backward.register_fake
def _(grad_y, grad_t, x, directions, first, middle, last, beta, saved):
    cuts = _cuts(_sizes(first, last), len(middle))
    return torch.empty_like(x), torch.empty_like(middle), x.new_empty(sum(cuts))


def _cuts(sizes: dict[str, int], maps: int) -> list[int]:
    """Sizes of the gradients in a row of parts: of the first and last map, the biases, beta."""
    hidden, inputs, outputs = 2 * sizes["B"], sizes["P"], sizes["Q"]
    return [hidden * inputs, outputs * hidden, (maps + 1) * hidden, outputs, maps + 2]


def _with_dense_rows(directions: Tensor) -> Tensor:
    """Directions whose numbers lie side by side; all rows may share them, as the identity's do."""
    return directions if directions.stride(-1) == 1 else directions.contiguous()


def _keep(ctx, inputs, output):
    x, directions, first, middle, last, _, _, beta, _ = inputs
    ctx.save_for_backward(x, directions, first, middle, last, beta, output[2])
    ctx.set_materialize_grads(True)


def _backward(ctx, grad_y, grad_t, _):
    x, directions, first, middle, last, beta, saved = ctx.saved_tensors
    sizes = _sizes(first, last)
    grad_x, grad_middle, row = _chain_backward(
        grad_y, grad_t, x, directions, first, middle, last, beta, saved
    )
    by_first, by_last, by_biases, by_last_bias, by_beta = row.split(_cuts(sizes, len(middle)))
    return (
        grad_x,
        None,
        by_first.view(len(first), -1)[:, : first.shape[1]],
        grad_middle,
        by_last.view(-1, len(first))[: len(last)],
        by_biases.view(-1, len(first)),
        by_last_bias[: len(last)],
        by_beta if beta.ndim else None,
        None,
    )


_chain.register_autograd(_backward, setup_context=_keep)

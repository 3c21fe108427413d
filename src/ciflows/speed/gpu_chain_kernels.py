"""The Triton kernels of `gpu_chain`."""

# ruff: noqa: N803, RUF005
# mypy: ignore-errors
# Triton's functions are no Python: constants are in capitals, and types are those of its compiler.

from __future__ import annotations

__all__ = ["backward_kernel", "forward_kernel", "middle_kernel", "sum_kernel"]

import triton
import triton.language as tl

SCALE: tl.constexpr = tl.constexpr(1 / 1.1)  # as in `networks.lipschitz.lipswish`

# Were a single middle map known to the compiler, its loop would be none, and products that follow each
# other would be done by every warp as a whole.
_kernel = triton.jit(do_not_specialize=["maps"])


@triton.jit
def _activate(h, beta, ACTIVATION: tl.constexpr):
    """a(h) and a'(h)."""
    if ACTIVATION == "lipswish":
        bh = beta * h
        s = tl.sigmoid(bh)
        value = h * s * SCALE
        slope = s * (1 + bh * (1 - s)) * SCALE
    elif ACTIVATION == "tanh":
        value = 2 * tl.sigmoid(2 * h) - 1
        slope = 1 - value * value
    else:
        slope = tl.where(h > 0, 1.0, 0.0)
        value = h * slope
    return value, slope


@triton.jit
def _beta(pointer, layer, ACTIVATION: tl.constexpr):
    """β of the activation before a map, if it has one."""
    return tl.load(pointer + layer) if ACTIVATION == "lipswish" else 1.0


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
def _spread(tile, R: tl.constexpr, S: tl.constexpr, B: tl.constexpr):
    """The sum of the S rows (S, B) of each point, in each of its rows."""
    if S == 1:
        return tile
    total = tl.sum(tl.reshape(tile, (R, S, B)), axis=1, keep_dims=True)
    return tl.reshape(tl.broadcast_to(total, (R, S, B)), (R * S, B))


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
def _place(M: tl.constexpr, R: tl.constexpr, S: tl.constexpr, n, k):
    """Point and direction of each row of this program's tile; which are values, and which tangents."""
    rows = tl.arange(0, M)
    points, slots = tl.program_id(0) * R + rows // S, rows % S
    directions = tl.program_id(1) * (S - 1) + slots - 1
    is_point, is_value = points < n, slots == 0
    return points, directions, is_point & is_value, is_point & (slots > 0) & (directions < k)


@triton.jit
def _in_first_group(M: tl.constexpr):
    """Whether each row is in the first group of tangents: a vector, as Triton's interpreter wants it."""
    return tl.program_id(1) + 0 * tl.arange(0, M) == 0


@triton.jit
def _enter(
    x_ptr, v_ptr, points, directions, value_rows, tangent_rows, beta_ptr, v_slot, v_row,
    INPUTS: tl.constexpr, P: tl.constexpr, S: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """x and v of each row (rows, P), and what enters the first map: a(x), or a'(x) v."""
    ins = tl.arange(0, P)
    is_in = ins < INPUTS
    x = _load(x_ptr, points, ins, INPUTS, value_rows | tangent_rows, is_in)
    v = tl.zeros_like(x)
    tile = x
    if ACTIVATION == "lipswish":
        tile, slope = _activate(x, tl.load(beta_ptr), ACTIVATION)
        if S > 1:
            v = _load(v_ptr + directions[:, None] * v_slot, points, ins, v_row, tangent_rows, is_in)
            tile = tl.where(tangent_rows[:, None], v * slope, tile)
    return x, v, tile


# A tile of hidden units (rows, H) is held in N parts of B columns, so that products fit in registers. In
# memory a program's tile lies in one piece.


@triton.jit
def _columns(
    parts, weight_ptr, columns, is_column, BY_UNIT: tl.constexpr, BY_COLUMN: tl.constexpr,
    HIDDEN: tl.constexpr, B: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The columns of T V for a tile T (rows, hidden) in parts, V (hidden, columns) with such strides."""
    total = tl.zeros((parts[0].shape[0], columns.shape[0]), dtype=tl.float32)
    for i in tl.static_range(N):
        units = i * B + tl.arange(0, B)[:, None]
        at = weight_ptr + units * BY_UNIT + columns[None, :] * BY_COLUMN
        weight = tl.load(at, mask=is_column[None, :] & (units < HIDDEN), other=0.0)
        total = tl.dot(parts[i], weight, total, input_precision=PRECISION)
    return total


@triton.jit
def _product(
    parts, weight_ptr, BY_UNIT: tl.constexpr, BY_COLUMN: tl.constexpr,
    HIDDEN: tl.constexpr, B: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """T V in parts, for a tile T in parts, V (hidden, hidden) with such strides."""
    after = ()
    for i in tl.static_range(N):
        units = i * B + tl.arange(0, B)
        tile = _columns(
            parts, weight_ptr, units, units < HIDDEN, BY_UNIT, BY_COLUMN, HIDDEN, B, N, PRECISION
        )
        after = after + (tile,)
    return after


@triton.jit
def _activate_tile(
    parts, layer, biases_ptr, beta_ptr, saved_ptr, is_value, HIDDEN: tl.constexpr, B: tl.constexpr,
    N: tl.constexpr, R: tl.constexpr, S: tl.constexpr, ACTIVATION: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """From Wₗ a(hₗ₋₁) and its tangents to a(hₗ) and those of that; saves hₗ and its tangents."""
    beta = _beta(beta_ptr, layer + 1, ACTIVATION)
    after = ()
    for i in tl.static_range(N):
        units = i * B + tl.arange(0, B)
        bias = tl.load(biases_ptr + layer * HIDDEN + units, mask=units < HIDDEN, other=0.0)
        tile = parts[i] + tl.where(is_value, bias[None, :], 0.0)
        if SAVE:
            tl.store(saved_ptr + tl.arange(0, R * S)[:, None] * (N * B) + units[None, :], tile)
        h = _spread(tl.where(is_value, tile, 0.0), R, S, B)
        value, slope = _activate(h, beta, ACTIVATION)
        after = after + (tl.where(is_value, value, tile * slope),)
    return after


@_kernel
def forward_kernel(
    x_ptr, v_ptr, first_ptr, middle_ptr, last_ptr, biases_ptr, last_bias_ptr, beta_ptr,
    y_ptr, t_ptr, saved_ptr, n, k, maps, v_slot, v_row,
    HIDDEN: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
    N: tl.constexpr, B: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr,
    ACTIVATION: tl.constexpr, SAVE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: R points with some of their tangents, from x to y."""
    M: tl.constexpr = R * S
    size: tl.constexpr = M * N * B
    programs = tl.num_programs(0) * tl.num_programs(1)
    saved_ptr += (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * size
    points, directions, value_rows, tangent_rows = _place(M, R, S, n, k)
    is_value = (tl.arange(0, M) % S == 0)[:, None]
    ins, outs = tl.arange(0, P), tl.arange(0, Q)
    is_in, is_out = ins < INPUTS, outs < OUTPUTS

    _, _, tile = _enter(
        x_ptr, v_ptr, points, directions, value_rows, tangent_rows, beta_ptr, v_slot, v_row,
        INPUTS, P, S, ACTIVATION,
    )  # fmt: skip
    parts = ()
    for i in tl.static_range(N):
        units = i * B + tl.arange(0, B)
        first = _load(first_ptr, units, ins, INPUTS, units < HIDDEN, is_in)
        parts = parts + (tl.dot(tile, tl.trans(first), input_precision=PRECISION),)
    for layer in range(maps):
        saved = saved_ptr + layer * programs * size
        parts = _activate_tile(
            parts, layer, biases_ptr, beta_ptr, saved, is_value, HIDDEN, B, N, R, S, ACTIVATION, SAVE
        )
        weight = middle_ptr + layer * HIDDEN * HIDDEN
        parts = _product(parts, weight, 1, HIDDEN, HIDDEN, B, N, PRECISION)
    saved = saved_ptr + maps * programs * size
    parts = _activate_tile(
        parts, maps, biases_ptr, beta_ptr, saved, is_value, HIDDEN, B, N, R, S, ACTIVATION, SAVE
    )
    y = _columns(parts, last_ptr, outs, is_out, 1, HIDDEN, HIDDEN, B, N, PRECISION)
    if S > 1:
        _store(t_ptr, y, directions * n + points, outs, OUTPUTS, tangent_rows, is_out)
    y += tl.load(last_bias_ptr + outs, mask=is_out, other=0.0)[None, :]
    _store(y_ptr, y, points, outs, OUTPUTS, value_rows & _in_first_group(M), is_out)


@triton.jit
def _activate_tile_backward(
    parts, layer, beta_ptr, saved_ptr, part_biases, part_beta, is_value,
    HIDDEN: tl.constexpr, B: tl.constexpr, N: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """From the gradients of a(hₗ) and its tangents to those of hₗ and its own; also a(hₗ) and its own.

    Stores parts of the gradients of bₗ and β.
    """
    beta = _beta(beta_ptr, layer + 1, ACTIVATION)
    rows = tl.arange(0, R * S)[:, None]
    by_beta = 0.0
    after, acts = (), ()
    for i in tl.static_range(N):
        units = i * B + tl.arange(0, B)
        at = rows * (N * B) + units[None, :]
        tile = tl.load(saved_ptr + at)
        h = tile
        if S > 1:
            h = tl.load(saved_ptr + (rows // S * S) * (N * B) + units[None, :])
        value, slope = _activate(h, beta, ACTIVATION)
        acts = acts + (tl.where(is_value, value, tile * slope),)
        g = parts[i] * slope
        if ACTIVATION == "lipswish":
            swell, bent = _bend(h, beta)
            bent *= tl.where(is_value, 0.0, parts[i] * tile)
            by_beta += tl.sum(tl.where(is_value, parts[i] * swell, bent) * h)
            if S > 1:
                g += tl.where(is_value, beta * _spread(bent, R, S, B), 0.0)
        total = tl.sum(tl.where(is_value, g, 0.0), axis=0)
        tl.store(part_biases + layer * HIDDEN + units, total, mask=units < HIDDEN)
        after = after + (g,)
    if ACTIVATION == "lipswish":
        tl.store(part_beta + layer + 1, by_beta)
    return after, acts


@triton.jit
def _keep_tile(pointer, parts, B: tl.constexpr, N: tl.constexpr, M: tl.constexpr):
    """Store a tile (M, H) in parts as (H, M): as the sum over rows reads it fastest."""
    for i in tl.static_range(N):
        units = i * B + tl.arange(0, B)
        tl.store(pointer + units[None, :] * M + tl.arange(0, M)[:, None], parts[i])


@_kernel
def backward_kernel(
    grad_y_ptr, grad_t_ptr, x_ptr, v_ptr, first_ptr, middle_ptr, last_ptr, beta_ptr, saved_ptr,
    grad_x_ptr, acts_ptr, grads_ptr, parts_ptr, n, k, maps, v_slot, v_row, t_slot, t_row, t_column,
    HIDDEN: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
    N: tl.constexpr, B: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: the same tile, from the gradients of y to those of x.

    What enters the middle maps goes to `acts`, and the gradients of what leaves them to `grads`, both
    (n - 2, programs, H, rows); a program's part of the gradients of the first and last map, the biases
    and beta to `parts`.
    """
    M: tl.constexpr = R * S
    size: tl.constexpr = M * N * B
    group = tl.program_id(1)
    program = tl.program_id(0) * tl.num_programs(1) + group
    programs = tl.num_programs(0) * tl.num_programs(1)
    saved_ptr, acts_ptr = saved_ptr + program * size, acts_ptr + program * size
    grads_ptr += program * size
    points, directions, value_rows, tangent_rows = _place(M, R, S, n, k)
    is_value = (tl.arange(0, M) % S == 0)[:, None]
    ins, outs = tl.arange(0, P), tl.arange(0, Q)
    is_in, is_out = ins < INPUTS, outs < OUTPUTS
    part = parts_ptr + program * (HIDDEN * (INPUTS + OUTPUTS + maps + 1) + OUTPUTS + maps + 2)
    part_last = part + HIDDEN * INPUTS
    part_biases = part_last + OUTPUTS * HIDDEN
    part_last_bias = part_biases + (maps + 1) * HIDDEN
    part_beta = part_last_bias + OUTPUTS

    grad = _load(grad_y_ptr, points, outs, OUTPUTS, value_rows & _in_first_group(M), is_out)
    tl.store(part_last_bias + outs, tl.sum(grad, axis=0), mask=is_out)
    if S > 1:
        at = directions[:, None] * t_slot + points[:, None] * t_row + outs[None, :] * t_column
        grad += tl.load(grad_t_ptr + at, mask=tangent_rows[:, None] & is_out[None, :], other=0.0)
    parts = ()
    for i in tl.static_range(N):
        units = i * B + tl.arange(0, B)
        last = _load(last_ptr, outs, units, HIDDEN, is_out, units < HIDDEN)
        parts = parts + (tl.dot(grad, last, input_precision=PRECISION),)
    end = maps * programs * size
    parts, entering = _activate_tile_backward(
        parts, maps, beta_ptr, saved_ptr + end, part_biases, part_beta, is_value,
        HIDDEN, B, N, R, S, ACTIVATION,
    )  # fmt: skip
    for i in tl.static_range(N):
        units = i * B + tl.arange(0, B)
        by_last = tl.dot(tl.trans(grad), entering[i], input_precision=PRECISION)
        _store(part_last, by_last, outs, units, HIDDEN, is_out, units < HIDDEN)
    for back in range(maps):
        layer = maps - 1 - back
        here = layer * programs * size
        _keep_tile(grads_ptr + here, parts, B, N, M)
        weight = middle_ptr + layer * HIDDEN * HIDDEN
        parts = _product(parts, weight, HIDDEN, 1, HIDDEN, B, N, PRECISION)
        parts, acts = _activate_tile_backward(
            parts, layer, beta_ptr, saved_ptr + here, part_biases, part_beta, is_value,
            HIDDEN, B, N, R, S, ACTIVATION,
        )  # fmt: skip
        _keep_tile(acts_ptr + here, acts, B, N, M)

    x, v, tile = _enter(
        x_ptr, v_ptr, points, directions, value_rows, tangent_rows, beta_ptr, v_slot, v_row,
        INPUTS, P, S, ACTIVATION,
    )  # fmt: skip
    for i in tl.static_range(N):
        units = i * B + tl.arange(0, B)
        by_first = tl.dot(tl.trans(parts[i]), tile, input_precision=PRECISION)
        _store(part, by_first, units, ins, INPUTS, units < HIDDEN, is_in)
    g = _columns(parts, first_ptr, ins, is_in, INPUTS, 1, HIDDEN, B, N, PRECISION)
    if ACTIVATION == "lipswish":
        beta = tl.load(beta_ptr)
        _, slope = _activate(x, beta, ACTIVATION)
        swell, bent = _bend(x, beta)
        bent *= g * v
        tl.store(part_beta, tl.sum(tl.where(is_value, g * swell, bent) * x))
        g = tl.where(is_value, g * slope, beta * bent)
    g = tl.sum(tl.reshape(g, (R, S, P)), axis=1)
    points = tl.program_id(0) * R + tl.arange(0, R)
    _store(grad_x_ptr, g, group * n + points, ins, INPUTS, points < n, is_in)


@_kernel
def middle_kernel(
    acts_ptr, grads_ptr, parts_ptr, programs, maps,
    HIDDEN: tl.constexpr, N: tl.constexpr, B: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: its share of the tiles in a block (B, B) of one weight's gradient Σ gₗ₊₁ a(hₗ)ᵀ."""
    block, layer = tl.program_id(0) % (N * N), tl.program_id(0) // (N * N)
    split, splits = tl.program_id(1), tl.num_programs(1)
    units, rows = tl.arange(0, B), tl.arange(0, C)
    above, here = (block // N) * B + units, (block % N) * B + units
    at = (rows // M) * (N * B * M) + rows % M
    total = tl.zeros((B, B), dtype=tl.float32)
    for start in range(split * (C // M), programs, splits * (C // M)):
        offset = (layer * programs + start) * (N * B * M) + at
        is_row = start + rows // M < programs
        g = _load(grads_ptr, above * M, offset, 1, units < B, is_row)
        act = _load(acts_ptr, here * M, offset, 1, units < B, is_row)
        total = tl.dot(g, tl.trans(act), total, input_precision=PRECISION)
    parts_ptr += (split * maps + layer) * HIDDEN * HIDDEN
    _store(parts_ptr, total, above, here, HIDDEN, above < HIDDEN, here < HIDDEN)


@triton.jit
def sum_kernel(
    one_ptr, other_ptr, total_ptr, one_rows, other_rows, one_columns, other_columns,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The sums of two matrices over their rows, one after the other (one_columns + other_columns,)."""
    block, blocks = tl.program_id(0), tl.cdiv(one_columns, C)
    if block < blocks:
        parts_ptr, rows, columns = one_ptr, one_rows, one_columns
    else:
        parts_ptr, rows, columns = other_ptr, other_rows, other_columns
        block -= blocks
        total_ptr += one_columns
    at = block * C + tl.arange(0, C)
    total = tl.zeros((C,), dtype=tl.float32)
    for start in range(0, rows, R):
        each = start + tl.arange(0, R)
        total += tl.sum(_load(parts_ptr, each, at, columns, each < rows, at < columns), axis=0)
    tl.store(total_ptr + at, total, mask=at < columns)

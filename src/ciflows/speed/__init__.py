"""Faster versions of plain functions. Delete this folder, and every result stays the same.

`core.hook` finds `VERSIONS` here: by the name of a plain function, what runs in its place. Each gets the
plain function first and calls it where it has nothing better. See README.md for what each part gains.
"""

from __future__ import annotations

__all__ = ["VERSIONS", "on"]

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ciflows.core.layer import Shape
from ciflows.speed import cpu_spline, gpu, networks, pointwise, stacked, streams
from ciflows.speed.stacked import on


def log_normal(plain: Callable[..., Tensor], x: Tensor, moments: Tensor, shape: Shape) -> Tensor:
    if not gpu.fits_vectors(x, moments, shape):
        return plain(x, moments, shape)
    from ciflows.speed import gpu_normal

    return gpu_normal.log_normal(x, moments)


def draw_normal(plain: Callable[..., Tensor], epsilon: Tensor, moments: Tensor, shape: Shape) -> Tensor:
    if not gpu.fits_vectors(epsilon, moments, shape):
        return plain(epsilon, moments, shape)
    from ciflows.speed import gpu_normal

    return gpu_normal.place_normal(epsilon, moments, None)[0]


def place_normal(
    plain: Callable[..., tuple[Tensor, Tensor]],
    epsilon: Tensor,
    moments: Tensor,
    shape: Shape,
    shift: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    if not gpu.fits_vectors(epsilon, moments, shape):
        return plain(epsilon, moments, shape, shift)
    from ciflows.speed import gpu_normal

    return gpu_normal.place_normal(epsilon, moments, shift)


def affine(
    plain: Callable[..., tuple[Tensor, Tensor]], x: Tensor, parameters: Tensor, shape: Shape
) -> tuple[Tensor, Tensor]:
    if not gpu.fits_vectors(x, parameters, shape):
        return plain(x, parameters, shape)
    from ciflows.speed import gpu_normal

    return gpu_normal.affine(x, parameters)


def log_det(plain: Callable[..., Tensor], matrix: Tensor) -> Tensor:
    if not gpu.fits_matrix(matrix):
        return plain(matrix)
    from ciflows.speed import gpu_log_det

    return gpu_log_det.log_det(matrix)


def make_step(plain: Callable[..., Any], flow: Any, *args: Any) -> Any:
    if flow.device.type != "cuda":
        return plain(flow, *args)
    from ciflows.speed import capture

    return capture.make_step(plain, flow, *args)


VERSIONS: dict[str, Callable[..., Any]] = {
    "on": on,
    "Indexed._log_weight": streams.log_weight,
    "LULinear.product": stacked.lu_product,
    "LipschitzMLP.forward": networks.lipschitz,
    "MaskedLinear.forward": stacked.masked_linear,
    "MaskedResidualNet.forward": stacked.masked_residual,
    "Perceptron.forward": networks.perceptron,
    "add_log_weights": streams.add,
    "encode_part": streams.encode_part,
    "affine": affine,
    "draw_normal": draw_normal,
    "log_det": log_det,
    "log_normal": log_normal,
    "make_step": make_step,
    "place_normal": place_normal,
    "pointwise": pointwise.pointwise,
    "spline": cpu_spline.spline,
    "spline_inverse": cpu_spline.spline_inverse,
}

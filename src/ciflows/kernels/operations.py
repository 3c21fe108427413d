"""Functions that start kernels, as operations of torch's own, which its compiler leaves whole."""

from __future__ import annotations

__all__ = ["operation", "refuse_twice"]

from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("ciflows", "DEF")


def operation(
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., Any] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make an operation of a function of tensors, which changes none of them.

    What `torch.library.custom_op` makes does the same, but loads the compiler at the first call.

    Arguments:
        fake: Makes results of the same shapes, without values.
        backward: Its gradients, from a context and those of its results; refused where None.
        setup_context: Keeps in that context what they need.
    """

    def make(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__.strip("_")
        _library.define(name + torch.library.infer_schema(function, mutates_args=()))
        _library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"ciflows::{name}", fake, lib=_library)
        torch.library.register_autograd(
            f"ciflows::{name}", backward or refuse_twice, setup_context=setup_context, lib=_library
        )
        made: Callable[..., Any] = getattr(torch.ops.ciflows, name).default
        return made

    return make


def refuse_twice(*_: Any) -> None:
    """Say that there is no second derivative; without this torch would take it for zero."""
    raise RuntimeError("Kernels on a GPU are differentiated once: take second derivatives on a CPU.")

"""What training maximises: the ELBO, IWAE's tighter bound, and the same with better gradients of q."""

from __future__ import annotations

__all__ = ["ELBO", "IWAE", "DReG", "Objective"]

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ciflows.densities import Density
from ciflows.estimate import log_mean_exp
from ciflows.flow import Flow
from ciflows.layers import beside_event
from ciflows.noise import Noise
from ciflows.prepared import detached
from ciflows.rows import Rows


class Objective(Protocol):
    """Maps a batch to the differentiable values (rows,) to be maximised, times the rows' weights."""

    def __call__(self, flow: Flow, batch: Tensor | Rows, noise: Noise | None = None) -> Tensor: ...


class ELBO:
    """The evidence lower bound from one draw, as in the paper; the log-likelihood of a plain flow."""

    def __call__(self, flow: Flow, batch: Tensor | Rows, noise: Noise | None = None) -> Tensor:
        rows = Rows.of(batch)
        return rows.weighted(flow.log_weight(rows.x, rows.context, noise))


class IWAE:
    """E log (1/K) Σ exp w_k (Burda et al., 2016): a bound that tightens with K.

    Arguments:
        draws: K.
    """

    def __init__(self, draws: int = 5) -> None:
        self.draws = draws

    def __call__(self, flow: Flow, batch: Tensor | Rows, noise: Noise | None = None) -> Tensor:
        rows = Rows.of(batch)
        _refuse_noise(flow)
        values = log_mean_exp(flow.log_weights(rows.x, self.draws, rows.context, noise))
        return rows.weighted(values)


class DReG:
    """IWAE's bound with doubly reparameterised gradients of q (Tucker et al., 2019).

    The gradient of q's own parameters φ is Σ w̃_k² (∂ log w_k / ∂u_k) (∂u_k / ∂φ), w̃ the normalised
    weights: the same on average as IWAE's, without the part whose signal-to-noise ratio falls with K.
    All other parameters get IWAE's gradient.

    Arguments:
        draws: K.
    """

    def __init__(self, draws: int = 5) -> None:
        self.draws = draws

    def __call__(self, flow: Flow, batch: Tensor | Rows, noise: Noise | None = None) -> Tensor:
        rows = Rows.of(batch)
        _refuse_noise(flow)
        paths = _PathNoise(noise.generator if noise is not None else None)
        log_weights = flow.log_weights(rows.x, self.draws, rows.context, paths)
        weights = torch.softmax(log_weights.detach(), dim=0)
        for u in paths.drawn:
            if u.requires_grad:
                u.register_hook(lambda grad: grad * beside_event(weights, grad.shape[weights.ndim :]))
        return rows.weighted(log_mean_exp(log_weights))


class _PathNoise(Noise):
    """Draws u so that φ is reached only through u, and keeps hold of that path."""

    def __init__(self, generator: torch.Generator | None) -> None:
        super().__init__(generator)
        self.drawn: list[Tensor] = []

    def posterior(self, density: Density, leading: torch.Size, context: Tensor) -> tuple[Tensor, Tensor]:
        tape = _Tape(self.generator)
        path = density.draw(leading, context.detach(), tape)
        self.drawn.append(path)
        wrapped = _PathDraw(density)
        fixed = {name: value.detach() for name, value in wrapped.named_parameters()}
        with detached(density):
            u, log_q = functional_call(wrapped, fixed, (leading, context, tape.replay(), path))
        return u, log_q


class _Tape(Noise):
    """Remembers its numbers, to give them once more."""

    def __init__(self, generator: torch.Generator | None, numbers: Sequence[Tensor] = ()) -> None:
        super().__init__(generator)
        self.waiting = list(numbers)
        self.given: list[Tensor] = []

    def replay(self) -> _Tape:
        return _Tape(self.generator, self.given)

    def normal(self, shape: Sequence[int], like: Tensor) -> Tensor:
        return self._keep(self.waiting.pop(0) if self.waiting else super().normal(shape, like))

    def uniform(self, shape: Sequence[int], like: Tensor) -> Tensor:
        return self._keep(self.waiting.pop(0) if self.waiting else super().uniform(shape, like))

    def _keep(self, numbers: Tensor) -> Tensor:
        self.given.append(numbers)
        return numbers


class _PathDraw(nn.Module):
    """u as a function of all but φ, with the path through φ added on; log q with φ held fixed.

    A module, since `functional_call` swaps the parameters of modules alone.
    """

    def __init__(self, density: Density) -> None:
        super().__init__()
        self.density = density

    def forward(
        self, leading: torch.Size, context: Tensor, tape: _Tape, path: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self.density.draw_with_log_prob(leading, context, tape, shift=path - path.detach())


def _refuse_noise(flow: Flow) -> None:
    if flow.noisy:
        raise ValueError(
            "Objectives with several draws need exact log-determinants in training: estimated ones "
            "would raise the bound by their own noise. Use log_det = 'exact', or the ELBO."
        )

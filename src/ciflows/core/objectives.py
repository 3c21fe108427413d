"""Training objectives: the ELBO, IWAE's tighter bound, and DReG, the same with better gradients of q."""

from __future__ import annotations

__all__ = ["ELBO", "IWAE", "OBJECTIVES", "DReG", "Objective"]

import copy
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ciflows.core.density import Density
from ciflows.core.evaluate import log_mean_exp
from ciflows.core.flow import Flow
from ciflows.core.layer import beside_event
from ciflows.core.noise import Noise
from ciflows.core.rows import Rows


class Objective(Protocol):
    """Maps a batch to the differentiable values (rows,) to be maximised, times the rows' weights.

    Attributes:
        several_draws: Whether it takes `draws` of the index for each row. Such a bound needs exact
            log-determinants: noise in them would raise it.
    """

    several_draws: bool

    def __call__(self, flow: Flow, batch: Tensor | Rows, noise: Noise | None = None) -> Tensor: ...


class ELBO:
    """The evidence lower bound from one draw, as in the paper; the log-likelihood of a plain flow."""

    several_draws = False

    def __call__(self, flow: Flow, batch: Tensor | Rows, noise: Noise | None = None) -> Tensor:
        rows = Rows.of(batch)
        return rows.weighted(flow.log_weight(rows.x, rows.context, noise))


class IWAE:
    """E log (1/K) Σ exp w_k (Burda et al., 2016): a bound that tightens with K.

    Arguments:
        draws: K.
    """

    several_draws = True

    def __init__(self, draws: int = 5) -> None:
        self.draws = draws

    def __call__(self, flow: Flow, batch: Tensor | Rows, noise: Noise | None = None) -> Tensor:
        rows = Rows.of(batch)
        _refuse_noise(flow)
        values = log_mean_exp(flow.log_weights(rows.x, self.draws, rows.context, noise))
        return rows.weighted(values)


class DReG(IWAE):
    """IWAE's bound with doubly reparameterised gradients of q (Tucker et al., 2019).

    The gradient of q's own parameters φ is Σ w̃_k² (∂ log w_k / ∂u_k) (∂u_k / ∂φ), w̃ the normalised
    weights: the same on average as IWAE's, without the part whose signal-to-noise ratio falls with K.
    All other parameters get IWAE's gradient.
    """

    def __call__(self, flow: Flow, batch: Tensor | Rows, noise: Noise | None = None) -> Tensor:
        rows = Rows.of(batch)
        _refuse_noise(flow)
        paths = _PathNoise(noise or Noise())
        log_weights = flow.log_weights(rows.x, self.draws, rows.context, paths)
        weights = torch.softmax(log_weights.detach(), dim=0)
        for u in paths.drawn:
            if u.requires_grad:
                u.register_hook(lambda grad: grad * beside_event(weights, grad.shape[weights.ndim :]))
        return rows.weighted(log_mean_exp(log_weights))


# names in settings; a class with several draws takes their number
OBJECTIVES: dict[str, type[Any]] = {"elbo": ELBO, "iwae": IWAE, "dreg": DReG}


class _PathNoise(Noise):
    """Draws u so that φ gets gradients only through u, and keeps each u to scale them."""

    def __init__(self, source: Noise) -> None:
        super().__init__(source.generator)
        self.source = source
        self.drawn: list[Tensor] = []

    def from_draw(self, first: int) -> _PathNoise:
        noise = copy.copy(self)
        noise.source = self.source.from_draw(first)
        return noise

    def normal(self, shape: Sequence[int], like: Tensor) -> Tensor:
        return self.source.normal(shape, like)

    def uniform(self, shape: Sequence[int], like: Tensor) -> Tensor:
        return self.source.uniform(shape, like)

    def posterior(self, density: Density, leading: torch.Size, context: Tensor) -> tuple[Tensor, Tensor]:
        tape = _Tape(self.source)
        path = density.draw(leading, context.detach(), tape)
        self.drawn.append(path)
        wrapped = _PathDraw(density)
        fixed = {name: value.detach() for name, value in wrapped.named_parameters()}
        u, log_q = functional_call(wrapped, fixed, (leading, context, tape.replay(), path))
        return u, log_q


class _Tape(Noise):
    """Records its numbers, so that they can be replayed."""

    def __init__(self, source: Noise, numbers: Sequence[Tensor] = ()) -> None:
        super().__init__(source.generator)
        self.source = source
        self.waiting = list(numbers)
        self.recorded: list[Tensor] = []

    def replay(self) -> _Tape:
        return _Tape(self.source, self.recorded)

    def normal(self, shape: Sequence[int], like: Tensor) -> Tensor:
        return self._keep(self.waiting.pop(0) if self.waiting else self.source.normal(shape, like))

    def uniform(self, shape: Sequence[int], like: Tensor) -> Tensor:
        return self._keep(self.waiting.pop(0) if self.waiting else self.source.uniform(shape, like))

    def _keep(self, numbers: Tensor) -> Tensor:
        self.recorded.append(numbers)
        return numbers


class _PathDraw(nn.Module):
    """u as a function of all but φ, plus the path through φ; log q with φ held fixed.

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

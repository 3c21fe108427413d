"""Residual blocks: f⁻¹(x) = x + g(x) with Lip g < 1 (Chen et al., 2019)."""

from __future__ import annotations

__all__ = ["Residual"]

import math

import torch
from torch import Tensor

from ciflows.core.layer import Bijection, leading_shape
from ciflows.core.noise import Noise
from ciflows.errors import InversionError
from ciflows.layers.log_det import EXACT_LIMIT, Exact, LogDet, default_log_det, with_jacobian
from ciflows.networks.lipschitz import LipschitzNetwork

ROUNDING_STEPS = 32.0


class Residual(Bijection):
    """z = x + g(x), inverted by an accelerated fixed-point iteration x ← z - g(x).

    Arguments:
        network: g, with a Lipschitz constant below 1.
        log_det: How to compute the log-determinant; `default_log_det` if None.
        training_log_det: How to compute it in training mode, if differently.
        max_iterations: The most evaluations of g in `decode`.
        memory: How many past iterates the acceleration (Anderson's) combines.

    Example:
        >>> from ciflows.networks import LipschitzMLP
        >>> layer = Residual(LipschitzMLP(2, hidden=[32, 32])).double()
        >>> x = torch.randn(5, 2).double()
        >>> z, log_det = layer.encode(x)
        >>> bool(((layer.decode(z) - x).abs() < 1e-12).all())
        True
    """

    def __init__(
        self,
        network: LipschitzNetwork,
        log_det: LogDet | None = None,
        training_log_det: LogDet | None = None,
        max_iterations: int = 1000,
        memory: int = 4,
    ) -> None:
        super().__init__(network.shape, context_shape=network.context_shape)
        self.network = network
        self.log_det: LogDet = log_det or default_log_det(network.shape)
        self.training_log_det: LogDet = training_log_det or self.log_det
        self.max_iterations = max_iterations
        self.memory = min(memory, math.prod(network.shape))

    @property
    def noisy(self) -> bool:
        return self._log_det.noisy

    @property
    def pure(self) -> tuple[str, ...]:
        return ("_encode",) if isinstance(self._log_det, Exact) else ()

    @property
    def _log_det(self) -> LogDet:
        return self.training_log_det if self.training else self.log_det

    def _encode(self, x: Tensor, context: Tensor | None, noise: Noise) -> tuple[Tensor, Tensor]:
        g, log_det = self._log_det(self.network, x, context, noise)
        return x + g, log_det

    def _decode(self, z: Tensor, context: Tensor | None, noise: Noise) -> Tensor:
        leading = leading_shape(z, self.shape)
        rows = z.reshape(-1, math.prod(self.shape))
        if context is not None and self.context_shape is not None:
            context = context.expand(*leading, *self.context_shape)
            context = context.reshape(len(rows), *self.context_shape)
        with torch.no_grad():
            x = self._solve(rows, context)
        if torch.is_grad_enabled():
            x = self._attach(x, rows, context)
        return x.reshape(z.shape)

    def _g(self, rows: Tensor, context: Tensor | None) -> Tensor:
        """g of rows (rows, d), as such rows."""
        return self.network(rows.reshape(-1, *self.shape), context=context)[0].flatten(1)

    def _solve(self, z: Tensor, context: Tensor | None) -> Tensor:
        """Solve x + g(x) = z for rows (rows, d), to rounding error; they leave as they converge.

        Anderson's acceleration: the next iterate is the combination of past ones whose residuals, to
        first order, add up to the least; where that did not shrink a row's residual, the plain step,
        which always contracts, is taken from the best iterate so far.
        """
        eps, scale = torch.finfo(z.dtype).eps, z.norm(dim=-1).clamp(min=1)
        tolerance, loose = ROUNDING_STEPS * eps * scale, eps**0.5 * scale
        solution, active = z.clone(), torch.arange(len(z), device=z.device)
        x, best, least = z, z, z.new_full((len(z),), torch.inf)
        better = torch.ones_like(active, dtype=torch.bool)
        past_x: list[Tensor] = []
        past_r: list[Tensor] = []
        for _ in range(self.max_iterations):
            some = None if context is None else context[active]
            residual = z[active] - self._g(x, some) - x
            size = residual.norm(dim=-1)  # the norm in which the plain step contracts
            # a plain step that shortens nothing has met the rounding of g's hidden units
            near = loose[active].maximum(eps**0.5 * x.norm(dim=-1))
            done = (size <= tolerance[active]) | (~better & (size >= least) & (size <= near))
            if bool(done.any()):
                solution[active[done]] = x[done]
                if bool(done.all()):
                    return solution
                keep = ~done
                active, x, residual, size = active[keep], x[keep], residual[keep], size[keep]
                best, least = best[keep], least[keep]
                past_x = [past[keep] for past in past_x]
                past_r = [past[keep] for past in past_r]
            better = size < least
            least = torch.where(better, size, least)
            best = torch.where(better[:, None], x + residual, best)
            past_x, past_r = [*past_x[-self.memory :], x], [*past_r[-self.memory :], residual]
            x = torch.where(better[:, None], _anderson(past_x, past_r), best)
        raise InversionError(
            f"{len(active)} of {len(z)} rows did not converge in {self.max_iterations} iterations; "
            f"largest residual {least.max().item():.2e}, tolerance {tolerance[active].min().item():.2e}."
        )

    def _attach(self, x: Tensor, z: Tensor, context: Tensor | None) -> Tensor:
        """Give the solution its gradient by the implicit function theorem: one Newton step, with
        I + J held fixed."""
        residual = x + self._g(x, context) - z
        if x.shape[1] > EXACT_LIMIT:
            if residual.requires_grad:
                residual.register_hook(lambda grad: self._solve_adjoint(x, grad, context))
            return x - residual
        with torch.no_grad():
            matrix = with_jacobian(self.network, x.reshape(-1, *self.shape), context)[1]
        return x - torch.linalg.solve(matrix.movedim(0, -1), residual)

    def _solve_adjoint(self, x: Tensor, grad: Tensor, context: Tensor | None) -> Tensor:
        """Solve (I + Jᵀ) w = grad for rows (rows, d) by w ← grad - Jᵀ w, without the matrix."""
        with torch.enable_grad():
            point = x.detach().requires_grad_()
            g = self._g(point, context)
        tolerance = ROUNDING_STEPS * torch.finfo(x.dtype).eps * grad.norm(dim=1)
        w = grad
        for _ in range(self.max_iterations):
            before, (product,) = w, torch.autograd.grad(g, point, w, retain_graph=True)
            w = grad - product
            if not bool(((w - before).norm(dim=1) > tolerance).any()):
                break
        return w


def _anderson(past_x: list[Tensor], past_r: list[Tensor]) -> Tensor:
    """The accelerated iterate from past iterates and residuals r = z - g(x) - x, each (rows, d)."""
    x, r = past_x[-1], past_r[-1]
    if len(past_x) == 1:
        return x + r
    dx = torch.stack(past_x, dim=-1).diff(dim=-1)
    dr = torch.stack(past_r, dim=-1).diff(dim=-1)
    limits = torch.finfo(x.dtype)
    scale = dr.abs().amax((-2, -1), keepdim=True).clamp(min=limits.tiny)
    scaled = dr / scale
    ridge = 10 * limits.eps * torch.eye(dr.shape[-1], dtype=x.dtype, device=x.device)
    gamma = torch.linalg.solve(scaled.mT @ scaled + ridge, scaled.mT @ (r[..., None] / scale))
    return x + r - ((dx + dr) @ gamma).squeeze(-1)

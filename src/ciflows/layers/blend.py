"""Mixtures of whole densities, such as flows that were trained from different starts."""

from __future__ import annotations

__all__ = ["Blend", "blend_flows", "fit_shares"]

from collections.abc import Sequence
from itertools import takewhile

import torch
from torch import Tensor, nn

from ciflows.core.density import Density
from ciflows.core.flow import Flow
from ciflows.core.layer import Shape, check_shape, common_context, module_list
from ciflows.core.noise import Noise

ITERATIONS = 500


class Blend(Density):
    """p(x) = Σ_k w_k p_k(x): a discrete index k chooses the density. Exact where its members are.

    Arguments:
        members: The densities p_k, of the same shape.
        shares: Their probabilities w_k (K,); equal ones if None.

    Example:
        >>> from ciflows import build_model
        >>> members = [build_model("maf", features=2, layers=1, hidden=[8], seed=k) for k in range(2)]
        >>> Blend(members, torch.tensor([0.9, 0.1])).log_weight(torch.zeros(5, 2)).shape
        torch.Size([5])
    """

    reparameterised = False  # a draw chooses a member, which no gradient passes

    def __init__(self, members: Sequence[Density], shares: Tensor | None = None) -> None:
        if not members or any(member.shape != members[0].shape for member in members):
            raise ValueError("Blend: give at least one density, all of the same shape.")
        super().__init__(members[0].shape, common_context(members, "Blend: its members"))
        self.members = module_list(members)
        equal = torch.full((len(members),), 1 / len(members))
        self.log_shares = nn.Buffer((equal if shares is None else shares).float().log())

    @property
    def exact(self) -> bool:
        return all(member.exact for member in self.members)

    @property
    def noisy(self) -> bool:
        return any(member.noisy for member in self.members)

    def log_weight(self, x: Tensor, context: Tensor | None = None, noise: Noise | None = None) -> Tensor:
        check_shape(x, self.shape, "Blend")
        terms = [member.log_weight(x, context, noise) for member in self.members]
        return torch.logsumexp(torch.stack(terms, dim=-1) + self.log_shares, dim=-1)

    def draw(self, leading: Shape, context: Tensor | None = None, noise: Noise | None = None) -> Tensor:
        noise, bounds = noise or Noise(), self.log_shares.exp().cumsum(0)[:-1]
        which = torch.searchsorted(bounds, noise.uniform(tuple(leading), like=bounds))
        which = which.reshape(*leading, *[1] * len(self.shape))
        first, *others = (member.draw(leading, context, noise) for member in self.members)
        for number, other in enumerate(others, start=1):
            first = torch.where(which == number, other, first)
        return first


def blend_flows(flows: Sequence[Flow], shares: Tensor | None = None) -> Flow:
    """The mixture of flows, as a flow of the first layers that are the same object in all of them.

    Arguments:
        flows: The flows; their layers are shared with the result, not copied.
        shares: Their probabilities (K,); equal ones if None.
    """
    stacks = [list(flow.layers) for flow in flows]
    same = takewhile(
        lambda layers: all(layer is layers[0] for layer in layers), zip(*stacks, strict=False)
    )
    common = [layers[0] for layers in same]
    rest = [Flow(stack[len(common) :], flow.base) for stack, flow in zip(stacks, flows, strict=True)]
    return Flow(common, Blend(rest, shares))


def fit_shares(log_probs: Tensor, weight: Tensor | None = None) -> Tensor:
    """The probabilities (K,) with which a mixture gives rows the largest likelihood, by EM.

    As if one row more belonged to all members alike.

    Arguments:
        log_probs: log p_k of each row (K, rows).
        weight: Weights of the rows (rows,); 1 each if None.

    Example:
        >>> fit_shares(torch.tensor([[0.0] * 4, [-9.0] * 4])).round(decimals=2).tolist()
        [0.9, 0.1]
    """
    log_probs = log_probs.double()
    weight = torch.ones_like(log_probs[0]) if weight is None else weight.double()
    members, rows = len(log_probs), weight.sum() + 1
    shares = torch.full((members, 1), 1 / members).to(log_probs)
    for _ in range(ITERATIONS):
        memberships = torch.softmax(log_probs + shares.log(), dim=0)
        shares = ((weight * memberships).sum(1, keepdim=True) + 1 / members) / rows
    return shares[:, 0]

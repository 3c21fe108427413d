"""Columns with atoms: values that have a probability of their own."""

from __future__ import annotations

__all__ = ["Jumps"]

from collections.abc import Callable

import torch
from torch import Tensor

from ciflows.core.noise import Noise
from ciflows.tables.marginals import Marginal, Smooth, log_normal, normal_between, quantile
from ciflows.tables.rounded import Rounded

TAIL = 30.0  # beyond this score Φ is near the end of float64


def _by_column(search: Callable[..., Tensor], table: Tensor, x: Tensor, **options: bool) -> Tensor:
    """Search for x (*, columns), each column in its own row of a table (columns, most)."""
    columns = x.reshape(-1, x.shape[-1]).T.contiguous()
    return search(table.contiguous(), columns, **options).T.reshape(x.shape)


def _take(table: Tensor, place: Tensor) -> Tensor:
    """The entries of a table (columns, most) at places (*, columns), each column in its own row."""
    return _by_column(lambda rows, places: rows.gather(1, places), table, place)


class Jumps(Marginal):
    """Columns with atoms, and a map T for all other values.

    With atoms a of probability p_a and r = 1 - Σ p_a the score is the normal quantile of the
    distribution function G(x) = Σ_{a < x} p_a + r Φ(T(x)), which jumps by p_a at each atom; on a jump
    it is drawn:

        no atom:   z = Φ⁻¹(G(x)),           log_weight = log r + log φ(T(x)) + log T'(x) - log φ(z)
        an atom:   z = Φ⁻¹(G(x-) + p_x v),  log_weight = log p_x - log φ(z)

    An atom on a lattice or grid has its own probability there and that of its place: p_x is their sum.

    Arguments:
        rest: The map for the values between atoms.
        atoms: The atoms of each column in ascending order (columns, most), filled up with NaN.

    Example:
        >>> import math
        >>> from ciflows.core.density import LOG_2_PI
        >>> rest = Smooth(torch.tensor([0.0]), torch.tensor([math.inf]))
        >>> layer = Jumps(rest, torch.tensor([[0.0]]))
        >>> layer.probabilities.fill_(0.4)
        tensor([[0.4000]], dtype=torch.float64)
        >>> z, log_weight = layer.encode(torch.zeros(3, 1).double(), Noise())
        >>> torch.exp(log_weight - 0.5 * (z**2 + LOG_2_PI)).flatten()
        tensor([0.4000, 0.4000, 0.4000], dtype=torch.float64)
    """

    atoms: Tensor
    probabilities: Tensor

    def __init__(self, rest: Smooth | Rounded, atoms: Tensor) -> None:
        super().__init__(rest.columns)
        self.rest = rest
        self._fix(atoms=atoms)
        self._keep(probabilities=torch.where(atoms.isnan(), 0.0, 1e-3))

    def find(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The place of the first atom that is no less than x (*, columns), and whether it is x itself.

        Where all atoms are less, it is that of the last.
        """
        atoms = self.atoms.nan_to_num(nan=torch.inf)
        place = _by_column(torch.searchsorted, atoms, x).clamp(max=atoms.shape[1] - 1)
        return place, _take(self.atoms, place) == x

    def encode(self, x: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
        place, is_atom = self.find(x)
        z_rest, log_rest = self._encode_rest(torch.where(is_atom, self.rest.inside(), x), place, noise)
        below, p, above = (_take(part, place) for part in self._edges())
        z_atom, log_atom = self._on_jump(below, p, above, noise)
        return torch.where(is_atom, z_atom, z_rest), torch.where(is_atom, log_atom, log_rest)

    def decode(self, z: Tensor, noise: Noise) -> Tensor:
        u, c = torch.special.ndtr(z), torch.special.ndtr(-z)
        edges = self._edges()
        place, on, passed = self._landed(u, c, *edges)
        below, width, above = (_take(part, place) for part in edges)
        before, p, behind = (_take(part, place) for part in self._around())
        none = ~on & ~passed  # z is below the first atom
        under = torch.where(none, 0.0, before + p * passed)
        over = torch.where(none, behind + p, behind)
        share = self._share()
        t = quantile((u - under) / share, (c - over) / share)
        t = self._far(z, t, under == 0, over == 0, forward=False)
        x = self.rest.decode(t, noise)
        noise.record(self, torch.where(on, self._off_jump(u, c, below, width, above), 0.0))
        return torch.where(on, _take(self.atoms, place), x)

    def _landed(
        self, u: Tensor, c: Tensor, below: Tensor, width: Tensor, above: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The last atom that begins at or before Φ(z) = u, whether z is on it, and whether beyond it.

        c = 1 - u has the digits where u is near 1. Where no atom begins before u, both are false.
        """
        real = self.probabilities > 0
        starts = torch.where(real, below, torch.inf)
        ends = torch.where(real, above + width, -torch.inf)
        by_u = _by_column(torch.searchsorted, starts, u, right=True)
        by_c = ends.shape[1] - _by_column(torch.searchsorted, ends.flip(-1), c)
        lower = u < 0.5
        begun = torch.where(lower, by_u, by_c)
        place = (begun - 1).clamp(min=0)
        ended = torch.where(lower, u >= _take(below + width, place), c <= _take(above, place))
        return place, (begun > 0) & ~ended, (begun > 0) & ended

    def _encode_rest(self, x: Tensor, place: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
        t, log_slope = self.rest.encode(x, noise)
        before, p, behind = (_take(part, place) for part in self._around())
        less = _take(self.atoms, place) < x  # all atoms are
        under = torch.where(less, before + p, before)
        over = torch.where(less, behind, behind + p)
        share = self._share()
        z = quantile(under + share * torch.special.ndtr(t), over + share * torch.special.ndtr(-t))
        log_weight = torch.log(share) + log_normal(t) - log_normal(z)
        far = ((under == 0) & (t < -TAIL)) | ((over == 0) & (t > TAIL))
        z = self._far(t, z, under == 0, over == 0, forward=True)
        return z, torch.where(far, 0.0, log_weight) + log_slope

    def _edges(self) -> tuple[Tensor, Tensor, Tensor]:
        """Probabilities of all values below each atom, of itself, and above it: (columns, most) each."""
        share = self._share()[:, None]
        t, t_after = (part.T for part in self.rest.edges(self.atoms.nan_to_num().T))
        before, p, behind = self._around()
        below, above = (share * torch.special.ndtr(part) for part in (t, -t_after))
        return before + below, p + share * normal_between(t, t_after), behind + above

    def _around(self) -> tuple[Tensor, Tensor, Tensor]:
        """Probabilities of the atoms before each, of itself, and of those behind: (columns, most)."""
        p = self.probabilities
        return p.cumsum(-1) - p, p, p.flip(-1).cumsum(-1).flip(-1) - p

    def _far(self, value: Tensor, mapped: Tensor, below: Tensor, above: Tensor, forward: bool) -> Tensor:
        """Go on with slope 1 beyond ±TAIL, on a side without atoms: Φ ends in float64 there."""
        log_share = torch.log(self._share())
        tail = value.new_tensor(TAIL)
        reached = quantile(torch.exp(log_share) * torch.special.ndtr(-tail), torch.ones_like(log_share))
        start, end = (-tail, reached) if forward else (reached, -tail)
        mapped = torch.where(below & (value < start), end + (value - start), mapped)
        return torch.where(above & (value > -start), -end + (value + start), mapped)

    def _share(self) -> Tensor:
        """r, the probability of all values that are no atoms: (columns,)."""
        return 1 - self.probabilities.sum(-1)

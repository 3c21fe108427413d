"""Networks: plain ones for the conditionals, Lipschitz ones for residual blocks."""

from ciflows.networks.lipschitz import LipschitzMLP, converge_norms, update_norms
from ciflows.networks.mlp import MLP

__all__ = ["MLP", "LipschitzMLP", "converge_norms", "update_norms"]

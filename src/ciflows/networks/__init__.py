"""Networks: plain ones for conditionals, Lipschitz ones for residual blocks, masked ones for splines."""

from ciflows.networks.lipschitz import LipschitzMLP, converge_norms, update_norms
from ciflows.networks.masked import MaskedResidualNet
from ciflows.networks.mlp import MLP

__all__ = ["MLP", "LipschitzMLP", "MaskedResidualNet", "converge_norms", "update_norms"]

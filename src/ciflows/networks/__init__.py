"""Networks: MLPs and ResNets, Lipschitz networks for residual blocks, masked networks for splines."""

from ciflows.networks.lipschitz import LipschitzMLP, converge_norms
from ciflows.networks.lipschitz_conv import LipschitzConvNet
from ciflows.networks.masked import MaskedMLP, MaskedResidualNet
from ciflows.networks.mlp import MLP, Perceptron
from ciflows.networks.resnet import ResNet, fold

__all__ = [
    "MLP",
    "LipschitzConvNet",
    "LipschitzMLP",
    "MaskedMLP",
    "MaskedResidualNet",
    "Perceptron",
    "ResNet",
    "converge_norms",
    "fold",
]

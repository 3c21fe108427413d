"""Networks: plain and convolutional, Lipschitz ones for residual blocks, masked ones for splines."""

from ciflows.networks.lipschitz import LipschitzMLP, converge_norms, update_norms
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
    "update_norms",
]

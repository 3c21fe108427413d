"""1×1 convolutions as products, against those of torch."""

import torch
from torch import nn

from ciflows.speed.pointwise import by_image


def test_products_by_image_are_the_convolution_with_its_gradients() -> None:
    torch.manual_seed(0)
    convolution = nn.Conv2d(6, 2, kernel_size=1)
    h = torch.randn(5, 6, 3, 4).contiguous(memory_format=torch.channels_last).requires_grad_()
    inputs = [h, *convolution.parameters()]
    values = convolution(h), by_image(convolution, h)
    slope = torch.randn_like(values[0])
    torch.testing.assert_close(*values)
    for expected, found in zip(*(torch.autograd.grad(y, inputs, slope) for y in values), strict=True):
        torch.testing.assert_close(found, expected)

"""ResNets (He et al. 2015, arXiv:1512.03385) for the examples, with the stride in the 3 x 3
convolution of a bottleneck, as most do today.
"""

from collections.abc import Callable

import torch
from torch import nn

# Layers: the kind of block, and the numbers of blocks of the four stages.
LAYERS = {
    18: ("basic", (2, 2, 2, 2)),
    34: ("basic", (3, 4, 6, 3)),
    50: ("bottleneck", (3, 4, 6, 3)),
    101: ("bottleneck", (3, 4, 23, 3)),
    152: ("bottleneck", (3, 8, 36, 3)),
}


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    """A convolution without a bias, and its batch norm."""
    layer = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return [layer, nn.BatchNorm2d(outputs)]


class Block(nn.Module):
    """relu(x + f(x)); x passes a projection where f changes its shape."""

    def __init__(self, kind: str, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        if kind == "basic":
            self.outputs = width
            layers = [
                *convolution(inputs, width, 3, stride), nn.ReLU(inplace=True),
                *convolution(width, width, 3),
            ]  # fmt: skip
        else:
            self.outputs = 4 * width
            layers = [
                *convolution(inputs, width, 1), nn.ReLU(inplace=True),
                *convolution(width, width, 3, stride), nn.ReLU(inplace=True),
                *convolution(width, self.outputs, 1),
            ]  # fmt: skip
        nn.init.zeros_(layers[-1].weight)  # a block begins as the identity (arXiv:1706.02677)
        self.change = nn.Sequential(*layers)
        same = stride == 1 and inputs == self.outputs
        self.shortcut = nn.Sequential(
            *([] if same else convolution(inputs, self.outputs, 1, stride))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.shortcut(x) + self.change(x))


def resnet(layers: int, classes: int = 1000) -> nn.Module:
    """For images of any size from 32 x 32 on, [batch, 3, height, width]."""
    kind, blocks = LAYERS[layers]
    stages: list[nn.Module] = []
    channels = 64
    for stage, count in enumerate(blocks):
        for number in range(count):
            stride = 2 if stage > 0 and number == 0 else 1
            stages.append(Block(kind, channels, 64 << stage, stride))
            channels = stages[-1].outputs
    return nn.Sequential(
        *convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
        *stages,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes),
    )  # fmt: skip


MODELS: dict[str, Callable[..., nn.Module]] = {
    f"resnet{layers}": lambda classes=1000, layers=layers: resnet(layers, classes)
    for layers in LAYERS
}

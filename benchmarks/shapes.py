"""Parameters and work of known models, computed from their architecture.

A layer is (name, shapes of its parameters, multiply-adds of its forward pass for one sample), in
the order of the forward pass; gradients appear in the opposite order. Sources: He et al., "Deep
residual learning for image recognition", 2016 (ResNet-50 v1.5: the stride is in the 3 x 3
convolution); Simonyan and Zisserman, "Very deep convolutional networks", 2015 (VGG-16, D);
Krizhevsky et al., "ImageNet classification with deep convolutional neural networks", 2012, in
one tower as in "One weird trick", 2014 (AlexNet); Devlin et al., "BERT", 2019 (base, uncased).
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Layer(NamedTuple):
    name: str
    shapes: list[tuple[int, ...]]
    multiply_adds: float

    @property
    def elements(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)


def _convolution(name: str, inputs: int, outputs: int, kernel: int, size: int, bias: bool) -> Layer:
    """Return a convolution with outputs of `size` x `size`."""
    shapes: list[tuple[int, ...]] = [(outputs, inputs, kernel, kernel)]
    work = size * size * inputs * outputs * kernel * kernel
    return Layer(name, [*shapes, (outputs,)] if bias else shapes, work)


def _linear(name: str, inputs: int, outputs: int, rows: int = 1) -> Layer:
    return Layer(name, [(outputs, inputs), (outputs,)], rows * inputs * outputs)


def _norm(name: str, channels: int, positions: int) -> Layer:
    return Layer(name, [(channels,), (channels,)], 2 * channels * positions)


def resnet50() -> list[Layer]:
    """161 tensors, 25,557,032 parameters, 4.1 G multiply-adds of 224 x 224 images."""
    layers = [_convolution("conv1", 3, 64, 7, 112, False), _norm("bn1", 64, 112 * 112)]
    inputs, size = 64, 56
    for stage, (blocks, width) in enumerate([(3, 64), (4, 128), (6, 256), (3, 512)], 1):
        for block in range(blocks):
            before = size
            if block == 0 and stage > 1:
                size //= 2
            name = f"layer{stage}.{block}"
            for part, (wide_in, wide_out, kernel, side) in enumerate(
                [(inputs, width, 1, before), (width, width, 3, size), (width, 4 * width, 1, size)],
                1,
            ):
                layers.append(
                    _convolution(f"{name}.conv{part}", wide_in, wide_out, kernel, side, False)
                )
                layers.append(_norm(f"{name}.bn{part}", wide_out, side * side))
            if block == 0:
                down = f"{name}.downsample"
                layers.append(_convolution(f"{down}.0", inputs, 4 * width, 1, size, False))
                layers.append(_norm(f"{down}.1", 4 * width, size * size))
            inputs = 4 * width
    return [*layers, _linear("fc", 2048, 1000)]


def vgg16() -> list[Layer]:
    """32 tensors, 138,357,544 parameters, 15.5 G multiply-adds."""
    layers, inputs, size = [], 3, 224
    for stage, (count, width) in enumerate([(2, 64), (2, 128), (3, 256), (3, 512), (3, 512)]):
        for part in range(count):
            layers.append(_convolution(f"conv{stage}.{part}", inputs, width, 3, size, True))
            inputs = width
        size //= 2
    sides = [(512 * 49, 4096), (4096, 4096), (4096, 1000)]
    return [*layers, *(_linear(f"fc{i}", *side) for i, side in enumerate(sides))]


def alexnet() -> list[Layer]:
    """16 tensors, 61,100,840 parameters, 0.71 G multiply-adds."""
    convolutions = [(3, 64, 11, 55), (64, 192, 5, 27), (192, 384, 3, 13), (384, 256, 3, 13),
                    (256, 256, 3, 13)]  # fmt: skip
    sides = [(256 * 36, 4096), (4096, 4096), (4096, 1000)]
    return [
        *(_convolution(f"conv{i}", *c, True) for i, c in enumerate(convolutions)),
        *(_linear(f"fc{i}", *side) for i, side in enumerate(sides)),
    ]


def bert_base(length: int = 128) -> list[Layer]:
    """199 tensors, 109,482,240 parameters; sequences of `length` tokens."""
    width = 768
    layers = [
        Layer("embeddings.word", [(30522, width)], 0.0),
        Layer("embeddings.position", [(512, width)], 0.0),
        Layer("embeddings.type", [(2, width)], 0.0),
        _norm("embeddings.norm", width, length),
    ]
    for block in range(12):
        name = f"encoder.{block}"
        layers += [_linear(f"{name}.{part}", width, width, length) for part in ("query", "key")]
        value = _linear(f"{name}.value", width, width, length)
        attention = 2 * length * length * width  # scores, and their sum over values
        layers.append(value._replace(multiply_adds=value.multiply_adds + attention))
        layers += [
            _linear(f"{name}.attention.output", width, width, length),
            _norm(f"{name}.attention.norm", width, length),
            _linear(f"{name}.intermediate", width, 4 * width, length),
            _linear(f"{name}.output", 4 * width, width, length),
            _norm(f"{name}.norm", width, length),
        ]
    return [*layers, _linear("pooler", width, width)]


MODELS = {"ResNet-50": resnet50, "VGG-16": vgg16, "AlexNet": alexnet, "BERT-base": bert_base}


def tensors(layers: list[Layer]) -> list[tuple[int, ...]]:
    """Return the shapes of all parameters, in the order of the forward pass."""
    return [shape for layer in layers for shape in layer.shapes]


def small(count: int = 1000, nbytes: int = 1024) -> list[tuple[int, ...]]:
    return [(nbytes // 4,)] * count

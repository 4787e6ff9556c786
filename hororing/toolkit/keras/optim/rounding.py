"""Stochastic rounding: of weights, identical on all ranks; of activations, on each its own.

`hororing.toolkit.large_batch.stochastic_rounding` says what it is, and defines the random numbers.
The operations work in compiled train steps on every backend of Keras, with the same results.
"""

from __future__ import annotations

from typing import Any, Final

import keras
import numpy as np
from keras import ops

from hororing.toolkit.large_batch import stochastic_rounding as shared

# Words of 32 bits. torch has no operations on unsigned ones; TensorFlow has none on signed ones for
# GPUs. So `>>` may keep the sign here, and what needs that it does not cuts it off.
_ON_TORCH: Final = keras.backend.backend() == "torch"
_WORD: Final = "int32" if _ON_TORCH else "uint32"
_HALF: Final = "int16" if _ON_TORCH else "uint16"


def round_stochastically(
    values: Any,
    dtype: str = "bfloat16",
    *,
    seed: int,
    tensor: int = 0,
    step: Any = 0,
    stream: int = shared.IDENTICAL_STREAM,
) -> Any:
    """Return a float32 tensor, rounded at random to 16 bits. No gradient passes.

    Parameters
    ----------
    values : array_like
        Float32, any shape.
    dtype : {"float16", "bfloat16"}
        The type to round to.
    seed : int
        Of the run, from 0 to 2**64 - 1; see `shared_seed` of hororing.toolkit.large_batch.
    tensor, step : tensor or int, optional
        Numbers of the tensor and of the step, each with its own random numbers. The step may be
        a tensor of integers.
    stream : int, optional
        0 if all ranks need the same result, `rank_stream()` if each has its own.

    Examples
    --------
    >>> rounded = round_stochastically(tf.fill([3], 1.001), seed=1)  # 1 or 1.0078
    """
    _check_type(dtype)
    values = ops.convert_to_tensor(values)
    if keras.backend.standardize_dtype(values.dtype) != "float32":
        raise TypeError(f"stochastic rounding takes float32 tensors, not {values.dtype}")
    step = _word(step % 2**32) if isinstance(step, int) else ops.cast(step, _WORD)
    words = [
        step * _word(each) + _word(key)
        for key, each in zip(
            shared.keys(shared.checked_seed(seed), tensor, stream), shared.STEPS, strict=True
        )
    ]
    bits = ops.view(values, _WORD)
    random = _random_numbers(ops.shape(values), words)
    if dtype == "bfloat16":
        number = ops.where(ops.isnan(values), bits | _word(0x400000), bits + random)
        number = ops.right_shift(number, 16)
    else:
        number = _float16_bits(values, bits, random)
    return ops.view(ops.cast(number, _HALF), dtype)


def _random_numbers(shape: Any, words: list[Any]) -> Any:
    """Return 16 bits for each element of a tensor. Sums and products wrap around."""
    count = 1
    for extent in shape:
        count = count * extent
    x = ops.cast(ops.arange(0, (count + 1) // 2, dtype="int32"), _WORD) + words[0]
    x = (x ^ _shifted(x, 16)) * _word(shared.MULTIPLIERS[0]) + words[1]
    x = (x ^ _shifted(x, 15)) * _word(shared.MULTIPLIERS[1])
    high = _shifted(x, 16)
    numbers = ops.reshape(ops.stack([(x ^ high) & _word(0xFFFF), high], axis=1), (-1,))
    return ops.reshape(numbers[:count], shape)


def _float16_bits(values: Any, bits: Any, random: Any) -> Any:
    size = bits & _word(0x7FFFFFFF)
    small = ops.less(size, _word(0x38800000))  # 2**-14: below are float16's subnormal numbers
    units = ops.view(ops.where(small, size, ops.zeros_like(size)), "float32") * 2.0**40
    subnormal = ops.right_shift(ops.cast(units, _WORD) + random, 16)
    # 13 bits fall away, and a carry raises the exponent, up to infinity's.
    normal = ops.right_shift(size - _word(0x38000000) + ops.right_shift(random, 3), 13)
    normal = ops.where(ops.less(size, _word(0x47800000)), normal, _word(0x7C00))  # 2**16
    number = ops.where(small, subnormal, normal)
    number = ops.where(ops.isnan(values), _word(0x7E00), number)
    return number | (ops.right_shift(bits, 16) & _word(0xFFFF8000))


def _shifted(word: Any, by: int) -> Any:
    return ops.right_shift(word, by) & _word(0xFFFFFFFF >> by)


def _word(number: int) -> Any:
    """Return `number` in the type of words."""
    word = np.asarray(number, np.uint32).view(_WORD)
    return ops.convert_to_tensor(word, dtype=_WORD)


def _check_type(dtype: str) -> None:
    if dtype not in shared.SHORT:
        raise TypeError(f"stochastic rounding rounds to float16 or bfloat16, not to {dtype}")


@keras.saving.register_keras_serializable(package="hororing")
class StochasticCast(keras.layers.Layer):  # type: ignore[misc]  # Keras declares no types
    """Rounds activations at random to 16 bits, on every rank with its own random numbers.

    In evaluation it rounds to nearest. The number of calls in training is saved with the layer, for
    exact resumption. Gradients pass as through a cast.

    Parameters
    ----------
    to : {"bfloat16", "float16"}
        The type to round to.
    seed : int
        Of the run; layers with equal seeds need different `tensor` numbers.
    tensor : tensor, optional
        A number that is unique to the layer.
    **options : dict
        Of keras.layers.Layer: name, ...

    Examples
    --------
    >>> model = keras.Sequential([keras.layers.Dense(2), StochasticCast(seed=1)])
    >>> model(x).dtype
    tf.bfloat16
    """

    def __init__(self, to: str = "bfloat16", *, seed: int, tensor: int = 0, **options: Any) -> None:
        super().__init__(**{"dtype": "float32", **options})
        _check_type(to)
        self.to, self.seed, self.tensor = to, shared.checked_seed(seed), tensor
        self.calls = self.add_weight(
            shape=(), dtype="int32", initializer="zeros", trainable=False, name="calls"
        )

    def call(self, inputs: Any, training: bool = False) -> Any:
        """Return `inputs` (any shape) as `to`."""
        if not training:
            return ops.cast(inputs, self.to)
        step = ops.copy(self.calls)
        self.calls.assign(step + 1)

        def rounded(values: Any) -> Any:
            def gradient(*args: Any, upstream: Any = None) -> Any:
                return ops.cast(args[0] if upstream is None else upstream, "float32")

            stream = shared.rank_stream()
            where = {"seed": self.seed, "tensor": self.tensor, "step": step, "stream": stream}
            return round_stochastically(values, self.to, **where), gradient

        return ops.custom_gradient(rounded)(inputs)

    def compute_output_spec(self, inputs: Any, training: bool = False) -> Any:
        """Return shape and type of the result."""
        return keras.KerasTensor(inputs.shape, dtype=self.to)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments."""
        return {**super().get_config(), "to": self.to, "seed": self.seed, "tensor": self.tensor}

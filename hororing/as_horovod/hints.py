"""Hints for Keras 2 scripts that fail under Keras 3."""

from __future__ import annotations

import linecache
import traceback
from typing import Final

_OLD_KERAS: Final = (
    "or leave the script as it is and run it with Keras 2: pip install tf_keras, and set "
    "TF_USE_LEGACY_KERAS=1 (for tf.keras; docs/migrating.md)"
)

# A part of the error's text, a part of the script's line, and what to change.
_HINTS: Final = (
    (
        "'list' object is not callable",
        ".variables()",
        "in Keras 3 an optimizer's variables are a list: optimizer.variables, without brackets",
    ),
    (
        "'experimental_run_tf_function'",
        "",
        "model.compile of Keras 3 has no experimental_run_tf_function, which is of no use since "
        "TensorFlow 2.4: leave it out",
    ),
    (
        "Argument(s) not recognized: {'lr'",
        "",
        "optimizers of Keras 3 have learning_rate, as argument and attribute, instead of lr",
    ),
    (
        "be called for the variables it was originally built with",
        "",
        "Keras 3 does not load the optimizer's state from .h5 files, and that optimizer cannot "
        "train: save .keras files; if layers were frozen before, compile with a new optimizer",
    ),
    ("has no attribute 'lr'", "", "optimizers of Keras 3 have learning_rate instead of lr"),
    ("has no attribute 'fit_generator'", "", "model.fit of Keras 3 takes generators itself"),
    (
        "'ImageDataGenerator'",
        "",
        "Keras 3 has no ImageDataGenerator: use keras.utils.image_dataset_from_directory or a "
        "tf.data.Dataset, and augment by layers such as keras.layers.RandomFlip",
    ),
)


def hint(error: BaseException) -> str | None:
    """Return a hint if `error` is that of a script for Keras 2, else None."""
    text = str(error)
    lines = [
        linecache.getline(frame.filename, frame.lineno or 0)
        for frame in traceback.extract_tb(error.__traceback__)
    ]
    quoted = "\n".join([text, *lines])  # tf.function has the lines in its text
    for words, code, change in _HINTS:
        if words in text and code in quoted:
            return f"{change}; {_OLD_KERAS}"
    return None

"""Loads, on import, the operations that csrc/tensorflow registers with TensorFlow.

From then on TensorFlow can also load a SavedModel that contains them.
"""

from __future__ import annotations

import ctypes
import warnings
from pathlib import Path
from typing import Any, Final

import tensorflow as tf

LIBRARY: Final = Path(__file__).parents[2] / "lib" / "libhororing_tensorflow.so"


def load(library: Path) -> Any:
    """Return the operations as a module of functions.

    Raises
    ------
    ImportError : this TensorFlow cannot load them.
    """
    try:
        module = tf.load_op_library(str(library))
    except (tf.errors.OpError, OSError) as error:
        raise _refused(library, str(error)) from None
    loaded = ctypes.CDLL(str(library))
    if not hasattr(module, "hororing_submit"):
        problem = loaded.hororing_tensorflow_problem
        problem.restype = ctypes.c_char_p
        raise _refused(library, problem().decode())
    if loaded.hororing_tensorflow_blocks():
        warnings.warn(
            f"TensorFlow {tf.__version__} is not known to have asynchronous kernels that hororing "
            "can use: each operation that waits for other ranks blocks a thread, and graphs of "
            "tf.compat.v1 with many independent ones may hang; raise "
            "inter_op_parallelism_threads to their number, or use a TensorFlow from 2.18 to 2.22",
            RuntimeWarning,
            stacklevel=2,
        )
    return module


def _refused(library: Path, reason: str) -> ImportError:
    return ImportError(
        f"hororing.tensorflow cannot be used: TensorFlow {tf.__version__} does not load hororing's "
        f"operations from {library} ({reason}). Use TensorFlow 2.18 or later, and install hororing "
        "again in this environment where the file is missing or was built on another system",
        name="hororing.tensorflow",
        path=str(library),
    )


operations: Final = load(LIBRARY)

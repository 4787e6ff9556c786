"""Loads the operations that csrc/tensorflow registers with TensorFlow, when it is imported.

From then on TensorFlow can load a SavedModel that holds them, too.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, Final

import tensorflow as tf

from hororing import mpi

LIBRARY: Final = mpi.library().with_name("libhororing_tensorflow.so")


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
    if not hasattr(module, "hororing_submit"):
        problem = ctypes.CDLL(str(library)).hororing_tensorflow_problem
        problem.restype = ctypes.c_char_p
        raise _refused(library, problem().decode())
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

"""Loads the operations that csrc/tensorflow registers with TensorFlow.

They are looked for once, when hororing.tensorflow is imported. Where they cannot be had, requests
go through `tf.numpy_function` instead (hororing/tensorflow/requests.py).
"""

from __future__ import annotations

import ctypes
import functools
import logging
from types import ModuleType
from typing import Final

import tensorflow as tf

from hororing import config, mpi

LIBRARY: Final = mpi.library().with_name("libhororing_tensorflow.so")


@functools.cache
def operations() -> ModuleType | None:
    """The operations as a module of functions, or None where there are none."""
    if config.load()["TENSORFLOW_PLUGIN"] == "off":
        return None
    try:
        module: ModuleType = tf.load_op_library(str(LIBRARY))
    except (tf.errors.OpError, OSError) as error:
        _warn(str(error))
        return None
    if not hasattr(module, "hororing_submit"):
        problem = ctypes.CDLL(str(LIBRARY)).hororing_tensorflow_problem
        problem.restype = ctypes.c_char_p
        _warn(problem().decode())
        return None
    return module


def _warn(reason: str) -> None:
    logging.getLogger("hororing").warning(
        "hororing's operations for TensorFlow %s cannot be used: %s. Gradients go through "
        "tf.numpy_function instead: the same results, but all of a step's are sent after the last "
        "one is there, with Python's lock held while they are copied, and a SavedModel that holds "
        "a collective cannot be loaded elsewhere",
        tf.__version__,
        reason,
    )

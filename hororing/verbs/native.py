"""Public verbs whose usual calls need no frame of Python (csrc/python/verb.cc)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from hororing import collectives, names
from hororing._tensors import PlainTensors, Verb

F = TypeVar("F", bound=Callable[..., Any])


def native(function: F, tensors: PlainTensors, module: str) -> F:
    """Return what does as the verb `function`, which gets all calls that are not usual.

    Usual are calls with plain tensors, among all ranks. `module` is where the result is a global.
    """
    name = function.__name__
    parameters = tuple(
        (parameter.name, parameter.default)
        for parameter in inspect.signature(function).parameters.values()
    )
    counted = name.removesuffix("_").removesuffix("_async"), names.WORLD_SET
    verb = Verb(name, function, parameters, tensors, collectives.wait, names.counts, counted)
    functools.update_wrapper(verb, function)
    verb.__module__ = module  # as which it is pickled
    verb.__qualname__ = name
    return cast(F, verb)

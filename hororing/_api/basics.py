"""Horovod's module of this name: the functions about the process and its engine."""

from types import FunctionType, SimpleNamespace

from hororing._api import exports
from hororing._api.exports import *  # noqa: F403
from hororing._requests.process_sets import ids_and_ranks

__all__ = exports.__all__


def as_object() -> SimpleNamespace:
    """Return these functions as Horovod's `_basics`, an object that scripts and tests use."""
    exported = {name: getattr(exports, name) for name in __all__}
    functions = {name: each for name, each in exported.items() if isinstance(each, FunctionType)}
    return SimpleNamespace(**functions, _get_process_set_ids_and_ranks=ids_and_ranks)

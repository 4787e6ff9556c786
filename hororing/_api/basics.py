"""The functions about the process and its engine, under the names of Horovod's basics."""

from types import SimpleNamespace

from hororing._api import built, init
from hororing._api.built import *  # noqa: F403
from hororing._api.init import *  # noqa: F403
from hororing._engine import statistics
from hororing._engine.statistics import *  # noqa: F403
from hororing._requests import process_sets

__all__: list[str] = []
__all__ += built.__all__
__all__ += statistics.__all__
__all__ += init.__all__


def as_object() -> SimpleNamespace:
    """Return these functions as Horovod's `_basics`, an object that scripts and tests use."""
    return SimpleNamespace(
        **{name: globals()[name] for name in __all__},
        _get_process_set_ids_and_ranks=process_sets.ids_and_ranks,
    )

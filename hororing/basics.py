"""The functions about the process and its engine, under the names of Horovod's basics."""

from types import SimpleNamespace

from hororing import built, counters, process_sets, runtime
from hororing.built import *  # noqa: F403
from hororing.counters import *  # noqa: F403
from hororing.runtime import *  # noqa: F403

__all__: list[str] = []
__all__ += built.__all__
__all__ += counters.__all__
__all__ += runtime.__all__


def as_object() -> SimpleNamespace:
    """Return these functions as Horovod's `_basics`, an object that scripts and tests use."""
    return SimpleNamespace(
        **{name: globals()[name] for name in __all__},
        _get_process_set_ids_and_ranks=process_sets.ids_and_ranks,
    )

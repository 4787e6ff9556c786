"""Ranks on a Ray cluster.

`RayExecutor` has the methods of Horovod's executor. `HororingConfig` is the backend for Ray Train.
`search` runs trials under Ray Tune.
Both need Ray on this machine, and hororing on all machines of the cluster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

try:
    import ray as _ray  # noqa: F401
except ImportError as error:
    raise ImportError(f"hororing.ray needs Ray ({error}): pip install 'hororing[ray]'") from error

from hororing.ray.executor import RayExecutor

__all__ = ["HororingConfig", "RayExecutor", "search"]

if TYPE_CHECKING:
    from hororing.ray.train import HororingConfig
    from hororing.ray.tuning import search
else:

    def __getattr__(name: str) -> object:
        """Names loaded on demand: Ray Train and Ray Tune need more packages than Ray itself."""
        if name == "HororingConfig":
            from hororing.ray.train import HororingConfig

            return HororingConfig
        if name == "search":
            from hororing.ray.tuning import search

            return search
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Which ranks share the statistics of batch normalisation: groups of consecutive ranks."""

from __future__ import annotations

from typing import Any

from hororing._engine import state
from hororing._requests import process_sets
from hororing._requests.process_sets import ProcessSet, check_type, global_process_set


class Grouped:
    """Has the ranks that share a layer's statistics. A mixin, placed before the layer's class."""

    process_set: ProcessSet
    group_size: int | None

    def _title(self) -> str:
        """Return the layer's name, for messages."""
        raise NotImplementedError

    def share(self, process_set: ProcessSet, group_size: int | None) -> None:
        """Set who shares statistics. Called at the end of `__init__`."""
        self.process_set = process_set
        self._group: ProcessSet | None = None
        self.group_size = group_size
        if group_size is not None:
            self._register_groups(group_size)

    def _sharing(self) -> ProcessSet | None:
        """Return the ranks that share statistics with this one; None if there are none."""
        state.topology()
        if self.process_set.process_set_id is None:  # it may have been registered by its ranks
            self.process_set = process_sets.find(self.process_set.ranks) or self.process_set
        process_sets.check_member(self.process_set, self._title())
        if self.group_size is None:
            return self.process_set
        group = self._group
        if group is None or group.process_set_id is None or len(group.ranks) != self.group_size:
            self._register_groups(self.group_size)  # the groups belong to an earlier job
        return self._group

    def _register_groups(self, group_size: int) -> None:
        """Make process sets of the groups: all ranks of the job call it.

        ValueError if `group_size` does not divide the set. A rank alone in its group has none.
        """
        state.topology()
        ranks = self.process_set.ranks
        if type(group_size) is not int or group_size < 1 or len(ranks) % group_size:
            raise ValueError(
                f"{self._title()}: group_size={group_size!r} does not divide the "
                f"{len(ranks)} ranks of its process set; use one of "
                f"{[n for n in range(1, len(ranks) + 1) if len(ranks) % n == 0]}"
            )
        self._group = None
        if group_size > 1:
            for first in range(0, len(ranks), group_size):
                group = process_sets.obtain(ranks[first : first + group_size])
                if group.included():
                    self._group = group


class GroupedLayer(Grouped):
    """The common part of Keras layers that share statistics, for every backend."""

    path: str
    name: str

    @staticmethod
    def check_arguments(keras: Any, process_set: object, options: dict[str, Any]) -> None:
        """Check that this Keras has the method that layers override, and a layer's arguments."""
        if not hasattr(keras.layers.BatchNormalization, "_moments"):
            raise NotImplementedError(
                f"SyncBatchNormalization does not know the BatchNormalization of Keras "
                f"{keras.__version__}, which would use each rank's own statistics; use Keras 3.15"
            )
        if options.get("synchronized"):
            raise ValueError(
                "SyncBatchNormalization: synchronized=True is for tf.distribute; leave it out"
            )
        check_type(process_set, "SyncBatchNormalization")

    def get_config(self) -> dict[str, Any]:
        """Return the configuration of an equal layer."""
        everybody = self.process_set is global_process_set
        return {
            **super().get_config(),  # type: ignore[misc]
            "process_set": None if everybody else list(self.process_set.ranks),
            "group_size": self.group_size,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Make a layer from `get_config()`. It does not communicate before training."""
        config = dict(config)
        ranks, group_size = config.pop("process_set", None), config.pop("group_size", None)
        layer = super().from_config(config)  # type: ignore[misc]
        if ranks is not None:
            layer.process_set = process_sets.find(ranks) or ProcessSet(ranks)
        layer.group_size = group_size
        return layer

    def _title(self) -> str:
        return f"SyncBatchNormalization '{self.path or self.name}'"

    def _empty(self) -> str:
        return (
            f"{self._title()}: the batches of all ranks are empty; training needs values. Pass "
            "larger batches, or call the layer with training=False"
        )

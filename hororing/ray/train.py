"""The backend for Ray Train."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import ray
from ray.train.backend import Backend, BackendConfig

from hororing._engine.shutdown import shutdown
from hororing._job.rendezvous.store import Store
from hororing.ray import ranks

_LEAVE_S = 5.0


@dataclass
class HororingConfig(BackendConfig):  # type: ignore[misc]
    """Makes the workers of a trainer ranks of one job.

    It replaces `TorchConfig`, or that of another trainer. The training function calls `hvd.init()`
    itself; `hvd.rank()` is then Ray Train's world rank.

    Parameters
    ----------
    env : dict of str to str, optional
        Variables for all workers, in addition to the HORORING_* and HOROVOD_* variables of the
        process that makes this object.

    Examples
    --------
    >>> trainer = ray.train.torch.TorchTrainer(
    ...     train,
    ...     torch_config=HororingConfig(),
    ...     scaling_config=ray.train.ScalingConfig(num_workers=4),
    ... )
    """

    env: dict[str, str] = field(default_factory=dict)
    backend: ClassVar[str] = "hororing"  # TorchTrainer reads it

    def __post_init__(self) -> None:
        self.env = ranks.variables(more=self.env)

    @property
    def backend_cls(self) -> type[Backend]:
        """Ray Train calls these after workers have started, and before they end."""
        return _HororingBackend


class _HororingBackend(Backend):  # type: ignore[misc]
    _store: Store | None = None

    def on_start(self, worker_group: Any, backend_config: HororingConfig) -> None:
        self._stop()  # of workers that failed
        locations = worker_group.execute(ranks.locate)
        self._store, secret, environments = ranks.start_store(locations, backend_config.env)
        ray.get(
            [
                worker_group.execute_single_async(rank, ranks.become, each, secret)
                for rank, each in enumerate(environments)
            ]
        )

    def on_shutdown(self, worker_group: Any, backend_config: HororingConfig) -> None:
        leaving = worker_group.execute_async(shutdown)
        ray.wait(leaving, num_returns=len(leaving), timeout=_LEAVE_S)
        self._stop()

    def _stop(self) -> None:
        if self._store is not None:
            self._store.stop()
            self._store = None

"""Makes processes that Ray started ranks of one job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from hororing import launch, runtime
from hororing.hororun import plan, start
from hororing.hororun.agent import free_port
from hororing.hororun.local import memory_file
from hororing.hororun.plan import Rendezvous
from hororing.rendezvous import protocol
from hororing.rendezvous.store import Store


@dataclass(frozen=True)
class Where:
    """The place of a process, as it reports it."""

    node: str  # its id in Ray
    address: str  # of the node, for other nodes
    port: int  # a free port
    gpus: tuple[str, ...]  # those that Ray has assigned to this process


def where() -> Where:
    """Return it, in a process of Ray."""
    context = ray.get_runtime_context()
    return Where(
        context.get_node_id(),
        ray.util.get_node_ip_address(),
        free_port(),
        tuple(str(each) for each in ray.get_gpu_ids()),
    )


def meet(
    ranks: Sequence[Where], variables: Mapping[str, str]
) -> tuple[Store, bytes, list[dict[str, str]]]:
    """Start the store of a job in this process.

    Parameters
    ----------
    ranks : their places.
    variables : for all ranks, in addition to those of their rank.

    Returns
    -------
    The store, the job's secret, and the variables of each rank.
    """
    here = where()
    several = any(each.node != here.node for each in ranks)
    store, secret = start.new_store(len(ranks), several)
    store.start_thread()
    rendezvous = Rendezvous(
        store.job,
        protocol.show_address(here.address if several else "127.0.0.1", store.port),
        (ranks[0].address, ranks[0].port),
    )
    told = []
    for place in plan.by_host([each.node for each in ranks]):
        # The devices of all neighbours, so that local ranks are device numbers.
        gpus = dict.fromkeys(gpu for each in ranks if each.node == place.host for gpu in each.gpus)
        devices = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
        told.append({**variables, **devices, **plan.environment(place, len(ranks), rendezvous)})
    return store, secret, told


def become(told: Mapping[str, str], secret: bytes) -> None:
    """Make this process a rank, before it calls `init`."""
    launch.become({**told, "HORORING_SECRET_FD": str(memory_file("secret", secret))})


def leave() -> None:
    """Shut down, unless the rank has done so."""
    runtime.shutdown()


def variables(
    interface: str | None = None, more: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """The settings of this process for ranks, most of which must be the same on all."""
    chosen = {"HORORING_INTERFACE": interface} if interface else {}
    return {
        **start.settings(),
        **chosen,
        **{name: str(value) for name, value in (more or {}).items()},
    }

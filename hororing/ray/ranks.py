"""Makes processes that Ray started ranks of one job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from hororing._job.rendezvous import protocol
from hororing._job.rendezvous.store import Store
from hororing.config import environment
from hororing.hororun.host.agent import free_port
from hororing.hororun.host.local import memory_file
from hororing.hororun.job import plan, start
from hororing.hororun.job.plan import Rendezvous


@dataclass(frozen=True)
class Location:
    """The node of a process, with its port and GPUs."""

    node: str  # its id in Ray
    address: str  # of the node, for other nodes
    port: int  # a free port
    gpus: tuple[str, ...]  # those that Ray has assigned to this process


def locate() -> Location:
    """Return the location of this process of Ray."""
    context = ray.get_runtime_context()
    return Location(
        context.get_node_id(),
        ray.util.get_node_ip_address(),
        free_port(),
        tuple(str(each) for each in ray.get_gpu_ids()),
    )


def start_store(
    ranks: Sequence[Location], variables: Mapping[str, str]
) -> tuple[Store, bytes, list[dict[str, str]]]:
    """Start the store of a job in this process.

    Parameters
    ----------
    ranks : sequence of Location
        Their locations.
    variables : dict of str to str
        For all ranks, in addition to those of each rank.

    Returns
    -------
    (Store, bytes) and list of dict of str to str
        The store, the job's secret, and the variables of each rank.
    """
    here = locate()
    several = any(each.node != here.node for each in ranks)
    store, secret = start.new_store(len(ranks), several)
    store.start_thread()
    rendezvous = Rendezvous(
        store.job,
        protocol.show_address(here.address if several else "127.0.0.1", store.port),
        (ranks[0].address, ranks[0].port),
    )
    environments = []
    for place in plan.by_host([each.node for each in ranks]):
        # The devices of all ranks of the node, so that local ranks are device numbers.
        gpus = dict.fromkeys(gpu for each in ranks if each.node == place.host for gpu in each.gpus)
        devices = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
        own = plan.environment(place, len(ranks), rendezvous)
        environments.append({**variables, **devices, **own})
    return store, secret, environments


def become(variables: Mapping[str, str], secret: bytes) -> None:
    """Make this process a rank, before it calls `init`."""
    environment.become({**variables, "HORORING_SECRET_FD": str(memory_file("secret", secret))})


def variables(
    nics: Sequence[str] | str | None = None, more: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """Return the settings of this process, for all ranks."""
    return {**start.settings(), **start.network(nics), **start.given(more)}

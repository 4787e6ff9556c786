"""Which rank goes where, and what it is told in its environment. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hororing.hosts import Host


@dataclass(frozen=True)
class Place:
    """Where a rank runs."""

    rank: int
    host: str
    local_rank: int
    local_size: int


@dataclass(frozen=True)
class Rendezvous:
    """How the ranks of a job find one another: the same on all hosts."""

    job: str
    address: str  # of the store; several with commas between them
    master: tuple[str, int]  # host and a free port there, for torch.distributed


def place(
    hosts: Sequence[Host], size: int | None, per_host: int | None, host_count: int | None
) -> list[Place]:
    """Fill the slots of one host after the other; without slots, divide evenly.

    Parameters
    ----------
    hosts : where ranks may run.
    size : of the job; None: as many as there are places.
    per_host : ranks of each host; None: by its slots.
    host_count : how many hosts there have to be, at least; only so many are used.

    Raises
    ------
    ValueError : numbers that do not fit.
    """
    if host_count is not None:
        if host_count > len(hosts):
            raise ValueError(
                f"--nnodes {host_count}: there are {len(hosts)} hosts; name them with -H or "
                "--hostfile"
            )
        hosts = hosts[:host_count]
    counts = _counts(hosts, size, per_host)
    placed: list[Place] = []
    for host, count in zip(hosts, counts, strict=True):
        placed += [Place(len(placed) + i, host.name, i, count) for i in range(count)]
    return placed


def _counts(hosts: Sequence[Host], size: int | None, per_host: int | None) -> list[int]:
    if per_host is not None:
        for host in hosts:
            if host.slots is not None and host.slots < per_host:
                raise ValueError(f"host {host.name} has {host.slots} slots, of {per_host} needed")
        if size is not None and size != per_host * len(hosts):
            raise ValueError(
                f"-np {size} contradicts {per_host} ranks on each of {len(hosts)} hosts"
            )
        return [per_host] * len(hosts)
    slots = [host.slots for host in hosts if host.slots is not None]
    if len(slots) == len(hosts):
        total = sum(slots)
        if size is not None and size > total:
            raise ValueError(f"-np {size}: the hosts have {total} slots")
        left = total if size is None else size
        counts = []
        for each in slots:
            counts.append(min(each, left))
            left -= counts[-1]
        return counts
    if slots:
        raise ValueError("give slots for all hosts, as a:4,b:4, or for none")
    if size is None:
        raise ValueError("how many ranks? Give -np N, --nproc-per-node N, or slots: -H a:4,b:4")
    if size % len(hosts):
        raise ValueError(f"-np {size} cannot be divided evenly over {len(hosts)} hosts: give slots")
    return [size // len(hosts)] * len(hosts)


def environment(where: Place, size: int, rendezvous: Rendezvous) -> dict[str, str]:
    """Variables of a rank, ours and those of torch.distributed. The secret is not among them."""
    return {
        "HORORING_RANK": str(where.rank),
        "HORORING_SIZE": str(size),
        "HORORING_LOCAL_RANK": str(where.local_rank),
        "HORORING_LOCAL_SIZE": str(where.local_size),
        "HORORING_RENDEZVOUS": rendezvous.address,
        "HORORING_JOB": rendezvous.job,
        "RANK": str(where.rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(where.local_rank),
        "LOCAL_WORLD_SIZE": str(where.local_size),
        "MASTER_ADDR": rendezvous.master[0],
        "MASTER_PORT": str(rendezvous.master[1]),
    }

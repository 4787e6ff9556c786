"""The placement of ranks, and their environment variables. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hororing.hororun.flags.host_lists import Host


@dataclass(frozen=True)
class Place:
    """The place of a rank."""

    rank: int
    host: str
    local_rank: int
    local_size: int


@dataclass(frozen=True)
class Rendezvous:
    """How the ranks of a job meet; the same on all hosts."""

    job: str
    address: str  # of the store; several are separated by commas
    master: tuple[str, int]  # host and a free port there, for torch.distributed


def place(
    hosts: Sequence[Host], size: int | None, per_host: int | None, host_count: int | None
) -> list[Place]:
    """Fill the slots of one host after the other; without slots, divide evenly.

    Parameters
    ----------
    hosts : where ranks may run.
    size : number of ranks; None: the number of places.
    per_host : ranks per host; None: its slots.
    host_count : the required number of hosts; only that many are used.

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


def neighbours(hosts: Sequence[str]) -> list[int]:
    """An order of processes in which those of a host are adjacent.

    `hosts` has the host name of each process.
    """
    return sorted(range(len(hosts)), key=lambda i: hosts.index(hosts[i]))


def by_host(hosts: Sequence[str]) -> list[Place]:
    """Places of ranks that another program started: `hosts` has the host name of each rank."""
    return [
        Place(rank, host, hosts[:rank].count(host), hosts.count(host))
        for rank, host in enumerate(hosts)
    ]


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
        if not total:
            raise ValueError("the hosts have no slots")
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


def replicas_of(rank: int, size: int, replicas: int) -> range:
    """The replicas that a rank drives: ``replicas_of(hvd.rank(), hvd.size(), 256)``.

    Replicas, such as the devices of a process that drives several, are divided evenly over ranks.
    ValueError if that is impossible.
    """
    if replicas < 1 or replicas % size:
        raise ValueError(f"{replicas} replicas cannot be divided evenly over {size} ranks")
    if not 0 <= rank < size:
        raise ValueError(f"there is no rank {rank} among {size}")
    each = replicas // size
    return range(rank * each, (rank + 1) * each)


def topology(
    placed: Sequence[Place], replicas: int | None, node_of: Callable[[Place], str] | None
) -> str:
    """Return the placement as a table. `node_of`: the NUMA node, or None if not bound."""
    hosts, size = len({place.host for place in placed}), len(placed)
    title = f"{_count(size, 'rank')} on {_count(hosts, 'host')}"
    if replicas is not None:
        title = f"{_count(replicas, 'replica')} in {title}: {replicas // size} of each rank"
    rows = [["host", "rank", "local rank"]]
    rows += [[place.host, str(place.rank), str(place.local_rank)] for place in placed]
    columns: list[tuple[str, Callable[[Place], str]]] = []
    if node_of is not None:
        columns.append(("NUMA node", node_of))
    if replicas is not None:
        columns.append(("replicas", lambda place: _span(replicas_of(place.rank, size, replicas))))
    for name, value in columns:
        rows[0].append(name)
        for row, place in zip(rows[1:], placed, strict=True):
            row.append(value(place))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join(x.rjust(w) for x, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join([title, *lines])


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _span(numbers: range) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def environment(where: Place, size: int, rendezvous: Rendezvous) -> dict[str, str]:
    """Variables of a rank, ours and those of torch.distributed, without the secret."""
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

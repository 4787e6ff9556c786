"""Which process goes where: instances on hosts and NUMA nodes, and the replicas that each drives.

Arithmetic of what PopRun (Graphcore) does: replicas are divided evenly over instances, instances
evenly over hosts, and the instances of a host go round its NUMA nodes. An instance is a process, a
rank of ours; it may drive several replicas, such as devices.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from hororing.hosts import Host, parse_hosts


@dataclass(frozen=True)
class Job:
    """What is asked for.

    Parameters
    ----------
    num_instances : processes; None: one for every replica.
    num_replicas : replicas; None: one for every process.
    hosts : as `parse_hosts` takes them; "": this machine.
    numa_aware : bind each instance to a NUMA node of its host.
    numa_nodes : how many each host has, for the printed layout of a `numa_aware` job; None: not
        told.
    tag_output : each line of output begins with its rank.
    only_output_from : ranks whose standard output is shown; (): all. Errors are always shown.
    environment : variables that mpirun takes to other hosts.
    mpi_args : more words for mpirun.
    command : the program and its arguments.
    """

    num_instances: int | None = None
    num_replicas: int | None = None
    hosts: str = ""
    numa_aware: bool = False
    numa_nodes: int | None = None
    tag_output: bool = False
    only_output_from: tuple[int, ...] = ()
    environment: tuple[str, ...] = ()
    mpi_args: tuple[str, ...] = ()
    command: tuple[str, ...] = ()


# Of a job's fields in a file; the others are lists.
_KINDS: dict[str, Any] = {
    **dict.fromkeys(("num_instances", "num_replicas", "numa_nodes"), (int, type(None))),
    **dict.fromkeys(("numa_aware", "tag_output"), bool),
    "hosts": str,
}


@dataclass(frozen=True)
class Instance:
    """One process. `numa_node` counts the host's nodes; None: not bound, or not told."""

    rank: int
    host: str
    local_rank: int
    replicas: range
    numa_node: int | None


@dataclass(frozen=True)
class Layout:
    """Where the processes of a job are, by rank."""

    job: Job
    hosts: list[Host]
    instances: list[Instance]
    replicas_per_instance: int
    instances_per_host: int

    @property
    def replicas(self) -> int:
        """How many there are."""
        return len(self.instances) * self.replicas_per_instance

    def __str__(self) -> str:
        head = (
            f"{self.replicas} replicas in {len(self.instances)} instances on {len(self.hosts)} "
            f"hosts: {self.instances_per_host} instances a host, {self.replicas_per_instance} "
            "replicas an instance"
        )
        rows = [("host", "rank", "local rank", "NUMA node", "replicas")]
        for each in self.instances:
            first, last = each.replicas[0], each.replicas[-1]
            rows.append(
                (
                    each.host,
                    str(each.rank),
                    str(each.local_rank),
                    "-" if each.numa_node is None else str(each.numa_node),
                    str(first) if first == last else f"{first}-{last}",
                )
            )
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return "\n".join(
            [head, *("  ".join(x.rjust(w) for x, w in zip(r, widths, strict=True)) for r in rows)]
        )

    def mpirun(self) -> list[str]:
        """The words of the command line that starts the job (Open MPI 5).

        Raises
        ------
        ValueError : the job has no command.
        """
        job = self.job
        if not job.command:
            raise ValueError("command: there is none to be started")
        words = ["mpirun", "-np", str(len(self.instances))]
        if job.hosts:
            words += ["-H", ",".join(f"{h.name}:{self.instances_per_host}" for h in self.hosts)]
        if job.tag_output:
            words += ["--output", "tag"]
        binder: list[str] = []
        if job.numa_aware:
            words += ["--bind-to", "none"]  # the binder does it, memory too
            binder.append("--numa-aware")
        if job.only_output_from:
            binder += ["--only-output-from", ",".join(map(str, job.only_output_from))]
        for name in job.environment:
            words += ["-x", name]
        words += job.mpi_args
        if binder:
            program = job.command[0]
            python = program if "python" in os.path.basename(program) else "python"
            words += [python, "-m", "hororing.toolkit.layout.bind", *binder, "--"]
        return [*words, *job.command]

    def mpirun_line(self) -> str:
        """`mpirun()` for a shell."""
        return shlex.join(self.mpirun())


def replicas_of(rank: int, instances: int, replicas: int) -> range:
    """The numbers of the replicas that an instance drives: ``replicas_of(rank(), size(), 256)``.

    ValueError where `instances` does not divide `replicas`.
    """
    each = _even("num_replicas", replicas, "num_instances", instances)
    if not 0 <= rank < instances:
        raise ValueError(f"rank {rank} is none of {instances} instances")
    return range(rank * each, (rank + 1) * each)


def plan(job: Job) -> Layout:
    """Do the arithmetic.

    Raises
    ------
    ValueError : numbers that do not divide one another, a host with too few slots, a rank that does
        not exist; the text names what to change.
    """
    hosts = parse_hosts(job.hosts) if job.hosts else [Host("localhost")]
    instances = job.num_instances if job.num_instances is not None else job.num_replicas
    if instances is None:
        raise ValueError("give num_instances or num_replicas")
    replicas = job.num_replicas if job.num_replicas is not None else instances
    if job.numa_nodes is not None and job.numa_nodes < 1:
        raise ValueError(f"numa_nodes: there is at least 1, not {job.numa_nodes}")
    if job.numa_nodes is not None and not job.numa_aware:
        raise ValueError("numa_nodes: without numa_aware nothing is bound; pass both or neither")
    per_instance = _even("num_replicas", replicas, "num_instances", instances)
    per_host = _even("num_instances", instances, "the number of hosts", len(hosts))
    for host in hosts:
        if host.slots is not None and host.slots < per_host:
            raise ValueError(
                f"host {host.name} has {host.slots} slots, and {per_host} instances would go there"
            )
    wrong = [rank for rank in job.only_output_from if not 0 <= rank < instances]
    if wrong:
        raise ValueError(f"only_output_from: there is no rank {wrong[0]} among {instances}")
    nodes = job.numa_nodes if job.numa_aware else None
    placed = [
        Instance(
            rank=rank,
            host=hosts[rank // per_host].name,
            local_rank=rank % per_host,
            replicas=replicas_of(rank, instances, replicas),
            numa_node=None if nodes is None else rank % per_host % nodes,
        )
        for rank in range(instances)
    ]
    return Layout(job, hosts, placed, per_instance, per_host)


def _even(what: str, number: int, over: str, parts: int) -> int:
    if number < 1 or parts < 1 or number % parts:
        raise ValueError(f"{what}: {number} cannot be divided evenly over {over}: {parts}")
    return number // parts


def export_config(job: Job, path: str | os.PathLike[str]) -> None:
    """Write a job to a file (JSON), for `import_config`."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(asdict(job), file, indent=1)
        file.write("\n")


def import_config(path: str | os.PathLike[str], **changes: Any) -> Job:
    """Read a job that `export_config` wrote; `changes` win over what the file says.

    ValueError : the file is no such thing, or has a key that no job has.
    """
    with open(path, encoding="utf-8") as file:
        try:
            found = json.load(file)
        except json.JSONDecodeError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from None
    known = [field.name for field in fields(Job)]
    wrong = sorted(set(found) - set(known)) if isinstance(found, Mapping) else ["(no object)"]
    if wrong:
        raise ValueError(f"{os.fspath(path)}: {wrong[0]!r} is none of {', '.join(known)}")
    values: dict[str, Any] = {}
    for name, value in {**found, **changes}.items():
        values[name] = tuple(value) if isinstance(value, list) else value
        if not isinstance(values[name], _KINDS.get(name, tuple)):
            raise ValueError(f"{os.fspath(path)}: {name} cannot be {value!r}")
    return Job(**values)

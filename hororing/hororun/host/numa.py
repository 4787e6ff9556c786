"""NUMA nodes of this host, and how a process is bound to one: its cores and its memory."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

SYSFS = Path("/sys/devices/system/node")

# set_mempolicy(2); glibc has no function for it.
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_MPOL_BIND = 2
_LONG_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


@dataclass(frozen=True)
class Node:
    """A node with cores; `has_memory`: it has memory of its own."""

    number: int
    cores: frozenset[int]
    has_memory: bool = True


def numbers(text: str) -> list[int]:
    """Parse a list of the kernel: ``0-2,8`` is 0, 1, 2, 8. ValueError for anything else."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        span = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7}))?", part.strip())
        if not span or int(span[2] or span[1]) < int(span[1]):
            raise ValueError(f"{part!r} is not a number or a range")
        found += range(int(span[1]), int(span[2] or span[1]) + 1)
    return found


def read_nodes(root: Path = SYSFS) -> list[Node]:
    """The nodes that are online and have cores, by number; none if the kernel lists none."""
    try:
        online = numbers((root / "online").read_text())
    except OSError:
        return []
    with_memory = online
    for name in ("has_memory", "has_normal_memory"):
        if (root / name).exists():
            with_memory = numbers((root / name).read_text())
            break
    nodes = [
        Node(i, frozenset(numbers((root / f"node{i}/cpulist").read_text())), i in with_memory)
        for i in online
    ]
    return [node for node in nodes if node.cores]


@dataclass(frozen=True)
class Binding:
    """The cores and memory of a process; `notice`: why they are not those of a NUMA node, or ""."""

    node: int | None
    cores: frozenset[int]
    memory_node: int | None
    notice: str = ""


def choose(local_rank: int, nodes: list[Node], allowed: frozenset[int]) -> Binding:
    """The node of a host's process `local_rank`, round-robin over nodes with allowed cores.

    `allowed`: the cores that this process may use, given its container or batch system.
    """
    usable = [node for node in nodes if node.cores & allowed]
    if len(usable) < 2:
        there = f"{len(usable)} NUMA node{'' if len(usable) == 1 else 's'}"
        return Binding(None, allowed, None, f"nothing is bound: there is {there} to choose from")
    node = usable[local_rank % len(usable)]
    memory = node.number if node.has_memory else None
    notice = "" if node.has_memory else f"NUMA node {node.number} has no memory: only cores bound"
    return Binding(node.number, node.cores & allowed, memory, notice)


def bind_memory(node: int) -> None:
    """Allocate memory of this process and its children on one node only. OSError if refused."""
    call = _SET_MEMPOLICY.get(platform.machine())
    if call is None:
        raise OSError(f"not known how on {platform.machine()}")
    words = node // _LONG_BITS + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // _LONG_BITS] = 1 << node % _LONG_BITS
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel uses one bit less than the given length.
    if libc.syscall(call, _MPOL_BIND, mask, ctypes.c_ulong(words * _LONG_BITS + 1)) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def bind(local_rank: int, root: Path = SYSFS) -> Binding:
    """Bind this process, its later threads and its children to a node; see `choose`.

    With a single node it does nothing, with a `notice`. It also notes if memory may not be bound,
    as in many containers: memory then comes from the node that first touches it, which is this node
    while it has some.
    """
    chosen = choose(local_rank, read_nodes(root), frozenset(os.sched_getaffinity(0)))
    if chosen.node is None:
        return chosen
    os.sched_setaffinity(0, chosen.cores)
    if chosen.memory_node is not None:
        try:
            bind_memory(chosen.memory_node)
        except OSError as error:
            note = f"memory is not bound to NUMA node {chosen.memory_node}: {error}"
            return Binding(chosen.node, chosen.cores, None, note)
    return chosen

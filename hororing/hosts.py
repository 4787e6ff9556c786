"""Lists of hosts: ``pod[0-2,4]:8,login`` and host files."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

_ITEM = re.compile(r"(?P<name>(?:[^\[\]:,\s]|\[[^\[\]]*\])+)(?::(?P<slots>\d+))?")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class Host:
    """A machine; `slots`: its maximum number of processes, None: unknown."""

    name: str
    slots: int | None = None


def parse_hosts(text: str) -> list[Host]:
    """Read ``a,b:4,c[0-2,7]:8``; numbers in ranges keep their leading zeros.

    Raises
    ------
    ValueError : the part that is not understood, or a host that occurs twice.
    """
    hosts: list[Host] = []
    for item in re.split(r",(?![^\[\]]*\])", text):
        found = _ITEM.fullmatch(item.strip())
        if not found:
            raise ValueError(f"hosts: {item.strip()!r} is not understood; write pod[0-2,4]:8,login")
        slots = int(found["slots"]) if found["slots"] else None
        hosts += [Host(name, slots) for name in _expanded(found["name"])]
    return _once(hosts)


def read_hostfile(path: str | os.PathLike[str]) -> list[Host]:
    """Read a host file: ``name slots=8`` or ``name:8`` a line, ``#`` begins a comment.

    Raises
    ------
    OSError, ValueError : no such file; a line that is not understood; a host that occurs twice.
    """
    hosts = []
    with open(path, encoding="utf-8-sig") as file:  # editors may begin it with a mark
        for number, line in enumerate(file, 1):
            text = line.partition("#")[0]
            words = re.sub(r"^(\s*[^:\s]+):(\d+\s*)$", r"\1 slots=\2", text).split()
            if not words:
                continue
            slots = re.fullmatch(r"slots=(\d+)", words[1]) if len(words) == 2 else None
            if len(words) > 2 or (len(words) == 2 and not slots):
                raise ValueError(f"{os.fspath(path)}:{number}: expected 'name slots=N': {line!r}")
            hosts.append(Host(words[0], int(slots[1]) if slots else None))
    return _once(hosts)


def _expanded(name: str) -> list[str]:
    head, bracket, rest = name.partition("[")
    if not bracket:
        return [name]
    inside, _, tail = rest.partition("]")
    names = []
    for part in inside.split(","):
        found = _RANGE.fullmatch(part.strip())
        first, last = (found[1], found[2] or found[1]) if found else ("1", "0")
        if int(first) > int(last):
            raise ValueError(f"hosts: [{part}] in {name!r} is not a number or a range such as 0-7")
        for i in range(int(first), int(last) + 1):
            names += [f"{head}{i:0{len(first)}d}{end}" for end in _expanded(tail)]
    return names


def _once(hosts: list[Host]) -> list[Host]:
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"hosts: {name!r} occurs twice")
    if not hosts:
        raise ValueError("hosts: there is none")
    return hosts

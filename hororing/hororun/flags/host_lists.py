"""Lists of hosts: ``pod[0-2,4]:8,login,[fd00::1]:4`` and host files."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
from dataclasses import dataclass, replace

_ITEM = re.compile(r"(?P<name>(?:[^\[\]:,=\s]|\[[^\[\]]*\])+)(?::(?P<slots>\d+))?")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_SETTING = re.compile(r"(slots|max[_-]slots)=(\d+)")


@dataclass(frozen=True)
class Host:
    """A machine; `slots`: its maximum number of processes, None: unknown."""

    name: str
    slots: int | None = None

    def __post_init__(self) -> None:
        if self.name.startswith("-"):  # ssh and mpirun would take it for an option
            raise ValueError(f"hosts: the name {self.name!r} begins with '-'")


def parse_hosts(text: str) -> list[Host]:
    """Read ``a,b:4,c[0-2,7]:8,[fd00::1]:4``; numbers in ranges keep their leading zeros.

    The slots of a host that occurs twice are added, as MPI does; without a number it has one each
    time.

    Raises
    ------
    ValueError : the part that is not understood.
    """
    items = re.split(r",(?![^\[\]]*\])", text)
    return _merged([host for item in items for host in _item(item.strip())])


def read_hostfile(path: str | os.PathLike[str]) -> list[Host]:
    """Read a host file: ``name slots=8`` or ``name:8`` a line, ``#`` begins a comment.

    Names may have ranges. ``max_slots=`` of Open MPI is no less than the slots, which are never
    exceeded; alone it is their number.

    Raises
    ------
    OSError, ValueError : no such file; a line that is not understood.
    """
    hosts = []
    with open(path, encoding="utf-8-sig") as file:  # editors may begin it with a mark
        for number, line in enumerate(file, 1):
            words = re.sub(r"\s*=\s*", "=", line.partition("#")[0]).split()
            if not words:
                continue
            settings = [_SETTING.fullmatch(word) for word in words[1:]]
            given = {each[1].replace("-", "_"): int(each[2]) for each in settings if each}
            try:
                found = _item(words[0])
            except ValueError:
                found = []
            twice = len(given) < len(settings) or (given and found and found[0].slots is not None)
            if not found or twice:
                raise ValueError(f"{os.fspath(path)}:{number}: expected 'name slots=N': {line!r}")
            slots, most = given.get("slots"), given.get("max_slots")
            if slots is not None and most is not None and most < slots:
                raise ValueError(f"{os.fspath(path)}:{number}: {slots} slots, of at most {most}")
            slots = most if slots is None else slots
            hosts += found if slots is None else [replace(host, slots=slots) for host in found]
    return _merged(hosts)


def _item(text: str) -> list[Host]:
    """The hosts of an item of a list. ValueError."""
    if _is_ipv6(text):
        return [Host(text)]
    found = _ITEM.fullmatch(text)
    if not found:
        raise ValueError(
            f"hosts: {text!r} is not understood; write pod[0-2,4]:8,login or [fd00::1]:8"
        )
    slots = int(found["slots"]) if found["slots"] else None
    return [Host(name, slots) for name in _expanded(found["name"])]


def _expanded(name: str) -> list[str]:
    head, bracket, rest = name.partition("[")
    if not bracket:
        return [name]
    inside, _, tail = rest.partition("]")
    if _is_ipv6(inside) and not tail and (not head or head.endswith("@")):
        return [head + inside]
    names = []
    for part in inside.split(","):
        found = _RANGE.fullmatch(part.strip())
        first, last = (found[1], found[2] or found[1]) if found else ("1", "0")
        if int(first) > int(last):
            raise ValueError(f"hosts: [{part}] in {name!r} is not a number or a range such as 0-7")
        for i in range(int(first), int(last) + 1):
            names += [f"{head}{i:0{len(first)}d}{end}" for end in _expanded(tail)]
    return names


def _is_ipv6(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(text).version == 6
    return False


def _merged(hosts: list[Host]) -> list[Host]:
    found: dict[str, Host] = {}
    for host in hosts:
        first = found.get(host.name)
        slots = host.slots if first is None else (first.slots or 1) + (host.slots or 1)
        found[host.name] = replace(host, slots=slots)
    if not hosts:
        raise ValueError("hosts: there is none")
    return list(found.values())

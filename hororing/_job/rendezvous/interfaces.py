"""The addresses of this host, at which others may reach it."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path
from typing import Any

from hororing._job.rendezvous import protocol

_SIOCGIFADDR = 0x8915  # see netdevice(7)
_IPV6 = Path("/proc/net/if_inet6")  # address, index, length of the prefix, scope, flags, name
_LINK = "20"  # the scope of link-local addresses; global ones have 00, the host's own 10
_UNUSABLE = 0x08 | 0x40  # flags: another host has it, too; not yet checked for that
_ELSEWHERE = "192.0.2.1"  # never a real host: reserved for documentation (RFC 5737)


def addresses() -> list[str]:
    """Return an address of every interface, then the host's name: IPv6 if it has no other.

    The address of the default route comes first, not a bridge of containers, which other hosts
    cannot reach. The host's own 127.0.0.1 is the last of the numbers.
    """
    found = []
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError):  # it has no address
            found.append(_address(name))
    usual = towards(_ELSEWHERE)
    # Another host may call the interface of a link-local address differently.
    found = [each for each in found if "%" not in each]
    found.sort(
        key=lambda address: (protocol.is_loopback(address), ":" in address, address != usual)
    )
    return [*dict.fromkeys(found), socket.gethostname()]


def towards(host: str) -> str:
    """The address of this host from which `host` is reached; "" without a route. Sends nothing."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as asking:
                asking.connect(address)
                return with_scope(asking.getsockname())
    return ""


def with_scope(address: Any) -> str:
    """Return the host of a socket's address. A link-local one needs the interface, too."""
    scope = address[3] if len(address) > 3 else 0
    return f"{address[0]}%{socket.if_indextoname(scope)}" if scope else str(address[0])


def is_own(host: str) -> bool:
    """Whether an address is of this host, so that it can be bound."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, _, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(address)
            return True
    return False


def chosen(text: str) -> str:
    """Return the address that HORORING_INTERFACE chooses, such as "eth0,ib0" or "10.1.0.5".

    Of several, the first that this host has. ValueError if it has none of them.
    """
    given = [each.strip() for each in text.split(",")]
    for interface in given:
        with contextlib.suppress(ValueError):
            address = str(ipaddress.ip_address(interface))
            if len(given) == 1 or is_own(address):
                return address
        with contextlib.suppress(OSError):
            return _address(interface)
    names = ", ".join(name for _, name in socket.if_nameindex())
    raise ValueError(
        f"HORORING_INTERFACE={text}: no such network with an address; this host has {names}"
    )


def reached_at(place: str = "") -> str:
    """Return an address of this host for others: that of `place`, "host:port", or the first one."""
    if place:
        with contextlib.suppress(OSError):
            named = socket.getaddrinfo(*protocol.parse_address(place), type=socket.SOCK_STREAM)
            for *_, address in named:
                if not protocol.is_loopback(str(address[0])):
                    return with_scope(address)
    return next(each for each in addresses() if not protocol.is_loopback(each))


def _address(interface: str) -> str:
    """Return its IPv4 address, or else one of IPv6. OSError if it has none."""
    try:
        return _address4(interface)
    except OSError:
        if found := _addresses6(interface):
            return found[0]
        raise


def _addresses6(interface: str) -> list[str]:
    """Its IPv6 addresses, those with the widest scope first."""
    found = []
    with contextlib.suppress(OSError):  # IPv6 is turned off
        for line in _IPV6.read_text(encoding="ascii").splitlines():
            digits, _, _, scope, flags, name = line.split()
            if name == interface and not int(flags, 16) & _UNUSABLE:
                address = str(ipaddress.IPv6Address(int(digits, 16)))
                found.append((int(scope, 16), address + (f"%{name}" if scope == _LINK else "")))
    return [address for _, address in sorted(found)]


def _address4(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        request = struct.pack("256s", interface.encode()[:15])
        answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
    return socket.inet_ntoa(answer[20:24])

"""The addresses of this host, at which others may reach it."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct

from hororing.rendezvous import protocol

_SIOCGIFADDR = 0x8915  # see netdevice(7)
_ELSEWHERE = "192.0.2.1"  # never a real host: reserved for documentation (RFC 5737)


def addresses() -> list[str]:
    """Return the IPv4 address of every interface, then the host's name.

    The address of the default route comes first, not a bridge of containers, which other hosts
    cannot reach. The host's own 127.0.0.1 is the last of the numbers.
    """
    found = []
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError):  # it has no address
            found.append(_address(name))
    usual = towards(_ELSEWHERE)
    found.sort(key=lambda address: (address.startswith("127."), address != usual))
    return [*dict.fromkeys(found), socket.gethostname()]


def towards(host: str) -> str:
    """The address of this host from which `host` is reached; "" without a route. Sends nothing."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as asking:
                asking.connect(address)
                return str(asking.getsockname()[0])
    return ""


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
        f"HORORING_INTERFACE={text}: no such network with an IPv4 address; this host has {names}"
    )


def reached_at(place: str = "") -> str:
    """Return an address of this host for others: that of `place`, "host:port", or the first one."""
    if place:
        with contextlib.suppress(OSError):
            named = socket.getaddrinfo(*protocol.parse_address(place), type=socket.SOCK_STREAM)
            for *_, address in named:
                if not protocol.is_loopback(str(address[0])):
                    return str(address[0])
    return next(each for each in addresses() if not each.startswith("127."))


def _address(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        request = struct.pack("256s", interface.encode()[:15])
        answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
    return socket.inet_ntoa(answer[20:24])

"""The addresses of this host, for others to try."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915  # see netdevice(7)


def addresses() -> list[str]:
    """IPv4 of every interface, that of the host itself last; then the host's name."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
                found.append(socket.inet_ntoa(answer[20:24]))
    found.sort(key=lambda address: address.startswith("127."))
    return [*dict.fromkeys(found), socket.gethostname()]

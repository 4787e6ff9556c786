"""TCP connections of this host's processes, as the kernel counts them: who sends how fast.

The kernel answers over a socket of the family NETLINK (inet_diag, sock_diag(7)), to any user, for
its network namespace. Nothing is measured, and no packet is sent.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import struct
from collections.abc import Iterable, Iterator

_SOCK_DIAG_BY_FAMILY, _DUMP, _DONE, _ERROR = 20, 0x301, 3, 2
_INFO, _ESTABLISHED = 2, 1
_HEADER = struct.Struct("=IHHII")
# struct inet_diag_msg: family, state, timer, retransmits; ports; addresses; interface, cookie,
# expires, rqueue, wqueue, uid, inode.
_MESSAGE = struct.Struct("=BBBB 2s2s 16s16s I 8s IIIII")
# Of struct tcp_info: rtt, total_retrans (u32); bytes_acked, bytes_received, busy_time,
# rwnd_limited (u64).
_RTT, _RETRANSMITS, _ACKED, _RECEIVED, _BUSY, _FULL = 68, 100, 120, 128, 168, 176


def sockets(pid: int) -> set[int]:
    """The inodes of the sockets that a process has open; OSError if it has ended."""
    found = set()
    folder = f"/proc/{pid}/fd"
    for name in os.listdir(folder):
        try:
            target = os.readlink(f"{folder}/{name}")
        except OSError:  # closed in the meantime
            continue
        if match := re.fullmatch(r"socket:\[(\d+)\]", target):
            found.add(int(match[1]))
    return found


def connections(owners: dict[int, int]) -> list[dict[str, int | str]]:
    """The established connections whose inode is in `owners`, which has their processes.

    sent, received : bytes that the other side has acknowledged, and that have arrived.
    busy_ns : time in which something was on its way to the other side, which had room for it.
    rtt_ns : round trip.
    """
    found: list[dict[str, int | str]] = []
    for family in (socket.AF_INET, socket.AF_INET6):
        for message in _dump(family) if owners else ():
            fields = _MESSAGE.unpack_from(message)
            own_port, port, own, other, inode = *fields[4:8], fields[14]
            info = _attribute(message[_MESSAGE.size :], _INFO)
            if inode not in owners or info is None or len(info) < _FULL + 8:
                continue
            rtt, retransmits = (
                struct.unpack_from("=I", info, at)[0] for at in (_RTT, _RETRANSMITS)
            )
            sent, received, busy, full = (
                struct.unpack_from("=Q", info, at)[0] for at in (_ACKED, _RECEIVED, _BUSY, _FULL)
            )
            found.append(
                {
                    "pid": owners[inode],
                    "own": _address(family, own, own_port),
                    "other": _address(family, other, port),
                    "sent": sent,
                    "received": received,
                    "retransmits": retransmits,
                    "rtt_ns": rtt * 1000,
                    "busy_ns": max(busy - full, 0) * 1000,
                }
            )
    return found


def _dump(family: int) -> Iterator[bytes]:
    request = struct.pack(
        "=BBBBI48s", family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 0, 1 << _ESTABLISHED, b""
    )
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4) as kernel:  # NETLINK_SOCK_DIAG
        kernel.settimeout(1.0)
        size = _HEADER.size + len(request)
        kernel.send(_HEADER.pack(size, _SOCK_DIAG_BY_FAMILY, _DUMP, 1, 0) + request)
        while True:
            data = kernel.recv(2**16)
            while len(data) >= _HEADER.size:
                size, kind, *_ = _HEADER.unpack_from(data)
                if kind in (_DONE, _ERROR) or size < _HEADER.size:
                    return
                yield data[_HEADER.size : size]
                data = data[(size + 3) & ~3 :]


def _attribute(data: bytes, wanted: int) -> bytes | None:
    while len(data) >= 4:
        size, kind = struct.unpack_from("=HH", data)
        if kind == wanted:
            return data[4:size]
        if size < 4:
            break
        data = data[(size + 3) & ~3 :]
    return None


def _address(family: int, address: bytes, port: bytes) -> str:
    if family == socket.AF_INET:
        host = ipaddress.ip_address(address[:4])
    else:
        wide = ipaddress.IPv6Address(address)
        host = wide.ipv4_mapped or wide
    return f"{host} {int.from_bytes(port, 'big')}"


def joined(of_rank: Iterable[tuple[int, dict[str, int | str]]]) -> list[dict[str, int | str]]:
    """Connections between ranks: those whose both sides are known, with "rank" and "peer"."""
    sides = {(str(each["own"]), str(each["other"])): rank for rank, each in of_rank}
    return [
        {**each, "rank": rank, "peer": sides[str(each["other"]), str(each["own"])]}
        for rank, each in of_rank
        if (str(each["other"]), str(each["own"])) in sides
    ]

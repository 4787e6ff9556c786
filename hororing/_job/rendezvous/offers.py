"""How rank 0 publishes the address of its store, if other ranks can only read publications.

It publishes an address, the job's name and a secret: in a file (`files`), or in torch's store
(`torch_store`). Stale offers of earlier starts may remain, so the ranks try again until they find
this job's store, or until the deadline. Once all ranks have connected, the offer is withdrawn.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

from hororing._job import limits
from hororing._job.rendezvous import protocol
from hororing._job.rendezvous.client import Deadline, Member, RendezvousError
from hororing._job.rendezvous.interfaces import addresses, reached_at, towards
from hororing._job.rendezvous.patience import Patience
from hororing._job.rendezvous.protocol import ProtocolError
from hororing._job.rendezvous.store import Store

_POLL_S = 0.05
_TRY_S = 2.0  # time limit for one offer, before the next check
_LOOPBACK = "127.0.0.1"

Offer = dict[str, Any]


def make(
    publish: Callable[[Offer], None],
    withdraw: Callable[[], None],
    *,
    job: str,
    size: int,
    timeout_s: float,
    secret: bytes = b"",
    one_host: bool = False,
    near: str = "",
) -> Member:
    """Start the store in this process, rank 0, publish its address, and connect.

    Parameters
    ----------
    publish, withdraw : functions for the offer; withdrawn once, from any thread, never raising.
    secret : of the job, which all ranks know already; b"": make a new one, in the offer.
    one_host : all ranks are on this host, so no other host needs to connect.
    near : a host; this host's address towards it is the best for the others.
    """
    pending = [withdraw]

    def once() -> None:
        while pending:
            pending.pop()()

    fresh = secret or protocol.new_secret()
    store = Store(
        job=job, size=size, secret=fresh, host=_LOOPBACK if one_host else "", one_start=True,
        when_complete=once,
    )  # fmt: skip
    try:
        store.start_thread()
    except limits.LimitError as error:
        raise RendezvousError(str(error), refused=True) from None
    own = towards(near) if near else ""
    own = "" if protocol.is_loopback(own) else own
    places = [_LOOPBACK] if one_host else list(dict.fromkeys(filter(None, [own, *addresses()])))
    offer = {
        "job": job,
        "address": ",".join(protocol.show_address(each, store.port) for each in places),
        "secret": "" if secret else fresh.hex(),
    }
    try:
        publish(offer)
        member = Member(
            f"{_LOOPBACK}:{store.port}", secret=fresh, job=job, rank=0, size=size,
            timeout_s=timeout_s,
        )  # fmt: skip
    except BaseException:
        once()
        store.stop()
        raise
    member.at_close += [once, store.stop]
    if not one_host:  # ranks of this host reach it at another address than other hosts do
        member.local_address = own or reached_at()
    return member


def accept(
    look: Callable[[], tuple[Offer | None, str]],
    *,
    rank: int,
    size: int,
    timeout_s: float,
    secret: bytes = b"",
    patience: Patience | None = None,
) -> Member:
    """Wait for an offer, and connect. RendezvousError at the deadline.

    `look` returns the present offer, or None and the reason. `patience` : as that of `Member`.
    """
    deadline = Deadline(timeout_s)
    patience = patience or Patience()
    who = f"rank {rank} on host {socket.gethostname()}"
    while True:
        offer, reason = look()
        if offer is not None:
            try:
                return Member(
                    offer["address"], secret=secret or bytes.fromhex(offer["secret"]),
                    job=offer["job"], rank=rank, size=size,
                    timeout_s=min(_TRY_S, deadline.left_s()),
                )  # fmt: skip
            except RendezvousError as error:
                if error.refused:
                    raise
                reason = str(error)
            except ValueError as error:  # an invalid address
                reason = str(error)
        if deadline.left_s() == 0:
            raise RendezvousError(
                f"{who} found no store of its job within {timeout_s:g} s; {reason}"
            )
        patience.say(who, f"the store of its job: {reason}")
        time.sleep(min(_POLL_S, deadline.left_s()))


def parse(text: bytes) -> Offer:
    """Read an offer. ProtocolError if it is invalid."""
    offer = protocol.decode(text)
    for name in ("job", "address", "secret"):
        protocol.take(offer, name, str)
    try:
        bytes.fromhex(offer["secret"])
    except ValueError:
        raise ProtocolError("no secret") from None
    return offer

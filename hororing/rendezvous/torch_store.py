"""torch's store (TCPStore) as the place where ranks find ours: what torchrun's workers share.

Rank 0 leaves its offer (hororing/rendezvous/offers.py) under a key there, and removes it when all
ranks are in. Torch's store lets everybody in: until then, whoever can reach its port can read the
job's secret, unless the user has given one. Where no agent has that store, rank 0 has it until
then, as `init_process_group` would, which may be called before or after.

The only module beside the adapters that imports torch: on demand.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

from hororing.rendezvous import offers, protocol
from hororing.rendezvous.client import Deadline, Member, RendezvousError
from hororing.rendezvous.offers import Offer
from hororing.rendezvous.protocol import ProtocolError

_KEY = "hororing/offer"
_CONNECT_S = 2.0
_ANSWER_S = 5.0
_RETRY_S = 0.1

T = TypeVar("T")


def meet(
    address: str,
    *,
    job: str,
    rank: int,
    size: int,
    timeout_s: float,
    secret: bytes = b"",
    one_host: bool = False,
    makes_store: bool = False,
) -> Member:
    """Find the other ranks by torch's store at `address`.

    Blocks until this job's store is there, for at most `timeout_s`.

    Parameters
    ----------
    job : name of the job, to which rank 0 adds what tells this start from others.
    secret : of the job, which all ranks know; b"": a new one.
    one_host : all ranks are of one host.
    makes_store : where nobody listens at `address`, rank 0 makes torch's store itself.

    Raises
    ------
    ValueError : torch is not installed.
    RendezvousError : the ranks did not meet in time.
    """
    board = _Board(address, makes_store and rank == 0)
    if rank != 0:
        try:
            return offers.accept(
                board.look, rank=rank, size=size, timeout_s=timeout_s, secret=secret
            )
        finally:
            board.close()
    deadline = Deadline(timeout_s)

    def publish(offer: Offer) -> None:
        while (reason := board.publish(offer)) is not None:
            if deadline.left_s() == 0:
                raise RendezvousError(
                    f"torch's store at {address} cannot be used: {reason}; is MASTER_ADDR right?"
                )
            time.sleep(min(_RETRY_S, deadline.left_s()))

    return offers.make(
        publish, board.withdraw, job=f"{job}.{secrets.token_hex(4)}", size=size,
        timeout_s=timeout_s, secret=secret, one_host=one_host,
        near=protocol.parse_address(address)[0],
    )  # fmt: skip


class _Board:
    """Our key in torch's store. Errors are texts, and the next call connects again."""

    def __init__(self, address: str, makes_store: bool) -> None:
        try:
            self._torch = importlib.import_module("torch.distributed")
        except ImportError as error:
            raise ValueError(
                f"init: ranks meet at torch's store ({address}), but torch cannot be imported "
                f"({error}): set HORORING_RENDEZVOUS, or start with hororun"
            ) from None
        self._place = protocol.parse_address(address)
        self._makes_store = makes_store
        self._store: Any = None

    def look(self) -> tuple[Offer | None, str]:
        """The offer; None, and why there is none."""
        try:
            found = _bounded(self._get)
            return (offers.parse(found), "") if found else (None, "rank 0 has not come")
        except (OSError, RuntimeError, ProtocolError) as error:
            self._store = None
            return None, f"torch's store: {_first_line(error)}"

    def publish(self, offer: Offer) -> str | None:
        """Leave it there; else why that is not possible."""
        try:
            _bounded(lambda: self._open().set(_KEY, json.dumps(offer)))
        except (OSError, RuntimeError) as error:
            self._store = None
            return _first_line(error)
        return None

    def withdraw(self) -> None:
        """Remove it, and close. From any thread; nothing is raised."""
        store = self._store
        if store is not None:
            with contextlib.suppress(OSError, RuntimeError):
                _bounded(lambda: store.delete_key(_KEY))
        self.close()

    def close(self) -> None:
        """End the connection, and torch's store too where this process alone has made it."""
        self._store = None

    def _get(self) -> bytes:
        store = self._open()
        return bytes(store.get(_KEY)) if store.check([_KEY]) else b""

    def _open(self) -> Any:
        if self._store is not None:
            return self._store
        makes = False
        try:  # first without torch, which writes a warning for each try
            socket.create_connection(self._place, _CONNECT_S).close()
        except OSError:
            if not self._makes_store:
                raise
            makes = True
        # Several in one process at one port share a server: later init_process_group's.
        self._store = self._torch.TCPStore(
            *self._place, is_master=makes, multi_tenant=makes, wait_for_workers=False,
            timeout=timedelta(seconds=_ANSWER_S),
        )  # fmt: skip
        return self._store


def _bounded(call: Callable[[], T]) -> T:
    """What a call into torch returns. TimeoutError where nothing answers: torch waits for ever.

    Its own limit does not hold once it is connected, and Ctrl-C does not interrupt it.
    """
    results: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()

    def body() -> None:
        try:
            results.put((call(), None))
        except Exception as error:
            results.put((None, error))

    threading.Thread(target=body, name="hororing-torch-store", daemon=True).start()
    try:
        result, error = results.get(timeout=_ANSWER_S)
    except queue.Empty:
        raise TimeoutError("no answer") from None
    if error is not None:
        raise error
    return cast(T, result)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__

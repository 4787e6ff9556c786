"""Finds the store through torch's store (TCPStore), which torchrun's workers share.

Rank 0 stores its offer (_job/rendezvous/offers.py) under a key there, and removes it when all
ranks are connected. Torch's store has no access control: until then, every process that can reach
its port can read the job's secret, unless the ranks know one already. If no agent serves that
store, rank 0 opens it for that time, as `init_process_group` would, which may be called before or
after.

The only module beside the adapters that imports torch: on demand.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import queue
import secrets
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from hororing._job import threads
from hororing._job.rendezvous import offers, protocol
from hororing._job.rendezvous.client import Deadline, Member, RendezvousError
from hororing._job.rendezvous.offers import Offer
from hororing._job.rendezvous.patience import Patience
from hororing._job.rendezvous.protocol import ProtocolError

_KEY, _HOST = "hororing/offer", "hororing/host/"
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
    patience: Patience | None = None,
) -> Member:
    """Find the other ranks by torch's store at `address`.

    Blocks until this job's store is found, for at most `timeout_s`.

    Parameters
    ----------
    job : name of the job, to which rank 0 adds a random part for this start.
    secret : of the job, which all ranks know; b"": a new one.
    one_host : all ranks are of one host.
    makes_store : if no store listens at `address`, rank 0 opens torch's store itself.
    patience : as that of `Member`.

    Raises
    ------
    ValueError : torch is not installed.
    RendezvousError : the ranks did not meet in time.
    """
    board = _Board(address, makes_store and rank == 0)
    if rank != 0:
        return _accept(board, rank, size, Deadline(timeout_s), secret, patience)
    remedy = f"torch's store at {address} cannot be used: {{reason}}; is MASTER_ADDR right?"
    return _make(
        board, job, size, Deadline(timeout_s), remedy, secret=secret, one_host=one_host,
        near=protocol.parse_address(address)[0], patience=patience,
    )  # fmt: skip


def meet_in(store: Any, *, rank: int, size: int, timeout_s: float, secret: bytes = b"") -> Member:
    """Find the other ranks through a store of torch that they share, each by its own object.

    Blocks until all have called it. `secret`: as that of `meet`. RendezvousError: not within
    `timeout_s`.
    """
    board, deadline = _Shared(store), Deadline(timeout_s)
    board.publish_host(rank)
    if rank != 0:
        return _accept(board, rank, size, deadline, secret)
    one_host = board.all_on_one_host(size, deadline)
    remedy = "the store of torch.distributed cannot be used: {reason}"
    return _make(board, "torch", size, deadline, remedy, secret=secret, one_host=one_host)


def host_of(store: Any) -> str:
    """The host of a TCPStore, also inside others; "" for other stores."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", ""))


def _accept(
    board: _Board, rank: int, size: int, deadline: Deadline, secret: bytes,
    patience: Patience | None = None,
) -> Member:  # fmt: skip
    try:
        return offers.accept(
            board.look, rank=rank, size=size, timeout_s=deadline.left_s(), secret=secret,
            patience=patience,
        )  # fmt: skip
    finally:
        board.close()


def _make(
    board: _Board, job: str, size: int, deadline: Deadline, remedy: str,
    patience: Patience | None = None, **more: Any,
) -> Member:  # fmt: skip
    waits = patience or Patience()

    def publish(offer: Offer) -> None:
        while (reason := board.publish(offer)) is not None:
            if deadline.left_s() == 0:
                raise RendezvousError(remedy.format(reason=reason))
            waits.say("rank 0", remedy.format(reason=reason))
            time.sleep(min(_RETRY_S, deadline.left_s()))

    return offers.make(
        publish, board.withdraw, job=f"{job}.{secrets.token_hex(4)}", size=size,
        timeout_s=deadline.left_s(), **more,
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
        self._name = f"torch's store at {address} (MASTER_ADDR, MASTER_PORT)"
        self._makes_store = makes_store
        self._store: Any = None

    def look(self) -> tuple[Offer | None, str]:
        """Return the offer; or None, and the reason."""
        try:
            found = _bounded(self._get)
            return (offers.parse(found), "") if found else (None, "rank 0 has not published it")
        except (OSError, RuntimeError, ProtocolError) as error:
            self._store = None
            return None, f"{self._name}: {_first_line(error)}"

    def publish(self, offer: Offer) -> str | None:
        """Store the offer; return the error text if that is not possible."""
        try:
            _bounded(lambda: self._open().set(_KEY, json.dumps(offer)))
        except (OSError, RuntimeError) as error:
            self._store = None
            return _first_line(error)
        return None

    def withdraw(self) -> None:
        """Remove the offer, and close. Any thread; raises nothing."""
        store = self._store
        if store is not None:
            with contextlib.suppress(OSError, RuntimeError):
                _bounded(lambda: store.delete_key(_KEY))
        self.close()

    def close(self) -> None:
        """Close the connection, and torch's store if nothing else here uses it."""
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
        # Several in one process at one port share a server, also with a later init_process_group.
        self._store = self._torch.TCPStore(
            *self._place, is_master=makes, multi_tenant=makes, wait_for_workers=False,
            timeout=timedelta(seconds=_ANSWER_S),
        )  # fmt: skip
        return self._store


class _Shared(_Board):
    """The same in a store that another process has opened, and keys of the ranks' hosts."""

    def __init__(self, store: Any) -> None:
        self._given = self._store = store
        self._name = "the store of torch.distributed"

    def _open(self) -> Any:
        self._store = self._given
        return self._store

    def publish_host(self, rank: int) -> None:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        with contextlib.suppress(OSError, RuntimeError):  # then rank 0 waits for it in vain
            _bounded(lambda: self._given.set(f"{_HOST}{rank}", f"{socket.gethostname()} {boot}"))

    def all_on_one_host(self, size: int, deadline: Deadline) -> bool:
        """Whether all ranks are on one host. Blocks until all have published theirs."""
        keys = [f"{_HOST}{rank}" for rank in range(size)]
        try:
            while not _bounded(lambda: self._given.check(keys)):
                if deadline.left_s() == 0:
                    missing = [r for r, key in enumerate(keys) if not self._given.check([key])]
                    raise RendezvousError(
                        f"of {size} ranks, these have not called init_process_group in time: "
                        f"{missing}",
                        missing[0],
                    )
                time.sleep(min(_RETRY_S, deadline.left_s()))
            return len({bytes(_bounded(partial(self._given.get, key))) for key in keys}) == 1
        except (OSError, RuntimeError) as error:
            raise RendezvousError(
                f"the store of torch.distributed cannot be used: {_first_line(error)}"
            ) from None


def _bounded(call: Callable[[], T]) -> T:
    """Return the result of a call into torch. TimeoutError if torch waits for too long.

    Torch's own limit does not work once it is connected, and Ctrl-C does not interrupt it.
    """
    results: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()

    def body() -> None:
        try:
            results.put((call(), None))
        except Exception as error:
            results.put((None, error))

    threads.start_in_library(body, "hororing-torch-store", None)
    try:
        result, error = results.get(timeout=_ANSWER_S)
    except queue.Empty:
        raise TimeoutError("no answer") from None
    if error is not None:
        raise error
    return cast(T, result)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__

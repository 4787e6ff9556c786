"""The membership of this process in an elastic job: its generation and its changes.

`runtime.init` forms a generation (`enter`); hororing.elastic and others query it here. Knows no
framework.
"""

from __future__ import annotations

import hashlib
import logging
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count, takewhile
from typing import Any

from hororing import errors
from hororing._engine import core
from hororing._engine.core import ffi, lib
from hororing._engine.state import process as _process
from hororing._job import bootstrap, job_settings, launchers
from hororing._job.launchers import Launch
from hororing._job.rendezvous.admission import Findings
from hororing._job.rendezvous.client import RendezvousError
from hororing._job.rendezvous.elastic_member import ElasticMember, RefusedError, RetiredError
from hororing._job.rendezvous.generations import World

SIGN = "HORORING_ELASTIC=1"  # in the environment

# Signs of life within the time limit for a silent process, a setting of the store's process, too.
_BEATS = 10
# How long a process that was declared lost looks for the store, in s.
_AGAIN_S = 20.0
# The longest setting that is sent as it is, and the longest error text, in characters.
_SETTING, _WHY = 1000, 300


@dataclass
class _Own:
    """The state of this process."""

    step: int = 0
    marks: int = 0
    lost: int = -1
    worlds: list[World] = field(default_factory=list)
    # What this process has found out in the last generation; see Findings.
    began: bool = False
    why: str = ""
    misfits: Mapping[int, str] = field(default_factory=dict)


_own = _Own()


def is_elastic() -> bool:
    """Whether a launcher has started this process for an elastic job (HORORING_ELASTIC=1)."""
    return job_settings.is_elastic()


def generation() -> int:
    """The number of the current or last generation, from 1; 0: none, or not elastic."""
    return _own.worlds[-1].generation if _own.worlds else 0


def history() -> list[World]:
    """The generations of this process, oldest first: number, and members by rank."""
    return list(_own.worlds)


def set_progress(step: int, marks: int = 0, *, lost: int = -1) -> None:
    """Set how far the state of this process is, for the next generation.

    Rank 0 is then a process with the most steps and, among these, one with the most `marks`: how
    often it has saved the script's other values since that step. `lost`: how many steps the state
    has just gone back by; -1: unknown.
    """
    _own.step, _own.marks, _own.lost = step, marks, lost


def updates() -> tuple[int, int]:
    """Return the changes of hosts and processes since this generation began. Does not block.

    Returns
    -------
    The time of the last change, in microseconds since the epoch, and its kind: 0 nothing, 1
    removals, 2 additions, 3 both. (0, 0) in jobs that are not elastic.
    """
    what = ffi.new("int32_t *")
    stamp = int(lib.hr_membership_updates(generation(), what))
    return stamp, int(what[0])


def exclude(misfits: Mapping[int, str]) -> None:
    """Form the next generation without these ranks, whose state differs; with the differences."""
    _own.misfits = misfits


def note_start(failure: Exception | None = None) -> None:
    """Note that the engine of this generation has started, or why it has not."""
    _own.began = failure is None
    _own.why = str(failure or "")[:_WHY]


def enter(settings: Mapping[str, Any], compared: str, failed: bool) -> Launch:
    """Leave the present generation, if any, and wait for the next one. For `runtime.init`.

    Parameters
    ----------
    compared : settings that all ranks must share: lines "name=value".
    failed : the last one failed on this process, so the others cannot continue either.

    Returns
    -------
    This process's new place, in the form of a launcher's variables.

    Raises
    ------
    ValueError : a variable is wrong.
    MismatchError : this process differs from the others of the job, which goes on without it.
    TransportError : there is no store, or the job cannot continue.
    SystemExit : 0, the job no longer needs this process: its host was removed, or the job is done.
    """
    try:
        member, world = _next(settings, _found(compared), failed)
    except RefusedError as error:
        if _process.member is not None:
            _process.member.close()
            _process.member = None
        raise errors.MismatchError(f"init: {error}") from None
    except RendezvousError as error:
        raise errors.TransportError(f"init: {error}") from None
    except RetiredError:
        if _process.member is not None:
            _process.member.done()
        logging.getLogger("hororing").info("the job no longer needs this process; exiting")
        raise SystemExit(0) from None
    _own.worlds.append(world)
    _own.began, _own.why, _own.misfits = False, "", {}
    local = [rank for rank, each in enumerate(world.members) if each.host == member.host]
    return Launch(
        launchers.ELASTIC, member.rank, member.size, local.index(member.rank), len(local),
        mpi=False, sign=f"{SIGN}, generation {world.generation}", own=SIGN,
    )  # fmt: skip


def _found(compared: str) -> Findings:
    lines = []
    for line in compared.splitlines():
        if len(line) > _SETTING:
            digest = hashlib.sha256(line.encode("utf-8", "surrogateescape")).hexdigest()
            line = f"{line[:_SETTING]}... (all of it: {digest})"
        lines.append(line)
    unreachable = tuple(takewhile(lambda rank: rank >= 0, map(lib.hr_unreachable, count())))
    return Findings("\n".join(lines), _own.began, _own.why, unreachable, _own.misfits, _own.lost)


def _next(
    settings: Mapping[str, Any], found: Findings, failed: bool
) -> tuple[ElasticMember, World]:
    member = _process.member
    if isinstance(member, ElasticMember):
        try:
            return member, member.next_world(_own.step, _own.marks, failed, found)
        except RendezvousError:
            if member.connected:
                raise
        # The store may be there but have declared this process lost; it returns as a new one.
        member.close()
        settings = {**settings, "TIMEOUT_S": _AGAIN_S}
    for callback in _process.before_joining:
        callback()
    member = bootstrap.join(settings)
    _process.member = member
    # If this process's own link is cut, it must learn that when the store does.
    timeout_ms = int(settings["PEER_TIMEOUT_S"] * 1000)
    member.beats.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
    beat_s = settings["PEER_TIMEOUT_S"] / _BEATS
    core.check(lib.hr_membership_begin(member.beats.fileno(), beat_s))
    member.at_close.append(lib.hr_membership_end)
    return member, member.next_world(_own.step, _own.marks, False, found)

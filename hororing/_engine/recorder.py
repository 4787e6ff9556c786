"""The flight recorder: the latest events of this process, where other processes can read them.

It is a file of 68 KB, in memory or in the folder HORORING_FLIGHT_RECORDER. It holds the rank, host
and process, the last 1,024 events of the engine, and the latest Python stack of the main thread.
The core writes the events (csrc/base/recorder.cc). `faulthandler` writes the stack when a signal
arrives at the main thread, so no other thread needs the interpreter. No server is needed: `python
-m hororing doctor` opens the file through /proc, or in the folder where a killed job has left it.

    offset  bytes
         0   1024  JSON, zero-terminated
      1024      8  number of events so far
      1032      4  number of stacks so far
      1040    120  totals (csrc/base/recorder.h), 8 bytes each
      1160    888  JSON, zero-terminated: what the script has shown last
      2048  65536  1,024 events: time in ns (8), process set (4), kind, collective, length of name,
                   name (49)
     67584         text: the latest stack
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import json
import math
import mmap
import os
import re
import socket
import stat
import struct
import sys
import time
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hororing._engine.core import check, lib
from hororing._job.launchers import Launch
from hororing._job.rendezvous.protocol import printable

SUFFIX = ".hororing"
NAME = "hororing-recorder"
OF_SET = " of process set "  # in requests; names are scoped by set

_JSON, _COUNTS, _TOTALS, _RING, _EVENTS = 1024, 1024, 1040, 2048, 1024
# As enum Total of csrc/base/recorder.h; bytes by the algorithm that moved them.
TOTALS = (
    "steps", "step_began_at_ns", "requests", "batches", "tensors", "waited_ns", "batch_ns",
    "batch_began_at_ns", "blocked_ns",
    "bytes_other", "bytes_shm_direct", "bytes_three_phase", "bytes_ring", "bytes_rank_order",
    "bytes_at_once",
)  # fmt: skip
_TOTALS_STRUCT = struct.Struct(f"<{len(TOTALS)}q")
_SHOWN = _TOTALS + _TOTALS_STRUCT.size
_EVENT = struct.Struct("<qiBBB49s")
_SIZE = _RING + _EVENTS * _EVENT.size
_MOST_STACK_BYTES = 2**18
_JSON_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)
_MOST_LOG_BYTES = 320  # of the line of the log beside the script's numbers
_KINDS = {1: "submitted", 2: "agreed", 3: "done", 4: "failed"}
_COLLECTIVES = {
    int(getattr(lib, f"HR_{name.upper()}")): name
    for name in (
        "allreduce",
        "allgather",
        "broadcast",
        "barrier",
        "alltoall",
        "reducescatter",
        "join",
        "add_process_set",
        "remove_process_set",
    )
}


# ---------------------------------------------------------------------------------------------
# The process's own


class _Own:
    """The recorder of this process; it lives as long as the process."""

    mapped: mmap.mmap | None = None
    facts: dict[str, Any] = {}  # noqa: RUF012 - there is one
    shown: dict[str, float] = {}  # noqa: RUF012
    step: int | None = None
    shown_at_ns = 0
    told: dict[str, Any] | None = None  # the latest warning or error in the log


def begin(folder: str | None, stack_signal: int, started_by: Launch, job: str) -> None:
    """Open it, in the first `init` of this process. ValueError if a setting prevents that."""
    if _Own.mapped is not None:
        return
    try:
        file = _create(folder, started_by.rank or 0)
    except OSError as error:
        if folder is None:  # in a sandbox, for example: go without
            return
        raise ValueError(f"HORORING_FLIGHT_RECORDER={folder}: {error}") from None
    _Own.mapped = mmap.mmap(file, _RING)
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)
    if stack_signal != 0 and not _is_free(stack_signal):
        stack_signal = 0  # the script uses this signal
    if stack_signal != 0:
        try:
            faulthandler.register(stack_signal, file=file, all_threads=False)
        except (OSError, RuntimeError, ValueError) as error:
            raise ValueError(f"HORORING_STACK_SIGNAL={stack_signal}: {error}") from None
    check(lib.hr_recorder_open(file, stack_signal))
    _Own.facts = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "job": job,
        "command": printable(" ".join(sys.orig_argv)[:150]),
        "stack_signal": stack_signal,
        "wall_minus_monotonic_ns": time.time_ns() - time.monotonic_ns(),
    }
    note(rank=started_by.rank, size=started_by.size)


def note(**facts: int | None) -> None:
    """Record a fact about this process."""
    if _Own.mapped is None:
        return
    _Own.facts.update(facts)
    text = json.dumps(_Own.facts, ensure_ascii=False).encode("utf-8", "replace")
    _Own.mapped[:_JSON] = text.ljust(_JSON, b"\0")


def show(step: int | None = None, /, **values: float) -> None:
    """Show numbers of the script to those who watch this process (docs/watching.md).

    They replace those of the same names; the others stay. Takes about 10 us, and 3 us for each
    number; never waits. What
    is shown before `init` is seen with the next call.

    Parameters
    ----------
    step : int, optional
        Of the training, to which they belong.
    **values : float
        Numbers, such as ``loss``. ``samples`` is the number of samples of this rank so far; the
        page shows how many there are in a second. All names and numbers have room for about 800
        bytes; later names that do not fit are left out, and counted.

    Raises
    ------
    TypeError, ValueError : a value is no number.
    """
    numbers = {name: float(value) for name, value in values.items()}
    # Replaced, not changed: without a lock, which a signal handler or a fork might find taken.
    _Own.shown, _Own.step = {**_Own.shown, **numbers}, step
    _write_shown(time.monotonic_ns())


def tell(level: int, text: str) -> None:
    """Show a line of the log to those who watch this process, instead of the one before."""
    cut = printable(text).encode("utf-8", "replace")[:_MOST_LOG_BYTES].decode("utf-8", "ignore")
    _Own.told = {"at_ns": time.monotonic_ns(), "level": level, "text": cut}
    _write_shown(_Own.shown_at_ns)


def _write_shown(now_ns: int) -> None:
    mapped = _Own.mapped
    if mapped is None or _Own.facts.get("pid") != os.getpid():  # a forked child has it, too
        return
    _Own.shown_at_ns = now_ns
    shown: dict[str, Any] = {"at_ns": now_ns, "step": _Own.step, "left_out": 0}
    if _Own.told is not None:
        shown["told"] = _Own.told
    kept: dict[str, float | str] = {}
    shown["values"] = kept
    room = _RING - _SHOWN - len(_encoded(shown)) - 4  # for a longer number of those left out
    for name, value in _Own.shown.items():
        short = float(f"{value:.9g}") if math.isfinite(value) else str(value)
        room -= (size := len(_encoded({name: short})) - 1)
        if room < 0:
            room += size
            shown["left_out"] += 1
        else:
            kept[name] = short
    mapped[_SHOWN:] = _encoded(shown).ljust(_RING - _SHOWN, b"\0")


def _encoded(shown: dict[str, Any]) -> bytes:
    return _JSON_ENCODER.encode(shown).encode("utf-8", "replace")


def _create(folder: str | None, rank: int) -> int:
    if folder is None:
        file = os.memfd_create(NAME)
        os.fchmod(file, 0o600)
    else:
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, f"rank-{rank}.{os.getpid()}{SUFFIX}")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with contextlib.suppress(FileNotFoundError):  # of an earlier process with this id
            os.unlink(path)
        file = os.open(path, flags, 0o600)
    os.posix_fallocate(file, 0, _SIZE)  # a full disk is an error now, not a SIGBUS later
    return file


def _is_free(signal: int) -> bool:
    """Whether this process neither handles nor ignores a signal."""
    return not any(mask >> (signal - 1) & 1 for mask in _signals("self"))


def _signals(pid: int | str) -> list[int]:
    status = Path(f"/proc/{pid}/status").read_text()
    return [int(mask, 16) for mask in re.findall(r"^Sig(?:Cgt|Ign):\s*(\w+)", status, re.M)]


# ---------------------------------------------------------------------------------------------
# Recorders of other processes


@dataclass(frozen=True)
class Event:
    """An event of a request."""

    time: float  # seconds since the epoch
    kind: str  # "submitted", "agreed", "done", "failed"
    request: str  # "allreduce 'x'"


@dataclass(frozen=True)
class Recording:
    """The contents of a recorder."""

    facts: dict[str, Any]
    events: list[Event]
    stacks: int  # how many were written
    stack: str  # the latest; "": none
    totals: dict[str, int]  # by TOTALS
    shown: dict[str, Any]  # "at_ns", "step", "left_out", "values", perhaps "told"; empty: nothing

    def unfinished(self) -> list[Event]:
        """The last event of each request that is neither done nor failed, as far as recorded."""
        last: dict[str, Event] = {}
        for event in self.events:
            last.pop(event.request, None)
            if event.kind in ("submitted", "agreed"):
                last[event.request] = event
        return list(last.values())


def read(path: str | os.PathLike[str]) -> Recording:
    """Read a recorder's file. ValueError for any other file.

    Another user may have written it: all texts are printable, and a pipe is not waited for.
    """
    with open(path, "rb", opener=_open_without_wait) as file:
        is_file = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
        data = file.read(_SIZE + _MOST_STACK_BYTES) if is_file else b""
    try:
        facts = _facts(data)
        count, stacks = struct.unpack_from("<QI", data, _COUNTS)
        found = [_EVENT.unpack_from(data, _RING + i * _EVENT.size) for i in range(_EVENTS)]
    except (ValueError, KeyError, TypeError, RecursionError, struct.error):
        name = printable(os.fspath(path))
        raise ValueError(f"{name} is not a flight recorder of hororing") from None
    offset = facts["wall_minus_monotonic_ns"]
    # Starting with the event that is overwritten next.
    ordered = found if count <= _EVENTS else found[count % _EVENTS :] + found[: count % _EVENTS]
    events = [_event(each, offset) for each in ordered if each[0] != 0]
    stack = data[_SIZE:].decode("utf-8", "replace").split("\n")
    text = "\n".join(map(printable, stack))
    return Recording(facts, events, stacks, text, _totals(data), _shown(data))


@dataclass(frozen=True)
class Head:
    """What changes all the time: cheap enough to be read every second, of many ranks."""

    facts: dict[str, Any]
    totals: dict[str, int]
    shown: dict[str, Any]
    events: int  # how many were recorded so far
    stacks: int


def read_head(file: int) -> Head:
    """Read the beginning of an open recorder. ValueError for any other file."""
    data = os.pread(file, _RING, 0)
    try:
        events, stacks = struct.unpack_from("<QI", data, _COUNTS)
        return Head(_facts(data), _totals(data), _shown(data), events, stacks)
    except (ValueError, KeyError, TypeError, RecursionError, struct.error):
        raise ValueError("not a flight recorder of hororing") from None


def last_event(file: int, head: Head) -> Event | None:
    """The last event of an open recorder, if it is not just being written."""
    at = _RING + (head.events - 1) % _EVENTS * _EVENT.size
    data = os.pread(file, _EVENT.size, at) if head.events else b""
    if len(data) < _EVENT.size or (fields := _EVENT.unpack(data))[0] == 0:
        return None
    return _event(fields, head.facts["wall_minus_monotonic_ns"])


def _event(fields: tuple[Any, ...], offset: int) -> Event:
    time_ns, process_set, kind, collective, length, name = fields
    request = _request(process_set, collective, length, name)
    return Event((time_ns + offset) / 1e9, _KINDS.get(kind, "?"), request)


def _totals(data: bytes) -> dict[str, int]:
    return dict(zip(TOTALS, _TOTALS_STRUCT.unpack_from(data, _TOTALS), strict=True))


def _shown(data: bytes) -> dict[str, Any]:
    """What the script shows; nothing if it is just being written, or is not what `show` writes."""
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
        shown = json.loads(data[_SHOWN:_RING].rstrip(b"\0") or b"{}")
        if not shown:
            return {}
        values = {printable(str(name)): float(each) for name, each in shown["values"].items()}
        step = None if shown["step"] is None else int(shown["step"])
        found: dict[str, Any] = {
            "at_ns": int(shown["at_ns"]), "step": step, "left_out": int(shown["left_out"]),
        }  # fmt: skip
        if told := shown.get("told"):
            found["told"] = {
                "at_ns": int(told["at_ns"]), "level": int(told["level"]),
                "text": printable(str(told["text"])),
            }  # fmt: skip
        return {**found, "values": values}
    return {}


def _open_without_wait(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def _facts(data: bytes) -> dict[str, Any]:
    """The facts, of the types that `begin` writes. ValueError, KeyError, TypeError if not."""
    facts: dict[str, Any] = json.loads(data[:_JSON].rstrip(b"\0"))
    for name in ("host", "job", "command"):
        facts[name] = printable(facts[name])
    for name in ("pid", "stack_signal", "wall_minus_monotonic_ns", "rank", "size"):
        unknown = facts[name] is None and name in ("rank", "size")
        if not unknown and not (type(facts[name]) is int and abs(facts[name]) < 2**62):
            raise TypeError(name)
    return facts


def _request(process_set: int, collective: int, length: int, name: bytes) -> str:
    text = name[:length].decode("utf-8", "replace")
    text = printable(text)
    cut = "..." if length > len(name) else ""
    of_set = f"{OF_SET}{process_set}" if process_set else ""
    return f"{_COLLECTIVES.get(collective, '?')} '{cut}{text}'{of_set}"


def find(pid: int, all_users: bool = False) -> str | None:
    """Return the path at which the recorder of a process can be read, or None if it has none.

    PermissionError for that of another user: always, or for root unless `all_users`.
    """
    folder, owner = f"/proc/{pid}/fd", None
    for path in (f"{folder}/{number}" for number in os.listdir(folder)):
        try:
            target = os.readlink(path).removesuffix(" (deleted)")
            about = os.stat(path)
        except OSError:  # it was closed in the meantime
            continue
        if target != f"/memfd:{NAME}" and not target.endswith(SUFFIX):
            continue
        if stat.S_ISREG(about.st_mode):
            if all_users or about.st_uid == os.geteuid():
                return path
            owner = about.st_uid
    if owner is not None:
        raise PermissionError(f"the recorder of process {pid} is of user {owner}: --all-users")
    return None


def processes(
    all_users: bool = False, known: Container[int] = ()
) -> Iterator[tuple[int, str, Head]]:
    """The processes of this host that have a recorder of their own, and its path.

    `known` : processes that need no look.
    """
    for pid in sorted(int(each) for each in os.listdir("/proc") if each.isdecimal()):
        if pid in known:
            continue
        try:
            path = find(pid, all_users)
            if path is None:
                continue
            with open(path, "rb", opener=_open_without_wait) as file:
                head = read_head(file.fileno())
            own = re.findall(r"^NSpid:.*?(\d+)$", Path(f"/proc/{pid}/status").read_text(), re.M)
        except (OSError, ValueError):  # it has ended, or is another user's
            continue
        if own and int(own[0]) == head.facts["pid"]:  # else a child, which has it open as well
            yield pid, path, head


def request_stack(pid: int, head: Head | Recording) -> bool:
    """Make the main thread of `pid` write its stack. False: it takes no such signal."""
    signal = int(head.facts["stack_signal"])
    # Without the handler, the signal would end the process.
    if signal == 0 or not _signals(pid)[-1] >> (signal - 1) & 1:
        return False
    os.kill(pid, signal)
    return True


def ask_for_stack(pid: int, path: str, patience_s: float = 2.0) -> Recording:
    """Make the main thread of `pid` write its stack, then read the recorder at `path`.

    If the thread does not, the stack is empty.
    """
    before = read(path)
    if not request_stack(pid, before):
        return before
    deadline = time.monotonic() + patience_s
    while (now := read(path)).stacks == before.stacks:
        if time.monotonic() > deadline:
            return replace(now, stack="")
        time.sleep(0.01)
    return now

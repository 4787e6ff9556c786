"""A rank: this process runs the tests or functions that the process of the tests names."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Protocol

from hororing.hororun import call
from hororing.hororun.host.local import memory_file
from hororing.testing import doing, measuring
from hororing.testing.channel import Channel, Closed
from hororing.testing.faults import armed
from hororing.testing.messages import Answer, Begun, Call, Ended, Finish, Hello, Seat, Test
from hororing.testing.world import Worlds

STACKS = signal.SIGRTMAX - 3  # makes faulthandler write all stacks, even if the interpreter is held
_PR_SET_PDEATHSIG = 1


class Work(Protocol):
    """What this process can do as a rank."""

    def become(self, seat: Seat) -> tuple[int, ...]:
        """Take a place, in a process that may be a copy; return where its output is collected."""

    def test(self, order: Test, control: Channel, worlds: Worlds) -> Ended:
        """Run a test."""

    def finish(self) -> None:
        """Tear down what is left."""


def serve(
    seat: Seat, files: list[int], work: Work, parent: int, coverage: Mapping[str, Any] | None
) -> NoReturn:
    """Be a rank until the process of the tests asks for the end, or has ended."""
    control_fd, watch_fd, secret, store = files
    control = Channel(socket.socket(fileno=control_fd))
    with contextlib.suppress(PermissionError):  # it leads a session already
        os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    for module in ("numpy",):  # forked ranks would draw the same numbers; `random` seeds itself
        if module in sys.modules:
            sys.modules[module].random.seed()
    outputs = work.become(seat)
    save_coverage = measuring.begin(coverage)
    stacks = memory_file("stacks", b"")
    faulthandler.enable(stacks)
    faulthandler.register(STACKS, stacks, all_threads=True)
    os._exit = functools.partial(_leave, os._exit, stacks, save_coverage)
    doing.start_answering(Channel(socket.socket(fileno=watch_fd)))
    armed.announce, armed.size = control.send, seat.size
    armed.before_death = save_coverage
    worlds = Worlds(seat, secret, store)
    try:
        control.send(Hello(), [stacks, *outputs])
        while not isinstance(order := control.receive()[0], Finish):
            control.send(_obey(order, work, worlds, control))
        work.finish()
        save_coverage()
        _flush()
        control.send(Finish())  # the engine may end with the process: all ranks end
    except Closed:
        pass
    os._exit(0)


def _leave(
    leave: Callable[[int], NoReturn], stacks: int, save: Callable[[], None], status: int
) -> NoReturn:
    """Write down where a test has called os._exit."""
    save()
    faulthandler.dump_traceback(stacks, all_threads=False)
    leave(status)


def _obey(order: Any, work: Work, worlds: Worlds, control: Channel) -> Ended:
    try:
        worlds.begin(order.world)
        control.send(Begun())
        if isinstance(order, Test):
            return work.test(order, control, worlds)
        return _call(order, worlds, control)
    except Closed:
        raise
    except BaseException as error:  # of pytest itself, or of `begin`
        worlds.abandon(error)
        return Ended(escaped=call.text_of(error))


def _call(order: Call, worlds: Worlds, control: Channel) -> Ended:
    try:
        function, args, kwargs = call.restore(order.payload)
        result = function(*args, **kwargs)
        armed.check()
        body = call.packed(call.RETURNED, call.pickled(result))
    except BaseException as error:
        if isinstance(error, SystemExit):
            error = RuntimeError(f"the function has called sys.exit({error.code!r})")
        worlds.abandon(error)
        body = call.packed(call.RAISED, call.dumped(error))
    _flush()
    control.send(Answer(body))
    return Ended()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()

"""A process that has imported and collected the tests, and from which ranks are forked.

So new ranks are ready in milliseconds. It is forked only while it has a single thread and no GPU:
a copy of anything else would be broken. Otherwise each rank is a process of its own that does the
same work; then this process becomes one.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hororing.hororun.host.local import memory_file
from hororing.testing import rank
from hororing.testing.channel import Channel, Closed
from hororing.testing.messages import Plan, Seat, Test
from hororing.testing.world import Worlds

# Followed by the descriptor of a channel. Does not need this package in PYTHONPATH.
PROGRAM = (
    f"import sys; sys.path[:] = [{str(Path(__file__).parents[2])!r}, *filter(None, sys.path)]; "
    "from hororing.testing.fork_server import main; main()"
)
# What ranks would import at their first test, after these, which the tests import.
_LATER = {
    "hororing": ("hororing._api.init", "hororing.numpy"),
    "torch": ("torch.distributed", "hororing.torch.distributed.rendezvous"),
}


def main() -> None:
    """Prepare, then make ranks until the process of the tests has ended."""
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    try:
        plan: Plan = channel.receive()[0]
        try:
            work = _prepare(plan)
        except BaseException:
            channel.send(("failed", traceback.format_exc()))
            return
        channel.send(("ready", why_no_fork()))
        while True:
            (what, about), files = channel.receive()
            if what == "seat":  # in this process
                rank.serve(about, files, work, os.getppid(), plan.coverage)
            elif what == "fork":
                channel.send(_fork(about, files, work, channel, plan.coverage))
            else:  # the process of a rank has ended
                channel.send(os.waitstatus_to_exitcode(os.waitpid(about, 0)[1]))
            for each in files:
                os.close(each)
    except Closed:
        pass


def _prepare(plan: Plan) -> rank.Work:
    sys.path[:] = plan.path
    sys.argv[:] = plan.argv
    for each in plan.modules:
        importlib.import_module(each)
    work: rank.Work = Functions()
    if plan.suite is not None:
        from hororing.testing import items  # needs pytest

        work = items.collect(plan.suite)
    for module, others in _LATER.items():
        for each in others if module in sys.modules else ():
            importlib.import_module(each)
    return work


def why_no_fork() -> str:
    """Why a copy of this process would not work; "": it would."""
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return f"it has {threads} threads"
    for each in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{each}")
        except OSError:  # that of the list itself
            continue
        if target.startswith("/dev/nvidia"):
            return f"it has opened {target}"
    return ""


def _fork(
    seat: Seat, files: list[int], work: rank.Work, channel: Channel,
    coverage: Mapping[str, Any] | None,
) -> int:  # fmt: skip
    parent = os.getpid()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    pid = os.fork()
    if pid == 0:
        try:
            channel.close()
            rank.serve(seat, files, work, parent, coverage)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return pid


class Functions:
    """The work of ranks without pytest: calls need no preparation."""

    def become(self, seat: Seat) -> tuple[int, ...]:
        """See `rank.Work`."""
        output = memory_file("output", b"")
        for number in (1, 2):
            os.dup2(output, number)
        return (output,)

    def test(self, order: Test, control: Channel, worlds: Worlds) -> Any:
        """See `rank.Work`."""
        raise TypeError("these ranks call functions")

    def finish(self) -> None:
        """See `rank.Work`."""

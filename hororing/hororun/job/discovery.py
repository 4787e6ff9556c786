"""The script that prints which hosts an elastic job may use, run once a second."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from hororing.hororun.flags.host_lists import Host, parse_hosts
from hororing.hororun.host.local import memory_file, start

EVERY_S = 1.0
_LONGEST_S = 60.0
_SHOWN_BYTES = 2000


Found = Callable[[list[Host]], None]


class Finder(Protocol):
    """Repeatedly finds the hosts of an elastic job."""

    def left_s(self) -> float:
        """Time until `go_on` has something to do."""

    def go_on(self) -> None:
        """Find the hosts, if that is due."""

    def close(self) -> None:
        """Stop."""


class Discovery:
    """Runs `command`, which prints a line ``host`` or ``host:slots`` for each host.

    Parameters
    ----------
    slots : for hosts without a number; None: that is an error.
    found : called with the hosts, each time the script succeeds; not with the first empty list
        after others.
    failed : called with the error otherwise.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        command: Sequence[str],
        slots: int | None,
        *,
        found: Found,
        failed: Callable[[str], None],
    ) -> None:
        self._selector = selector
        self._command = command
        self._slots = slots
        self._found = found
        self._failed = failed
        self._next_at = time.monotonic()
        self._popen: subprocess.Popen[bytes] | None = None
        self._was_empty = True
        self._was_slow = False
        self._pidfd = self._out = self._err = -1

    def left_s(self) -> float:
        """Time until `go_on` has something to do."""
        return max(self._next_at - time.monotonic(), 0.0)

    def go_on(self) -> None:
        """Start the script when it is due, and end one that takes too long."""
        if time.monotonic() < self._next_at:
            return
        if self._popen is not None:
            self._was_slow = True  # `_ended` reports it
            self._kill()
            self._next_at += EVERY_S
            return
        self._next_at = time.monotonic() + _LONGEST_S
        self._out, self._err = memory_file("hosts", b""), memory_file("errors", b"")
        try:
            self._popen = start(
                self._command, stdin=subprocess.DEVNULL, stdout=self._out, stderr=self._err
            )
        except OSError as error:
            self._finish(f"{error.strerror}")
            return
        self._pidfd = os.pidfd_open(self._popen.pid)
        self._selector.register(self._pidfd, selectors.EVENT_READ, self._ended)

    def close(self) -> None:
        """End the script if it is still running."""
        if self._popen is not None:
            self._kill()
            self._take()

    def _kill(self) -> None:
        assert self._popen is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)

    def _take(self) -> tuple[int, str, str]:
        """Take its exit code and its output."""
        assert self._popen is not None
        code = self._popen.wait()
        self._popen = None
        self._selector.unregister(self._pidfd)
        os.close(self._pidfd)
        printed = [
            os.pread(each, os.fstat(each).st_size, 0).decode("utf-8", "replace")
            for each in (self._out, self._err)
        ]
        os.close(self._out)
        os.close(self._err)
        return code, printed[0], printed[1]

    def _ended(self) -> None:
        code, out, errors = self._take()
        slow, self._was_slow = self._was_slow, False
        if code != 0:
            how = f"exit code {code}" if code > 0 else f"signal {-code}"
            if slow:
                how = f"it took longer than {_LONGEST_S:g} s"
            self._finish(f"{how}: {errors.strip()[-_SHOWN_BYTES:]}".removesuffix(": "))
            return
        try:
            hosts = parse(out, self._slots)
        except ValueError as error:
            self._finish(str(error))
            return
        self._next_at = time.monotonic() + EVERY_S
        # The script may print a file that is just being rewritten, and so is empty.
        if hosts or self._was_empty:
            self._found(hosts)
        self._was_empty = not hosts

    def _finish(self, wrong: str) -> None:
        self._next_at = time.monotonic() + EVERY_S
        self._failed(f"--host-discovery-script {' '.join(self._command)}: {wrong}")


def parse(text: str, slots: int | None) -> list[Host]:
    """Parse the script's output; no line: no hosts. ValueError."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return []
    hosts = [
        host if host.slots is not None else replace(host, slots=slots)
        for host in parse_hosts(",".join(lines))
    ]
    for host in hosts:
        if host.slots is None:
            raise ValueError(f"{host.name} has no number of slots: print host:slots, or give "
                             "--slots-per-host")  # fmt: skip
    return hosts

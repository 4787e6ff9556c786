"""The page about a job (`hororing page`), in a process of its own that ends with hororun."""

from __future__ import annotations

import argparse
import contextlib
import re
import select
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence

from hororing.hororun.host.local import start
from hororing.hororun.job.fixed import CannotStartError

_START_S = 60.0  # a busy machine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add = parser.add_argument
    add("--page", type=_port, metavar="PORT",
        help="serve a page about the job on 127.0.0.1 (0: a free port), for ssh -L")  # fmt: skip
    add("--page-token-file", metavar="FILE",
        help="what to log in with there, in a file of mode 0600; else a new token")  # fmt: skip


def _port(text: str) -> int:
    if not re.fullmatch(r"\d{1,5}", text) or int(text) >= 2**16:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: a number from 0 to 65535")
    return int(text)


def begin(arguments: argparse.Namespace, rsh: Sequence[str]) -> Page | None:
    """Start the page, if the flags want one. CannotStartError."""
    if arguments.page is not None:
        return Page(arguments.page, arguments.page_token_file, rsh)
    if arguments.page_token_file is not None:
        raise CannotStartError("--page-token-file needs --page")
    return None


class Page:
    """The process that serves it. CannotStartError if it does not, such as for a port in use.

    Parameters
    ----------
    port : int
        Of 127.0.0.1; 0: a free one.
    token_file : str, optional
        With what to log in with; without one, it prints a new token.
    rsh : Sequence of str
        The words before a host's name in a command that runs another one there.
    """

    def __init__(self, port: int, token_file: str | None, rsh: Sequence[str]) -> None:
        words = ["--of-hororun", "--port", str(port), "--rsh-agent", shlex.join(rsh)]
        if token_file is not None:
            words += ["--token-file", token_file]
        # It prints how to reach it, or why it cannot be served, to the standard error.
        self._process = start(
            [sys.executable, "-m", "hororing", "page", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        answers = select.select([self._process.stdout], [], [], _START_S)[0]
        if not answers or not self._process.stdout.readline():
            self.close()
            raise CannotStartError("--page: no page, and no rank was started")

    def about(self, job: str, hosts: Iterable[str] = ()) -> None:
        """Tell it the job, and other hosts of it; more may be told later."""
        assert self._process.stdin is not None
        lines = [f"job {job}\n", *(f"host {host}\n" for host in hosts)]
        with contextlib.suppress(OSError):  # it has ended: the job goes on
            self._process.stdin.write("".join(lines).encode())
            self._process.stdin.flush()

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

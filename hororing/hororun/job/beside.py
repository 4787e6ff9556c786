"""What watches a job in a process of its own that ends with hororun: a page, lines about it."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import select
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence

from hororing.hororun.host.local import CannotStartError, start
from hororing.hororun.host.output import Output

_START_S = 60.0  # a busy machine
# What nobody has asked for is started so late, and not if it needs more connections than this.
_LATER_S, _MOST_HOSTS = 30.0, 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add = parser.add_argument
    add("--page", type=_port, metavar="PORT",
        help="serve a page about the job on 127.0.0.1 (0: a free port), for ssh -L")  # fmt: skip
    add("--page-token-file", metavar="FILE",
        help="what to log in with there, in a file of mode 0600; else a new token")  # fmt: skip
    add("--progress", action=argparse.BooleanOptionalAction, default=None,
        help="print a line a minute; default: only who is late for long, a loss of speed, and at "
        "the end how long it took, of jobs of more than a minute")  # fmt: skip


def _port(text: str) -> int:
    if not re.fullmatch(r"\d{1,5}", text) or int(text) >= 2**16:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: a number from 0 to 65535")
    return int(text)


@contextlib.contextmanager
def started(
    arguments: argparse.Namespace, rsh: Sequence[str], output: Output
) -> Iterator[list[Beside]]:
    """Start what the flags want, and end it after the job. CannotStartError."""
    rsh_words = ["--rsh-agent", shlex.join(rsh)]
    with contextlib.ExitStack() as ends:
        made = []
        if arguments.page is not None:
            words = ["hororing", "page", "--of-hororun", "--port", str(arguments.page), *rsh_words]
            if arguments.page_token_file is not None:
                words += ["--token-file", arguments.page_token_file]
            made.append(ends.enter_context(Beside(words, "--page: no page")))
            output.heard = made[-1].note
        elif arguments.page_token_file is not None:
            raise CannotStartError("--page-token-file needs --page")
        words = ["hororing.watch.progress", *rsh_words]
        if arguments.progress:
            made.append(ends.enter_context(Beside(words, "--progress: it does not start")))
        elif arguments.progress is None:
            made.append(ends.enter_context(Later([*words, "--seldom"], output)))
        yield made


class Beside(contextlib.AbstractContextManager["Beside"]):
    """The process. CannotStartError if it does not start, such as for a port in use.

    Parameters
    ----------
    words : Sequence of str
        A module of Python, and its arguments. It prints a line once it works. What it tells the
        user, it prints to the standard error.
    problem : str
        What the user lacks if it does not start.
    """

    def __init__(self, words: Sequence[str], problem: str) -> None:
        self._process = start(
            [sys.executable, "-m", *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        answers = select.select([self._process.stdout], [], [], _START_S)[0]
        if not answers or not self._process.stdout.readline():
            self.close()
            raise CannotStartError(f"{problem}, and no rank was started")

    def __exit__(self, *how: object) -> None:
        """End it."""
        self.close()

    def about(self, job: str, hosts: Iterable[str] = ()) -> None:
        """Tell it the job, and other hosts of it; more may be told later."""
        self._tell("".join([f"job {job}\n", *(f"host {host}\n" for host in hosts)]))

    def process(self, number: int) -> None:
        """Tell it that an elastic job has started one more process."""
        self._tell(f"process {number}\n")

    def note(self, text: str) -> None:
        """Tell it a line of the launcher."""
        self._tell(f"note {' '.join(text.splitlines())}\n")

    def _tell(self, lines: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended, or hangs: the job goes on
            os.write(self._process.stdin.fileno(), lines.encode("utf-8", "replace"))

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Later(Beside):
    """A process that nobody has asked for: it starts after a while, so short jobs do without it."""

    def __init__(self, words: Sequence[str], output: Output) -> None:
        self._command = [sys.executable, "-m", *words, "--began-at", str(time.monotonic())]
        self._untold: list[str] | None = []
        self._hosts: set[str] = set()
        output.later = time.monotonic() + _LATER_S, self._start

    def _start(self) -> None:
        if len(self._hosts) > _MOST_HOSTS:
            return
        with contextlib.suppress(OSError):  # no process is left for it
            self._process = start(self._command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
            assert self._process.stdin is not None
            os.set_blocking(self._process.stdin.fileno(), False)
            untold, self._untold = self._untold or [], None
            self._tell("".join(untold))

    def about(self, job: str, hosts: Iterable[str] = ()) -> None:
        """Tell it, once it runs."""
        self._hosts.update(hosts)
        if len(self._hosts) <= _MOST_HOSTS:
            super().about(job, hosts)

    def _tell(self, lines: str) -> None:
        if self._untold is None:
            super()._tell(lines)
        else:
            self._untold.append(lines)

    def close(self) -> None:
        """End it, if it has started."""
        if self._untold is None:
            super().close()

"""Faults of ranks in tests: one dies or is slow at a collective, or all of them vary their pace.

A profiler of Python sees each call of a collective before it begins, whichever name the test has
for it, and costs nothing in other tests. It does not see gradients that C++ reduces during a
backward pass; the `step` of the optimizer follows.
"""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

from hororing.testing.checks import rank_and_size
from hororing.testing.messages import Killing

__all__ = ["interleave", "kill", "slow"]

# The longest first, since `reducescatter` is no `reduce`.
KINDS = (
    "reducescatter", "allreduce", "allgather", "alltoall", "broadcast", "barrier", "scatter",
    "gather", "reduce", "irecv", "isend", "recv", "send", "join", "step",
)  # fmt: skip
_COMMUNICATORS = ("hororing.", "torch.distributed")
_OWN = "hororing.testing"


def kill(rank: int, at: str) -> None:
    """Let a rank be killed (SIGKILL) when it calls a collective, in this test.

    Every rank calls it, before that. The death fails nothing: the test passes if it passes on the
    other ranks, which get PeerLostError, or go on if the job is elastic.

    Parameters
    ----------
    rank : int
        Which one.
    at : str
        As ``"allreduce:3"``: just before its third allreduce from now on, counted from 1. Variants
        count alike, as `grouped_allreduce_async_` and torch's `all_reduce`. ``"step:2"`` is the
        second `step` of an optimizer of hororing.

    Raises
    ------
    ValueError
        There is no such collective, or this is no test on ranks.

    Examples
    --------
    >>> import hororing.testing
    >>> hororing.testing.kill(rank=1, at="allreduce:3")  # doctest: +SKIP
    """
    found = re.fullmatch(r"(\w+):([1-9][0-9]*)", at)
    if found is None or found[1] not in KINDS:
        raise ValueError(f"kill: at={at!r} is not like 'allreduce:3'; there are {', '.join(KINDS)}")
    _check("kill", rank)
    kind = found[1]
    armed.kills.append((rank, kind, armed.counts[kind] + int(found[2])))
    armed.watch()


def slow(rank: int, ms: float) -> None:
    """Let a rank wait before each collective, in this test. Every rank calls it.

    Parameters
    ----------
    rank : int
        Which one.
    ms : float
        How long, in ms.

    Raises
    ------
    ValueError
        A negative time, or this is no test on ranks.

    Examples
    --------
    >>> import hororing.testing
    >>> hororing.testing.slow(rank=1, ms=50)  # doctest: +SKIP
    """
    if isinstance(ms, bool) or not isinstance(ms, (int, float)) or not 0 <= ms < 1e9:
        raise ValueError(f"slow: ms={ms!r} is not a number of milliseconds")
    _check("slow", rank)
    armed.slow_s[rank] = ms / 1000
    armed.watch()


def interleave(seeds: Any = 20, max_ms: float = 5.0) -> Any:
    """Return a mark for a test on ranks: it runs once for each seed, with other delays.

    Before each collective, a rank waits for a random time of its own. A test that fails has its
    seed in its name, and has the same delays when it runs again by that name.

    Parameters
    ----------
    seeds : int or iterable of int
        How many, or which.
    max_ms : float
        The longest delay, in ms.

    Returns
    -------
    pytest.MarkDecorator
        ``pytest.mark.interleave`` with these arguments.

    Examples
    --------
    >>> import hororing.testing
    >>> mark = hororing.testing.interleave(seeds=20)
    """
    from hororing.testing import mark  # which needs pytest

    return mark.interleave(seeds, max_ms)


def _check(verb: str, rank: int) -> None:
    if armed.announce is None:
        raise ValueError(f"{verb}: this is no test on ranks: pytest.mark.ranks, testing.run")
    if type(rank) is not int or not 0 <= rank < armed.size:
        raise ValueError(f"{verb}: rank={rank!r}: there are ranks 0 to {armed.size - 1}")


class _Armed:
    """The faults of this process, in the current test."""

    def __init__(self) -> None:
        self.announce: Callable[[object], None] | None = None  # to the process of the tests
        self.size = 0
        self.clear()

    def clear(self) -> None:
        """Forget the faults of the previous test."""
        self.counts: Counter[str] = Counter()
        self.kills: list[tuple[int, str, int]] = []
        self.slow_s: dict[int, float] = {}
        self.delays: tuple[int, float] | None = None  # seed, and the longest delay in s
        self._random: random.Random | None = None
        self._rank = -1
        if sys.getprofile() == self._see:
            sys.setprofile(None)

    def watch(self) -> None:
        """See all calls from now on."""
        sys.setprofile(self._see)

    def _see(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and (kind := _kind_of(frame)):
            self._before(kind)

    def _before(self, kind: str) -> None:
        self.counts[kind] += 1
        if self._rank < 0:
            self._rank = rank_and_size()[0]
        time.sleep(self.slow_s.get(self._rank, 0.0) + self._delay_s())
        if (self._rank, kind, self.counts[kind]) in self.kills:
            assert self.announce is not None
            self.announce(Killing())
            os.kill(os.getpid(), signal.SIGKILL)

    def _delay_s(self) -> float:
        if self.delays is None:
            return 0.0
        seed, longest_s = self.delays
        if self._random is None:
            self._random = random.Random(f"{seed} {self._rank}")
        # Half of the calls wait not at all, as two ranks in step do.
        return max(self._random.uniform(-longest_s, longest_s), 0.0)


armed = _Armed()


def _kind_of(frame: FrameType) -> str:
    """The collective that this call begins; "": none, or a part of one."""
    kind = _name(frame)
    above = frame.f_back
    while kind and above is not None and _is_of(above, _COMMUNICATORS):
        if _is_of(above, (_OWN,)) or _name(above):
            return ""
        above = above.f_back
    return kind


def _name(frame: FrameType) -> str:
    if not _is_of(frame, _COMMUNICATORS) or frame.f_code.co_name.startswith("_"):
        return ""
    name = frame.f_code.co_name.replace("_", "").removeprefix("grouped").removeprefix("sparse")
    return next((kind for kind in KINDS if name.startswith(kind)), "")


def _is_of(frame: FrameType, modules: tuple[str, ...]) -> bool:
    return str(frame.f_globals.get("__name__")).startswith(modules)

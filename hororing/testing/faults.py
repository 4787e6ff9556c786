"""Faults of ranks in tests: one dies or is slow at a collective, or all of them vary their pace.

A profiler of Python sees each call of a collective before it begins, whichever name the test has
for it, and costs nothing in other tests. It also sees when an optimizer sends gradients that hooks
in C++ have collected.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sized
from types import FrameType
from typing import Any, NamedTuple

from hororing.testing.checks import rank_and_size
from hororing.testing.messages import Killing

__all__ = ["interleave", "kill", "slow"]

# The longest first, since `reducescatter` is no `reduce`.
KINDS = (
    "reducescatter", "allreduce", "allgather", "alltoall", "broadcast", "barrier", "scatter",
    "gather", "reduce", "irecv", "isend", "recv", "send", "join", "step",
)  # fmt: skip
_COMMUNICATORS = (
    "hororing.", "torch.distributed.distributed_c10d", "torch.distributed._functional_collectives",
)  # fmt: skip
_OF_TORCH = ("torch.", "hororing.torch.distributed.")
_ONLY_OF_TORCH = ("scatter", "gather", "reduce", "irecv", "isend", "recv", "send")
_OWN = "hororing.testing"
_OPTIMIZER = "hororing.torch._optimizer."
# Its functions that send gradients, which their variables hold.
_GRADIENTS: dict[tuple[str, str], Callable[[Mapping[str, Any]], Sized]] = {
    (f"{_OPTIMIZER}step", "send_queued"): lambda variables: variables["self"].queued,
    (f"{_OPTIMIZER}adasum", "reduce"): lambda variables: variables["before"],
}
_UNSEEN = (
    "Collectives in compiled code (tf.function, jax.jit) and those of DistributedDataParallel on "
    "gloo are not seen; nor are those of other threads"
)


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
    before = armed.counts[kind]
    armed.kills.append(_Kill(rank, kind, before + int(found[2]), before))
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


class _Kill(NamedTuple):
    rank: int
    kind: str
    number: int  # of the call, counted from the begin of the test
    before: int  # how many of these were before `kill`


class _Armed:
    """The faults of this process, in the current test."""

    def __init__(self) -> None:
        self.announce: Callable[[object], None] | None = None  # to the process of the tests
        self.before_death: Callable[[], None] = lambda: None
        self.size = 0
        self.clear()

    def clear(self) -> None:
        """Forget the faults of the previous test."""
        self.counts: Counter[str] = Counter()
        self.kills: list[_Kill] = []
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
            sent = _GRADIENTS.get(_place(frame))
            self._before(kind, len(sent(frame.f_locals)) if sent is not None else 1)

    def _before(self, kind: str, times: int) -> None:
        done = self.counts[kind]
        self.counts[kind] += times
        self._know_rank()
        time.sleep(self.slow_s.get(self._rank, 0.0) + self._delay_s())
        if any(
            (each.rank, each.kind) == (self._rank, kind) and done < each.number <= done + times
            for each in self.kills
        ):
            assert self.announce is not None
            self.before_death()
            self.announce(Killing())
            os.kill(os.getpid(), signal.SIGKILL)

    def _know_rank(self) -> None:
        if self._rank < 0:
            self._rank = rank_and_size()[0]

    def check(self) -> None:
        """Fail if a rank that should have died has not, and warn if no delay has happened."""
        if not self.kills and not self.slow_s and self.delays is None:
            return
        with contextlib.suppress(ValueError):  # of ranks that are not initialised any more
            self._know_rank()
        for each in self.kills:
            if each.rank == self._rank:
                raise AssertionError(
                    f"kill(rank={each.rank}, at='{each.kind}:{each.number - each.before}') did not "
                    f"happen: rank {each.rank} has called {self.counts[each.kind] - each.before} "
                    f"since. {_UNSEEN}"
                )
        if not self.counts and (self._rank in self.slow_s or self.delays is not None):
            warnings.warn(f"no collective was called, so none was late. {_UNSEEN}", stacklevel=2)

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
    if kind and _is_of(frame, (_OPTIMIZER,)):
        return kind  # also within `step`
    above = frame.f_back
    while kind and above is not None and _is_of(above, _COMMUNICATORS):
        if _is_of(above, (_OWN, _OPTIMIZER)) or _name(above):
            return ""
        above = above.f_back
    return kind


def _name(frame: FrameType) -> str:
    if not _is_of(frame, _COMMUNICATORS) or frame.f_code.co_name.startswith("_"):
        return ""
    if _is_of(frame, (_OPTIMIZER,)):
        own = frame.f_code.co_name == "step"
        return "allreduce" if _place(frame) in _GRADIENTS else "step" if own else ""
    name = frame.f_code.co_name.replace("_", "").removeprefix("grouped").removeprefix("sparse")
    kind = next((kind for kind in KINDS if name.startswith(kind)), "")
    return kind if kind not in _ONLY_OF_TORCH or _is_of(frame, _OF_TORCH) else ""


def _place(frame: FrameType) -> tuple[str, str]:
    return str(frame.f_globals.get("__name__")), frame.f_code.co_name


def _is_of(frame: FrameType, modules: tuple[str, ...]) -> bool:
    return str(frame.f_globals.get("__name__")).startswith(modules)

"""`hororing.testing.run`: calls a function on ranks, without pytest."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hororing.errors import RunError
from hororing.hororun.call import describe
from hororing.hororun.function import results
from hororing.testing import measuring, sentences
from hororing.testing.messages import BACKENDS, HORORING, Call, Plan
from hororing.testing.pool import Outcome, Pool
from hororing.testing.processes import Starter, StartError

# What a rank imports beforehand, if this process has.
_FRAMEWORKS = ("numpy", "torch", "tensorflow", "keras", "jax")
_lock = threading.Lock()
# By thread, because ranks end with the thread that has started them; with what they import.
_starters: dict[int, tuple[list[str], Starter]] = {}


def run(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    ranks: int,
    backend: str = HORORING,
    limit_s: float = 5.0,
) -> list[Any]:
    """Call `function` on ranks of this host, initialised, and return its results by rank.

    Blocks until all ranks have ended, at most a second longer than the limit. Each call has new
    processes, forked from one that has imported what earlier calls needed.

    Parameters
    ----------
    function : callable
        Any that cloudpickle can carry. hvd is initialised, and torch.distributed if `function`'s
        module imports torch.
    args, kwargs : sequence, mapping
        Its arguments, the same on all ranks.
    ranks : int
        How many, from 1 to 64.
    backend : str
        Of torch.distributed: "hororing", or "gloo", which leaves hvd uninitialised.
    limit_s : float
        How long it may take, in s.

    Returns
    -------
    list
        The results, by rank.

    Raises
    ------
    RunError
        A rank raised an exception (which is the cause, if it can be pickled), died, or did not end;
        the text says what each rank was doing.
    TypeError
        The function, its arguments or its result cannot be pickled.
    ValueError
        An argument is wrong.

    Examples
    --------
    >>> import hororing.testing
    >>> def mean(x):
    ...     import hororing.numpy as hvd
    ...     import numpy as np
    ...
    ...     return float(hvd.allreduce(np.array(x * hvd.rank())))
    >>> hororing.testing.run(mean, (4.0,), ranks=2)
    [2.0, 2.0]
    """
    if type(ranks) is not int or not 0 < ranks <= 64:
        raise ValueError(f"run: ranks={ranks!r} is not a number from 1 to 64")
    if backend not in BACKENDS:
        raise ValueError(f"run: backend={backend!r}: there are {' and '.join(BACKENDS)}")
    if not isinstance(limit_s, (int, float)) or not 0 < limit_s < 1e9:
        raise ValueError(f"run: limit_s={limit_s!r} is not a number of seconds above 0")
    payload = describe(function, tuple(args), dict(kwargs or {}))
    starter = _starter()
    try:
        pool = Pool(starter, ranks)
    except StartError as error:
        raise RunError(f"run: {error}") from None
    try:
        outcomes = pool.run(Call(payload, pool.world(backend, True)), limit_s)
    finally:
        if starter.plan.coverage is not None:
            pool.finish()
        pool.close()
    for outcome in outcomes:
        for line in outcome.output.splitlines():
            print(line if ranks == 1 else f"[{outcome.rank}] {line}")
    return results(_Finished(outcomes, limit_s), ranks)


def _starter() -> Starter:
    """The one of this thread, which imports what this process has imported."""
    modules = [name for name in list(sys.modules) if name.removeprefix("hororing.") in _FRAMEWORKS]
    with _lock:
        alive = {each.ident for each in threading.enumerate()}
        for thread, (known, starter) in list(_starters.items()):
            if thread not in alive or (thread == threading.get_ident() and known != modules):
                starter.close()
                del _starters[thread]
        if threading.get_ident() not in _starters:
            plan = Plan(list(sys.path), list(sys.argv), None, modules, measuring.how())
            made = Starter(plan, os.getcwd())
            _starters[threading.get_ident()] = modules, made
        return _starters[threading.get_ident()][1]


@atexit.register
def _close() -> None:
    for _, starter in _starters.values():
        starter.close()
    _starters.clear()


class _Finished:
    """The ranks of a call, as a job that has ended."""

    def __init__(self, outcomes: Sequence[Outcome], limit_s: float) -> None:
        self._outcomes, self._limit_s = outcomes, limit_s
        self.results = {each.rank: bytearray(each.answer) for each in outcomes if each.answer}
        troubled = [each for each in outcomes if each.trouble]
        first = min(troubled, key=lambda each: each.died is None, default=None)
        self.failed = None if first is None else (first.rank, first.died or 1)

    def name(self, rank: int) -> str:
        """A rank's."""
        return f"rank {rank}"

    def end_report(self, rank: int, code: int) -> list[str]:
        """What each rank was doing."""
        return [sentences.troubles(self._outcomes, "the call", self._limit_s)]

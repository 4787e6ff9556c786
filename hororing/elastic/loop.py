"""The loop of elastic training: train; after a change of members, continue from the state."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

from hororing._api import init
from hororing._engine import membership
from hororing._engine import state as engine_state
from hororing._engine.shutdown import shutdown
from hororing._requests import names
from hororing.elastic.alike import MisfitsFound, misfits_of
from hororing.elastic.state import RedistributeSamples
from hororing.errors import HororingInternalError, HostsUpdatedInterrupt

Train = Callable[..., Any]
# Converts a framework's exception to ours; None if it has nothing to do with ranks.
ConvertError = Callable[[Exception], Exception | None]

_NOT_ELASTIC: Final = (
    "; this job cannot continue: start it with hororun --min-np, and hvd.elastic.run continues "
    "with the remaining ranks"
)


def run(func: Train) -> Train:
    """Make a training function continue when ranks die, leave or join.

    >>> @hvd.elastic.run
    ... def train(state):
    ...     for state.epoch in range(state.epoch, 10):
    ...         ...
    ...         state.commit()
    >>> train(state)

    The first argument of `func` is a `State`. Before each call all ranks get the state of rank 0.
    When a rank is lost, the others restore the last saved values; when ranks join or leave by
    announcement, they keep their values. Then they form a new job, call the state's reset
    callbacks, send the state if a rank needs it, and call `func` again, until it returns. Between
    `hvd.init()` and this call a script must not communicate, because later ranks would do so alone.

    Raises
    ------
    HororingInternalError : the job is not elastic (docs/elastic.md), or cannot be formed again.
    ValueError : errors of hororing that are ValueErrors, such as MismatchError, propagate, because
        continuing would not help; unless the rank that differs has just joined, which then raises
        it alone. So do all exceptions of `func`.
    """
    return run_fn(func, reset)


def run_fn(func: Train, reset: Callable[[], None], convert: ConvertError = lambda e: e) -> Train:
    """Like `run`, with another function that forms the job again.

    `convert` converts an exception of a framework to ours, if it comes from hororing.
    """

    @functools.wraps(func)
    def train(state: Any, *args: Any, **kwargs: Any) -> Any:
        optimizers = names.optimizers()
        formed, needs_sync = False, True
        state._begin()
        try:
            while True:
                lost = 0
                try:
                    if formed:
                        state.on_reset()
                    state.save()  # all ranks get what rank 0 has saved
                    if state._synchronize(needs_sync):
                        needs_sync = False
                    return _call(func, state, args, kwargs, optimizers)
                except HostsUpdatedInterrupt as interrupt:
                    failed, needs_sync = False, needs_sync or not interrupt.skip_sync
                except MisfitsFound as found:
                    membership.exclude(found.misfits)
                    failed = False
                except Exception as error:
                    failure = convert(error)
                    misfits = misfits_of(failure)
                    if not isinstance(failure, HororingInternalError) or (
                        isinstance(failure, ValueError) and not misfits
                    ):
                        raise
                    if not membership.is_elastic():
                        failure.args = (f"{failure}{_NOT_ELASTIC}", *failure.args[1:])
                        raise failure from (None if failure is error else error)
                    del failure  # its traceback holds what `func` has made, such as optimizers
                    membership.exclude(misfits)
                    lost = _fall_back(state)
                    failed = needs_sync = True
                membership.set_progress(*state._progress(), lost=lost)
                reset()
                formed = True
                if failed:
                    state._restore_mark()
        finally:
            state._end()

    return train


def _fall_back(state: Any) -> int:
    """Return how many steps that costs; -1: unknown."""
    before = state._steps_taken()
    state._fall_back()
    return -1 if before is None else max(before - (state._steps_taken() or 0), 0)


def _call(func: Train, state: Any, args: Any, kwargs: Any, optimizers: names.Counts) -> Any:
    """Call the training function, and call it again after replayed steps."""
    while True:
        # From here on, new ranks make as many optimizers as those that begin again.
        names.restart_optimizers(optimizers)
        try:
            return func(state, *args, **kwargs)
        except RedistributeSamples:
            state.reset()


def reset() -> None:
    """Form the job again. Blocks until the remaining and the new ranks have called it."""
    static, formed = engine_state.process.process_sets, False
    while not formed:
        shutdown()
        try:
            init.init(process_sets=static)
            formed = True
        except HororingInternalError:
            if not engine_state.is_initialized():
                raise  # otherwise another rank was lost while process sets were registered

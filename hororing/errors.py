"""The exceptions of hororing.

================================  ==========================  ====================
exception                         fails                       the engine afterwards
================================  ==========================  ====================
ValueError, TypeError             this call                   running
UnsupportedOpError                this call                   running
DuplicateNameError                this call                   running
MismatchError                     this tensor, on every rank  running
NotInitializedError               this call                   unchanged
ShutDownError                     everything pending          stopped
PeerLostError, StalledError,      everything pending          failed
TransportError
HororingInternalError (itself)    everything pending          failed (our defect)
================================  ==========================  ====================
"""

from __future__ import annotations

from typing import Any, Final


class HororingInternalError(RuntimeError):
    """A collective failed. The base class of errors from which elastic training recovers."""


# When a traced function raises an error, TensorFlow raises it again with source locations in the
# text. It keeps the type only if the type is initialised like this.
HororingInternalError.__init__ = Exception.__init__  # type: ignore[method-assign]


# Horovod's name.
HorovodInternalError = HororingInternalError


class MismatchError(HororingInternalError, ValueError):
    """Ranks disagree about one tensor; the text lists their values. The job continues.

    A defect of the script, so elastic training does not retry it, except without a rank that has
    just joined.

    Attributes
    ----------
    rank : int
        The first rank that differs from the first one; -1 if unknown.
    """

    rank: int = -1


class UnsupportedOpError(HororingInternalError, ValueError):
    """The verb has no such reduce operation. (Horovod raises HorovodInternalError.)"""


class DuplicateNameError(ValueError):
    """A request of that name is in flight on this rank."""


NOT_INITIALIZED: Final = "hororing has not been initialized; use hvd.init()."


class NotInitializedError(HororingInternalError, ValueError):
    """`init()` was not called, or `shutdown()` was; or this process was forked from a rank."""

    def __str__(self) -> str:
        return super().__str__() or NOT_INITIALIZED


class ShutDownError(HororingInternalError):
    """A rank has shut down or reached the end of its script."""


class PeerLostError(HororingInternalError):
    """A rank died, or ended with an exception. All other ranks raise the same error.

    Attributes
    ----------
    rank : int
        The rank that was lost; -1 if unknown.
    """

    def __init__(self, text: str, rank: int = -1) -> None:
        super().__init__(text)
        self.rank = rank

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep `rank` when the exception is pickled."""
        return type(self), (str(self), self.rank)


class StalledError(HororingInternalError):
    """A tensor waited longer than HORORING_STALL_SHUTDOWN_S, or ranks waited for one another.

    The latter is raised after HORORING_DEADLOCK_S. Raised on all ranks.
    """


class TransportError(HororingInternalError):
    """No progress for HORORING_TIMEOUT_S, or MPI or shared memory reported an error.

    Raised on all ranks.
    """


class RunError(RuntimeError):
    """A job of `hororing.run` has failed, or could not be started.

    Attributes
    ----------
    rank : int
        The rank that failed; -1 if no rank is to blame.
    exit_code : int or None
        Its exit code, or minus the signal that killed it.
    traceback : str
        Of the exception that the rank raised, as text; "" if it raised none.
    """

    def __init__(
        self, text: str, rank: int = -1, exit_code: int | None = None, traceback: str = ""
    ) -> None:
        super().__init__(text)
        self.rank = rank
        self.exit_code = exit_code
        self.traceback = traceback

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep the attributes when the exception is pickled."""
        return type(self), (str(self), self.rank, self.exit_code, self.traceback)


class HostsUpdatedInterrupt(RuntimeError):  # not an error: the name is Horovod's
    """Elastic training: hosts were added or removed.

    Attributes
    ----------
    skip_sync : bool
        No state needs to be sent, since hosts were only removed.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts of the job have changed")
        self.skip_sync = skip_sync

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep `skip_sync` when the exception is pickled."""
        return type(self), (self.skip_sync,)

"""The end of the engine: `shutdown`, and the hooks that end it with the process.

None of the hooks acts in a forked child, which has no engine.

The end of a process determines the error of its peers:

* the script returns, or calls `sys.exit(0)`: `shutdown()`, then MPI is finalised if we had
  initialised it. Peers that continue get ShutDownError.
* `sys.exit` with another code: the same, with the code in the text, but MPI is not finalised. A
  peer that ends by that error ends with the same code, so that it is mpirun's, too. (Exit hooks of
  Python do not get the code, so sys.exit, exit and quit are replaced to raise our exception; `raise
  SystemExit(3)` counts as a normal end, except for hororun in an elastic job, which sees the code.)
* `shutdown()` while an exception is handled, as in ``finally:``: peers get PeerLostError with it.
* an uncaught exception: peers get PeerLostError with this rank and the exception's text. MPI is not
  finalised, because that would wait for ranks that may compute for hours: mpirun ends the job. If
  the interpreter continues (a prompt, python -i, a library that shows the exception by
  sys.excepthook), so does the engine.
* killed: peers notice it.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from hororing._engine import core, state
from hororing._engine.core import last_error, lib
from hororing._engine.logs import logger
from hororing._engine.state import process as _process
from hororing._engine.tracebacks import shorten
from hororing._job import threads
from hororing.errors import HororingInternalError, HostsUpdatedInterrupt, ShutDownError

# The maximum time that shutdown() waits for requests that all ranks have submitted. A frozen peer
# must not keep this process from ending.
_SHUTDOWN_TIMEOUT_S = 30.0
# Exceptions that are handled without a failure of this rank. An error of ours has its own reason.
_NO_FAILURES = (
    SystemExit, GeneratorExit, StopIteration, StopAsyncIteration,
    HororingInternalError, HostsUpdatedInterrupt,
)  # fmt: skip


def shutdown() -> None:
    """End the engine. Does nothing when there is none.

    Requests that all ranks had submitted are carried out. All other pending requests fail with
    ShutDownError on every rank, or with PeerLostError if it is called while this rank handles an
    exception (``finally: hvd.shutdown()``), which the text then names. Returns even if peers are
    dead. `init()` works again afterwards.
    """
    _shutdown(_why_now())


def _why_now() -> str:
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit) and error.code:
        return _BY_EXIT.format(error.code)
    if error is None or isinstance(error, _NO_FAILURES):
        return "shutdown() was called"
    reason = reason_of(type(error), error).decode("utf-8", "replace")
    return f"shutdown() was called while handling {reason}"


def _shutdown(reason: str) -> None:
    if not state.has_engine():  # also in a forked child
        return
    with _process.lock:
        # A signal handler may interrupt this call and make another one.
        if _process.ending or not state.has_engine():
            return
        _process.ending = True
        try:
            _process.broken |= lib.hr_state_now() == lib.HR_STATE_FAILED
            for callback in () if _process.broken else _process.before_shutdown:
                callback()
            code = int(lib.hr_shutdown(reason.encode(), _SHUTDOWN_TIMEOUT_S))
            _process.topology = None
            if code != lib.HR_OK:
                _process.broken = True
                logger.warning(last_error())
            for callback in _process.at_shutdown:
                callback()
        finally:
            _process.ending = False


def install_hooks(close_log: Callable[[], None]) -> None:
    """End the engine with the process, in whichever way that ends; once for all engines."""
    if _process.hooked:
        return
    _process.hooked = True
    atexit.register(_at_exit, close_log)
    previous = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        # The peers first: mpirun may end this process as soon as something is printed.
        ends = not _interpreter_goes_on()
        if ends:
            _abort(kind, value)
            core.raised.append(str(value))
            trace = shorten(value)
        previous(kind, value, trace)
        code = _EXIT.search(str(value)) if ends and isinstance(value, ShutDownError) else None
        if code is not None:
            # Python takes it from a hook. 256, such as from os.system(), would be success.
            raise SystemExit(int(code[1]) & 255 or 1)

    sys.excepthook = hook
    note_exit_codes()


def _shorten_tracebacks() -> None:
    """Also before `init`, which may be what was forgotten."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        previous(kind, value, trace if _interpreter_goes_on() else shorten(value))

    sys.excepthook = hook


def note_exit_codes() -> None:
    """Learn the code of sys.exit, exit and quit, for `exit_code`."""
    sys.exit = _exit
    if "_sitebuiltins" in sys.modules:  # exit() and quit() raise what it returns
        sys.modules["_sitebuiltins"].SystemExit = _exception  # type: ignore[attr-defined]


def exit_code() -> int:
    """Return the exit code of the process, which is ending, as far as Python tells."""
    code = _process.exit_code
    if code is None and getattr(sys, "last_value", None) is not None:  # uncaught
        return 1
    return code if isinstance(code, int) else int(code is not None)


class _Exit(SystemExit):
    """Raised by `sys.exit`; passes the code to `_at_exit` if it is not caught."""

    def _get(self) -> Any:
        code = _CODE.__get__(self)
        if sys._getframe().f_back is None:  # the interpreter asks, after the last Python code
            _process.exit_code = code
        return code

    code: Any = property(_get, lambda self, code: _CODE.__set__(self, code))


_CODE: Any = vars(SystemExit)["code"]


def _exit(status: object = None, /) -> NoReturn:
    """sys.exit."""
    raise _exception(*status) if isinstance(status, tuple) else _exception(status)


def _exception(*status: object) -> SystemExit:
    # In other threads it only ends the thread, without a word if it is not of a sub-class.
    is_main = threading.current_thread() is threading.main_thread()
    return (_Exit if is_main else SystemExit)(*status)


_BY_EXIT = "the script has ended by sys.exit({!r})"
# In the text of a ShutDownError.
_EXIT = re.compile(r"by sys\.exit\((\d+)\)")


def _interpreter_goes_on() -> bool:
    """Whether sys.excepthook was called for a reason other than the end of the script.

    At a prompt, or by Python code that only shows an exception with it. The interpreter itself
    calls it when no Python code of the main thread runs any more.
    """
    if sys.flags.inspect or hasattr(sys, "ps1"):
        return True
    if threading.current_thread() is not threading.main_thread():
        return True
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_name in ("<module>", "_run_module_as_main")  # else: another hook


def _abort(kind: type[BaseException], value: BaseException) -> None:
    if _process.pid != os.getpid():
        return
    _process.broken = True
    lib.hr_abort(reason_of(kind, value))
    _process.topology = None


def reason_of(kind: type[BaseException], value: BaseException) -> bytes:
    """Return the text for peers about an exception."""
    try:
        reason = f"{kind.__name__}: {value}".removesuffix(": ")
    except Exception:  # a broken __str__ must not hide the exception itself
        reason = kind.__name__
    return reason.encode("utf-8", "replace")


def leave(error: BaseException | None = None) -> None:
    """End the engine and the membership of a process that lives on. `error`: why it has failed."""
    if error is None:
        shutdown()
    else:
        _abort(type(error), error)
    _leave_store()


def _leave_store() -> None:
    if _process.member is not None:
        if _process.broken:
            _process.member.close()
        else:
            _process.member.done()
        _process.member = None


def _at_exit(close_log: Callable[[], None]) -> None:
    if _process.pid != os.getpid():
        return
    code = _process.exit_code
    uncaught = getattr(sys, "last_value", None)  # whatever sys.excepthook is
    if uncaught is not None and not code and not hasattr(sys, "ps1"):
        _abort(type(uncaught), uncaught)
    elif code:
        _shutdown(_BY_EXIT.format(code))
        _process.broken = True  # so mpirun ends the job, with that code
    else:
        _shutdown("the script has ended")
    _leave_store()
    if not _process.broken:
        lib.hr_finalize()
    close_log()
    if _process.broken and _process.launched and _mpi4py_would_finalize():
        # mpi4py finalises MPI after every hook of Python, and would wait there for peers that
        # are lost or busy. mpirun sees the exit code and ends the job.
        leave_at_once(exit_code() or 1)


def leave_at_once(code: int) -> NoReturn:
    """End the process, which is ending, without the rest of Python's end."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(code)


def _mpi4py_would_finalize() -> bool:
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized()


_shorten_tracebacks()
threads.at_process_end(note_exit_codes, lambda: leave_at_once(exit_code()))

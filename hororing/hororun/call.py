"""A rank of `hororing.run`: it reads a call from its standard input, and answers.

Both are pickles, so both must come from a trusted process: the call comes from a file in memory
that the launcher has made, and the answer goes over a pipe whose other end it holds. Neither has a
name that another process could open.

An answer is its kind, the length of its body (8 bytes, big endian), and the body: a pickle.
"""

from __future__ import annotations

import linecache
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, TracebackType
from typing import Any

import cloudpickle

from hororing._engine.tracebacks import shorten
from hororing.errors import PeerLostError, ShutDownError
from hororing.hororun.host.local import append

RETURNED, RAISED = b"R", b"E"
HEAD_BYTES = 9
_END_S = 5.0  # after an exception
# Followed by a descriptor for the answer. Does not need this package in PYTHONPATH.
PROGRAM = (
    f"import sys; sys.path[:] = [{str(Path(__file__).parents[2])!r}, *filter(None, sys.path)]; "
    "from hororing.hororun.call import main; main()"
)


@dataclass(frozen=True)
class Call:
    """The message to ranks: first the paths of modules, then the call, which needs them.

    `sources` are the texts of files that exist in memory only, such as notebook cells; tracebacks
    show them. `file` is where the function is defined, which cloudpickle 3.1.3 leaves out.
    """

    path: list[str]
    argv: list[str]
    sources: dict[str, Any]
    file: str
    call: bytes  # a pickle of function, arguments, keyword arguments


@dataclass(frozen=True)
class RankException:
    """The exception of a rank. `error` is a pickle of it, b"" if it cannot be pickled."""

    what: str  # its type and text
    trace: str
    error: bytes
    by_peers: bool  # it reports another rank's end


def describe(function: Callable[..., Any], args: Any, kwargs: Any) -> bytes:
    """Make the message to ranks. TypeError if it cannot be pickled."""
    main_script = sys.modules["__main__"]
    if main_script.__name__ == "__mp_main__":  # multiprocessing has spawned this process
        cloudpickle.register_pickle_by_value(main_script)  # ranks cannot import it
    try:
        call = cloudpickle.dumps((function, args, kwargs))
    except Exception as error:  # each type has its own
        raise TypeError(
            f"run: the function or its arguments cannot be pickled: {text_of(error)}; let the "
            "function open or make what cannot travel"
        ) from error
    sources = {
        # Without a time, so that it is not looked for.
        name: (len(entry[2]), None, entry[2], name)
        for name, entry in linecache.cache.items()
        if len(entry) == 4 and not os.path.exists(name)
    }
    file = function.__code__.co_filename if isinstance(function, FunctionType) else ""
    return pickle.dumps(Call(list(sys.path), list(sys.argv), sources, file, call))


def main() -> None:
    """Call the function, and answer. Ends the process like a script: with 1 after an exception."""
    answer = int(sys.argv[1])
    os.set_inheritable(answer, False)
    payload = Path("/proc/self/fd/0").read_bytes()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    shown_by_script: list[BaseException] = []
    hook = sys.excepthook
    sys.excepthook = lambda kind, error, trace: (
        None if error in shown_by_script else hook(kind, error, trace)
    )
    try:
        function, args, kwargs = restore(payload)
        body = pickled(function(*args, **kwargs))
    except SystemExit:
        raise  # the launcher sees the code
    except BaseException as error:
        # Answer before other ranks notice the error: their errors follow from this one.
        append(answer, packed(RAISED, dumped(error)))
        shown_by_script.append(error)
        _exit_within(_END_S)
        raise
    append(answer, packed(RETURNED, body))
    os.close(answer)


def restore(payload: bytes) -> tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]:
    """Return the function and its arguments, which `describe` has made a message of.

    Unpickling may raise anything.
    """
    message: Call = pickle.loads(payload)
    sys.path[:] = [*message.path, sys.path[0]]
    sys.argv[:] = message.argv
    linecache.cache.update(message.sources)
    function, args, kwargs = pickle.loads(message.call)
    if isinstance(function, FunctionType):
        function.__code__ = _of_file(function.__code__, message.file)
    return function, args, kwargs


def _of_file(code: CodeType, file: str) -> CodeType:
    """Return the code, and that of nested functions, with the file's name if that was lost."""
    if code.co_filename != "<dynamic-code>":
        return code
    constants = (_of_file(c, file) if isinstance(c, CodeType) else c for c in code.co_consts)
    return code.replace(co_filename=file, co_consts=tuple(constants))


def _exit_within(limit_s: float) -> None:
    """End this process then, even if a thread of the script still runs: the caller waits."""
    timer = threading.Timer(limit_s, os._exit, (1,))
    timer.daemon = True
    timer.start()


def read(answer: bytearray) -> tuple[bytes, Any] | None:
    """Return the kind and the body of an answer. None: it is not complete."""
    length = int.from_bytes(answer[1:HEAD_BYTES], "big")
    if len(answer) < HEAD_BYTES + length or not answer:
        return None
    return bytes(answer[:1]), pickle.loads(memoryview(answer)[HEAD_BYTES:])


def packed(kind: bytes, body: bytes) -> bytes:
    """Make an answer."""
    return kind + len(body).to_bytes(HEAD_BYTES - 1, "big") + body


def pickled(result: Any) -> bytes:
    """Return the body of a RETURNED answer. TypeError if the result cannot be pickled."""
    try:
        return bytes(cloudpickle.dumps(result))
    except Exception as error:
        raise TypeError(f"the result cannot be pickled: {text_of(error)}") from error


def dumped(error: BaseException) -> bytes:
    """Return the body of a RAISED answer: the exception of the function."""
    return pickle.dumps(raised(error))


def raised(error: BaseException) -> RankException:
    """Describe an exception of the function."""
    trace: TracebackType | None = error.__traceback__
    if trace is not None:
        trace = shorten(error.with_traceback(trace.tb_next))  # without `main`
    try:
        again = bytes(cloudpickle.dumps(error))
    except Exception:  # the text must suffice
        again = b""
    return RankException(
        text_of(error),
        "".join(traceback.format_exception(type(error), error, trace)),
        again,
        isinstance(error, (PeerLostError, ShutDownError)),
    )


def text_of(error: BaseException) -> str:
    """The type and the text of an exception."""
    # `_engine.shutdown` has one of its own.
    name = "SystemExit" if isinstance(error, SystemExit) else type(error).__name__
    try:
        return f"{name}: {error}".removesuffix(": ")
    except Exception:  # of its __str__
        return name

"""`hororing.run`: calls a function on every rank of a new job, and returns the results."""

from __future__ import annotations

import codecs
import contextlib
import io
import pickle
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, Protocol, TextIO

from hororing import config
from hororing._job import launchers
from hororing.errors import RunError
from hororing.hororun import elastic_call
from hororing.hororun.call import PROGRAM, RAISED, RankException, describe, read
from hororing.hororun.elastic_call import EndedElastic
from hororing.hororun.flags.host_lists import Host
from hororing.hororun.host.local import STDERR, STDOUT, CannotStartError
from hororing.hororun.host.output import Output
from hororing.hororun.job import plan, start
from hororing.hororun.job.ending import Grace
from hororing.hororun.job.plan import Place

_MPI = "there is no MPI between these ranks: start a script with mpirun instead"
# Arguments of Horovod, with their replacements.
_REFUSED = dict.fromkeys(("use_mpi", "mpi_args"), _MPI)
_IGNORED = ("verbose", "use_gloo")


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int | None = None,
    hosts: str | None = None,
    *,
    hostfile: str | None = None,
    env: Mapping[str, str] | None = None,
    executable: str | None = None,
    output_filename: str | None = None,
    tag_output: bool | None = None,
    start_timeout: float | None = None,
    grace: float | None = None,
    rsh_agent: str | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    network_interface: str | None = None,
    disable_cache: bool | None = None,
    num_proc: int | None = None,
    network_interfaces: str | Iterable[str] | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: tuple[float, float] | None = None,
    host_discovery_script: str | None = None,
    **others: Any,
) -> list[Any]:
    """Call `func` on every rank of a new job, and return the results by rank.

    Blocks until all ranks have ended; what they print appears in `sys.stdout` and `sys.stderr`.
    Works in scripts, notebooks and any thread, and as often as you like.

    Parameters
    ----------
    func : callable
        Any callable that cloudpickle can carry; also of a notebook or of `__main__`. It calls
        `hvd.init()` itself.
    args, kwargs : sequence or dict, optional
        Its arguments, the same on all ranks.
    np, num_proc : int, optional
        The number of ranks. None: as many as `hosts` have slots, else 1.
    hosts, hostfile : str, optional
        As ``a:4,b:4``, or a file with a line ``name slots=4`` each. None: this host. Others are
        reached by ssh; Python and modules have the same paths there.
    env : dict of str to str, optional
        Variables for all ranks, beside those of this process (on other hosts: beside its
        HORORING_* and HOROVOD_* ones).
    executable : str, optional
        The Python of the ranks. None: this one.
    output_filename : str, optional
        A folder for the output of ranks, in files ``rank.N/stdout``.
    tag_output : bool, optional
        Lines begin with their rank. None: if there are several.
    start_timeout : float, optional
        How long other hosts may take to answer, in seconds. None: 60.
    grace : float, optional
        Between the request to end and the end, for all ranks, in seconds. None: 5 after a
        failure, 30 after a signal to this process.
    rsh_agent, ssh_port, ssh_identity_file : str or int, optional
        A command instead of ssh; options of ssh.
    network_interface, network_interfaces : str or iterable of str, optional
        As HORORING_INTERFACE.
    disable_cache : bool, optional
        As HORORING_CACHE_CAPACITY=0.
    min_np, min_num_proc, max_np, max_num_proc : int, optional
        With any of these or `host_discovery_script` the job is elastic (docs/elastic.md):
        `func` calls a function wrapped by `hvd.elastic.run`. Processes that fail are replaced.
        Minimum and maximum number of ranks; None: `np`.
    slots, reset_limit : int, optional
        As ``--slots-per-host`` and ``--reset-limit`` of hororun.
    cooldown_range : (float, float), optional
        As ``--blacklist-cooldown-range`` of hororun.
    host_discovery_script : str, optional
        As ``--host-discovery-script`` of hororun.
    others : dict
        More of Horovod's arguments. `verbose` and `use_gloo` have no effect.

    Returns
    -------
    list
        The results of `func`, by rank; in an elastic job, of the ranks that have finished.

    Raises
    ------
    RunError : a rank raised an exception (which is the cause, if it can be pickled), was killed, or
        cannot be started; the other ranks have been ended. In an elastic job: it cannot continue;
        `rank` is then the number of a process.
    TypeError : `func` or its arguments cannot be pickled; or a variable of `env` is None.
    ValueError : numbers that do not fit, or an argument that cannot be satisfied; or this process
        is a rank itself.
    OSError : `hostfile` or `output_filename` cannot be opened, or what ranks print not be written.
    KeyboardInterrupt : Ctrl-C; all ranks have been ended.

    Examples
    --------
    >>> def train(lr):
    ...     import hororing.torch as hvd
    ...
    ...     hvd.init()
    ...     return hvd.rank(), lr
    >>> hororing.run(train, args=(0.1,), np=2)
    [(0, 0.1), (1, 0.1)]
    """
    _check(func, args, hosts, others)
    _refuse_in_rank()
    size = _one("np", np, "num_proc", num_proc)
    python = executable or sys.executable
    program = shutil.which(python)
    if program is None:
        raise ValueError(f"run: there is no program {python!r} (executable)")
    try:
        rsh = None if rsh_agent is None else shlex.split(rsh_agent)
    except ValueError as error:
        raise ValueError(f"run: rsh_agent={rsh_agent!r}: {error}") from None
    given = start.given(env)
    given.update(start.network(network_interface or network_interfaces))
    if disable_cache:
        given["HORORING_CACHE_CAPACITY"] = "0"
    if reset_limit is not None:
        given["HORORING_RESET_LIMIT"] = str(reset_limit)
    asked = {
        "num_proc": size, "hosts": hosts, "hostfile": hostfile, "slots_per_host": slots,
        "min_np": _one("min_np", min_np, "min_num_proc", min_num_proc),
        "max_np": _one("max_np", max_np, "max_num_proc", max_num_proc),
        "blacklist_cooldown_range": cooldown_range, "host_discovery_script": host_discovery_script,
    }  # fmt: skip
    try:
        named = start.named_hosts(hosts, hostfile) or [Host("localhost")]
        elastic = elastic_call.chosen(asked, named, given)
        if reset_limit is not None and elastic is None:
            raise ValueError("reset_limit is for elastic jobs: give min_np, too")
        placed = [] if elastic else _placed(size, named)
    except ValueError as error:
        raise ValueError(f"run: {error}") from None
    what = start.Start(
        placed,
        [program, "-c", PROGRAM],
        {**start.settings(), **given},
        start.ssh(ssh_port, ssh_identity_file) if rsh is None else rsh,
        _seconds("start_timeout", start_timeout, 60.0),
        Grace() if grace is None else Grace(*2 * [_seconds("grace", grace, 0.0)]),
        payload=describe(func, tuple(args), dict(kwargs or {})),
    )
    size = elastic.max_np if elastic else len(placed)
    output = Output(
        {name: Stream(text) for name, text in ((STDOUT, sys.stdout), (STDERR, sys.stderr)) if text},
        size,
        tag=size > 1 if tag_output is None else tag_output,
        directory=output_filename,
        elastic=elastic is not None,
    )
    try:
        if elastic is not None:
            job = start.run_elastic(what, elastic, output, None)
            pass_signal_on(job.asked)
            ended = EndedElastic(job)
            return results(ended, len(ended.results))
        output.open_files(size)
        fixed = start.run(what, output)
    except CannotStartError as error:
        raise RunError(f"run: {error}") from None
    pass_signal_on(fixed.asked)
    return results(fixed, size)


class Stream(io.RawIOBase):
    """A text stream of Python, which need not be a file, for bytes."""

    def __init__(self, text: TextIO) -> None:
        self._text = text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def fileno(self) -> int:
        """The descriptor, if this process's own output is not replaced. Otherwise OSError."""
        own = self._text in (sys.__stdout__, sys.__stderr__)
        return self._text.fileno() if own else super().fileno()

    def write(self, data: Any) -> int:
        """Write all of it."""
        words = self._decoder.decode(bytes(data))
        try:
            self._text.write(words)
        except UnicodeEncodeError:
            self._text.write(words.encode("ascii", "backslashreplace").decode())
        self._text.flush()
        return len(data)


# ---------------------------------------------------------------------------------------------
# Arguments


def _check(func: object, args: object, hosts: object, others: Mapping[str, Any]) -> None:
    if not callable(func):
        raise TypeError(f"run: func is {func!r}, which cannot be called")
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"run: args is {args!r}: write a tuple, as (0.1,)")
    if hosts is not None and not isinstance(hosts, str):
        raise TypeError(f"run: hosts is {hosts!r}: write a text, as 'a:4,b:4'")
    for name, value in others.items():
        if name not in _REFUSED and name not in _IGNORED:
            raise TypeError(f"run: there is no argument {name!r}")
        if value and name in _REFUSED:
            raise ValueError(f"run: {name}={value!r}: {_REFUSED[name]}")


def _refuse_in_rank() -> None:
    here = launchers.detect()
    if here.launched and not config.load()["ALONE"]:
        raise ValueError(
            f"run: this process is rank {here.rank or 0} of a job itself ({here.launcher} has "
            f"started it, says {here.sign}): call run in a process that no launcher has started; "
            "or set HORORING_ALONE=1 if that is about another program"
        )


def _one(name: str, value: int | None, other: str, same: int | None) -> int | None:
    if value is not None and same is not None and value != same:
        raise ValueError(f"run: {name}={value} contradicts {other}={same}: give one of them")
    return same if value is None else value


def _seconds(name: str, value: float | None, default: float) -> float:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1e9:
        raise ValueError(f"run: {name}={value!r} is not a number of seconds")
    return value


def _placed(size: int | None, named: list[Host]) -> list[Place]:
    if size is None and all(host.slots is None for host in named):
        size = len(named)
    return plan.place(named, size, None, None)


# ---------------------------------------------------------------------------------------------
# Results


class Ended(Protocol):
    """A job that has ended; see `FixedJob` for the attributes."""

    results: dict[int, bytearray]
    failed: tuple[int, int] | None

    def name(self, rank: int) -> str:
        """Like `FixedJob.name`."""

    def end_report(self, rank: int, code: int) -> list[str]:
        """Like `FixedJob.end_report`."""


def results(job: Ended, size: int) -> list[Any]:
    """Return the results of the function, by rank. RunError if a rank has failed."""
    answers: dict[int, tuple[bytes, Any]] = {}
    for rank in list(job.results):
        try:
            answer = read(job.results.pop(rank))
        except Exception as error:  # unpickling can raise anything
            raise RunError(
                f"run: the result of {job.name(rank)} cannot be read here: "
                f"{type(error).__name__}: {error}",
                rank,
            ) from error
        if answer is not None:
            answers[rank] = answer
    raised = {rank: about for rank, (kind, about) in answers.items() if kind == RAISED}
    own = [rank for rank, about in raised.items() if not about.by_peers]
    if own or (raised and (job.failed is None or job.failed[0] in raised)):
        rank = own[0] if own else next(iter(raised))
        _raise_again(job, rank, raised)
    if job.failed is not None:
        rank, code = job.failed
        raise RunError("run: " + "\n".join(job.end_report(rank, code)), rank, code)
    for rank in range(size):
        if rank not in answers:
            raise RunError(f"run: {job.name(rank)} has ended without a result", rank, 0)
    return [answers[rank][1] for rank in range(size)]


def pass_signal_on(asked: int | None) -> None:
    """Let the signal that ended the job have its usual effect on this process."""
    if asked is None:
        return
    signal.raise_signal(asked)
    if asked == signal.SIGINT:
        raise KeyboardInterrupt
    raise RunError(f"run: ended by {signal.Signals(asked).name}")


def _raise_again(job: Ended, rank: int, raised: Mapping[int, RankException]) -> NoReturn:
    about = raised[rank]
    lines = [f"run: {job.name(rank)} raised {about.what}", "", about.trace.rstrip()]
    lines += [
        f"Then {job.name(other)} raised {each.what}"
        for other, each in sorted(raised.items())
        if other != rank
    ]
    cause = None
    with contextlib.suppress(Exception):  # its type may not exist in this process
        cause = pickle.loads(about.error)
    raise RunError("\n".join(lines), rank, 1, about.trace) from cause

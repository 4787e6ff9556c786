"""Starts a placed job, and returns when it has ended.

Shared by the command hororun and `hororing.run`.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hororing._job import limits
from hororing._job.rendezvous import interfaces, protocol
from hororing._job.rendezvous.elastic_store import ElasticStore, Event
from hororing._job.rendezvous.server import Server
from hororing._job.rendezvous.store import Store
from hororing.config import environment
from hororing.hororun.flags.elastic import Elastic
from hororing.hororun.flags.host_lists import Host, parse_hosts, read_hostfile
from hororing.hororun.host import cgroup
from hororing.hororun.host.agent import free_port
from hororing.hororun.host.hosts import LocalHost, RemoteHost
from hororing.hororun.host.local import CannotStartError, ProcessHost, Program, memory_file
from hororing.hororun.host.output import Output
from hororing.hororun.job import plan
from hororing.hororun.job.beside import Beside
from hororing.hororun.job.discovery import Discovery, Found
from hororing.hororun.job.elastic import ElasticJob
from hororing.hororun.job.ending import Grace
from hororing.hororun.job.fixed import FixedJob
from hororing.hororun.job.job import Job, MakeHost
from hororing.hororun.job.plan import Place, Rendezvous
from hororing.hororun.job.slots import Slot

_THREADS_OF_A_RANK = 3  # the script's and ours
# Variables beside the settings that all ranks must share: results depend on them.
_SHARED = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PYTHONHASHSEED",
    "CUBLAS_WORKSPACE_CONFIG",
)  # fmt: skip
# Output at once, and a stack when a rank crashes; the user's own values win.
_PYTHON = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
# Variables whose absence elsewhere is hard to find; other hosts may have their own.
_PATHS = ("PYTHONPATH", "LD_LIBRARY_PATH")


@dataclass(frozen=True)
class Start:
    """What to start.

    Parameters
    ----------
    placed : the places of the ranks.
    command : program and arguments, the same on all hosts.
    variables : for the ranks of all hosts. Those on this host also have this process's variables.
    rsh : the words before a host's name in a command that runs another one there.
    start_timeout_s : how long other hosts may take to answer.
    grace : time between the request to end and SIGKILL.
    stdin : the standard input of rank 0; None: nothing.
    beside : are told the job's id, and its hosts.
    payload : the standard input of each rank. Ranks then answer; see `Program.answers`.
    """

    placed: Sequence[Place]
    command: Sequence[str]
    variables: dict[str, str]
    rsh: Sequence[str]
    start_timeout_s: float
    grace: Grace
    stdin: IO[bytes] | None = None
    beside: Sequence[Beside] = ()
    payload: bytes | None = None


def run(what: Start, output: Output) -> FixedJob:
    """Run a job, and return it when all its ranks have ended.

    Raises
    ------
    CannotStartError : a host does not answer, or cannot start its ranks.
    """
    size = len(what.placed)
    others = [name for name in dict.fromkeys(p.host for p in what.placed) if not is_local(name)]
    here_count = sum(place.host not in others for place in what.placed)
    _make_room(what, output, size, here_count, connections=size)
    store, secret = new_store(size, bool(others), ends_are_noted=True)
    given = {name: text for name, text in what.variables.items() if name.startswith("MASTER_")}

    def make_programs(hosts: Mapping[str, ProcessHost]) -> dict[str, list[Program]]:
        master = _master(what.placed[0].host, hosts, bool(others))
        rendezvous = Rendezvous(store.job, _addresses(store, others), master)
        programs: dict[str, list[Program]] = {name: [] for name in hosts}
        for place in what.placed:
            own = {**plan.environment(place, size, rendezvous), **given}
            stdin = what.stdin if payload is None and place.rank == 0 else payload
            programs[place.host].append(_program(what, place.rank, place.host, own, stdin))
        return programs

    with _payload(what) as payload:
        job = FixedJob(
            what.placed, output, elsewhere=bool(others), make_programs=make_programs,
            make_host=_host_maker(what, store.job, secret, output), grace=what.grace,
            start_timeout_s=what.start_timeout_s, on_finished=store.note_end,
        )  # fmt: skip
        store.start_thread()
        try:
            job.run()
        finally:
            store.stop()
    if size > 1 and not store.was_used and what.payload is None and _is_python(what.command[0]):
        job.remark = (
            f"no rank has joined the job by init(): the program ran {size} times, each time alone, "
            "unless it communicates by other means than hororing"
        )
    return job


def _is_python(program: str) -> bool:
    name = os.path.basename(program)
    return "python" in name or name.endswith(".py")


def run_elastic(
    what: Start, elastic: Elastic, output: Output, membership: Path | None
) -> ElasticJob:
    """Run an elastic job, whose `placed` is unused, and return it when it has ended.

    Raises
    ------
    CannotStartError : there are no hosts, or a program cannot be started.
    """
    secret, job_id = protocol.new_secret(), secrets.token_hex(8)
    stores: dict[bool, str] = {}  # the store's address, by whether a process is on this host

    def make_store(
        at_first: Elastic, hosts: Sequence[Host], on_event: Callable[[Event], None]
    ) -> ElasticStore:
        others = [host.name for host in hosts if not is_local(host.name)]
        several = bool(others) or at_first.script is not None
        here = sum(host.slots or 0 for host in hosts if host.name not in others)
        # Each has a second connection, for signs of life.
        _make_room(what, output, at_first.np, min(here, at_first.np), connections=2 * at_first.np)
        store = ElasticStore(
            job=job_id, secret=secret, host="" if several else "127.0.0.1", on_event=on_event,
            np=at_first.np, min_np=at_first.min_np, max_np=at_first.max_np,
            elastic_timeout_s=at_first.elastic_timeout_s, peer_timeout_s=at_first.peer_timeout_s,
            ends_are_noted=True,
        )  # fmt: skip
        store.listen()
        stores[False] = _addresses(store, others)
        # If this host is the only known one, its other addresses may not even work.
        loopback = protocol.show_address("127.0.0.1", store.port)
        stores[True] = stores[False] if others or not several else f"{loopback},{stores[False]}"
        return store

    def make_program(number: int, slot: Slot) -> Program:
        for each in what.beside:
            each.process(number)
        here = is_local(slot.host)
        own = {
            "HORORING_ELASTIC": "1",
            "HORORING_JOB": job_id,
            "HORORING_RENDEZVOUS": stores[here],
            "HORORING_PROCESS": str(number),
            **({} if here else {"HORORING_HOSTNAME": slot.host}),
        }
        return _program(what, number, slot.host, own, payload, slot.neighbours)

    def make_discovery(job: ElasticJob, found: Found, failed: Callable[[str], None]) -> Discovery:
        assert elastic.script is not None

        def checked(hosts: list[Host]) -> None:
            try:
                _this_host_once(hosts)
            except ValueError as error:
                failed(f"--host-discovery-script: {error}")
            else:
                found(hosts)

        return Discovery(
            job.selector, elastic.script, elastic.slots_per_host, found=checked, failed=failed
        )

    with _payload(what) as payload:
        job = ElasticJob(
            elastic, output, make_program=make_program, make_store=make_store,
            make_host=_host_maker(what, job_id, secret, output),
            make_discovery=None if elastic.script is None else make_discovery,
            grace=what.grace, start_timeout_s=what.start_timeout_s, membership=membership,
        )  # fmt: skip
        job.run()
    return job


@contextlib.contextmanager
def _payload(what: Start) -> Iterator[int | None]:
    """A descriptor of the payload, if there is one."""
    if what.payload is None:
        yield None
        return
    payload = memory_file("payload", what.payload)
    try:
        yield payload
    finally:
        os.close(payload)


def _host_maker(what: Start, job_id: str, secret: bytes, output: Output) -> MakeHost:
    # Variables of this process that ranks of other hosts do not get, but may need.
    own = environment.variables()
    compared = {name: own[name] for name in _PATHS if own.get(name) and name not in what.variables}
    for each in what.beside:
        each.about(job_id)

    def make_host(job: Job, name: str, ended: Callable[[str], None]) -> ProcessHost:
        if is_local(name):
            return LocalHost(job.selector, job, secret)
        for each in what.beside:
            each.about(job_id, [name])
        return RemoteHost(
            job.selector, job, secret, name=name, rsh=what.rsh, log=output.log, compared=compared,
            payload=what.payload, on_end=ended,
        )  # fmt: skip

    return make_host


def _program(
    what: Start,
    rank: int,
    host: str,
    own: Mapping[str, str],
    stdin: IO[bytes] | int | None,
    sharing: int = 0,
) -> Program:
    """The program of a rank with its `own` variables."""
    # Not the variables that an outer job has set for this process.
    inherited = environment.inherited() if is_local(host) else {}
    variables = {**_PYTHON, **inherited, **what.variables, **own}
    answers = what.payload is not None
    return Program(rank, what.command, variables, _directory(), sharing, stdin, answers)


def _make_room(what: Start, output: Output, size: int, here: int, connections: int) -> None:
    """CannotStartError if this process may not open the files of `size` ranks, `here` on this host.

    `connections` : of the ranks with the store.
    """
    each = 3 + (what.payload is not None)  # its output, its process, its answer
    files = each * here + connections + output.files_per_rank * size
    try:
        limits.make_room(files, f"{size} ranks, {here} of them on this host,")
    except limits.LimitError as error:
        raise CannotStartError(str(error)) from None
    left = cgroup.processes_left()
    if left is not None and _THREADS_OF_A_RANK * here > left:
        raise CannotStartError(
            f"{here} ranks on this host need at least {_THREADS_OF_A_RANK * here} processes and "
            f"threads, and {left} more may be started: raise pids.max of the container"
        )


def _directory() -> str:
    """The working directory, for ranks. CannotStartError if it has been deleted."""
    try:
        return os.getcwd()
    except OSError:
        gone = os.readlink("/proc/self/cwd")
        raise CannotStartError(f"the working directory is {gone}: go to another one") from None


def new_store(
    size: int, several_hosts: bool, *, ends_are_noted: bool = False
) -> tuple[Store, bytes]:
    """Return the store of a new job, not started yet, and its secret."""
    secret = protocol.new_secret()
    host = "" if several_hosts else "127.0.0.1"
    store = Store(
        job=secrets.token_hex(8), size=size, secret=secret, host=host, ends_are_noted=ends_are_noted
    )
    return store, secret


def settings() -> dict[str, str]:
    """Variables of this process for ranks of other hosts, most of which must be the same."""
    return {
        name: text
        for name, text in environment.inherited().items()
        if name.startswith(("HORORING_", "HOROVOD_")) or name in _SHARED
    }


def given(variables: Mapping[Any, Any] | None) -> dict[str, str]:
    """The variables that a user gives in Python for ranks, as texts. TypeError.

    HORORING_ALONE may hide the launcher of this process, but not the job of its ranks.
    """
    if not isinstance(variables, (Mapping, type(None))):
        raise TypeError(f"the variables for ranks must be a dict, not {variables!r}")
    for name, value in (variables or {}).items():
        if not isinstance(name, str):
            raise TypeError(f"the name of the variable {name!r} is not a text")
        if value is None:
            raise TypeError(f"the variable {name!r} is None: leave it out, or give ''")
    texts = {name: str(value) for name, value in (variables or {}).items()}
    return {"HORORING_ALONE": "0", **texts}


def network(given: str | Iterable[str] | None) -> dict[str, str]:
    """The variable that chooses these networks, given as text or a list of names."""
    text = given if isinstance(given, str) else ",".join(given or ())
    return {"HORORING_INTERFACE": text} if text else {}


def named_hosts(hosts: str | None, hostfile: str | None) -> list[Host]:
    """The named hosts; an empty list if there are none. ValueError, OSError."""
    if hosts and hostfile:
        raise ValueError("hosts and a host file: give one of them")
    if not hosts and not hostfile:
        return []
    try:
        found = parse_hosts(hosts) if hosts else read_hostfile(str(hostfile))
    except OSError as error:
        raise type(error)(f"the host file {hostfile}: {error.strerror}") from None
    _this_host_once(found)
    return found


def _this_host_once(hosts: Iterable[Host]) -> None:
    """ValueError if two names are of this host: their ranks would not know that they share it."""
    here = [host.name for host in hosts if is_local(host.name)]
    if len(here) > 1:
        raise ValueError(f"{here[0]} and {here[1]} are both this host: give it once")


def ssh(port: int | None, identity_file: str | None) -> list[str]:
    """The command that reaches other hosts, unless the user gives one."""
    # To notice a cut connection. The user's own configuration has the rest.
    words = ["ssh", "-T", "-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3"]
    if port:
        words += ["-p", str(port)]
    if identity_file:
        words += ["-i", identity_file]
    return [*words, "--"]


def is_local(host: str) -> bool:
    """Whether a name or an address is of this host; names may lack their domain.

    Hosts of different domains may have the same short name, so its addresses decide, if it has any.
    """
    own = socket.gethostname()
    if host in ("localhost", own):
        return True
    if (address := _address(host)) is not None:
        return address.is_loopback or interfaces.towards(host) == str(address)
    name, _, domain = host.partition(".")
    own_name, _, own_domain = own.partition(".")
    if name != own_name or (domain and own_domain):
        return False
    return _is_own(host)


@functools.cache  # it may ask a server
def _is_own(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return True  # a name without an address
    return interfaces.is_own(host)


def _addresses(store: Server, others: list[str]) -> str:
    hosts = [store.host]
    if not store.host:
        # Ranks of this host tell others the first address at which they reach the store, so it must
        # be on the network between the hosts, and no rank may confuse loopback addresses.
        first = [interfaces.towards(_without_user(others[0]))] if others else []
        found = dict.fromkeys([*first, *interfaces.addresses()])
        hosts = [each for each in found if each and not protocol.is_loopback(each)]
    return ",".join(protocol.show_address(host, store.port) for host in hosts)


def _master(first: str, hosts: Mapping[str, ProcessHost], several: bool) -> tuple[str, int]:
    host = hosts[first]
    if isinstance(host, RemoteHost):
        return _without_user(first), host.port
    if not several:
        return "127.0.0.1", free_port()
    own = _address(first)  # the user's: perhaps others do not know the name
    return (socket.gethostname() if own is None or own.is_loopback else str(own)), free_port()


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(name)
    return None


def _without_user(name: str) -> str:
    """The host in a name for ssh, ``user@host``."""
    return name.rpartition("@")[2]

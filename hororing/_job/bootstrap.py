"""How this process finds the other ranks without MPI: through a store, from the environment.

============================  ====================================================================
HORORING_RANK, _SIZE          this rank, and the number of ranks; unset: the launcher's
HORORING_LOCAL_RANK, _SIZE    the same among the ranks of this host
HORORING_RENDEZVOUS           host:port of the store, or file:///directory that all hosts share;
                              unset: from the launcher's variables (hororing/_job/endpoints.py)
HORORING_JOB                  name of this start of the job; needed with a directory
HORORING_SECRET_FD            descriptor of a file in memory with the secret: the launcher has the
                              store
HORORING_SECRET_KEY, _FILE    the secret, or its file: rank 0 has the store; unset, with a store on
                              a loopback address: a secret that only this user's processes know
HORORING_INSECURE             1: a store without a secret
HORORING_ELASTIC              1: the launcher's store gives this process a rank, again and again
HORORING_PROCESS              the launcher's number of this process, from 0
HORORING_HOSTNAME             name of this host there; unset: its own
============================  ====================================================================
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hororing._job import endpoints, limits, private_folder
from hororing._job import launchers as job_launchers
from hororing._job.endpoints import FILE, TORCH, Place
from hororing._job.launchers import Launch
from hororing._job.rendezvous import files, interfaces, protocol, torch_store, user_key
from hororing._job.rendezvous.client import Member, RendezvousError
from hororing._job.rendezvous.elastic_member import ElasticMember
from hororing._job.rendezvous.patience import Patience
from hororing._job.rendezvous.store import Store
from hororing.config import environment
from hororing.config.forms import BOOL, BadText

_PREFIX = "HORORING_"
_RANKS = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
_SECRETS = ("SECRET_FD", "SECRET_KEY", "SECRET_FILE")
_MIN_SECRET_BYTES = 16
_MAX_SECRET_BYTES = 4096
_SECRET_FILE = "/memfd:hororing-secret"
_UNNAMED = "job"
_JOB = re.compile(r"[A-Za-z0-9._-]{1,100}")


@dataclass(frozen=True)
class JobSettings:
    """The job's settings in the environment, checked."""

    rank: int
    size: int
    place: Place
    secret: bytes = field(repr=False)
    insecure: bool
    launcher_has_store: bool


def find(
    started_by: Launch, settings: Mapping[str, Any], environ: Mapping[str, str] | None = None
) -> Member | None:
    """Connect to the store of this job, which rank 0 starts unless a launcher has one.

    Blocks until the store exists, for at most TIMEOUT_S. Returns None if the environment names no
    store, or if this is a job of one rank.

    Raises
    ------
    ValueError : a variable is wrong, missing, or contradicts another; the text names it.
    RendezvousError : no store in time, or it does not admit this rank.
    """
    if settings["ALONE"]:
        return None
    job = read(started_by, environ)
    if job is None or job.size == 1:
        return None
    timeout_s = settings["TIMEOUT_S"] or math.inf
    patience = Patience(job.place.remedy)
    try:
        if job.place.rendezvous.startswith(FILE):
            return _by_file(job, timeout_s, patience)
        if job.place.rendezvous.startswith(TORCH):
            return _by_torch(job, timeout_s, patience)
        return _by_address(job, timeout_s, patience)
    except RendezvousError as error:
        if job.place.remedy and not error.refused:
            error.args = (f"{error}; {job.place.remedy}",)
        raise


def is_elastic() -> bool:
    """Whether the environment describes an elastic job."""
    return _switch(_variables(environment.variables()), "ELASTIC")


def join(settings: Mapping[str, Any]) -> ElasticMember:
    """Connect to the store of this elastic job, as a process without a generation yet.

    Blocks until the store exists, for at most TIMEOUT_S. ValueError, RendezvousError: as `find`.
    """
    env = _variables(environment.variables())
    rendezvous = env.get("RENDEZVOUS", "")
    for name in _RANKS:
        if name in env:
            raise ValueError(
                f"{_PREFIX}{name} is set, but in an elastic job ({_PREFIX}ELASTIC=1) the store "
                "gives ranks to processes"
            )
    if not rendezvous or rendezvous.startswith(FILE):
        raise ValueError(
            f"{_PREFIX}ELASTIC=1 needs {_PREFIX}RENDEZVOUS=host:port, the store of the launcher"
        )
    job, insecure = _job(env, ""), _switch(env, "INSECURE")
    secret = _secret_or_own(_secret(env), job, insecure, _is_here(rendezvous))
    member = ElasticMember(
        rendezvous, secret=secret, job=job, host=env.get("HOSTNAME"),
        timeout_s=settings["TIMEOUT_S"] or math.inf, insecure=insecure,
        process=_number("PROCESS", env.get("PROCESS", "0")),
    )  # fmt: skip
    _reach(member, rendezvous)
    return member


def of_store(host: str) -> tuple[bytes, str, bool]:
    """Return the settings of an elastic job's store: its secret, the job's name, whether insecure.

    ValueError names the variable that is wrong.
    """
    env = _variables(environment.variables())
    job, insecure = _job(env, ""), _switch(env, "INSECURE")
    here = protocol.is_loopback(host)
    return _secret_or_own(_secret(env), job, insecure, here), job, insecure


def secret_at_torch(host: str, one_host: bool) -> bytes:
    """The secret of ranks that meet at torch's store on `host`, which any process can read.

    If none is given, and they are all on this host, it is one of this user; b"" otherwise: rank 0
    makes one, which travels through that store. ValueError names the variable that is wrong.
    """
    env = _variables(environment.variables())
    here = one_host or protocol.is_loopback(host)
    return _secret_or_own(_secret(env), _job(env, ""), insecure=False, here=here)


def _secret_or_own(given: bytes, job: str, insecure: bool, here: bool) -> bytes:
    """The secret of a job; if none is given, and `here`, one of this user on this host."""
    try:
        return given if given or insecure or not here else user_key.secret_of(job)
    except OSError as error:
        raise ValueError(error.strerror) from None


def _by_file(job: JobSettings, timeout_s: float, patience: Patience) -> Member:
    directory = Path(job.place.rendezvous.removeprefix(FILE))
    try:
        if job.place.makes_directory:  # each rank finds the same one
            places = private_folder.candidates() if job.place.one_host else []
            directory = private_folder.find([directory, *places])
        if job.rank != 0:
            return files.join(
                directory, job=job.place.job, rank=job.rank, size=job.size, timeout_s=timeout_s,
                patience=patience,
            )  # fmt: skip
        return files.serve(
            directory, job=job.place.job, size=job.size, timeout_s=timeout_s,
            one_host=job.place.one_host,
        )  # fmt: skip
    except OSError as error:
        remedy = job.place.remedy or f"set {_PREFIX}RENDEZVOUS=file:///directory to another one"
        raise ValueError(
            f"init: the ranks meet in {directory}, which rank {job.rank} cannot use "
            f"({error.strerror}): {remedy}"
        ) from None


def _by_torch(job: JobSettings, timeout_s: float, patience: Patience) -> Member:
    address, one_host = job.place.rendezvous.removeprefix(TORCH), job.place.one_host
    here = one_host or _is_of_this_host_alone(address)
    return torch_store.meet(
        address, job=job.place.job, rank=job.rank, size=job.size, timeout_s=timeout_s,
        secret=_secret_or_own(job.secret, job.place.job, False, here), one_host=one_host,
        makes_store=job.place.makes_store, patience=patience,
    )  # fmt: skip


def _by_address(job: JobSettings, timeout_s: float, patience: Patience) -> Member:
    rendezvous = job.place.rendezvous
    secret = _secret_or_own(job.secret, job.place.job, job.insecure, _is_here(rendezvous))
    job = replace(job, secret=secret)
    store, without = (None, "") if job.rank or job.launcher_has_store else _store(job)
    address = rendezvous if store is None else _own_address(store)
    try:
        member = Member(
            address, secret=job.secret, job=job.place.job, rank=job.rank, size=job.size,
            timeout_s=timeout_s, insecure=job.insecure, patience=patience,
        )  # fmt: skip
    except BaseException as error:
        if store is not None:
            store.stop()
        if without and isinstance(error, RendezvousError) and not error.refused:
            raise RendezvousError(f"{error}; {without}") from None
        raise
    if store is not None:
        member.at_close.append(store.stop)
    _reach(member, rendezvous)
    return member


def _reach(member: Member, rendezvous: str) -> None:
    """Find the address at which other hosts reach this one."""
    place = rendezvous.partition(",")[0]
    if protocol.is_loopback(member.local_address) and not _is_of_this_host_alone(place):
        # Ranks on the store's host reach it at another address than other hosts do.
        member.local_address = interfaces.reached_at(place)


def name_of(member: Member) -> str:
    """Return a name that no other job on this host has."""
    if member.job != _UNNAMED:
        return member.job
    return f"{member.job}:{member.address.rpartition(':')[2]}"  # the store's port


def read(started_by: Launch, environ: Mapping[str, str] | None = None) -> JobSettings | None:
    """Read and check the variables; None: they name neither a store nor ranks."""
    everything = environment.variables() if environ is None else environ
    job_launchers.check(started_by, everything)
    env = _variables(everything)
    ranks = {name: _number(name, env[name]) for name in _RANKS if name in env}
    if not ranks and "RENDEZVOUS" not in env and not endpoints.applies_to(started_by):
        return None
    ranks = _with_launchers(ranks, started_by)
    if "SECRET_FD" not in env or "TORCHELASTIC_RUN_ID" in everything:
        _check_torch(ranks, everything)  # not if the script of a rank has changed its variables
    if "RENDEZVOUS" in env:
        place = Place(
            env["RENDEZVOUS"],
            endpoints.job(started_by, everything),
            remedy=_if_loopback(env["RENDEZVOUS"], ranks),
        )
    else:
        place = endpoints.place(started_by, everything) or Place("", "")
    if "RENDEZVOUS" in env and not {"RANK", "SIZE"} & {*ranks}:
        raise ValueError(
            f"{_PREFIX}RENDEZVOUS={env['RENDEZVOUS']} is set, but neither {_PREFIX}RANK and "
            f"{_PREFIX}SIZE nor a launcher set this rank and the number of ranks"
        )
    _check_ranks(ranks)
    if not place.rendezvous and ranks["SIZE"] > 1:
        raise ValueError(
            f"{_PREFIX}SIZE={ranks['SIZE']} shows that there are other ranks, but "
            f"{_PREFIX}RENDEZVOUS does not say where: set it to host:port or to file:///directory"
        )
    return JobSettings(
        ranks["RANK"],
        ranks["SIZE"],
        replace(place, job=_job(env, place.job)),
        _secret(env),
        _switch(env, "INSECURE"),
        "SECRET_FD" in env,
    )


# ---------------------------------------------------------------------------------------------
# Variables


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name.removeprefix(_PREFIX): environ[name].strip()
        for name in environment.VARIABLES
        if environ.get(name, "").strip()
    }


def _number(name: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ValueError(f"{_PREFIX}{name}={text!r} is not understood: expected a whole number")
    return int(text)


def _with_launchers(ranks: Mapping[str, int], started_by: Launch) -> dict[str, int]:
    """Add the launcher's rank and size. ValueError if they contradict `ranks`."""
    theirs = dict(
        zip(
            _RANKS,
            (started_by.rank, started_by.size, started_by.local_rank, started_by.local_size),
            strict=True,
        )
    )
    for name, number in ranks.items():
        if theirs[name] not in (None, number):
            raise ValueError(
                f"{_PREFIX}{name}={number} contradicts {started_by.launcher}, which sets "
                f"{theirs[name]} ({started_by.own}, {started_by.sign})"
            )
    added = {name: theirs[name] for name in ("RANK", "SIZE")}
    return {**{name: number for name, number in added.items() if number is not None}, **ranks}


def _check_torch(ranks: Mapping[str, int], env: Mapping[str, str]) -> None:
    for name, theirs in (("RANK", "RANK"), ("SIZE", "WORLD_SIZE")):
        text = env.get(theirs, "")
        if name in ranks and text.isdecimal() and int(text) != ranks[name]:
            raise ValueError(f"{_PREFIX}{name}={ranks[name]} contradicts {theirs}={text}")


def _if_loopback(places: str, ranks: Mapping[str, int]) -> str:
    """Return what may be wrong if the ranks meet at a loopback address."""
    if places.startswith(FILE) or ranks.get("LOCAL_SIZE") == ranks.get("SIZE"):
        return ""
    try:
        hosts = [protocol.parse_address(each)[0] for each in places.split(",")]
    except ValueError:  # an error later
        return ""
    return endpoints.if_loopback(f"{_PREFIX}RENDEZVOUS", hosts)


def _missing_variable(name: str, other: str) -> ValueError:
    return ValueError(
        f"{_PREFIX}{name} is set, but {_PREFIX}{other} is not: start with hororun -np N, set "
        f"{_PREFIX}{other} in each process, or unset {_PREFIX}{name}"
    )


def _check_ranks(ranks: Mapping[str, int]) -> None:
    for rank, size in (("RANK", "SIZE"), ("LOCAL_RANK", "LOCAL_SIZE")):
        for name, other in ((rank, size), (size, rank)):
            if name in ranks and other not in ranks:
                raise _missing_variable(name, other)
        if rank in ranks and ranks[rank] >= ranks[size]:
            raise ValueError(
                f"{_PREFIX}{rank}={ranks[rank]} contradicts {_PREFIX}{size}={ranks[size]}: ranks "
                "count from 0"
            )
    if ranks.get("SIZE", 0) > protocol.MAX_RANKS:
        raise ValueError(
            f"{_PREFIX}SIZE={ranks['SIZE']}: a job has at most {protocol.MAX_RANKS} ranks"
        )
    if "LOCAL_SIZE" in ranks and "SIZE" not in ranks:
        raise _missing_variable("LOCAL_SIZE", "SIZE")
    for local, name in (("LOCAL_RANK", "RANK"), ("LOCAL_SIZE", "SIZE")):
        if local in ranks and ranks[local] > ranks[name]:
            raise ValueError(
                f"{_PREFIX}{local}={ranks[local]} contradicts {_PREFIX}{name}={ranks[name]}"
            )


def _job(env: Mapping[str, str], launchers: str) -> str:
    """The name of the job: the user's, or the launcher's."""
    job = env.get("JOB", launchers)
    rendezvous = env.get("RENDEZVOUS", "")
    if rendezvous.startswith(FILE):
        if not rendezvous.removeprefix(FILE).startswith("/"):
            raise ValueError(
                f"{_PREFIX}RENDEZVOUS={rendezvous!r} is not understood: expected host:port or "
                "file:///directory"
            )
        if not job:
            raise ValueError(
                f"{_PREFIX}RENDEZVOUS={rendezvous} needs {_PREFIX}JOB, another one for each start "
                "of the job, such as the number that the scheduler gives it"
            )
    elif rendezvous:
        for address in rendezvous.split(","):
            try:
                protocol.parse_address(address)
            except ValueError as error:
                raise ValueError(f"{_PREFIX}RENDEZVOUS: {error}, or file:///directory") from None
    if job and not _JOB.fullmatch(job):
        raise ValueError(
            f"{_PREFIX}JOB={job!r} is not understood: expected up to 100 letters, digits, dots, "
            "dashes and underscores"
        )
    return job or _UNNAMED


def _secret(env: Mapping[str, str]) -> bytes:
    """The secret, or b"" if there is none. Error texts never contain it."""
    named = [name for name in _SECRETS if name in env]
    if not named:
        return b""
    if len(named) > 1:
        raise ValueError(f"{_PREFIX}{named[0]} and {_PREFIX}{named[1]} are set: use one of them")
    name = named[0]
    if name == "SECRET_KEY":
        secret = env[name].encode("utf-8", "surrogateescape")
    else:
        try:
            secret = _secret_of(name, env[name])
        except OSError as error:
            raise ValueError(
                f"{_PREFIX}{name}={env[name]} cannot be read: {error.strerror}"
            ) from None
    if not _MIN_SECRET_BYTES <= len(secret) <= _MAX_SECRET_BYTES:
        raise ValueError(
            f"{_PREFIX}{name}: the secret has {len(secret)} bytes, and needs {_MIN_SECRET_BYTES} "
            f"to {_MAX_SECRET_BYTES}"
        )
    if name != "SECRET_FD" and protocol.is_guessable(secret):
        raise ValueError(
            f"{_PREFIX}{name}: the secret can be guessed: use random characters, such as those "
            "that openssl rand -hex 32 prints"
        )
    return secret


def _secret_of(name: str, text: str) -> bytes:
    if name == "SECRET_FD":
        return _secret_in_memory(_number(name, text))
    with open(text, "rb") as file:
        return file.read(_MAX_SECRET_BYTES + 2).strip()


def _secret_in_memory(number: int) -> bytes:
    """Read the launcher's file. A rank's program may have started this one without the descriptor.

    Python's subprocess passes none on, for example. The nearest ancestor that has it counts. From
    now on, programs that this process starts do not inherit it.
    """
    pid = os.getpid()
    with contextlib.suppress(OSError):  # no /proc, or one of other processes
        while pid:
            place = f"/proc/{pid}/fd/{number}"
            if os.path.lexists(place) and os.readlink(place).startswith(_SECRET_FILE):
                if pid == os.getpid():
                    os.set_inheritable(number, False)
                with open(place, "rb") as file:
                    return file.read(_MAX_SECRET_BYTES + 1)
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])
    # At this offset, so that this process can read it again.
    return os.pread(number, _MAX_SECRET_BYTES + 1, 0)


def _switch(env: Mapping[str, str], name: str) -> bool:
    text = env.get(name, "0")
    try:
        return bool(BOOL.parse(text))
    except BadText:
        raise ValueError(
            f"{_PREFIX}{name}={text!r} is not understood: expected {BOOL.accepted}"
        ) from None


# ---------------------------------------------------------------------------------------------
# The store of rank 0


def _store(job: JobSettings) -> tuple[Store | None, str]:
    """Start the store if its address is on this host; else return why it was not started."""
    place = job.place.rendezvous.partition(",")[0]
    host, port = protocol.parse_address(place)
    protocol.check_secret(job.secret, job.insecure)
    # The host's name may be a loopback address here, and another address elsewhere.
    everywhere = not _is_of_this_host_alone(place)
    if everywhere and not interfaces.is_own(host):
        without = (
            f"rank 0 did not start a store, because {host} ({_PREFIX}RENDEZVOUS) is not an "
            f"address of its host {socket.gethostname()}: give one of the host on which rank 0 runs"
        )
        logging.getLogger("hororing").warning("%s, unless a store runs there already", without)
        return None, without
    store = Store(
        job=job.place.job, size=job.size, secret=job.secret, host="" if everywhere else host,
        port=port, insecure=job.insecure, one_start=True,
    )  # fmt: skip
    try:
        store.start_thread()
    except OSError as error:
        if isinstance(error, limits.LimitError):
            raise RendezvousError(str(error), refused=True) from None
        if error.errno == errno.EADDRINUSE:
            without = f"rank 0 did not start a store, because port {port} of its host is in use"
            logging.getLogger("hororing").warning(
                "%s: by a store of this job, or by another program", without
            )
            return None, without
        raise
    return store, ""


def _is_here(rendezvous: str) -> bool:
    return all(map(_is_of_this_host_alone, rendezvous.split(",")))


def _is_of_this_host_alone(place: str) -> bool:
    return protocol.is_loopback(protocol.parse_address(place)[0])


def _own_address(store: Store) -> str:
    host = store.host if store.host else "127.0.0.1"
    return protocol.show_address(host, store.port)

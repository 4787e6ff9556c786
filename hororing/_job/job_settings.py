"""The settings with which this process finds the other ranks, read from the environment.

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
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from hororing._job import endpoints
from hororing._job import launchers as job_launchers
from hororing._job.endpoints import FILE, Place
from hororing._job.launchers import Launch
from hororing._job.rendezvous import protocol
from hororing.config import environment
from hororing.config.forms import BOOL, BadText

PREFIX = "HORORING_"
RANKS = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
_SECRETS = ("SECRET_FD", "SECRET_KEY", "SECRET_FILE")
_MIN_SECRET_BYTES = 16
_MAX_SECRET_BYTES = 4096
_SECRET_FILE = "/memfd:hororing-secret"
UNNAMED = "job"
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


def is_elastic() -> bool:
    """Whether the environment describes an elastic job."""
    return switch(own_variables(environment.variables()), "ELASTIC")


def read(started_by: Launch, environ: Mapping[str, str] | None = None) -> JobSettings | None:
    """Read and check the variables. Return None if they name neither a store nor ranks."""
    everything = environment.variables() if environ is None else environ
    job_launchers.check(started_by, everything)
    env = own_variables(everything)
    ranks = {name: number(name, env[name]) for name in RANKS if name in env}
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
            f"{PREFIX}RENDEZVOUS={env['RENDEZVOUS']} is set, but neither {PREFIX}RANK and "
            f"{PREFIX}SIZE nor a launcher set this rank and the number of ranks"
        )
    _check_ranks(ranks)
    if not place.rendezvous and ranks["SIZE"] > 1:
        raise ValueError(
            f"{PREFIX}SIZE={ranks['SIZE']} shows that there are other ranks, but "
            f"{PREFIX}RENDEZVOUS does not say where: set it to host:port or to file:///directory"
        )
    return JobSettings(
        ranks["RANK"],
        ranks["SIZE"],
        replace(place, job=job_name(env, place.job)),
        given_secret(env),
        switch(env, "INSECURE"),
        "SECRET_FD" in env,
    )


def own_variables(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name.removeprefix(PREFIX): environ[name].strip()
        for name in environment.VARIABLES
        if environ.get(name, "").strip()
    }


def number(name: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ValueError(f"{PREFIX}{name}={text!r} is not understood: expected a whole number")
    return int(text)


def _with_launchers(ranks: Mapping[str, int], started_by: Launch) -> dict[str, int]:
    """Add the launcher's rank and size. ValueError if they contradict `ranks`."""
    theirs = dict(
        zip(
            RANKS,
            (started_by.rank, started_by.size, started_by.local_rank, started_by.local_size),
            strict=True,
        )
    )
    for name, number in ranks.items():
        if theirs[name] not in (None, number):
            raise ValueError(
                f"{PREFIX}{name}={number} contradicts {started_by.launcher}, which sets "
                f"{theirs[name]} ({started_by.own}, {started_by.sign})"
            )
    added = {name: theirs[name] for name in ("RANK", "SIZE")}
    return {**{name: number for name, number in added.items() if number is not None}, **ranks}


def _check_torch(ranks: Mapping[str, int], env: Mapping[str, str]) -> None:
    for name, theirs in (("RANK", "RANK"), ("SIZE", "WORLD_SIZE")):
        text = env.get(theirs, "")
        if name in ranks and text.isdecimal() and int(text) != ranks[name]:
            raise ValueError(f"{PREFIX}{name}={ranks[name]} contradicts {theirs}={text}")


def _if_loopback(places: str, ranks: Mapping[str, int]) -> str:
    """Return what may be wrong if the ranks meet at a loopback address."""
    if places.startswith(FILE) or ranks.get("LOCAL_SIZE") == ranks.get("SIZE"):
        return ""
    try:
        hosts = [protocol.parse_address(each)[0] for each in places.split(",")]
    except ValueError:  # an error later
        return ""
    return endpoints.if_loopback(f"{PREFIX}RENDEZVOUS", hosts)


def _missing_variable(name: str, other: str) -> ValueError:
    return ValueError(
        f"{PREFIX}{name} is set, but {PREFIX}{other} is not: start with hororun -np N, set "
        f"{PREFIX}{other} in each process, or unset {PREFIX}{name}"
    )


def _check_ranks(ranks: Mapping[str, int]) -> None:
    for rank, size in (("RANK", "SIZE"), ("LOCAL_RANK", "LOCAL_SIZE")):
        for name, other in ((rank, size), (size, rank)):
            if name in ranks and other not in ranks:
                raise _missing_variable(name, other)
        if rank in ranks and ranks[rank] >= ranks[size]:
            raise ValueError(
                f"{PREFIX}{rank}={ranks[rank]} contradicts {PREFIX}{size}={ranks[size]}: ranks "
                "count from 0"
            )
    if ranks.get("SIZE", 0) > protocol.MAX_RANKS:
        raise ValueError(
            f"{PREFIX}SIZE={ranks['SIZE']}: a job has at most {protocol.MAX_RANKS} ranks"
        )
    if "LOCAL_SIZE" in ranks and "SIZE" not in ranks:
        raise _missing_variable("LOCAL_SIZE", "SIZE")
    for local, name in (("LOCAL_RANK", "RANK"), ("LOCAL_SIZE", "SIZE")):
        if local in ranks and ranks[local] > ranks[name]:
            raise ValueError(
                f"{PREFIX}{local}={ranks[local]} contradicts {PREFIX}{name}={ranks[name]}"
            )


def job_name(env: Mapping[str, str], launchers: str) -> str:
    """The name of the job: the user's, or the launcher's."""
    job = env.get("JOB", launchers)
    rendezvous = env.get("RENDEZVOUS", "")
    if rendezvous.startswith(FILE):
        if not rendezvous.removeprefix(FILE).startswith("/"):
            raise ValueError(
                f"{PREFIX}RENDEZVOUS={rendezvous!r} is not understood: expected host:port or "
                "file:///directory"
            )
        if not job:
            raise ValueError(
                f"{PREFIX}RENDEZVOUS={rendezvous} needs {PREFIX}JOB, another one for each start "
                "of the job, such as the number that the scheduler gives it"
            )
    elif rendezvous:
        for address in rendezvous.split(","):
            try:
                protocol.parse_address(address)
            except ValueError as error:
                raise ValueError(f"{PREFIX}RENDEZVOUS: {error}, or file:///directory") from None
    if job and not _JOB.fullmatch(job):
        raise ValueError(
            f"{PREFIX}JOB={job!r} is not understood: expected up to 100 letters, digits, dots, "
            "dashes and underscores"
        )
    return job or UNNAMED


def given_secret(env: Mapping[str, str]) -> bytes:
    """The secret, or b"" if there is none. Error texts never contain it."""
    named = [name for name in _SECRETS if name in env]
    if not named:
        return b""
    if len(named) > 1:
        raise ValueError(f"{PREFIX}{named[0]} and {PREFIX}{named[1]} are set: use one of them")
    name = named[0]
    if name == "SECRET_KEY":
        secret = env[name].encode("utf-8", "surrogateescape")
    else:
        try:
            secret = _secret_of(name, env[name])
        except OSError as error:
            raise ValueError(
                f"{PREFIX}{name}={env[name]} cannot be read: {error.strerror}"
            ) from None
    if not _MIN_SECRET_BYTES <= len(secret) <= _MAX_SECRET_BYTES:
        raise ValueError(
            f"{PREFIX}{name}: the secret has {len(secret)} bytes, and needs {_MIN_SECRET_BYTES} "
            f"to {_MAX_SECRET_BYTES}"
        )
    if name != "SECRET_FD" and protocol.is_guessable(secret):
        raise ValueError(
            f"{PREFIX}{name}: the secret can be guessed: use random characters, such as those "
            "that openssl rand -hex 32 prints"
        )
    return secret


def _secret_of(name: str, text: str) -> bytes:
    if name == "SECRET_FD":
        return _secret_in_memory(number(name, text))
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


def switch(env: Mapping[str, str], name: str) -> bool:
    text = env.get(name, "0")
    try:
        return bool(BOOL.parse(text))
    except BadText:
        raise ValueError(
            f"{PREFIX}{name}={text!r} is not understood: expected {BOOL.accepted}"
        ) from None

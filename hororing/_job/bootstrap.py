"""How this process finds the other ranks without MPI: it connects to a store.

hororing/_job/job_settings.py reads where that is from the environment.
"""

from __future__ import annotations

import errno
import logging
import math
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hororing._job import limits, private_folder
from hororing._job.endpoints import FILE, TORCH
from hororing._job.job_settings import (
    PREFIX,
    RANKS,
    UNNAMED,
    JobSettings,
    given_secret,
    job_name,
    number,
    own_variables,
    read,
    switch,
)
from hororing._job.launchers import Launch
from hororing._job.rendezvous import files, interfaces, protocol, torch_store, user_key
from hororing._job.rendezvous.client import Member, RendezvousError
from hororing._job.rendezvous.elastic_member import ElasticMember
from hororing._job.rendezvous.patience import Patience
from hororing._job.rendezvous.store import Store
from hororing.config import environment


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


def join(settings: Mapping[str, Any]) -> ElasticMember:
    """Connect to the store of this elastic job, as a process without a generation yet.

    Blocks until the store exists, for at most TIMEOUT_S. ValueError, RendezvousError: as `find`.
    """
    env = own_variables(environment.variables())
    rendezvous = env.get("RENDEZVOUS", "")
    for name in RANKS:
        if name in env:
            raise ValueError(
                f"{PREFIX}{name} is set, but in an elastic job ({PREFIX}ELASTIC=1) the store "
                "gives ranks to processes"
            )
    if not rendezvous or rendezvous.startswith(FILE):
        raise ValueError(
            f"{PREFIX}ELASTIC=1 needs {PREFIX}RENDEZVOUS=host:port, the store of the launcher"
        )
    job, insecure = job_name(env, ""), switch(env, "INSECURE")
    secret = _secret_or_own(given_secret(env), job, insecure, _is_here(rendezvous))
    member = ElasticMember(
        rendezvous, secret=secret, job=job, host=env.get("HOSTNAME"),
        timeout_s=settings["TIMEOUT_S"] or math.inf, insecure=insecure,
        process=number("PROCESS", env.get("PROCESS", "0")),
    )  # fmt: skip
    _reach(member, rendezvous)
    return member


def of_store(host: str) -> tuple[bytes, str, bool]:
    """Return the settings of an elastic job's store: its secret, the job's name, whether insecure.

    ValueError names the variable that is wrong.
    """
    env = own_variables(environment.variables())
    job, insecure = job_name(env, ""), switch(env, "INSECURE")
    here = protocol.is_loopback(host)
    return _secret_or_own(given_secret(env), job, insecure, here), job, insecure


def secret_at_torch(host: str, one_host: bool) -> bytes:
    """The secret of ranks that meet at torch's store on `host`, which any process can read.

    If none is given, and they are all on this host, it is one of this user; b"" otherwise: rank 0
    makes one, which travels through that store. ValueError names the variable that is wrong.
    """
    env = own_variables(environment.variables())
    here = one_host or protocol.is_loopback(host)
    return _secret_or_own(given_secret(env), job_name(env, ""), insecure=False, here=here)


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
        remedy = job.place.remedy or f"set {PREFIX}RENDEZVOUS=file:///directory to another one"
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
    if member.job != UNNAMED:
        return member.job
    return f"{member.job}:{member.address.rpartition(':')[2]}"  # the store's port


# ---------------------------------------------------------------------------------------------
# Variables


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
            f"rank 0 did not start a store, because {host} ({PREFIX}RENDEZVOUS) is not an "
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

"""The core's configuration when it starts: the knobs, and how the job was launched."""

from __future__ import annotations

import os
from typing import Any

from hororing import config
from hororing._engine import mpi, nccl
from hororing._engine.core import ffi, lib
from hororing._job import launchers, networks
from hororing._job.launchers import Launch
from hororing._job.rendezvous import interfaces
from hororing._job.rendezvous.client import Member
from hororing.config import environment


def check_cores(settings: config.Config, started_by: Launch) -> None:
    """ValueError if HORORING_CPU has no core for this rank.

    Called before the rendezvous. If a rank failed later, the others would wait for their timeout.
    """
    if started_by.local_rank is None and len(settings["CPU"] or ()) > 1:
        raise ValueError(
            "init: HORORING_CPU is in order of local rank, which the launcher does not tell; give "
            "each rank one core of its own, or unset it"
        )
    settings.core_for(started_by.local_rank or 0)


def fingerprint(settings: config.Config, process_sets: str) -> str:
    """Return what must be the same on all ranks, in lines "name=value"."""
    version = ffi.string(lib.hr_version()).decode()
    return f"version={version}\n{settings.fingerprint()}\ninit(process_sets)={process_sets}"


def engine_config(
    settings: config.Config,
    started_by: Launch,
    launched: bool,
    log_level: int,
    process_sets: str,
    member: Member | None,
) -> tuple[list[Any], Any]:
    """Return an hr_config without communicator and ranks, and the owner of its strings.

    TransportError if the processes must meet through MPI, and there is none.
    """
    keep: list[Any] = []

    def text(value: str | os.PathLike[str] | None) -> Any:
        if value is None:
            return ffi.NULL
        keep.append(ffi.new("char[]", os.fsencode(value)))
        return keep[-1]

    c_config = ffi.new("hr_config *")
    c_config.launched = started_by.min_size if launched else 0
    c_config.transport = text(settings["TRANSPORT"])
    c_config.backend = text(settings["BACKEND"])
    c_config.mpi_library = text(
        mpi.choose(started_by.launcher).layer if launched and member is None else ""
    )
    if member is not None:
        c_config.rank, c_config.size = member.rank, member.size
        c_config.generation = member.generation
        c_config.key = text(member.mesh_key or None)
    if settings["INTERFACE"]:
        c_config.address = text(interfaces.chosen(settings["INTERFACE"]))
    elif member is not None:
        c_config.address = text(member.local_address)
    elif launched:
        c_config.address = text(networks.tcp_address(environment.variables()))
    c_config.fabric = text(networks.fast(environment.variables()))
    c_config.fusion_bytes = settings["FUSION_BYTES"]
    c_config.verify = settings["VERIFY"]
    cycle_time_ms = settings["CYCLE_TIME_MS"]
    c_config.cycle_time_ms = -1 if cycle_time_ms is None else cycle_time_ms
    c_config.cache_capacity = settings["CACHE_CAPACITY"]
    c_config.reproducible = settings["REPRODUCIBLE"]
    c_config.fingerprint = text(fingerprint(settings, process_sets))
    c_config.stall_warning_s = settings["STALL_WARNING_S"]
    c_config.stall_shutdown_s = settings["STALL_SHUTDOWN_S"]
    c_config.deadlock_s = settings["DEADLOCK_S"]
    c_config.timeout_s = settings["TIMEOUT_S"]
    # A member of an elastic job loses a peer when the store would lose it.
    c_config.silent_s = settings["PEER_TIMEOUT_S"] if member is not None and member.uid else 0
    c_config.spin_us = settings["SPIN_US"]
    c_config.cpu = settings.core_for(started_by.local_rank or 0)
    c_config.watch_parent = launched and not launchers.may_outlive_parent(started_by)
    c_config.kernels = text(settings["KERNELS"])
    c_config.log_level = log_level
    c_config.timeline = text(settings["TIMELINE"])
    c_config.timeline_bytes = settings["TIMELINE_BYTES"]
    c_config.timeline_from, c_config.timeline_to = settings["TIMELINE_STEPS"] or (0, 0)
    c_config.timeline_mark_cycles = settings["TIMELINE_MARK_CYCLES"]
    c_config.gpu = text(settings["GPU"])
    c_config.cuda_library = text(settings["CUDA_LIBRARY"])
    c_config.nccl_libraries = text(nccl.libraries(settings["NCCL_LIBRARY"]))
    return keep, c_config

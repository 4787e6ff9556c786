"""The command hororun: reads the command line, and starts the job."""

from __future__ import annotations

import argparse
import glob
import io
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import IO

from hororing import launch
from hororing.hororun import knob_flags, plan
from hororing.hororun.agent import free_port
from hororing.hororun.hosts import LocalHost, RemoteHost
from hororing.hororun.job import CannotStartError, Job
from hororing.hororun.local import STDERR, STDOUT, Program
from hororing.hororun.output import Output
from hororing.hororun.plan import Place, Rendezvous
from hororing.hosts import Host, parse_hosts, read_hostfile
from hororing.rendezvous import interfaces, protocol
from hororing.rendezvous.store import Store

_USAGE, _NOT_FOUND, _FAILED = 2, 127, 1
_HERE = {"localhost", "127.0.0.1", "::1"}

# Of these mpirun has others, or none.
_WITHOUT_MPI = (
    "--output", "--only-output-from", "--start-timeout", "--grace", "--rsh-agent", "--ssh-port",
    "--ssh-identity-file",
)  # fmt: skip


def main(words: Sequence[str] | None = None) -> int:
    """Run it, and return its exit code: that of the first rank that failed, or 0."""
    parser = _parser()
    arguments = parser.parse_args(words)
    if arguments.check_build:
        from hororing.__main__ import main as about

        return int(about(["info"]) or 0)
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        parser.error("what shall the ranks run? hororun -np 4 python train.py")
    try:
        hosts = _hosts(arguments)
        placed = plan.place(
            hosts, arguments.num_proc, _per_host(arguments.nproc_per_node), arguments.nnodes
        )
        only_from = _ranks(arguments.only_output_from, len(placed))
        variables = _variables(arguments)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if arguments.mpi:
        if ignored := [flag for flag in _WITHOUT_MPI if _is_given(parser, arguments, flag)]:
            parser.error(f"{ignored[0]} does not go with --mpi; use --mpi-args for what mpirun has")
        return _mpirun(arguments, placed, command)
    program = shutil.which(command[0])
    if program is None:
        print(f"hororun: {_no_program(command[0])}", file=sys.stderr)
        return _NOT_FOUND
    # Other hosts may have another search path.
    command = [os.path.abspath(program), *command[1:]]
    if arguments.dry_run:
        return _dry_run(placed, command, variables)
    output = _output(arguments, len(placed), only_from)
    try:
        output.open_files(len(placed))
        return _run(arguments, placed, command, variables, output)
    except CannotStartError as error:
        output.say(str(error))
    except OSError as error:
        output.say(f"{error.filename or 'start'}: {error.strerror}")
    except KeyboardInterrupt:  # before the ranks were started
        return 128 + signal.SIGINT
    return _FAILED


def _run(
    arguments: argparse.Namespace,
    placed: list[Place],
    command: list[str],
    variables: dict[str, str],
    output: Output,
) -> int:
    size = len(placed)
    secret = protocol.new_secret()
    others = [name for name in dict.fromkeys(place.host for place in placed) if not _is_here(name)]
    store = Store(
        job=secrets.token_hex(8), size=size, secret=secret, host="" if others else "127.0.0.1"
    )
    job = Job(size, output, grace_s=arguments.grace)
    job.host_of = {place.rank: place.host for place in placed} if others else {}
    here = LocalHost(job.selector, job, secret)
    remote: list[RemoteHost] = []

    def prepare() -> None:
        """Tell each host what to start, now that free ports are known."""
        rendezvous = Rendezvous(
            store.job, _addresses(store, others), _master(placed[0], remote, bool(others))
        )
        _assign(placed, command, variables, rendezvous, here, remote)

    store.start_thread()
    try:
        job.hosts.append(here)
        for name in others:
            ranks = [place.rank for place in placed if place.host == name]
            remote.append(
                RemoteHost(
                    job.selector, job, secret,
                    name=name, rsh=_rsh(arguments), ranks=ranks, say=output.say,
                )
            )  # fmt: skip
            job.hosts.append(remote[-1])
        return job.run(arguments.start_timeout, prepare)
    finally:
        for host in job.hosts:
            host.close()
        store.stop()


def _assign(
    placed: list[Place],
    command: list[str],
    variables: dict[str, str],
    rendezvous: Rendezvous,
    here: LocalHost,
    remote: list[RemoteHost],
) -> None:
    size = len(placed)
    # Not what an outer job has set for this process.
    own = launch.environment()
    inherited = {name: own[name] for name in own if name not in launch.VARIABLES}
    inherited = {"PYTHONUNBUFFERED": "1", **inherited, **variables}
    told = {place.rank: plan.environment(place, size, rendezvous) for place in placed}
    here.programs = [
        Program(
            place.rank, command, {**inherited, **told[place.rank]}, os.getcwd(),
            _stdin() if place.rank == 0 else None,
        )
        for place in placed
        if _is_here(place.host)
    ]  # fmt: skip
    for host in remote:
        host.message = {
            "directory": os.getcwd(),
            "command": command,
            "environment": {"PYTHONUNBUFFERED": "1", **variables},
            "ranks": [
                {"rank": place.rank, "environment": told[place.rank]}
                for place in placed
                if place.host == host.name
            ],
        }


# ---------------------------------------------------------------------------------------------
# The command line


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hororun",
        usage="hororun [flags] program [arguments]",
        description="Start a program on several ranks, and stay until all have ended.",
        epilog="The exit code is that of the first rank that fails: 128 + N for signal N.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-np", "--num-proc", type=_positive, metavar="N", help="ranks")
    add("-H", "--hosts", "--host", metavar="HOSTS", help="hosts with their slots: a:4,pod[0-3]:8")
    add("-hostfile", "--hostfile", metavar="FILE", help="the same, a line 'name slots=8' each")
    add("--nnodes", type=_positive, metavar="N", help="use so many of the hosts")
    add(
        "--nproc-per-node",
        metavar="N",
        help="ranks of each host; auto: one for each GPU here, or else for each core",
    )
    add("-x", action="append", default=[], dest="variables", metavar="NAME[=VALUE]",
        help="a variable for the ranks of all hosts")  # fmt: skip
    add("--output", "--output-filename", metavar="DIR",
        help="what ranks print goes to DIR/rank.N/stdout and DIR/rank.N/stderr")  # fmt: skip
    add("--tag-output", action=argparse.BooleanOptionalAction, default=None,
        help="lines begin with their rank; as it comes: if there are several")  # fmt: skip
    add("--only-output-from", metavar="0,4-6",
        help="standard output of these ranks only; errors are always shown")  # fmt: skip
    add("--start-timeout", type=_seconds, default=60.0, metavar="S",
        help="longest that other hosts may take to answer (60)")  # fmt: skip
    add("--grace", type=_seconds, default=5.0, metavar="S",
        help="time between the request to end and the end, for all ranks (5)")  # fmt: skip
    add("--rsh-agent", metavar="CMD", help="instead of ssh: CMD HOST COMMAND runs it there")
    add("-p", "--ssh-port", type=_positive, metavar="PORT", help="of ssh")
    add("-i", "--ssh-identity-file", metavar="FILE", help="of ssh")
    add("--mpi", action="store_true", help="print the mpirun line for this, and run it")
    add("--mpi-args", default="", metavar="WORDS", help="with --mpi: more words for mpirun")
    add("--dry-run", action="store_true", help="show what would be started where")
    add("-cb", "--check-build", action="store_true", help="what is installed and works")
    add("-v", "--version", action="version", version=f"hororun {_version()}")
    add("--verbose", "--gloo", action="store_true", help=argparse.SUPPRESS)
    knob_flags.add_arguments(parser)
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _is_given(parser: argparse.ArgumentParser, arguments: argparse.Namespace, flag: str) -> bool:
    name = flag.removeprefix("--").replace("-", "_")
    return bool(getattr(arguments, name) != parser.get_default(name))


def _version() -> str:
    try:
        return metadata.version("hororing")
    except metadata.PackageNotFoundError:  # a source tree
        return "(not installed)"


def _positive(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,6}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return value


def _hosts(arguments: argparse.Namespace) -> list[Host]:
    if arguments.hosts and arguments.hostfile:
        raise ValueError("-H and --hostfile: give one of them")
    if not arguments.hosts and not arguments.hostfile:
        return [Host("localhost")]
    hosts = parse_hosts(arguments.hosts) if arguments.hosts else read_hostfile(arguments.hostfile)
    here = [host.name for host in hosts if _is_here(host.name)]
    if len(here) > 1:  # their ranks would not know that they are neighbours
        raise ValueError(f"{here[0]} and {here[1]} are both this host: give it once")
    return hosts


def _per_host(text: str | None) -> int | None:
    if text is None:
        return None
    if text in ("auto", "gpu"):
        gpus = len(glob.glob("/dev/nvidia[0-9]*"))
        if gpus or text == "gpu":
            return max(gpus, 1)
    if text in ("auto", "cpu"):
        return len(os.sched_getaffinity(0))
    if not re.fullmatch(r"[1-9]\d{0,6}", text):
        raise ValueError(f"--nproc-per-node {text}: expected a number, auto, gpu or cpu")
    return int(text)


def _ranks(text: str | None, size: int) -> set[int] | None:
    if text is None:
        return None
    ranks: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7}))?", part.strip())
        if not found:
            raise ValueError(f"--only-output-from {text}: expected ranks, as 0,4-6")
        ranks.update(range(int(found[1]), int(found[2] or found[1]) + 1))
    if wrong := sorted(rank for rank in ranks if rank >= size):
        raise ValueError(f"--only-output-from: there is no rank {wrong[0]} among {size}")
    return ranks


def _variables(arguments: argparse.Namespace) -> dict[str, str]:
    """For the ranks of all hosts: settings, which most must share, and -x."""
    own = launch.environment()
    found = {
        name: own[name]
        for name in own
        if name.startswith(("HORORING_", "HOROVOD_")) and name not in launch.VARIABLES
    }
    for text in arguments.variables:
        name, equals, value = text.partition("=")
        if not equals and name not in own:
            raise ValueError(f"-x {name}: it is not set here; give -x {name}=VALUE")
        found[name] = value if equals else own[name]
    return {**found, **knob_flags.chosen(arguments)}


def _output(arguments: argparse.Namespace, size: int, only_from: set[int] | None) -> Output:
    tag = size > 1 if arguments.tag_output is None else arguments.tag_output
    streams: dict[str, io.RawIOBase] = {
        name: io.FileIO(number, "w", closefd=False) for name, number in ((STDOUT, 1), (STDERR, 2))
    }
    plain = "NO_COLOR" in launch.environment()
    return Output(
        streams,
        size,
        tag=tag,
        colour=[name for name, stream in streams.items() if stream.isatty() and not plain],
        only_from=only_from,
        directory=arguments.output,
    )


# ---------------------------------------------------------------------------------------------
# Addresses and programs


def _is_here(host: str) -> bool:
    own = socket.gethostname()
    return host in _HERE or host in (own, own.partition(".")[0])


def _addresses(store: Store, others: list[str]) -> str:
    hosts = [store.host]
    if not store.host:
        # Ranks of this host tell the others the first that they reach the store by, which must be
        # of the network between the hosts; and none may take the loopback address for another's.
        found = dict.fromkeys([interfaces.towards(others[0]), *interfaces.addresses()])
        hosts = [each for each in found if each and not protocol.is_loopback(each)]
    return ",".join(protocol.show_address(host, store.port) for host in hosts)


def _master(first: Place, remote: list[RemoteHost], several: bool) -> tuple[str, int]:
    for host in remote:
        if host.name == first.host:
            return host.name, host.port
    return (socket.gethostname() if several else "127.0.0.1"), free_port()


def _rsh(arguments: argparse.Namespace) -> list[str]:
    if arguments.rsh_agent:
        return shlex.split(arguments.rsh_agent)
    # So that a connection that is cut is noticed. The user's own configuration has the rest.
    words = ["ssh", "-T", "-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3"]
    if arguments.ssh_port:
        words += ["-p", str(arguments.ssh_port)]
    if arguments.ssh_identity_file:
        words += ["-i", arguments.ssh_identity_file]
    return words


def _stdin() -> IO[bytes] | None:
    """For rank 0: not a terminal, which can only be read in the session of its own."""
    try:
        return None if sys.stdin is None or sys.stdin.isatty() else sys.stdin.buffer
    except ValueError:  # closed
        return None


def _no_program(name: str) -> str:
    if os.path.exists(name) and name.endswith(".py"):
        return f"{name} is not executable: write python {name}"
    return f"there is no program {name!r}"


# ---------------------------------------------------------------------------------------------
# Instead of starting


def _dry_run(placed: list[Place], command: list[str], variables: dict[str, str]) -> int:
    rendezvous = Rendezvous("JOB", "HOST:PORT", ("HOST", 0))
    for place in placed:
        told = {**variables, **plan.environment(place, len(placed), rendezvous)}
        del told["MASTER_ADDR"], told["MASTER_PORT"]
        shown = " ".join(f"{name}={shlex.quote(value)}" for name, value in told.items())
        print(f"{place.host}: {shown} {shlex.join(command)}")
    return 0


def _mpirun(arguments: argparse.Namespace, placed: list[Place], command: list[str]) -> int:
    words = ["mpirun", "-np", str(len(placed))]
    if arguments.hosts or arguments.hostfile:
        slots = {place.host: place.local_size for place in placed}
        words += ["-H", ",".join(f"{name}:{count}" for name, count in slots.items())]
    if arguments.tag_output is not False and len(placed) > 1:
        words += ["--output", "tag"]
    for name in arguments.variables:
        words += ["-x", name]
    for name, value in knob_flags.chosen(arguments).items():
        words += ["-x", f"{name}={value}"]
    words += [*shlex.split(arguments.mpi_args), *command]
    print(shlex.join(words), flush=True)
    if arguments.dry_run:
        return 0
    if shutil.which(words[0]) is None:
        print("hororun: there is no mpirun", file=sys.stderr)
        return _NOT_FOUND
    os.execvp(words[0], words)  # which gets signals itself, and ends its ranks

"""The command hororun: reads the command line, and starts the job."""

from __future__ import annotations

import argparse
import glob
import io
import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import IO

from hororing._job import launchers, limits
from hororing._job.rendezvous import protocol
from hororing.config import environment
from hororing.hororun.flags import allocation, knobs
from hororing.hororun.flags import elastic as elastic_module
from hororing.hororun.flags.host_lists import Host
from hororing.hororun.host import cgroup, numa
from hororing.hororun.host.local import STDERR, STDOUT, CannotStartError
from hororing.hororun.host.output import Output
from hororing.hororun.job import beside as beside_module
from hororing.hororun.job import plan, start
from hororing.hororun.job.ending import Grace
from hororing.hororun.job.plan import Place, Rendezvous

_NOT_FOUND, _FAILED = 127, 1

# Names whose values hororun would rather not have in its command line.
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY", re.IGNORECASE)

# mpirun itself would obey these. It takes others from its environment, because other users can see
# its command line.
_OF_MPIRUN = ("LD_", "OMPI_", "PATH", "PMIX_", "PRTE_")

# mpirun has other flags for these, or none.
_WITHOUT_MPI = (
    "--page", "--page-token-file", "--progress", "--output", "--start-timeout",
    "--grace", "--rsh-agent", "--ssh-port", "--ssh-identity-file",
)  # fmt: skip
_CONFIGS = ("--import-config", "--export-config")


def main(
    words: Sequence[str] | None = None,
    prog: str = "hororun",
    changed: Callable[[list[str]], list[str]] = list,
) -> int:
    """Run it, and return its exit code: that of the first rank that failed, or 0.

    `prog` : as which command. `changed` : returns what to run instead of the given program.
    """
    parser = arguments_parser(prog)
    words, arguments = _read(parser, list(sys.argv[1:] if words is None else words))
    if arguments.check_build:
        return subprocess.call([sys.executable, "-m", "hororing", "info"])
    command = changed(_program(arguments))
    if not (command or arguments.print_topology or arguments.export_config):
        parser.error("no program given, e.g. hororun -np 4 python train.py")
    if arguments.gloo and arguments.mpi:
        parser.error("--gloo and --mpi exclude each other")
    if arguments.mpi_args and not arguments.mpi:
        parser.error("--mpi-args needs --mpi, which starts the ranks with mpirun")
    try:
        variables = _variables(arguments)
        elastic = elastic_module.chosen(arguments, lambda: _hosts(arguments)[0], variables)
        placed = [] if elastic else _placed(arguments)
        size = elastic.max_np if elastic else len(placed)
        only_from = _ranks(arguments.only_output_from, size)
        if arguments.export_config:
            _export(arguments.export_config, _flags(words, arguments), command)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if arguments.print_topology:
        node_of = _node if arguments.numa_aware else None
        print(plan.topology(placed, arguments.num_replicas, node_of), flush=True)
    if not command:
        return 0
    if arguments.mpi:
        if ignored := [flag for flag in _WITHOUT_MPI if _is_given(parser, arguments, flag)]:
            parser.error(f"{ignored[0]} cannot be combined with --mpi; use --mpi-args instead")
        return _mpirun(arguments, placed, command)
    program = shutil.which(command[0])
    if program is None:
        print(f"hororun: {_no_program(command[0])}", file=sys.stderr)
        return _NOT_FOUND
    # Other hosts may have another search path.
    command = [os.path.abspath(program), *command[1:]]
    if arguments.numa_aware:
        command = _bound(sys.executable, ["--numa-aware"], command)
    if arguments.dry_run:
        return _dry_run(placed, command, variables)
    limits.raise_files()  # elastic jobs may grow
    level = variables.get("HORORING_LOG_LEVEL", variables.get("HOROVOD_LOG_LEVEL"))
    output = _output(arguments, size, only_from, elastic is not None, level != "debug")
    rsh = arguments.rsh_agent or start.ssh(arguments.ssh_port, arguments.ssh_identity_file)
    try:
        with beside_module.started(arguments, rsh, output) as beside:
            what = start.Start(
                placed, command, variables, rsh, arguments.start_timeout, _grace(arguments.grace),
                _stdin(), beside,
            )  # fmt: skip
            if elastic is not None:
                membership = _membership(arguments.output)
                return start.run_elastic(what, elastic, output, membership).conclude()
            output.open_files(size)
            return start.run(what, output).conclude()
    except CannotStartError as error:
        output.log(str(error))
    except OSError as error:
        output.log(limits.why_not_started(error, "start"))
    except KeyboardInterrupt:  # before the ranks were started
        return 128 + signal.SIGINT
    return _FAILED


# ---------------------------------------------------------------------------------------------
# The command line


def arguments_parser(prog: str = "hororun") -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} [flags] program [arguments]",
        description="Run a program on several ranks and wait for all of them.",
        epilog="The exit code is that of the first rank that fails: 128 + N for signal N.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-np", "--num-proc", "--num-instances", type=_positive, metavar="N", help="ranks")
    add("-H", "--hosts", "--host", metavar="HOSTS", help="hosts with their slots: a:4,pod[0-3]:8")
    add("-hostfile", "--hostfile", metavar="FILE", help="like -H, a line 'name slots=8' for each")
    add("--nnodes", type=_positive, metavar="N", help="use only N hosts")
    add(
        "--nproc-per-node",
        metavar="N",
        help="ranks of each host; auto: one for each GPU here, or else for each core",
    )
    add("--num-replicas", type=_positive, metavar="N",
        help="replicas, such as devices, of all ranks; without -np each has a rank")  # fmt: skip
    add("--numa-aware", action="store_true",
        help="bind each rank to a NUMA node of its host, in turn: cores and memory")  # fmt: skip
    add("-x", action="append", default=[], dest="variables", metavar="NAME[=VALUE]",
        help="a variable for the ranks of all hosts")  # fmt: skip
    add("--output", "--output-filename", metavar="DIR",
        help="also write what ranks print to DIR/rank.N/stdout and DIR/rank.N/stderr, and show "
        "only what rank 0 prints")  # fmt: skip
    add("--tag-output", action=argparse.BooleanOptionalAction, default=None,
        help="lines begin with their rank; default: if there are several ranks")  # fmt: skip
    add("--only-output-from", metavar="0,4-6",
        help="standard output of these ranks only; errors are always shown")  # fmt: skip
    add("--start-timeout", type=_seconds, metavar="S",
        default=environment.variables().get("HOROVOD_START_TIMEOUT", "60"),
        help="longest that other hosts may take to answer (60)")  # fmt: skip
    add("--grace", type=_seconds, metavar="S",
        help="time between the request to end and the end, for all ranks (5 after a failure, 30 or "
        "Slurm's KillWait after a signal)")  # fmt: skip
    add("--rsh-agent", type=_words, metavar="CMD",
        help="instead of ssh: CMD HOST COMMAND runs it there")  # fmt: skip
    add("-p", "--ssh-port", type=_positive, metavar="PORT", help="ssh port")
    add("-i", "--ssh-identity-file", metavar="FILE", help="ssh key")
    beside_module.add_arguments(parser)
    elastic_module.add_arguments(parser, _positive, _seconds)
    add("--mpi", action="store_true", help="print the mpirun line for this, and run it")
    add("--mpi-args", type=_words, default=[], metavar="WORDS",
        help="with --mpi: more words for mpirun")  # fmt: skip
    add("--print-topology", action="store_true", help="show which rank goes where, first")
    add("--dry-run", action="store_true", help="show what would be started where")
    add("--export-config", metavar="FILE", help="write these flags and the program to a file")
    add("--import-config", metavar="FILE", help="begin with those of a file; others win over them")
    add("-cb", "--check-build", action="store_true", help="what is installed and works")
    add("-v", "--version", action="version", version=f"hororun {_version()}")
    add("--verbose", dest="print_topology", action="store_true", help=argparse.SUPPRESS)
    add("--gloo", action="store_true", help=argparse.SUPPRESS)  # without MPI, as hororun is
    knobs.add_arguments(parser)
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _is_given(parser: argparse.ArgumentParser, arguments: argparse.Namespace, flag: str) -> bool:
    name = flag.removeprefix("--").replace("-", "_")
    return bool(getattr(arguments, name) != getattr(parser.parse_args([]), name))


def _version() -> str:
    try:
        return metadata.version("hororing")
    except metadata.PackageNotFoundError:  # a source tree
        return "(not installed)"


def _positive(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,6}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None


def _placed(arguments: argparse.Namespace) -> list[Place]:
    """Ranks on the named hosts, or those of a batch allocation, or else on this host."""
    per_host = _per_host(arguments.nproc_per_node)
    hosts, given = _hosts(arguments)
    size, replicas = arguments.num_proc, arguments.num_replicas
    if size is None and per_host is None and any(host.slots is None for host in hosts):
        size = replicas
    try:
        placed = plan.place(hosts, size, per_host, arguments.nnodes)
    except ValueError as error:
        if given is None:
            raise
        raise ValueError(
            f"{error} (these hosts are those of the {given.scheduler} allocation; -H names others)"
        ) from None
    if replicas is not None:
        plan.replicas_of(0, len(placed), replicas)
    return placed


def _hosts(arguments: argparse.Namespace) -> tuple[list[Host], allocation.Allocation | None]:
    hosts = start.named_hosts(arguments.hosts, arguments.hostfile)
    given = None if hosts else _allocation()
    if given is None:
        return hosts or [Host("localhost")], None
    size = arguments.num_proc
    # Schedulers give one task per host if the user did not ask for a number.
    one_per_host = size and size > len(given.hosts) and {each.slots for each in given.hosts} == {1}
    if arguments.nproc_per_node or one_per_host:
        return [Host(each.name) for each in given.hosts], given
    return given.hosts, given


def _allocation() -> allocation.Allocation | None:
    found = allocation.find(environment.variables())
    outer = launchers.detect()
    if found is not None and outer.launched and "SLURM" in outer.sign:
        raise ValueError(
            f"srun has started hororun itself as several tasks ({outer.sign}): start it once, "
            "without srun; or let srun start the program"
        )
    return found


def _grace(given: float | None) -> Grace:
    if given is not None:
        return Grace(given, given)
    schedulers_s = allocation.kill_wait_s(environment.variables())
    # hororun must still be able to say who has not ended.
    return Grace() if schedulers_s is None else Grace(asked_s=max(schedulers_s - 1, 1))


def _per_host(text: str | None) -> int | None:
    if text is None:
        return None
    if text in ("auto", "gpu"):
        gpus = len(glob.glob("/dev/nvidia[0-9]*"))
        if gpus or text == "gpu":
            return max(gpus, 1)
    if text in ("auto", "cpu"):
        return cgroup.cores()
    if not re.fullmatch(r"[1-9]\d{0,6}", text):
        raise ValueError(f"--nproc-per-node {text}: expected a number, auto, gpu or cpu")
    return int(text)


def _ranks(text: str | None, size: int) -> set[int] | None:
    if text is None:
        return None
    try:
        ranks = set(numa.numbers(text))
    except ValueError as error:
        raise ValueError(f"--only-output-from {text}: {error}; write ranks, as 0,4-6") from None
    if not ranks:
        raise ValueError(f"--only-output-from {text}: it names no rank; write ranks, as 0,4-6")
    if wrong := sorted(rank for rank in ranks if rank >= size):
        raise ValueError(f"--only-output-from: there is no rank {wrong[0]} among {size}")
    return ranks


def _variables(arguments: argparse.Namespace) -> dict[str, str]:
    """Variables for the ranks of all hosts: settings, most of which must be the same, and -x."""
    own = environment.variables()
    found = start.settings()
    for text in arguments.variables:
        name, equals, value = text.partition("=")
        if not name:
            raise ValueError(f"-x {text}: write -x NAME or -x NAME=VALUE")
        if not equals and name not in own:
            raise ValueError(f"-x {name}: it is not set here; give -x {name}=VALUE")
        if equals and _SECRET.search(name):
            print(
                f"hororun: all users of this host can see the value of -x {name}=... (ps): set the "
                f"variable, and give -x {name}",
                file=sys.stderr,
            )
        found[name] = value if equals else own[name]
    if arguments.num_replicas:
        found["HORORING_NUM_REPLICAS"] = str(arguments.num_replicas)
    return {**found, **knobs.chosen(arguments)}


def _membership(directory: str | None) -> Path | None:
    """A file for the generations of an elastic job, beside its processes' output. OSError."""
    if directory is None:
        return None
    file = Path(directory, "membership.jsonl")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"")
    return file


def _output(
    arguments: argparse.Namespace,
    size: int,
    only_from: set[int] | None,
    elastic: bool,
    folds: bool,
) -> Output:
    tag = size > 1 if arguments.tag_output is None else arguments.tag_output
    streams: dict[str, io.RawIOBase] = {}
    for name, number, own in ((STDOUT, 1, sys.__stdout__), (STDERR, 2, sys.__stderr__)):
        if own is not None:  # closed at start: the number may be another file's by now
            streams[name] = io.FileIO(number, "w", closefd=False)
    plain = "NO_COLOR" in environment.variables()
    return Output(
        streams,
        size,
        tag=tag,
        colour=[name for name, stream in streams.items() if stream.isatty() and not plain],
        only_from=only_from,
        directory=arguments.output,
        elastic=elastic,
        folds=folds,
    )


# ---------------------------------------------------------------------------------------------


def _node(place: Place) -> str:
    """The NUMA node that a rank will be bound to, as far as this host knows."""
    if not start.is_local(place.host):
        return "?"
    allowed = frozenset(os.sched_getaffinity(0))
    node = numa.choose(place.local_rank, numa.read_nodes(), allowed).node
    return "-" if node is None else str(node)


# ---------------------------------------------------------------------------------------------
# Flags in files


def _read(
    parser: argparse.ArgumentParser, words: list[str]
) -> tuple[list[str], argparse.Namespace]:
    """Parse the command line, after the words of a file if one is named."""
    arguments = parser.parse_args(words)
    path = arguments.import_config
    if path is None:
        return words, arguments
    try:
        with open(path, encoding="utf-8") as file:
            saved = json.load(file)
        flags, command = saved["flags"], saved["command"]
        if not all(isinstance(each, str) for each in [*flags, *command]):
            raise TypeError
    except OSError as error:
        parser.error(str(error))
    except (ValueError, TypeError, KeyError):
        parser.error(f"--import-config {path}: no file of --export-config")
    words = [*flags, *_flags(words, arguments), "--", *(_program(arguments) or command)]
    merged = parser.parse_args(words)
    merged.export_config = arguments.export_config
    return words, merged


def _export(path: str, flags: list[str], command: list[str]) -> None:
    with open(path, "w", encoding="utf-8", opener=partial(os.open, mode=0o600)) as file:
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            os.fchmod(file.fileno(), 0o600)  # -x may hold what others must not read
        json.dump({"flags": flags, "command": command}, file, indent=1)
        file.write("\n")


def _program(arguments: argparse.Namespace) -> list[str]:
    words: list[str] = arguments.command
    return words[1:] if words[:1] == ["--"] else words


def _flags(words: list[str], arguments: argparse.Namespace) -> list[str]:
    """The words before the program, except for _CONFIGS with their files."""
    flags = words[: len(words) - len(_program(arguments))]
    while flags[-1:] == ["--"]:
        flags = flags[:-1]
    kept: list[str] = []
    for before, word in zip(["", *flags], flags, strict=False):
        if before not in _CONFIGS and word.partition("=")[0] not in _CONFIGS:
            kept.append(word)
    return kept


# ---------------------------------------------------------------------------------------------
# Programs


def _bound(python: str, flags: list[str], command: list[str]) -> list[str]:
    return [python, "-m", "hororing.hororun.host.bind", *flags, "--", *command]


def _stdin() -> IO[bytes] | None:
    """For rank 0: not a terminal, which only its own session can read."""
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
        shown_variables = {**variables, **plan.environment(place, len(placed), rendezvous)}
        del shown_variables["MASTER_ADDR"], shown_variables["MASTER_PORT"]
        shown = " ".join(f"{name}={shlex.quote(value)}" for name, value in shown_variables.items())
        print(f"{place.host}: {shown} {shlex.join(command)}")
    return 0


def _mpirun(arguments: argparse.Namespace, placed: list[Place], command: list[str]) -> int:
    words = ["mpirun", "-np", str(len(placed))]
    if arguments.hosts or arguments.hostfile:
        slots = {place.host: place.local_size for place in placed}
        words += ["-H", ",".join(protocol.show_address(*each) for each in slots.items())]
    if arguments.tag_output is not False and len(placed) > 1:
        words += ["--output", "tag"]
    flags = knobs.chosen(arguments)
    if arguments.num_replicas:
        flags["HORORING_NUM_REPLICAS"] = str(arguments.num_replicas)
    given = [*arguments.variables, *(f"{name}={value}" for name, value in flags.items())]
    # One -x for each name: the last.
    passed = {text.partition("=")[0]: text for text in [*start.settings(), *given]}
    own = environment.variables()
    for name, equals, value in [text.partition("=") for text in passed.values()]:
        if equals and name not in flags and not name.startswith(_OF_MPIRUN):
            own[name], passed[name] = value, name
    words += [word for text in passed.values() for word in ("-x", text)]
    binding = []
    if arguments.numa_aware:
        words += ["--bind-to", "none"]  # our wrapper binds, also memory
        binding.append("--numa-aware")
    if arguments.only_output_from:
        binding += ["--only-output-from", arguments.only_output_from]
    if binding:
        python = command[0] if "python" in os.path.basename(command[0]) else "python"
        command = _bound(python, binding, command)
    words += [*arguments.mpi_args, *command]
    print(shlex.join(words), flush=True)
    if arguments.dry_run:
        return 0
    if shutil.which(words[0]) is None:
        print("hororun: there is no mpirun", file=sys.stderr)
        return _NOT_FOUND
    os.execvpe(words[0], words, own)  # which handles signals itself, and ends its ranks

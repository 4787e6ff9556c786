"""``python -m hororing layout``: where the processes of a job would go, and the mpirun line."""

from __future__ import annotations

import argparse
import sys

from hororing.hosts import read_hostfile
from hororing.toolkit.layout.jobs import Job, export_config, import_config, plan
from hororing.toolkit.layout.numa import numbers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes: the fields of `Job`, as flags that are absent where not given."""

    def add(*names: str, **options: object) -> None:
        parser.add_argument(*names, default=argparse.SUPPRESS, **options)  # type: ignore[arg-type]

    add("-np", "--num-instances", type=int, help="processes (default: one for every replica)")
    add("--num-replicas", type=int, help="replicas (default: one for every process)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("-H", "--hosts", default=argparse.SUPPRESS, help="as pod[0-2,4]:8,login")
    where.add_argument("--hostfile", help="lines of 'name slots=8'")
    add("--numa-aware", action="store_true", help="bind each process to a NUMA node")
    add("--numa-nodes", type=int, help="nodes of each host, to be shown")
    add("--tag-output", action="store_true", help="begin lines of output with the rank")
    add("--only-output-from", type=_ranks, metavar="RANKS", help="as 0,4-6")
    add("-x", dest="environment", action="append", metavar="NAME", help="a variable for all hosts")
    add("--mpi-args", type=str.split, metavar="WORDS", help="more for mpirun, as '--oversubscribe'")
    parser.add_argument("--print-topology", action="store_true", help="print every process")
    parser.add_argument("--dry-run", action="store_true", help="print the mpirun line")
    parser.add_argument("--import-config", metavar="FILE", help="begin with a job from a file")
    parser.add_argument("--export-config", metavar="FILE", help="write this job to a file")
    add("command_line", nargs="*", metavar="COMMAND", help="the program, after --")


def _ranks(text: str) -> list[int]:
    try:
        return numbers(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(chosen: argparse.Namespace) -> int:
    """Print what was asked for; the topology, where nothing was. 1: the job cannot be."""
    given = {name: getattr(chosen, name) for name in Job.__dataclass_fields__ if name in chosen}
    given.pop("command", None)  # the name of the subcommand
    if "command_line" in chosen and chosen.command_line:
        given["command"] = chosen.command_line
    try:
        if chosen.hostfile is not None:
            hosts = read_hostfile(chosen.hostfile)
            names = [h.name if h.slots is None else f"{h.name}:{h.slots}" for h in hosts]
            given["hosts"] = ",".join(names)
        given = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
        job = import_config(chosen.import_config, **given) if chosen.import_config else Job(**given)
        layout = plan(job)
        if chosen.print_topology or not (chosen.dry_run or chosen.export_config):
            print(layout)
        if chosen.dry_run:
            print(layout.mpirun_line())
        if chosen.export_config:
            export_config(job, chosen.export_config)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0

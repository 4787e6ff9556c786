"""``python -m hororing.hororun.host.bind --numa-aware -- COMMAND``: binds to cores and memory.

hororun puts it in front of a program, also with --mpi. The program replaces this process, and keeps
its cores, memory policy and outputs.
"""

from __future__ import annotations

import argparse
import os
import sys

from hororing._job.launchers import detect
from hororing.hororun.host.numa import bind, numbers


def main(arguments: list[str] | None = None) -> int:
    """Replace this process by the command; return only if that fails."""
    parser = argparse.ArgumentParser(
        prog="python -m hororing.hororun.host.bind", description=__doc__
    )
    parser.add_argument("--numa-aware", action="store_true", help="cores and memory of one node")
    parser.add_argument(
        "--only-output-from", type=numbers, metavar="RANKS", help="as 0,4-6: others print nothing"
    )
    parser.add_argument("command", nargs="+")
    chosen = parser.parse_args(arguments)
    launch = detect()
    rank = launch.rank or 0
    if chosen.numa_aware:
        binding = bind(launch.local_rank or 0)
        if binding.notice and (launch.local_rank or 0) == 0:
            print(f"[rank {rank}] --numa-aware: {binding.notice}", file=sys.stderr)
    if chosen.only_output_from is not None and rank not in chosen.only_output_from:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
    try:
        os.execvp(chosen.command[0], chosen.command)
    except OSError as error:
        print(f"{chosen.command[0]}: {error.strerror}", file=sys.stderr)
    return 127


if __name__ == "__main__":
    sys.exit(main())

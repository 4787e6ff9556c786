"""``python -m hororing doctor``: shows from outside what the ranks of a job are doing.

Reads the flight recorders (_engine/recorder.py) of processes of this host, or those that a job has
left in HORORING_FLIGHT_RECORDER.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from hororing._engine import recorder

ALL = "all"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("files", nargs="*", help="files of HORORING_FLIGHT_RECORDER")
    parser.add_argument(
        "--pid", type=int, action="append", default=[], help="a process of this host"
    )
    parser.add_argument(
        "--job",
        nargs="?",
        const=ALL,
        help="the ranks of this job on this host, by its id or the process id of one of them; "
        "without either: of all jobs",
    )
    parser.add_argument(
        "--all-users", action="store_true", help="for root: other users' processes, too"
    )
    parser.add_argument("--events", type=int, default=10, help="how many of each rank (10)")


def run(arguments: argparse.Namespace) -> int:
    """Print the reports; return 1 if there are none."""
    found: list[recorder.Recording] = []
    problems: list[str] = []
    for file in arguments.files:
        try:
            found.append(recorder.read(file))
        except (OSError, ValueError) as error:
            problems.append(str(error))
            continue
        print(report(found[-1], arguments.events))
    everyone = arguments.all_users
    ranks = _ranks_of(arguments.job, everyone) if arguments.job else []
    for pid in [*arguments.pid, *ranks]:
        try:
            path = recorder.find(pid, everyone)
            if path is None:
                raise ValueError(f"process {pid} has not called hororing's init()")
            recording = recorder.ask_for_stack(pid, path)
        except (OSError, ValueError) as error:
            problems.append(str(error))
            continue
        found.append(recording)
        print(report(recording, arguments.events, pid))
    for line in missing(found):
        print(line)
    if not found and not problems:
        problems.append("name a file, or a process (--pid), or --job: no rank was found")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 0 if found and not problems else 1


def report(recording: recorder.Recording, events: int, pid: int | None = None) -> str:
    """Describe one rank; `pid`: of the process, which is alive."""
    facts = recording.facts
    lines = [
        f"rank {facts['rank']} of {facts['size']}, pid {facts['pid']} on host {facts['host']}"
        + (f", job {facts['job']}" if facts["job"] else ""),
        f"  command: {facts['command']}",
    ]
    if pid is not None:
        lines.append(f"  process: {_state(pid)}")
    waits = [f"{each.request} ({each.kind} {_when(each, pid)})" for each in recording.unfinished()]
    lines.append(f"  in flight: {', '.join(waits) or 'nothing'}")
    lines.append(f"  last events, of {len(recording.events)}:")
    shown = recording.events[-events:] if events > 0 else []
    lines += [f"    {_clock(each)}  {each.kind:9}  {each.request}" for each in shown]
    stack = recording.stack.splitlines()
    if stack:
        lines.append("  main thread (most recent call first):")
        lines += [f"  {line}" for line in stack if line.startswith(" ")]
    elif pid is not None:
        lines.append("  main thread: has not written its stack")
    return "\n".join(lines)


def missing(recordings: Iterable[recorder.Recording]) -> list[str]:
    """Return the requests that some of the ranks have submitted and others have not."""
    jobs: dict[str, dict[int, set[str]]] = {}
    for each in recordings:
        waits = {event.request for event in each.unfinished() if event.kind == "submitted"}
        jobs.setdefault(each.facts["job"], {})[each.facts["rank"]] = waits
    lines = []
    for job, ranks in jobs.items():
        prefix = f"job {job}: " if len(jobs) > 1 else ""
        for request in sorted(set().union(*ranks.values())):
            have = [rank for rank, waits in ranks.items() if request in waits]
            lack = [rank for rank, waits in ranks.items() if request not in waits]
            if lack:
                members = ", as far as they belong to it" if recorder.OF_SET in request else ""
                lines.append(
                    f"{prefix}{request}: submitted by {_list(have)}, not by {_list(lack)}{members}"
                )
    return lines


def _list(ranks: Iterable[int]) -> str:
    return "rank " + ", ".join(map(str, sorted(ranks)))


def _ranks_of(job: str, all_users: bool) -> list[int]:
    """The processes of this host that have a recorder of their own, of a job or of all."""
    found = {pid: str(head.facts["job"]) for pid, _, head in recorder.processes(all_users)}
    wanted = found.get(int(job), job) if job.isdecimal() else job
    return [pid for pid, its in found.items() if ALL in (wanted, job) or its == wanted]


def _state(pid: int) -> str:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return "has ended"
    found = re.search(r"^State:\s*(.*)$", status, re.M)
    return found[1] if found else "unknown"


def _clock(event: recorder.Event) -> str:
    milliseconds = int(event.time % 1 * 1000)
    return time.strftime("%H:%M:%S", time.localtime(event.time)) + f".{milliseconds:03}"


def _when(event: recorder.Event, pid: int | None) -> str:
    return f"{time.time() - event.time:.1f} s ago" if pid is not None else f"at {_clock(event)}"

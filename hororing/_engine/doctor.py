"""``hororing doctor``: shows from outside what the ranks of a job are doing.

First who waits for whom, then a line for each rank, then the events and stacks. Reads the flight
recorders (_engine/recorder.py) of processes of this host, or those that a job has left in
HORORING_FLIGHT_RECORDER.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from hororing._engine import recorder

ALL = "all"
_LIBRARY = re.compile(r"/hororing/|/(site|dist)-packages/|/lib/python3|^<frozen")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "files",
        nargs="*",
        help="files of HORORING_FLIGHT_RECORDER, or process ids of hororun; without any, and "
        "without --pid and --job: all your jobs on this host",
    )
    parser.add_argument(
        "--pid", type=int, action="append", default=[], help="this rank, by its process id"
    )
    parser.add_argument(
        "--job",
        nargs="?",
        const=ALL,
        help="the ranks of this job on this host, by its id or the process id of one of them, or "
        "of what has started it; without a value: of all jobs",
    )
    parser.add_argument(
        "--all-users", action="store_true", help="for root: other users' processes, too"
    )
    parser.add_argument("--events", type=int, default=10, help="how many of each rank (10)")


def run(arguments: argparse.Namespace) -> int:
    """Print the reports; return 1 if there are none."""
    found: list[tuple[recorder.Recording, int | None]] = []
    problems: list[str] = []
    everyone = arguments.all_users
    jobs = [each for each in arguments.files if each.isdecimal() and not Path(each).exists()]
    files = [each for each in arguments.files if each not in jobs]
    for file in files:
        try:
            found.append((recorder.read(file), None))
        except (OSError, ValueError) as error:
            problems.append(str(error))
    if not (arguments.files or arguments.pid or arguments.job):
        jobs = [ALL]
    jobs += [arguments.job] if arguments.job else []
    ranks = [pid for job in jobs for pid in _ranks_of(job, everyone)]
    for pid in dict.fromkeys([*arguments.pid, *ranks]):
        try:
            path = recorder.find(pid, everyone)
            if path is None:
                raise ValueError(f"process {pid} has not called hororing's init()")
            recording = recorder.ask_for_stack(pid, path)
        except (OSError, ValueError) as error:
            if pid in arguments.pid or Path(f"/proc/{pid}").exists():  # else it has just ended
                problems.append(str(error))
            continue
        found.append((recording, pid))
    jobs_found = list(dict.fromkeys(each.facts["job"] for each, _ in found))
    for job in jobs_found:
        of_job = [each for each in found if each[0].facts["job"] == job]
        if len(jobs_found) > 1:
            print(f"job {job or '?'}: {of_job[0][0].facts['command']}")
        print(*_overview(of_job), sep="\n")
    for recording, pid in found:
        print(report(recording, arguments.events, pid))
    if not found and not problems:
        whose = "any user" if everyone else "this user"
        problems.append(
            f"no rank of {whose} runs on this host; name its files (HORORING_FLIGHT_RECORDER) if "
            "the job has ended, or run this on its host"
        )
    for problem in problems:
        print(problem, file=sys.stderr)
    return 0 if found and not problems else 1


def _overview(found: Sequence[tuple[recorder.Recording, int | None]]) -> list[str]:
    """Describe who waits for whom, and give a line for each rank."""
    lines = missing(each for each, _ in found) or ["no rank waits for another one of these"]
    rows = [("rank", "pid", "state", "step", "waits for", "at")]
    for recording, pid in found:
        facts = recording.facts
        state = "ended" if pid is None else _state(pid)
        if state.startswith(("T", "t")):
            lines.append(f"rank {facts['rank']} is stopped: kill -CONT {pid} lets it go on")
        waits = recording.unfinished()
        more = f" and {len(waits) - 1} more" if len(waits) > 1 else ""
        rows.append((
            str(facts["rank"]), str(facts["pid"]), state, str(recording.totals["steps"]),
            f"{waits[0].request}{more}, {_when(waits[0], pid)}" if waits else "nothing",
            _users_line(recording.stack),
        ))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join(cells).rstrip())
    return [*lines, ""]


def _users_line(stack: str) -> str:
    """The innermost line that is neither ours nor a library's."""
    frames = re.findall(r'^\s*File "(.*)", line (\d+) in (.*)$', stack, re.M)
    own = [each for each in frames if not _LIBRARY.search(each[0])] or frames
    return f"{own[0][0]}:{own[0][1]}, in {own[0][2]}" if own else "?"


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
        alike: dict[tuple[str, str, str], list[str]] = {}
        for request in sorted(set().union(*ranks.values())):
            have = [rank for rank, waits in ranks.items() if request in waits]
            lack = [rank for rank, waits in ranks.items() if request not in waits]
            if lack:
                members = ", as far as they belong to it" if recorder.OF_SET in request else ""
                alike.setdefault((_list(have), _list(lack), members), []).append(request)
        for (submitted, missed, members), requests in alike.items():
            more = f" and {len(requests) - 1} more" if len(requests) > 1 else ""
            lines.append(
                f"{prefix}{requests[0]}{more}: submitted by {submitted}, not by {missed}{members}"
            )
    return lines


def _list(ranks: Iterable[int]) -> str:
    return "rank " + ", ".join(map(str, sorted(ranks)))


def _ranks_of(job: str, all_users: bool) -> list[int]:
    """The processes of this host that have a recorder of their own, of a job or of all.

    `job` : its id, or a process id: of one of them, or of what has started them.
    """
    found = {pid: str(head.facts["job"]) for pid, _, head in recorder.processes(all_users)}
    if job == ALL:
        return list(found)
    if not job.isdecimal():
        return [pid for pid, its in found.items() if its == job]
    wanted = found.get(int(job), job)
    return [
        pid for pid, its in found.items() if (its and its == wanted) or int(job) in _ancestors(pid)
    ]


def _ancestors(pid: int) -> list[int]:
    """A process, the one that has started it, and so on."""
    found: list[int] = []
    while pid > 1 and pid not in found:
        found.append(pid)
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            break
        pid = int(re.findall(r"^PPid:\s*(\d+)$", status, re.M)[0])
    return found


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

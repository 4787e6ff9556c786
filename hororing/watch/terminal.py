"""`hororing top`: the jobs of this host in a terminal, also those that hang."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

from hororing.watch.job import Job
from hororing.watch.sampler import PERIOD_S, Sampler

_MOST_ROWS = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("--job", help="this job only, by its id, or a process id of a rank of it")
    parser.add_argument(
        "--all-users", action="store_true", help="for root: other users' processes, too"
    )
    parser.add_argument("--once", action="store_true", help="print one picture, after 2 s, and end")


def run(arguments: argparse.Namespace) -> int:
    """Show the jobs until ^C; return 1 if there are none."""
    try:
        from rich.console import Console, Group
        from rich.live import Live
    except ImportError:
        print("hororing top draws with rich: pip install 'hororing[watch]'", file=sys.stderr)
        return 1
    views = watch(arguments.job, arguments.all_users)
    if arguments.once:
        next(views)
        time.sleep(2 * PERIOD_S)
        jobs = next(views)
        Console().print(Group(*(picture(job.state) for job in jobs)))
        return 0 if jobs else _nothing()
    with contextlib.suppress(KeyboardInterrupt), Live(screen=True, auto_refresh=False) as live:
        for jobs in views:
            shown = [picture(job.state) for job in jobs] or ["no rank is running here"]
            live.update(Group(*shown), refresh=True)
            time.sleep(PERIOD_S)
    return 0


def _nothing() -> int:
    print("no rank of hororing is running here (of your user)", file=sys.stderr)
    return 1


def watch(wanted: str | None, all_users: bool = False) -> Iterator[list[Job]]:
    """The jobs of this host, sampled whenever the next list is asked for."""
    sampler = Sampler(None, all_users)
    jobs: dict[str, Job] = {}
    while True:
        sample = sampler.sample()
        found: dict[str, list[dict[str, Any]]] = {}
        for rank in sample["ranks"]:
            found.setdefault(rank["job"] or f"of process {rank['pid']}", []).append(rank)
        pids = {str(r["pid"]): name for name, ranks in found.items() for r in ranks}
        for name, ranks in found.items():
            if wanted is None or name in (wanted, pids.get(wanted)):
                job = jobs.setdefault(name, Job(name))
                job.feed([{**sample, "ranks": ranks}])
                for asked in job.stacks_wanted().values():
                    sampler.request_stacks(asked)
        jobs = {name: job for name, job in jobs.items() if name in found}
        yield list(jobs.values())


def picture(state: dict[str, Any]) -> Any:
    """The state of a job, as rich draws it."""
    from rich.console import Group
    from rich.text import Text

    head = Text(f"job {state['job']}", style="bold")
    head.append(f"  {len(state['ranks'])} of {state['size']} ranks here  {state['command']}")
    step = f"{ms(state['step_s'])} a step" if state["step_s"] else "no steps lately"
    facts = [step, f"{state['batches_per_s']:.1f} batches/s"]
    if state["samples_per_s"] is not None:
        facts.append(f"{state['samples_per_s']:.0f} samples/s")
    if state["overlap"] is not None:
        facts.append(f"{state['overlap']:.0%} of communication overlapped")
    for name, text in (("shared_memory", "in hosts"), ("between_hosts", "between hosts")):
        if rate := state[f"{name}_bytes_per_s"]:
            facts.append(f"{rate / 1e6:.1f} MB/s {text}")
    lines: list[Any] = [head, Text(", ".join(facts))]
    colours = {"hang": "bold red", "waiting": "yellow", "late": "yellow", "link": "yellow"}
    for each in state["findings"]:
        prefix = "HANG: " if each["kind"] == "hang" else ""
        lines.append(Text(prefix + each["text"], style=colours.get(each["kind"], "cyan")))
        lines += [Text("    " + line.strip()) for line in each["stack"].splitlines()[1:7]]
    table = _table(state)
    values = state["metrics"]["values"]
    if values:
        step_text = "" if state["metrics"]["step"] is None else f"step {state['metrics']['step']}: "
        shown = ", ".join(f"{name} {value:.6g}" for name, value in values.items())
        table.caption = Text(step_text + shown)  # as it is: it may look like markup
        table.caption_justify = "left"
    return Group(*lines, table, "")


def _table(state: dict[str, Any]) -> Any:
    """The ranks; those that matter, if there are too many for a terminal."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for name in ("rank", "host", "pid", "late", "waits", "batches", "core", "queue", "now"):
        table.add_column(name, justify="left" if name in ("host", "now") else "right")
    named = {
        rank
        for each in state["findings"]
        if each["kind"] not in ("host", "log")
        for rank in each["ranks"]
    }
    order = sorted(state["ranks"], key=lambda each: (each["rank"] not in named, -each["late_s"]))
    shown_ranks = {each["rank"] for each in order[:_MOST_ROWS]}
    for each in [rank for rank in state["ranks"] if rank["rank"] in shown_ranks]:
        table.add_row(
            str(each["rank"]), Text(each["host"]), f"{each['pid']} {each['state']}",
            ms(each["late_s"]), ms(each["waited_s"]), ms(each["batch_s"]),
            f"{each['core_share']:.0%}", f"{each['queued_share']:.0%}",
            Text(each["doing"], overflow="ellipsis", no_wrap=True),
            style="bold" if each["rank"] in named else "",
        )  # fmt: skip
    if len(order) > _MOST_ROWS:
        table.add_row("...", f"{len(order) - _MOST_ROWS} more", *[""] * 7)
    return table


def ms(seconds: float) -> str:
    """A time, for a narrow column."""
    return f"{seconds * 1e3:.1f} ms"

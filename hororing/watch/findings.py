"""Who is late or hangs, and why: one sentence for each finding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hororing._engine.recorder import OF_SET
from hororing.watch.rates import Rates, lower_median, upper_median

# A rank is late if the others wait for it for so long in each step, as in the report of a timeline.
LATE_SHARE, LATE_S = 0.1, 0.001
# A wait is a hang after so many steps, and so many seconds.
HANG_STEPS, HANG_S = 10, 5.0
# Others' waits are named once they take so long.
WAITING_S = 1.0
# A cause must explain so much of the lateness.
EXPLAINS = 0.4
# A link is slow if it moves bytes at less than this share of the others' speed, while it is busy
# for so much of the time.
SLOW_LINK, BUSY_LINK = 0.5, 0.2
# One that is nearly slow may be the reason that another one is.
NEARLY_SLOW = 0.75
# A link that carries less than this share of the busiest one's bytes carries control messages only.
CARRIES = 0.1
# The slow link keeps others waiting, for its data and for acknowledgements that share its way: they
# are slow, too, but busy for less than this share of its time, or lead to the host that sends it.
GUILTY = 0.9
# Shares of the time from which on a figure of the kernel is worth a sentence.
STEAL, QUEUED, SLOWER = 0.1, 0.25, 1.3

_STATES = {
    "T": "its process is stopped (SIGSTOP, or a debugger)",
    "t": "its process is stopped by a debugger",
    "D": "it waits for a disk or a network file system",
    "R": "it computes",
    "S": "it sleeps, or waits for something outside hororing (data, a lock, a device)",
}


@dataclass(frozen=True)
class Finding:
    """Something that a user wants to know.

    Attributes
    ----------
    kind : str
        "hang", "waiting", "late", "link", "host", "slower", "log".
    cause : str
        Of "late": "core", "throttled", "disk", "compute", "idle", "link", "stopped".
    """

    kind: str
    text: str
    ranks: list[int] = field(default_factory=list)
    cause: str = ""
    stack: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Everything, as JSON takes it."""
        return asdict(self)


@dataclass(frozen=True)
class Seen:
    """A rank: its latest sample, and its rates."""

    sample: Mapping[str, Any]
    rates: Rates | None


def late(ranks: Mapping[int, Seen]) -> dict[int, float]:
    """By how much each rank is late, in s per step or second; half of the ranks are punctual."""
    found = {rank: seen.rates for rank, seen in ranks.items() if seen.rates is not None}
    counts = any(each.steps for each in found.values())  # else no step is recognised
    waits = {
        rank: each.waited_s
        for rank, each in found.items()
        if (each.steps if counts else each.batches)
    }
    if len(waits) < 2:
        return {}
    typical = upper_median(list(waits.values()))
    return {rank: max(typical - each, 0.0) for rank, each in waits.items()}


def of_late_ranks(ranks: Mapping[int, Seen], slow: Sequence[Finding] = ()) -> list[Finding]:
    """Ranks that others wait for in each step. `slow`: the slow links."""
    found = []
    lateness = late(ranks)
    steps = [s.rates.step_s for s in ranks.values() if s.rates is not None and s.rates.step_s]
    step_s = lower_median(steps) or 1.0
    unit = f"in a step of {_ms(step_s)}" if steps else "in each second"
    guilty = {rank: by for rank, by in lateness.items() if by > max(LATE_S, LATE_SHARE * step_s)}
    others = [ranks[rank] for rank in lateness if rank not in guilty]
    waiting = sorted(rank for rank in lateness if rank not in guilty)
    for rank, by in sorted(guilty.items(), key=lambda each: -each[1]):
        cause, why = _cause(ranks[rank], by, others)
        links = [each for each in slow if rank in each.ranks]
        if cause == "idle" and links:
            (peer,) = set(links[0].ranks) - {rank}
            cause, why = "link", f"Its link with rank {peer} is slow."
        text = (
            f"rank {rank} is late: by {_ms(by)} {unit}, in which "
            f"{listed(waiting)} {'waits' if len(waiting) == 1 else 'wait'} for it. {why}"
        )
        found.append(Finding("late", text, [rank], cause))
    return found


def _cause(of: Seen, by: float, others: list[Seen]) -> tuple[str, str]:
    """The largest part of `by` seconds per step that figures of the kernel explain."""
    own = of.rates
    assert own is not None
    if of.sample["kernel"]["state"] in "Tt":
        return "stopped", _sentence(_STATES[of.sample["kernel"]["state"]])
    theirs = [each.rates for each in others if each.rates is not None]
    cpu_s = lower_median([each.cpu_s for each in theirs])
    # Where all compete for the cores, more work takes more time in the queue: that part belongs
    # to the work.
    ratio = lower_median([each.queued_s / max(each.cpu_s, 1e-6) for each in theirs])
    more_cpu = max(own.cpu_s - cpu_s, 0.0)
    parts = {
        "throttled": own.throttled_s - lower_median([each.throttled_s for each in theirs]),
        "core": own.queued_s - max(ratio * own.cpu_s, lower_median([t.queued_s for t in theirs])),
        "disk": own.disk_s - lower_median([each.disk_s for each in theirs]),
        "compute": more_cpu * (1 + ratio),
    }
    cause = max(parts, key=lambda name: parts[name])
    part = _ms(max(min(parts[cause], by), 0.0))
    if parts[cause] < EXPLAINS * by and own.queued_share > QUEUED and own.queued_s > by:
        return "core", (
            f"Like the others, it waits for a core, for {own.queued_share:.0%} of the time, and "
            "gets its turn later: its host has more processes than cores."
        )
    if parts[cause] < EXPLAINS * by:
        return "idle", (
            "It neither computes nor queues for a core more than they do: it sleeps, or waits for "
            "something outside hororing (its data loader, a file system, a lock, a device)."
        )
    return cause, {
        "throttled": f"The quota of its control group stops it for {part} of that (cpu.max).",
        "core": f"Other processes have its core for {part} of that: see what else runs there.",
        "disk": f"It waits for a disk for {part} of that.",
        "compute": (
            f"It computes for {_ms(own.cpu_s)} of that time, the others for {_ms(cpu_s)}: it has "
            "more work, or a slower processor."
        ),
    }[cause]


def of_waits(ranks: Mapping[int, Seen], step_s: float | None) -> list[Finding]:
    """Requests that some ranks have submitted for some time, and others have not."""
    requests: dict[str, dict[int, float]] = {}
    running: dict[int, tuple[str, float]] = {}
    for rank, seen in ranks.items():
        for each in seen.sample["pending"]:
            if each["kind"] == "submitted":
                requests.setdefault(each["request"], {})[rank] = each["for_ns"] / 1e9
            elif rank not in running:
                running[rank] = (each["request"], each["for_ns"] / 1e9)
    found: dict[tuple[int, ...], Finding] = {}
    for request, waits in sorted(requests.items(), key=lambda each: -max(each[1].values())):
        longest = max(waits.values())
        missing = sorted(rank for rank in ranks if rank not in waits and rank not in running)
        if longest < WAITING_S or not missing or tuple(missing) in found:
            continue
        hangs = longest > max(HANG_S, HANG_STEPS * (step_s or 0.0))
        members = ", as far as it belongs to the set" if OF_SET in request else ""
        first = ranks[missing[0]].sample
        text = (
            f"{listed(sorted(waits))} "
            f"{'has' if len(waits) == 1 else 'have'} waited {longest:.1f} s for "
            f"{listed(missing)}{members}, which {'has' if len(missing) == 1 else 'have'} not "
            f"submitted {request}. {_what(missing, ranks)}"
        )
        stack = first["stack"]
        found[tuple(missing)] = Finding(
            "hang" if hangs else "waiting", text, missing, _state_cause(first), stack
        )
    if not found and running and all(rank in running for rank in ranks):
        request, longest = max(running.values(), key=lambda each: each[1])
        if longest >= WAITING_S:
            found[()] = _of_running(ranks, request, longest, step_s)
    return list(found.values())


def _of_running(
    ranks: Mapping[int, Seen], request: str, longest: float, step_s: float | None
) -> Finding:
    """All ranks have begun a batch, which does not end."""
    stopped = sorted(r for r, seen in ranks.items() if seen.sample["kernel"]["state"] in "Tt")
    hangs = longest > max(HANG_S, HANG_STEPS * (step_s or 0.0))
    why = (
        _what(stopped, ranks)
        if stopped
        else "No rank is stopped: see the links, the slowest first."
    )
    text = f"{request} has been running for {longest:.1f} s. {why}"
    cause = "stopped" if stopped else "link"
    return Finding("hang" if hangs else "waiting", text, stopped, cause)


def _what(missing: list[int], ranks: Mapping[int, Seen]) -> str:
    """What the missing ranks do instead."""
    states: dict[str, list[int]] = {}
    for rank in missing:
        states.setdefault(ranks[rank].sample["kernel"]["state"], []).append(rank)
    return " ".join(
        _sentence(f"{listed(those)}: {_STATES.get(state, 'state ' + state)}")
        for state, those in states.items()
    )


def _state_cause(sample: Mapping[str, Any]) -> str:
    state = sample["kernel"]["state"]
    return {"T": "stopped", "t": "stopped", "D": "disk", "R": "compute"}.get(state, "idle")


def of_links(links: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Links that are slower than the others while they are busy."""
    most = max((each["bytes_per_s"] for each in links), default=0.0)
    data = [each for each in links if each["bytes_per_s"] > CARRIES * most]
    slow: list[tuple[Mapping[str, Any], float]] = []
    nearly = []
    for each in data:
        typical = upper_median([x["speed"] for x in data if x is not each])
        if each["busy_share"] > BUSY_LINK and each["speed"] <= NEARLY_SLOW * typical:
            nearly.append(each)
            if each["speed"] <= SLOW_LINK * typical:
                slow.append((each, typical))
    causes = [pair for pair in slow if not any(_waits_for(pair[0], each) for each in nearly)]
    if causes or len(nearly) > len(slow):  # else they wait for one another
        slow = causes
    busiest = max((each["busy_share"] for each, _ in slow), default=0.0)
    found = []
    for each, typical in sorted(slow, key=lambda pair: -pair[0]["busy_share"]):
        if each["busy_share"] < GUILTY * busiest:
            continue
        again = each["retransmits_per_s"]
        text = (
            f"slow link: rank {each['rank']} ({each['host']}) sends rank {each['peer']} "
            f"({each['peer_host']}) {_bytes(each['speed'])}/s while it sends, other links carry "
            f"{_bytes(typical)}/s. Round trip {_ms(each['rtt_s'])}, {again:.1f} packets sent again "
            "in a second."
        )
        found.append(Finding("link", text, [each["rank"], each["peer"]], "link"))
    return found


def _waits_for(link: Mapping[str, Any], slow: Mapping[str, Any]) -> bool:
    """Whether the acknowledgements of a link share the way of a slow one, to a third host."""
    shares = link["peer_host"] == slow["host"] and slow["peer_host"] != link["host"]
    return bool(shares and slow["busy_share"] >= GUILTY * link["busy_share"])


def of_hosts(hosts: Iterable[Mapping[str, Any]], ranks: Mapping[int, Seen]) -> list[Finding]:
    """Hosts whose cores are taken: by the hypervisor, or by too many processes."""
    found = []
    for host in hosts:
        here = [rank for rank, seen in ranks.items() if seen.sample["sampled_by"] == host["host"]]
        queued = upper_median([r.queued_share for i in here if (r := ranks[i].rates) is not None])
        if host["steal_share"] > STEAL:
            text = (
                f"host {host['host']}: the hypervisor takes {host['steal_share']:.0%} of its "
                "processor time (steal)."
            )
            found.append(Finding("host", text, here, "core"))
        elif queued > QUEUED:
            text = (
                f"host {host['host']}: its {host['cores']} cores are overcommitted; ranks wait "
                f"for one in {queued:.0%} of the time."
            )
            found.append(Finding("host", text, here, "core"))
    return found


def listed(ranks: Iterable[int]) -> str:
    """Ranks as a text, "ranks 0, 2-5"."""
    numbers = sorted(ranks)
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    texts = [f"{p[0]}-{p[-1]}" if len(p) > 2 else ", ".join(map(str, p)) for p in parts]
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {', '.join(texts)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 10 else f"{seconds:.1f} s"


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."

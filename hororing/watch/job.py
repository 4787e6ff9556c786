"""A job, as the samples of its hosts show it: the one thing that all views are made of."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from hororing.watch import findings, links
from hororing.watch.findings import Finding, Seen
from hororing.watch.rates import History, Rates, lower_median

KEPT_S = 3600  # of the time series, at one point per second
_NOTES = 200
# Rates of hosts and links are those between the first and the last of so many samples.
_HOST_SAMPLES = 3
_BUSY = 0.5  # a share of the time
# A host without a sample for so long is not seen any more.
_SILENT_S = 5.0
# The stacks of ranks that others wait for are asked for again after this time.
_STACKS_EVERY_S = 10.0
# A warning in a log is shown for so long.
_LOGGED_S = 600
# What is usual: the median of the steps in so many seconds, without the last ones. Only steps that
# move as many bytes, to this share, are alike: an evaluation is no slow training.
_USUAL_S, _RECENT_S, _LEAST_POINTS, _ALIKE = 600, 10, 10, 0.75
_PARTS = ("own_s", "waited_s", "batch_s")  # of a step, in the series
_KERNEL = {
    "cpu_s": "they compute for longer",
    "queued_s": "other processes have their cores",
    "disk_s": "they wait for a disk",
    "throttled_s": "the quota of their control group stops them (cpu.max)",
}


class Job:
    """What the samples of one job say. Not thread-safe."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.points: deque[dict[str, Any]] = deque(maxlen=KEPT_S)
        self.notes: deque[dict[str, Any]] = deque(maxlen=_NOTES)
        self.metrics: dict[str, deque[tuple[float, float]]] = {}
        self._histories: dict[int, History] = {}
        self._hosts: dict[str, dict[str, Any]] = {}  # the latest samples of each
        self._members: dict[int, tuple[str, int]] = {}
        self._asked: dict[int, float] = {}
        self._told: dict[int, int] = {}  # by rank: when the line of its log was written
        self._step_s: float | None = None  # when steps were last made
        self.state: dict[str, Any] = {}

    def feed(self, samples: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """Take the samples of hosts, at most one of each; return, and keep, the new state."""
        for sample in samples:
            past = self._hosts.get(sample["host"], {}).get("past", ())
            past = [*past, sample][-_HOST_SAMPLES:]
            self._hosts[sample["host"]] = {
                "last": sample, "before": past[0], "past": past, "at": time.monotonic(),
            }  # fmt: skip
            for rank in sample["ranks"]:
                self._histories.setdefault(rank["rank"], History()).add(rank)
        for name in [n for n, h in self._hosts.items() if time.monotonic() - h["at"] > _SILENT_S]:
            self._note(f"host {name} is not seen any more")
            del self._hosts[name]
        present = {
            rank["rank"]: rank for host in self._hosts.values() for rank in host["last"]["ranks"]
        }
        self._note_members(present)
        for rank in set(self._histories) - set(present):
            del self._histories[rank]
        ranks = {
            rank: Seen(sample, self._histories[rank].rates())
            for rank, sample in sorted(present.items())
        }
        self.state = self._state(ranks)
        return self.state

    def stacks_wanted(self) -> dict[str, list[int]]:
        """By host: the processes of ranks that others wait for, now and then."""
        now = time.monotonic()
        wanted: dict[str, list[int]] = {}
        late = {
            rank
            for each in self.state.get("findings", ())
            if each["kind"] in ("hang", "waiting")
            for rank in each["ranks"]
        }
        self._asked = {rank: at for rank, at in self._asked.items() if rank in late}
        for rank in sorted(late):
            if now - self._asked.get(rank, -1e9) >= _STACKS_EVERY_S:
                self._asked[rank] = now
                for each in self.state["ranks"]:
                    if each["rank"] == rank:
                        wanted.setdefault(each["sampled_by"], []).append(each["pid"])
        return wanted

    def _note(self, text: str) -> None:
        self.notes.append({"at": time.time(), "text": text})

    def _note_members(self, present: dict[int, dict[str, Any]]) -> None:
        now = {rank: (each["host"], each["pid"]) for rank, each in present.items()}
        if now == self._members:
            return
        gone = sorted(set(self._members) - set(now))
        come = sorted(set(now) - set(self._members))
        moved = sorted(r for r in set(now) & set(self._members) if now[r] != self._members[r])
        if gone:
            self._note(f"{findings.listed(gone)} left; {len(now)} are seen")
        if come:
            self._note(f"{findings.listed(come)} joined; {len(now)} are seen")
        if moved:
            self._note(f"{findings.listed(moved)}: now another process")
        self._members = now

    def _state(self, ranks: dict[int, Seen]) -> dict[str, Any]:
        rates = [seen.rates for seen in ranks.values() if seen.rates is not None]
        steps = [each.step_s for each in rates if each.step_s]
        step_s = lower_median(steps) if steps else None
        self._step_s = step_s or self._step_s
        hosts = [self._host(each) for each in self._hosts.values()]
        link_rates = self._links(ranks)
        late = findings.late(ranks)
        state = {
            "job": self.name,
            "at": time.time(),
            "command": next((seen.sample["command"] for seen in ranks.values()), ""),
            "size": max((seen.sample["size"] or 0 for seen in ranks.values()), default=0),
            "step_s": step_s,
            **self._totals(rates),
            "hosts": hosts,
            "ranks": [self._rank(rank, seen, late) for rank, seen in ranks.items()],
            "links": link_rates,
            "metrics": self._shown(ranks),
        }
        self._add_point(state, rates)
        usual = self._usual()
        state["usual_step_s"] = lower_median([each["step_s"] for each in usual]) or None
        slow = findings.of_links(link_rates)
        found = [
            *findings.of_waits(ranks, self._step_s),
            *slow,
            *findings.of_late_ranks(ranks, slow),
            *self._slower(usual),
            *findings.of_hosts(hosts, ranks),
        ]
        state["findings"] = [each.as_dict() for each in found]
        state["findings"] += self._logged(ranks)
        for each in found:
            if each.kind == "hang" and f"hang {each.ranks}" not in (n["key"] for n in self._keys()):
                self.notes.append(
                    {"at": time.time(), "text": f"hang: {each.text}", "key": f"hang {each.ranks}"}
                )
        return state

    def _logged(self, ranks: dict[int, Seen]) -> list[dict[str, Any]]:
        """The latest warnings in the logs of ranks; older ones are in the notes."""
        found: dict[str, Finding] = {}
        for rank, seen in ranks.items():
            told = seen.sample["shown"].get("told")
            if told is None:
                continue
            text = f"{logging.getLevelName(told['level'])} {told['text']}"
            if self._told.get(rank) != told["at_ns"]:
                self._told[rank] = told["at_ns"]
                self._note(text)
            if seen.sample["at_ns"] - told["at_ns"] < _LOGGED_S * 1e9:
                found.setdefault(text, Finding("log", text, [rank]))
        return [each.as_dict() for each in found.values()]

    def _keys(self) -> list[dict[str, Any]]:
        """Hangs that have been noted in the last minute."""
        return [n for n in self.notes if "key" in n and time.time() - n["at"] < 60]

    def _totals(self, rates: list[Rates]) -> dict[str, Any]:
        samples = [each.samples for each in rates if each.samples is not None]
        busy = [each.waited_s + each.batch_s for each in rates]
        hidden = [
            min(max(1 - each.blocked_s / part, 0.0), 1.0)
            for each, part in zip(rates, busy, strict=True)
            if part > 0
        ]
        return {
            "steps_per_s": lower_median([e.steps / e.seconds for e in rates]),
            "samples_per_s": sum(samples) if samples else None,
            "batches_per_s": lower_median([e.batches for e in rates]),
            "tensors_per_s": lower_median([e.tensors for e in rates]),
            "overlap": lower_median(hidden) if hidden else None,
            "shared_memory_bytes_per_s": sum(e.shared_memory for e in rates),
            "between_hosts_bytes_per_s": sum(e.between_hosts for e in rates),
            "other_bytes_per_s": sum(e.other for e in rates),
        }

    def _rank(self, rank: int, seen: Seen, late: dict[int, float]) -> dict[str, Any]:
        sample, rates = seen.sample, seen.rates
        still_s = sample["still_ns"] / 1e9
        doing = sample["last"]
        if sample["pending"]:
            first = sample["pending"][0]
            doing = f"{first['request']}, {first['kind']} {first['for_ns'] / 1e9:.1f} s ago"
            if len(sample["pending"]) > 1:
                doing += f", and {len(sample['pending']) - 1} more"
        elif still_s > 2:
            doing = f"nothing with hororing for {still_s:.0f} s; last: {sample['last']}"
        of_step = {name: getattr(rates, name, 0.0) for name in ("waited_s", "batch_s", "blocked_s")}
        return {
            "rank": rank,
            "host": sample["host"],
            "sampled_by": sample["sampled_by"],
            "pid": sample["pid"],
            "state": sample["kernel"]["state"],
            "totals": sample["totals"],
            "late_s": late.get(rank, 0.0),
            **of_step,
            "core_share": rates.core_share if rates else 0.0,
            "queued_share": rates.queued_share if rates else 0.0,
            "still_s": still_s,
            "doing": doing,
            "stack": sample["stack"],
        }

    def _host(self, of: dict[str, Any]) -> dict[str, Any]:
        last, before = of["last"], of["before"]
        seconds = max(last["at"] - before["at"], 1e-3)
        steal_s = (last["steal_ns"] - before["steal_ns"]) / 1e9
        return {
            "host": last["host"],
            "cores": last["cores"],
            "steal_share": steal_s / seconds / last["cores"],
            **{name: last[name] for name in last if name.endswith("_pressure")},
        }

    def _links(self, ranks: dict[int, Seen]) -> list[dict[str, Any]]:
        """Connections between ranks, with what they moved since the sample before."""
        rank_of = {(s.sample["sampled_by"], s.sample["pid"]): r for r, s in ranks.items()}

        def at(number: int) -> dict[tuple[Any, Any], dict[str, Any]]:
            sides = [
                (rank_of[host["last"]["host"], each["pid"]], each)
                for host in self._hosts.values()
                for each in host["past"][max(number, -len(host["past"]))]["links"]
                if (host["last"]["host"], each["pid"]) in rank_of
            ]
            return {(each["own"], each["other"]): each for each in links.joined(sides)}

        before, latest = at(-_HOST_SAMPLES), at(-2)
        found: dict[tuple[int, int], dict[str, Any]] = {}
        for key, each in at(-1).items():
            if key not in before:
                continue
            past = self._hosts[ranks[each["rank"]].sample["sampled_by"]]["past"]
            seconds, sent, busy_s = _sent(past[0], before[key], past[-1], each)
            again = (each["retransmits"] - before[key]["retransmits"]) / seconds
            # A link that was busy in the last second is judged by that second alone.
            recent = _sent(past[max(-2, -len(past))], latest.get(key, before[key]), past[-1], each)
            if recent[2] > _BUSY * recent[0]:
                seconds, sent, busy_s = recent
            pair = (each["rank"], each["peer"])
            of_pair = found.setdefault(pair, {
                "rank": pair[0], "peer": pair[1],
                "host": ranks[pair[0]].sample["host"], "peer_host": ranks[pair[1]].sample["host"],
                "bytes_per_s": 0.0, "busy_share": 0.0, "speed": 0.0, "rtt_s": 0.0,
                "retransmits_per_s": 0.0,
            })  # fmt: skip
            of_pair["bytes_per_s"] += sent / seconds
            of_pair["busy_share"] = max(of_pair["busy_share"], busy_s / seconds)
            of_pair["speed"] = max(of_pair["speed"], sent / busy_s if busy_s > 0 else 0.0)
            of_pair["rtt_s"] = max(of_pair["rtt_s"], each["rtt_ns"] / 1e9)
            of_pair["retransmits_per_s"] += again
        return list(found.values())

    def _shown(self, ranks: dict[int, Seen]) -> dict[str, Any]:
        """What scripts show: of the first rank that shows a number."""
        values: dict[str, float] = {}
        step = None
        for seen in ranks.values():
            shown = seen.sample["shown"]
            if step is None:
                step = shown.get("step")
            for name, value in shown.get("values", {}).items():
                values.setdefault(name, value)
        return {"step": step, "values": values}

    def _add_point(self, state: dict[str, Any], rates: list[Rates]) -> None:
        own = [each.step_s - each.waited_s - each.batch_s for each in rates if each.step_s]
        point = {
            name: state[name]
            for name in (
                "at", "step_s", "samples_per_s", "shared_memory_bytes_per_s",
                "between_hosts_bytes_per_s", "other_bytes_per_s", "overlap",
            )
        }  # fmt: skip
        point["own_s"] = max(own, default=0.0)
        for name in _KERNEL:
            point[name] = lower_median([getattr(each, name) for each in rates])
        point["waited_s"] = max((each.waited_s for each in rates), default=0.0)
        point["batch_s"] = lower_median([each.batch_s for each in rates])
        point["late_s"] = max((each["late_s"] for each in state["ranks"]), default=0.0)
        moved = [state[f"{way}_bytes_per_s"] for way in ("shared_memory", "between_hosts", "other")]
        point["step_bytes"] = sum(moved) * (state["step_s"] or 0.0)
        point["links_bytes_per_s"] = sum(each["bytes_per_s"] for each in state["links"])
        point["values"] = state["metrics"]["values"]
        self.points.append(point)

    def _usual(self) -> list[dict[str, Any]]:
        """Earlier points with steps like the present ones; none if there are too few."""
        recent = self.points[-1]
        moved = recent["step_bytes"]
        usual = [
            each
            for each in self.points
            if each["step_s"]
            and _RECENT_S < recent["at"] - each["at"] < _USUAL_S
            and _ALIKE * moved <= each["step_bytes"] <= moved / _ALIKE
        ]
        return usual if recent["step_s"] and len(usual) >= _LEAST_POINTS else []

    def _slower(self, usual: list[dict[str, Any]]) -> list[Finding]:
        """Steps that take longer than they did, and which part of them."""
        recent = self.points[-1]
        if not usual:
            return []
        before_s = lower_median([each["step_s"] for each in usual])
        if recent["step_s"] < findings.SLOWER * before_s:
            return []
        more = {
            name: recent[name] - lower_median([each[name] for each in usual])
            for name in (*_PARTS, *_KERNEL)
        }
        part = max(_PARTS, key=lambda name: more[name])
        why = {
            "own_s": "ranks take longer outside hororing",
            "waited_s": "ranks wait longer for a late one",
            "batch_s": "moving and reducing the data takes longer (links, memory, cores)",
        }[part]
        if part == "own_s":
            cause = max(_KERNEL, key=lambda name: more[name])
            explains = more[cause] > findings.EXPLAINS * more[part]
            outside = "they sleep, or wait for something else, such as their data loader"
            why += f" ({_KERNEL[cause] if explains else outside})"
        text = (
            f"steps take {recent['step_s'] * 1e3:.1f} ms, {before_s * 1e3:.1f} ms in the last "
            f"minutes: {why}, by {max(more[part], 0.0) * 1e3:.1f} ms."
        )
        return [Finding("slower", text, [], part)]


def _sent(
    of: dict[str, Any], first: dict[str, Any], at: dict[str, Any], last: dict[str, Any]
) -> tuple[float, int, float]:
    """Of a connection, between two samples of its host: s, bytes, s in which it was busy."""
    seconds = max(at["at"] - of["at"], 1e-3)
    return seconds, last["sent"] - first["sent"], (last["busy_ns"] - first["busy_ns"]) / 1e9

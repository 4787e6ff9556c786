"""Watch: compares the replicas of one training, step by step, and acts on what it finds.

The comparison after step n is part of the reduction of step n + 1. All ranks take part in that, so
none waits for one that has left a step out: the number of steps that each has taken is compared,
too. Reductions are counted from `init` or `join`, which all ranks call, so that those which have
just joined an elastic job count alike.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

import hororing.numpy as hvd
from hororing._engine import state, statistics, timeline
from hororing._engine.logs import logger
from hororing._requests import arguments, handles
from hororing._requests.process_sets import ProcessSet
from hororing.errors import MismatchError
from hororing.guard import comparison, findings, sums
from hororing.guard.comparison import Bytes, Item
from hororing.guard.findings import Finding, NonFinite
from hororing.guard.options import Options
from hororing.guard.sums import Note, Sum

_VALUES: Final = 8  # of a setting, in a finding
_KEPT: Final = 1000  # findings
_TOLD: Final = 50  # gradients, in a finding


class Told(NamedTuple):
    """What a rank tells of its gradients that are not finite, and of sums."""

    scale: float | None
    notes: Sequence[Note]
    sums: Sequence[Sum] = ()


class Source(Protocol):
    """The tensors of a framework. `remedy` sends the state of one rank to all others."""

    remedy: str

    def begin(self) -> None:
        """Hear that ranks start to count steps: from 0."""

    def items(self) -> Iterable[Item]:
        """Return what is compared, with digests. Names are unique."""

    def read(self, name: str) -> Bytes:
        """Return a copy of the bytes of a tensor, in C order."""

    def write(self, name: str, raw: Bytes) -> None:
        """Overwrite a tensor."""

    def settle(self) -> None:
        """Wait for devices until all gradients that are not finite are noted."""

    def sums(self) -> Sequence[Sum]:
        """Return the sums of gradients that are not finite, since the last call."""

    def scale(self) -> float | None:
        """Return what losses are multiplied by now; None: they are not."""

    def replaced(self) -> Sequence[str]:
        """Return the parameters of the model that are not those of its optimizer."""

    def keep(self, finding: Finding | NonFinite) -> None:
        """Write what the step has computed with, if the script wants that; on a rank concerned."""

    def excluded(self) -> Mapping[str, Sequence[str]]:
        """Return what is not compared, by reason."""


class Watch:
    """Compares the replicas of one training. `name` is the same on all ranks, and unique."""

    def __init__(
        self, name: str, source: Source, options: Options, process_set: ProcessSet
    ) -> None:
        self.options = options
        self.findings: list[Finding | NonFinite] = []
        self.last_equal: int | None = None
        self._name = f"guard.{name}"
        self.source, self._process_set = source, process_set
        self.look: Any = None  # of the adapter's optimizer: what it does with a gradient
        self._era = -1  # the count of reductions begins with it
        self._first = 0  # the number of reductions when it began
        self._before = 0  # steps of earlier eras
        self._handle = 0
        self._items: list[Item] = []
        self._compared = 0  # tensors, the last time
        self._ignored: list[str] = []
        self._replaced: Sequence[str] = ()
        self._counts: Counter[str] = Counter()
        self._spent_s = 0.0
        self._reported: dict[str, tuple[str, ...]] = {}  # names in the latest warning, by kind
        self._flags = 0  # the handle of the latest
        self._notes: list[Note] = []  # of this rank, since the last flags
        self._sent: list[Note] = []
        self._in_a_row = 0  # steps with such gradients
        self._skips = False

    @property
    def _alone(self) -> bool:
        """Whether this rank trains with no other."""
        return len(self._process_set.ranks) < 2 or not self._process_set.included()

    # -- in a reduction ---------------------------------------------------------------------------

    def send(self, reductions: int) -> None:
        """Send what is due after so many reductions, in the next one. Does not block."""
        self.send_digests(reductions)
        self.send_flags()

    def is_due(self, steps: int) -> bool:
        """Whether replicas are to be compared after so many steps."""
        every = self.options.every
        return bool(every and steps and (steps == 1 or steps % every == 0))

    def enter(self, reductions: int) -> None:
        """Count from here, if this is the first step since `init` or `join`."""
        if self._era != state.process.era:
            self._era, self._first, self._handle = state.process.era, reductions, 0
            self._flags, self._sent = 0, []
            self._before = self._counts["steps"]
            self.source.begin()

    def send_digests(self, reductions: int) -> None:
        """Send the digests of replicas, if they are due. Does not block."""
        self.enter(reductions)
        count = reductions - self._first
        self._counts["steps"] = self._before + count
        if self.is_due(count):
            self.start(self._counts["steps"])

    def receive(self) -> None:
        """Wait for what the others have sent, if this rank has. Raises as the options say."""
        if self._flags:
            self._receive_flags()
        if self._handle:
            self.finish()

    def check(self, step: int) -> None:
        """Compare now. Blocks; all ranks must call it."""
        self._counts["steps"] = step
        self.start(step)
        self.receive()

    def start(self, step: int) -> None:
        """Send the digests of the state after `step`. Does not block."""
        if self._alone:
            return
        began = time.perf_counter()
        items = sorted(self.source.items(), key=lambda each: each.name)
        self._items = [each for each in items if not self.options.ignores(each.name)]
        self._compared = len(self._items)
        self._ignored = [each.name for each in items if self.options.ignores(each.name)]
        self._replaced = self.source.replaced()
        self._handle = comparison.start(
            self._name, self._items, step, len(self._replaced), self._process_set
        )
        self._spent_s += time.perf_counter() - began

    def finish(self) -> None:
        """Wait; find what differs, if something does, and act.

        After a KeyboardInterrupt, another call continues.
        """
        summary = comparison.finish(self._handle)
        self._handle = 0
        items, self._items = self._items, []
        self._counts["comparisons"] += 1
        self._counts["steps"] = max(summary.step, self._counts["steps"])
        statistics.show("guard", self, self._name, self._counts)
        if summary.equal and not summary.strangers:
            self.last_equal = summary.step
            self._reported.pop("divergence", None)
            return
        finding = Finding("divergence", summary.step, self.last_equal, compared=len(items))
        if summary.same_names:
            self._compare(finding, items)
        else:
            self._compare_names(finding, items)
        self.act(finding)

    # -- gradients that are not finite ------------------------------------------------------------

    def note(self, note: Note) -> None:
        """Note a gradient of this rank that is not finite. Any thread may call it."""
        self._notes.append(note)

    def send_flags(self) -> None:
        """Tell the others whether this rank has noted a gradient. Does not block."""
        if self.options.on_nonfinite is None or self._flags:
            return
        self.source.settle()
        self._sent, self._notes = self._notes, []
        if self._alone:
            sent, self._sent = self._sent, []
            self.exchange_notes(0, bool(sent), sent)
            return
        self._flags = hvd.allreduce_async(
            np.array([len(self._sent)]), name=f"{self._name}.finite", op=arguments.Max,
            process_set=self._process_set,
        )  # fmt: skip

    def _receive_flags(self) -> None:
        most = int(handles.wait(self._flags)[0])
        self._flags = 0
        found = self.source.sums()
        sent, self._sent = self._sent, []
        self.exchange_notes(0, most > 0 or bool(found), sent, found)

    def check_sums(self, step: int) -> None:
        """Report the sums that were not finite since the last call. Blocks; all ranks must call it.

        Ranks need not have seen the same ones.
        """
        if self._alone:
            return
        self.enter(0)
        found = self.source.sums()
        most = hvd.allreduce(
            np.array([len(found)]), name=f"{self._name}.finite", op=arguments.Max,
            process_set=self._process_set,
        )  # fmt: skip
        self.exchange_notes(step - 1, bool(most[0]), (), found)

    def exchange_notes(
        self, steps: int, any_found: bool, notes: Sequence[Note], found: Sequence[Sum] = ()
    ) -> None:
        """Tell one another, if any rank has found something, and act on it. Blocks."""
        told: dict[int, Any] = {}
        if any_found:
            mine = Told(self.source.scale(), notes[:_TOLD], found[:_TOLD])
            told = {hvd.rank(): mine}
            if not self._alone:
                told = comparison.gather(self._name, mine, self._process_set)
        self._act_on_notes(steps, {rank: Told(*each) for rank, each in told.items()})

    def _act_on_notes(self, steps: int, told: Mapping[int, Told]) -> None:
        """Do what the options say, on all ranks, after so many steps before this one.

        If `told` is empty, all gradients were finite.
        """
        self._counts["steps"] = max(steps, self._counts["steps"])
        if not told:
            self._in_a_row = 0
            self._reported.pop("nonfinite", None)
            return
        scales = [each.scale for each in told.values() if each.scale is not None]
        if scales and max(scales) > 1:  # an overflow, after which GradScaler lowers its scale
            self._counts["overflows"] += 1
            return
        self._in_a_row += 1
        finding = self._describe_nonfinite(told)
        chosen = self.options.on_nonfinite
        self._note(finding, (finding.tensor, *map(str, finding.ranks)), raises=chosen == "error")
        if chosen == "error":
            raise FloatingPointError(str(finding))
        if finding.skipped and self._in_a_row > self.options.max_skips:
            raise FloatingPointError(
                f"{finding}; {self.options.max_skips} steps before it were skipped, the most in a "
                "row (max_skips)"
            )
        self._skips = finding.skipped and not scales  # else GradScaler skips it
        self._counts["skipped"] += finding.skipped

    def _describe_nonfinite(self, told: Mapping[int, Told]) -> NonFinite:
        found = sums.by_rank({rank: each.sums for rank, each in told.items()})
        notes = {rank: [*each.notes, *found.get(rank, ())] for rank, each in told.items()}
        ranks = [rank for rank, each in notes.items() if each]
        names = [name for rank in ranks for name, *_ in notes[rank]]
        names += [each[0] for some in told.values() for each in some.sums]
        first = Note(names[0], "not finite", 0, 0, None)
        if ranks:
            first = Note(*notes[ranks[0]][0])
        others = dict.fromkeys(names)
        others.pop(first.name, None)
        hosts = state.host_names()
        return NonFinite(
            self._counts["steps"] + 1, first.name, ranks, [hosts[rank] for rank in ranks],
            first.value, first.elements, first.size, first.finite_above, list(others),
            self.options.on_nonfinite == "skip",
        )  # fmt: skip

    def take_skip(self) -> bool:
        """Return whether the present step is to be skipped, once."""
        skips, self._skips = self._skips, False
        return skips

    # -- what differs -----------------------------------------------------------------------------

    def _compare(self, finding: Finding, items: Sequence[Item]) -> None:
        """Find which tensors differ, on which ranks."""
        table = comparison.rows(self._name, items, len(self._replaced), self._process_set)
        replaced = self._names_replaced({rank: row[0] for rank, row in table.items()})
        found = findings.differences(items, {rank: row[1:] for rank, row in table.items()})
        by_name = {each.name: each for each in items}
        one_bit = False
        for at, each in enumerate(found):
            is_number = each.of == "setting"
            if at and not is_number:
                continue
            roots = [group[0] for group in each.groups[: _VALUES if is_number else 2]]
            mine, kind = self.source.read(each.name), by_name[each.name].kind
            raw = comparison.exchange(self._name, mine, roots, self._process_set)
            if is_number:
                each.values = [
                    one.view(np.float64).item() for one in raw
                ]  # all numbers have 64 bits
            else:
                one_bit = findings.measure(finding, kind, *raw)
        self._describe(finding, found, items, replaced, one_bit)

    def _describe(
        self,
        finding: Finding,
        found: list[findings.Difference],
        items: Sequence[Item],
        replaced: Mapping[str, Sequence[int]],
        one_bit: bool,
    ) -> None:
        if not found:  # only replaced parameters
            (name, ranks), *_ = replaced.items()
            found = [findings.Difference("parameter", name, [sorted(self._process_set.ranks)])]
            finding.ranks = list(ranks)
        else:
            finding.ranks = found[0].odd if found[0].majority else []
        hosts = state.host_names()
        finding.differences, finding.tensor = found, found[0].name
        finding.hosts = [hosts[rank] for rank in finding.ranks]
        odd = {each.name for each in found}
        prefix = f"{finding.tensor}: "
        state_of = [each.name for each in items if each.name.startswith(prefix)]
        finding.equal_state = [each.removeprefix(prefix) for each in state_of if each not in odd]
        finding.causes = findings.causes(finding, replaced, self.source.remedy, one_bit)

    def _names_replaced(self, counts: Mapping[int, int]) -> dict[str, list[int]]:
        """Return the ranks that have replaced each parameter."""
        if not any(counts.values()):
            return {}
        found = comparison.gather(self._name, list(self._replaced), self._process_set)
        by_name: dict[str, list[int]] = {}
        for rank, names in found.items():
            for name in names:
                by_name.setdefault(name, []).append(rank)
        return by_name

    def _compare_names(self, finding: Finding, items: Sequence[Item]) -> None:
        """Find which tensors only some ranks have, or have in another shape."""
        mine = [(each.of, each.name, each.kind) for each in items]
        found = comparison.gather(self._name, mine, self._process_set)
        by_item: dict[tuple[str, str, str], list[int]] = {}
        for rank, theirs in found.items():
            for each in theirs:
                by_item.setdefault(tuple(each), []).append(rank)
        differences = []
        for (of, name, kind), ranks in by_item.items():
            lacking = [rank for rank in found if rank not in ranks]
            if lacking:
                groups = sorted([ranks, lacking], key=lambda each: (-len(each), each))
                other = "is missing" if ranks is groups[0] else "exists"
                differences.append(
                    findings.Difference(of, f"{name} ({kind}, which {other})", groups)
                )
        differences.sort(key=lambda each: findings.ORDER.index(each.of))
        self._describe(finding, differences, [], {}, one_bit=False)

    # -- what is done about it --------------------------------------------------------------------

    def act(self, finding: Finding) -> None:
        """Do what the options say, on all ranks."""
        chosen = self.options.on_divergence
        if chosen == "repair":
            self._repair(finding)
        names = tuple(each.name for each in finding.differences)
        self._note(finding, names, raises=chosen == "error")
        if callable(chosen):
            chosen(finding)
        elif chosen == "error" or (chosen == "repair" and not finding.repaired):
            error = MismatchError(f"{finding}")
            error.rank = finding.ranks[0] if finding.ranks else -1
            raise error

    def _repair(self, finding: Finding) -> None:
        """Give all ranks the values of the majority, if everything that differs has one."""
        known = {each.name for each in self.source.items()}
        wrong = [each for each in finding.differences if len(each.groups) > 1]
        if len(wrong) < len(finding.differences) or any(
            not each.majority or each.name not in known for each in wrong
        ):
            finding.repaired = False
            return
        for each in wrong:
            mine = self.source.read(each.name)
            (right,) = comparison.exchange(self._name, mine, [each.majority[0]], self._process_set)
            if hvd.rank() not in each.majority:
                self.source.write(each.name, right)
        finding.repaired = True
        self.last_equal = finding.step

    def _note(self, finding: Finding | NonFinite, key: tuple[str, ...], *, raises: bool) -> None:
        """Put it into the timeline and the statistics; and into the log, of one rank.

        Not again while `key` stays the same, nor what is raised.
        """
        self.findings.append(finding)
        del self.findings[:-_KEPT]
        self._counts[finding.kind] += 1
        if not finding.ranks or hvd.rank() in finding.ranks:
            self.source.keep(finding)
        text = str(finding)
        if timeline.enabled():
            timeline.trace_guard(text)
        is_new = key != self._reported.get(finding.kind)
        self._reported[finding.kind] = key
        if is_new and not raises:
            level = logger.warning if hvd.rank() == min(self._process_set.ranks) else logger.info
            level("%s", text, extra={"finding": finding.as_dict()})

    def report(self) -> dict[str, Any]:
        """Return what was done and found until now, as plain data. Does not block."""
        excluded = {reason: list(names) for reason, names in self.source.excluded().items()}
        if self._ignored:
            excluded["ignore"] = self._ignored
        return {
            "steps": self._counts["steps"],
            "comparisons": self._counts["comparisons"],
            "last_equal": self.last_equal,
            "skipped": self._counts["skipped"],
            "overflows": self._counts["overflows"],
            "compared": self._compared,
            "excluded": excluded,
            "findings": [each.as_dict() for each in self.findings],
            "seconds": self._spent_s,
        }

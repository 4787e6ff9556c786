"""Training steps through the real coordinator: reports in, agreements out, in simulated time.

What the engine's thread does, as csrc/engine/loop.cc: report what was submitted since, when it is
time to (csrc/engine/report_pace.h, csrc/negotiation/planned_reports.h), decide, carry out what was
agreed, batch after batch, tell the coordinator how long each took, and look again; sleep until
something is submitted, or a deadline. After backward the step waits for its gradients. All ranks
are alike, so a coordinator of one rank decides as one of N would; what N ranks cost is added as
negotiation.

    engine, ready   HORORING_FUSION=ready
    engine, plan    HORORING_FUSION=plan: learned from the first steps, with what batches took
"""

from __future__ import annotations

import statistics
from types import ModuleType

from replay import FLOAT32, FUSION_BYTES, Cost, Negotiation, Step

POLICIES = {"engine, ready": False, "engine, plan": True}
STEPS = 12  # enough to learn, plan and compare
HOLD_NS = 10**6  # CYCLE_TIME_MS
RUN, PLAN = 0, 6  # kinds of decisions
NS = 1e9


class Engine:
    """Rank 0's coordinator and the loop around it."""

    def __init__(
        self, core: ModuleType, step: Step, cost: Cost, negotiation: Negotiation, plan: bool
    ) -> None:
        self._core, self._step, self._cost, self._negotiation = core, step, cost, negotiation
        self._coordinator = core.Coordinator(
            1, cache_capacity=len(step.nbytes) + 1, fusion_bytes=FUSION_BYTES,
            hold_ns=HOLD_NS, plan=plan,
        )  # fmt: skip
        self._pace = core.ReportPace(HOLD_NS)
        self._planned = core.PlannedReports()
        self._ids: dict[int, int] = {}  # of gradients, by their cache ids
        self._numbers: dict[int, int] = {}

    def run_step(self, begin_s: float) -> float:
        """One backward pass that begins then; return when its last batch is done."""
        count = len(self._step.nbytes)
        ready = [begin_s + after for after in self._step.ready_s]
        now, submitted, reported, done = begin_s, 0, 0, 0
        while done < count:
            while submitted < count and ready[submitted] <= now + 1e-12:
                self._planned.add(self._ids.get(submitted, 0), round(ready[submitted] * NS))
                submitted += 1
            wake = ready[submitted] if submitted < count else begin_s + 2e6
            if submitted > reported:
                due = self._due(ready, range(reported, submitted), round(now * NS))
                if submitted == count or round(now * NS) >= due:
                    self._report(ready, range(reported, submitted), now)
                    reported = submitted
                else:
                    wake = min(wake, due / NS)
            decisions = self._coordinator.decide(round(now * NS))
            if decisions:
                self._pace.answered()
                decided = [self._number(each) for each in decisions if each.kind == RUN]
                for plan in (each for each in decisions if each.kind == PLAN):
                    self._learn(plan, ready, range(done, reported), range(reported, submitted))
                done += len(decided)
                if decided:
                    now = self._carry_out(decided, now)
                continue
            wake = min(wake, self._coordinator.next_deadline() / NS)
            if wake > begin_s + 1e6:
                raise RuntimeError(f"{count - done} gradients are never agreed upon")
            now = max(now + 1e-9, wake)
        return now

    def _due(self, ready: list[float], numbers: range, now_ns: int) -> int:
        """When what is submitted is reported, in nanoseconds; while nobody waits."""
        if self._planned.any() and not self._planned.others():
            return self._planned.due()
        return self._pace.due(round(ready[numbers[0]] * NS), len(numbers), now_ns)

    def _learn(self, plan: object, ready: list[float], under_way: range, left: range) -> None:
        """Take a new plan, in the midst of a step."""
        self._planned.learn(plan)
        for numbers in (under_way, left):
            self._planned.reported()
            for number in numbers:
                self._planned.add(self._ids.get(number, 0), round(ready[number] * NS))

    def _report(self, ready: list[float], numbers: range, now: float) -> None:
        fresh, cached, ages = [], [], []
        for number in numbers:
            if number in self._ids:
                cached.append(self._ids[number])
                ages.append(round((now - ready[number]) * 1e6))
            else:
                shape = [self._step.nbytes[number] // 4]
                fresh.append(self._core.Request(f"gradient.{number}", 0, FLOAT32, shape))
        self._coordinator.receive(0, fresh, cached, now=round(now * NS), ages_us=ages)
        self._pace.told(round(now * NS))
        self._planned.reported()

    def _number(self, decision: object) -> int:
        if decision.name:
            number = int(decision.name.split(".")[1])
            self._ids[number] = decision.cache_id
            self._numbers[decision.cache_id] = number
        return self._numbers[decision.cache_id]

    def _carry_out(self, decided: list[int], now: float) -> float:
        now += self._negotiation(len(decided))
        sizes = [self._step.nbytes[number] for number in decided]
        for batch in self._core.plan_fusion([(FLOAT32, size) for size in sizes], FUSION_BYTES):
            nbytes = sum(sizes[index] for index in batch)
            begin = now
            now += self._cost(nbytes)
            self._coordinator.ran(0, nbytes, round(begin * NS), round(now * NS))
        return now


def efficiency(
    policy: str, core: ModuleType, step: Step, cost: Cost, negotiation: Negotiation
) -> float:
    """Time of a step without communication by that with it, once the engine has settled."""
    engine = Engine(core, step, cost, negotiation, POLICIES[policy])
    now, took = 0.0, []
    for _ in range(STEPS):
        begin = now
        backward = begin + step.forward_s
        now = max(backward + step.backward_s, engine.run_step(backward))
        took.append(now - begin)
    return (step.forward_s + step.backward_s) / statistics.median(took[-3:])

"""Training steps through the real coordinator: reports in, agreements out, in simulated time.

The engine does what csrc/engine/loop.cc does: it reports new submissions when a report is due
(csrc/engine/report_pace.h), decides, carries out the agreed batches one after the other, and starts
again. It sleeps until a tensor is submitted or a report is due. After backward the step waits for
its gradients. All ranks are alike, so a coordinator of one rank decides like one of N ranks; the
cost of N ranks is added as negotiation.
"""

from __future__ import annotations

import statistics
from types import ModuleType

from replay import FLOAT32, FUSION_BYTES, Cost, Negotiation, Step

POLICY = "engine, ready"
STEPS = 5  # the first one reports names
HOLD_NS = 10**6  # CYCLE_TIME_MS
NS = 1e9


class Engine:
    """Rank 0's coordinator and the loop around it."""

    def __init__(self, core: ModuleType, step: Step, cost: Cost, negotiation: Negotiation) -> None:
        self._core, self._step, self._cost, self._negotiation = core, step, cost, negotiation
        self._coordinator = core.Coordinator(1, cache_capacity=len(step.nbytes) + 1)
        self._pace = core.ReportPace(HOLD_NS)
        self._ids: dict[int, int] = {}  # cache ids, by the number of the gradient
        self._numbers: dict[int, int] = {}

    def run_step(self, begin_s: float) -> float:
        """Simulate a backward pass that begins at `begin_s`; return the end of its last batch."""
        count = len(self._step.nbytes)
        ready = [begin_s + after for after in self._step.ready_s]
        now, submitted, reported, done = begin_s, 0, 0, 0
        while done < count:
            while submitted < count and ready[submitted] <= now + 1e-12:
                submitted += 1
            wake = ready[submitted] if submitted < count else begin_s + 2e6
            if submitted > reported:
                waiting = submitted - reported
                due = self._pace.due(round(ready[reported] * NS), waiting, round(now * NS))
                if submitted == count or round(now * NS) >= due:
                    self._report(range(reported, submitted), now)
                    reported = submitted
                else:
                    wake = min(wake, due / NS)
            decided = [self._number(each) for each in self._coordinator.decide()]
            if decided:
                self._pace.on_answer()
                done += len(decided)
                now = self._carry_out(decided, now)
                continue
            if wake > begin_s + 1e6:
                raise RuntimeError(f"{count - done} gradients are never agreed upon")
            now = max(now + 1e-9, wake)
        return now

    def _report(self, numbers: range, now: float) -> None:
        fresh, cached = [], []
        for number in numbers:
            if number in self._ids:
                cached.append(self._ids[number])
            else:
                shape = [self._step.nbytes[number] // 4]
                fresh.append(self._core.Request(f"gradient.{number}", 0, FLOAT32, shape))
        self._coordinator.receive(0, fresh, cached, now=round(now * NS))
        self._pace.on_report_sent(round(now * NS))

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
            now += self._cost(sum(sizes[index] for index in batch))
        return now


def efficiency(core: ModuleType, step: Step, cost: Cost, negotiation: Negotiation) -> float:
    """Return the time of a step without communication over that with it, after the first steps."""
    engine = Engine(core, step, cost, negotiation)
    now, took = 0.0, []
    for _ in range(STEPS):
        begin = now
        backward = begin + step.forward_s
        now = max(backward + step.backward_s, engine.run_step(backward))
        took.append(now - begin)
    return (step.forward_s + step.backward_s) / statistics.median(took[-3:])

"""Population-based training (Jaderberg et al. 2017, arXiv:1711.09846), generation by generation.

In each generation all members train for some steps. Then the worst quarter takes over weights and
values of members drawn from the best quarter, with the values changed. A generation begins when the
one before has ended, so the result does not depend on the number of process sets.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from hororing.toolkit.search.plans import Assignment
from hororing.toolkit.search.trial import Outcome

_SHARE = 0.25  # of the members: the worst, and the best
_FACTORS = (0.8, 1.2)  # of a number that is changed
_RESAMPLE = 0.25  # probability of a new draw instead


@dataclass
class _Member:
    params: dict[str, Any]
    trial: Any  # Optuna's, in the first generation
    status: str = "ready"
    value: float | None = None
    state: tuple[int, int] | None = None
    state_at: int | None = None
    first_step: int = 0
    parent: int | None = None


class Population:
    """Members that train in generations.

    Parameters
    ----------
    interval : int
        Number of reports in a generation.
    """

    def __init__(
        self,
        optuna: Any,
        study: Any,
        ranges: dict[str, Any],
        members: int,
        seed: int,
        interval: int,
        maximize: bool,
    ) -> None:
        self._optuna, self._study, self._ranges = optuna, study, ranges
        self._seed, self._interval = seed, interval
        self._sign = -1.0 if maximize else 1.0
        self._random = random.Random(seed)
        self._generation = 0
        asked = [study.ask(ranges) for _ in range(members)]
        self._members = [_Member(dict(trial.params), trial) for trial in asked]
        self._number = 0

    def next(self, process_set: int) -> Assignment | None:
        """A member whose weights are on the set, if there is one; else any that is ready."""
        ready = [i for i, each in enumerate(self._members) if each.status == "ready"]
        if not ready:
            return None
        here = [i for i in ready if self._members[i].state_at == process_set]
        number = (here or ready)[0]
        member = self._members[number]
        member.status = "running"
        given = Assignment(
            self._number, member.params, self._seed + number, (number, self._generation),
            member.state, member.state_at, member.first_step, member.parent, last=member.value,
        )  # fmt: skip
        self._number += 1
        return given

    def report(self, trial: Assignment, step: int, value: float) -> str:
        """Interrupt it when its generation ends."""
        assert trial.key is not None
        self._members[trial.key[0]].first_step = step + 1
        return "go on" if trial.steps % self._interval else "pause"

    def tell(self, trial: Assignment, status: str, value: float | None, process_set: int) -> None:
        """Note the result; the last one of a generation begins the next."""
        assert trial.key is not None
        member = self._members[trial.key[0]]
        member.status = status
        member.value = None if status == "failed" else trial.last if value is None else value
        if status == "paused":
            member.state, member.state_at = trial.key, process_set
        self._tell_optuna(member, trial)
        if all(each.status not in ("ready", "running") for each in self._members):
            self._begin_generation()

    def best(self, outcomes: list[Outcome]) -> tuple[dict[str, Any], float] | None:
        """That of the members at their ends, as it has the weights."""
        ended = [(i, each) for i, each in enumerate(self._members) if each.value is not None]
        if not ended:
            return None

        def order(member: tuple[int, _Member]) -> tuple[float, bool]:
            # Of equals, the one whose values led to these weights, not one that has just got them.
            number, each = member
            return self._sign * float(each.value or 0.0), each.parent != number

        _, found = min(ended, key=order)
        return dict(found.params), float(found.value or 0.0)

    def _tell_optuna(self, member: _Member, trial: Assignment) -> None:
        states = self._optuna.trial.TrialState
        state = states.FAIL if member.value is None else states.COMPLETE
        if member.trial is not None:
            self._study.tell(member.trial, member.value, state=state)
            member.trial = None
            return
        assert trial.key is not None
        about = {"member": trial.key[0], "generation": trial.key[1], "parent": trial.parent}
        create = self._optuna.trial.create_trial
        self._study.add_trial(create(
            params=trial.params, distributions=self._ranges, value=member.value, state=state,
            user_attrs=about,
        ))  # fmt: skip

    def _begin_generation(self) -> None:
        going = [i for i, each in enumerate(self._members) if each.status == "paused"]
        if not going:
            return
        self._generation += 1
        order = sorted(going, key=lambda i: self._sign * float(self._members[i].value or 0.0))
        share = max(1, int(len(self._members) * _SHARE)) if len(self._members) > 1 else 0
        best = order[:share]
        worst = [i for i, each in enumerate(self._members) if each.status == "failed"]
        worst += order[len(best) :][::-1][: max(0, share - len(worst))]
        for number in going:
            self._members[number].status, self._members[number].parent = "ready", number
        for number in worst:
            parent = self._random.choice(best)
            better = self._members[parent]
            self._members[number] = _Member(
                self._changed(better.params), None, value=better.value, state=better.state,
                state_at=better.state_at, first_step=better.first_step, parent=parent,
            )  # fmt: skip

    def _changed(self, params: dict[str, Any]) -> dict[str, Any]:
        """Other values near `params`: numbers by a factor, or now and then a new draw."""
        found = {}
        for name, value in params.items():
            among = self._ranges[name]
            choices = getattr(among, "choices", None)
            anew = self._random.random() < _RESAMPLE
            factor = self._random.choice(_FACTORS)
            place = self._random.random()
            if choices is not None:
                found[name] = self._random.choice(choices) if anew else value
                continue
            low, high = among.low, among.high
            if anew:
                drawn = low * (high / low) ** place if among.log else low + (high - low) * place
            else:
                drawn = value * factor
            drawn = min(max(drawn, low), high)
            found[name] = round(drawn) if isinstance(value, int) else drawn
        return found

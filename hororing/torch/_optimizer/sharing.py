"""Who reduces a parameter that several optimizers have.

Note [Shared parameters]. If several optimizers have a parameter, the newest of them reduces it, as
one of its gradients: an older one may be garbage on some ranks. The step of an older one makes sure
that the newest has reduced. If the optimizers reduce differently (another operation or process
set), each reduces when it steps, and has no hooks.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from typing import Protocol

# Of each parameter, by id(parameter). Their owners hold the parameter, so the id stays valid.
_of_parameter: dict[int, set[Sharing]] = {}
_numbers = itertools.count()


class Owner(Protocol):
    """What reduces the gradients of an optimizer."""

    reductions: int  # so far

    def rearrange(self) -> None: ...  # its `Sharing` may have decided anew
    def send_remaining(self) -> None: ...
    def finish(self) -> None: ...
    def abandon(self) -> None: ...


class Sharing:
    """What one optimizer reduces of what it has. `way` is equal if optimizers reduce alike."""

    def __init__(self, owner: Owner, way: object) -> None:
        self._owner = weakref.ref(owner)
        self.in_step = False  # others reduce differently, so each reduces in its step
        self._way = way
        self._number = next(_numbers)  # the newest has the largest
        self._held: dict[int, None] = {}  # the parameters that the optimizer has
        self._left_out: set[int] = set()  # those of them that newer ones reduce
        # These, with their number of reductions at the beginning of this one's step.
        self._newer: dict[Sharing, int] = {}

    @property
    def owner(self) -> Owner:
        """The reducer. REQUIRES: its optimizer has parameters."""
        owner = self._owner()
        assert owner is not None
        return owner

    def hold(self, keys: Iterable[int]) -> bool:
        """Note which parameters the optimizer has; make the others that have them decide again.

        Returns whether this one must decide again, too.
        """
        held = dict.fromkeys(keys)
        changed = held.keys() ^ self._held.keys()
        self._held = held
        others: set[Sharing] = set()
        for key in changed:
            sharings = _of_parameter.setdefault(key, set())
            others |= sharings
            sharings ^= {self}
            if not sharings:
                del _of_parameter[key]
        for other in others - {self}:
            other.owner.rearrange()
        return bool(changed)

    def decide(self) -> None:
        """Choose among all that have one of the parameters."""
        self.in_step, self._left_out = False, set()
        newer: dict[Sharing, int] = {}
        for key in self._held:
            rivals = _of_parameter[key]
            for other in rivals if len(rivals) > 1 else ():
                if other._way != self._way:
                    self.in_step = True
                elif other._number > self._number:
                    self._left_out.add(key)
                    newer[other] = self._newer.get(other, other.owner.reductions)
        if self.in_step:
            self._left_out, newer = set(), {}
        self._newer = newer

    def reduces(self, key: int) -> bool:
        """Whether the owner reduces this parameter."""
        return key in self._held and key not in self._left_out

    def begin_step(self) -> None:
        """Count the reductions of newer ones from now on."""
        for other in self._newer:
            self._newer[other] = other.owner.reductions

    def due(self) -> list[Owner]:
        """The newer ones that have not reduced in this step."""
        newer = [(other.owner, count) for other, count in self._newer.items()]
        return [owner for owner, count in newer if owner.reductions == count]


def owners() -> list[Owner]:
    """Return all that have a parameter."""
    return [each.owner for each in set[Sharing]().union(*_of_parameter.values())]

"""Stragglers on purpose: a rank sleeps now and then before its step.

What happens to rank r in step k is a pure function of (seed, r, k), so that runs can be repeated,
resumed, and replayed with arithmetic alone (`StragglerInjector.delays`, simulator.py).
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import hororing.numpy as hvd
from hororing.extension import host_names

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, as in SplitMix64


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return mixed


def uniform(seed: int, ranks: int, steps: int, first_step: int = 0) -> NDArray[np.float64]:
    """Numbers in [0, 1), (steps, ranks): element (k, r) depends on (seed, first_step + k, r)."""
    # Before uint64 wraps where it should; NumPy warns of that for scalars only.
    origin = np.asarray([seed % 2**64], np.uint64)
    step = np.arange(first_step, first_step + steps, dtype=np.uint64)[:, None]
    rank = np.arange(ranks, dtype=np.uint64)[None, :]
    golden = np.uint64(_GOLDEN)
    mixed = _mixed(_mixed(_mixed(origin + golden)[:, None] + (step + 1) * golden) + rank * golden)
    return np.asarray((mixed >> np.uint64(11)) * 2.0**-53, np.float64)


class StragglerInjector:
    """Sleeps `delay_s` in a step with `probability`, independently on each rank.

    Call it once per step, before the forward pass. It ignores its arguments, so it can be used as a
    hook: ``model.register_forward_pre_hook(injector)`` in torch,
    ``keras.callbacks.LambdaCallback(on_train_batch_begin=injector)`` in Keras. With probability or
    delay 0 a call returns at once, and counts.

    Parameters
    ----------
    probability : float, optional
        Of a delay, for each rank and step; 0 .. 1.
    delay_s : float, optional
        seconds.
    seed : int, optional
        The same on all ranks.
    ranks : iterable of int, optional
        The ranks that may be late; None: all.
    hosts : iterable of int or str, optional
        The hosts whose ranks may be late: names, or numbers in the order of their first ranks;
        None: all. With both, a rank must be in both.
    rank, host_of : int or iterable of int or str, optional
        For use without `init`: this rank, and the host (name or number) of every rank.

    Raises
    ------
    ValueError : an argument out of range; a rank or a host that does not exist (at the first call
        that may be late, if `init` comes later).

    Examples
    --------
    >>> stragglers = StragglerInjector(probability=0.02, delay_s=1.0, seed=7)
    >>> for batch in loader:
    ...     stragglers()
    ...     train(batch)
    """

    def __init__(
        self,
        probability: float = 0.0,
        delay_s: float = 0.0,
        *,
        seed: int = 0,
        ranks: Iterable[int] | None = None,
        hosts: Iterable[int | str] | None = None,
        rank: int | None = None,
        host_of: Iterable[int | str] | None = None,
    ) -> None:
        if not 0 <= probability <= 1:
            raise ValueError(f"probability must be in 0 .. 1, not {probability}")
        if not 0 <= delay_s < float("inf"):
            raise ValueError(f"delay_s must be a number of seconds from 0 on, not {delay_s}")
        self.probability = probability
        self.delay_s = delay_s
        self.seed = seed
        self.step = 0  # number of calls
        self.late_steps = 0  # number of these in which it slept on this rank
        self._ranks = None if ranks is None else frozenset(map(operator.index, ranks))
        self._hosts = None if hosts is None else frozenset(hosts)
        self._rank = rank
        self._host_of = None if host_of is None else list(host_of)
        self._prone: bool | None = None  # whether this rank may be late, once that is known
        if self._host_of or (rank is None and hvd.is_initialized()):
            self._may_be_late(self._host_of or [*host_names()])  # raises

    @classmethod
    def fixed_host(cls, host: int | str, delay_s: float, **options: Any) -> StragglerInjector:
        """One host is slow in every step: no way of averaging helps against this."""
        return cls(1.0, delay_s, hosts=[host], **options)

    @classmethod
    def thirty_percent(cls, delay_s: float, **options: Any) -> StragglerInjector:
        """30 % of the ranks are late in every step: so many that every group has one."""
        return cls(0.3, delay_s, **options)

    def __call__(self, *_: object, **__: object) -> None:
        """Begin a step, perhaps with a delay."""
        step, self.step = self.step, self.step + 1
        if not self.probability or not self.delay_s:
            return
        if self._prone is None:
            self._prone = self._is_prone()
        if not self._prone:
            return
        rank = hvd.rank() if self._rank is None else self._rank
        if uniform(self.seed, rank + 1, 1, step)[0, rank] < self.probability:
            self.late_steps += 1
            time.sleep(self.delay_s)

    def _is_prone(self) -> bool:
        if self._ranks is None and self._hosts is None:
            return True
        if self._rank is None:
            return bool(self._may_be_late(self._host_of or [*host_names()])[hvd.rank()])
        return bool(self._may_be_late(self._host_of or self._rank + 1)[self._rank])

    def _may_be_late(self, hosts: list[int | str] | int) -> NDArray[np.bool_]:
        """For each rank. `hosts`: of the ranks; or how many ranks there are."""
        size = hosts if isinstance(hosts, int) else len(hosts)
        prone = np.ones(size, bool)
        if self._ranks is not None:
            wrong = sorted(rank for rank in self._ranks if rank < 0)
            if not isinstance(hosts, int):
                wrong += sorted(rank for rank in self._ranks if rank >= size)
            if wrong:
                raise ValueError(f"ranks: there is no rank {wrong[0]} among {size}")
            prone &= [rank in self._ranks for rank in range(size)]
        if self._hosts is not None:
            if isinstance(hosts, int):
                raise ValueError("hosts: it is not known which ranks share one; pass host_of")
            names = [str(host) for host in hosts]
            order = {name: number for number, name in enumerate(dict.fromkeys(names))}
            numbers = [order[name] for name in names]
            known = {*numbers, *names}
            for host in self._hosts:
                if host not in known:
                    raise ValueError(
                        f"hosts: there is no host {host!r}; there are {[*dict.fromkeys(names)]}"
                    )
            prone &= [bool({i, n} & self._hosts) for i, n in zip(numbers, names, strict=True)]
        return prone

    def delays(self, steps: int, ranks: int | None = None) -> NDArray[np.float64]:
        """Return the delays of all ranks from step 0 on: seconds, (steps, ranks). Does not sleep.

        `ranks`: how many there are; needed without `host_of` and before `init`.
        """
        prone = self._may_be_late(self._host_of or ranks or [*host_names()])
        late = (uniform(self.seed, len(prone), steps) < self.probability) & prone
        return np.where(late, self.delay_s, 0.0)

    def state_dict(self) -> dict[str, int]:
        """Return the state with which a resumed run continues with the same draws."""
        return {"step": self.step, "seed": self.seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a `state_dict`."""
        self.step, self.seed = state["step"], state["seed"]

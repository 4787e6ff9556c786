"""Random schedules of collectives; each result is compared with NumPy.

    python tests/python/support/schedules.py --ranks 4 --minutes 10        a soak of new schedules
    python tests/python/support/schedules.py --ranks 4 --seed 123          the same schedule again

All ranks draw a schedule from the same seed: rounds of calls in the world and in process sets that
overlap and come and go; sometimes ranks run out of data, one by one, and join. In a round every
rank submits in its own order. HORORING_* variables choose the configuration.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import json
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import mpirun
import numpy as np
import oracle
from conformance.calls import REDUCTIONS, Call, Caller, Ranks, Started
from conformance.players import PLAYERS, Player, player_of

import hororing.numpy as hvd
from hororing import errors

OPTIONS = ("player", "ranks", "seed", "calls", "schedules", "minutes")

ROUND_CALLS = 12  # at most
NAMES = 16  # per process set; few, so that the response cache is used
OPS = [hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product, hvd.Adasum]
VERBS = ["allreduce"] * 6 + ["allgather", "broadcast", "alltoall", "reducescatter"] * 2


# ---------------------------------------------------------------------------------------------
# Random choices, the same on every rank


class Drawer:
    """Draws the calls of a schedule, which depend only on the seed."""

    def __init__(self, rng: random.Random, size: int) -> None:
        self.rng = rng
        self.size = size
        self.step = 0
        self.known: dict[tuple[Ranks, str], Call] = {}

    def some(self, ranks: Ranks, least: int = 0) -> Ranks:
        """Return a random subset of the ranks."""
        return tuple(sorted(self.rng.sample(ranks, self.rng.randint(least, len(ranks)))))

    def call(self, members: Ranks, name: str | None) -> Call:
        """Return a call like the last one of that name, or a new one."""
        self.step += 1
        before = self.known.get((members, name or ""))
        if before is not None and self.rng.random() < 0.7:
            way = self.rng.random() < 0.4
            call = dataclasses.replace(before, step=self.step, blocking=way)
        else:
            call = self.fresh(members, name)
            if name is not None:
                self.known[members, name] = call
        if name is not None and len(members) > 1 and self.rng.random() < 0.02:
            return dataclasses.replace(call, spoiled=self.rng.choice(members), refused=True)
        return call

    def fresh(self, members: Ranks, name: str | None, verb: str = "") -> Call:
        """Return a random valid call."""
        rng = self.rng
        if name is None and not verb and rng.random() < 0.1:
            return Call(self.step, "barrier", members, None)
        verb = verb or rng.choice(VERBS)
        grouped = verb not in ("broadcast", "alltoall") and rng.random() < 0.25
        count = rng.randint(1, 5) if grouped else 1
        op = rng.choice(self.ops(members) if verb == "allreduce" else [hvd.Average, hvd.Sum])
        factors = (1.0, 1.0)
        if verb in REDUCTIONS and rng.random() < 0.3:
            factors = (rng.choice([0.5, 1.0, -1.75, 0.0]), rng.choice([1.0, 0.3, 2.0]))
        scaled = factors != (1.0, 1.0)
        dtypes = [
            dtype
            for dtype in oracle.DTYPES
            if (verb not in REDUCTIONS or dtype != "bool" or (op != hvd.Average and not scaled))
            and (op != hvd.Adasum or dtype in oracle.FLOATS)
        ]
        shapes = tuple(
            self.shape(verb != "allreduce" and verb != "broadcast") for _ in range(count)
        )
        rows: tuple[tuple[int, ...], ...] = ()
        splits: tuple[tuple[int, ...] | None, ...] = ()
        if verb == "allgather":
            rows = tuple(tuple(rng.choice([0, 1, 2, 3, 17, 400]) for _ in shapes) for _ in members)
        if verb == "alltoall":
            shapes, splits = self.split(shapes[0], len(members))
        return Call(
            self.step, verb, members, name,
            dtypes=tuple(rng.choice(dtypes) for _ in range(count)),
            shapes=shapes, rows=rows, splits=splits, op=op, factors=factors,
            root=rng.choice(members), grouped=grouped,
            in_place=verb in ("allreduce", "broadcast") and rng.random() < 0.4,
            blocking=rng.random() < 0.4, strided=rng.random() < 0.15,
        )  # fmt: skip

    def ops(self, members: Ranks) -> list[int]:
        """Return the operations of an allreduce among these members."""
        adasum = len(members) == self.size and not self.size & (self.size - 1)
        return OPS if adasum else OPS[:-1]

    def shape(self, with_rows: bool) -> tuple[int, ...]:
        """Return a random shape, which may be empty or have no dimensions."""
        rng = self.rng
        kind = rng.random()
        if kind < 0.1 and not with_rows:
            return ()
        if kind < 0.2:
            return rng.choice([(0,), (3, 0), (0, 2)])
        if kind < 0.24:
            return (rng.randint(5_000, 40_000),)
        return tuple(rng.choice([1, 2, 3, 5, 7, 16]) for _ in range(rng.randint(1, 3)))

    def split(self, shape: tuple[int, ...], size: int) -> Any:
        """Return shape and splits of an alltoall; some members pass None."""
        rng = self.rng
        each = rng.choice([0, 1, 2, 3, 100])
        rows = size * each
        splits: list[tuple[int, ...] | None] = []
        for _ in range(size):
            cuts = sorted(rng.randint(0, rows) for _ in range(size))
            drawn = tuple(b - a for a, b in itertools.pairwise([0, *cuts]))
            splits.append(None if rng.random() < 0.3 else drawn)
        return ((rows, *shape[1:]),), tuple(splits)

    def spoil(self, call: Call) -> Call:
        """Return the call of the member that differs from the others."""
        kinds = {
            "allreduce": ["dtype", "shape", "verb", "op", "factor", "group"],
            "reducescatter": ["dtype", "shape", "verb", "factor", "group"],
            "broadcast": ["dtype", "shape", "verb", "root"],
            "allgather": ["dtype", "trailing", "verb", "group"],
            "alltoall": ["dtype", "trailing", "verb"],
        }[call.verb]
        kind = random.Random(call.step).choice(kinds)
        first = call.shapes[0]
        if kind == "dtype":
            other = "float64" if call.dtypes[0] != "float64" else "float32"
            return dataclasses.replace(call, dtypes=(other, *call.dtypes[1:]))
        if kind in ("shape", "trailing"):
            return dataclasses.replace(call, shapes=((*first, 2), *call.shapes[1:]))
        if kind == "verb":
            if call.verb == "broadcast":
                return dataclasses.replace(call, verb="allreduce", op=hvd.Sum)
            return dataclasses.replace(
                call, verb="broadcast", shapes=call.shapes[:1], dtypes=call.dtypes[:1],
                root=call.members[0], grouped=False,
            )  # fmt: skip
        if kind == "op":
            return dataclasses.replace(call, op=hvd.Max if call.op == hvd.Sum else hvd.Sum)
        if kind == "factor" and "bool" not in call.dtypes:
            return dataclasses.replace(call, factors=(call.factors[0], 7.5))
        if kind == "root" and len(call.members) > 1:
            other_root = next(member for member in call.members if member != call.root)
            return dataclasses.replace(call, root=other_root)
        return dataclasses.replace(
            call, grouped=True, dtypes=(*call.dtypes, call.dtypes[0]),
            shapes=(*call.shapes, first), rows=tuple((*rows, 1) for rows in call.rows),
        )  # fmt: skip


# ---------------------------------------------------------------------------------------------
# Execution on one rank


class Schedule(Caller):
    """Runs one schedule."""

    def __init__(self, player: Player, seed: int, calls: int) -> None:
        super().__init__(player, seed)
        self.calls = calls
        self.again = (
            f"again: python tests/python/support/schedules.py --player {player.name} "
            f"--ranks {self.size} --seed {seed} --calls {calls}"
        )
        self.shared = random.Random(seed)  # the same on every rank
        self.drawer = Drawer(self.shared, self.size)
        self.counts: collections.Counter[str] = collections.Counter()

    def play(self) -> None:
        """Run the schedule."""
        while self.drawer.step < self.calls:
            if self.size > 1 and self.shared.random() < 0.3:
                self.change_sets()
            self.round()
            if self.shared.random() < 0.08:
                self.run_out()
        self.run_out()
        self.check_bits()

    # -- process sets -------------------------------------------------------------------------

    def change_sets(self) -> None:
        """Add or remove a process set, or fail to add one."""
        rng = self.shared
        what = rng.random()
        removable = sorted(set(self.sets) - {self.world})
        if what < 0.2 and self.size > 1:
            known = rng.choice(sorted(self.sets))
            bad = rng.choice([[0, 0], [0, self.size], [-1], list(known)])
            self.fails(ValueError, lambda: hvd.add_process_set(bad))
        elif removable and (what < 0.4 or len(self.sets) > 6):
            gone = rng.choice(removable)
            orphans = self.orphans(gone)
            assert hvd.remove_process_set(self.sets.pop(gone))
            for key in [key for key in self.drawer.known if key[0] == gone]:
                del self.drawer.known[key]
            for handle in orphans:
                self.fails(errors.HororingInternalError, lambda h=handle: hvd.synchronize(h))
        else:
            members = self.drawer.some(self.world)
            if members in self.sets:
                self.fails(ValueError, lambda: hvd.add_process_set(members))
                return
            order = self.own.sample(members, len(members))
            self.sets[members] = hvd.add_process_set(order)
            assert self.sets[members].ranks == list(members)

    def orphans(self, members: Ranks) -> list[int]:
        """Return handles of calls that only some members make."""
        if len(members) < 2 or self.shared.random() < 0.5:
            return []
        callers = self.shared.sample(members, self.shared.randint(1, len(members) - 1))
        if self.rank not in callers:
            return []
        one = np.ones(3, np.float32)
        return [hvd.allreduce_async(one, name="t0", process_set=self.sets[members])]

    @staticmethod
    def fails(kind: type[Exception], call: Callable[[], Any]) -> None:
        """Fail unless `call` raises `kind`."""
        try:
            result = call()
        except kind:
            return
        raise AssertionError(f"{kind.__name__} expected, not {result!r}")

    # -- rounds -------------------------------------------------------------------------------

    def round(self) -> None:
        """Make some calls: those without names or handles in the common order, others in any."""
        rng = self.shared
        ordered, free = [], []
        names = {ranks: rng.sample(range(NAMES), NAMES) for ranks in self.sets}
        used = [ranks for ranks in sorted(self.sets) if ranks]
        for _ in range(rng.randint(1, ROUND_CALLS)):
            ranks = self.world if rng.random() < 0.4 else rng.choice(used)
            name = f"t{names[ranks].pop()}" if rng.random() < 0.8 and names[ranks] else None
            call = self.drawer.call(ranks, name)
            (ordered if call.blocking or name is None else free).append(call)
        threaded = rng.random() < 0.15
        ordered = [call for call in ordered if self.rank in call.members]
        free = [call for call in free if self.rank in call.members]
        if not self.player.asynchronous:
            ordered.extend(free)
            free.clear()
        self.own.shuffle(free)
        handles: list[Started] = []
        if self.player.traced:
            self.together(ordered)
        elif threaded:
            handles += [self.start(call) for call in free]
            self.in_threads(ordered)
        else:
            while ordered or free:
                from_ordered = ordered and (not free or self.own.random() < 0.5)
                call = ordered.pop(0) if from_ordered else free.pop()
                if call.blocking:
                    self.finish(self.start(call))
                else:
                    handles.append(self.start(call))
        self.own.shuffle(handles)
        for started in handles:
            self.finish(started)

    def in_threads(self, calls: list[Call]) -> None:
        """Make the calls of every process set in its own thread."""
        failures: list[BaseException] = []

        def work(mine: list[Call]) -> None:
            try:
                for call in mine:
                    self.finish(self.start(call))
            except BaseException as failure:
                failures.append(failure)

        by_set = collections.defaultdict(list)
        for call in calls:
            by_set[call.members].append(call)
        threads = [threading.Thread(target=work, args=(mine,)) for mine in by_set.values()]
        self.own.shuffle(threads)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def own_version(self, call: Call) -> Call:
        """Return the call or, on the member that differs, its variant."""
        self.counts[call.verb] += 1
        return self.drawer.spoil(call) if call.spoiled == self.rank else call

    # -- uneven data --------------------------------------------------------------------------

    def run_out(self) -> None:
        """Every rank reduces until its data end, and joins."""
        rng = self.shared
        steps = [rng.randint(0, 12) for _ in self.world]
        for number in range(max(steps)):
            joined = tuple(rank for rank in self.world if steps[rank] <= number)
            batch = [self.draw_uneven(joined, number, index) for index in range(rng.randint(1, 3))]
            if self.rank in joined:
                continue
            mine = [call for call in batch if self.rank in call.members]
            self.together(mine, joined)
            if number % 5 == 4:
                hvd.barrier()
        last = self.player.join()
        assert steps[last] == max(steps), f"join returned {last}, steps were {steps}"
        assert set(hvd.allgather_object(last)) == {last}

    def draw_uneven(self, joined: Ranks, number: int, index: int) -> Call:
        """Return a call while some ranks have joined; the first one of a step is for all ranks."""
        rng, drawer = self.shared, self.drawer
        drawer.step += 1
        able = [ranks for ranks in sorted(self.sets) if set(ranks) - set(joined)]
        members = self.world if index == 0 else rng.choice(able)
        affected = bool(set(members) & set(joined))
        name = f"u{index}.{number % 3}" if rng.random() < 0.8 else None
        if affected and rng.random() < 0.2:
            verb = rng.choice(["allgather", "broadcast", "alltoall", "reducescatter"])
            return drawer.fresh(members, name, verb).kept_out()
        call = drawer.known.get((members, name or ""))
        if call is None or rng.random() < 0.3:
            call = drawer.fresh(members, name, "allreduce")
            if name is not None:
                drawer.known[members, name] = call
        call = dataclasses.replace(call, step=drawer.step)
        scaled = call.factors[0] != 1.0 and call.op in (hvd.Min, hvd.Max, hvd.Product)
        return call.kept_out() if affected and scaled else call


# ---------------------------------------------------------------------------------------------
# Schedules one after the other


def play(player: Player, seed: int, calls: int, ranks: int) -> collections.Counter[str]:
    """Run one schedule, from init to shutdown."""
    print(f"schedule seed {seed}", flush=True)
    rng = random.Random(f"sets of {seed}")
    parts = [tuple(rank for rank in range(ranks) if rng.random() < 0.6) for _ in range(4)]
    static = [hvd.ProcessSet(part) for part in sorted(set(parts)) if len(part) < ranks]
    hvd.init(process_sets=static)
    assert hvd.size() == ranks
    schedule = Schedule(player, seed, calls)
    schedule.sets |= {tuple(process_set.ranks): process_set for process_set in static}
    schedule.play()
    hvd.shutdown()
    return schedule.counts + collections.Counter(collectives=schedule.drawer.step)


def _on_a_rank(arguments: argparse.Namespace) -> None:
    began, done = time.monotonic(), collections.Counter[str]()
    schedules = itertools.count() if arguments.minutes else range(arguments.schedules)
    for number in schedules:
        seed, player = arguments.seed + number, player_of(arguments.player)
        done += play(player, seed, arguments.calls, arguments.ranks)
        hvd.init()
        enough = time.monotonic() - began > 60 * arguments.minutes if arguments.minutes else False
        enough = hvd.broadcast_object(enough, 0)
        rank = hvd.rank()
        hvd.shutdown()
        if enough:
            break
    took = time.monotonic() - began
    print(json.dumps({"rank": rank, "took_s": round(took, 1), **done}), flush=True)


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--player", choices=sorted(PLAYERS), default="numpy")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=random.randrange(2**31), help="the first seed")
    parser.add_argument(
        "--calls", type=int, default=600, help="collectives of a schedule, before joins"
    )
    parser.add_argument("--schedules", type=int, default=1, help="how many")
    parser.add_argument("--minutes", type=float, default=0.0, help="as many as there is time for")
    parser.add_argument("--on-a-rank", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(given)


def run(arguments: argparse.Namespace) -> mpirun.Job:
    """Run schedules under mpirun."""
    options = [f"--{name}={getattr(arguments, name)}" for name in OPTIONS]
    return mpirun.run(
        __file__, arguments.ranks, "--on-a-rank", *options,
        timeout_s=100 + 60 * arguments.minutes * 1.2,
        environment={"HORORING_DYNAMIC_PROCESS_SETS": "1"},
    )  # fmt: skip


def main() -> int:
    """The program."""
    arguments = parse()
    if arguments.on_a_rank:
        _on_a_rank(arguments)
        return 0
    print(f"seed {arguments.seed}, {arguments.ranks} ranks", flush=True)
    job = run(arguments)
    if job.returncode:
        print(job.report())
        return 1
    for output in job.outputs:
        print(output.splitlines()[-1])
    return 0


if __name__ == "__main__":
    sys.exit(main())

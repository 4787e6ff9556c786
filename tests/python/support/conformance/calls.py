"""Calls of collectives as data. A player makes them, and the results are compared with NumPy.

Every rank knows the inputs of all ranks, which are drawn from the seed, the step and the rank.
"""

from __future__ import annotations

import dataclasses
import random
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import oracle

import hororing.numpy as hvd
from conformance.players import Array, Player
from hororing import errors

Ranks = tuple[int, ...]
REDUCTIONS = ("allreduce", "reducescatter")


@dataclasses.dataclass(frozen=True)
class Call:
    """A collective of all `members`."""

    step: int
    verb: str
    members: Ranks
    name: str | None  # None: unnamed, or a barrier
    dtypes: tuple[str, ...] = ()  # of each tensor
    shapes: tuple[tuple[int, ...], ...] = ()  # of each tensor; rows of an allgather: see `rows`
    rows: tuple[tuple[int, ...], ...] = ()  # of an allgather, by member and tensor
    splits: tuple[tuple[int, ...] | None, ...] = ()  # of an alltoall, by member
    op: int = hvd.Sum
    factors: tuple[float, float] = (1.0, 1.0)
    root: int = 0
    grouped: bool = False
    in_place: bool = False
    blocking: bool = True
    strided: bool = False  # arrays that are not contiguous
    spoiled: int | None = None  # the member whose call differs
    refused: bool = False  # every member gets a MismatchError

    def shape(self, index: int, member: int) -> tuple[int, ...]:
        """Return the shape of this member's tensor."""
        place = self.members.index(member)
        if self.verb == "allgather":
            return (self.rows[place][index], *self.shapes[index][1:])
        return self.shapes[index]

    def kept_out(self) -> Call:
        """Return the same call as a refused one."""
        return dataclasses.replace(self, refused=True)


def passed(seed: int, call: Call, member: int) -> list[Array]:
    """Return the arrays of one member."""
    return [
        oracle.values(
            np.random.default_rng([seed, call.step, member, index]),
            dtype,
            call.shape(index, member),
        )
        for index, dtype in enumerate(call.dtypes)
    ]


def check(seed: int, call: Call, rank: int, results: list[Array], joined: Ranks = ()) -> None:
    """Raise AssertionError unless these are the results on this rank."""
    of_members = [passed(seed, call, member) for member in call.members]
    absent = [place for place, member in enumerate(call.members) if member in joined]
    place, size = call.members.index(rank), len(call.members)
    for index, result in enumerate(results[: len(call.dtypes)]):
        arrays = [tensors[index] for tensors in of_members]
        if call.verb in REDUCTIONS:
            wanted = oracle.reduced(arrays, call.op, *call.factors, absent)
            if call.verb == "reducescatter":
                wanted = wanted.rows(*oracle.share(arrays[0].shape[0], size, place))
            wanted.compare(result)
            continue
        if call.verb == "broadcast":
            moved = arrays[call.members.index(call.root)]
        elif call.verb == "allgather":
            moved = np.concatenate(arrays)
        else:
            moved, received = oracle.exchanged(arrays, call.splits, place)
            assert results[1].dtype == np.int32
            assert results[1].tolist() == received
        oracle.equal(result, moved)


@dataclasses.dataclass
class Started:
    """A call in flight, or a finished one."""

    call: Call
    tensors: list[Any]
    before: list[Array]
    outcome: Any = None  # a handle, or the result
    failure: errors.MismatchError | None = None


class Caller:
    """Makes calls in the process sets that it knows."""

    def __init__(self, player: Player, seed: int, again: str = "") -> None:
        self.player = player
        self.seed = seed
        self.again = again  # how to reproduce a failure
        self.rank, self.size = hvd.rank(), hvd.size()
        self.world = tuple(range(self.size))
        self.own = random.Random(f"{seed} {self.rank}")
        self.sets = {self.world: hvd.global_process_set}
        self.sums: dict[int, tuple[Call, list[int]]] = {}  # by step; checksums of the results

    def together(self, calls: Sequence[Call], joined: Ranks = ()) -> None:
        """Make all calls before waiting for the first one; traced players make one graph of them.

        A refused call would fail its whole graph, so it gets its own.
        """
        if not self.player.traced:
            for started in [self.start(call) for call in calls]:
                self.finish(started, joined)
            return
        alone = [[call] for call in calls if call.refused]
        for batch in [[call for call in calls if not call.refused], *alone]:
            self.in_one_graph(batch, joined)

    def own_version(self, call: Call) -> Call:
        """Return this rank's variant of the call."""
        return call

    def start(self, call: Call) -> Started:
        """Make the call; a blocking one is complete on return."""
        mine = self.own_version(call)
        tensors = [self.laid_out(mine, array) for array in passed(self.seed, mine, self.rank)]
        started = Started(call, tensors, [self.player.array(tensor).copy() for tensor in tensors])
        try:
            started.outcome = self.invoke(mine, tensors)
        except errors.MismatchError as failure:
            started.failure = failure
        except Exception as failure:
            raise AssertionError(self.about(call)) from failure
        return started

    def laid_out(self, call: Call, array: Array) -> Any:
        strided = call.strided and array.ndim
        return self.player.strided(array) if strided else self.player.tensor(array)

    def invoke(self, call: Call, tensors: Sequence[Any]) -> Any:
        """Call the verb."""
        process_set = self.sets[call.members]
        if call.verb == "barrier":
            hvd.barrier(process_set)
            return None
        arguments: dict[str, Any] = {"name": call.name, "process_set": process_set}
        if call.verb in REDUCTIONS:
            pre, post = call.factors
            arguments.update(op=call.op, prescale_factor=pre, postscale_factor=post)
        if call.verb == "broadcast":
            arguments["root_rank"] = call.root
        if call.verb == "alltoall":
            arguments["splits"] = call.splits[call.members.index(self.rank)]
        verb = ("grouped_" if call.grouped else "") + call.verb
        if self.player.asynchronous:
            verb += ("" if call.blocking else "_async") + ("_" if call.in_place else "")
        return getattr(self.player.hvd, verb)(
            list(tensors) if call.grouped else tensors[0], **arguments
        )

    def finish(self, started: Started, joined: Ranks = ()) -> None:
        """Wait for the call, and compare its results."""
        call, outcome, failure = started.call, started.outcome, started.failure
        if call.verb == "barrier":
            return
        player = self.player
        try:
            if failure is None and player.asynchronous and not call.blocking:
                if self.own.random() < 0.3:
                    hvd.poll(outcome)
                outcome = hvd.synchronize(outcome)
        except errors.MismatchError as mismatch:
            failure = mismatch
        except Exception as other:
            raise AssertionError(self.about(call)) from other
        try:
            if call.refused:
                assert failure is not None, f"no MismatchError, but {outcome!r}"
                return
            if failure is not None:
                raise failure
            results = listed(call, outcome)
            if player.asynchronous and call.in_place:
                assert all(a is b for a, b in zip(results, started.tensors, strict=True))
            else:
                for tensor, before in zip(started.tensors, started.before, strict=True):
                    oracle.equal(player.array(tensor), before)  # inputs are unchanged
            self.compare(call, player.arrays(results), joined)
        except Exception as wrong:
            raise AssertionError(self.about(call)) from wrong

    def in_one_graph(self, calls: Sequence[Call], joined: Ranks) -> None:
        """Make calls in one graph. REQUIRES: all or none of them are refused."""
        made = [self.own_version(call) for call in calls]
        arrays = [passed(self.seed, call, self.rank) for call in made]

        def body(*tensors: Any) -> list[Any]:
            left = iter(tensors)
            return [
                listed(call, self.invoke(call, [next(left) for _ in call.dtypes])) for call in made
            ]

        told = "\n".join(map(self.about, calls))
        try:
            outcomes = self.player.run(body, *(array for each in arrays for array in each))
        except Exception as failure:
            if calls[0].refused and isinstance(
                failure, self.player.raised_for(errors.MismatchError)
            ):
                return
            raise AssertionError(told) from failure
        assert not calls or not calls[0].refused, f"no MismatchError: {told}"
        for call, results in zip(calls, outcomes, strict=True):
            try:
                self.compare(call, results, joined)
            except Exception as wrong:
                raise AssertionError(self.about(call)) from wrong

    def compare(self, call: Call, results: list[Array], joined: Ranks) -> None:
        if call.verb == "barrier":
            return
        if call.verb == "alltoall" and len(results) == 1:  # without splits
            place = call.members.index(self.rank)
            arrays = [passed(self.seed, call, member)[0] for member in call.members]
            received = oracle.exchanged(arrays, call.splits, place)[1]
            results = [*results, np.array(received, np.int32)]
        check(self.seed, call, self.rank, results, joined)
        if call.verb == "allreduce":
            sums = [zlib.crc32(result.tobytes()) for result in results]
            self.sums[call.step] = call, sums

    def check_bits(self) -> None:
        """Raise AssertionError unless all ranks that hold a sum hold the same bits.

        Called by all ranks. `check` allows roundings of floats; this does not.
        """
        of_ranks = hvd.allgather_object({step: sums for step, (_, sums) in self.sums.items()})
        for step, (call, sums) in self.sums.items():
            told = {rank: of[step] for rank, of in enumerate(of_ranks) if step in of}
            same = all(each == sums for each in told.values())
            assert same, f"ranks hold different bits, {told}\n{self.about(call)}"
        self.sums.clear()

    def about(self, call: Call) -> str:
        """Return the context of a failure."""
        return (
            f"{self.player.name}, seed {self.seed}, {self.size} ranks, rank {self.rank}, "
            f"step {call.step}: {call}\n{self.again}"
        )


def listed(call: Call, outcome: Any) -> list[Any]:
    """Return the results of any call as a list."""
    if call.verb == "barrier":
        return []
    return list(outcome) if isinstance(outcome, (list, tuple)) else [outcome]

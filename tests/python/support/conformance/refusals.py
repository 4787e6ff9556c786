"""Errors of the verbs, and their texts.

A wrong argument on one rank raises an error there at once; if ranks disagree, all of them get the
error. Either way the text names the tensor, the rank and the value, and the job goes on.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import hororing.numpy as hvd
from conformance.players import Player
from hororing import errors

Call = Callable[[Any, Callable[..., Any]], Any]  # takes a framework's verbs and ones(*shape)
Row = tuple[str, Call, Any, tuple[str, ...]]  # topic, call, exception, texts
Sides = tuple[str, tuple[Call, str], tuple[Call, str]]  # topic, usual call, differing call

# ---------------------------------------------------------------------------------------------
# Each verb with one tensor and valid arguments

PLAIN: dict[str, Callable[..., Any]] = {
    "allreduce": lambda verb, x, **more: verb(x, **more),
    "grouped_allreduce": lambda verb, x, **more: verb([x], **more),
    "broadcast": lambda verb, x, **more: verb(x, root_rank=0, **more),
    "allgather": lambda verb, x, **more: verb(x, **more),
    "grouped_allgather": lambda verb, x, **more: verb([x], **more),
    "alltoall": lambda verb, x, **more: verb(x, **more),
    "reducescatter": lambda verb, x, **more: verb(x, **more),
    "grouped_reducescatter": lambda verb, x, **more: verb([x], **more),
}


def verbs_of(player: Player) -> dict[str, Callable[..., Any]]:
    """Return all verbs of the player, including asynchronous and in-place ones."""
    found = {}
    for verb, call in PLAIN.items():
        ways = ["", "_async", "_", "_async_"] if player.asynchronous else [""]
        for way in ways:
            function = getattr(player.hvd, verb + way, None)
            if function is not None:
                found[verb + way] = functools.partial(call, function)
    return found


def said_by(verb: str) -> str:
    """Return the name of the verb in messages, without `_async` and `_`."""
    return verb.removesuffix("_").removesuffix("_async")


def reducing(player: Player) -> list[str]:
    return [verb for verb in verbs_of(player) if "reduce" in verb]


# ---------------------------------------------------------------------------------------------
# Arguments that are errors without regard to other ranks. All ranks pass them, or only one.

LOCAL: list[Row] = [
    ("no tensors", lambda h, x: h.grouped_allgather([]), ValueError, ("grouped_allgather",)),
    ("no tensors", lambda h, x: h.grouped_reducescatter([]), ValueError, ("reducescatter",)),
    ("no dimensions", lambda h, x: h.allgather(x(), name="n"), ValueError, ("dimensions",)),
    ("no dimensions", lambda h, x: h.alltoall(x(), name="n"), ValueError, ("dimensions",)),
    ("no dimensions", lambda h, x: h.reducescatter(x()), ValueError, ("dimensions",)),
    (
        "no dimensions",
        lambda h, x: h.grouped_allgather([x(2), x()], name="n"),
        ValueError,
        ("'n'", "dimensions"),
    ),
    ("root", lambda h, x: h.broadcast(x(2), -1, name="n"), ValueError, ("'n'", "-1", "root")),
    ("root", lambda h, x: h.broadcast(x(2), 7, name="n"), ValueError, ("'n'", "7", "ranks 0 to")),
    ("root", lambda h, x: h.broadcast(x(2), 2**40, name="n"), ValueError, (str(2**40),)),
    ("root", lambda h, x: h.broadcast(x(2), "0"), TypeError, ("root_rank", "str")),
    ("root", lambda h, x: h.broadcast(x(2), 0.0), TypeError, ("root_rank", "float")),
    ("name", lambda h, x: h.allreduce(x(2), name=3), TypeError, ("name", "int")),
    ("name", lambda h, x: h.allreduce(x(2), name="a\0b"), ValueError, ("zero character",)),
    ("name", lambda h, x: h.allreduce(x(2), name=""), ValueError, ("name is empty",)),
    ("average", lambda h, x: h.allreduce(x(2), average=True, op=1), ValueError, ("average",)),
    (
        "bool",
        lambda h, x: h.allreduce(x(2, dtype="bool"), name="n"),
        ValueError,
        ("'n'", "Average of bool"),
    ),
    (
        "bool",
        lambda h, x: h.reducescatter(x(2, dtype="bool"), name="n"),
        ValueError,
        ("'n'", "Average of bool"),
    ),
    (
        "bool",
        lambda h, x: h.allreduce(x(2, dtype="bool"), op=h.Sum, prescale_factor=2.0),
        ValueError,
        ("bool cannot be scaled",),
    ),
    (
        "factor",
        lambda h, x: h.allreduce(x(2), prescale_factor="2"),
        TypeError,
        ("prescale_factor", "str"),
    ),
    (
        "factor",
        lambda h, x: h.allreduce(x(2), prescale_factor=float("nan"), name="n"),
        ValueError,
        ("'n'", "finite"),
    ),
    (
        "factor",
        lambda h, x: h.reducescatter(x(2), name="n", postscale_factor=float("inf")),
        ValueError,
        ("'n'", "finite"),
    ),
    (
        "Adasum of integers",
        lambda h, x: h.allreduce(x(2, dtype="int32"), name="n", op=h.Adasum),
        (ValueError, NotImplementedError),
        ("Adasum",),
    ),
    (
        "uneven",
        lambda h, x: h.alltoall(x(h.size() + 1) if h.size() > 1 else x(), name="n"),
        ValueError,
        ("'n'",),
    ),
    (
        "one bad member",
        lambda h, x: h.grouped_reducescatter([x(2), x(2, dtype="bool")], name="n"),
        ValueError,
        ("'n'", "Average of bool"),
    ),
]


def splits_rows(size: int) -> list[Row]:
    """Return rows of wrong splits for tensors of 2 rows per rank."""
    wrong: list[tuple[str, Any, tuple[str, ...]]] = [
        ("too many rows", [3] + [2] * (size - 1), ("'n'", "more rows", f"[{2 * size}, 3]")),
        ("too short", [2] * (size - 1), ("'n'", f"one entry for each of {size}")),
        ("too long", [0] * (size + 1), ("'n'", f"one entry for each of {size}")),
        ("none at all", [], ("'n'", f"one entry for each of {size}")),
        ("negative", [-1] + [0] * (size - 1), ("'n'", "negative", "-1")),
        ("sum overflows", [2**62] * size, ("'n'", "more rows")),
        ("beyond 64 bits", [2**70] + [0] * (size - 1), (str(2**70),)),
        ("floats", [1.0] * size, ("list of integers",)),
        ("text", ["1"] * size, ("list of integers",)),
        ("two dimensions", [[1]] * size, ("list of integers",)),
        ("a number", 2, ("list of integers",)),
    ]
    return [
        (label, functools.partial(_sent_with, splits), ValueError, texts)
        for label, splits, texts in wrong
    ]


def _sent_with(splits: Any, verbs: Any, ones: Callable[..., Any]) -> Any:
    return verbs.alltoall(ones(2 * verbs.size(), 3), splits=splits, name="n")


def typed_splits(size: int, ones: Callable[..., Any]) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """Yield wrong splits as tensors, and parts of the texts."""
    yield ones(size, dtype="int64"), ("int32", "int64")
    yield ones(size, dtype="float32"), ("int32", "float32")
    yield ones(size, 1, dtype="int32"), ("one dimension", "2")
    yield ones(size + 1, dtype="int32"), (f"one entry for each of {size}",)


# ---------------------------------------------------------------------------------------------
# Disagreements of ranks

DIFFERENT: list[Sides] = [
    (
        "shapes",
        (lambda h, x: h.allreduce(x(2, 3), name="n"), "[2, 3]"),
        (lambda h, x: h.allreduce(x(3, 2), name="n"), "[3, 2]"),
    ),
    (
        "shapes",
        (lambda h, x: h.allreduce(x(1), name="n"), "[1]"),
        (lambda h, x: h.allreduce(x(), name="n"), "[]"),
    ),
    (
        "shapes",
        (lambda h, x: h.allreduce(x(4), name="n"), "[4]"),
        (lambda h, x: h.allreduce(x(0), name="n"), "[0]"),
    ),
    (
        "data types",  # comes first
        (lambda h, x: h.allreduce(x(5), name="n"), "float32"),
        (lambda h, x: h.allreduce(x(9, dtype="uint16"), name="n", op=h.Max), "uint16"),
    ),
    (
        "reduce operations",
        (lambda h, x: h.allreduce(x(5), name="n"), "Average"),
        (lambda h, x: h.allreduce(x(5), name="n", op=h.Product), "Product"),
    ),
    (
        "reduce operations",
        (lambda h, x: h.grouped_allreduce([x(2)], name="n", op=h.Sum), "Sum"),
        (lambda h, x: h.grouped_allreduce([x(2)], name="n", op=h.Max), "Max"),
    ),
    (
        "scale factors",
        (
            lambda h, x: h.allreduce(x(5), name="n", postscale_factor=1 / 3),
            "prescale 1, postscale 0.3333333333333333",
        ),
        (
            lambda h, x: h.allreduce(x(5), name="n", prescale_factor=0.1, postscale_factor=-2.5),
            "prescale 0.1, postscale -2.5",
        ),
    ),
    (
        "numbers of tensors in the group",
        (lambda h, x: h.grouped_allreduce([x(2)] * 3, name="n"), "3 tensors"),
        (lambda h, x: h.grouped_allreduce([x(2)] * 2, name="n"), "2 tensors"),
    ),
    (
        "shapes of tensor 1 of the group",
        (lambda h, x: h.grouped_allreduce([x(2), x(3)], name="n"), "[3]"),
        (lambda h, x: h.grouped_allreduce([x(2), x(4)], name="n"), "[4]"),
    ),
    (
        "data types of tensor 0 of the group",
        (lambda h, x: h.grouped_allreduce([x(2), x(2)], name="n"), "float32"),
        (lambda h, x: h.grouped_allreduce([x(2, dtype="float64"), x(2)], name="n"), "float64"),
    ),
    (
        "numbers of tensors in the group",
        (lambda h, x: h.grouped_allgather([x(2)] * 2, name="n"), "2 tensors"),
        (lambda h, x: h.allgather(x(2), name="n"), "1 tensor"),
    ),
    (
        "trailing dimensions of tensor 1 of the group",
        (lambda h, x: h.grouped_allgather([x(2), x(7, 3)], name="n"), "[*, 3]"),
        (lambda h, x: h.grouped_allgather([x(2), x(7, 4)], name="n"), "[*, 4]"),
    ),
    (
        "data types",
        (lambda h, x: h.allgather(x(2), name="n"), "float32"),
        (lambda h, x: h.allgather(x(2, dtype="float16"), name="n"), "float16"),
    ),
    (
        "numbers of dimensions",
        (lambda h, x: h.allgather(x(2), name="n"), "1 dimension"),
        (lambda h, x: h.allgather(x(2, 1), name="n"), "2 dimensions"),
    ),
    (
        "trailing dimensions",
        (lambda h, x: h.allgather(x(2, 5, 7), name="n"), "[*, 5, 7]"),
        (lambda h, x: h.allgather(x(9, 5, 8), name="n"), "[*, 5, 8]"),
    ),
    (
        "shapes",
        (lambda h, x: h.broadcast(x(2, 3), 0, name="n"), "[2, 3]"),
        (lambda h, x: h.broadcast(x(2, 4), 0, name="n"), "[2, 4]"),
    ),
    (
        "data types",
        (lambda h, x: h.broadcast(x(2), 0, name="n"), "float32"),
        (lambda h, x: h.broadcast(x(2, dtype="bool"), 0, name="n"), "bool"),
    ),
    (
        "root ranks",
        (lambda h, x: h.broadcast(x(2), 0, name="n"), "root 0"),
        (lambda h, x: h.broadcast(x(2), 1, name="n"), "root 1"),
    ),
    (
        "data types",
        (lambda h, x: h.alltoall(x(12), name="n"), "float32"),
        (lambda h, x: h.alltoall(x(12, dtype="int32"), name="n"), "int32"),
    ),
    (
        "trailing dimensions",
        (lambda h, x: h.alltoall(x(12, 2), name="n"), "[*, 2]"),
        (lambda h, x: h.alltoall(x(12, 3), splits=[0] * h.size(), name="n"), "[*, 3]"),
    ),
    (
        "numbers of dimensions",
        (lambda h, x: h.alltoall(x(12, 2), name="n"), "2 dimensions"),
        (lambda h, x: h.alltoall(x(12, 2, 1), name="n"), "3 dimensions"),
    ),
    (
        "shapes",
        (lambda h, x: h.reducescatter(x(5), name="n"), "[5]"),
        (lambda h, x: h.reducescatter(x(6), name="n"), "[6]"),
    ),
    (
        "data types",
        (lambda h, x: h.reducescatter(x(5), name="n"), "float32"),
        (lambda h, x: h.reducescatter(x(5, dtype="int64"), name="n"), "int64"),
    ),
    (
        "reduce operations",
        (lambda h, x: h.reducescatter(x(5), name="n"), "Average"),
        (lambda h, x: h.reducescatter(x(5), name="n", op=h.Sum), "Sum"),
    ),
    (
        "scale factors",
        (lambda h, x: h.grouped_reducescatter([x(5)], name="n"), "prescale 1, postscale 1"),
        (
            lambda h, x: h.grouped_reducescatter([x(5)], name="n", postscale_factor=2.0),
            "prescale 1, postscale 2",
        ),
    ),
    (
        "shapes of tensor 1 of the group",
        (lambda h, x: h.grouped_reducescatter([x(5), x(2)], name="n"), "[2]"),
        (lambda h, x: h.grouped_reducescatter([x(5), x(3)], name="n"), "[3]"),
    ),
    (
        "operations",
        (lambda h, x: h.allreduce(x(2), name="n"), "allreduce"),
        (lambda h, x: h.broadcast(x(2), 0, name="n"), "broadcast"),
    ),
    (
        "operations",
        (lambda h, x: h.broadcast(x(2), 0, name="n"), "broadcast"),
        (lambda h, x: h.allgather(x(2), name="n"), "allgather"),
    ),
    (
        "operations",
        (lambda h, x: h.allgather(x(2), name="n"), "allgather"),
        (lambda h, x: h.grouped_allreduce([x(2)] * 2, name="n"), "allreduce"),
    ),
    (
        "operations",
        (lambda h, x: h.alltoall(x(12), name="n"), "alltoall"),
        (lambda h, x: h.reducescatter(x(12), name="n"), "reducescatter"),
    ),
]


def listed(ranks: list[int]) -> str:
    """Return ranks as texts show them."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return "ranks " + ",".join(map(str, ranks))


# ---------------------------------------------------------------------------------------------
# Cases


def works(player: Player) -> None:
    """Fail unless the next collective works on all ranks."""
    total = player.run(
        lambda t: player.hvd.allreduce(t, op=hvd.Sum, name="works"), np.ones(3, np.float32)
    )
    assert total.tolist() == [hvd.size()] * 3


def run(player: Player, call: Call) -> Any:
    return player.run(lambda: call(player.hvd, player.ones))


@contextlib.contextmanager
def refused(player: Player, about: str, kind: Any, *texts: str) -> Iterator[Callable[..., Any]]:
    """Yield a function that runs a call as the body, within `Player.refuses`."""
    with player.refuses(about, kind, *texts):
        yield lambda call, *given, **more: player.run(lambda: call(*given, **more))


def odd_ranks(player: Player) -> range:
    """Return the ranks that differ in turn: all, or in graphs, which are slow, only the last."""
    size = hvd.size()
    return range(size - 1 if player.traced else 0, size)


def not_initialized(player: Player) -> None:
    for verb, call in verbs_of(player).items():
        with refused(player, verb, errors.NotInitializedError, "hvd.init()") as calling:
            calling(call, player.ones(2))
    with refused(player, "join", errors.NotInitializedError, "hvd.init()") as calling:
        calling(player.hvd.join)
    for other in (hvd.barrier, player.hvd.rank, lambda: player.hvd.add_process_set([0])):
        with player.refuses("", errors.NotInitializedError, "hvd.init()"):
            other()


def case_what_is_not_a_tensor_of_the_framework(player: Player) -> None:
    for verb, call in verbs_of(player).items():
        for bad, kind, text in player.not_tensors():
            with refused(player, f"{verb} of {bad!r}", kind, said_by(verb), text) as calling:
                calling(call, bad)
    works(player)


class Foreign(enum.Enum):
    """Operations of another library, whose numbers are not ours."""

    SUM = 0
    AVG = 1
    BAND = 2


def case_operations_of_other_libraries_mean_what_they_are_called(player: Player) -> None:
    mine = np.full(hvd.size(), 1.0 + hvd.rank())
    total = hvd.size() * (hvd.size() + 1) / 2
    for verb in ("allreduce", "reducescatter"):
        function = getattr(player.hvd, verb)
        for op, wanted in (
            (Foreign.SUM, total),
            (Foreign.AVG, total / hvd.size()),
            (np.int64(hvd.Sum), total),
        ):
            result = player.run(lambda x, f=function, op=op: f(x, op=op), mine)
            assert (result == wanted).all(), (verb, op, result)


def case_operations_that_do_not_exist(player: Player) -> None:
    names = {2: "Adasum", 3: "Min", 4: "Max", 5: "Product"}
    for verb in reducing(player):
        call = verbs_of(player)[verb]
        for op in (99, -1, Foreign.BAND):
            with refused(player, verb, errors.UnsupportedOpError, repr(op)) as calling:
                calling(call, player.ones(2), op=op)
        for wrong in ("Sum", 1.5, True):
            texts = (
                "op must be one of hvd.Average, hvd.Sum",
                "torch.distributed.ReduceOp",
                repr(wrong),
            )
            with refused(player, verb, TypeError, *texts) as calling:
                calling(call, player.ones(2), op=wrong)
        if "scatter" in verb:
            for op, name in names.items():
                texts = said_by(verb), f"op={name}", "Average or Sum"
                with refused(player, verb, errors.UnsupportedOpError, *texts) as calling:
                    calling(call, player.ones(2), op=op)
        elif hvd.size() == 3:
            with refused(player, verb, NotImplementedError, "power of two, not 3") as calling:
                calling(call, player.ones(2), op=hvd.Adasum)
    works(player)


def case_process_sets_that_one_cannot_use(player: Player) -> None:
    size, rank = hvd.size(), hvd.rank()
    without = [hvd.add_process_set({*range(size)} - {other}) for other in range(size)]
    not_mine = without[rank]
    gone = hvd.ProcessSet([])
    if size > 1:
        hvd.remove_process_set(hvd.add_process_set(gone))
    for verb, call in verbs_of(player).items():
        name = said_by(verb)
        for bad in (None, 0, [0]):
            with refused(player, verb, TypeError, name, "process_set") as calling:
                calling(call, player.ones(2), process_set=bad)
        for unregistered in (hvd.ProcessSet([0]), gone):
            with refused(player, verb, TypeError, name, "not registered") as calling:
                calling(call, player.ones(2), process_set=unregistered)
        texts = name, f"rank {rank} is not a member", str(not_mine.ranks)
        with refused(player, verb, ValueError, *texts) as calling:
            calling(call, player.ones(2), process_set=not_mine)
    works(player)
    assert all(hvd.remove_process_set(each) for each in without)


def case_arguments_that_are_wrong_here(player: Player) -> None:
    size = hvd.size()
    for label, call, kind, texts in [*LOCAL, *splits_rows(size)]:
        with player.refuses(label, kind, *texts):
            run(player, call)
    works(player)
    if player.asynchronous:
        for verb in ("grouped_allreduce", "grouped_allreduce_"):
            with player.refuses("no tensors", ValueError, "grouped_allreduce: there are no"):
                getattr(player.hvd, verb)([])
    else:  # Horovod's
        assert player.hvd.grouped_allreduce([]) == []
    for splits, texts in typed_splits(size, player.ones):
        with player.refuses(f"splits {splits}", ValueError, *texts):
            run(player, lambda h, x, s=splits: h.alltoall(x(size), splits=s, name="n"))
    works(player)


def case_arguments_that_are_wrong_on_one_rank_only(player: Player) -> None:
    """The other ranks wait for that rank's next call."""
    for odd in odd_ranks(player):
        for label, call, kind, texts in [*LOCAL, *splits_rows(hvd.size())]:
            if hvd.rank() == odd:
                with player.refuses(label, kind, *texts):
                    run(player, call)
            if not player.traced:
                player.hvd.alltoall(player.ones(hvd.size()), name="n")
        run(player, lambda h, x: [h.alltoall(x(h.size()), name="n"), h.allreduce(x(2), name="m")])


def case_unnamed_calls_that_only_one_rank_refuses_do_not_count(player: Player) -> None:
    size = hvd.size()
    wrong: list[Call] = [
        lambda h, x: h.alltoall(x(size), splits=[-1] * size),
        lambda h, x: h.broadcast(x(size), root_rank=size),
        lambda h, x: h.reducescatter(x(size), op=h.Max),
        lambda h, x: h.allreduce(x(size), prescale_factor="2"),
    ]
    for odd in odd_ranks(player):
        for call in wrong if hvd.rank() == odd else []:
            with player.refuses("unnamed", (ValueError, TypeError)):
                run(player, call)
            if player.differentiable:
                with player.refuses("unnamed", (ValueError, TypeError)):
                    player.gradients(
                        lambda t, call=call: call(player.hvd, lambda _: t), 1.0, np.ones(size)
                    )
        run(
            player,
            lambda h, x: [
                h.alltoall(x(size)), h.broadcast(x(size), root_rank=0),
                h.reducescatter(x(size)), h.allreduce(x(size)),
            ],
        )  # fmt: skip


def case_ranks_that_disagree(player: Player) -> None:
    """Each rank in turn differs from the others."""
    size, rank = hvd.size(), hvd.rank()
    tried = itertools.product(odd_ranks(player), DIFFERENT if size > 1 else [])
    for odd, (what, usual, other) in tried:
        others = [each for each in range(size) if each != odd]
        texts = f"{what} differ: ", f"rank {odd}: {other[1]}", f"{listed(others)}: {usual[1]}"
        told: list[str] = []
        with player.refuses(what, errors.MismatchError, "'n'", *texts):
            try:
                run(player, (other if rank == odd else usual)[0])
            except errors.MismatchError as error:
                told.append(str(error))
                raise
        # All ranks have the same text, except for the parts that TensorFlow adds in graphs.
        assert len({*map(tuple, hvd.allgather_object(told, name="told"))}) == 1
        if odd == size - 1:
            run(player, usual[0])  # all ranks use the name alike again
    works(player)


def case_an_agreed_name_may_change_only_together(player: Player) -> None:
    """Even for a cached request, a rank that changes it alone is found."""
    size = hvd.size()

    def known(count: int) -> Any:
        return run(player, lambda h, x: h.allreduce(x(count), name="known", op=h.Sum))

    for odd in range(size if size > 1 else 0):
        for _ in range(3):
            assert known(4).tolist() == [size] * 4
        with player.refuses("known", errors.MismatchError, "'known'", f"rank {odd}: [5]"):
            known(5 if hvd.rank() == odd else 4)
        assert known(5).tolist() == [size] * 5  # all ranks change it: no mismatch


def case_a_mismatch_of_a_handle_uses_it_up(player: Player) -> None:
    if not player.asynchronous:
        return
    for verb, call in verbs_of(player).items():
        if hvd.size() == 1 or "async" not in verb:
            continue
        handle = call(player.ones(hvd.size(), 1 + (hvd.rank() == 0)), name="n")
        with player.refuses(verb, errors.MismatchError, "'n'"):
            player.hvd.synchronize(handle)
        with player.refuses(verb, ValueError, f"no handle {handle}"):
            player.hvd.synchronize(handle)
    for handle in (0, -1, 10**9, None, "1"):
        for function in (player.hvd.synchronize, player.hvd.poll):
            with player.refuses(f"handle {handle}", ValueError, "no handle"):
                function(handle)
    works(player)


def case_a_process_set_of_no_ranks_one_could_have(player: Player) -> None:
    for bad in ([2**70], [-(2**70)]):
        with player.refuses(f"add_process_set({bad})", ValueError, str(bad[0])):
            player.hvd.add_process_set(bad)
    works(player)

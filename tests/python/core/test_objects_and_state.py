"""Objects, parameters and optimizer state from one rank to all, on 1 to 4 ranks."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import session
import torch
from equality import same

import hororing.numpy
import hororing.torch as hvd
from hororing import errors

# ---------------------------------------------------------------------------------------------
# Objects


class _Broken:
    """Cannot be pickled: its own code raises an exception."""

    def __reduce__(self) -> Any:
        raise KeyError("no reduction")


def _fail() -> None:
    raise LookupError("cannot be made here")


class _CannotBeLoaded:
    def __reduce__(self) -> Any:
        return _fail, ()


def objects() -> list[Any]:
    captured = 17
    return [
        None,
        0,
        "text",
        b"",
        {"lr": 0.1, "nested": [1, (2.5, {3})], "none": None},
        np.arange(12).reshape(3, 4)[:, ::2],
        torch.arange(5.0),
        torch.nn.Linear(2, 1).state_dict(),
        bytes(range(256)) * 20_000,  # 5 MB
        list(range(100_000)),
        lambda x: x + captured,
        type("MadeHere", (), {"value": 3}),
    ]


def case_before_init() -> None:
    for call in (
        lambda: hvd.broadcast_object(1),
        lambda: hvd.allgather_object(1),
        lambda: hvd.broadcast_parameters({"a": torch.ones(1)}, 0),
        lambda: hvd.broadcast_optimizer_state(torch.optim.SGD([torch.ones(1)], lr=1), 0),
    ):
        with pytest.raises(errors.NotInitializedError):
            call()
    hvd.init()
    assert hororing.numpy.broadcast_object is hvd.broadcast_object
    assert hororing.numpy.allgather_object is hvd.allgather_object


def case_objects_from_every_root() -> None:
    """Without a name; the other ranks hold objects of other types."""
    torch.manual_seed(0)
    rank = hvd.rank()
    for root in range(hvd.size()):
        torch.manual_seed(root)
        for index, wanted in enumerate(objects()):
            mine = wanted if rank == root else [None, {}, "other", rank][index % 4]
            got = hvd.broadcast_object(mine, root)
            assert same(wanted, got), f"object {index} from {root}"
            if rank == root:
                assert got is mine
    assert hvd.broadcast_object({"rank": rank}, name="named") == {"rank": 0}
    assert hvd.broadcast_object(rank, root_rank=hvd.size() - 1, name="named") == hvd.size() - 1


def case_objects_of_all_ranks() -> None:
    rank, size = hvd.rank(), hvd.size()
    for turn in range(3):
        got = hvd.allgather_object((rank, turn))
        assert got == [(r, turn) for r in range(size)]
    for wanted in objects():
        got = hvd.allgather_object(wanted if rank == size - 1 else rank, name="mixed")
        assert got[:-1] == list(range(size - 1))
        if not isinstance(wanted, dict):  # the model's parameters are random
            assert same(wanted, got[-1])
    sizes = hvd.allgather_object(b"x" * (rank * 300_000))
    assert [len(each) for each in sizes] == [r * 300_000 for r in range(size)]


def case_an_object_that_cannot_be_pickled() -> None:
    rank, size = hvd.rank(), hvd.size()
    for root in range(size):
        for thing, kind in ((threading.Lock(), TypeError), (_Broken(), KeyError)):
            with pytest.raises(kind if rank == root else ValueError) as caught:
                hvd.broadcast_object(thing if rank == root else None, root, name="broken")
            if rank != root:
                assert f"'broken': rank {root} cannot pickle" in str(caught.value)
            # No rank hangs, and the job goes on.
            assert hvd.broadcast_object(rank, root, name="broken") == root
            with pytest.raises(kind if rank == root else ValueError) as caught:
                hvd.allgather_object(thing if rank == root else rank)
            if rank != root:
                assert f"rank {root} cannot pickle" in str(caught.value)
            assert hvd.allgather_object(rank) == list(range(size))
    if size > 2:
        with pytest.raises(ValueError if rank == 0 else TypeError) as caught:
            hvd.allgather_object(threading.Lock() if rank else None)
        if rank == 0:
            assert f"ranks {', '.join(map(str, range(1, size)))} cannot" in str(caught.value)
    # An object that cannot be loaded is an error only on the receivers.
    thing = _CannotBeLoaded()
    if rank == 0:
        assert hvd.broadcast_object(thing) is thing
    else:
        with pytest.raises(LookupError, match="cannot be made here"):
            hvd.broadcast_object(None)
    with pytest.raises(LookupError, match="cannot be made here"):
        hvd.allgather_object(thing)
    assert hvd.allgather_object(rank) == list(range(size))


def case_roots_of_objects_that_are_wrong() -> None:
    rank, size = hvd.rank(), hvd.size()
    for root in (-1, size):
        with pytest.raises(ValueError, match="is not a rank of this job"):
            hvd.broadcast_object("text", root)
    if size > 1:
        with pytest.raises(errors.MismatchError, match="root ranks differ"):
            hvd.broadcast_object("text", rank)
    assert hvd.broadcast_object(rank) == 0


# ---------------------------------------------------------------------------------------------
# Parameters


def network(seed: int) -> torch.nn.Module:
    """Return a model with parameters and buffers of several types and layouts."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3),
        torch.nn.BatchNorm2d(4),  # has a scalar int64 counter of batches
        torch.nn.Linear(7, 5).to(torch.bfloat16),
        torch.nn.Embedding(6, 3),
        torch.nn.PReLU(),
    ).to(memory_format=torch.channels_last)
    model.register_buffer("flags", torch.rand(9) < 0.5)
    model.register_buffer("nothing", torch.empty(0, 3))
    model.register_buffer("bytes", torch.randint(0, 256, (11,), dtype=torch.uint8))
    for _ in range(seed + 1):
        model[1](torch.randn(2, 4, 3, 3))
    return model


def case_parameters_from_every_root() -> None:
    for root in range(hvd.size()):
        model, wanted = network(hvd.rank()), network(root).state_dict()
        before = {name: id(p) for name, p in model.named_parameters()}
        places = {name: t.data_ptr() for name, t in model.state_dict().items()}
        state = model.state_dict()
        if hvd.rank() % 2:  # the order of the dictionary does not matter
            state = OrderedDict(reversed(list(state.items())))
        hvd.broadcast_parameters(state, root)
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, wanted[name]), f"{name} from {root}"
            assert tensor.data_ptr() == places[name]
        assert {name: id(p) for name, p in model.named_parameters()} == before
        assert all(p.requires_grad and p.is_leaf for p in model.parameters())
        hvd.broadcast_parameters(list(network(hvd.rank()).named_parameters()), root)


def case_parameters_as_lists() -> None:
    rank, size = hvd.rank(), hvd.size()
    pairs = [("b", torch.full((2,), rank)), ("a", torch.full((3, 1), rank / 2))]
    hvd.broadcast_parameters(pairs, size - 1)
    assert pairs[0][1].tolist() == [size - 1] * 2
    assert pairs[1][1].flatten().tolist() == [(size - 1) / 2] * 3
    several = [torch.tensor(rank), torch.full((4, 2), float(rank)).t()]
    hvd.broadcast_parameters(several, 0)
    assert several[0].item() == 0
    assert several[1].tolist() == [[0] * 4] * 2
    hvd.broadcast_parameters(tuple(network(rank).parameters()), 0)
    hvd.broadcast_parameters({}, 0)
    hvd.broadcast_parameters([], 0)
    tied = torch.full((3,), float(rank))
    hvd.broadcast_parameters({"first": tied, "second": tied}, size - 1)
    assert tied.tolist() == [size - 1] * 3


def case_parameters_of_the_wrong_kind() -> None:
    model = network(0)
    for wrong in (model.named_parameters(), model, None, torch.ones(2), "text"):
        with pytest.raises(ValueError, match="invalid params of type"):
            hvd.broadcast_parameters(wrong, 0)  # type: ignore[arg-type]
    for value in (None, 3, np.ones(2)):
        with pytest.raises(TypeError, match="'odd' is not a tensor"):
            hvd.broadcast_parameters({"odd": value, "even": torch.ones(1)}, 0)
    with pytest.raises(ValueError, match="'twice' occurs more than once"):
        hvd.broadcast_parameters([("twice", torch.ones(1)), ("twice", torch.ones(1))], 0)
    with pytest.raises(ValueError, match="is not a rank of this job"):
        hvd.broadcast_parameters({"a": torch.ones(1)}, hvd.size())
    hvd.broadcast_parameters({"odd": torch.ones(1), "twice": torch.ones(2)}, 0)


def case_parameters_that_differ() -> None:
    rank, size = hvd.rank(), hvd.size()
    if size == 1:
        return
    for odd in range(size):
        named = {"shared": torch.full((2,), float(rank))}
        named[f"only.{rank == odd}"] = torch.ones(1)
        with pytest.raises(ValueError, match="ranks hold different names") as caught:
            hvd.broadcast_parameters(named, 0)
        assert f"rank {odd}: ['only.True']" in str(caught.value)
        assert f"rank {(odd + 1) % size}: ['only.False']" in str(caught.value)
        assert "shared" not in str(caught.value)
        assert len(set(hvd.allgather_object(str(caught.value)))) == 1
        assert named["shared"].tolist() == [rank] * 2
    expanded = torch.zeros(1).expand(3)
    for wrong, text in (
        ({"a": expanded}, "expanded"), ({"a": 3}, "int"), (iter(()), "generator"),
        ({1: torch.zeros(3)}, "strings, not 1"),
    ):  # fmt: skip
        kind = TypeError if rank == 1 and text in ("int", "strings, not 1") else ValueError
        with pytest.raises(kind, match=text) as raised:
            hvd.broadcast_parameters(wrong if rank == 1 else {"a": torch.zeros(3)}, 0)  # type: ignore[arg-type]
        assert ("rank 1 cannot" in str(raised.value)) is (rank != 1)
    pairs = [("a", torch.ones(1)), ("b", torch.ones(1))]
    with pytest.raises(ValueError, match="their order differs"):
        hvd.broadcast_parameters(pairs if rank else pairs[::-1], 0)
    # If shapes differ, all other parameters have arrived when the error is raised.
    named = {"a": torch.full((1 + (rank == 1),), 5.0), "z": torch.full((3,), float(rank))}
    with pytest.raises(errors.MismatchError, match=r"'a'.*shapes differ"):
        hvd.broadcast_parameters(named, size - 1)
    assert named["a"].unique().tolist() == [5]
    assert named["z"].tolist() == [size - 1] * 3
    hvd.broadcast_parameters({"a": torch.ones(1), "z": torch.ones(3)}, 0)


# ---------------------------------------------------------------------------------------------
# Optimizers


def case_learning_rates_of_all_kinds() -> None:
    rank = hvd.rank()
    for roots in (0.25, torch.tensor(0.25)):
        for others in (0.5, torch.tensor(0.5), torch.tensor(0.5, dtype=torch.float64)):
            lr = copy.copy(roots) if rank == 0 else copy.copy(others)
            weight = torch.nn.Parameter(torch.ones(2))
            optimizer = torch.optim.Adam(
                [weight], lr=lr, foreach=False, betas=(0.5, 0.9 - rank / 9)
            )
            hvd.broadcast_optimizer_state(optimizer, 0)
            assert same(roots, optimizer.param_groups[0]["lr"])
            assert optimizer.param_groups[0]["betas"] == (0.5, 0.9)
            if rank == 0:
                assert optimizer.param_groups[0]["lr"] is lr
    # The options that a scheduler has added or changed.
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1 * (rank + 1))
    if rank == 0:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        optimizer.step()
        scheduler.step()
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert optimizer.param_groups[0]["initial_lr"] == 0.1


def case_optimizers_that_cannot_be_sent() -> None:
    rank, size = hvd.rank(), hvd.size()
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(weights), 0)
    with pytest.raises(ValueError, match="is not a rank of this job"):
        hvd.broadcast_optimizer_state(torch.optim.SGD(weights, lr=1), size)
    if size == 1:
        return
    odd = rank == size - 1
    mine: torch.optim.Optimizer = torch.optim.SGD(weights[: 2 + odd], lr=1)
    with pytest.raises(ValueError, match="optimizers differ from that of rank 0") as caught:
        hvd.broadcast_optimizer_state(mine, 0)
    assert f"rank {size - 1}: SGD with groups of [3] parameters" in str(caught.value)
    assert "rank 0: SGD with groups of [2] parameters" in str(caught.value)
    mine = (torch.optim.Adam if odd else torch.optim.AdamW)(weights, lr=1.0 + rank)
    with pytest.raises(ValueError, match="Adam with groups") as caught:
        hvd.broadcast_optimizer_state(mine, 0)
    assert "rank 0: AdamW with" in str(caught.value)
    assert mine.param_groups[0]["lr"] == 1 + rank
    mine = torch.optim.SGD(weights, lr=1.0 + rank)
    hvd.broadcast_optimizer_state(mine, 0)
    assert mine.param_groups[0]["lr"] == 1


def case_shutdown() -> None:
    hvd.shutdown()


test_case = session.on_ranks(globals(), 1, 2, 3, 4, session="torch")

"""Process groups of torch.distributed over hororing: their ranks, messages, barriers, ends.

Cases on 3 ranks in the job of the other files of PyTorch: push tier, 4 s. Ranks without a launcher,
one that dies, and an older PyTorch: push tier, 8 s.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import session
import tiers
import torch
import torch.distributed as dist
from rank_tensors import all_of, mine, raises
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

import hororing.torch as hvd
import hororing.torch_backend
from hororing import errors
from hororing.torch.distributed import board

OP = dist.ReduceOp


def case_init() -> None:
    dist.init_process_group("hororing", timeout=timedelta(seconds=150))


def case_a_group_of_gloo() -> None:
    """Before `use_local_synchronization`: ranks of torch 2.14 name later groups differently."""
    other = dist.new_group(backend="gloo")
    dist.monitored_barrier(other, timedelta(seconds=60))


def case_groups_in_any_order() -> None:
    rank = dist.get_rank()
    members = [[0, 1], [1, 2], [0, 2], [0], [1], [2], [0, 1, 2], [0, 1]]
    groups = [dist.new_group(ranks) for ranks in members]
    mine_now = [(g, ranks) for g, ranks in zip(groups, members, strict=True) if rank in ranks]
    for order in itertools.permutations(range(3)):
        # Each rank takes its groups in its own order.
        shift = order[rank]
        turned = mine_now[shift:] + mine_now[:shift]
        tensors = [mine(4) for _ in turned]
        works = [
            dist.all_reduce(tensor, group=group, async_op=True)
            for tensor, (group, _) in zip(tensors, turned, strict=True)
        ]
        for work, tensor, (_, ranks) in zip(works, tensors, turned, strict=True):
            work.wait()
            assert torch.equal(tensor, all_of(4)[ranks].sum(0))
    if rank != 0:
        group = groups[1]
        assert dist.get_group_rank(group, rank) == rank - 1
        tensor = mine(3)
        dist.broadcast(tensor, 2, group=group)
        assert torch.equal(tensor, mine(3, of=2))
    local = dist.new_group([0, 2], use_local_synchronization=True) if rank != 1 else None
    if local is not None:
        tensor = mine(1)
        dist.all_reduce(tensor, group=local)
        assert tensor.item() == 4
    mesh = dist.init_device_mesh("cpu", (3,))
    tensor = mine(2)
    dist.all_reduce(tensor, group=mesh.get_group())
    assert torch.equal(tensor, all_of(2).sum(0))


def case_groups_in_an_order_of_their_own() -> None:
    rank = dist.get_rank()
    for order in ([2, 0], [1, 2, 0], [2, 1, 0]):
        group = dist.new_group(order, sort_ranks=False)
        if rank not in order:
            continue
        size, here = len(order), order.index(rank)
        assert (dist.get_group_rank(group, rank), group.rank()) == (here, here)
        every = torch.stack([mine(2 * size, of=of) for of in order])  # by rank of the group
        outputs = [torch.empty(2) for _ in order]
        dist.all_gather(outputs, mine(2), group)
        assert torch.equal(torch.stack(outputs), every[:, :2])
        outputs = [torch.empty(of + 1) for of in order]  # uneven
        dist.all_gather(outputs, mine(rank + 1), group)
        assert all(
            torch.equal(a, mine(of + 1, of=of)) for a, of in zip(outputs, order, strict=True)
        )
        whole = torch.empty(2 * size)
        dist.all_gather_into_tensor(whole, mine(2), group)
        assert torch.equal(whole, every[:, :2].flatten())
        parts = every.reshape(size, size, 2)  # from, to
        part, rows = torch.empty(2), list(mine(size, 2))
        for op, oracle in ((OP.SUM, parts.sum(0)), (OP.MAX, parts.amax(0))):
            dist.reduce_scatter(part, rows, op, group)
            assert torch.equal(part, oracle[here])
            dist.reduce_scatter_tensor(part, mine(2 * size), op, group)
            assert torch.equal(part, oracle[here])
        for root in order:
            lists = [torch.empty(2) for _ in order] if rank == root else None
            dist.gather(mine(2), lists, root, group)
            assert lists is None or torch.equal(torch.stack(lists), every[:, :2])
            dist.scatter(part, rows if rank == root else None, root, group)
            assert torch.equal(part, parts[order.index(root), here])
            tensor = mine(2)
            dist.broadcast(tensor, root, group)
            assert torch.equal(tensor, mine(2, of=root))
        output = torch.empty(size, 2)
        dist.all_to_all_single(output, mine(size, 2), group=group)
        assert torch.equal(output, parts[:, here])
        # Rank i of the group sends i + 2j numbers to rank j.
        splits = [here + 2 * to for to in range(size)]
        counts = [2 * here + of for of in range(size)]
        sent = [
            mine(20, of=of)[: sum(i + 2 * to for to in range(size))].split(
                [i + 2 * to for to in range(size)]
            )[here]
            for i, of in enumerate(order)
        ]
        output = torch.empty(sum(counts))
        dist.all_to_all_single(output, mine(20)[: sum(splits)], counts, splits, group)
        assert torch.equal(output, torch.cat(sent))
        outputs = [torch.empty(count) for count in counts]
        dist.all_to_all(outputs, list(mine(20)[: sum(splits)].split(splits)), group)
        assert all(torch.equal(a, b) for a, b in zip(outputs, sent, strict=True))
        right, left = order[(here + 1) % size], order[here - 1]
        received = torch.empty(2)
        works = [dist.isend(mine(2), right, group), dist.irecv(received, left, group)]
        for work in works:
            work.wait()
        assert torch.equal(received, mine(2, of=left))
        objects: list[Any] = [None] * size
        dist.all_gather_object(objects, rank, group)
        assert objects == order


def case_messages_between_two_ranks() -> None:
    rank = dist.get_rank()
    right, left = (rank + 1) % 3, (rank - 1) % 3
    # A ring in which all ranks send first, on connections that are not open yet.
    for size in (5, 1, 0):
        received = torch.empty(size)
        works = [dist.isend(mine(size), right), dist.irecv(received, left)]
        for work in works:
            work.wait()
        assert torch.equal(received, mine(size, of=left))
    assert works[1].source_rank() == left
    # Messages match by tag and order, whatever the order of waits.
    tensors = [torch.empty(2, 3) for _ in range(4)]
    works = [dist.irecv(tensors[i], left, tag=i % 2) for i in (3, 2, 1, 0)]
    for i in (0, 1, 3, 2):
        dist.send(mine(2, 3) * (i + 1), right, tag=i % 2)
    for work in works:
        work.wait()
    # Of each tag, the first receive gets the first message.
    sent_as = {3: 1, 1: 3, 2: 0, 0: 2}
    for i, tensor in enumerate(tensors):
        assert torch.equal(tensor, mine(2, 3, of=left) * (sent_as[i] + 1))
    wide = torch.zeros(3, 4)
    operations = [
        dist.P2POp(dist.isend, mine(3, 2).t(), right),
        dist.P2POp(dist.irecv, wide[:, 1:3].t(), left),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert torch.equal(wide[:, 1:3], mine(3, 2, of=left))
    future = dist.irecv(received := torch.empty(1), left).get_future()
    dist.isend(mine(1), right)
    assert torch.equal(future.wait()[0], mine(1, of=left))
    group = dist.new_group([0, 2])
    if rank != 1:
        objects = ["from 2"] if rank == 2 else [None]
        exchange = dist.send_object_list if rank == 2 else dist.recv_object_list
        exchange(objects, 2 - rank, group=group)
        assert objects == ["from 2"]
    if rank == 0:
        raises(errors.MismatchError, r"rank 0: \[2\]; rank 1: \[3\]", lambda: dist.send(mine(2), 1))
        raises(ValueError, "not another rank", lambda: dist.isend(mine(2), 0))
    if rank == 1:
        raises(errors.MismatchError, "shapes differ", lambda: dist.recv(mine(3), 0))
    short = dist.new_group([0, 1, 2], timeout=timedelta(seconds=0.2))
    if rank == 2:
        raises(errors.StalledError, "0.2 s", lambda: dist.recv(mine(1), 1, group=short))
    dist.barrier()


def case_messages_from_any_source() -> None:
    rank = dist.get_rank()
    if rank == 0:
        received: dict[int, list[float]] = {1: [], 2: []}
        for _ in range(4):
            tensor = torch.empty(3)
            received[dist.recv(tensor)].append(tensor[0].item())
        assert received == {1: [2, 20], 2: [3, 30]}
    else:  # without a wait
        works = [dist.isend(mine(3) * factor, 0) for factor in (1, 10)]
    dist.barrier()
    assert rank == 0 or all(work.is_success() for work in works)
    if rank == 0:  # receives the named rank first; another tag waits
        named, anybody, tagged = torch.empty(2), torch.empty(2), torch.empty(2)
        works = [dist.irecv(named, 1), dist.irecv(anybody), dist.irecv(tagged, tag=3)]
        assert works[2].get_future().wait()[0] is tagged
        works[1].wait()
        works[0].wait()
        assert [work.source_rank() for work in works] == [1, 2, 1]
        assert torch.equal(named, mine(2, of=1))
        assert torch.equal(anybody, mine(2, of=2))
        assert torch.equal(tagged, mine(2, of=1))
    else:
        dist.send(mine(2), 0)
        if rank == 1:
            dist.send(mine(2), 0, tag=3)
    short = dist.new_group([0, 1, 2], timeout=timedelta(seconds=0.2))
    if rank == 0:
        work = dist.irecv(torch.empty(2), group=short, tag=9)
        raises(ValueError, "the source is not known yet", work.source_rank)
        raises(errors.StalledError, "0.2 s", work.wait)
        raises(errors.MismatchError, "shapes differ", lambda: dist.recv(torch.empty(2)))
    if rank == 2:
        raises(errors.MismatchError, "shapes differ", lambda: dist.send(mine(3), 0))
    dist.barrier()


def case_a_monitored_barrier_names_who_is_missing() -> None:
    group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=150))
    dist.monitored_barrier()
    dist.monitored_barrier(group, timedelta(seconds=60), wait_all_ranks=True)
    # Rank 0 returns when the others have read its answer, because its store may end with it.
    dist.barrier()
    if dist.get_rank() == 0:
        dist.monitored_barrier(group)
        key = f"{group._board._prefix()}barrier2.read"
        assert group._board._store.check([f"{key}{rank}" for rank in (1, 2)])
    else:
        with mock.patch.object(board, "POLL_S", 0.5):
            dist.monitored_barrier(group)
    late = dist.get_rank() == 1
    if late:  # ranks that come later get the same answer
        dist.barrier()
    began = time.monotonic()
    words = "Rank 1 failed to pass monitoredBarrier in 1 s"
    raises(errors.StalledError, words, lambda: dist.monitored_barrier(group, 1))
    raises(errors.StalledError, words, lambda: dist.monitored_barrier(group, 1, True))
    assert dist.get_rank() != 0 or time.monotonic() - began >= 2
    if not late:
        dist.barrier()
    dist.monitored_barrier(group)
    rank = dist.get_rank()
    if rank != 0:
        dist.barrier()
    words = f"Rank {rank} successfully reached monitoredBarrier.*" if rank != 0 else ""
    raises(errors.StalledError, words + "Ranks 1, 2 failed to pass monitoredBarrier in 0.1 s",
           lambda: dist.monitored_barrier(group, 0.1, True))  # fmt: skip
    if rank == 0:
        dist.barrier()
    # Errors of torch itself.
    raises(RuntimeError, "split", lambda: dist.split_group(split_ranks=[[0, 1], [2]]))


def case_what_torch_asks_of_a_group() -> None:
    """Used, for example, to broadcast rank 0's weights."""
    net = nn.Linear(2, 2)
    state = {name: mine(*p.shape) for name, p in net.named_parameters()}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(net, state if dist.get_rank() == 0 else {}, options=options)
    assert torch.equal(net.weight.detach(), mine(2, 2, of=0))
    assert dist.distributed_c10d._device_capability()[0] == "cpu"
    assert not dist.group.WORLD._get_backend(torch.device("cpu")).supports_splitting
    attach = mock.Mock()  # torch 2.15 has such a function, which fails for groups in Python
    hororing.torch_backend._unless_ours(attach)(dist.group.WORLD, None, [0, 1, 2])
    attach.assert_not_called()


def case_destroyed_groups_refuse_and_a_new_one_begins() -> None:
    group = dist.new_group([0, 1, 2])
    dist.destroy_process_group(group)
    raises(ValueError, "has been destroyed", lambda: group.allreduce([mine(2)]))
    old = dist.group.WORLD
    dist.destroy_process_group()
    for call in (
        old.barrier,
        old.monitored_barrier,
        lambda: old.send([torch.ones(2)], 0),
        lambda: old.recv_anysource([torch.ones(2)]),
    ):
        raises(ValueError, "has been destroyed", call)
    assert hvd.is_initialized()
    dist.init_process_group("cpu:hororing,cuda:nccl")  # works without CUDA
    tensor = mine(4)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, all_of(4).sum(0))
    dist.destroy_process_group()
    raises(ValueError, "hororing runs already with rank", lambda: dist.init_process_group(
        "hororing", store=dist.HashStore(), rank=0, world_size=1))  # fmt: skip


test_case = session.on_ranks(globals(), 3, session="torch")

# ---------------------------------------------------------------------------------------------
# Without a launcher

FORKED = """
import multiprocessing, os, pathlib, sys, time
import torch, torch.distributed as dist
from hororing import errors
from hororing.torch_backend import register

def rank(number, path):
    register()
    for size in (2, 3):  # the first time without rank 2
        if number >= size:
            continue
        dist.init_process_group("hororing", init_method=f"file://{path}.{size}", rank=number,
                                world_size=size)
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [size] * 2
        if size == 2:
            dist.barrier()
            sent = pathlib.Path(path + ".sent")
            begin = time.monotonic()
            if number == 0:  # the receiver does not wait yet; its engine holds requests for 10 s
                dist.send(tensor, 1)
                took_s = time.monotonic() - begin
                sent.touch()
                assert took_s < 5
            else:
                work = dist.irecv(tensor, 0)
                while not sent.exists() and time.monotonic() - begin < 60:
                    time.sleep(0.01)
                work.wait()
            dist.destroy_process_group()
    asked = pathlib.Path(path + ".asked")
    if number == 1:
        begin = time.monotonic()
        while not asked.exists() and time.monotonic() - begin < 60:
            time.sleep(0.01)
        os._exit(7)
    if number == 0:
        future = dist.irecv(torch.ones(2)).get_future()
        # Rank 1 never adds the set of the two.
        sent, received = dist.isend(tensor, 1), dist.irecv(tensor, 1)
        asked.touch()
        monitored = dist.group.WORLD.monitored_barrier
        for call in (lambda: dist.recv(tensor), lambda: dist.all_reduce(tensor), sent.wait,
                     received.wait, monitored):
            try:
                call()
            except errors.PeerLostError as error:
                assert error.rank == 1, error
                print("lost", error.rank, flush=True)
        try:
            future.wait()
        except RuntimeError as error:
            assert "PeerLostError" in str(error), error
    if number == 2:
        try:
            dist.barrier()
        except errors.PeerLostError:
            pass
    os._exit(0)

fork = multiprocessing.get_context("fork")
ranks = [fork.Process(target=rank, args=(number, sys.argv[1])) for number in range(3)]
for each in ranks:
    each.start()
for each in ranks:
    each.join()
print("codes", [each.exitcode for each in ranks])
"""


def test_ranks_without_a_launcher_meet_in_torchs_store_and_see_a_death(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(FORKED)
    done = subprocess.run(
        [sys.executable, script, tmp_path / "store"], capture_output=True, text=True, timeout=200,
        check=False, env=os.environ | {"HORORING_CYCLE_TIME_MS": "10000"},
    )  # fmt: skip
    assert done.stdout.count("lost 1\n") == 5, done.stdout + done.stderr
    assert "codes [0, 7, 0]" in done.stdout, done.stdout + done.stderr


ENDS = """
import sys, time, torch, torch.distributed as dist
dist.init_process_group("hororing", init_method="file://" + sys.argv[1], rank=0, world_size=1)
work = dist.all_reduce(torch.ones(1), async_op=True)
future = work.get_future().then(lambda _: time.sleep(float(sys.argv[2])))
time.sleep(0.1)
print("end", flush=True)
sys.exit(int(sys.argv[3]))
"""


@pytest.mark.parametrize(("seconds", "code"), [(0.5, 0), pytest.param(600, 3, marks=tiers.full)])
def test_a_callback_that_runs_at_the_end_does_not_abort_the_process(
    seconds: float, code: int, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDS, tmp_path / "store", str(seconds), str(code)],
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (code, "end\n"), done.stderr


@tiers.full
def test_a_store_that_does_not_answer_is_an_error_and_no_abort() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def refuse() -> None:
            with contextlib.suppress(OSError):
                while True:
                    server.accept()[0].close()

        threading.Thread(target=refuse, daemon=True).start()
        there = {
            "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1]),
            "HORORING_TIMEOUT_S": "3",
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", "import hororing.numpy as hvd; hvd.init()"],
            capture_output=True, text=True, timeout=150, check=False, env=os.environ | there,
        )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "TransportError" in done.stderr


def test_torch_finds_the_backend() -> None:
    tomllib = pytest.importorskip("tomllib")
    told = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    name = told["project"]["entry-points"]["torch.backends"]["hororing"]
    assert name == "hororing.torch_backend:register"
    hororing.torch_backend.register()
    hororing.torch_backend.register()  # has no effect
    assert dist.Backend.HORORING == "hororing"


OLDER = """
import importlib, torch.distributed as dist
import hororing.torch
del dist.AllreduceOptions.asyncOp
try:
    import hororing.torch.distributed
except ImportError as error:
    print(error)
del dist.torch.amp.GradScaler
try:
    importlib.reload(hororing.torch)
except ImportError as error:
    print(error)
"""


def test_an_older_torch_is_refused():
    ran = subprocess.run(
        [sys.executable, "-c", OLDER], capture_output=True, text=True, check=True, timeout=150
    )
    backend, package = ran.stdout.splitlines()
    assert backend.startswith('the backend "hororing" needs a later PyTorch than')
    assert package.startswith("hororing.torch needs PyTorch 2.3 or later")

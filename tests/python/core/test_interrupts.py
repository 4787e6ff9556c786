"""Ctrl-C at every line of a wait: another wait gets the result, once, and nothing hangs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import session
import torch
from interruption import interrupted

import hororing.torch as hvd
from hororing._requests import handles, persistent
from hororing.torch._optimizer import gradient, reducer, step


def lost_waits(start: Callable[..., int], prefix: str) -> int:
    """Return the number of lines of a wait at which an interrupt loses the result."""
    lost = 0
    before = set(handles._pending)  # torch keeps some of its own requests to the end
    for at in range(1, 20):
        handle = start(torch.full((3,), 1.0), op=hvd.Sum, name=f"{prefix}.{at}")
        again = hvd.rank() == 0 and interrupted(
            lambda handle=handle: hvd.synchronize(handle), at, handles.wait
        )
        if again:
            try:
                assert hvd.poll(handle) in (False, True)
                assert hvd.synchronize(handle).tolist() == [hvd.size()] * 3
            except ValueError:  # wait was about to return it
                lost += 1
            with pytest.raises(ValueError, match="no handle"):
                hvd.synchronize(handle)
        elif hvd.rank() > 0:
            assert hvd.synchronize(handle).tolist() == [hvd.size()] * 3
    assert set(handles._pending) == before
    return lost


def case_a_wait_may_be_repeated_after_an_interrupt_anywhere() -> None:
    hvd.init()
    assert lost_waits(hvd.allreduce_async_, "in_place") == (hvd.rank() == 0)
    assert lost_waits(hvd.allreduce_async, "elsewhere") < 5


def check_optimizer(prefix: str, **options: Any) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(5)]
    named = [(f"{prefix}.{i}", parameter) for i, parameter in enumerate(parameters)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.0), named, **options)
    lines = 0
    before = set(handles._pending)
    for at in range(1, 200):
        optimizer.zero_grad()
        # The last parameter has no gradient; the reducer makes one of zeros.
        loss = sum((p * (at + hvd.rank())).sum() for p in parameters[:4])
        assert isinstance(loss, torch.Tensor)
        again = hvd.rank() == 0 and interrupted(
            loss.backward, at, step.Step.task_ended.__wrapped__,
            reducer._finish_all_reducers.__wrapped__, reducer.Reducer.pass_ended,
            reducer.Reducer.send_remaining, reducer.Reducer.finish, reducer.Reducer._wait_for,
            step.Step.end,
            gradient.Gradient.finish, persistent.finish_many, handles.block_until_complete,
        )  # fmt: skip
        torch.set_grad_enabled(True)  # the interrupted line may have been the end of no_grad()
        if hvd.rank() > 0:
            loss.backward()
        elif again:
            optimizer.synchronize()
        mean = at + (hvd.size() - 1) / 2
        for parameter, wanted in zip(parameters, [mean] * 4 + [0.0], strict=True):
            assert parameter.grad is not None
            assert parameter.grad.tolist() == [wanted] * 3, at
        with optimizer.skip_synchronize():
            optimizer.step()
        lines = at
        if not hvd.broadcast_object(again, name=f"{prefix}.again"):
            break
    assert 30 < lines < 199
    assert set(handles._pending) == before


def case_gradients_may_be_waited_for_again_after_an_interrupt_anywhere() -> None:
    check_optimizer("plain")


def case_compressed_gradients_may_be_waited_for_again() -> None:
    check_optimizer("compressed", compression=hvd.Compression.fp16)


def case_grouped_gradients_may_be_waited_for_again() -> None:
    check_optimizer("grouped", num_groups=2)


def interrupted_alone(call: Callable[[], Any]) -> Any:
    """Call; rank 0 is interrupted while it waits, before the other ranks call. Return the result.

    None on rank 0.
    """
    if hvd.rank() > 0:
        hvd.barrier()
        return call()
    assert interrupted(call, 1, handles.block_until_complete)
    hvd.barrier()
    return None


def case_an_interrupted_call_of_several_steps_counts_as_made() -> None:
    """The others get their results, and the calls after it match."""
    hvd.shutdown()
    hvd.init(process_sets="dynamic")
    rank, both = hvd.rank(), list(range(hvd.size()))
    for name in (None, "named"):
        gathered = interrupted_alone(lambda name=name: hvd.allgather_object(rank, name))
        assert gathered == (both if rank else None)
        for root in both:
            named = name and f"{name}.{root}"
            sent = interrupted_alone(
                lambda root=root, named=named: hvd.broadcast_object(str(rank), root, named)
            )
            assert sent == (str(root) if rank else None)
        assert hvd.allgather_object(rank) == both
        assert hvd.broadcast_object(rank, 1) == 1
    added = hvd.ProcessSet(both[:1])
    interrupted_alone(lambda: hvd.add_process_set(added))
    while added.process_set_id is None:
        time.sleep(0.01)
    assert hvd.allgather_object(added.process_set_id) == [added.process_set_id] * len(both)
    interrupted_alone(lambda: hvd.remove_process_set(added))
    while added.process_set_id is not None:
        time.sleep(0.01)
    hvd.barrier()
    assert not hvd.remove_process_set(added)


def case_ranks_count_alike_after_an_interrupted_join() -> None:
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(1), op=hvd.Sum)
        assert interrupted(hvd.join, 1, handles.block_until_complete)
        while True:
            try:
                hvd.barrier()
                break
            except ValueError:  # not everybody has joined
                time.sleep(0.01)
        assert hvd.synchronize(handle).item() == hvd.size()
    else:
        for _ in range(3):
            hvd.allreduce(torch.ones(1), op=hvd.Sum)
        hvd.join()
        hvd.barrier()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


test_case = session.on_ranks(globals(), 2, push=[2], session="torch")

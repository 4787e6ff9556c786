"""DistributedDataParallel over hororing: buckets travel during backward; communication hooks.

Cases on 3 ranks in the job of the other files of PyTorch: push tier, 3 s.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import session
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

import hororing.torch as hvd

STEPS = 4


def model() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)
    )


def in_buckets() -> Any:
    """Return a model with DDP in which every layer has its own bucket."""
    return nn.parallel.DistributedDataParallel(model(), bucket_cap_mb=0.0001)


def trained(net: nn.Module, rank: int | None, optimizer: Any = None) -> list[torch.Tensor]:
    """Return the weights after some steps, with one rank's part of the batch or all of it."""
    optimizer = optimizer or torch.optim.SGD(net.parameters(), 0.1)
    for step in range(STEPS):
        data = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        net(data.flatten(0, 1) if rank is None else data[rank]).square().mean().backward()
        optimizer.step()
    return [param.detach().clone() for param in net.parameters()]


def case_init() -> None:
    dist.init_process_group("hororing")


def case_a_bucket_is_reduced_before_backward_ends() -> None:
    net = in_buckets()
    done: list[int] = []

    def wait(*_: object) -> None:
        """Between the gradients of the last layer and those of the first."""
        end = time.monotonic() + 60
        done.append(hvd.statistics()["completed"])
        while done[-1] == before and time.monotonic() < end:
            time.sleep(1e-3)
            done.append(hvd.statistics()["completed"])

    net(torch.ones(4, 6)).sum().backward()  # DDP has one bucket in the first pass
    net.module[1].register_full_backward_hook(wait)
    loss = net(torch.ones(4, 6)).sum()  # DDP makes its buckets, with broadcasts
    before = hvd.statistics()["completed"]
    loss.backward()
    assert done[-1] > before


def case_gradients_travel_as_bfloat16() -> None:
    def hook(state: Any, bucket: Any) -> Any:  # torch requires CUDA for hooks that it knows by name
        return default_hooks.bf16_compress_hook(state, bucket)

    hook.__annotations__.clear()  # they are strings here
    net = in_buckets()
    net.register_comm_hook(None, hook)
    weights, alone = trained(net, dist.get_rank()), trained(model(), None)
    torch.testing.assert_close(weights, alone, rtol=0.02, atol=1e-3)
    assert any(not torch.equal(a, b) for a, b in zip(weights, alone, strict=True))


def case_callbacks_of_hooks_call_collectives() -> None:
    """In an order that differs between ranks, and on different threads."""
    rank, buckets = dist.get_rank(), set()

    def average(tensor: torch.Tensor) -> Any:
        return dist.all_reduce(tensor, dist.ReduceOp.AVG, async_op=True)

    def once_more(done: Any) -> list[torch.Tensor]:
        return average(done.value()[0]).get_future().wait()

    def hook(_: Any, bucket: Any) -> Any:
        buckets.add(bucket.index())
        work = average(bucket.buffer())
        future = work.get_future()
        if bucket.index() % 3 == rank:  # callbacks run immediately
            work.wait()
        elif bucket.index() % 3 == (rank + 1) % 3:
            future = future.then(once_more)
            future.wait()
            return future.then(once_more).then(lambda done: done.value()[0])
        return future.then(once_more).then(once_more).then(lambda done: done.value()[0])

    hook.__annotations__.clear()
    net = in_buckets()
    net.register_comm_hook(None, hook)
    torch.testing.assert_close(trained(net, rank), trained(model(), None))
    assert len(buckets) == 3


def case_power_sgd() -> None:
    """The same as over gloo with a hook in which each bucket waits for the previous one."""

    def in_turn(state: Any, bucket: Any) -> Any:
        future = powerSGD_hook.powerSGD_hook(state, bucket)
        future.wait()
        return future

    in_turn.__annotations__.clear()
    weights = []
    for backend, hook in (("gloo", in_turn), ("hororing", powerSGD_hook.powerSGD_hook)):
        group = dist.new_group(backend=backend)
        net = nn.parallel.DistributedDataParallel(
            model(), process_group=group, bucket_cap_mb=0.0001
        )
        state = powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2, min_compression_rate=1)
        net.register_comm_hook(state, hook)
        weights.append(trained(net, dist.get_rank()))
        assert len(state.error_dict) == 3
    torch.testing.assert_close(*weights)
    assert not torch.allclose(weights[0][0], trained(model(), None)[0], rtol=1e-3)


def case_post_local_sgd() -> None:
    """Two steps average gradients over all ranks; later steps average the weights instead."""
    own = [dist.new_group([rank]) for rank in range(3)][dist.get_rank()]
    net = in_buckets()
    state = post_localSGD_hook.PostLocalSGDState(None, own, start_localSGD_iter=2)
    net.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about averaging in every step
        averager = PeriodicModelAverager(period=1, warmup_steps=2)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(net.parameters(), 0.1), averager)
    weights = trained(net, dist.get_rank(), optimizer)
    assert state.iter == 2
    torch.testing.assert_close(weights, trained(model(), None))


def case_join_divides_by_the_ranks_that_still_train() -> None:
    """Rank r has r + 1 batches; the last ones are averaged over fewer ranks."""
    data = torch.randn(3, 3, 4, 6, generator=torch.Generator().manual_seed(1))
    rank, net, alone = dist.get_rank(), in_buckets(), model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with net.join(divide_by_initial_world_size=False):
        for step in range(rank + 1):
            optimizer.zero_grad()
            net(data[step, rank]).square().mean().backward()
            optimizer.step()
    optimizer = torch.optim.SGD(alone.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        alone(data[step, step:].flatten(0, 1)).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(list(net.module.parameters()), list(alone.parameters()))


def case_destroy() -> None:
    dist.destroy_process_group()
    hvd.shutdown()


test_case = session.on_ranks(globals(), 3, session="torch")

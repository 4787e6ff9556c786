"""What gradients take of memory: bucket views, copies, and DDP's two ways."""

from __future__ import annotations

import tempfile
from collections.abc import Callable

import mpirun
import pytest
import torch
import torch.distributed as dist
from test_memory import GIVE_BACK, held_mib
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hororing.torch as hvd

LAYERS = 16  # of 4 MiB


def on_average(mib: float) -> float:
    """Of all ranks: pages of one rank's arena may count for another that reads them."""
    return sum(hvd.allgather_object(mib)) / hvd.size()


def gradients_and_more(model: nn.Module, step: Callable[[], None]) -> float:
    """What is held after the third backward pass and its reduction."""
    for _ in range(3):
        for param in model.parameters():
            param.grad = None
        model(torch.ones(2, 1024)).mean().backward()
        step()
    return on_average(held_mib())


def case_views_take_no_more_than_ddp() -> None:
    torch.set_num_threads(1)
    before = held_mib()
    hvd.init()
    own = held_mib() - before
    meeting = hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}/ranks", rank=hvd.rank(), world_size=hvd.size()
    )
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(LAYERS)])
    params = list(model.parameters())
    gradients = sum(param.nbytes for param in params) / 2**20

    def with_ddp(views: bool) -> float:
        alone = gradients_and_more(model, lambda: None)
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=views)
        return gradients_and_more(wrapped, lambda: None) - alone

    def with_hororing(views: bool) -> float:
        alone = gradients_and_more(model, lambda: None)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(params, lr=0.1), model.named_parameters(), gradient_as_bucket_view=views
        )
        held = gradients_and_more(model, optimizer.synchronize) - alone
        in_arena = hvd.statistics()["arena_bytes"] / 2**20
        assert in_arena >= gradients if views else in_arena == 0
        return own + held

    told = {
        "DDP": with_ddp(views=False),
        "DDP's views": with_ddp(views=True),
        "copies": with_hororing(views=False),
        "views": with_hororing(views=True),
    }
    print(told)
    assert told["DDP"] > 0.8 * gradients, told  # or nothing is measured
    assert max(told["views"], told["copies"]) <= told["DDP"], told
    # But for the engine's own.
    assert told["views"] <= told["DDP's views"] + 16, told
    dist.destroy_process_group()


@pytest.mark.parametrize("case", mpirun.case_names(globals()))
def test_on_ranks(case: str) -> None:
    mpirun.cases_of(__file__, 2, **GIVE_BACK).check(case)

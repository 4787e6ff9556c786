"""Tests on ranks with PyTorch; test_ranks_frameworks.py lets pytest run a copy."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.distributed as dist

import hororing.testing
import hororing.torch as hvd


@pytest.mark.ranks(2)
def test_both_are_initialised():
    assert dist.get_backend() == "hororing"
    assert (hvd.rank(), hvd.size()) == (dist.get_rank(), dist.get_world_size())
    ones = torch.ones(3)
    dist.all_reduce(ones)
    assert ones.tolist() == hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [2.0] * 3


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("turn", [1, 2])
def test_gloo(turn):
    assert dist.get_backend() == "gloo"
    assert not hvd.is_initialized()
    ones = torch.ones(3)
    dist.all_reduce(ones)
    assert ones[0] == 2
    hororing.testing.assert_same(ones)


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.xfail(strict=True, raises=ZeroDivisionError)
def test_a_failure_on_gloo():
    1 / dist.get_rank()
    dist.barrier()


@pytest.mark.ranks(2, init=False)
def test_code_that_initialises_itself():
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    assert dist.get_world_size() == 2


@pytest.mark.ranks(2, init=False)
def test_hvd_initialised_by_the_test():
    hvd.init()
    assert hvd.size() == 2


@pytest.mark.ranks(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_the_same_bits(dtype):
    weights = {"w": torch.zeros(2, 3, dtype=dtype)}
    hororing.testing.assert_same(weights)
    weights["w"][1, 2] = int(dist.get_rank() == 1)
    with pytest.raises(AssertionError, match=r"rank 1 differs from rank 0 in \['w'\] .*\(1, 2\)"):
        hororing.testing.assert_same(weights)
    dist.barrier()


@pytest.mark.ranks(3)
def test_a_rank_dies_in_a_training_step():
    model = torch.nn.Linear(4, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    hororing.testing.kill(rank=1, at="step:2")
    with pytest.raises(RuntimeError, match="rank 1"):  # noqa: PT012
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrap", ["DistributedOptimizer", "DDP"])
def test_gradients_that_hooks_send_are_collectives(wrap):
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(3)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if wrap == "DDP":
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        optimizer = hvd.DistributedOptimizer(optimizer)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    # 6 gradients a step, or one bucket.
    hororing.testing.kill(rank=1, at="allreduce:2" if wrap == "DDP" else "allreduce:9")
    steps: list[int] = []
    with pytest.raises(RuntimeError, match="rank 1"):  # noqa: PT012
        for step in range(3):
            steps.append(step)
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    assert steps == [0, 1]


@pytest.mark.ranks(2, backend="gloo")
def test_kinds_of_torch():
    hororing.testing.kill(rank=1, at="allgather:2")
    dist.all_reduce(torch.ones(1))
    dist.all_gather([torch.ones(1)] * 2, torch.ones(1))
    with pytest.raises(RuntimeError):
        dist.all_gather_object([None] * 2, "x")


@pytest.mark.ranks(2, init=False)
def test_scripts_for_ccl():
    importlib.import_module("hororing.as_ccl")
    for module in ("oneccl_bindings_for_pytorch", "torch_ccl"):  # such scripts import them
        importlib.import_module(module)
    dist.init_process_group("ccl")
    assert dist.get_backend() == "ccl"
    ones = torch.ones(3)
    dist.all_reduce(ones)
    assert ones[0] == 2
    assert hvd.size() == 2, "it is hororing"
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    model(torch.full((1, 2), float(dist.get_rank()))).sum().backward()
    assert model.module.weight.grad.tolist() == [[0.5, 0.5]]

"""All ranks train the same parameters: the comparison of their digests, with PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import session
import torch
from torch import nn
from torch_training import batches, distributed, network, plain_sgd, share, squares, start

import hororing.torch as hvd
from hororing._adapters.replica_check import CHUNK, Digest, difference, digest
from hororing._requests.process_sets import register, unregister
from hororing.errors import DuplicateNameError, MismatchError
from hororing.torch._optimizer import digests as of_torch


def case_start() -> None:
    start()


def different(seed: int) -> nn.Module:
    """Return a network with other weights on each rank, and change nothing else."""
    state = torch.get_rng_state()
    torch.manual_seed(seed + hvd.rank())
    model = network()
    torch.set_rng_state(state)
    return model


def step(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    inputs, targets = batches(1)[0]
    squares(model, share(inputs), share(targets)).backward()
    optimizer.step()


def case_parameters_that_were_not_broadcast_are_an_error() -> None:
    for options in (
        {},
        {"op": hvd.Sum},
        {"groups": 2},
        {"compression": hvd.Compression.powersgd()},
    ):
        model = different(1)
        optimizer = distributed(model, **options)
        if hvd.size() == 1:
            step(model, optimizer)
            continue
        for _ in range(2):  # also when the script goes on
            with pytest.raises(MismatchError, match=r"6 of 6 .*'0.bias' \(rank 0: .*broadcast_par"):
                step(model, optimizer)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        for _ in range(2):
            step(model, optimizer)


def case_adasum_compares_too() -> None:
    if hvd.size() != 2:
        return
    model = different(2)
    optimizer = distributed(model, op=hvd.Adasum)
    with pytest.raises(MismatchError, match=r"rank 1.*broadcast_parameters"):
        step(model, optimizer)


def case_the_error_names_the_tensor_and_the_ranks() -> None:
    if hvd.size() == 1:
        return
    model, last = network(), hvd.size() - 1
    if hvd.rank() == last:
        with torch.no_grad():
            model[2].bias[0] += 1e-9
    with pytest.raises(MismatchError, match=rf"1 of 6 .*'2.bias' \(rank.* rank {last}: \w+\)\. "):
        step(model, distributed(model))


def case_layers_in_another_order_are_an_error() -> None:
    if hvd.size() == 1:
        return
    layers = [nn.Linear(5, 5), nn.Linear(5, 5)]
    model = nn.Sequential(*(layers if hvd.rank() else layers[::-1]))
    optimizer = hvd.DistributedOptimizer(plain_sgd(model.parameters()))
    with pytest.raises(MismatchError, match=r"noname.*pass named_parameters"):
        model(torch.ones(1, 5)).sum().backward()
    del optimizer


def case_other_names_are_an_error_at_once_instead_of_a_wait() -> None:
    if hvd.size() == 1:
        return
    kept, other = nn.Linear(2, 2), nn.Linear(2, 2)
    name = "mine" if hvd.rank() else "theirs"
    model = nn.ModuleDict({"a": kept, name: other})
    optimizer = distributed(model, plain_sgd)
    with pytest.raises(MismatchError, match=r"'theirs.bias' \(rank 0:.*rank.*: none.*'mine.bias'"):
        (kept(torch.ones(1, 2)) + other(torch.ones(1, 2))).sum().backward()
    del optimizer
    hvd.barrier()


def case_named_parameters_may_have_another_order() -> None:
    model = network()
    named = list(model.named_parameters())
    params = [param for _, param in named]
    if hvd.rank() == 0:
        named.reverse()
        params.reverse()
    step(model, hvd.DistributedOptimizer(plain_sgd(params), named))


def case_ranks_of_a_set_are_compared_with_each_other() -> None:
    if hvd.size() < 3:
        return
    pair = register([0, 2])
    model = different(3 if hvd.rank() == 1 else 3 - hvd.rank())  # equal on ranks 0 and 2
    if hvd.rank() != 1:
        step(model, distributed(model, process_set=pair))
    unregister(pair)


def case_after_a_join_the_last_rank_has_to_broadcast() -> None:
    if hvd.size() == 1:
        return
    for broadcasts in (True, False):
        torch.manual_seed(6)  # ranks have taken different numbers of batches
        model = network()
        optimizer = distributed(model)
        for _ in range(hvd.rank()):
            step(model, optimizer)
        last = hvd.join()
        torch.manual_seed(7)
        if broadcasts:
            hvd.broadcast_parameters(model.state_dict(), last)
            step(model, optimizer)
        else:
            with pytest.raises(MismatchError, match=r"after hvd\.join"):
                step(model, optimizer)


def case_a_rank_without_a_backward_pass_compares_in_its_step() -> None:
    model = network()
    optimizer = distributed(model)
    inputs, targets = batches(1)[0]
    if hvd.rank() == 0:
        squares(model, share(inputs), share(targets)).backward()
    optimizer.step()


def case_the_knob_turns_it_off() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HORORING_CHECK_PARAMETERS", "0")
        hvd.shutdown()
        hvd.init()
        model = different(4)
        step(model, distributed(model))
        hvd.shutdown()
    hvd.init()


def case_two_optimizers_in_use_with_the_same_names_are_refused() -> None:
    if hvd.size() == 1:
        return
    models = [network(), network()]
    optimizers = [distributed(model) for model in models]
    order = (0, 1) if hvd.rank() else (1, 0)  # their gradients would be added to one another

    def both() -> None:
        for at in order:
            step(models[at], optimizers[at])

    with pytest.raises((DuplicateNameError, MismatchError), match=r"different (prefix|values)"):
        both()
    optimizers = [distributed(model) for model in models]
    step(models[0], optimizers[0])
    for _ in range(2):
        with pytest.raises(DuplicateNameError, match=r"'0.weight'.*different prefix.*or delete"):
            step(models[1], optimizers[1])
        hvd.barrier()  # hooks have sent some gradients
    del optimizers[0]
    step(models[1], optimizers[0])


def case_an_optimizer_that_is_only_kept_is_not_refused_until_it_is_used() -> None:
    models, optimizers = [network(), network()], []
    for model in models:
        optimizers.append(distributed(model))
        for _ in range(2):
            step(model, optimizers[-1])
    if hvd.size() > 1:
        with pytest.raises(DuplicateNameError, match="two optimizers in use"):
            step(models[0], optimizers[0])
        hvd.barrier()
    del optimizers[1]
    step(models[0], optimizers[0])


def case_copies_of_an_optimizer_have_its_names() -> None:
    model = network()
    pair = model, distributed(model)
    for each in (copy.deepcopy(pair), pair):
        step(*each)


def test_numpy_and_torch_compute_the_same_digests() -> None:
    torch.manual_seed(1)
    tensors = [
        torch.randn(3, 4), torch.randn(2 * CHUNK + 7), torch.randn(4, 5).t(), torch.tensor(3.0),
        torch.randn(0), torch.randn(5, dtype=torch.float64), torch.randn(9).half()[3:8:2],
        torch.randn(3, dtype=torch.complex64).conj(), torch.tensor([True, False]),
        torch.arange(-3, 3), torch.arange(5, dtype=torch.uint8),
    ]  # fmt: skip
    for tensor in tensors:
        (found,) = of_torch.digests([("a", tensor)])
        assert found.bits == digest(tensor.resolve_conj().numpy())
        assert found.bits == of_torch._on_device(of_torch._words(tensor)).item()
    half = torch.randn(5).bfloat16()
    (found,) = of_torch.digests([("a", half)])
    assert found.bits == digest(half.float().numpy().astype(ml_dtypes.bfloat16))
    assert found.kind == "bfloat16[5]"


def test_a_digest_sees_every_bit_and_the_order() -> None:
    values = np.random.default_rng(5).normal(size=1000).astype(np.float32)
    seen = {digest(values), digest(values[::-1]), digest(values[:-1])}
    for at in range(0, 1000, 7):
        for bit in range(32):
            changed = values.copy()
            changed.view(np.uint32)[at] ^= np.uint32(1 << bit)
            seen.add(digest(changed))
    signs = values.copy()
    signs[[1, 3]] *= -1
    assert len({*seen, digest(signs)}) == 3 + 143 * 32 + 1


def test_tensors_without_elements_of_their_own_are_left_out() -> None:
    sparse = torch.eye(3).to_sparse()
    assert of_torch.digests([("m", torch.empty(3, device="meta")), ("s", sparse)]) == []


def test_the_text_names_what_differs() -> None:
    same = Digest("b", "float32[2]", 7)
    found = {
        0: [Digest("a", "float32[2]", 1), same],
        2: [Digest("a", "float32[3]", 1), same],
        5: [same],
    }
    assert difference(found) == (
        "ranks have different values of 1 of 2 parameters, by the digests of their bits: "
        "'a' (rank 0: float32[2]; rank 2: float32[3]; rank 5: none)"
    )
    many = {rank: [Digest("a", "float32[2]", -1 - rank // 10)] for rank in range(70)}
    text = difference(many)
    assert "ranks 0,1,2,3,4,5 more: ffffffffffffffff; " in text
    assert text.endswith("2 more)")


test_on_ranks = session.on_ranks(globals(), 1, 2, 3, push=[1, 2, 3], session="torch")

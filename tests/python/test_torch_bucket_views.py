"""gradient_as_bucket_view: gradients live in shared memory, and nothing else changes.

Every rank trains a twin of the model in one process on all the data: that is the oracle. Where
gradients were reduced is told by the core's counters.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import mpirun
import pytest
import torch
from torch import nn

import hororing.torch as hvd
from hororing import arena
from hororing.errors import DuplicateNameError
from hororing.torch import bucket_views

BATCH = 24  # a multiple of 1, 2, 3 and 4 ranks
TOLERANCE = 1e-12  # sums of at most 24 numbers of about 1, in another order
# Smaller batches of gradients are packed by the core: 33 KiB of float64.
WIDE = 66


def case_start() -> None:
    hvd.init()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(mpirun.seed())


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(5, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE), nn.Tanh(),
                         nn.Linear(WIDE, 3))  # fmt: skip


def batches(steps: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(BATCH, 5), torch.randn(BATCH, 3)) for _ in range(steps)]


def share(whole: torch.Tensor) -> torch.Tensor:
    return whole[hvd.rank() :: hvd.size()]


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(inputs), targets)


def sgd(params: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def distributed(model: nn.Module, **options: Any) -> Any:
    options.setdefault("gradient_as_bucket_view", True)
    return hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), **options)


def twins(**options: Any) -> tuple[nn.Module, Any, nn.Module, Any]:
    model = network()
    twin = copy.deepcopy(model)
    return model, distributed(model, **options), twin, sgd(twin.parameters())


def assert_same(model: nn.Module, twin: nn.Module) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(
            mine, theirs, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda text, n=name: f"{n}: {text}"
        )


def views_of(optimizer: Any) -> dict[str, torch.Tensor]:
    if optimizer._reducer is None:  # one rank
        return {}
    slots = (slot for _, slot in optimizer._reducer._slots.values())
    return {slot.name: slot.view for slot in slots if slot.view is not None}


def in_views(model: nn.Module, optimizer: Any) -> list[str]:
    """Which gradients are where they are reduced without a copy."""
    views = views_of(optimizer)
    return [name for name, p in model.named_parameters() if p.grad is views.get(name, p)]


def everything(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()] if hvd.size() > 1 else []


def packed(work: Callable[[], object]) -> int:
    """Bytes of gradients that `work` has had copied."""
    before = hvd.statistics()["packed_bytes"]
    work()
    hvd.barrier()
    return hvd.statistics()["packed_bytes"] - before


# ---------------------------------------------------------------------------------------------
# The same result as one process


def case_gradients_in_views_train_as_one_process():
    for set_to_none in (True, False):
        model, optimizer, twin, plain = twins()

        def train(model=model, optimizer=optimizer, twin=twin, plain=plain, none=set_to_none):
            for inputs, targets in batches():
                optimizer.zero_grad(set_to_none=none)
                loss_of(model, share(inputs), share(targets)).backward()
                optimizer.step()
                plain.zero_grad()
                loss_of(twin, inputs, targets).backward()
                plain.step()
                assert in_views(model, optimizer) == everything(model)

        # Each batch of them is larger than what the core packs in any case.
        assert packed(train) <= 4 * 4 * (32 << 10)
        assert_same(model, twin)


def case_every_float_type_is_reduced_in_its_view():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        param = nn.Parameter(torch.zeros(40000, dtype=dtype))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([param], lr=1.0), op=hvd.Sum, gradient_as_bucket_view=True
        )
        before = hvd.statistics()["in_place_bytes"]
        (param * (hvd.rank() + 1.0)).sum().backward()
        optimizer.step()
        assert torch.equal(param.grad, torch.full_like(param, sum(range(hvd.size() + 1))))
        if hvd.size() > 1:
            assert hvd.statistics()["in_place_bytes"] - before == param.nbytes
        del optimizer, param


def case_what_has_views_by_default_is_one_constant():
    default = bucket_views.LEAST_BYTES
    try:
        for bucket_views.LEAST_BYTES, expected in ((16 << 10, ["2.weight"]), (None, [])):
            model, optimizer, twin, plain = twins(gradient_as_bucket_view=None)
            for inputs, targets in batches():
                optimizer.zero_grad()
                plain.zero_grad()
                loss_of(model, share(inputs), share(targets)).backward()
                loss_of(twin, inputs, targets).backward()
                optimizer.step()
                plain.step()
                assert in_views(model, optimizer) == (expected if hvd.size() > 1 else [])
            assert_same(model, twin)
    finally:
        bucket_views.LEAST_BYTES = default
    model, optimizer, *_ = twins(gradient_as_bucket_view=False)
    loss_of(model, *batches(1)[0]).backward()
    optimizer.step()
    assert views_of(optimizer) == {}


def case_gradients_accumulate_in_views():
    for passes in (1, 3):
        model, optimizer, twin, plain = twins(backward_passes_per_step=passes, op=hvd.Sum)
        for _ in range(3):
            data = batches(passes)
            optimizer.zero_grad()
            for inputs, targets in data:
                (loss_of(model, share(inputs), share(targets)) / hvd.size()).backward()
            optimizer.step()
            plain.zero_grad()
            for inputs, targets in data:
                loss_of(twin, inputs, targets).backward()
            plain.step()
        assert_same(model, twin)
        assert in_views(model, optimizer) == everything(model)


def case_gradients_that_are_not_reset_add_up():
    model, optimizer, twin, plain = twins(op=hvd.Sum)
    total: list[torch.Tensor] = []
    for inputs, targets in batches(3):
        # The reduced sum of before is on every rank, and is summed again.
        (loss_of(model, share(inputs), share(targets)) / hvd.size()).backward()
        optimizer.step()
        plain.zero_grad()
        loss_of(twin, inputs, targets).backward()
        new = [p.grad.clone() for p in twin.parameters()]
        total = [old * hvd.size() + grad for old, grad in zip(total or [0] * 6, new, strict=True)]
        for param, grad in zip(twin.parameters(), total, strict=True):
            param.grad.copy_(grad)
        plain.step()
        assert_same(model, twin)


def case_clipping_works_in_views():
    model, optimizer, twin, plain = twins()
    for inputs, targets in batches():
        optimizer.zero_grad()
        loss_of(model, share(inputs), share(targets)).backward()
        optimizer.synchronize()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with optimizer.skip_synchronize():
            optimizer.step()
        plain.zero_grad()
        loss_of(twin, inputs, targets).backward()
        torch.testing.assert_close(nn.utils.clip_grad_norm_(twin.parameters(), 0.1), norm)
        plain.step()
        assert in_views(model, optimizer) == everything(model)
    assert_same(model, twin)


def case_grad_scaler_finds_infinities_in_views_on_all_ranks():
    model, optimizer, *_ = twins()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = copy.deepcopy(model)
    inputs, targets = batches(1)[0]
    for bad in (True, False):
        optimizer.zero_grad()
        factor = float("inf") if bad and hvd.rank() == 0 else 1.0
        scaler.scale(loss_of(model, share(inputs), share(targets)) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        if bad:
            assert_same(model, before)
    plain = sgd(before.parameters())
    loss_of(before, inputs, targets).backward()
    plain.step()
    assert_same(model, before)


def case_closures_work_in_views():
    model, twin = network(), None
    twin = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.LBFGS(model.parameters(), max_iter=4), model.named_parameters(),
        gradient_as_bucket_view=True,
    )  # fmt: skip
    plain = torch.optim.LBFGS(twin.parameters(), max_iter=4)
    inputs, targets = batches(1)[0]

    def closure(model: nn.Module, optimizer: Any, inputs: torch.Tensor, targets: torch.Tensor):
        optimizer.zero_grad()
        loss = loss_of(model, inputs, targets)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(lambda: closure(model, optimizer, share(inputs), share(targets)))
        plain.step(lambda: closure(twin, plain, inputs, targets))
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-9)


def case_groups_are_reduced_in_views():
    model, optimizer, twin, plain = twins(groups=2)
    for inputs, targets in batches():
        optimizer.zero_grad()
        plain.zero_grad()
        loss_of(model, share(inputs), share(targets)).backward()
        loss_of(twin, inputs, targets).backward()
        optimizer.step()
        plain.step()
        assert in_views(model, optimizer) == everything(model)
    assert_same(model, twin)


# ---------------------------------------------------------------------------------------------
# What users do to gradients


def case_a_gradient_of_none_and_one_that_only_some_ranks_have():
    model, optimizer, *_ = twins(op=hvd.Sum)
    for step in range(3):
        optimizer.zero_grad()
        if step == 1:
            for param in model.parameters():
                param.grad = None
        mine = model[2].weight.sum() * 2.0 if hvd.rank() == step % hvd.size() else 0.0
        (model[0].weight.sum() + mine).backward()
        optimizer.step()
        assert torch.equal(model[2].weight.grad, torch.full((WIDE, WIDE), 2.0))
        assert torch.equal(model[0].weight.grad, torch.full((WIDE, 5), float(hvd.size())))
        if hvd.size() > 1:
            assert torch.equal(model[4].bias.grad, torch.zeros(3))


def case_a_gradient_that_the_user_puts_in_its_place_is_what_the_step_takes():
    model, optimizer, twin, _ = twins(op=hvd.Sum)
    inputs, targets = batches(1)[0]
    for _ in range(2):
        loss_of(model, share(inputs), share(targets)).backward()
        optimizer.synchronize()
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.zero_grad()
    for mine, before in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, before - 0.05 * (1 + 1.9))


def case_memory_of_the_user_in_which_gradients_add_up_stays_the_gradient():
    model, optimizer, *_ = twins(op=hvd.Sum)
    flat = torch.zeros(WIDE * WIDE)
    own = torch.zeros(WIDE)
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        model[2].weight.grad = flat.view(WIDE, WIDE)
        model[2].bias.grad = own
        flat.zero_()
        own.zero_()
        (model[2].weight.sum() * (step + 1.0) + model[2].bias.sum()).backward()
        optimizer.step()
        assert bool((flat == (step + 1.0) * hvd.size()).all())
        assert model[2].weight.grad.data_ptr() == flat.data_ptr()
        assert model[2].bias.grad is own
        assert bool((own == hvd.size()).all())


def case_gradients_that_somebody_keeps_keep_their_values():
    if not bucket_views._CAN_TELL:
        return
    model, optimizer, *_ = twins(op=hvd.Sum)
    param = model[2].weight
    keeps: list[Callable[[torch.Tensor], Any]] = [
        lambda grad: grad,
        lambda grad: grad[3:5],
        lambda grad: grad.detach(),
        lambda grad: grad.numpy(),
        lambda grad: (grad * torch.ones(1, requires_grad=True)).grad_fn,
    ]
    for number, keep in enumerate(keeps):
        optimizer.zero_grad()
        (param.sum() * (number + 1.0)).backward()
        optimizer.step()
        assert ("2.weight" in in_views(model, optimizer)) == (hvd.size() > 1), number
        kept = keep(param.grad)
        optimizer.zero_grad()
        (param.sum() * 100.0).backward()
        optimizer.step()
        if number < 4:
            assert bool((torch.as_tensor(kept) == (number + 1.0) * hvd.size()).all())
        else:
            assert kept is not None
        assert bool((param.grad == 100.0 * hvd.size()).all())
        assert "2.weight" not in in_views(model, optimizer) or number == 4
        del kept


def case_other_types_and_graphs_take_the_copy_path():
    embedding = nn.Embedding(600, 10, sparse=True)
    optimizer = distributed(embedding, op=hvd.Sum)
    rows = torch.tensor([hvd.rank(), 7])
    embedding(rows).sum().backward()
    optimizer.step()
    assert embedding.weight.grad.is_sparse
    assert float(embedding.weight.grad.to_dense()[7, 0]) == hvd.size()

    model, optimizer, *_ = twins(op=hvd.Sum)
    param = model[2].weight
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (param.pow(2).sum()).backward(create_graph=True)
    optimizer.synchronize()
    assert param.grad.requires_grad
    assert param.grad.grad_fn is not None
    torch.testing.assert_close(param.grad.detach(), 2 * hvd.size() * param.detach())
    for each in model.parameters():
        each.grad = None

    last = nn.Conv2d(8, 8, 9).to(memory_format=torch.channels_last)
    optimizer = distributed(last, op=hvd.Sum)
    last.weight.sum().backward()
    optimizer.step()
    assert bool((last.weight.grad == hvd.size()).all())
    assert "weight" not in in_views(last, optimizer)

    half = network()
    optimizer = distributed(half, op=hvd.Sum)
    half.float()
    half[2].weight.sum().backward()
    optimizer.step()
    assert bool((half[2].weight.grad == hvd.size()).all())
    assert half[2].weight.grad.dtype is torch.float32


# ---------------------------------------------------------------------------------------------
# What becomes of models, optimizers and memory


def case_a_pickled_gradient_takes_no_other_along():
    model, optimizer, *_ = twins()
    loss_of(model, *batches(1)[0]).backward()
    optimizer.step()
    for name in ("0.bias", "2.weight"):
        grad = model.get_parameter(name).grad
        file = io.BytesIO()
        torch.save(grad, file)
        assert len(file.getvalue()) < grad.nbytes + 4096
        again = pickle.loads(pickle.dumps(grad))
        assert torch.equal(again, grad)


def case_copies_and_checkpoints_train_on():
    model, optimizer, twin, plain = twins()

    def train(model: nn.Module, optimizer: Any) -> None:
        for inputs, targets in batches(2):
            optimizer.zero_grad()
            plain.zero_grad()
            loss_of(model, share(inputs), share(targets)).backward()
            loss_of(twin, inputs, targets).backward()
            optimizer.step()
            plain.step()
        assert_same(model, twin)
        assert in_views(model, optimizer) == everything(model)

    train(model, optimizer)
    model, optimizer = copy.deepcopy((model, optimizer))
    train(model, optimizer)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    model = network()
    optimizer = distributed(model)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(model, optimizer)


def case_parameters_that_come_later_get_views():
    model = network()
    optimizer = hvd.DistributedOptimizer(
        sgd(model[:3].parameters()), model.named_parameters(), gradient_as_bucket_view=True
    )
    model[0].weight.requires_grad = False
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, *batches(1)[0]).backward()
        optimizer.step()
        if step == 0:
            optimizer.add_param_group({"params": model[4].parameters()})
            model[0].weight.requires_grad = True
    assert in_views(model, optimizer) == everything(model)


def case_two_optimizers_of_one_parameter_take_turns():
    model, twin = network(), None
    twin = copy.deepcopy(model)
    both = [distributed(model), hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        [(f"other.{name}", param) for name, param in model.named_parameters()],
        gradient_as_bucket_view=True,
    )]  # fmt: skip
    plain = [sgd(twin.parameters()), torch.optim.SGD(twin.parameters(), lr=0.01)]
    for step, (inputs, targets) in enumerate(batches()):
        both[step % 2].zero_grad()
        plain[step % 2].zero_grad()
        loss_of(model, share(inputs), share(targets)).backward()
        loss_of(twin, inputs, targets).backward()
        both[step % 2].step()
        plain[step % 2].step()
    assert_same(model, twin)


def case_memory_goes_with_the_optimizer_but_for_gradients_that_are_held():
    if hvd.size() == 1:
        return
    memories: list[weakref.ref[memoryview]] = []
    allocate = arena.allocate

    def watched(size: int) -> Any:
        memory = allocate(size)
        memories.append(weakref.ref(memory))
        return memory

    arena.allocate = watched
    try:
        model, optimizer, *_ = twins(op=hvd.Sum)
        model[2].weight.sum().backward()
        optimizer.step()
    finally:
        arena.allocate = allocate
    assert len(memories) == 1
    del optimizer
    gc.collect()
    assert memories[0]() is not None  # the gradients are there
    held = model[2].weight.grad
    for param in model.parameters():
        param.grad = None
    del param
    gc.collect()
    assert bool((held == hvd.size()).all())
    assert memories[0]() is not None
    del held
    gc.collect()
    assert memories[0]() is None


def case_without_such_memory_gradients_are_copied():
    allocate = arena.allocate
    arena.allocate = lambda size: None
    try:
        for wanted in (True, None):
            model, optimizer, twin, plain = twins(gradient_as_bucket_view=wanted)
            for step, (inputs, targets) in enumerate(batches(3)):
                loud = wanted and step == 0 and hvd.size() > 1
                with warnings.catch_warnings(record=True) as seen:
                    warnings.simplefilter("always")
                    optimizer.zero_grad()
                    loss_of(model, share(inputs), share(targets)).backward()
                assert len(seen) == bool(loud), [str(each.message) for each in seen]
                assert not loud or "are reduced by copying" in str(seen[0].message)
                optimizer.step()
                plain.zero_grad()
                loss_of(twin, inputs, targets).backward()
                plain.step()
            assert_same(model, twin)
            assert views_of(optimizer) == {}
    finally:
        arena.allocate = allocate


def case_some_ranks_may_have_views_and_others_none():
    model, optimizer, twin, plain = twins(gradient_as_bucket_view=hvd.rank() == 0)
    for inputs, targets in batches():
        optimizer.zero_grad()
        plain.zero_grad()
        loss_of(model, share(inputs), share(targets)).backward()
        loss_of(twin, inputs, targets).backward()
        optimizer.step()
        plain.step()
    assert_same(model, twin)


def case_forked_workers_leave_gradients_alone():
    model, optimizer, *_ = twins(op=hvd.Sum)
    param = model[2].weight
    param.sum().backward()
    optimizer.step()

    class Data(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> torch.Tensor:
            for each in model.parameters():
                each.grad = None  # the worker's own
            return torch.tensor(index)

    loader = torch.utils.data.DataLoader(Data(), num_workers=2, multiprocessing_context="fork")
    assert sorted(int(item) for item in loader) == [0, 1, 2, 3]
    assert bool((param.grad == hvd.size()).all())
    optimizer.zero_grad()
    (param.sum() * 3).backward()
    optimizer.step()
    assert bool((param.grad == 3 * hvd.size()).all())


def case_what_cannot_be_is_refused():
    params = [nn.Parameter(torch.zeros(3))]
    with pytest.raises(ValueError, match=r"op=Adasum.*leave it out"):
        hvd.DistributedOptimizer(sgd(params), op=hvd.Adasum, gradient_as_bucket_view=True)
    with pytest.raises(ValueError, match=r"compression=FP16Compressor.*leave out one"):
        hvd.DistributedOptimizer(
            sgd(params), compression=hvd.Compression.fp16, gradient_as_bucket_view=True
        )
    with pytest.raises(TypeError, match="gradient_as_bucket_view='yes' must be True, False or"):
        hvd.DistributedOptimizer(sgd(params), gradient_as_bucket_view="yes")


# ---------------------------------------------------------------------------------------------
# Small gradients are submitted in batches


class Scales(nn.Module):
    """Many small parameters."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.factors = nn.ParameterList(torch.ones(3) for _ in range(count))


def case_all_gradients_are_sent_when_backward_ends():
    if hvd.size() == 1:
        return
    for count in (1, 2, 3, 7, 500):
        model = Scales(count)
        optimizer = distributed(model, op=hvd.Sum)
        for _ in range(2):
            # Each rank has a branch of its own.
            used = [p for n, p in enumerate(model.factors) if n % hvd.size() != hvd.rank()]
            if used:
                sum(p.sum() * (hvd.rank() + 1.0) for p in used).backward()
            assert len(optimizer._handles) == len(used)
            optimizer.step()
            for number, param in enumerate(model.factors):
                total = sum(r + 1.0 for r in range(hvd.size()) if number % hvd.size() != r)
                assert torch.equal(param.grad, torch.full((3,), total)), number
            optimizer.zero_grad()


def case_ranks_may_step_two_optimizers_in_different_order():
    models = [Scales(5), Scales(6)]
    optimizers = [
        hvd.DistributedOptimizer(
            sgd(model.parameters()), [(f"m{n}.{x}", p) for x, p in model.named_parameters()]
        )
        for n, model in enumerate(models)
    ]
    for _ in range(3):
        # One parameter of each gets no gradient from this rank: batches stay incomplete.
        sum(p.sum() for model in models for p in model.factors[:-1]).backward()
        for number in (0, 1) if hvd.rank() % 2 else (1, 0):
            with torch.no_grad():
                for param in models[number].factors:
                    param.grad = torch.zeros(3) if param.grad is None else param.grad
            assert len(optimizers[number]._handles) == (4 + number if hvd.size() > 1 else 0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def case_a_refused_gradient_is_named_and_the_others_are_sent():
    if hvd.size() == 1:
        return
    model = Scales(40)
    optimizer = distributed(model, op=hvd.Sum)

    def occupy() -> int:
        return hvd.allreduce_async(torch.zeros(3), name="factors.13", op=hvd.Sum)

    def backward() -> None:
        sum(p.sum() for p in model.factors).backward()

    if hvd.rank() == 0:
        occupied = occupy()
        with pytest.raises(DuplicateNameError, match=r"'factors\.13'.*in the hook.*factors\.13"):
            backward()
        there = [number for number, p in enumerate(model.factors) if p.grad is not None]
        sent = {id(param) for param in optimizer._handles}
        assert [number for number in there if id(model.factors[number]) not in sent] == [13]
    hvd.barrier()
    if hvd.rank() != 0:
        occupied = occupy()
    hvd.synchronize(occupied)
    if hvd.rank() != 0:
        backward()
        there = []
    there = hvd.broadcast_object(there)
    optimizer.step()
    for number, param in enumerate(model.factors):
        total = hvd.size() - (number not in there)
        assert torch.equal(param.grad, torch.full((3,), float(total)))


def case_a_second_backward_pass_is_refused_whether_or_not_the_first_was_sent():
    if hvd.size() == 1:
        return
    model = Scales(10)
    optimizer = distributed(model)
    sum(p.sum() for p in model.factors).backward()
    with pytest.raises(AssertionError, match="more than backward_passes_per_step"):
        sum(p.sum() for p in model.factors).backward()
    with pytest.raises(AssertionError, match="10 gradients"):
        optimizer.zero_grad()
    optimizer.step()


def case_hooks_of_several_threads_lose_nothing():
    model = Scales(300)
    optimizer = distributed(model, op=hvd.Sum)
    for _ in range(3):
        parts = [sum(p.sum() for p in model.factors[n::3]) for n in range(3)]
        threads = [threading.Thread(target=part.backward) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(optimizer._handles) == (300 if hvd.size() > 1 else 0)
        optimizer.step()
        assert all(torch.equal(p.grad, torch.full((3,), float(hvd.size()))) for p in model.factors)
        optimizer.zero_grad()


# ---------------------------------------------------------------------------------------------
# Last: another engine


def case_another_engine_has_other_views():
    model, optimizer, twin, plain = twins()

    def train() -> None:
        for inputs, targets in batches(2):
            optimizer.zero_grad()
            plain.zero_grad()
            loss_of(model, share(inputs), share(targets)).backward()
            loss_of(twin, inputs, targets).backward()
            optimizer.step()
            plain.step()
        assert_same(model, twin)
        assert in_views(model, optimizer) == everything(model)

    train()
    kept = [param.grad for param in model.parameters()]
    values = [grad.clone() for grad in kept]
    hvd.shutdown()
    hvd.init()
    train()
    assert all(map(torch.equal, kept, values))
    before = hvd.statistics()["in_place_bytes"]
    train()
    assert (hvd.statistics()["in_place_bytes"] > before) == (hvd.size() > 1)
    hvd.shutdown()


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("case", mpirun.case_names(globals()))
def test(case: str, size: int):
    mpirun.cases_of(__file__, size).check(case)

"""SyncBatchNorm on 1 to 4 ranks against torch's BatchNorm over all batches in one process."""

from __future__ import annotations

import copy
import inspect
import io
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import mpirun
import numpy as np
import pytest
import session
import tiers
import torch
from configured import made_at_once
from torch import nn
from torch.utils.checkpoint import checkpoint

import hororing.torch as hvd
from hororing import errors
from hororing._requests.process_sets import ProcessSet, add_process_set, global_process_set
from hororing.toolkit.large_batch.groups import choose_group_size, group_size_for
from hororing.toolkit.torch.batch_norm import average_running_statistics
from hororing.torch._tensor.verbs import verbs
from hororing.torch.recomputation import stored_statistics

CHANNELS = 3
EXACT = 1e-10
TAILS = [(), (5,), (2, 3), (2, 1, 3)]  # after (N, C)


class WholeBatchNorm(nn.modules.batchnorm._BatchNorm):
    """The oracle: torch's batch normalization, for inputs with any number of dimensions."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        pass


def batches(rows: Sequence[int], tail: tuple[int, ...], *key: int) -> list[torch.Tensor]:
    """Return a float64 batch per rank; means and scales differ between ranks and channels."""
    rng = np.random.default_rng([mpirun.seed(), *key])
    scale = torch.arange(1, CHANNELS + 1).view(-1, *[1] * len(tail)).double()
    return [
        torch.from_numpy(rng.normal(rank, 1 + rank, (n, CHANNELS, *tail))) * scale + scale
        for rank, n in enumerate(rows)
    ]


def uneven_rows() -> list[int]:
    return [2 + 3 * rank % 5 for rank in range(hvd.size())]


def pair(**options: Any) -> tuple[hvd.SyncBatchNorm, WholeBatchNorm]:
    """Return a layer and its oracle, with equal parameters other than 1 and 0."""
    options = {"dtype": torch.float64, **options}
    layer = hvd.SyncBatchNorm(CHANNELS, **options)
    for name in ("group_size", "process_set"):
        options.pop(name, None)
    whole = WholeBatchNorm(CHANNELS, **options)
    with torch.no_grad():
        for model in (layer, whole):
            for number, parameter in enumerate(model.parameters()):
                parameter.copy_(torch.linspace(-1, 2, CHANNELS) + number)
    return layer, whole


def close(actual: torch.Tensor | None, wanted: torch.Tensor | None, tolerance: float) -> None:
    if actual is None or wanted is None:
        assert actual is wanted
        return
    torch.testing.assert_close(actual.double(), wanted.double(), rtol=tolerance, atol=tolerance)


def weights_of(outputs: torch.Tensor) -> torch.Tensor:
    """Return gradients of the outputs; they depend only on the value of an element."""
    return torch.cos(3 * outputs.detach())


def agree(
    layer: nn.Module,
    whole: nn.Module,
    parts: list[torch.Tensor],
    tolerance: float = EXACT,
    members: Sequence[int] | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Compare all results and effects of a training step; return the output.

    `parts` are the members' batches; `whole` gets them joined.
    """
    members = range(hvd.size()) if members is None else members
    position = list(members).index(hvd.rank())
    for parameter in (*layer.parameters(), *whole.parameters()):
        parameter.grad = None
    joined = torch.cat(parts).requires_grad_()
    wanted = whole(joined)
    wanted.backward(weights_of(wanted))
    bounds = np.cumsum([0, *(len(part) for part in parts)])
    mine = slice(bounds[position], bounds[position + 1])

    input = parts[position].detach().requires_grad_()
    output = layer(input)
    assert output.shape == input.shape
    assert output.dtype == input.dtype
    output.backward(weights_of(wanted[mine]).to(output.dtype))
    close(output, wanted[mine], tolerance)
    close(input.grad, joined.grad[mine], tolerance)
    for ours, theirs in zip(layer.parameters(), whole.parameters(), strict=True):
        assert ours.grad.dtype == ours.dtype
        total = verbs.allreduce(ours.grad.double(), op=hvd.Sum, process_set=process_set)
        close(total, theirs.grad, tolerance * max(1, len(joined)))
    close_buffers(layer, whole, tolerance)
    return output


def close_buffers(layer: nn.Module, whole: nn.Module, tolerance: float = EXACT) -> None:
    ours, theirs = dict(layer.named_buffers()), dict(whole.named_buffers())
    assert ours.keys() == theirs.keys()
    for name, buffer in ours.items():
        assert buffer.dtype == theirs[name].dtype or tolerance > EXACT
        close(buffer, theirs[name], tolerance)


class Requests:
    """Records the names of requests while it is active."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __enter__(self) -> list[str]:
        def recording(method: Callable[..., Any]) -> Callable[..., Any]:
            def record(tensor: torch.Tensor, *, name: str, **kwargs: Any) -> Any:
                self.names.append(name)
                return method(tensor, name=name, **kwargs)

            return record

        self.patches = [
            mock.patch.object(verbs, verb, recording(getattr(verbs, verb)))
            for verb in ("allgather", "allreduce")
        ]
        for patch in self.patches:
            patch.start()
        return self.names

    def __exit__(self, *_: object) -> None:
        for patch in self.patches:
            patch.stop()


# ---------------------------------------------------------------------------------------------
# Cases, on every rank


def case_before_init() -> None:
    layer = hvd.SyncBatchNorm(CHANNELS)
    with pytest.raises(errors.NotInitializedError, match=r"use hvd\.init\(\)"):
        layer(torch.ones(4, CHANNELS))
    assert int(layer.num_batches_tracked) == 0
    layer.eval()(torch.ones(4, CHANNELS))
    with pytest.raises(errors.NotInitializedError):
        hvd.SyncBatchNorm(CHANNELS, group_size=1)
    hvd.init(process_sets="dynamic")
    torch.set_num_threads(1)
    agree(*pair(), batches(uneven_rows(), ()))


def case_equals_one_large_batch() -> None:
    options = [
        {},
        {"affine": False},
        {"momentum": None},
        {"momentum": 1.0, "eps": 0.5},
        {"momentum": 0.0},
        {"track_running_stats": False},
        {"track_running_stats": False, "affine": False, "momentum": None},
        *([{"bias": False}] if "bias" in inspect.signature(WholeBatchNorm).parameters else []),
    ]
    for key, chosen in enumerate(options):
        for tail in TAILS:
            layer, whole = pair(**chosen)
            for step in range(3):
                rows = uneven_rows()
                agree(layer, whole, batches(rows[step:] + rows[:step], tail, key, step))
            input = batches([4], tail, key)[0]
            close(layer.eval()(input), whole.eval()(input), EXACT)


def case_layouts() -> None:
    rank = hvd.rank()

    def channels_last(part: torch.Tensor) -> torch.Tensor:
        return part.contiguous(memory_format=torch.channels_last)

    views: list[Callable[[torch.Tensor], torch.Tensor]] = [
        channels_last,
        lambda part: part.transpose(2, 3).contiguous().transpose(2, 3),
        lambda part: torch.stack([part, part], dim=-1)[..., 0],
        lambda part: part[:1].expand(len(part), *part.shape[1:]),
        lambda part: channels_last(part) if rank % 2 else part,
    ]
    for view in views:
        layer, whole = pair()
        parts = [view(part) for part in batches(uneven_rows(), (4, 2), 1)]
        output = agree(layer, whole, parts)
        if view is channels_last:
            assert output.is_contiguous(memory_format=torch.channels_last)
    # The incoming gradient may be an expanded tensor, as for a sum.
    layer, whole = pair()
    parts = batches(uneven_rows(), (4,), 2)
    joined, mine = torch.cat(parts).requires_grad_(), parts[rank].clone().requires_grad_()
    (whole(joined).sum() * 2).backward()
    (layer(mine).sum() * 2).backward()
    before = sum(map(len, parts[:rank]))
    close(mine.grad, joined.grad[before : before + len(mine)], EXACT)


def case_float32_is_exact_far_from_zero() -> None:
    # The variance is 1. Sums of squares would lose all its digits: 1e4^2 * 2^-24 is 6. At 1e6, the
    # nearest float32 may also differ from the mean by 0.03.
    for offset in (1e3, 1e4, 1e6):
        parts = [(torch.randn(50, CHANNELS, 4, generator=torch.Generator().manual_seed(
            mpirun.seed() % 2**31 + rank)) + offset) for rank in range(hvd.size())]  # fmt: skip
        layer = hvd.SyncBatchNorm(CHANNELS, momentum=1.0)
        layer(parts[hvd.rank()])
        joined = torch.cat(parts).double()
        if hvd.size() > 1:  # a single rank uses torch's computation
            close(layer.running_var, joined.var((0, 2)), 1e-6)
        close(layer.running_mean / offset, joined.mean((0, 2)) / offset, 1e-6)


def case_the_sums_of_a_backward_pass_need_no_negotiation() -> None:
    layer = hvd.SyncBatchNorm(CHANNELS)

    def step() -> None:
        layer(torch.ones(4, CHANNELS, requires_grad=True)).sum().backward()

    assert hvd.size() == 1 or made_at_once(step)


def case_half_precision_has_float32_statistics() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        unit = torch.finfo(dtype).eps
        for parameters in (torch.float32, dtype):
            layer, _ = pair(dtype=parameters)
            _, whole = pair()
            parts = [part.to(dtype) for part in batches([300] * hvd.size(), (2,), 3)]
            bounds = [part.double() for part in parts]
            mine = parts[hvd.rank()].clone().requires_grad_()
            joined = torch.cat(bounds).requires_grad_()
            wanted = whole(joined)
            wanted.backward(torch.ones_like(wanted) + joined.detach())
            output = layer(mine)
            output.backward(torch.ones_like(output) + mine.detach())
            rows = slice(300 * hvd.rank(), 300 * (hvd.rank() + 1))
            assert output.dtype == mine.grad.dtype == dtype
            assert layer.running_var.dtype == layer.weight.grad.dtype == parameters
            close(output, wanted[rows], 4 * unit)
            scale = wanted.abs().max().item()
            close(mine.grad / scale, joined.grad[rows] / scale, 20 * unit)
            buffers = 1e-5 if parameters is torch.float32 else 4 * unit
            close(layer.running_mean, whole.running_mean, buffers)
            close(layer.running_var, whole.running_var, buffers)
            assert layer(mine.detach()).dtype == dtype
    layer = hvd.SyncBatchNorm(CHANNELS)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = nn.Conv1d(2, CHANNELS, 1)(torch.randn(8, 2, 5))
        assert layer(hidden).dtype == torch.bfloat16
    assert layer.running_mean.dtype == torch.float32


def case_some_batches_are_empty() -> None:
    size = hvd.size()
    for empty in range(size):
        layer, whole = pair()
        for tail in TAILS:
            one = [0 if rank == empty and size > 1 else 2 + rank for rank in range(size)]
            agree(layer, whole, batches(one, tail, 4))
            others = [3 if rank == empty else 0 for rank in range(size)]
            agree(layer, whole, batches(others, tail, 5))
        single_values = [0 if rank != empty else 2 for rank in range(size)]
        agree(layer, whole, batches(single_values, (), 6))
    # Rows without elements.
    for dtype in (torch.float64, torch.float32, torch.float16):
        layer = hvd.SyncBatchNorm(CHANNELS, dtype=dtype)
        shape = (2, CHANNELS, 0) if hvd.rank() > 0 else (2, CHANNELS, 4)
        input = torch.ones(shape, dtype=dtype, requires_grad=True)
        layer(input).sum().backward()
        assert input.grad.shape == shape
        assert layer.weight.grad.shape == (CHANNELS,)


def case_too_few_values_fail_on_every_rank() -> None:
    for only in (0, 1):  # values per channel, on the last rank
        layer = hvd.SyncBatchNorm(CHANNELS, name="few")
        rows = only if hvd.rank() == hvd.size() - 1 else 0
        with pytest.raises(ValueError, match=f"'few': the batches .* have {only} values? per"):
            layer(torch.ones(rows, CHANNELS, requires_grad=True))
        assert int(layer.num_batches_tracked) == 0
        assert layer.running_mean.tolist() == [0] * CHANNELS
        agree(*pair(), batches(uneven_rows(), ()))
    # One value on each rank is enough when there are several.
    if hvd.size() > 1:
        agree(*pair(), batches([1] * hvd.size(), (), 7))


def case_evaluation_sends_nothing() -> None:
    layer, whole = pair()
    agree(layer, whole, batches(uneven_rows(), (), 8))
    forgetful, whole_forgetful = pair(track_running_stats=False)
    with Requests() as names:
        if hvd.rank() == 0:
            input = batches([4], (), 9)[0].requires_grad_()
            output = layer.eval()(input)
            output.sum().backward()
            close(output, whole.eval()(input), EXACT)
            # As in torch.nn.SyncBatchNorm: statistics of this rank's batch.
            close(forgetful.eval()(input), whole_forgetful.eval()(input), EXACT)
    assert names == []
    hvd.barrier()


def case_one_request_per_pass_under_names_that_repeat() -> None:
    first, second = hvd.SyncBatchNorm(CHANNELS), hvd.SyncBatchNorm(CHANNELS, name="mine")
    number = int(first.name.removeprefix("sync_batch_norm."))
    assert hvd.SyncBatchNorm(CHANNELS).name == f"sync_batch_norm.{number + 1}"
    for _ in range(3):
        with Requests() as names:
            input = torch.randn(4, CHANNELS, requires_grad=True)
            second(first(input)).square().sum().backward()
        one_step = [f"{first.name}.forward", "mine.forward", "mine.backward"]
        assert names == ([*one_step, f"{first.name}.backward"] if hvd.size() > 1 else [])


def case_one_layer_twice_in_a_model() -> None:
    class Twice(nn.Module):
        def __init__(self, norm: nn.Module) -> None:
            super().__init__()
            self.norm = norm

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(torch.tanh(self.norm(x)) * 2 + x)

    layer, whole = pair(momentum=None)
    for step in range(3):
        agree(Twice(layer), Twice(whole), batches(uneven_rows(), (2,), 10, step), 1e-9)
    assert int(layer.num_batches_tracked) == 6


def case_layers_run_at_the_same_time_in_any_order() -> None:
    pairs = [pair() for _ in range(4)]
    parts = [batches(uneven_rows(), (), 11, number) for number in range(4)]
    results: dict[int, torch.Tensor] = {}

    def work(number: int) -> None:
        layer = pairs[number][0]
        for _ in range(20):
            input = parts[number][hvd.rank()].clone().requires_grad_()
            output = layer(input)
            output.square().sum().backward()
        results[number] = output.detach()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    order = np.random.default_rng([mpirun.seed(), hvd.rank()]).permutation(4)
    for number in order:
        threads[number].start()
    for thread in threads:
        thread.join()
    for number, (layer, whole) in enumerate(pairs):
        for _ in range(20):
            wanted = whole(torch.cat(parts[number]))
        before = sum(map(len, parts[number][: hvd.rank()]))
        close(results[number], wanted[before : before + len(results[number])], EXACT)
        close_buffers(layer, whole)


def case_one_layer_in_several_threads() -> None:
    layer, whole = pair(track_running_stats=False)
    parts = batches(uneven_rows(), (), 12)
    wanted = whole(torch.cat(parts))
    before = sum(map(len, parts[: hvd.rank()]))
    outputs: list[torch.Tensor] = []

    def work() -> None:
        for _ in range(20):
            input = parts[hvd.rank()].clone().requires_grad_()
            output = layer(input)
            output.sum().backward()
            outputs.append(output.detach())

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outputs) == 60
    for output in outputs:
        close(output, wanted[before : before + len(output)], EXACT)


def case_parts_that_need_no_gradient() -> None:
    parts = batches(uneven_rows(), (2,), 13)
    for frozen in ("weight", "bias"):
        layer, whole = pair()
        getattr(layer, frozen).requires_grad_(False)
        agree_partly(layer, whole, parts)
        assert getattr(layer, frozen).grad is None
    # Without gradients of the input, nothing is sent, so one rank alone may run backward.
    layer, whole = pair()
    output = layer(parts[hvd.rank()])
    if hvd.rank() == 0:
        with Requests() as names:
            output.square().sum().backward()
        assert names == []
        wanted = whole(torch.cat(parts))
        wanted[: len(parts[0])].square().sum().backward()
        close(layer.weight.grad, whole.weight.grad, 1e-9)
        close(layer.bias.grad, whole.bias.grad, 1e-9)
    # A forward pass without gradients updates running statistics, too.
    layer, whole = pair()
    with torch.no_grad():
        output = layer(parts[hvd.rank()].requires_grad_())
        whole(torch.cat(parts))
    assert not output.requires_grad
    close_buffers(layer, whole)


def agree_partly(layer: nn.Module, whole: nn.Module, parts: list[torch.Tensor]) -> None:
    joined = torch.cat(parts).requires_grad_()
    wanted = whole(joined)
    wanted.backward(weights_of(wanted))
    before = sum(map(len, parts[: hvd.rank()]))
    mine = parts[hvd.rank()].clone().requires_grad_()
    rows = slice(before, before + len(mine))
    layer(mine).backward(weights_of(wanted[rows]))
    close(mine.grad, joined.grad[rows], EXACT)
    for ours, theirs in zip(layer.parameters(), whole.parameters(), strict=True):
        if ours.requires_grad:
            close(hvd.allreduce(ours.grad, op=hvd.Sum), theirs.grad, 1e-9)


def case_recomputation() -> None:
    for reentrant in (False, True):
        layer, whole = pair(momentum=1.0)
        model = nn.Sequential(nn.Linear(4, 4), layer).double()
        reference = nn.Sequential(copy.deepcopy(model[0]), whole)
        hvd.broadcast_parameters(model.state_dict(), 0)
        reference[0].load_state_dict(model[0].state_dict())
        parts = [part.mT for part in batches(uneven_rows(), (3,), 14)]
        parts = [torch.cat([part, part[..., :1]], dim=-1) for part in parts]

        class Recomputed(nn.Module):
            def __init__(self, inner: nn.Module, reentrant: bool) -> None:
                super().__init__()
                self.inner, self.reentrant = inner, reentrant

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return checkpoint(self.inner, x, use_reentrant=self.reentrant)

            def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
                return iter(())  # the recomputation updates them once more, as in torch

        agree(Recomputed(model, reentrant), Recomputed(reference, reentrant), parts, 1e-9)


def case_recomputation_with_stored_statistics() -> None:
    if hvd.size() == 1:
        return  # a single rank stores nothing
    part = batches([5] * hvd.size(), (), 15)[hvd.rank()]
    results = []
    for depth in range(3):
        torch.manual_seed(mpirun.seed() % 2**31)
        blocks = [
            nn.Sequential(nn.Linear(CHANNELS, CHANNELS), hvd.SyncBatchNorm(CHANNELS, name=f"b{n}"))
            for n in range(3)
        ]
        model = nn.Sequential(*blocks).double()

        def inner(x: torch.Tensor, depth: int = depth, last: Any = blocks[1:]) -> torch.Tensor:
            for block in last:
                x = checkpointed(block, x) if depth == 2 else block(x)
            return x

        def checkpointed(function: Any, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(function, x, use_reentrant=False, context_fn=stored_statistics)

        x = part.clone().requires_grad_()
        with Requests() as names:
            y = blocks[0](x)
            y = checkpointed(inner, y) if depth else inner(y)
            y.backward(weights_of(y))
        results.append((names, [x.grad, *(p.grad for p in model.parameters()), *model.buffers()]))
    for names, tensors in results[1:]:
        assert names == results[0][0]
        for ours, theirs in zip(tensors, results[0][1], strict=True):
            close(ours, theirs, EXACT)


def case_running_statistics_of_groups_become_one() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.BatchNorm1d(3)).double()
    rank, size = hvd.rank(), hvd.size()
    for at, layer in enumerate(model[1:]):
        layer.running_mean.fill_(rank + at)
        layer.running_var.fill_(10 * rank if rank else 1e30)
    average_running_statistics(model, samples=rank + (size == 1))
    weights = np.arange(size) if size > 1 else np.ones(1)
    mean = float((weights * np.arange(size)).sum() / weights.sum())
    for at, layer in enumerate(model[1:]):
        close(layer.running_mean, torch.full([2 + at], mean + at, dtype=torch.float64), EXACT)
    variance = 10 * mean if size > 1 else 1e30  # rank 0 has no weight
    close(model[1].running_var, torch.full([2], variance, dtype=torch.float64), EXACT)
    with pytest.raises(ValueError, match="the weights of all ranks are 0"):
        average_running_statistics(model, samples=0)
    with pytest.raises(ValueError, match="weight=-1 must be a finite number"):
        average_running_statistics(model, samples=-1)
    if size > 1:
        for wrong in (-1, None):
            text = f"weight={wrong} must be a finite" if rank == 0 else "another rank's weight"
            with pytest.raises(ValueError, match=text):
                average_running_statistics(model, samples=wrong if rank == 0 else 1)
    average_running_statistics(nn.Linear(1, 1))


def case_groups_for_a_target_batch() -> None:
    size = hvd.size()
    for batch_size in (1, 16, 32):
        layer = hvd.SyncBatchNorm(CHANNELS, group_size=choose_group_size(batch_size))
        assert layer.group_size == group_size_for(batch_size, ["here"] * size)
    layer = hvd.SyncBatchNorm.convert_sync_batchnorm(
        nn.BatchNorm1d(CHANNELS), group_size=choose_group_size(2, samples=4)
    )
    assert layer.group_size == (2 if size % 2 == 0 else size)
    layer(torch.randn(2, CHANNELS))
    if size > 1:
        with pytest.raises(ValueError, match=r"ranks differ in batch_size: ranks \[0\]: 8; "):
            choose_group_size(8 + hvd.rank())


def case_gradients_cannot_be_differentiated_again() -> None:
    layer, _ = pair()
    mine = batches([2] * hvd.size(), (2,), 15)[hvd.rank()].requires_grad_()
    (gradient,) = torch.autograd.grad(layer(mine).sin().sum(), mine, create_graph=True)
    if hvd.size() > 1:
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()


def case_convert() -> None:
    shared = nn.BatchNorm1d(4)
    model = nn.ModuleDict(
        {
            "first": nn.BatchNorm2d(4, eps=0.25, momentum=None, dtype=torch.float64),
            "plain": nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4, affine=False), nn.ReLU()),
            "once": shared,
            "again": nn.Sequential(shared, shared),
            "forgetful": nn.BatchNorm3d(4, track_running_stats=False),
            "sync": nn.SyncBatchNorm(4),
            "instance": nn.InstanceNorm1d(4),
        }
    )
    with torch.no_grad():
        model["first"].weight.fill_(3)
    model["first"].qconfig = "a configuration"
    model["first"].weight.requires_grad_(False)
    model["once"].eval()
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    state = copy.deepcopy(model.state_dict())
    converted = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted is model
    for name in ("first", "once", "forgetful", "sync"):
        assert type(model[name]) is hvd.SyncBatchNorm
    assert type(model["plain"][1]) is hvd.SyncBatchNorm
    assert type(model["instance"]) is nn.InstanceNorm1d
    assert model["again"][0] is model["again"][1] is model["once"]
    after = dict(model.named_parameters())
    assert after.keys() == parameters.keys()
    assert all(after[name] is parameters[name] for name in after)
    after = dict(model.named_buffers())
    assert after.keys() == buffers.keys()
    assert all(after[name] is buffers[name] for name in after)
    assert (model["first"].eps, model["first"].momentum) == (0.25, None)
    assert model["first"].qconfig == "a configuration"
    assert not hasattr(model["plain"][1], "qconfig")
    assert model["first"].training
    assert not model["once"].training
    assert model["plain"][1].weight is None
    assert model["forgetful"].running_mean is None
    model.load_state_dict(state)
    # A layer alone, and one that is converted already.
    alone = nn.BatchNorm1d(CHANNELS)
    ours = hvd.SyncBatchNorm.convert_sync_batchnorm(alone)
    assert ours.weight is alone.weight
    assert type(hvd.SyncBatchNorm.convert_sync_batchnorm(ours)) is hvd.SyncBatchNorm
    with pytest.raises(ValueError, match="LazyBatchNorm1d does not know its channels yet"):
        hvd.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm1d()))


def case_bad_inputs() -> None:
    layer = hvd.SyncBatchNorm(CHANNELS, name="bad")
    for mode in (True, False):
        layer.train(mode)
        for shape in ((), (CHANNELS,), (2, CHANNELS + 1), (4, 1, CHANNELS)):
            with pytest.raises(ValueError, match=r"'bad' takes inputs of shape \(N, 3, \.\.\.\)"):
                layer(torch.ones(shape))
        for dtype in (torch.int64, torch.complex64):
            with pytest.raises(TypeError, match=f"'bad' takes inputs of type .*, not {dtype}"):
                layer(torch.ones(2, CHANNELS, dtype=dtype))
    assert int(layer.num_batches_tracked) == 0
    if hvd.size() > 1:
        channels = CHANNELS + (hvd.rank() == 1)
        uneven = hvd.SyncBatchNorm(channels, name="channels")
        with pytest.raises(errors.MismatchError, match=r"channels\.forward"):
            uneven(torch.ones(2, channels))
    agree(*pair(), batches(uneven_rows(), ()))


def case_copies_and_files() -> None:
    layer, whole = pair()
    agree(layer, whole, batches(uneven_rows(), (), 18))
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for twin in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert "eps=1e-05" in repr(twin)
        agree(twin, copy.deepcopy(whole), batches(uneven_rows(), (), 19))
    plain = nn.BatchNorm1d(CHANNELS, dtype=torch.float64)
    plain.load_state_dict(layer.state_dict())


def case_compiled() -> None:
    if hvd.size() > 2:
        return  # every rank needs seconds to import the compiler
    layer, whole = pair()
    model = nn.Sequential(nn.Identity(), layer, nn.Tanh())
    compiled = torch.compile(model, backend="eager")
    plain = nn.Sequential(nn.Identity(), whole, nn.Tanh())
    for step in range(2):
        parts = batches(uneven_rows(), (), 20, step)
        before = sum(map(len, parts[: hvd.rank()]))
        mine = parts[hvd.rank()].clone().requires_grad_()
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Dynamo does not know how to trace")
            output = compiled(mine)
        output.sum().backward()
        close(output, plain(torch.cat(parts))[before : before + len(mine)], EXACT)
    close_buffers(layer, whole)
    in_one_graph = torch.compile(model.eval(), backend="eager", fullgraph=True)
    close(in_one_graph(mine), plain.eval()(mine), EXACT)


def case_training_equals_one_process() -> None:
    def network() -> nn.Module:
        torch.manual_seed(mpirun.seed() % 2**31)
        return nn.Sequential(
            nn.Conv1d(CHANNELS, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Conv1d(4, 4, 1),
            nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(12, 2),
        ).double()  # fmt: skip

    plain, model = network(), hvd.SyncBatchNorm.convert_sync_batchnorm(network())
    alone = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters()
    )
    for step in range(5):
        parts = batches([4] * hvd.size(), (5,), 21, step)
        alone.zero_grad()
        plain(torch.cat(parts)).square().mean().backward()
        alone.step()
        optimizer.zero_grad()
        model(parts[hvd.rank()]).square().mean().backward()
        optimizer.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        close(ours, theirs, 1e-8)
    for ours, theirs in zip(model.buffers(), plain.buffers(), strict=True):
        close(ours, theirs, 1e-8)


def agree_in_groups(ranks: Sequence[int], group_size: int, **options: Any) -> None:
    layer, whole = pair(group_size=group_size, momentum=None, **options)
    if hvd.rank() not in ranks:
        return
    place = ranks.index(hvd.rank()) // group_size * group_size
    members = ranks[place : place + group_size]
    for step in range(3):
        parts = batches(uneven_rows(), (2,), 22, step)
        chosen = [parts[rank] for rank in members]
        if group_size > 1:
            agree(layer, whole, chosen, members=members, process_set=layer._group)
        else:
            with Requests() as names:
                close(layer(chosen[0]), whole(chosen[0]), EXACT)
            assert names == []
            close_buffers(layer, whole)


def case_groups() -> None:
    size = hvd.size()
    for group_size in range(1, size + 1):
        if size % group_size == 0:
            agree_in_groups(range(size), group_size)
    for bad in (0, -1, size + 1, 3 if size == 4 else 2 * size, 1.0, "2"):
        with pytest.raises(ValueError, match=f"group_size={bad!r} does not divide the {size} "):
            hvd.SyncBatchNorm(CHANNELS, group_size=bad)
    group_size = 2 if size % 2 == 0 else size
    model = nn.Sequential(nn.BatchNorm1d(CHANNELS))
    layer = hvd.SyncBatchNorm.convert_sync_batchnorm(model, group_size=group_size)[0]
    assert f"group_size={group_size}" in repr(layer)
    layer(torch.randn(4, CHANNELS))
    # Only the group with too few values fails.
    if size > group_size:
        rows = 4 if hvd.rank() < group_size else 0
        if rows:
            layer(torch.randn(rows, CHANNELS))
        else:
            with pytest.raises(ValueError, match="have 0 values per channel"):
                layer(torch.randn(rows, CHANNELS))


def case_groups_that_were_process_sets_before() -> None:
    if hvd.size() == 4:
        removable = ProcessSet([0, 2])
        add_process_set(removable)
        with pytest.raises(ValueError, match="duplicate"):
            add_process_set([0, 2])
        layer = hvd.SyncBatchNorm(CHANNELS, process_set=removable, group_size=2)
        assert layer._group is (removable if hvd.rank() in (0, 2) else None)


def case_process_sets() -> None:
    size = hvd.size()
    if size == 1:
        return
    low, high = ProcessSet(range(size - 1)), ProcessSet(range(1, size))
    stranger = hvd.SyncBatchNorm(CHANNELS, process_set=low)
    with pytest.raises(TypeError, match="is not registered"):
        stranger(torch.ones(2, CHANNELS))
    with pytest.raises(TypeError, match="must be a ProcessSet, not list"):
        hvd.SyncBatchNorm(CHANNELS, process_set=[0])
    for process_set in (low, high):
        add_process_set(process_set)
    layers = [(process_set, *pair(process_set=process_set)) for process_set in (low, high)]
    for step in range(3):
        for process_set, layer, whole in layers:
            parts = batches(uneven_rows(), (), 23, step)
            if process_set.included():
                chosen = [parts[rank] for rank in process_set.ranks]
                agree(layer, whole, chosen, EXACT, process_set.ranks, process_set)
            else:
                with pytest.raises(ValueError, match=f"rank {hvd.rank()} is not a member"):
                    layer(parts[0])
                assert int(layer.num_batches_tracked) == 0
                layer.eval()(parts[0])
                layer.train()
    assert f"process_set={low.ranks}" in repr(layers[0][1])
    for process_set, layer, whole in layers:
        twin = copy.deepcopy(layer)
        assert twin.process_set is process_set
        if process_set.included():
            chosen = [parts[rank] for rank in process_set.ranks]
            agree(twin, copy.deepcopy(whole), chosen, EXACT, process_set.ranks, process_set)
    hvd.barrier()


def case_init_again() -> None:
    size = hvd.size()
    group_size = 2 if size % 2 == 0 else size
    members = range(hvd.rank() // group_size * group_size, size)[:group_size]
    layer, whole = pair(group_size=group_size)
    file = io.BytesIO()
    torch.save(layer, file)
    hvd.shutdown()
    with pytest.raises(errors.NotInitializedError):
        layer(torch.ones(2, CHANNELS))
    hvd.init()
    file.seek(0)
    parts = [batches(uneven_rows(), (), 24)[rank] for rank in members]
    for each in (torch.load(file, weights_only=False), layer):
        each(parts[members.index(hvd.rank())])
        each.load_state_dict(whole.state_dict())
        if group_size > 1:
            agree(each, copy.deepcopy(whole), parts, members=members, process_set=each._group)
    hvd.barrier()


def groups_of_some_ranks() -> None:
    hvd.init(process_sets=[[0, 1, 3, 4]])
    process_set = ProcessSet([0, 1, 3, 4])
    hvd.init(process_sets=[process_set])
    agree_in_groups([0, 1, 3, 4], 2, process_set=process_set)
    agree_in_groups([0, 1, 3, 4], 4, process_set=process_set)
    with pytest.raises(ValueError, match="group_size=3 does not divide the 4 ranks"):
        hvd.SyncBatchNorm(CHANNELS, process_set=process_set, group_size=3)
    hvd.barrier()


@tiers.full
def test_groups_of_some_ranks() -> None:
    job = mpirun.run(__file__, 5)
    assert job.returncode == 0, job.report()


test_case = session.on_ranks(globals(), 1, 2, 3, 4, session="torch")


if __name__ == "__main__":
    groups_of_some_ranks()

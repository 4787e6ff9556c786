"""DistributedOptimizer with compressors that keep errors, against NumPy references.

A loss is the sum of parameters times constants, so cases choose the gradients. Every rank knows the
gradients of all ranks.
"""

from __future__ import annotations

import copy
import gc
import io
import itertools
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import compression_oracle as oracle
import mpirun
import numpy as np
import pretend_hosts
import pytest
import session
import torch
from torch import nn
from torch_training import assert_equal_on_all_ranks, share, start

import hororing.torch as hvd
from hororing._engine import logs
from hororing.torch.compression import auto, bucket

SHAPES = [(40, 30), (7,), (64, 5, 5), (1100,)]  # the second one is too small to be compressed
STEPS = 4


def parameters(dtype: torch.dtype = torch.float64) -> list[tuple[str, nn.Parameter]]:
    return [(f"p{at}", nn.Parameter(torch.zeros(s, dtype=dtype))) for at, s in enumerate(SHAPES)]


def gradients(step: int, dtype: torch.dtype = torch.float64) -> list[list[torch.Tensor]]:
    """Return gradients by rank."""
    made = torch.Generator().manual_seed(mpirun.seed() + step)
    return [
        [torch.randn(shape, dtype=dtype, generator=made) * 10.0 ** (at - 2) for at, shape in
         enumerate(SHAPES)] for _ in range(hvd.size())
    ]  # fmt: skip


def backward(named: list[tuple[str, nn.Parameter]], values: list[torch.Tensor]) -> None:
    sum((param * value).sum() for (_, param), value in zip(named, values, strict=True)).backward()


def flat(tensors: list[torch.Tensor]) -> np.ndarray:
    """Return the tensors flat, in the order of a bucket: from the last one to the first."""
    return torch.cat([t.reshape(-1) for t in reversed(tensors) if t.numel() > 1000]).numpy()


def distributed(named, compression, **options) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD([param for _, param in named], lr=0.1)
    return hvd.DistributedOptimizer(optimizer, named, compression=compression, **options)


def case_start():
    start()
    torch.set_default_dtype(torch.float32)


def assert_as_reference(method, reference, tolerance: float = 1e-9, **options) -> None:
    named = parameters()
    optimizer = distributed(named, method, **options)
    factor = 1 if options.get("op") == hvd.Sum else hvd.size()
    for step in range(STEPS):
        given = gradients(step)
        optimizer.zero_grad()
        backward(named, given[hvd.rank()])
        grads = [param.grad for _, param in named]
        if hvd.size() == 1:
            assert all(map(torch.equal, grads, given[0]))
            continue
        expected = reference.reduce(np.stack([flat(each) for each in given])) / factor
        np.testing.assert_allclose(flat(grads), expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(grads[1], sum(each[1] for each in given) / factor)
        assert_equal_on_all_ranks(*grads)


# The sizes of the gradients in the bucket, in its order.
SIZES = [size for shape in reversed(SHAPES) if (size := int(np.prod(shape))) > 1000]


def case_int8_is_as_the_reference():
    for block in (32, 256):
        reference = oracle.Int8(hvd.size(), SIZES, block)
        assert_as_reference(hvd.Compression.int8(block=block), reference)
    reference = oracle.Int8(hvd.size(), SIZES, 256)
    assert_as_reference(hvd.Compression.int8, reference, op=hvd.Sum)


METHODS = [
    hvd.Compression.int8,
    hvd.Compression.powersgd(rank=2),
    hvd.Compression.topk(ratio=0.1),
    hvd.Compression.int8(scope="hosts"),
]


def held_errors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    kept = optimizer.state_dict()["state"].get("hororing.compression", {})
    return {name: tensors["error"] for name, tensors in kept.items()}


def case_a_group_goes_its_own_way():
    named = parameters()
    optimizer = distributed(named, hvd.Compression.int8, groups=[[named[0][1], named[1][1]]])
    given = gradients(0)
    backward(named, given[hvd.rank()])
    assert len(optimizer._groups) == 1
    for at, (_, param) in enumerate(named):
        exact = sum(each[at] for each in given) / hvd.size()
        step = max(each[at].abs().max() for each in given) / 127
        assert (param.grad - exact).abs().max() <= 2 * step
    assert_equal_on_all_ranks(*(param.grad for _, param in named))


def case_what_is_not_sent_is_kept():
    if hvd.size() == 1:
        return
    for method in METHODS:
        for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
            named = parameters(dtype)
            optimizer = distributed(named, method, op=hvd.Sum)
            reduced = [torch.zeros_like(param) for _, param in named]
            exact = [torch.zeros_like(param) for _, param in named]
            for step in range(STEPS):
                given = gradients(step, dtype)
                optimizer.zero_grad()
                backward(named, given[hvd.rank()])
                for at, (_, param) in enumerate(named):
                    reduced[at] += param.grad
                    exact[at] += sum(each[at] for each in given)
            errors = held_errors(optimizer)
            if method.scope == "all":
                compressed = [name for name, param in named if method.compresses(param)]
                assert sorted(errors) == compressed
            for at, (name, param) in enumerate(named):
                left = hvd.allreduce(errors.get(name, torch.zeros_like(param)), op=hvd.Sum)
                torch.testing.assert_close(
                    reduced[at] + left, exact[at], rtol=tolerance, atol=tolerance
                )


def weights(step: int) -> list[float]:
    """Return weights by rank; some are 0."""
    made = np.random.default_rng([mpirun.seed(), step])
    return made.integers(0, 3, hvd.size()) * made.choice([0.1, 7, 8e307]) + (
        np.arange(hvd.size()) == step % hvd.size()
    )


def weighted_gradients(step: int) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
    """Return gradients by rank, NaN if the weight is 0, and their weighted mean."""
    given, shares = gradients(step), np.array(weights(step))
    shares = shares / shares.max() / (shares / shares.max()).sum()
    mean = [
        sum(each[at] * share for each, share in zip(given, shares, strict=True))
        for at in range(len(SHAPES))
    ]
    for each, weight in zip(given, shares, strict=True):
        if weight == 0:
            each[:] = [torch.full_like(tensor, np.nan) for tensor in each]
    return given, mean


def case_weighted_means_and_errors_add_up():
    for method in [*METHODS, hvd.Compression.topk(ratio=1.0)]:
        named = parameters()
        optimizer = distributed(named, method)
        reduced, exact = ([torch.zeros_like(param) for _, param in named] for _ in range(2))
        for step in range(STEPS):
            given, mean = weighted_gradients(step)
            optimizer.zero_grad()
            optimizer.weight = weights(step)[hvd.rank()]
            backward(named, given[hvd.rank()])
            assert_equal_on_all_ranks(*(param.grad for _, param in named))
            for at, (_, param) in enumerate(named):
                reduced[at] += param.grad
                exact[at] += mean[at]
                if method == hvd.Compression.topk(ratio=1.0):
                    torch.testing.assert_close(param.grad, mean[at], rtol=1e-12, atol=1e-12)
            optimizer.step()
        errors = held_errors(optimizer)
        for at, (name, param) in enumerate(named):
            left = hvd.allreduce(errors.get(name, torch.zeros_like(param)))
            torch.testing.assert_close(reduced[at] + left, exact[at], rtol=1e-9, atol=1e-9)


def case_steps_whose_weights_are_all_zero_change_nothing():
    for method in METHODS:
        named = parameters()
        optimizer = distributed(named, method)
        optimizer.weight = hvd.rank() + 1
        backward(named, gradients(0)[hvd.rank()])
        optimizer.step()
        before = copy.deepcopy([held_errors(optimizer), [param for _, param in named]])
        optimizer.zero_grad()
        optimizer.weight = 0
        backward(named, [torch.full_like(each, np.nan) for each in gradients(1)[hvd.rank()]])
        optimizer.step()
        after = [held_errors(optimizer), [param for _, param in named]]
        torch.testing.assert_close(after, before, rtol=0, atol=0)


def case_a_weight_on_some_ranks_only_is_an_error():
    if hvd.size() == 1:
        return
    for method in METHODS:
        named = [each for each in parameters() if each[1].numel() > 1000]  # nothing is uncompressed
        optimizer = distributed(named, method)
        given = [each for each in gradients(0)[hvd.rank()] if each.numel() > 1000]
        some = 2.0 if hvd.rank() else None
        for weight in (some, None, some, 1.0, some):
            optimizer.zero_grad()
            optimizer.weight = weight
            if hvd.allreduce(torch.tensor(float(weight is None))) in (0, 1):
                backward(named, given)
                continue
            with pytest.raises(
                hvd.MismatchError, match=r"weights differ: ranks? 0.*: none; ranks? 1.*: given"
            ):
                backward(named, given)


def case_weights_with_passes_groups_and_a_scaler():
    for options in ({"passes": 2}, {"groups": 2}, {"groups": "lists"}, {"scaler": True}):
        for method in [*METHODS, hvd.Compression.auto(methods=(hvd.Compression.int8(block=64),))]:
            exact, _ = trained(hvd.Compression.none, weighted=True, **options)
            model, _ = trained(method, weighted=True, **options)
            for mine, others in zip(model.parameters(), exact.parameters(), strict=True):
                assert (mine - others).abs().max() < 6 * 2e-3  # of Adam's steps


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 60), nn.Tanh(), nn.Linear(60, 40), nn.Linear(40, 5))


def data(steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for step in range(steps):
        made = torch.Generator().manual_seed(mpirun.seed() + step)
        yield torch.randn(24, 20, generator=made), torch.randn(24, 5, generator=made)


def train(model, optimizer, steps: int, passes: int = 1, scaler=None, weighted=False) -> None:
    for inputs, targets in data(steps):
        optimizer.zero_grad()
        inputs, targets = share(inputs), share(targets)
        for part in range(passes):
            if weighted:
                optimizer.weight = hvd.rank() + part + 1
            loss = nn.functional.mse_loss(model(inputs[part::passes]), targets[part::passes])
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()


def trained(
    method, steps: int = 6, passes: int = 1, groups=None, scaler=None, weighted=False, **options
):
    torch.manual_seed(mpirun.seed())
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    params = list(model.parameters())
    if groups == "lists":
        groups = [params[:3], params[4:]]
    hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), compression=method, backward_passes_per_step=passes,
        groups=groups, **options,
    )  # fmt: skip
    if scaler is True:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    train(model, optimizer, steps, passes, scaler, weighted)
    assert_equal_on_all_ranks(*model.parameters())
    return model, optimizer


def case_it_trains_with_passes_and_groups():
    for method in METHODS:
        exact, _ = trained(hvd.Compression.none)
        for options in ({"passes": 2}, {"groups": 2}, {"groups": "lists"}):
            model, _ = trained(method, **options)
            for mine, others in zip(model.parameters(), exact.parameters(), strict=True):
                assert (mine - others).abs().max() < 6 * 2e-3  # of Adam's steps


def case_scaled_gradients_and_steps_that_are_skipped():
    for method in METHODS:
        plain, _ = trained(method)
        # Powers of two change no rounding. The scale doubles after each step.
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
        scaled, _ = trained(method, scaler=scaler)
        if hvd.size() > 1:
            assert scaler.get_scale() == 8.0 * 2**6
        for mine, others in zip(scaled.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, others, rtol=1e-4, atol=1e-5)


def case_an_infinite_gradient_leaves_the_errors():
    for method in METHODS:
        named = parameters()
        optimizer = distributed(named, method)
        backward(named, gradients(0)[hvd.rank()])
        before = copy.deepcopy(held_errors(optimizer))
        optimizer.zero_grad()
        spoilt = gradients(1)[hvd.rank()]
        if hvd.rank() == hvd.size() - 1:
            spoilt[0][3, 4] = float("inf")
            spoilt[2][3, 4] = float("nan")
        backward(named, spoilt)
        assert not named[0][1].grad.isfinite().all()
        after = held_errors(optimizer)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)


def case_state_is_saved_and_loaded():
    for method in METHODS:
        model, optimizer = trained(method)
        file = io.BytesIO()
        torch.save([model.state_dict(), optimizer.state_dict()], file)
        train(model, optimizer, 3)
        file.seek(0)
        other = network()
        again = torch.optim.Adam(other.parameters(), lr=1e-3)
        hvd.DistributedOptimizer(again, other.named_parameters(), compression=method)
        weights, state = torch.load(file)
        other.load_state_dict(weights)
        again.load_state_dict(state)
        train(other, again, 3)
        for mine, others in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine, others)


def case_state_is_broadcast():
    for method in METHODS:
        _, optimizer = trained(method)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        errors = held_errors(optimizer)
        if hvd.size() > 1 and method.scope == "all":
            assert errors
        assert_equal_on_all_ranks(torch.zeros(1), *errors.values())
        assert all(isinstance(key, torch.Tensor) for key in optimizer.state)


def case_process_sets():
    from test_torch_optimizer_sets import some_sets

    for process_set in some_sets():
        for method in METHODS:
            named = parameters()
            optimizer = distributed(named, method, process_set=process_set)
            given = gradients(0)
            backward(named, given[hvd.rank()])
            ranks = process_set.ranks if process_set.included() else [hvd.rank()]
            total = sum(given[rank][1] for rank in ranks) / len(ranks)
            torch.testing.assert_close(named[1][1].grad, total)
            if len(ranks) == 1:
                assert torch.equal(named[0][1].grad, given[hvd.rank()][0])
            optimizer.step()


def case_frozen_and_later_parameters():
    for method in METHODS:
        named = parameters()
        for name, param in named:
            param.requires_grad = name not in ("p0", "p2")
        optimizer = distributed(named, method)
        for step in range(6):
            if step == 2:
                named[0][1].requires_grad = named[2][1].requires_grad = True
            if step == 4:
                named[0][1].requires_grad = False
            optimizer.zero_grad()
            given = gradients(step)
            live = [at for at, (_, param) in enumerate(named) if param.requires_grad]
            backward([named[at] for at in live], [given[hvd.rank()][at] for at in live])
            assert_equal_on_all_ranks(*[named[at][1].grad for at in live])
            optimizer.step()


def case_it_begins_anew_with_a_new_engine():
    for method in METHODS:
        named = parameters()
        optimizer = distributed(named, method)
        backward(named, gradients(0)[hvd.rank()])
        first = [param.grad.clone() for _, param in named]
        optimizer.step()
        optimizer.zero_grad()
        hvd.shutdown()
        hvd.init()
        assert not held_errors(optimizer)
        backward(named, gradients(0)[hvd.rank()])
        assert all(torch.equal(param.grad, at) for (_, param), at in zip(named, first, strict=True))


def kinds(optimizer: torch.optim.Optimizer) -> str:
    reducer = optimizer._reducer
    buckets = reducer.grouping.buckets if reducer else {}  # {} for a single rank
    return "+".join(sorted({bucket._method.name for bucket in buckets.values()})) or "none"


def auto_trained(
    seconds: dict[str, float], waiting: float, steps: int, loss=None, weighted=False, **options
):
    """Train with these times of a step; return the methods used in each step, and the optimizer."""

    def after_wait(self):
        real(self)
        whole = seconds.get(kinds(optimizer), 0.9)
        # All ranks except the last also wait for others.
        wait = 0.9 if hvd.rank() < hvd.size() - 1 else waiting
        self._last = auto.Times(whole, wait * whole, 0.9 * whole)

    named = parameters(torch.float32)
    optimizer = distributed(named, hvd.Compression.auto(sample_steps=5, **options))
    real, auto.Chosen.after_wait = auto.Chosen.after_wait, after_wait
    try:
        used = []
        for step in range(steps):
            optimizer.zero_grad()
            if weighted:
                optimizer.weight = hvd.rank() + step
            backward(named, gradients(step, torch.float32)[hvd.rank()])
            assert_equal_on_all_ranks(*(param.grad for _, param in named))
            optimizer.step()
            used.append(kinds(optimizer))
            if loss is not None:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    optimizer.note_loss(loss(step))
    finally:
        auto.Chosen.after_wait = real
    assert len(set(hvd.allgather_object(str(used)))) == 1
    return used, optimizer


def case_auto_takes_what_is_measured_to_be_fast():
    if hvd.size() == 1:
        return
    fast = {"none": 1.0, "int8": 0.5, "powersgd": 0.4}
    used, optimizer = auto_trained(fast, 0.5, 45)
    # The gradients are random, so low-rank approximations are poor.
    assert list(dict.fromkeys(used)) == ["none", "int8", "powersgd"]
    assert used[-10:] == ["int8"] * 10
    told = hvd.statistics()["compression"]["optimizer.p0"]
    assert told["int8"] == 1
    assert told["least_cosine"] > 0.99
    used, optimizer = auto_trained(fast, 0.5, 35, weighted=True, least_cosine=-1.0)
    assert used[-1] == "powersgd"
    del optimizer
    gc.collect()
    assert "optimizer.p0" not in hvd.statistics()["compression"]


def case_auto_leaves_alone_what_does_not_wait():
    if hvd.size() == 1:
        return
    used, optimizer = auto_trained({}, 0.01, 12)
    assert set(used) == {"none"}
    reducer = optimizer._reducer
    assert reducer.grouping._program is None
    assert not any(gradient.route.together for _, gradient in reducer._gradients.values())
    used, _ = auto_trained({"none": 1.0, "int8": 0.99, "powersgd": 2.0}, 0.5, 35)
    assert set(used[8:20]) == {"int8", "powersgd"}
    assert used[-1] == "none"


def case_auto_goes_back_when_losses_rise_or_sums_are_wrong():
    if hvd.size() == 1:
        return
    fast = {"none": 1.0, "int8": 0.5, "powersgd": 2.0}
    used, _ = auto_trained(fast, 0.5, 50, loss=lambda step: step if hvd.rank() == 0 else 0.0)
    assert used[30] == "int8"
    assert used[-1] == "none"

    def falling(step):
        return torch.tensor(-1.0 * step, requires_grad=True)

    used, _ = auto_trained(fast, 0.5, 50, loss=falling)
    assert used[-1] == "int8"
    real, bucket._cosine = bucket._cosine, lambda exact, other: -1.0 if hvd.rank() == 1 else 1.0
    try:
        used, _ = auto_trained(fast, 0.5, 45)
    finally:
        bucket._cosine = real
    assert used[-1] == "none"


def case_auto_with_an_engine_that_starts_anew():
    _, optimizer = auto_trained({}, 0.01, 12)
    hvd.shutdown()
    hvd.init()
    if hvd.size() > 1:
        assert optimizer._reducer.grouping._program is not None


def case_auto_tells_what_it_does():
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logs.logger.addHandler(handler)
    before = logs.logger.level
    logs.logger.setLevel(logging.INFO)
    try:
        auto_trained({}, 0.01, 12)
    finally:
        logs.logger.removeHandler(handler)
        logs.logger.setLevel(before)
    found = [line for line in lines if "not used: a step waits 1.0% for gradients" in line]
    assert len(found) == (hvd.rank() == 0 and hvd.size() > 1)


def case_wrong_arguments():
    named = parameters()
    with pytest.raises(ValueError, match=r"op=Min cannot be used with a compression"):
        distributed(named, hvd.Compression.int8, op=hvd.Min)
    with pytest.raises(ValueError, match=r"gradient_predivide_factor cannot be used"):
        distributed(named, hvd.Compression.int8, gradient_predivide_factor=2.0)
    with pytest.raises(ValueError, match=r"groups='auto' cannot be used"):
        distributed(named, hvd.Compression.int8, groups="auto")
    with pytest.raises(ValueError, match=r"block=6 must be a multiple of 4"):
        hvd.Compression.int8(block=6)
    with pytest.raises(ValueError, match=r"scope='rack' must be"):
        hvd.Compression.int8(scope="rack")
    with pytest.raises(ValueError, match=r"ratio=0 must be in"):
        hvd.Compression.topk(ratio=0)
    with pytest.raises(ValueError, match=r"ratio=2 must be in"):
        hvd.Compression.topk(ratio=2)
    with pytest.raises(ValueError, match=r"block=0 must be a multiple of 4"):
        hvd.Compression.int8(block=0)
    with pytest.raises(ValueError, match=r"block=65540 must be .* of at most 65536"):
        hvd.Compression.int8(block=65540)
    with pytest.raises(ValueError, match=r"rank=0 must be at least 1"):
        hvd.Compression.powersgd(rank=0)
    with pytest.raises(ValueError, match=r"methods=\(1,\) must be a tuple of methods"):
        hvd.Compression.auto(methods=(1,))
    with pytest.raises(ValueError, match=r"sample_steps=0 must be positive"):
        hvd.Compression.auto(sample_steps=0)
    with pytest.raises(TypeError, match=r"blocks"):
        hvd.Compression.int8(blocks=6)
    with pytest.raises(TypeError, match=r"for DistributedOptimizer of hororing.torch alone"):
        hvd.allreduce(torch.ones(3), compression=hvd.Compression.int8)


def case_ranks_that_compress_differently_all_fail():
    if hvd.size() == 1:
        return
    several = [
        hvd.Compression.none, hvd.Compression.int8, hvd.Compression.int8(block=64),
        hvd.Compression.powersgd, hvd.Compression.topk, hvd.Compression.topk(ratio=0.02),
        hvd.Compression.int8(scope="hosts"), hvd.Compression.auto, hvd.Compression.none,
    ]  # fmt: skip
    for one, other in itertools.pairwise(several):
        named = parameters()
        optimizer = distributed(named, other if hvd.rank() == 1 else one)
        for step in range(2):
            optimizer.zero_grad()
            with pytest.raises(hvd.MismatchError):
                backward(named, gradients(step)[hvd.rank()])
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def case_gradients_of_different_shapes_are_an_error_that_names_them():
    if hvd.size() == 1:
        return
    for method in METHODS:
        shapes = [(60, 40), (50, 40 + hvd.rank() % 2)]
        named = [(f"p{at}", nn.Parameter(torch.zeros(shape))) for at, shape in enumerate(shapes)]
        optimizer = distributed(named, method)
        optimizer.weight = 1.0
        text = r"rank 0: p1, torch.float32, of shape \(50, 40\); rank 1: p1, .*\(50, 41\)"
        with pytest.raises(hvd.MismatchError, match=text):
            backward(named, [torch.ones(shape) for shape in shapes])


def case_sparse_gradients_are_an_error_that_says_what_to_do():
    embedding = nn.Embedding(100, 20, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    method = hvd.Compression.int8
    hvd.DistributedOptimizer(optimizer, embedding.named_parameters(), compression=method)
    loss = embedding(torch.tensor([1, 2])).sum()
    if hvd.size() == 1:
        loss.backward()
        return
    with pytest.raises(ValueError, match="sparse_as_dense=True"):
        loss.backward()


test_on_ranks = session.on_ranks(globals(), 1, 2, 3, 4, push=[3], session="torch")


BETWEEN_HOSTS = """
import compression_oracle as oracle
import numpy as np
import torch
import hororing.torch as hvd
import test_torch_compression as cases

cases.case_start()
hosts = [[0, 2], [1]]
reference = oracle.Int8(2, cases.SIZES, 256)
named = cases.parameters()
optimizer = cases.distributed(named, hvd.Compression.int8(scope="hosts"))
for step in range(3):
    given = cases.gradients(step)
    optimizer.zero_grad()
    cases.backward(named, given[hvd.rank()])
    sums = np.stack([sum(cases.flat(given[rank]) for rank in host) for host in hosts])
    grads = [param.grad for _, param in named]
    np.testing.assert_allclose(cases.flat(grads), reference.reduce(sums) / 3, atol=1e-9)
    cases.assert_equal_on_all_ranks(*grads)
assert bool(cases.held_errors(optimizer)) == (hvd.rank() < 2)
hvd.shutdown()
"""


@pytest.mark.skipif(bool(pretend_hosts.why_not()), reason=pretend_hosts.why_not())
def test_ranks_of_a_host_are_one_where_only_hosts_compress(tmp_path: Path):
    script = tmp_path / "between_hosts.py"
    script.write_text(
        f"import sys; sys.path.append({str(Path(__file__).parent)!r})\n{BETWEEN_HOSTS}"
    )
    job = mpirun.run(script, 3, names="a,b,a")
    assert job.returncode == 0, job.report()

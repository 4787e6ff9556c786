"""The guard of PyTorch: it names the tensor, the rank and the steps, and is silent otherwise.

Cases on 3 ranks in the job of the other files of PyTorch: push tier, 3 s.
"""

from __future__ import annotations

import logging
import math
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import session
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hororing.torch as hvd
from hororing.guard import options as guard_options
from hororing.torch import guard as of_torch
from hororing.torch import snapshot

EVERY = 4


def case_start() -> None:
    hvd.init(process_sets="dynamic")
    dist.init_process_group("hororing")
    torch.set_num_threads(1)


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(5, 7, dtype=dtype)
        self.norm = nn.BatchNorm1d(7, dtype=dtype)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(7, 3, dtype=dtype)
        self.register_buffer("scale", torch.ones(3, dtype=dtype))
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(self.norm(self.first(inputs)))) * self.scale


class Training:
    """A model that trains on other data on each rank."""

    def __init__(self, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.model = Model(dtype)
        self.optimizer: Any = torch.optim.Adam(self.model.parameters(), 1e-2)
        self.optimizer = hvd.DistributedOptimizer(
            self.optimizer, self.model.named_parameters(), **options
        )
        self.data = torch.Generator().manual_seed(hvd.rank())

    def guard(self, **options: Any) -> hvd.Guard:
        self.found: list[Any] = []
        options.setdefault("on_divergence", self.found.append)
        self._guard = hvd.Guard(self.model, self.optimizer, **{"every": EVERY, **options})
        return self._guard

    def step(self, count: int = 1, *, takes: bool = True, passes: int = 1) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            for _ in range(passes):
                inputs = torch.randn(4, 5, generator=self.data).to(self.model.scale.dtype)
                self.model(inputs).square().mean().backward()
            if takes:
                self.optimizer.step()


def flip(tensor: torch.Tensor, at: int, bit: int) -> None:
    words = {2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize]
    flat = tensor.detach().reshape(-1).view(words)
    flat[at] ^= torch.tensor(1 << bit).to(words)


@contextmanager
def log() -> Iterator[list[logging.LogRecord]]:
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("hororing")
    logger.addHandler(handler)
    try:
        yield records
    finally:
        logger.removeHandler(handler)


def case_a_flipped_bit_is_named() -> None:
    numbers = torch.Generator().manual_seed(5)

    def draw(limit: int) -> int:
        return int(torch.randint(limit, (), generator=numbers))

    for dtype in (torch.float32, torch.bfloat16):
        for of in ("parameter", "buffer", "optimizer"):
            training = Training(dtype)
            guard = training.guard()
            done = EVERY + 1 + draw(EVERY - 1)
            training.step(done)
            model, state = training.model, training.optimizer.state
            name, tensor = {
                "parameter": ("first.weight", model.first.weight),
                "buffer": ("scale", model.scale),
                "optimizer": ("last.bias: exp_avg", state[model.last.bias]["exp_avg"]),
            }[of]
            culprit, at, bit = draw(hvd.size()), draw(tensor.numel()), draw(8)
            if hvd.rank() == culprit:
                flip(tensor, at, bit)
            training.step(2 * EVERY - done)
            assert not training.found
            training.step()
            (finding,) = training.found
            assert finding.last_equal == EVERY
            assert (finding.step, finding.ranks) == (2 * EVERY, [culprit])
            assert name in [each.name for each in finding.differences]
            first = name.partition(":")[0]  # which a moment changes, unless that is too little
            assert finding.tensor in (name, first)
            assert finding.elements >= 1
            assert finding.largest > 0
            if finding.tensor != name:
                assert "Likely: its exp_avg was changed" in str(finding)
            if of == "buffer":  # nothing else changes it
                assert finding.at == [at]
                assert "one flipped bit" in str(finding)
            text = (
                f"replicas differ at step 8 (last equal at 4): {finding.tensor} on rank {culprit} ("
            )
            assert str(finding).startswith(text)
            assert guard.report()["findings"][0]["text"] == str(finding)


def case_nothing_is_reported_of_what_may_differ() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        training = Training(dtype)
        guard = training.guard(every=1, on_divergence="error")
        torch.manual_seed(hvd.rank())  # dropout
        for step in range(12):
            training.model.cache = torch.full((step + 1,), float(hvd.rank()))
            training.step()
        report = guard.report()
        assert report["comparisons"] == 11
        assert report["last_equal"] == 11
        assert report["findings"] == []
        assert report["excluded"]["batch norm"] == [
            "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"
        ]  # fmt: skip
        assert report["excluded"]["not in state_dict"] == ["cache"]
        assert hvd.statistics()["guard"]["guard.first.bias"] == {"steps": 11, "comparisons": 11}


def case_an_error_is_raised_on_all_ranks_and_training_goes_on() -> None:
    training = Training()
    training.guard(on_divergence="error")
    training.step(EVERY)
    if hvd.rank() == 1:
        training.optimizer.param_groups[0]["lr"] = 0.5
        training.model.scale += 1
    with pytest.raises(hvd.MismatchError, match=r"scale on rank 1 .*different settings: lr") as got:
        training.step()
    assert got.value.rank == 1
    assert re.search(r"lr of group 0 \(|1 more of \d+ differ: lr of group 0", str(got.value))
    training.optimizer.param_groups[0]["lr"] = 0.1
    training.model.scale.fill_(1)
    training.optimizer.zero_grad()
    for param in training.model.parameters():
        hvd.broadcast_(param.data, 0)
    training.step(2 * EVERY)


def case_the_log_names_it_once() -> None:
    training = Training()
    guard = training.guard(on_divergence="warn", every=2)
    training.step(2)
    if hvd.rank() == 2:
        training.model.scale += 1
    with log() as records:
        training.step(5)
    assert [each["step"] for each in guard.report()["findings"]] == [2, 4, 6]
    found = [record for record in records if "replicas differ" in record.getMessage()]
    assert len(found) == (1 if hvd.rank() == 0 else 0)
    for record in found:
        assert record.finding["ranks"] == [2]  # type: ignore[attr-defined]


def case_the_majority_repairs_the_others() -> None:
    training = Training()
    guard = training.guard(on_divergence="repair", every=2)
    training.step(2)
    if hvd.rank() == 1:
        training.optimizer.param_groups[0]["betas"] = (0.5, 0.999)
        flip(training.model.first.weight, 2, 20)
        training.optimizer.state[training.model.last.bias]["exp_avg_sq"].add_(1)
    training.step(takes=hvd.rank() != 1)
    training.step(6)
    found = [(each["step"], each["repaired"]) for each in guard.report()["findings"]]
    assert found == [(2, True), (4, True)]
    assert guard.report()["last_equal"] == 8
    assert training.optimizer.param_groups[0]["betas"][0] == pytest.approx(0.9)
    assert (
        hvd.allgather_object(training.model.first.weight.sum().item()).count(
            training.model.first.weight.sum().item()
        )
        == hvd.size()
    )


def case_without_a_majority_it_is_an_error() -> None:
    training = Training()
    training.guard(on_divergence="repair", every=2)
    training.step(2)
    training.model.scale += hvd.rank()
    with pytest.raises(hvd.MismatchError, match=r"scale has 3 values.*Not repaired") as got:
        training.step()
    assert got.value.rank == -1


def case_a_step_left_out_is_named() -> None:
    training = Training()
    training.guard()
    training.step(5)
    training.step(takes=hvd.rank() != 2)
    training.step(3)
    (finding,) = training.found
    assert finding.ranks == [2]
    assert "steps taken" in str(finding)
    assert "has left out optimizer.step()" in str(finding)
    (taken,) = [each for each in finding.differences if each.name == "steps taken"]
    assert taken.values == [8, 7]


def case_first_values_of_each_rank_are_named() -> None:
    training = Training()
    torch.manual_seed(hvd.rank())  # such as a seed in the script's init
    training.model.scale.copy_(torch.randn(3))
    training.optimizer.state.clear()
    with torch.no_grad():
        training.model.first.weight.normal_()
    training.guard()
    training.optimizer._reducer.check.is_off = True  # which compares parameters in the first step
    training.step(2)
    (finding,) = training.found
    assert str(finding).startswith(
        "replicas differ at step 1 (never equal): first.weight has 3 values on 3 ranks: rank 0; "
    )
    assert "Likely: the first values were not sent to all ranks: call hvd.broadcast_param" in str(
        finding
    )


def case_a_state_loaded_by_one_rank_is_named() -> None:
    training = Training()
    guard = training.guard()
    training.step(2)
    saved = {name: value.clone() for name, value in training.model.state_dict().items()}
    training.step(EVERY - 2)
    if hvd.rank() == 0:
        training.model.load_state_dict(saved)
    training.step()
    (finding,) = training.found
    assert finding.ranks == [0]
    assert finding.last_equal == 1
    assert "load_state_dict or another assignment on some ranks only" in str(finding)
    assert guard.report()["findings"][0]["ranks"] == [0]


def case_an_average_that_lives_on_one_rank_is_no_difference() -> None:
    training = Training()
    training.guard(every=1, on_divergence="error")
    averaged = None
    if hvd.rank() == 0:
        averaged = torch.optim.swa_utils.AveragedModel(training.model)
    for _ in range(4):
        training.step()
        if averaged is not None:
            averaged.update_parameters(training.model)


def case_a_replaced_parameter_is_named() -> None:
    training = Training()
    training.guard()
    training.step(2)
    training.model.last.bias = nn.Parameter(torch.zeros(3))
    training.step(3)
    (finding,) = training.found
    assert "last.bias is not the tensor that the optimizer trains" in str(finding)


def case_state_of_one_rank_only() -> None:
    training = Training()
    training.guard()
    training.step(2)
    if hvd.rank() == 0:
        del training.optimizer.state[training.model.last.bias]["exp_avg"]
        training.optimizer.step = lambda: None
    training.step(3)
    (finding,) = training.found
    assert finding.ranks == [0]
    assert "last.bias: exp_avg (float32[3], which is missing) on rank 0" in str(finding)
    hvd.barrier()


def case_names_are_ignored_by_patterns() -> None:
    training = Training()
    guard = training.guard(ignore=["scale", "*: exp_avg*"])
    training.step(EVERY)
    training.model.scale += hvd.rank()
    training.optimizer.state[training.model.last.bias]["exp_avg"] += hvd.rank()
    training.step(EVERY)
    assert not training.found or "scale" not in str(training.found)
    assert "scale" in guard.report()["excluded"]["ignore"]


def case_a_rank_that_has_joined_takes_no_part() -> None:
    training = Training()
    training.guard(every=2)
    training.step(3)
    if hvd.rank() == 0:
        hvd.join()
    else:
        if hvd.rank() == 2:
            training.model.scale += 1
        training.step(4)
        assert len(training.found) == 2
        assert training.found[0].differences[0].groups == [[1], [2]]
        assert training.found[0].ranks == []
        hvd.join()


def case_a_process_set_has_its_own_guard() -> None:
    members = hvd.add_process_set([0, 2])
    training = Training(process_set=members)
    training.guard(every=2)
    training.step(3)
    if hvd.rank() == 2:
        training.model.scale += 1
    training.step(2)
    assert len(training.found) == (1 if members.included() else 0)
    for finding in training.found:
        assert finding.differences[0].groups == [[0], [2]]
    hvd.remove_process_set(members)


class Bad:
    """Makes the gradient of a parameter NaN or infinite, in one element, while it is armed."""

    def __init__(self, param: torch.Tensor, value: float = math.nan) -> None:
        self.armed, self.value = False, value
        param.register_hook(self)  # before the guard's

    def __call__(self, grad: torch.Tensor) -> torch.Tensor | None:
        if not self.armed:
            return None
        if grad.layout is torch.sparse_coo:
            grad = grad.coalesce().clone()
            grad._values()[0, 0] = self.value
            return grad
        grad = grad.clone()
        grad.view(-1)[0] = self.value
        return grad


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"groups": 2},
    "int8": {"compression": hvd.Compression.int8()},
    "PowerSGD": {"compression": hvd.Compression.powersgd()},
    "top-k": {"compression": hvd.Compression.topk()},
    "float16": {"compression": hvd.Compression.fp16},
    "sum": {"op": hvd.Sum},
    "passes": {"backward_passes_per_step": 2},
    "weights": {},
}


def case_nan_is_named_and_skipped() -> None:
    for number, (way, options) in enumerate(WAYS.items()):
        culprit = number % hvd.size()
        training = Training(**options)
        bad = Bad(training.model.last.weight, (math.nan, math.inf)[number % 2])
        guard = training.guard(on_nonfinite="skip", every=0)
        if way == "weights":
            training.optimizer.weight = 1.0 + hvd.rank()
        passes = options.get("backward_passes_per_step", 1)
        training.step(2, passes=passes)
        before = [param.detach().clone() for param in training.model.parameters()]
        bad.armed = hvd.rank() == culprit
        training.step(passes=passes)
        bad.armed = False
        after = list(training.model.parameters())
        assert all(map(torch.equal, before, after)), way
        training.step(2, passes=passes)
        assert all(torch.isfinite(param).all() for param in after), way
        assert not any(map(torch.equal, before[:1], after[:1])), way
        report = guard.report()
        (finding,) = report["findings"]
        assert (finding["tensor"], finding["ranks"]) == ("last.weight", [culprit]), way
        assert (finding["step"], finding["elements"], finding["size"]) == (3, 1, 21), way
        value = ("NaN", "infinite")[number % 2]
        assert finding["text"].startswith(f"gradient of last.weight is {value} on rank {culprit} (")
        assert "finite above it: last.bias" in finding["text"]
        assert report["skipped"] == 1


def case_nothing_is_finite_above_the_first_gradient() -> None:
    training = Training()
    bad = Bad(training.model.last.bias)
    guard = training.guard(on_nonfinite="skip", every=0)
    training.step(2)
    bad.armed = True
    training.step()
    (finding,) = guard.report()["findings"]
    assert finding["tensor"] == "last.bias"
    assert "finite above" not in finding["text"]


def case_each_rank_and_a_sum_that_overflows() -> None:
    training = Training(op=hvd.Sum)
    bad = Bad(training.model.last.weight)
    also = Bad(training.model.first.weight, math.inf)
    big = Bad(training.model.norm.bias, 3e38)
    guard = training.guard(on_nonfinite="skip", every=0)
    for bad.armed, also.armed, big.armed in (
        (hvd.rank() > 0, hvd.rank() == 0, False),
        (False, False, True),
        (False, False, False),
    ):
        training.step()
    both, overflow = guard.report()["findings"]
    assert guard.report()["skipped"] == 2
    assert (both["tensor"], both["ranks"]) == ("first.weight", [0, 1, 2])
    assert both["others"] == ["last.weight"]
    assert "first.weight is infinite on rank 0" in both["text"]
    assert "ranks 1, 2 also" in both["text"]
    text = "gradient of norm.bias is not finite only as a sum at step 2; the step is skipped on"
    assert overflow["text"].startswith(text)


def case_nan_in_sparse_rows() -> None:
    table = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), 0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, table.named_parameters())
    hvd.broadcast_parameters(table.state_dict(), 0)
    bad = Bad(table.weight)
    guard = hvd.Guard(table, optimizer, on_nonfinite="error")
    for step in range(3):
        optimizer.zero_grad()
        bad.armed = step == 1 and hvd.rank() == 2
        loss = table(torch.tensor([hvd.rank(), 3])).square().sum()
        if step == 1:
            with pytest.raises(FloatingPointError, match=r"is NaN on rank 2 .* step 2: 1 of"):
                loss.backward()
            optimizer.zero_grad()
        else:
            loss.backward()
            optimizer.step()
    assert len(guard.report()["findings"]) == 1


def case_a_snapshot_takes_the_step_again() -> None:
    with tempfile.TemporaryDirectory() as folder:
        training = Training()
        bad = Bad(training.model.first.bias)
        training.guard(on_nonfinite="error", snapshot=Path(folder, "kept"))
        torch.manual_seed(hvd.rank())
        for number in range(3):
            training.optimizer.zero_grad()
            inputs = torch.randn(4, 5)
            training._guard.batch(number, inputs)
            loss = training.model(inputs).square().mean()  # with dropout
            bad.armed = number == 2 and hvd.rank() == 1
            if number < 2:
                loss.backward()
                training.optimizer.step()
        with pytest.raises(FloatingPointError):
            loss.backward()
        if hvd.rank() != 1:
            assert not Path(folder, "kept").exists()
            return
        again = Model()  # which uses random numbers
        kept = snapshot.restore(Path(folder, "kept", "step3-rank1.pt"))
        again.load_state_dict(kept["model"])
        assert kept["batch"] == 2
        assert again(*kept["inputs"]).square().mean() == loss


def case_many_skips_in_a_row_are_an_error() -> None:
    training = Training()
    bad = Bad(training.model.first.bias, math.inf)
    training.guard(on_nonfinite="skip", max_skips=2)
    for _ in range(2):
        bad.armed = hvd.rank() == 0
        training.step(2)
        bad.armed = False
        training.step()
    bad.armed = hvd.rank() == 0
    training.step(2)
    with pytest.raises(FloatingPointError, match="2 steps before it were skipped"):
        training.step()


def case_an_overflow_of_a_scaled_loss_is_expected() -> None:
    for init_scale, reports in ((4.0, 0), (1.0, 1)):
        training = Training()
        bad = Bad(training.model.first.bias, math.inf)
        scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
        guard = training.guard(on_nonfinite="skip")
        for step in range(3):
            training.optimizer.zero_grad()
            bad.armed = step == 1 and hvd.rank() == 1
            inputs = torch.randn(4, 5, generator=training.data)
            scaler.scale(training.model(inputs).square().mean()).backward()
            scaler.step(training.optimizer)
            scaler.update()
        report = guard.report()
        assert len(report["findings"]) == reports
        assert report["overflows"] == 1 - reports
        assert scaler.get_scale() == init_scale / 2
        del scaler


def parallel() -> tuple[Any, Any, Callable[[], None]]:
    model = Model()
    net = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    data = torch.Generator().manual_seed(hvd.rank())

    def step() -> None:
        optimizer.zero_grad()
        net(torch.randn(4, 5, generator=data)).square().mean().backward()
        optimizer.step()

    return net, optimizer, step


def case_distributed_data_parallel() -> None:
    net, optimizer, step = parallel()
    bad = Bad(net.module.first.bias)
    found: list[Any] = []
    guard = hvd.Guard(net, optimizer, every=2, on_divergence=found.append, on_nonfinite="error")
    for _ in range(4):
        step()
    assert not found
    if hvd.rank() == 1:
        flip(net.module.first.weight, 3, 12)
    for _ in range(2):
        step()
    (finding,) = found
    assert (finding.tensor, finding.ranks) == ("first.weight", [1])
    assert (finding.step, finding.last_equal) == (4, 2)
    assert "norm.running_mean" in guard.report()["excluded"]["batch norm"]
    bad.armed = hvd.rank() == 2
    with pytest.raises(FloatingPointError, match=r"first.bias is NaN on rank 2 \(.*at step 7"):
        step()
    guard.close()
    optimizer.zero_grad()
    guard = hvd.Guard(net, optimizer, every=0, on_nonfinite="skip")
    before = [param.detach().clone() for param in net.parameters()]
    step()
    assert all(map(torch.equal, before, net.parameters()))
    bad.armed = False
    step()
    assert not torch.equal(before[0], net.module.first.weight)
    assert guard.report()["skipped"] == 1
    guard.close()


def case_sharded_parameters_are_not_compared() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    model.register_buffer("scale", torch.ones(3))
    fully_shard(model, mesh=init_device_mesh("cpu", (hvd.size(),)))
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    found: list[Any] = []
    guard = hvd.Guard(model, optimizer, 2, on_divergence=found.append, on_nonfinite="error")
    for step in range(4):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        if step == 0 and hvd.rank() == 1:
            model.scale[1] = 2
    (finding,) = found
    assert (finding.tensor, finding.ranks, finding.last_equal) == ("scale", [1], 1)
    assert {"0.weight", "1.bias: exp_avg"} <= set(guard.report()["excluded"]["sharded"])
    model(torch.randn(4, 8)).square().mean().backward()
    if hvd.rank() == 2:  # of the 8 rows of the last layer, it has 2
        model[1].weight.grad.to_local()[1, 3] = math.inf
    text = r"1.weight \(a shard\) is infinite on rank 2 .* at step 5: 1 of 32 elements"
    with pytest.raises(FloatingPointError, match=text):
        optimizer.step()


def case_another_optimizer_counts_its_steps() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found: list[Any] = []
    hvd.Guard(model, optimizer, every=3, on_divergence=found.append)
    for step in range(8):
        if step == 4 and hvd.rank() == 0:
            model.last.weight.data[0, 0] += 1
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
    (finding,) = found
    assert (finding.tensor, finding.ranks) == ("last.weight", [0])
    assert (finding.step, finding.last_equal) == (6, 3)


def case_by_the_environment() -> None:
    text = "every=2,on_divergence=warn,ignore=first*"
    chosen = guard_options.parse(text)
    assert (chosen.every, chosen.on_divergence, chosen.ignore) == (2, "warn", ("first*",))
    before = of_torch.from_environment
    of_torch.from_environment = lambda: chosen  # type: ignore[assignment]
    try:
        training = Training()
        of_torch.guard_parallel_models()
        _, optimizer, step = parallel()
        step()
    finally:
        of_torch.from_environment = before
    for guarded in (training.optimizer, optimizer):
        assert of_torch._guards[guarded]._watch.options is chosen
    with log() as records:
        training.step(2)
        for each in (training.optimizer, optimizer):
            each.param_groups[0]["lr"] += 0.01 * hvd.rank()
        training.step()
        step()
        step()
        step()
    assert len(records) == (2 if hvd.rank() == 0 else 0)
    for record in records:
        assert "lr of group 0" in record.getMessage()
    training.guard()  # replaces that of the environment
    with pytest.raises(ValueError, match="has a guard already"):
        training.guard()


def test_wrong_options_are_refused() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for options, error, text in (
        ({"every": -1}, ValueError, "every=-1"),
        ({"every": "2"}, TypeError, "every='2'"),
        ({"on_divergence": "fix"}, ValueError, "on_divergence='fix' must be one of"),
        ({"ignore": [3]}, TypeError, "patterns"),
        ({"on_nonfinite": "repair"}, ValueError, "on_nonfinite='repair' must be one of"),
        ({"max_skips": 1.5}, TypeError, "max_skips=1.5"),
    ):
        with pytest.raises(error, match=text):
            hvd.Guard(model, optimizer, **options)
    for text in ("every", "evvery=3", "every=x"):
        with pytest.raises((ValueError, TypeError), match=f"HORORING_GUARD={text}"):
            guard_options.parse(text)


test_on_ranks = session.on_ranks(globals(), 3, push=[3], session="torch")

"""DistributedOptimizer(groups="auto"): all ranks find the same groups in the same step, or none.

test_bucket_planning.py tests the plans. Results are compared with those of an optimizer without
groups; on one host they have the same bits.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import mpirun
import pytest
import session
import torch
from interruption import interrupted
from torch import nn
from torch_training import batches, network, plain_sgd, sgd, share, squares, start

import hororing.torch as hvd
from hororing.torch._optimizer import auto_groups
from hororing.torch._optimizer.auto_groups import MEASURED, SKIPPED, Measured
from hororing.torch._optimizer.bucket_planning import Cost
from hororing.torch._optimizer.reducer import Reducer

FOUND_AFTER = SKIPPED + MEASURED  # steps


@contextlib.contextmanager
def cost(alpha_s: float = 1.0, beta_s_per_byte: float = 0.0) -> Iterator[None]:
    """Set the measured cost of messages; by default it is so high that one bucket is best."""
    told = Cost(alpha_s, beta_s_per_byte)
    with mock.patch.object(auto_groups, "fit_cost", return_value=told):
        yield


def shown() -> dict[str, dict[str, float]]:
    """Return the groups in the statistics, without those of optimizers of earlier cases."""
    gc.collect()
    return hvd.statistics()["groups"]


Train = Callable[[nn.Module, torch.optim.Optimizer], None]


def step_often(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 10) -> None:
    for inputs, targets in batches(steps):
        optimizer.zero_grad()
        squares(model, share(inputs), share(targets)).backward()
        optimizer.step()


def assert_changes_no_bit(
    train: Train = step_often, make: Callable = sgd, new: Callable = network, **options: Any
) -> list[set[str]]:
    """Train with groups="auto" and without groups; return the names in each group."""
    trained, grouped = [], []
    for groups in (None, "auto"):
        torch.manual_seed(mpirun.seed())
        model = new()
        optimizer = hvd.DistributedOptimizer(
            make(model.parameters()), model.named_parameters(), groups=groups, **options
        )
        with cost():
            train(model, optimizer)
        trained.append(list(model.parameters()))
        names = {param: name for name, param in model.named_parameters()}
        grouped = [{names[param] for param in group} for group in optimizer._groups or []]
    for plain, auto in zip(*trained, strict=True):
        assert torch.equal(plain, auto)
    return grouped


def everything(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters()}


def case_start() -> None:
    start()


# ---------------------------------------------------------------------------------------------
# The groups that are found


READY_MS = [0, 2, 4, 30, 32, 34]


def six() -> list[nn.Parameter]:
    """Return parameters whose gradients are ready by a fake clock; each is late on one rank."""
    params = [nn.Parameter(torch.full((8,), float(i))) for i in range(6)]
    for i, ready_ms in enumerate(READY_MS):
        here_ms = ready_ms if i % hvd.size() == hvd.rank() else ready_ms / 2

        def tick(_: torch.Tensor, here_s: float = here_ms * 1e-3) -> None:
            clock.side_effect = lambda: here_s

        params[i].register_post_accumulate_grad_hook(tick)  # before the optimizer's
    return params


clock = mock.Mock(return_value=0.0)


def case_the_best_groups_of_a_known_step_are_found_on_all_ranks() -> None:
    params = six()
    named = [(f"known.{i}", param) for i, param in enumerate(params)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=0.1), named, groups="auto")
    last = nn.Parameter(torch.zeros(1))  # its gradient comes last
    last.register_post_accumulate_grad_hook(
        lambda _: sent.append([bool(group.handle) for group in optimizer._reducer.grouping.groups])
    )
    sent: list[list[bool]] = []
    with mock.patch.object(auto_groups, "clock", clock), cost(10e-3, 1e-3 / 64):
        for step in range(FOUND_AFTER + 3):
            assert (optimizer._groups is None) == (step < FOUND_AFTER), step
            found = hvd.statistics()["groups"]
            assert ("optimizer.known.0" in found) == (step >= FOUND_AFTER)
            optimizer.zero_grad()
            sum((param * (1 + hvd.rank())).sum() for param in [last, *params[::-1]]).backward()
            assert sent[-1] == ([] if step < FOUND_AFTER else [True, True])  # when complete
            optimizer.step()
            mean = (1 + hvd.size()) / 2
            for param in params:
                assert param.grad is not None
                assert param.grad.tolist() == [mean] * 8
    groups = optimizer._groups
    assert groups is not None
    assert [[id(p) for p in group] for group in groups] == [
        [id(p) for p in params[:3]],
        [id(p) for p in params[3:]],
    ]
    assert found["optimizer.known.0"] == {
        "groups": 2,
        "gradients": 6,
        "before_s": pytest.approx(53e-3),  # test_bucket_planning.py
        "after_s": pytest.approx(47e-3),
    }
    # Measuring has stopped, and a deleted optimizer is not shown.
    assert all(len(param._post_accumulate_grad_hooks) == 2 for param in params)  # ours, tick
    optimizer = None
    assert "optimizer.known.0" not in shown()


def case_with_true_costs_all_ranks_find_the_same() -> None:
    model = network()
    optimizer = hvd.DistributedOptimizer(
        sgd(model.parameters()), model.named_parameters(), groups="auto"
    )
    step_often(model, optimizer)
    (found,) = shown().values()
    assert set(map(str, hvd.allgather_object(found))) == {str(found)}
    assert 0 < found["after_s"] <= found["before_s"] < 10


def case_groups_need_a_gain() -> None:
    model = network()
    optimizer = hvd.DistributedOptimizer(
        sgd(model.parameters()), model.named_parameters(), groups="auto"
    )
    with cost(0.0, 0.0):
        step_often(model, optimizer)
    (found,) = shown().values()
    assert (found["groups"], found["gradients"], optimizer._groups) == (0, 0, None)


# ---------------------------------------------------------------------------------------------
# It changes no result, and works with other features


def case_no_option_changes_a_bit() -> None:
    whole = [everything(network())]
    assert assert_changes_no_bit() == whole
    assert assert_changes_no_bit(op=hvd.Sum) == whole
    assert assert_changes_no_bit(gradient_predivide_factor=3.0) == whole
    assert assert_changes_no_bit(compression=hvd.Compression.fp16) == whole
    assert assert_changes_no_bit(make=torch.optim.Adam) == whole


def case_sizes_are_those_of_what_travels() -> None:
    for compression, itemsize in ((hvd.Compression.none, 8), (hvd.Compression.fp16, 2)):
        with mock.patch.object(auto_groups, "propose", wraps=auto_groups.propose) as planned:
            assert_changes_no_bit(compression=compression)
        assert planned.called == (hvd.rank() == 0)
        if planned.called:
            sizes = [itemsize * param.numel() for param in network().parameters()]
            assert planned.call_args.args[1].tolist() == sizes


def case_gradients_may_add_up_over_passes() -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        data = batches(20)
        for first, second in zip(data[::2], data[1::2], strict=True):
            optimizer.zero_grad()
            for inputs, targets in (first, second):
                squares(model, share(inputs), share(targets)).backward()
            optimizer.step()

    assert assert_changes_no_bit(train, backward_passes_per_step=2) == [everything(network())]


def case_gradients_may_be_clipped() -> None:
    def train(model: nn.Module, optimizer: Any) -> None:
        for inputs, targets in batches(10):
            optimizer.zero_grad()
            squares(model, share(inputs), share(targets)).backward()
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            with optimizer.skip_synchronize():
                optimizer.step()

    assert assert_changes_no_bit(train) == [everything(network())]


def case_a_scaler_skips_the_same_steps() -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step, (inputs, targets) in enumerate(batches(12)):
            optimizer.zero_grad()
            loss = squares(model, share(inputs), share(targets))
            if step in (4, 9) and hvd.rank() == 0:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 256.0

    assert assert_changes_no_bit(train) == [everything(network())]


def case_closures_may_reduce_more_often() -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for inputs, targets in batches(4):

            def closure(inputs: torch.Tensor = inputs, targets: torch.Tensor = targets) -> Any:
                optimizer.zero_grad()
                loss = squares(model, share(inputs), share(targets))
                loss.backward()
                return loss

            optimizer.step(closure)

    def lbfgs(params: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(params, lr=0.1, max_iter=4)

    assert assert_changes_no_bit(train, lbfgs) == [everything(network())]


def case_a_compiled_model_is_measured_too() -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager")

        @torch.compile(backend="eager")
        def backward(inputs: torch.Tensor, targets: torch.Tensor) -> None:
            squares(compiled, inputs, targets).backward()

        for inputs, targets in batches(10):
            optimizer.zero_grad()
            backward(share(inputs), share(targets))
            optimizer.step()

    assert assert_changes_no_bit(train) == [everything(network())]


WORDS = 4


class Branches(nn.Module):
    """A model with two parts that only some ranks use, an unused one, and a sparse one."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 5, sparse=True)
        self.body = nn.Linear(5, 4)
        self.heads = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])
        self.idle = nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor, head: int) -> torch.Tensor:
        words = self.words(torch.arange(len(inputs)) % WORDS)
        return self.heads[head](torch.tanh(self.body(inputs + words)))


def use_branches(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step, (inputs, _) in enumerate(batches(10)):
        optimizer.zero_grad()
        model(share(inputs), (hvd.rank() + step) % 2).square().mean().backward()
        optimizer.step()


def case_gradients_that_are_sparse_or_do_not_always_come_stay_by_themselves() -> None:
    body = {"body.weight", "body.bias"}
    assert assert_changes_no_bit(use_branches, plain_sgd, Branches) == [body]
    assert assert_changes_no_bit(
        use_branches, plain_sgd, Branches, sparse_as_dense=True
    ) == [body | {"words.weight"}]  # fmt: skip


def case_a_group_may_have_several_dtypes() -> None:
    def new() -> nn.Module:
        model = network()
        model[2] = model[2].float()
        model[1] = model[3] = nn.Identity()
        return nn.Sequential(model[0], Cast(torch.float32), model[2], Cast(torch.float64), model[4])

    assert assert_changes_no_bit(new=new, make=plain_sgd) == [everything(new())]


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.to(self.dtype)


def case_parameters_may_be_added_and_frozen() -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, added_at: int = 4) -> None:
        late = nn.Linear(3, 3)
        for step, (inputs, targets) in enumerate(batches(14)):
            if step == added_at:
                optimizer.add_param_group({"params": list(late.parameters())})
            if step == 12:  # a parameter of the group
                model[0].weight.requires_grad_(False)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(late(model(share(inputs))), share(targets))
            loss.backward()
            optimizer.step()

    # Added while others were measured, and when groups had been found.
    assert assert_changes_no_bit(train) == [everything(network())]
    after = assert_changes_no_bit(lambda *of: train(*of, added_at=10))
    assert after == [everything(network())]


def case_a_copy_measures_anew() -> None:
    model = network()
    optimizer = hvd.DistributedOptimizer(
        sgd(model.parameters()), model.named_parameters(), groups="auto"
    )
    with cost():
        step_often(model, optimizer)
        assert optimizer._groups
        state = copy.deepcopy(optimizer.state_dict())
        assert set(state) == {"state", "param_groups"}
        optimizer.load_state_dict(state)
        assert optimizer._groups
        twin, second = copy.deepcopy((model, optimizer))
        assert second._groups is None
        step_often(twin, second)
        assert second._groups
        step_often(model, optimizer)  # both still work
    assert isinstance(second._reducer.grouping, Measured)


def case_only_the_ranks_of_a_process_set_agree() -> None:
    size = hvd.size()
    hvd.shutdown()
    alone, pair = hvd.ProcessSet([0]), hvd.ProcessSet([size - 2, size - 1])
    hvd.init(process_sets=[alone] if size == 2 else [alone, pair])
    if size == 2:  # a set of all ranks exists already
        pair = hvd.global_process_set
    if pair.included():
        assert assert_changes_no_bit(process_set=pair) == [everything(network())]
    if alone.included():  # a single rank measures nothing
        assert assert_changes_no_bit(process_set=alone) == []
        assert shown() == {}
    hvd.barrier()
    hvd.shutdown()
    start()


# ---------------------------------------------------------------------------------------------
# Ranks out of step


def case_ranks_may_join_while_others_measure() -> None:
    # The batches of rank 0 and of the others per epoch: more or fewer than the measured steps.
    epochs = [(3, 12), (0, 2), (10, 4), (2, 5)]
    found_after = []

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        found_after.clear()
        for first, rest in epochs:
            step_often(model, optimizer, first if hvd.rank() == 0 else rest)
            hvd.broadcast_parameters(model.state_dict(), hvd.join())
            found_after.append(optimizer._groups is not None)

    assert assert_changes_no_bit(train) == [everything(network())]
    # Rank 0 makes its seventh step in the third epoch, in which the others make their last one.
    assert found_after == [False, False, True, True]


def case_an_interrupt_anywhere_is_taken_up_by_the_next_call() -> None:
    lines = 0
    with mock.patch.multiple(auto_groups, SKIPPED=0, MEASURED=1, REPEATS=1), cost():
        for at in range(2, 200):  # before line 1, the call has not begun
            params = [nn.Parameter(torch.zeros(3)) for _ in range(4)]
            named = [(f"again.{at}.{i}", param) for i, param in enumerate(params)]
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(params, lr=0.0), named, groups="auto"
            )
            for step in range(2):
                optimizer.zero_grad()
                sum((param * (at + hvd.rank())).sum() for param in params).backward()
                again = step == 0 and hvd.rank() == 0 and interrupted(
                    optimizer.synchronize, at, Reducer.synchronize, Measured.expect_agreement,
                    Measured.agree, Measured._vote, Measured._regroup, Measured._once,
                    Measured._plan, Measured.form,
                )  # fmt: skip
                torch.set_grad_enabled(True)
                dropped = False
                if again and at % 2:
                    with contextlib.suppress(AssertionError):  # they are still being reduced
                        optimizer.zero_grad()
                        dropped = True
                if not dropped:
                    optimizer.synchronize()
                if step == 0:  # waits until all have left the vote
                    go_on = hvd.broadcast_object(again, name=f"again.{at}")
                for param in params:
                    assert (param.grad is None) == dropped
                    assert dropped or param.grad.tolist() == [at + (hvd.size() - 1) / 2] * 3, at
                with optimizer.skip_synchronize():
                    optimizer.step()
                assert optimizer._groups is not None
                assert len(optimizer._groups) == 1
            lines = at
            if not go_on:
                break
    assert 40 < lines < 199


# ---------------------------------------------------------------------------------------------
# Its visible effects


def case_the_timeline_shows_when_groups_are_formed() -> None:
    torch.manual_seed(1)  # an interrupted rank has drawn other numbers
    folder = hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None)
    file = Path(folder, "timeline.json")
    hvd.start_timeline(str(file))
    hvd.barrier()
    model = network()
    optimizer = hvd.DistributedOptimizer(
        sgd(model.parameters()), model.named_parameters(), groups="auto"
    )
    with cost():
        step_often(model, optimizer)
    hvd.barrier()
    hvd.stop_timeline()
    hvd.barrier()
    if hvd.rank() == 0:
        events = [e for e in json.loads(file.read_text()) if "tensor" in e.get("args", {})]
        for pid in range(1, hvd.size() + 1):
            mine = [event for event in events if event["pid"] == pid]
            (formed,) = [
                event["ts"] for event in mine
                if (event["name"], event["args"]["tensor"])
                == ("BROADCAST", "optimizer.0.weight.regroup")
            ]  # fmt: skip
            grouped = [
                event["ts"] for event in mine
                if event["args"]["tensor"].startswith("optimizer.0.weight.group.0:")
            ]  # fmt: skip
            assert grouped
            assert min(grouped) > formed


def case_mistakes_are_told() -> None:
    model = network()
    warnings.filterwarnings("ignore", "parameter `num_groups`")
    for options, text in (
        ({"groups": "learned"}, r"groups='learned' must be \"auto\", a number of groups, or lists"),
        ({"groups": "auto", "op": hvd.Adasum}, "op=Adasum reduces all changes at once"),
        ({"groups": "auto", "num_groups": 2}, "num_groups and groups exclude each other"),
    ):
        if "op" in options and hvd.size() == 3:
            continue  # no power of two
        optimizer = plain_sgd(model.parameters())
        with pytest.raises(ValueError, match=text):
            hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)
        assert type(optimizer) is torch.optim.SGD


test_on_ranks = session.on_ranks(globals(), 2, 3, session="torch")

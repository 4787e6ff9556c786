"""broadcast_optimizer_state for every optimizer of torch.optim, with all its options.

The oracle is an optimizer on each rank that has taken the root's steps.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import session
import torch
from equality import same

import hororing.torch as hvd
from hororing._engine.state import rank, size

# Two equal shapes, because torch handles groups of one tensor differently in places.
SHAPES = ((5, 3), (5, 3), (2, 4))
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"foreach": True},
    {"foreach": False},
    {"fused": True},
    {"maximize": True},
    {"weight_decay": 0.1},
    {"momentum": 0.9},
    {"momentum": 0.5, "centered": True},
    {"momentum": 0.9, "nesterov": True},
    {"amsgrad": True},
    {"decoupled_weight_decay": True},
    {"initial_accumulator_value": 0.3},
    {"betas": (0.5, 0.75)},
    {"betas": (torch.tensor(0.5), torch.tensor(0.75)), "lr": torch.tensor(0.01)},
    {"etas": (0.4, 1.3), "step_sizes": (1e-5, 20)},
    {"lr": torch.tensor(0.02), "foreach": False},
)


def kinds() -> Iterator[type[torch.optim.Optimizer]]:
    for name in sorted(vars(torch.optim)):
        kind = getattr(torch.optim, name)
        if not inspect.isclass(kind) or not issubclass(kind, torch.optim.Optimizer):
            continue
        if kind not in (torch.optim.Optimizer, torch.optim.LBFGS):
            yield kind


def variants() -> Iterator[tuple[type[torch.optim.Optimizer], dict[str, Any]]]:
    for kind in kinds():
        accepted = inspect.signature(kind).parameters
        for options in VARIANTS:
            if options.keys() <= accepted.keys() and works(kind, options):
                yield kind, options


def works(kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> bool:
    """Return whether this torch supports these options."""
    try:
        Trainee(kind, options, seed=0, steps=1)
    except (RuntimeError, ValueError, AssertionError, TypeError):
        return False
    return True


class Trainee:
    """Matrices in two groups of different options, and an optimizer that has taken some steps."""

    def __init__(
        self,
        kind: type[torch.optim.Optimizer],
        options: dict[str, Any],
        seed: int,
        steps: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.sparse = kind is torch.optim.SparseAdam
        self.parameters = [
            torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype))
            for shape in SHAPES
        ]
        options = {key: _cloned(value) for key, value in options.items()}
        lr = options.pop("lr", 0.01) * (1 + seed)
        groups = [
            {"params": self.parameters[:2], "lr": lr},
            {"params": self.parameters[2:], "lr": lr / 2},
        ]
        self.optimizer = kind(groups, **options)
        for step in range(steps):
            self.step(100 * seed + step)

    def step(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters:
            gradient = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.grad = gradient.to_sparse(1) if self.sparse else gradient
        self.optimizer.step()

    def values(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters]


def _cloned(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return type(value)(map(_cloned, value)) if isinstance(value, tuple) else value


def check(mine: Trainee, wanted: Trainee, root: int, what: object) -> None:
    values, gradients = mine.values(), [p.grad for p in mine.parameters]
    hvd.broadcast_optimizer_state(mine.optimizer, root)
    assert same(wanted.optimizer.state_dict(), mine.optimizer.state_dict()), what
    # Nothing else has changed.
    assert same(values, mine.values()), what
    # As in Horovod, a parameter without a gradient may have a zero one now.
    for param, gradient in zip(mine.parameters, gradients, strict=True):
        assert param.grad is gradient or (gradient is None and not param.grad.any()), what
    hvd.broadcast_parameters(list(mine.parameters), root)
    for step in (7, 8):
        mine.step(step)
        wanted.step(step)
    assert same(wanted.values(), mine.values()), what
    assert same(wanted.optimizer.state_dict(), mine.optimizer.state_dict()), what


def case_start():
    hvd.init()
    torch.set_num_threads(1)


def case_every_optimizer_with_every_option():
    done = set()
    for turn, (kind, options) in enumerate(variants()):
        root = turn % size()
        dtype = torch.float64 if turn % 2 else torch.float32
        # The others have no state, or that of more or fewer steps, with other options.
        for steps_of_others in (0, 1 + turn % 3):
            mine = (
                Trainee(kind, options, root, 2, dtype)
                if rank() == root
                else Trainee(kind, {}, rank(), steps_of_others, dtype)
            )
            wanted = Trainee(kind, options, root, 2, dtype)
            check(mine, wanted, root, (kind, options, steps_of_others))
        done.add(kind.__name__)
    assert done == {kind.__name__ for kind in kinds()}
    assert {"Adam", "AdamW", "Adafactor", "SparseAdam", "NAdam", "RAdam", "Rprop", "ASGD"} <= done


def case_a_root_without_state_takes_that_of_others_away_and_sends_its_options():
    for turn, kind in enumerate(kinds()):
        root = turn % size()
        mine = Trainee(kind, {}, rank(), 0 if rank() == root else 2)
        check(mine, Trainee(kind, {}, root, 0), root, kind)


def case_a_parameter_without_state():
    """The root's last parameter never had a gradient."""
    mine = Trainee(torch.optim.Adam, {}, rank(), steps=0)
    for parameter in mine.parameters[: 2 if rank() == 0 else 3]:
        parameter.grad = torch.ones_like(parameter)
    mine.optimizer.step()
    hvd.broadcast_optimizer_state(mine.optimizer, 0)
    assert list(mine.optimizer.state_dict()["state"]) == [0, 1]


def case_tensors_that_fit_stay_where_they_are():
    mine = Trainee(torch.optim.Adam, {}, rank(), steps=1 + rank())
    before = [mine.optimizer.state[p]["exp_avg"] for p in mine.parameters]
    hvd.broadcast_optimizer_state(mine.optimizer, 0)
    for parameter, tensor in zip(mine.parameters, before, strict=True):
        assert mine.optimizer.state[parameter]["exp_avg"] is tensor
        assert mine.optimizer.state[parameter]["step"].item() == 1


def case_flags_that_need_another_device_or_another_mode_travel():
    for kind in kinds():
        for flag in ("capturable", "differentiable"):
            if flag not in inspect.signature(kind).parameters:
                continue
            mine = Trainee(kind, {flag: True} if rank() == 0 else {}, rank(), 0)
            hvd.broadcast_optimizer_state(mine.optimizer, 0)
            assert all(group[flag] is True for group in mine.optimizer.param_groups)


def case_no_parameter_is_marked_as_changed():
    """A graph from before can still run backward."""
    mine = Trainee(torch.optim.AdamW, {"weight_decay": 0.1}, rank(), 2)
    loss = sum(parameter.square().sum() for parameter in mine.parameters)
    versions = [parameter._version for parameter in mine.parameters]
    hvd.broadcast_optimizer_state(mine.optimizer, size() - 1)
    assert [parameter._version for parameter in mine.parameters] == versions
    loss.backward()


class Odd(torch.optim.Optimizer):
    """An optimizer with state and options of unusual structure."""

    def __init__(self, params: Any, seed: int) -> None:
        curve = torch.arange(3.0) + seed
        defaults = {
            "lr": torch.tensor(0.5 + seed),
            "nested": {"betas": (seed, [seed, {"deep": torch.tensor([seed])}]), "curve": curve},
            "also": curve,
            "mode": f"mode {seed}",
            "nothing": None if seed else ...,
            "flag": seed % 2 == 0,
        }
        super().__init__(params, defaults)

    def step(self, closure: Any = None) -> None:
        seen = self.state["all"]
        seen["steps"] = seen.get("steps", 0) + 1
        for group in self.param_groups:
            for param in group["params"]:
                history = self.state[param].setdefault("history", [])
                history.append(param.detach().clone())
                del history[:-2]
                self.state[param]["kinds"] = (1, 2.5, "text", None, torch.ones(2) > 0)


def case_nested_options_and_state_of_ones_own_travel():
    def build(seed: int, steps: int) -> Odd:
        torch.manual_seed(seed)
        params = [torch.nn.Parameter(torch.randn(2, 3)) for _ in range(3)]
        optimizer = Odd([{"params": params[:1]}, {"params": params[1:]}], seed)
        for _ in range(steps):
            optimizer.step()
        return optimizer

    for root in range(size()):
        for steps in ((3, 0), (0, 3), (2, 1)):
            mine, wanted = build(rank(), steps[rank() != root]), build(root, steps[0])
            hvd.broadcast_optimizer_state(mine, root)
            assert same(wanted.state_dict()["param_groups"], mine.state_dict()["param_groups"])
            states = [optimizer.state_dict()["state"] for optimizer in (wanted, mine)]
            assert same(*(dict(sorted(state.items(), key=str)) for state in states))
            assert type(mine.param_groups[1]["nested"]["betas"]) is tuple
            # Tensors are shared between options exactly as on the root.
            first, second = mine.param_groups
            assert first["also"] is first["nested"]["curve"]
            assert first["lr"] is second["lr"]


def case_tensors_that_are_one_here_and_two_on_the_root_are_separated():
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    shared = torch.tensor(0.5)
    groups = [{"params": [param]} for param in params]
    optimizer = torch.optim.Adam(groups, lr=shared, foreach=False)
    if rank() == 0:
        optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
        optimizer.param_groups[1]["lr"] = torch.tensor(0.125)
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert [group["lr"].item() for group in optimizer.param_groups] == [0.25, 0.125]


def case_state_that_no_verb_takes_travels():
    table = torch.nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1, momentum=0.9)
    state = optimizer.state[table.weight]
    state["by all"] = torch.ones(()).expand(3)
    if rank() == 0:
        table(torch.tensor([1, 3, 3])).sum().backward()
        optimizer.step()  # with momentum as sparse as the gradient
        state["by all"] = torch.arange(3.0)
        state["expanded"] = torch.ones(()).expand(4)
        state["short"] = torch.arange(3.0).to(torch.float8_e4m3fn)
    hvd.broadcast_optimizer_state(optimizer, 0, table)
    state = optimizer.state[table.weight]
    momentum = state["momentum_buffer"]
    assert momentum.is_sparse
    assert momentum.to_dense()[:, 0].tolist() == [0.0, 1.0, 0.0, 2.0, 0.0]
    assert state["by all"].tolist() == [0.0, 1.0, 2.0]
    assert state["expanded"].tolist() == [1.0] * 4
    assert state["short"].dtype is torch.float8_e4m3fn
    assert state["short"].float().tolist() == [0.0, 1.0, 2.0]


def case_names_of_parameters_are_options_too():
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(list(model.named_parameters()), lr=0.1 + rank())
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]
    assert optimizer.param_groups[0]["lr"] == 0.1


def case_distributed_optimizers_of_all_kinds_train_on():
    for op in (hvd.Average, 2):
        if op == 2 and size() == 3:
            continue
        for wrapped_first in (True, False):
            mine = Trainee(torch.optim.Adam, {}, rank(), 2 if rank() == 0 else 0)
            if wrapped_first:
                hvd.DistributedOptimizer(mine.optimizer, op=op)
            hvd.broadcast_optimizer_state(mine.optimizer, 0)
            if not wrapped_first:
                hvd.DistributedOptimizer(mine.optimizer, op=op)
            hvd.broadcast_parameters(mine.parameters, 0)
            wanted = Trainee(torch.optim.Adam, {}, 0, 2)
            for step in range(2):
                mine.step(step)  # the same gradients on every rank: averages change nothing
                wanted.step(step)
            for one, other in zip(mine.values(), wanted.values(), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


test_on_ranks = session.on_ranks(globals(), 1, 2, 3, 4, session="torch")

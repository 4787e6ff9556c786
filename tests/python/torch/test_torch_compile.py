"""torch.compile of functions that call verbs, and of a model with a distributed optimizer.

Verbs break graphs. Every call must happen once, in its order, and under its name, even if only some
ranks compile.
"""

from __future__ import annotations

import re
import shutil
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import session
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import hororing.torch as hvd
from hororing._requests import names

BACKENDS = ["eager", "aot_eager"]


def every_verb(x: Any, w: Any) -> Any:
    size = hvd.size()
    hvd.allreduce(x)  # the result is not used
    first = hvd.allreduce(x * w, op=hvd.Sum, prescale_factor=0.5)
    hvd.allreduce(x * w, op=hvd.Sum, prescale_factor=0.5)  # the same again
    second, third = hvd.grouped_allreduce([x, w * 2], name="group", op=hvd.Sum)
    sent = hvd.broadcast(x * w, size - 1)
    part = hvd.reducescatter(x * w, op=hvd.Sum, postscale_factor=3.0)
    parts = hvd.grouped_reducescatter([x, w * w])
    rows = hvd.allgather(x * 2)
    swapped, counts = hvd.alltoall(x + w, [1] * size)
    later = hvd.synchronize(hvd.allreduce_async(x.detach() * 2))
    here = torch.ones(3) * hvd.rank()
    hvd.allreduce_(here)
    results = [first * first, second * third, sent * x, part * part, *parts, rows, swapped, later]
    return sum((r * r).sum() for r in results) + here.sum() + counts.sum()


def run(function: Callable[[Any, Any], Any], rows: int) -> list[torch.Tensor]:
    x = (torch.arange(3.0 * rows).reshape(rows, 3) + hvd.rank()).div(8).requires_grad_()
    w = (torch.arange(3.0 * rows).reshape(rows, 3) - 2 * hvd.rank()).div(8).requires_grad_()
    loss = function(x, w)
    loss.backward()
    return [loss.detach(), x.grad, w.grad]


def counts() -> dict[tuple[str, int], int]:
    """Return the numbers of unnamed calls so far."""
    return dict(names.counts)


def case_init() -> None:
    hvd.init()


def case_every_call_happens_once() -> None:
    for backend in BACKENDS:
        torch._dynamo.reset()
        compiled = torch.compile(every_verb, backend=backend)
        for rows in (5, 5, 7):
            before = counts()
            wanted = run(every_verb, rows)
            once = {key: number - before.get(key, 0) for key, number in counts().items()}
            before = counts()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                results = run(compiled, rows)
            assert {key: number - before[key] for key, number in counts().items()} == once
            for result, value in zip(results, wanted, strict=True):
                torch.testing.assert_close(result, value)


def case_one_rank_compiles_and_others_do_not() -> None:
    for backend in BACKENDS:
        torch._dynamo.reset()
        compiled = torch.compile(every_verb, backend=backend)
        wanted = run(every_verb, 4)
        for _ in range(2):
            results = run(compiled if hvd.rank() == 0 else every_verb, 4)
            for result, value in zip(results, wanted, strict=True):
                torch.testing.assert_close(result, value)


def case_a_graph_is_refused_where_it_must_be_whole() -> None:
    torch._dynamo.reset()
    whole = torch.compile(lambda x: hvd.allreduce(x) + 1, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        whole(torch.ones(2))
    assert hvd.allreduce(torch.ones(2)).tolist() == [1, 1]


def case_errors_arrive_as_they_are() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, op: hvd.allreduce(x * 2, op=op) + 1, backend="eager")
    with pytest.raises(ValueError, match="no reduce operation 99") as caught:
        compiled(torch.ones(2), 99)
    shown = "".join(traceback.format_exception(caught.value))
    assert re.search(r"in call\n    return \w+(\(\))?\(\{arguments\}\)\n", shown), shown
    if hvd.size() > 1:
        with pytest.raises(hvd.MismatchError, match="shapes"):
            compiled(torch.ones(2 + hvd.rank()), hvd.Sum)
    assert compiled(torch.ones(2), hvd.Sum).tolist() == [2 * hvd.size() + 1] * 2


class Layers(torch.nn.Module):
    """Layers of 1 MiB, like the buckets. torch does not split modules of its own classes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(512, 512) for _ in range(3))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def case_ddp_is_compiled_in_parts_and_buckets_travel_between_them() -> None:
    if hvd.size() == 1:
        return  # without a launcher, init_process_group asks for RANK
    from functorch.compile import make_boxed_func  # takes seconds
    from torch._dynamo.backends.common import aot_autograd

    dist.init_process_group("hororing")
    torch._dynamo.reset()
    ddp = [DistributedDataParallel(Layers(), bucket_cap_mb=1) for _ in range(2)]
    events: list[str] = []

    def noted(graph: Any, _: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            events.append("backward")
            return graph.forward(*args)

        return make_boxed_func(run)

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP knows no annotations of text
        events.append("bucket")
        return default_hooks.allreduce_hook(state, bucket)

    ddp[0].register_comm_hook(None, hook)
    backend = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=noted
    )
    compiled = torch.compile(ddp[0], backend=backend)
    x = torch.full((2, 512), 0.1 * (hvd.rank() + 1))
    for _ in range(3):  # DDP agrees on its buckets in the second one
        events.clear()
        for each, call in ((ddp[0], compiled), (ddp[1], ddp[1])):
            each.zero_grad()
            call(x).sum().backward()
        for one, other in zip(ddp[0].parameters(), ddp[1].parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
    assert events.count("backward") == 3
    first = events.index("bucket")
    assert "backward" in events[first:]
    dist.destroy_process_group()


def case_inductor() -> None:
    if hvd.size() != 2 or not (shutil.which("g++") or shutil.which("c++")):
        return
    torch._dynamo.reset()

    def function(x: Any, w: Any) -> Any:
        hvd.allreduce(x)
        total = hvd.allreduce(x * w, op=hvd.Sum)
        return (hvd.broadcast(total * x, 0) * hvd.allreduce(x * w, op=hvd.Sum)).sum()

    wanted = run(function, 3)
    for result, value in zip(run(torch.compile(function), 3), wanted, strict=True):
        torch.testing.assert_close(result, value)


def case_shutdown() -> None:
    hvd.shutdown()


test_case = session.on_ranks(globals(), 1, 2, 3, push=[])

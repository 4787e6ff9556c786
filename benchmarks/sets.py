"""All gradients of a model at once: ResNet-50's 161, BERT-base's 199, and 1,000 of 1 KB.

    mpirun -np 2 python benchmarks/sets.py

    hororing          submits all under existing names, as hooks do, then waits for all
    hororing grouped  one grouped_allreduce_
    MPI               one blocking in-place MPI_Allreduce after the other
    Horovod           the same calls as `hororing`, with a cycle of 1 ms and of 0.1 ms
    Horovod grouped   the same call as `hororing grouped`
    DDP's buckets     as DistributedDataParallel: copies gradients into buckets of 1 MiB, then
                      25 MiB, reduces all buckets at once over gloo, and copies the sums back
    DDP's views       the same buckets with gradient_as_bucket_view, which saves the copies

    copy (limit)      all ranks copy their gradients at once: the memory bandwidth, as in
                      allreduce.py, except for sets whose calls alone take longer

All contestants sum float32 gradients in the order of backward; each is the `grad` of a parameter,
as in a model. None of them divides by the number of ranks.

With --mixed, every second gradient is bfloat16, and there are twelve int64 counters. Only hororing
takes part, and "a group for each dtype" reduces one group after the other.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import horovod_peer
import peers
import shapes
import torch
import torch.distributed as dist
from mpi4py import MPI
from record import Row, arguments, print_rows, save
from turns import summary, take_turns

import hororing.torch as hvd

MIB = 1 << 20
# Copying a smaller tensor takes less time than the call, in bytes.
LARGE = 64 << 10
SETS = {
    "ResNet-50": lambda: shapes.tensors(shapes.resnet50()),
    "BERT-base": lambda: shapes.tensors(shapes.bert_base()),
    "1,000 of 1 KB": shapes.small,
}


def one_by_one(gradients: dict[str, torch.Tensor], verbs: Any = hvd) -> None:
    """Submit all, then wait for all; hororing and Horovod have the same verbs."""
    handles = [
        verbs.allreduce_async_(gradient, op=verbs.Sum, name=name)
        for name, gradient in gradients.items()
    ]
    for handle in handles:
        verbs.synchronize(handle)


def grouped(gradients: list[torch.Tensor], verbs: Any = hvd) -> None:
    verbs.grouped_allreduce_(gradients, op=verbs.Sum, name="all")


def named(prefix: str, gradients: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{prefix}.{number}": gradient for number, gradient in enumerate(gradients)}


def in_mixed_precision(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    counters = [torch.zeros(1, dtype=torch.int64) for _ in range(12)]
    return [g.bfloat16() if i % 2 else g for i, g in enumerate(gradients)] + counters


def mixed_contestants(gradients: list[torch.Tensor]) -> dict[str, Callable[[], object]]:
    by_name = named("gradient", gradients)
    dtypes = dict.fromkeys(gradient.dtype for gradient in gradients)
    groups = [(str(dtype), [g for g in gradients if g.dtype == dtype]) for dtype in dtypes]

    def a_group_for_each_dtype() -> None:
        for name, group in groups:
            hvd.grouped_allreduce_(group, op=hvd.Sum, name=name)

    return {
        "hororing": lambda: one_by_one(by_name),
        "hororing grouped": lambda: grouped(gradients),
        "a group for each dtype": a_group_for_each_dtype,
    }


def blocking_mpi(gradients: list[torch.Tensor]) -> None:
    for gradient in gradients:
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, gradient.numpy())


def copy_all(targets: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
    for target, gradient in zip(targets, gradients, strict=True):
        target.copy_(gradient)


def parameters_with(gradients: list[torch.Tensor]) -> list[torch.nn.Parameter]:
    parameters = [torch.nn.Parameter(torch.empty_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return parameters


class Buckets:
    """DDP's buckets: gradients that share a flat tensor, in the order of backward."""

    def __init__(self, gradients: list[torch.Tensor]) -> None:
        assignment, _ = dist._compute_bucket_assignment_by_size(gradients, [MIB, 25 * MIB])
        self.members = [[gradients[index] for index in bucket] for bucket in assignment]
        self.flat = [torch.zeros(sum(g.numel() for g in bucket)) for bucket in self.members]
        self.views = [
            list(flat.split([g.numel() for g in bucket]))
            for flat, bucket in zip(self.flat, self.members, strict=True)
        ]
        for flat in self.flat:
            flat.fill_(0.0)

    def copied(self) -> None:
        works = []
        for flat, views, bucket in zip(self.flat, self.views, self.members, strict=True):
            for view, gradient in zip(views, bucket, strict=True):
                view.copy_(gradient.flatten())
            works.append(dist.all_reduce(flat, async_op=True))
        for work, views, bucket in zip(works, self.views, self.members, strict=True):
            work.wait()
            for view, gradient in zip(views, bucket, strict=True):
                gradient.flatten().copy_(view)

    def in_place(self) -> None:
        works = [dist.all_reduce(flat, async_op=True) for flat in self.flat]
        for work in works:
            work.wait()


def contestants(
    gradients: list[torch.Tensor], horovods: dict[str, horovod_peer.Horovod]
) -> dict[str, Callable[[], object]]:
    buckets, by_name = Buckets(gradients), named("gradient", gradients)
    ways: dict[str, Callable[[], object]] = {
        "hororing": lambda: one_by_one(by_name),
        "hororing grouped": lambda: grouped(gradients),
        f"{peers.mpi_name()}, each": lambda: blocking_mpi(gradients),
        "DDP's buckets": buckets.copied,
        "DDP's views": buckets.in_place,
    }
    for name, peer in horovods.items():
        ways[name] = lambda verbs=peer.verbs: one_by_one(by_name, verbs)
        ways[f"{name} grouped"] = lambda verbs=peer.verbs: grouped(gradients, verbs)
    if sum(g.nbytes for g in gradients) > LARGE * len(gradients):
        targets = [torch.empty_like(gradient).fill_(0.0) for gradient in gradients]
        ways["copy (limit)"] = lambda: copy_all(targets, gradients)
    return ways


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--mixed", action="store_true")
    horovod_peer.add_option(parser)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    hvd.init()
    peers.join_gloo()
    horovods = horovod_peer.found(options.horovod)
    order = random.Random(options.seed)
    rows: list[Row] = []
    for name in ["1,000 of 1 KB"] if options.quick else options.sets:
        gradients = [torch.zeros(shape).fill_(0.0) for shape in reversed(SETS[name]())]
        gradients = in_mixed_precision(gradients) if options.mixed else gradients
        parameters = [] if options.mixed else parameters_with(gradients)
        times = take_turns(
            mixed_contestants(gradients) if options.mixed else contestants(gradients, horovods),
            order,
            seconds=options.seconds,
            rounds=(1, 1) if options.quick else (5, 100),
            around={
                way: peer.awake
                for name, peer in horovods.items()
                for way in (name, f"{name} grouped")
            },
        )
        del parameters
        nbytes = sum(gradient.nbytes for gradient in gradients)
        case = [
            {"measure": "set of gradients", "case": name + ", mixed" * options.mixed, "who": who,
             "nbytes": nbytes, "tensors": len(gradients), **summary(series)}
            for who, series in times.items()
        ]  # fmt: skip
        rows += case
        if hvd.rank() == 0:
            print_rows(case)
            save(options.json, rows)


if __name__ == "__main__":
    main()

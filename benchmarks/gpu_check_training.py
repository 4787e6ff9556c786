"""Checks of training on GPUs, for gpu_check.py: optimizers, streams, graphs, layers and errors.

The oracle is a plain optimizer on the same device that trains on the batches of all ranks.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch
from torch import nn

import hororing.torch as hvd

CYCLES = 20_000_000  # of a kernel that only waits, about 10 ms


def network(device: torch.device) -> nn.Sequential:
    """Make the same model in each call."""
    torch.manual_seed(7)
    layers = nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 65), nn.LayerNorm(65), nn.Linear(65, 2)
    return nn.Sequential(*layers).to(device)


class LateBackward(torch.autograd.Function):
    """The sum of a tensor, times a factor; its gradient takes a while."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor, ctx.shape = factor, tensor.shape
        return tensor.sum() * factor

    @staticmethod
    def backward(ctx: Any, above: torch.Tensor) -> tuple[torch.Tensor, None]:
        torch.cuda._sleep(CYCLES // 40)
        return above.expand(ctx.shape) * ctx.factor, None


class TrainingChecks:
    """One method for each check; all of them raise what is wrong."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rank, self.size = hvd.rank(), hvd.size()

    def training(self) -> None:
        for number, options in enumerate(
            (
                {},
                {"compression": hvd.Compression.fp16},
                {"compression": hvd.Compression.bf16},
                {"num_groups": 2},
                {"backward_passes_per_step": 2},
                {"gradient_predivide_factor": 2.0},
            )
        ):
            self.train_both(f"training.{number}", options)

    def train_both(self, prefix: str, options: dict[str, Any]) -> None:
        ours, plain = network(self.device), network(self.device)
        hvd.broadcast_parameters(ours.state_dict(), root_rank=0)
        passes = int(options.get("backward_passes_per_step", 1))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9),
            ours.named_parameters(prefix=prefix),
            **options,
        )
        alone = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
        torch.manual_seed(11)
        for _ in range(4):
            data = torch.randn(passes, self.size, 5, 7).to(self.device)
            optimizer.zero_grad()
            alone.zero_grad()
            if self.device.type == "cuda":
                torch.cuda._sleep(CYCLES)
            for batch in data:
                ours(batch[self.rank]).square().mean().backward()
                plain(batch.flatten(0, 1)).square().mean().backward()
            optimizer.step()
            alone.step()
        slack = 2e-2 if "compression" in options else 1e-5
        for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=slack, atol=slack)

    def gradients_of_two_streams(self) -> None:
        """Every other layer runs in a stream of its own, where its backward pass is late."""
        if self.device.type != "cuda":
            return  # test_torch_gpu.py has the stand-in's streams
        late = torch.cuda.Stream()
        parameters = [nn.Parameter(torch.ones(1000, device=self.device)) for _ in range(40)]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(parameters, lr=0.1),
            [(f"streams.{index}", parameter) for index, parameter in enumerate(parameters)],
        )
        for round_ in range(4):
            optimizer.zero_grad()
            late.wait_stream(torch.cuda.current_stream())
            parts = []
            for index, parameter in enumerate(parameters):
                factor = self.rank + index + round_
                with torch.cuda.stream(late if index % 2 else torch.cuda.current_stream()):
                    parts.append(LateBackward.apply(parameter, factor))
            torch.cuda.current_stream().wait_stream(late)
            torch.stack(parts).sum().backward()
            optimizer.step()
            for index, parameter in enumerate(parameters):
                wanted = index + round_ + (self.size - 1) / 2
                assert parameter.grad is not None
                assert (parameter.grad - wanted).abs().max() < 1e-4, (round_, index, wanted)

    def replays_of_a_captured_backward_pass(self) -> None:
        if self.device.type != "cuda":
            return
        ours, plain = network(self.device), network(self.device)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(ours.parameters(), lr=0.1), ours.named_parameters(prefix="captured")
        )
        alone = torch.optim.SGD(plain.parameters(), lr=0.1)
        mine = torch.zeros(5, 7, device=self.device)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                optimizer.zero_grad()
                ours(mine).square().mean().backward()
                optimizer.synchronize()
        torch.cuda.current_stream().wait_stream(side)
        optimizer.zero_grad()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ours(mine).square().mean().backward()
        torch.manual_seed(13)
        for _ in range(4):
            data = torch.randn(self.size, 5, 7).to(self.device)
            mine.copy_(data[self.rank])
            graph.replay()
            optimizer.step()
            alone.zero_grad()
            plain(data.flatten(0, 1)).square().mean().backward()
            alone.step()
        for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)

    def a_capture_is_refused(self) -> None:
        if self.device.type != "cuda":
            return
        tensor = torch.ones(5, device=self.device)
        with contextlib.suppress(ValueError), torch.cuda.graph(torch.cuda.CUDAGraph()):
            hvd.allreduce(tensor, name="captured")
            raise AssertionError("a captured allreduce was accepted")
        hvd.allreduce(tensor, name="captured")

    def results_used_in_another_stream(self) -> None:
        """A result is ready in the stream that waited for it, also where another submitted it."""
        if self.device.type != "cuda":
            return
        for round_ in range(10):
            submits, waits = torch.cuda.Stream(), torch.cuda.Stream()
            with torch.cuda.stream(submits):
                torch.cuda._sleep(CYCLES // 10)
                mine = torch.full((100_000,), float(self.rank + round_), device=self.device)
                handle = hvd.allreduce_async(mine, op=hvd.Sum, name=f"elsewhere.{round_}")
                del mine
            with torch.cuda.stream(waits):
                doubled = hvd.synchronize(handle) * 2
                reused = torch.zeros(100_000, device=self.device)
            torch.cuda.current_stream().wait_stream(waits)
            total = sum(rank + round_ for rank in range(self.size))
            assert doubled.eq(2 * total).all(), (doubled[:3], total)
            assert reused.eq(0).all()

    def batch_norm(self) -> None:
        torch.manual_seed(17)
        ours = hvd.SyncBatchNorm(4).to(self.device)
        plain = nn.BatchNorm1d(4).to(self.device)
        everything = torch.randn(self.size, 6, 4).to(self.device)
        mine = everything[self.rank].clone().requires_grad_()
        whole = everything.flatten(0, 1).requires_grad_()
        rows = slice(6 * self.rank, 6 * self.rank + 6)
        result, expected = ours(mine), plain(whole)
        torch.testing.assert_close(result, expected[rows])
        result.square().sum().backward()
        expected.square().sum().backward()
        assert whole.grad is not None
        torch.testing.assert_close(mine.grad, whole.grad[rows])
        torch.testing.assert_close(ours.running_var, plain.running_var)

    def sparse_gradients(self) -> None:
        table = nn.Embedding(10, 3, sparse=True).to(self.device)
        hvd.broadcast_parameters(table.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=1.0), table.named_parameters(prefix="sparse")
        )
        before = table.weight.detach().clone()
        table(torch.tensor([self.rank, 9], device=self.device)).sum().backward()
        optimizer.step()
        moved = (before - table.weight.detach())[:, 0].cpu()
        wanted = [1 / self.size if row < self.size else 0.0 for row in range(9)] + [1.0]
        torch.testing.assert_close(moved, torch.tensor(wanted))

    def optimizer_state(self) -> None:
        model = network(self.device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (1 + self.rank))
        model(torch.ones(2, 7, device=self.device) * self.rank).sum().backward()
        optimizer.step()
        hvd.broadcast_optimizer_state(optimizer, root_rank=self.size - 1)
        assert optimizer.param_groups[0]["lr"] == 0.1 * self.size
        for state in optimizer.state.values():
            everyone = hvd.allgather(state["exp_avg"].reshape(1, -1))
            assert everyone.eq(everyone[-1]).all()

    def compressed_gradients(self) -> None:
        """The loss falls as without compression, and parameters stay the same on all ranks."""
        for name, method in (
            ("int8", hvd.Compression.int8),
            ("powersgd", hvd.Compression.powersgd),
            ("topk", hvd.Compression.topk(ratio=0.1)),
        ):
            model = network(self.device)
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.05),
                model.named_parameters(prefix=f"compressed.{name}"),
                compression=method,
            )
            torch.manual_seed(19)
            data = torch.randn(self.size, 64, 7).to(self.device)
            losses = []
            for _ in range(30):
                optimizer.zero_grad()
                loss = (model(data[self.rank]) - data[self.rank][:, :2]).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            assert losses[-1] < 0.7 * losses[0], (name, losses)
            for parameter in model.parameters():
                everyone = hvd.allgather(parameter.detach().reshape(1, -1))
                assert everyone.eq(everyone[0]).all(), name

    def errors_leave_the_job_usable(self) -> None:
        if self.size == 1:
            return
        tensor = torch.ones(3 + self.rank, device=self.device)
        wrong = [("shapes", tensor)]
        if self.device.type == "cuda":
            where = "cpu" if self.rank else self.device
            wrong.append(("devices", torch.ones(3, device=where)))
        for what, mine in wrong:
            with contextlib.suppress(hvd.MismatchError):
                hvd.allreduce(mine, name=f"wrong.{what}")
                raise AssertionError(f"ranks with different {what} got a result")
            right = torch.ones(3, device=self.device)
            assert hvd.allreduce(right, op=hvd.Sum, name=f"wrong.{what}").eq(self.size).all()

    def process_sets(self) -> None:
        """Two sets that overlap: two communicators in one stream."""
        if self.size == 1 or not os.environ.get("HORORING_DYNAMIC_PROCESS_SETS"):
            return
        groups = ([0], list(range(1, self.size)), list(range(self.size))[::-1][: self.size - 1])
        groups = tuple(dict.fromkeys(tuple(sorted(group)) for group in groups))
        sets = [hvd.add_process_set(list(group)) for group in groups]
        for round_ in range(5):
            for number, (each, ranks) in enumerate(zip(sets, groups, strict=True)):
                if self.rank not in ranks:
                    continue
                mine = torch.full((1000,), float(self.rank + round_), device=self.device)
                result = hvd.allreduce(
                    mine, op=hvd.Sum, name=f"set.{number}", process_set=each, prescale_factor=0.5
                )
                assert result.eq(sum(rank + round_ for rank in ranks) / 2).all()
        for each in sets:
            assert hvd.remove_process_set(each)
        everyone = hvd.allreduce(torch.ones(3, device=self.device), op=hvd.Sum, name="all.again")
        assert everyone.eq(self.size).all()

    def join(self) -> None:
        if self.rank == 0:
            late = torch.full((5,), 3.0, device=self.device)
            assert hvd.allreduce(late, op=hvd.Sum, name="late").tolist() == [3] * 5
        # Rank 0 joins last or together with the others.
        device = self.device.index if self.device.type == "cuda" else hvd.local_rank()
        assert hvd.join(device=device) in range(self.size)

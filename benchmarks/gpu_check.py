"""Whether verbs and training are right on this machine's GPUs: one line per check.

    python benchmarks/gpu_check.py                                    one rank, through NCCL
    HORORING_GPU=staged hororun -np 2 python benchmarks/gpu_check.py  through host memory

The exit code is 1 if a check fails. Ranks take the GPUs in turn. With FAKE_GPU (see tests/fake_gpu)
CPU tensors stand for GPU tensors.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_check_training import TrainingChecks

import hororing.torch as hvd
from hororing._api import built

FAKE = "FAKE_GPU" in os.environ
SHAPES = ((), (1,), (0, 3), (5, 7), (1003 if FAKE else 1000003,))
SUMS = {
    torch.float32: 1e-6, torch.float64: 1e-12, torch.float16: 2e-3, torch.bfloat16: 2e-2,
    torch.int32: 0, torch.int64: 0, torch.uint8: 0,
}  # fmt: skip


def device_of_rank() -> torch.device:
    if FAKE:
        sys.path.insert(0, str(Path(__file__).parents[1] / "tests/python"))
        import fake_gpu

        fake_gpu.stand_in()
        return torch.device("cpu")
    device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def circumstances() -> dict[str, Any]:
    """When, and with what, a result came about."""

    def printed(*command: str) -> str:
        if shutil.which(command[0]) is None:
            return ""
        folder = Path(__file__).parent
        return subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout.strip()

    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": printed("git", "describe", "--always", "--dirty"),
        "gpu": "none: a fake stands for it" if FAKE else torch.cuda.get_device_name(),
        "driver": printed("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "nccl": built.nccl_built(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "way": os.environ.get("HORORING_GPU", "auto"),
    }


class Checks:
    """The tensors that ranks have, and what comes of them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rank, self.size = hvd.rank(), hvd.size()

    def of(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        made = torch.Generator().manual_seed(1000 * rank + len(shape))
        return torch.randint(0, 9, shape, generator=made).to(dtype)

    def mine(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """On the device, after work that the result must wait for."""
        tensor = self.of(self.rank, shape, dtype).to(self.device)
        edge = 512 if self.device.type == "cuda" else 8
        busy = torch.ones(edge, edge, device=self.device)
        for _ in range(20):
            busy = busy @ busy * 1e-3
        return tensor + (busy.sum() * 0).to(dtype)

    def equal(self, result: torch.Tensor, wanted: torch.Tensor, slack: float) -> None:
        assert result.device.type == self.device.type, result.device
        torch.testing.assert_close(result.cpu().double(), wanted.double(), rtol=slack, atol=slack)

    def all(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
        return [self.of(rank, shape, dtype) for rank in range(self.size)]

    def allreduce(self) -> None:
        for dtype, slack in SUMS.items():
            for shape in SHAPES:
                total = torch.stack([t.double() for t in self.all(shape, dtype)]).sum(0)
                self.equal(hvd.allreduce(self.mine(shape, dtype), op=hvd.Sum), total, slack)
                if slack:
                    self.equal(hvd.allreduce(self.mine(shape, dtype)), total / self.size, slack)
                    average = hvd.allreduce(self.mine(shape, dtype), prescale_factor=0.5)
                    self.equal(average, total / self.size / 2, slack)
                    # No 16 bits hold that factor, so those sums go by way of the host.
                    third = hvd.allreduce(
                        self.mine(shape, dtype), op=hvd.Sum, prescale_factor=1 / 3
                    )
                    self.equal(third, total / 3, slack)

    def allreduce_of_extremes(self) -> None:
        for dtype in SUMS:
            stacked = torch.stack([t.double() for t in self.all((5, 7), dtype)])
            self.equal(hvd.allreduce(self.mine((5, 7), dtype), op=hvd.Max), stacked.amax(0), 0)
            self.equal(hvd.allreduce(self.mine((5, 7), dtype), op=hvd.Min), stacked.amin(0), 0)

    def grouped_allreduce(self) -> None:
        shapes = [(n % 97, 3) for n in range(1, 200)]
        results = hvd.grouped_allreduce([self.mine(s, torch.float32) for s in shapes], op=hvd.Sum)
        for shape, result in zip(shapes, results, strict=True):
            self.equal(result, torch.stack(self.all(shape, torch.float32)).sum(0), 1e-6)

    def compression(self) -> None:
        for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
            result = hvd.allreduce(self.mine((50,), torch.float32), compression=compression)
            wanted = torch.stack(self.all((50,), torch.float32)).mean(0)
            assert result.dtype is torch.float32
            self.equal(result, wanted, 2e-2)

    def allgather(self) -> None:
        for rows in (lambda r: 4, lambda r: 3 * r):
            result = hvd.allgather(self.mine((rows(self.rank), 2), torch.float32))
            parts = [self.of(r, (rows(r), 2), torch.float32) for r in range(self.size)]
            self.equal(result, torch.cat(parts), 0)

    def broadcast(self) -> None:
        for root in range(self.size):
            result = hvd.broadcast(self.mine((5, 7), torch.bfloat16), root)
            self.equal(result, self.of(root, (5, 7), torch.bfloat16), 0)

    def alltoall(self) -> None:
        splits = [(self.rank + peer) % 3 for peer in range(self.size)]
        result, counts = hvd.alltoall(self.mine((sum(splits), 2), torch.int64), splits)
        parts = []
        for peer in range(self.size):
            theirs = [(peer + other) % 3 for other in range(self.size)]
            sent = self.of(peer, (sum(theirs), 2), torch.int64)
            parts.append(sent.split(theirs)[self.rank])
        self.equal(result, torch.cat(parts), 0)
        assert counts.tolist() == splits

    def reducescatter(self) -> None:
        for rows in (4 * self.size, 4 * self.size + 1):
            result = hvd.reducescatter(self.mine((rows, 3), torch.float32), op=hvd.Sum)
            total = torch.stack(self.all((rows, 3), torch.float32)).sum(0)
            self.equal(result, total.tensor_split(self.size)[self.rank], 1e-6)


def checks_of(kind: type) -> list[str]:
    """The names of its methods without arguments, in their order."""
    methods = {name: value for name, value in vars(kind).items() if not name.startswith("_")}
    return [name for name, value in methods.items() if value.__code__.co_argcount == 1]


def run(check: Callable[[], None]) -> str:
    try:
        check()
    except Exception as error:  # of any kind: it is reported
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> int:
    hvd.init()
    device = device_of_rank()
    found = {}
    for kind in (Checks, TrainingChecks):
        checks = kind(device)
        for name in checks_of(kind):
            told = hvd.allgather_object(run(getattr(checks, name)))
            wrong = [f"rank {rank}: {text}" for rank, text in enumerate(told) if text]
            found[name] = "ok" if not wrong else "\n".join(wrong)
            if hvd.rank() == 0:
                print(f"{name:<36} {found[name]}", flush=True)
    if hvd.rank() == 0 and len(sys.argv) > 1:
        report = {"circumstances": circumstances(), "ranks": hvd.size(), "checks": found}
        Path(sys.argv[1]).write_text(json.dumps(report, indent=1) + "\n")
    hvd.shutdown()
    return 0 if set(found.values()) == {"ok"} else 1


if __name__ == "__main__":
    sys.exit(main())

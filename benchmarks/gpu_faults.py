"""Checks that a rank on a GPU gets an error in time when its peer fails, and stays usable.

    python benchmarks/gpu_faults.py [killed stopped stuck raised killed_far_ahead]

Each case starts two ranks of its own, which train through NCCL if they can. If they share a GPU,
this needs NCCL 2.30 (HORORING_NCCL_LIBRARY); otherwise set HORORING_GPU=staged. The exit code is 1
if a case fails.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LIMIT_S = 5.0  # HORORING_TIMEOUT_S of the ranks
MARGIN_S = 15.0  # how much later an error may arrive


def killed(rank: int) -> None:
    """The peer's kernels wait for data that never arrives."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def stopped(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def stuck(rank: int) -> None:
    """The GPU is busy before the gradients, for longer than the peer may wait."""
    import torch

    if rank == 1:
        for _ in range(20):
            torch.cuda._sleep(2_000_000_000)  # about a second each


def raised(rank: int) -> None:
    if rank == 1:
        raise RuntimeError("a bug of the script")


def killed_far_ahead(rank: int) -> None:
    """The survivor has filled the queue of its GPU, and stays in a launch (ADR 60).

    The peer's kernels wait behind 20 s of other work, the survivor's for them.
    """
    if rank == 1:
        stuck(rank)
        threading.Timer(3, os.kill, (os.getpid(), signal.SIGKILL)).start()


def fill_queue(tensor: torch.Tensor) -> None:
    """Launch more kernels than a queue takes; report how long the longest launch waited."""
    longest = 0.0
    for _ in range(5000):
        begin = time.monotonic()
        tensor.add_(1)
        longest = max(longest, time.monotonic() - begin)
    print(f"a launch waited {longest:.1f} s;", end=" ", flush=True)


CASES = {case.__name__: case for case in (killed, stopped, stuck, raised, killed_far_ahead)}


def train(name: str) -> None:
    """Run as a rank: print the error and its time."""
    import torch

    import hororing.torch as hvd

    hvd.init()
    rank = hvd.rank()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    tensor = torch.ones(16 << 20, device="cuda")
    small = torch.ones(8, device="cuda")
    begin = time.monotonic()
    try:
        for step in range(10_000):
            if step == 25:  # the GPU is still at work
                begin = time.monotonic()
                CASES[name](rank)
            handles = [hvd.allreduce_async_(tensor, name=f"gradient.{i}") for i in range(4)]
            for handle in handles:
                hvd.synchronize(handle)
            if name == "killed_far_ahead" and step == 25:
                fill_queue(small)
            elif step % 10 == 9:
                torch.cuda.synchronize()
            if time.monotonic() - begin > LIMIT_S + MARGIN_S:
                raise AssertionError("no error came")
    except hvd.HororingInternalError as error:
        waited = time.monotonic() - begin
        # The GPU is still usable, and so is the process.
        left = torch.ones(1000, device="cuda").sum().item() if name != "stuck" else 1000
        used = time.monotonic() - begin
        hvd.shutdown()
        ended = time.monotonic() - begin
        print(
            f"error after {waited:.1f} s, GPU usable after {used:.1f} s, shutdown after "
            f"{ended:.1f} s, {left:.0f}, {type(error).__name__}: {error}",
            flush=True,
        )


def judge(name: str) -> str:
    """Run a case; return what is wrong."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "HORORING_TIMEOUT_S": str(LIMIT_S),
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank", name],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        out, err = ranks[0].communicate(timeout=30 + LIMIT_S + MARGIN_S)
    except subprocess.TimeoutExpired:
        ranks[0].kill()
        out, err = ranks[0].communicate()
        return f"rank 0 has not ended; it printed {out!r}, {err[-2000:]!r}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(ranks[1].pid, signal.SIGCONT)
        if name == "raised":
            with contextlib.suppress(subprocess.TimeoutExpired):
                ranks[1].wait(MARGIN_S)
        ranks[1].kill()
        other = ranks[1].communicate()
    print(f"{name}: rank 0: {out.strip()}; {ranks[0].returncode}", flush=True)
    print(f"{name}: rank 1: {other[0].strip()} {other[1].strip()[-300:]!r}", flush=True)
    if ranks[0].returncode != 0:
        return f"exit code {ranks[0].returncode}, {err[-2000:]}"
    if " s, 1000, " not in out:
        return f"no error: {out!r}"
    return ""


def main() -> int:
    if sys.argv[1:2] == ["--rank"]:
        train(sys.argv[2])
        return 0
    wrong = {name: judge(name) for name in sys.argv[1:] or CASES}
    for name, text in wrong.items():
        print(f"{name:<24} {text or 'ok'}")
    return 1 if any(wrong.values()) else 0


if __name__ == "__main__":
    sys.exit(main())

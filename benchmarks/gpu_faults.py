"""Checks that a rank on a GPU gets an error in time when its peer fails, and stays usable.

    python benchmarks/gpu_faults.py [killed stopped stuck raised killed_far_ahead killed_in_two_sets
                                     elastic]

Each case starts two ranks of its own, which train through NCCL if they can; `killed_in_two_sets`
starts three, and `elastic` an elastic job of three. If they share a GPU, this needs NCCL 2.30
(HORORING_NCCL_LIBRARY); otherwise set HORORING_GPU=staged. The exit code is 1 if a case fails.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
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


def killed_in_two_sets(rank: int) -> None:
    """Rank 0 shares two communicators with the dead rank, rank 2 only one.

    NCCL aborts the two together (gpu.md, process sets).
    """
    killed(rank)


def fill_queue(tensor: torch.Tensor) -> None:
    """Launch more kernels than a queue takes; report how long the longest launch waited."""
    longest = 0.0
    for _ in range(5000):
        begin = time.monotonic()
        tensor.add_(1)
        longest = max(longest, time.monotonic() - begin)
    print(f"a launch waited {longest:.1f} s;", end=" ", flush=True)


CASES = {
    case.__name__: case
    for case in (killed, stopped, stuck, raised, killed_far_ahead, killed_in_two_sets)
}


def train(name: str) -> None:
    """Run as a rank: print the error and its time."""
    import torch

    import hororing.torch as hvd

    hvd.init()
    rank = hvd.rank()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    sets = [hvd.global_process_set]
    if name == "killed_in_two_sets":
        pair = hvd.add_process_set([0, 1])
        sets += [pair] if pair.included() else []
    tensor = torch.ones(16 << 20, device="cuda")
    small = torch.ones(8, device="cuda")
    begin = time.monotonic()
    try:
        for step in range(10_000):
            if step == 25:  # the GPU is still at work
                begin = time.monotonic()
                CASES[name](rank)
            handles = [
                hvd.allreduce_async_(tensor, name=f"gradient.{i}", process_set=group)
                for i in range(4)
                for group in sets
            ]
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
    size = 3 if name == "killed_in_two_sets" else 2
    environment = {
        **os.environ, "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "HORORING_TIMEOUT_S": str(LIMIT_S),
        "HORORING_DYNAMIC_PROCESS_SETS": "1",
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank", name],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    failing = ranks[1]
    end = time.monotonic() + 30 + LIMIT_S + MARGIN_S
    wrong = []
    for number, rank in enumerate(ranks):
        if rank is failing:
            continue
        who = f"{name}: rank {number}"
        try:
            out, err = rank.communicate(timeout=max(end - time.monotonic(), 1))
        except subprocess.TimeoutExpired:
            rank.kill()
            out, err = rank.communicate()
            wrong.append(f"{who} has not ended; it printed {out!r}, {err[-2000:]!r}")
            continue
        print(f"{who}: {out.strip()}; {rank.returncode}", flush=True)
        if rank.returncode != 0:
            wrong.append(f"{who}: exit code {rank.returncode}, {err[-2000:]}")
        elif " s, 1000, " not in out:
            wrong.append(f"{who}: no error: {out!r}")
    with contextlib.suppress(ProcessLookupError):
        os.kill(failing.pid, signal.SIGCONT)
    if name == "raised":
        with contextlib.suppress(subprocess.TimeoutExpired):
            failing.wait(MARGIN_S)
    failing.kill()
    other = failing.communicate()
    print(f"{name}: rank 1: {other[0].strip()} {other[1].strip()[-300:]!r}", flush=True)
    return "\n".join(wrong)


def train_elastic(killed: Path) -> None:
    """Run as a rank of an elastic job until it has lost a rank, grown again, and trained on.

    The rank that dies creates the file `killed` before.
    """
    import torch

    import hororing.torch as hvd

    hvd.init()
    torch.cuda.set_device(hvd.rank() % torch.cuda.device_count())
    model = torch.nn.Linear(1024, 1024).cuda()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3), model.named_parameters()
    )
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    end = time.monotonic() + 4 * MARGIN_S

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        size, again, first = hvd.size(), killed.exists(), state.step
        if hvd.rank() == 0:
            print(f"{size} ranks from step {state.step} on;", end=" ", flush=True)
        while not (again and size == 3 and state.step >= first + 50):
            if not again and hvd.rank() == 1 and state.step == 30:
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            model(torch.full((8, 1024), float(hvd.rank()), device="cuda")).sum().backward()
            optimizer.step()
            # The bias has the gradient 8 on each rank: its mean shows a lost or a doubled share.
            torch.testing.assert_close(model.bias.grad, torch.full_like(model.bias, 8))
            state.step += 1
            if state.step % 10 == 0:
                state.commit()
            assert time.monotonic() < end, "the job has not grown again"

    train(state)
    weights = hvd.allgather(model.weight.detach()[None], name="weights")
    assert (weights == weights[0]).all(), "the ranks have different weights"
    if hvd.rank() == 0:
        print(f"ended with {hvd.size()} ranks", flush=True)


def judge_elastic() -> str:
    """Run the case `elastic`; return what is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        job = subprocess.Popen(
            [
                sys.executable, "-m", "hororing.hororun", "--no-tag-output", "-np", "3",
                "--min-np", "2", sys.executable, __file__, "--elastic", f"{folder}/killed",
            ],
            env={**os.environ, "HORORING_TIMEOUT_S": str(LIMIT_S)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            out, err = job.communicate(timeout=5 * MARGIN_S)
        except subprocess.TimeoutExpired:
            job.terminate()
            out, err = job.communicate(timeout=MARGIN_S)
    print(f"elastic: {out.strip()}; {job.returncode}", flush=True)
    return "" if job.returncode == 0 and "ended with 3 ranks" in out else err[-2000:] or out


def main() -> int:
    if sys.argv[1:2] == ["--rank"]:
        train(sys.argv[2])
        return 0
    if sys.argv[1:2] == ["--elastic"]:
        train_elastic(Path(sys.argv[2]))
        return 0
    wrong = {
        name: judge_elastic() if name == "elastic" else judge(name)
        for name in sys.argv[1:] or [*CASES, "elastic"]
    }
    for name, text in wrong.items():
        print(f"{name:<24} {text or 'ok'}")
    return 1 if any(wrong.values()) else 0


if __name__ == "__main__":
    sys.exit(main())

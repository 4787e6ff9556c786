"""The ranks of test_job_endings.py: one function per kind of end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import mpirun
import numpy as np

import hororing.numpy as hvd
from hororing import errors
from hororing._core import lib


def say(word: str, *rest: object) -> None:
    line = " ".join(map(str, [word, *rest]))
    os.write(1, f"{line}\n".encode())  # in one write: the engine writes lines, too


def begin() -> None:
    say("pid", os.getpid())
    # A survivor can report before mpirun's SIGKILL, which comes a second after SIGTERM.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    hvd.init()
    hvd.barrier()
    say("ready")


def tell(error: Exception, since: float) -> None:
    facts = {
        "kind": type(error).__name__,
        "text": str(error),
        "rank": getattr(error, "rank", None),
        "seconds": time.monotonic() - since,
    }
    say("failed", json.dumps(facts))


def fail_with(collective) -> None:
    """Run `collective`, report its failure, and end like a script that does not catch it."""
    began = time.monotonic()
    try:
        collective()
    except errors.HororingInternalError as error:
        tell(error, began)
        raise
    say("no error")


def the_last_one() -> bool:
    return hvd.rank() == hvd.size() - 1


# -- killed ------------------------------------------------------------------------------------


def die_idle() -> None:
    """The last rank is killed from outside while the others wait for it."""
    begin()
    if the_last_one():
        time.sleep(1000)
    fail_with(lambda: hvd.allreduce(np.ones(4), name="x"))


def die_one_after_the_other() -> None:
    """The last rank is killed from outside, and then the others kill themselves."""
    begin()
    if the_last_one():
        time.sleep(1000)
    with contextlib.suppress(errors.PeerLostError):
        fail_with(lambda: hvd.allreduce(np.ones(4), name="x"))
    hvd.shutdown()
    os.kill(os.getpid(), signal.SIGKILL)  # after any other end, mpirun ends the job


def wait_for_its_middle(ones: np.ndarray, handle: int) -> None:
    sample = ones[:: 1 << 18]
    while not (sample != 1).any() and not hvd.poll(handle):
        pass
    assert (sample == 1).any(), "the sum was complete before the interruption"


def die_in_a_large_allreduce(signal_: int = signal.SIGKILL) -> None:
    """The rank of the argument, or the last one, dies when the sum is partly reduced."""
    begin()
    numbers = np.ones(32 << 20, np.float32)
    if hvd.rank() == int((*sys.argv, hvd.size() - 1)[2]):
        handle = hvd.allreduce_async_(numbers, name="large", op=hvd.Sum)
        wait_for_its_middle(numbers, handle)
        os.kill(os.getpid(), signal_)
    fail_with(lambda: hvd.allreduce_(numbers, name="large", op=hvd.Sum))


def die_before_init() -> None:
    say("pid", os.getpid())
    if int(os.environ["OMPI_COMM_WORLD_RANK"]) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.init()
    say("initialised")


def die_while_others_compute() -> None:
    """No rank waits for the dead one when it dies; the next collective fails."""
    begin()
    if the_last_one():
        time.sleep(1000)
    while "dead" not in os.listdir(sys.argv[2]):
        time.sleep(0.01)
    fail_with(lambda: hvd.allreduce(np.ones(4), name="x"))


# -- signals -----------------------------------------------------------------------------------


def work() -> None:
    """Run collectives on all ranks until a signal, with Python's own handlers."""
    begin()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    numbers = np.ones(1 << 20, np.float32)
    for step in range(1_000_000):
        hvd.allreduce(numbers, name="x")
        if step == 10:
            say("working")


def wait_in_vain() -> None:
    """Rank 0 waits for a tensor that the others never submit."""
    begin()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if hvd.rank() == 0:
        began = time.monotonic()
        try:
            say("working")
            hvd.allreduce(np.ones(4), name="x")
        except KeyboardInterrupt:
            say("interrupted", time.monotonic() - began)
            raise
    else:
        say("working")
        fail_with(lambda: hvd.allreduce(np.ones(4), name="another"))


def compute() -> None:
    """Compute without any call of hororing."""
    begin()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    say("working")
    while True:
        sum(range(1000))


def compute_alone() -> None:
    """The same as `compute`, before init()."""
    say("pid", os.getpid())
    say("working")
    while True:
        sum(range(1000))


# -- ends by itself ----------------------------------------------------------------------------


def end_without_shutdown() -> None:
    hvd.init()
    result = hvd.allreduce(np.ones(4), name="x", op=hvd.Sum)
    assert result[0] == hvd.size()


def end_at_different_times() -> None:
    """Rank 0 ends early; the others work for a while without collectives."""
    hvd.init()
    hvd.barrier()
    time.sleep(0.3 * hvd.rank())


def exit_3() -> None:
    """The last rank ends with code 3, in the way that the argument names, or normally."""
    begin()
    kept = sys.modules[__name__].kept = []  # keeps exceptions alive until the end
    try:
        sys.exit(4)
    except SystemExit as error:
        kept.append(error)
    if the_last_one():
        how = sys.argv[2]
        if how == "caught":
            return
        if how == "exit()":
            exit(3)
        try:
            sys.exit(3)
        except SystemExit as error:
            kept.append(error)
            raise
    if sys.argv[2].endswith("compute"):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        compute_instead()
    fail_with(lambda: hvd.allreduce(np.ones(4), name="x"))


def raise_an_exception() -> None:
    begin()
    if the_last_one():
        raise OverflowError("the loss is 7.5e99, größer geht es nicht")
    fail_with(lambda: hvd.allreduce(np.ones(4), name="x"))


def shut_down_in_finally() -> None:
    """The last rank shuts down because of an exception; or of none that is a failure."""
    begin()
    if the_last_one():
        try:
            raise {"ValueError": ValueError("bad sample 17"), "exit": SystemExit(3)}[sys.argv[2]]
        finally:
            hvd.shutdown()
    fail_with(lambda: hvd.allreduce(np.ones(4), name="x"))


def raise_without_text() -> None:
    class BrokenError(Exception):
        def __str__(self) -> str:
            raise ValueError

    begin()
    if the_last_one():
        raise BrokenError
    fail_with(lambda: hvd.allreduce(np.ones(4), name="x"))


def end_early() -> None:
    """The last rank ends while the others go on; all later verbs fail at once."""
    begin()
    if the_last_one():
        return
    for attempt in range(2):
        began = time.monotonic()
        try:
            hvd.allreduce(np.ones(4), name=f"x{attempt}")
        except errors.HororingInternalError as error:
            tell(error, began)
    assert hvd.is_initialized()
    assert hvd.size() == int(sys.argv[2])
    hvd.shutdown()
    assert not hvd.is_initialized()


def shut_down_early() -> None:
    begin()
    if the_last_one():
        hvd.shutdown()
        try:
            hvd.rank()
        except errors.NotInitializedError:
            say("not", "initialized")
        return
    fail_with(lambda: hvd.allreduce(np.ones(4), name="x"))


# -- stopped -----------------------------------------------------------------------------------


def stop_in_a_large_allreduce() -> None:
    die_in_a_large_allreduce(signal.SIGSTOP)


def stop_before_submitting() -> None:
    """The rank of the argument, or the last one, stops before it submits."""
    begin()
    if hvd.rank() == int((*sys.argv, hvd.size() - 1)[2]):
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        fail_with(lambda: hvd.allreduce(np.ones(4), name="x"))
    finally:
        shut_down()


def shut_down() -> None:
    began = time.monotonic()
    hvd.shutdown()
    say("shut", time.monotonic() - began)


def uneven_batches() -> None:
    """Rank 1 has fewer batches, and reduces a metric; after the error, all call init again."""

    def step() -> None:
        hvd.allreduce(np.ones(4), name="gradient")

    if sys.argv[2] == "graph":  # in which no thread is blocked
        import tensorflow as tf

        import hororing.tensorflow as hvd_tf

        step = tf.function(lambda: hvd_tf.allreduce(tf.ones(4), name="gradient"))
    begin()
    try:
        for _ in range(2 if hvd.rank() == 1 else 3):
            began = time.monotonic()
            step()
        hvd.allreduce(np.ones(1), name="metric")
    except Exception as error:
        tell(error, began)
    shut_down()
    hvd.init()
    assert hvd.allreduce(np.ones(1), op=hvd.Sum)[0] == hvd.size()
    say("fine")


def reduce_until_it_fails() -> None:
    """Reduce small tensors, by one-shot exchange or negotiated, and large ones."""
    begin()
    large = np.ones(1 << 20, np.float32)
    handles = []
    for step in range(1_000_000):
        began = time.monotonic()
        try:
            hvd.allreduce(np.ones(4), name="small")
            handles = [hvd.allreduce_async(np.ones(100), name=f"x{i}") for i in range(5)]
            hvd.allreduce_(large, name="large")
            for handle in handles:
                hvd.synchronize(handle)
        except errors.HororingInternalError as error:
            tell(error, began)
            raise
        if step == 10:
            say("working")


def compute_then_reduce() -> None:
    """No collective is in flight when the network is cut."""
    begin()
    while "cut" not in os.listdir(sys.argv[2]):
        time.sleep(0.01)
    fail_with(lambda: hvd.allreduce(np.ones(4), name="x"))


def never_call_init() -> None:
    """mpi4py initializes MPI on all ranks, but the last rank does not call init()."""
    from mpi4py import MPI

    say("pid", os.getpid())
    if MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1:
        time.sleep(1000)
    fail_with(hvd.init)


# -- asked for their stacks --------------------------------------------------------------------


def compute_instead() -> None:
    while True:
        sum(range(1000))


def be_busy_elsewhere() -> None:
    """Rank 1 computes while the others wait for it."""
    begin()
    hvd.allreduce(np.ones(4), name="before")
    if hvd.rank() == 1:
        compute_instead()
    hvd.allreduce(np.ones(4), name="loss")


# -- in init -----------------------------------------------------------------------------------


def wait_for_one_in_mpi_init() -> None:
    """The others wait inside MPI_Init for the last rank, which comes late or never."""
    say("pid", os.getpid())
    if the_last_one_of_mpi():
        time.sleep(1000)
    began = time.monotonic()
    try:
        hvd.init()
    except KeyboardInterrupt:
        say("interrupted", time.monotonic() - began, hvd.is_initialized(), lib.hr_state_now())
        try:
            hvd.init()
        except errors.HororingInternalError as error:
            tell(error, began)
        raise
    except errors.HororingInternalError as error:
        tell(error, began)
        raise


def die_between_two_inits() -> None:
    begin()
    hvd.shutdown()
    if the_last_one_of_mpi():
        os.kill(os.getpid(), signal.SIGKILL)
    fail_with(hvd.init)


def the_last_one_of_mpi() -> bool:
    return int(os.environ["OMPI_COMM_WORLD_RANK"]) == int(os.environ["OMPI_COMM_WORLD_SIZE"]) - 1


def interrupt_init_everywhere() -> None:
    """Interrupt init before every line: it leaves either no engine or a running one."""
    say("pid", os.getpid())
    from interruption import interrupted

    from hororing._api import init

    at = 1
    while interrupted(hvd.init, at, init._run, init._await_start):
        assert hvd.is_initialized() == (lib.hr_state_now() == lib.HR_STATE_RUNNING), at
        hvd.shutdown()
        at += 1
    assert at > 20, at
    assert hvd.allreduce(np.ones(3)).tolist() == [1.0] * 3
    say("fine")


def listen_nowhere() -> None:
    """No socket of a rank listens on an interface that other hosts may reach."""
    os.environ.pop("OMPI_MCA_btl", None)  # set by the tests
    hvd.init()
    assert hvd.allreduce(np.ones(4), op=hvd.Sum)[0] == hvd.size()
    mine = {os.readlink(fd.path) for fd in os.scandir("/proc/self/fd") if os.path.islink(fd.path)}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            address, state, inode = (line.split()[column] for column in (1, 3, 9))
            listens = state == "0A" and f"socket:[{inode}]" in mine
            assert not listens or address.startswith("0100007F"), line
    say("fine")


# -- children ----------------------------------------------------------------------------------


def fork() -> None:
    """Fork children between collectives: one that does not call hororing, and one that does."""
    import multiprocessing

    begin()
    context = multiprocessing.get_context("fork")
    for step in range(5):
        handle = hvd.allreduce_async(np.full(1000, hvd.rank() + 1.0), name="x", op=hvd.Sum)
        child = os.fork()
        if child == 0:
            sys.exit(step)  # runs exit hooks, including hororing's
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == step
        queue = context.SimpleQueue()
        worker = context.Process(target=try_everything, args=(queue,))
        worker.start()
        where = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()]
        assert queue.get() == [*where, *["NotInitializedError"] * 5], "in the child"
        worker.join()
        assert worker.exitcode == 0
        expected = hvd.size() * (hvd.size() + 1) / 2
        assert (hvd.synchronize(handle) == expected).all()
    say("fine")


def try_everything(queue) -> None:
    assert hvd.is_initialized()
    answers = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()]
    for verb in (
        hvd.barrier,
        hvd.init,
        hvd.join,
        hvd.statistics,
        lambda: hvd.allreduce(np.ones(4), name="x"),
    ):
        try:
            verb()
        except Exception as error:
            answers.append(type(error).__name__ if "forked" in str(error) else str(error))
    hvd.shutdown()  # has no effect
    queue.put(answers)


def spawn() -> None:
    """A spawned worker inherits this rank's variables, and must not take its place."""
    import multiprocessing

    begin()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the pool ends its workers with it
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        text = pool.apply(init_in_a_worker)
    assert "called in a worker process of multiprocessing" in text, text
    assert hvd.allreduce(np.ones(1), op=hvd.Sum)[0] == hvd.size()
    say("fine")


def start_scripts() -> None:
    """Programs that a rank starts inherit its variables, and must not take its place, either."""
    begin()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    script = [sys.executable, "-c", "import hororing.numpy as hvd; hvd.init(); print(hvd.size())"]

    def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, **environment},
        )

    refused = run(script)
    assert refused.returncode == 1, refused
    assert f"that rank {hvd.rank()} (pid {os.getpid()}) has started" in refused.stderr, refused
    alone = run(script, HORORING_ALONE="1")
    assert (alone.returncode, alone.stdout) == (0, "1\n"), alone
    if hvd.rank() == 0:  # a separate job
        nested = run([mpirun.launcher(), "-np", "2", *script])
        assert (nested.returncode, nested.stdout) == (0, "2\n2\n"), nested
    assert hvd.allreduce(np.ones(1), op=hvd.Sum)[0] == hvd.size()
    say("fine")


def init_in_a_worker() -> str:
    try:
        hvd.init()
    except ValueError as error:
        return str(error)
    return "no error"


class Squares:
    """A data set whose items are made in worker processes."""

    def __init__(self) -> None:
        self.rank = hvd.rank()

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> float:
        if sys.argv[2] == "fork":
            assert (hvd.rank(), hvd.size()) == (self.rank, 2)
        else:
            assert not hvd.is_initialized()
        return float(index * index)


def train_with_workers() -> None:
    """Train two epochs with DataLoader workers, forked or spawned, and gradients in flight."""
    import torch

    import hororing.torch as hvd_torch

    begin()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    data = Squares()
    sampler = torch.utils.data.DistributedSampler(
        data, num_replicas=hvd_torch.size(), rank=hvd_torch.rank(), shuffle=False
    )
    loader = torch.utils.data.DataLoader(
        data,
        batch_size=4,
        sampler=sampler,
        num_workers=2,
        multiprocessing_context=sys.argv[2],
        persistent_workers=sys.argv[2] == "spawn",  # they start slowly
    )
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    optimizer = hvd_torch.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd_torch.broadcast_parameters(model.state_dict(), root_rank=0)
    seen = 0.0
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            model(batch.float()[:, None]).mean().backward()
            optimizer.step()
            seen += float(batch.sum())
    total = hvd_torch.allreduce(torch.tensor(seen, dtype=torch.float64), op=hvd_torch.Sum)
    assert total == 2 * sum(index * index for index in range(48))
    say("fine")


if __name__ == "__main__":
    globals()[sys.argv[1]]()

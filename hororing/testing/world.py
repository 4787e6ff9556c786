"""What is initialised on a rank for each test: the engine, and torch.distributed.

Each test begins with a new engine and a new process group, so that none sees what another left.
Nothing here imports a framework: a test that does not import torch does not pay for it.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from hororing.config import environment
from hororing.testing.faults import armed
from hororing.testing.messages import HORORING, Seat, World


class Worlds:
    """The worlds of this rank, one after the other. `store`: a file in memory of all ranks."""

    def __init__(self, seat: Seat, secret: int, store: int) -> None:
        self._seat, self._store = seat, store
        self._variables = {**seat.variables, "HORORING_SECRET_FD": str(secret)}
        self.began = 0.0  # in time.time()
        self.kept = False  # whether a fixture of several tests has initialised what there is

    def begin(self, world: World) -> None:
        """End what the previous test left, and initialise. Blocks until all ranks have."""
        if world.init or not self.kept:
            self.end()
        armed.clear()
        environment.become({**self._variables, "MASTER_PORT": str(world.port)})
        self.began = time.time()
        if not world.init:
            return
        if world.backend == HORORING:
            from hororing._api import init

            init.init()
        dist = _torch_distributed()
        if dist is not None:
            store = dist.FileStore(f"/proc/self/fd/{self._store}", self._seat.size)
            dist.init_process_group(
                world.backend, store=dist.PrefixStore(str(world.number), store),
                rank=self._seat.rank, world_size=self._seat.size,
            )  # fmt: skip

    @contextlib.contextmanager
    def keeping(self) -> Iterator[Callable[[], None]]:
        """Keep what is initialised in this block, until the function that it yields is called.

        Only worlds without `init` keep it.
        """

        def end() -> None:
            self.kept = False

        before = _initialised()
        yield end
        self.kept = self.kept or (_initialised() and not before)

    def end(self) -> None:
        """End it, after all ranks have ended their test."""
        self.kept = False
        dist = _torch_distributed()
        if dist is not None and dist.is_initialized():
            dist.destroy_process_group()
        ends = sys.modules.get("hororing._engine.shutdown")
        if ends is not None:
            ends.shutdown()

    def abandon(self, error: BaseException) -> None:
        """Let the other ranks fail at once: this one will not answer them any more."""
        if any(each.__name__ == "MismatchError" for each in type(error).__mro__):
            return  # each rank gets it by itself; this one's end would hide it from slower ones
        ends = sys.modules.get("hororing._engine.shutdown")
        if ends is not None:
            ends.leave(error)
        dist = _torch_distributed()
        # The teardown of a fixture would miss the group that it has made.
        if dist is not None and dist.is_initialized() and not self.kept:
            with contextlib.suppress(Exception):  # it may wait for others, which have failed
                dist.destroy_process_group()


def _torch_distributed() -> Any:
    dist: Any = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() else None


def _initialised() -> bool:
    dist, state = _torch_distributed(), sys.modules.get("hororing._engine.state")
    groups = dist is not None and dist.is_initialized()
    return groups or (state is not None and state.has_engine())


def is_by_peers(error: BaseException) -> bool:
    """Whether an exception only reports that another rank has ended or failed."""
    names = {each.__name__ for each in type(error).__mro__}
    if names & {"PeerLostError", "ShutDownError"}:
        return True
    # Of gloo, which has no types.
    gone = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
    return isinstance(error, RuntimeError) and any(each in str(error) for each in gone)

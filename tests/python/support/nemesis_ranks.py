"""A rank of an elastic job that trains, and checks its state. For nemesis.py.

    nemesis_ranks.py STOP [FLOATS]

It trains until the file STOP exists. A step is a transaction: the ranks sum the gradients, agree
that all have them, and apply them. It prints lines "word number number ...". If ranks differ, or a
sample was not used exactly once in an epoch, it prints WRONG and exits with code 9.
"""

from __future__ import annotations

import os
import sys
import time

import numpy as np
from nemesis_replay import FLOATS, Training

import hororing.numpy as hvd
from hororing._engine import membership
from hororing.errors import HororingInternalError

SHOWN_EVERY, ASKED_EVERY = 10, 5


def say(*words: object) -> None:
    print(*words, flush=True)


def wrong(*words: object) -> None:
    say("WRONG", *words)
    os._exit(9)


def synchronise(state: Training) -> None:
    """Give all ranks the state of rank 0, in one assignment."""
    told = np.array([state.step, state.epoch, state.position])
    told = hvd.broadcast(told, 0, name="told")
    weights = hvd.broadcast(state.weights, 0, name="weights")
    used = hvd.broadcast(state.used, 0, name="used")
    state.weights, state.used = weights, used
    state.step, state.epoch, state.position = (int(each) for each in told)
    membership.set_progress(state.step)


def step(state: Training) -> np.ndarray:
    """Make a step. Returns the agreed values: whether to stop, and whether hosts have changed."""
    batch = state.batch(hvd.size())
    gradient = state.gradient(batch[hvd.rank() :: hvd.size()])
    gradient = hvd.allreduce(gradient, op=hvd.Sum, name="gradient")
    asks = state.step % ASKED_EVERY == 0
    told = [state.crc(), -state.crc(), os.path.exists(sys.argv[1]),
            asks and membership.updates()[1] != 0]  # fmt: skip
    agreed = hvd.allreduce(np.array(told), op=hvd.Max, name="agreed")
    if agreed[0] != -agreed[1]:
        wrong("weights differ at step", state.step)
    state.apply(gradient, batch)
    membership.set_progress(state.step)
    if state.position == 0 and not (state.used == state.epoch).all():
        wrong("samples were used", state.used.tolist(), "times in", state.epoch, "epochs")
    return agreed[2:]


def main() -> None:
    state = Training(int(sys.argv[2]) if len(sys.argv) > 2 else FLOATS)
    while True:
        hvd.init()
        say("world", membership.generation(), hvd.rank(), hvd.size(), time.time())
        try:
            synchronise(state)
            first = state.step
            while True:
                stop, updated = step(state)
                if state.step == first + 1:
                    say("first", membership.generation(), state.step, time.time())
                if state.step % SHOWN_EVERY == 0:
                    say("step", membership.generation(), state.step, state.crc())
                if stop:
                    say("end", state.step, state.epoch, state.position, state.crc())
                    return
                if updated:
                    break
                time.sleep(0.001)
        except HororingInternalError as error:
            say("error", membership.generation(), type(error).__name__, time.time())
        hvd.shutdown()


if __name__ == "__main__":
    main()

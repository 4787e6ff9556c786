"""Ranks of a job as processes of several users: forks them, as not every user can run Python here.

users_ranks.py FOLDER ACTION,... UID...: rank N is of the Nth user. Prints for each rank what each
action has returned, as JSON, or its exception.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401  # another user may not be allowed to load it later
import json
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hororing.numpy as hvd
from hororing import elastic
from hororing._job import private_folder
from hororing._requests import objects

FOLDER = Path(sys.argv[1])  # everybody may write to it


class Evil:
    """Makes a file where it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, (str(FOLDER / "evil"),)

    def __deepcopy__(self, memo: object) -> Evil:
        return self


def meet() -> Any:
    return hvd.broadcast_object({"rank": hvd.rank()})


def attack() -> Any:
    """Rank 0 sends a pickle, whatever the others expect."""
    if hvd.rank() == 0:
        objects._dump = lambda obj: (bytearray(pickle.dumps(Evil())), None)
    return hvd.broadcast_object(None)


def gather_evil() -> Any:
    return hvd.allgather_object(Evil() if hvd.rank() == 0 else 1)


def elastic_state() -> Any:
    state = elastic.ObjectState(hvd.broadcast_object, hvd.rank, value=hvd.rank(), odd=Evil())
    state.sync()


def train() -> Any:
    """All that a plain script of PyTorch sends."""
    import torch

    import hororing.torch

    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(3, 1)
    inner = torch.optim.Adam(model.parameters(), lr=0.1 * (1 + hvd.rank()))
    optimizer = hororing.torch.DistributedOptimizer(inner, model.named_parameters())
    hororing.torch.broadcast_parameters(model.state_dict(), root_rank=0)
    hororing.torch.broadcast_optimizer_state(optimizer, root_rank=0)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    hororing.torch.broadcast_optimizer_state(optimizer, root_rank=0)
    values = [float(each.detach().sum()) for each in model.parameters()]
    return hvd.allgather_object((values, optimizer.param_groups[0]["betas"]))


ACTIONS: dict[str, Callable[[], Any]] = {
    each.__name__: each for each in (meet, attack, gather_evil, elastic_state, train)
}


def rank(number: int, size: int, user: int) -> str:
    if user != os.geteuid():
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    os.environ.update({"HORORING_RANK": str(number), "HORORING_SIZE": str(size)})
    private_folder.candidates = lambda: [FOLDER / str(os.geteuid())]
    try:
        hvd.init()
    except Exception as error:
        return json.dumps([f"{type(error).__name__}: {error}"])
    outcomes = []
    for action in sys.argv[2].split(","):
        try:
            outcomes.append(json.dumps(ACTIONS[action]()))
        except Exception as error:
            outcomes.append(f"{type(error).__name__}: {error}")
    return json.dumps(outcomes)


def main() -> None:
    users = [int(each) for each in sys.argv[3:]]
    if sys.argv[2] == "train":
        import hororing.torch  # noqa: F401
    children = []
    for number, user in enumerate(users):
        child = os.fork()
        if child == 0:
            os.write(1, f"{number} {rank(number, len(users), user)}\n".encode())
            return  # and end as scripts do: rank 0 has the store
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()

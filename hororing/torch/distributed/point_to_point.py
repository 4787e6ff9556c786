"""send and recv: messages between two ranks of a group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hororing import process_sets
from hororing.process_sets import ProcessSet
from hororing.torch.distributed.base import Group, Tensors, single
from hororing.torch.distributed.message import Message
from hororing.torch.distributed.work import Work
from hororing.torch.verbs import adapter, verbs


class PointToPoint(Group):
    """What goes from one rank to another one."""

    def send(self, tensors: Tensors, target: int, tag: int = 0) -> Work:
        """Send a tensor to a rank of the group, which receives it into one of as many elements.

        Messages of one tag arrive in order. ValueError if the target is this rank.
        """
        tensor = adapter.check(single(tensors, "send"), "send")
        flat = tensor.data.reshape(-1)
        return self._message("send", tensor, flat, self._place, target, tag, target, None)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> Work:
        """Receive a tensor from a rank of the group.

        MismatchError on both ranks if it differs in data type or number of elements.
        """
        tensor = adapter.check(single(tensors, "recv"), "recv")
        adapter.check_writable(tensor, "recv")
        if tensor.is_contiguous():
            flat, finish = tensor.detach().view(-1), None
        else:
            flat = tensor.detach().new_empty(tensor.numel())

            def finish(_: Any) -> None:
                adapter.copy(tensor, flat.view(tensor.shape))

        return self._message("recv", tensor, flat, source, self._place, tag, source, finish)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        """Raise NotImplementedError: both ranks must know who sends."""
        raise NotImplementedError("recv: messages from any source are not supported; pass src")

    def _message(
        self,
        verb: str,
        tensor: torch.Tensor,
        flat: torch.Tensor,
        source: int,
        target: int,
        tag: int,
        peer: int,
        finish: Callable[[Any], None] | None,
    ) -> Work:
        self._check_alive(verb)
        if not 0 <= peer < len(self._ranks) or peer == self._place:
            raise ValueError(f"{verb}: rank {peer} is not another rank of {self!r}")
        number = next(self._messages[source, target, tag])
        # Other groups of these two have messages, too.
        name = f"set{self._members()}.{self._name}.from{source}.to{target}.tag{tag}.{number}"
        root = self._ranks[source]

        def start(pair: ProcessSet) -> int:
            return verbs.start_broadcast(flat, root, name, pair, in_place=True)

        pair = process_sets.of_members([root, self._ranks[target]])
        return Message(f"{verb} '{name}'", tensor, self._timeout_s, pair, start, source, finish)

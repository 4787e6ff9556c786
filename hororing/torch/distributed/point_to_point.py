"""send and recv: messages between two ranks of a group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from hororing._requests import process_sets
from hororing._requests.process_sets import ProcessSet
from hororing.torch._tensor.verbs import adapter, verbs
from hororing.torch.distributed.base import Group, Tensors, single
from hororing.torch.distributed.board import announcer
from hororing.torch.distributed.message import Message, Route
from hororing.torch.distributed.work import Work


class PointToPoint(Group):
    """Messages from one rank to another one."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # The number of messages so far, by source, target and tag.
        self._messages: defaultdict[tuple[int, int, int], int] = defaultdict(int)

    def send(self, tensors: Tensors, target: int, tag: int = 0) -> Work:
        """Send a tensor to a rank of the group, which receives the same number of elements.

        Messages of one tag arrive in order. ValueError if the target is this rank.
        """
        tensor = adapter.check(single(tensors, "send"), "send")
        self._check_peer("send", target)
        route = self._route(self._place, target, tag)
        sent = self._message("send", tensor, tensor.data.reshape(-1), lambda: route, None)
        if not sent.is_completed():
            announcer.watch(sent, self._board, target, tag, route.number)
        return sent

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> Work:
        """Receive a tensor from a rank of the group.

        MismatchError on both ranks if it differs in data type or number of elements.
        """
        tensor, flat, finish = self._target("recv", tensors)
        self._check_peer("recv", source)
        route = self._route(source, self._place, tag)
        received = self._message("recv", tensor, flat, lambda: route, finish)
        received.is_completed()  # a poll: the engine reports it at once, as the sender may wait
        return received

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        """Receive a tensor from any rank of the group that sends one with that tag.

        The ranks find each other through torch's store, which takes some milliseconds.
        """
        tensor, flat, finish = self._target("recv", tensors)
        self._check_alive("recv")
        board = self._board
        board.add_receivers(1)

        def find() -> Route | None:
            source = board.take(
                tag, lambda rank, number: number > self._messages[rank, self._place, tag]
            )
            return None if source is None else self._route(source, self._place, tag)

        return self._message("recv", tensor, flat, find, finish, lambda: board.add_receivers(-1))

    def _target(
        self, verb: str, tensors: Tensors
    ) -> tuple[torch.Tensor, torch.Tensor, Callable[[Any], None] | None]:
        """The tensor, the buffer that receives it, and the function that copies it back."""
        tensor = adapter.check(single(tensors, verb), verb)
        adapter.check_writable(tensor, verb)
        if tensor.is_contiguous():
            return tensor, tensor.detach().view(-1), None
        flat = tensor.detach().new_empty(tensor.numel())
        return tensor, flat, lambda _: adapter.copy(tensor, flat.view(tensor.shape))

    def _check_peer(self, verb: str, peer: int) -> None:
        self._check_alive(verb)
        if not 0 <= peer < len(self._ranks) or peer == self._place:
            raise ValueError(f"{verb}: rank {peer} is not another rank of {self!r}")

    def _route(self, source: int, target: int, tag: int) -> Route:
        """The route of the next message."""
        key = source, target, tag
        self._messages[key] += 1
        number = self._messages[key]
        # Other groups of these two ranks have messages, too.
        name = f"set{self._members()}.{self._name}.from{source}.to{target}.tag{tag}.{number}"
        pair = process_sets.of_members([self._ranks[source], self._ranks[target]])
        return Route(pair, source, number, name)

    def _message(
        self,
        verb: str,
        tensor: torch.Tensor,
        flat: torch.Tensor,
        find: Callable[[], Route | None],
        finish: Callable[[Any], None] | None,
        found: Callable[[], None] = lambda: None,
    ) -> Message:
        def start(pair: ProcessSet, route: Route) -> int:
            return verbs.start_broadcast(
                flat, self._ranks[route.source], route.name, pair, in_place=True
            )

        return Message(verb, tensor, self._timeout_s, find, start, finish, found)

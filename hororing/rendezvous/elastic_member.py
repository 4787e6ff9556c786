"""The connection of a process of an elastic job: it gets a rank with each generation."""

from __future__ import annotations

import math
from typing import Any

from hororing.rendezvous import generations, protocol
from hororing.rendezvous.client import Deadline, Member, RendezvousError
from hororing.rendezvous.generations import World
from hororing.rendezvous.protocol import ProtocolError


class RetiredError(Exception):
    """The job does without this process, which ends."""


class ElasticMember(Member):
    """A process of an elastic job, as the store knows it.

    Blocks until the store has let it in. It has rank -1 and size 0 until `next_world`.

    Parameters
    ----------
    address, secret, job, host, timeout_s, insecure : as those of `Member`.
    process : the number that the launcher knows this process by.
    """

    def __init__(
        self, address: str, *, secret: bytes, job: str, process: int = 0, **how: Any
    ) -> None:
        uid = protocol.new_uid(process)
        super().__init__(address, secret=secret, job=job, rank=-1, size=0, uid=uid, **how)
        self._asked = 0

    @property
    def connected(self) -> bool:
        """Whether the store still knows it; else only a new connection can be of use."""
        return self._stream is not None

    def next_world(self, step: int, voted: bool, failed: bool) -> World:
        """Leave the generation, and wait for the next one, in which it has a new rank.

        Blocks until all members have called it; Ctrl-C ends that, and it may be called again.

        Parameters
        ----------
        step, voted : how far its state is: the number of steps, and whether it has all gradients
            of the next one.
        failed : something has failed, so the other members cannot go on either.

        Raises
        ------
        RetiredError : the job does without this process.
        RendezvousError : the job has ended, or the store is lost.
        """
        with self._lock:
            self._asked += 1
            self._say(
                {"do": "ready", "ask": self._asked, "generation": self.generation, "step": step,
                 "voted": voted, "failed": failed}
            )  # fmt: skip
            answer = self._hear("ask", self._asked)
            if "error" in answer:
                raise RendezvousError(str(answer["error"]))
            if "retired" in answer:
                raise RetiredError
            members = tuple(
                generations.Member(*each) for each in self._take(answer, "members", list)
            )
            self.generation = self._take(answer, "generation", int)
            self.rank = [each.uid for each in members].index(self.uid)
            self.size = len(members)
            self._shares = 0
            return World(self.generation, members)

    def updates(self) -> tuple[int, int]:
        """When hosts have changed last, in microseconds since the epoch, and how (membership)."""
        with self._lock:
            self._say({"do": "updates", "generation": self.generation})
            answer = self._hear("stamp", None)
            return self._take(answer, "stamp", int), self._take(answer, "what", int)

    def _say(self, message: dict[str, Any]) -> None:
        if self._stream is None:
            raise RendezvousError(f"{self._name()} has no connection to the store any more")
        try:
            self._stream.send(message, Deadline(math.inf))
        except OSError as error:
            raise self._failed(error) from None

    def _hear(self, name: str, value: int | None) -> dict[str, Any]:
        """The next message that has `name`, with this value if there is one."""
        assert self._stream is not None
        while True:
            try:
                message = self._stream.receive(Deadline(math.inf))
            except (OSError, EOFError, ProtocolError) as error:
                raise self._failed(error) from None
            if name in message and value in (None, message[name]):
                return message

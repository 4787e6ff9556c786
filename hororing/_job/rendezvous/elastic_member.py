"""The connection of a process of an elastic job, which gets a rank with each generation."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from hororing._job.rendezvous import generations, protocol
from hororing._job.rendezvous.admission import NOTHING, Findings
from hororing._job.rendezvous.client import Deadline, Member, RendezvousError
from hororing._job.rendezvous.generations import World
from hororing._job.rendezvous.patience import Patience


class RetiredError(Exception):
    """The job no longer needs this process, which must exit."""


class RefusedError(Exception):
    """The process differs from the others of the job, which goes on without it."""


class ElasticMember(Member):
    """A process of an elastic job, as a member of the store.

    Blocks until the store has admitted it. It has rank -1 and size 0 until `next_world`.

    Parameters
    ----------
    address, secret, job, host, timeout_s, insecure : as those of `Member`.
    process : the launcher's number for this process.

    Attributes
    ----------
    beats : the second connection, on which the core sends signs of life, and receives the frames of
        `protocol.over` and `protocol.updated`.
    """

    def __init__(
        self,
        address: str,
        *,
        secret: bytes,
        job: str,
        process: int = 0,
        timeout_s: float = 60.0,
        **how: Any,
    ) -> None:
        uid = protocol.new_uid(process)
        super().__init__(
            address, secret=secret, job=job, rank=-1, size=0, uid=uid, timeout_s=timeout_s, **how
        )
        place = {self.address: protocol.parse_address(self.address)}
        try:
            stream, _ = self._connect(place, secret, timeout_s, beats=True)
        except BaseException:
            self.drop()
            raise
        self.beats = stream.socket
        self._asked = 0

    @property
    def connected(self) -> bool:
        """Whether it is still a member; otherwise it needs a new connection."""
        return self._stream is not None

    def next_world(self, step: int, marks: int, failed: bool, found: Findings = NOTHING) -> World:
        """Leave the generation, and wait for the next one, in which it has a new rank.

        Blocks until all members have called it. Ctrl-C interrupts it; it may be called again.

        Parameters
        ----------
        step, marks : the progress of its state: the number of steps, and how often it has saved the
            script's other values since the last step.
        failed : something has failed, so the other members cannot continue either.
        found : what this process tells the store about itself and the others.

        Raises
        ------
        RetiredError : the job no longer needs this process.
        RefusedError : this process differs from the others.
        RendezvousError : the job has ended, or the store is lost.
        """
        with self._lock:
            self._asked += 1
            self._send(
                {"do": "ready", "ask": self._asked, "generation": self.generation, "step": step,
                 "marks": marks, "failed": failed, **asdict(found),
                 "misfits": list(found.misfits.items())},
                Deadline(math.inf),
            )  # fmt: skip
            answer = self._receive_reply(self._asked)
            if "error" in answer:
                raise RendezvousError(str(answer["error"]))
            if "refused" in answer:
                raise RefusedError(str(answer["refused"]))
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

    def close(self) -> None:
        """End the connections; without `done` this process then counts as lost."""
        super().close()
        self.beats.close()  # only now: its users have ended in `at_close`

    def _receive_reply(self, asked: int) -> dict[str, Any]:
        """Return the reply to this request. Skips replies to abandoned requests."""
        patience = Patience()
        while True:
            while self._stream is not None and not self._stream.is_ready(patience.left_s()):
                patience.say(
                    f"{self._name()} on host {self.host}",
                    "the next generation of the elastic job, which begins when there are enough "
                    "processes and those of the last one commit or fail",
                )
            message = self._receive(Deadline(math.inf))
            if message.get("ask") == asked:
                return message

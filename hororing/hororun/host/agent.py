"""hororun's agent on another host: starts ranks there, controlled through standard input.

It first sends MARK, because a login script may have printed something. Then both sides send frames
(`hororing._job.rendezvous.protocol`):

    agent    -> launcher  ready: a free port; error; differs: a variable; rank + stream + data;
                          rank + code
    launcher -> agent     payload: a part of what ranks read; start: secret, directory, environment,
                          ranks; signal, perhaps to one rank; reap: a rank that has ended; close;
                          alive: the agent sends the same

When standard input ends, the launcher or the connection has ended: the agent ends all ranks.
"""

from __future__ import annotations

import base64
import os
import selectors
import signal
import socket
import sys
from typing import Any

from hororing._job import limits
from hororing._job.rendezvous import protocol
from hororing._job.rendezvous.protocol import Frames
from hororing.config import environment
from hororing.hororun.host.local import LocalRanks, Program, append, memory_file, step

MARK = b"hororun agent 1\n"
_READ_BYTES = 2**16
_FILES_OF_A_RANK = 4  # its output, its answer, its process


class _Agent:
    """A `Sink` of the ranks here."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._ranks = LocalRanks(self._selector, self)
        self._frames = Frames()
        self._going = True
        self._payload: int | None = None
        self._out = os.dup(1)
        os.dup2(2, 1)  # nothing else may be printed between the frames

    def run(self) -> None:
        limits.raise_files()
        os.write(self._out, MARK)
        self._send({"ready": free_port()})
        # A broken connection may also raise a signal.
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: sys.exit(128))
        self._selector.register(0, selectors.EVENT_READ, self._receive)
        try:
            while self._going:
                step(self._selector)
        finally:
            self._ranks.close()

    def output(self, rank: int, stream: str, data: bytes) -> None:
        self._send({"rank": rank, "stream": stream, "data": base64.b64encode(data).decode()})

    def exited(self, rank: int, code: int) -> None:
        self._send({"rank": rank, "code": code})

    def _send(self, message: dict[str, Any]) -> None:
        frame = protocol.encode(message)
        try:
            while frame:
                frame = frame[os.write(self._out, frame) :]
        except BrokenPipeError:
            self._going = False

    def _receive(self) -> None:
        data = os.read(0, _READ_BYTES)
        if not data:
            self._going = False
        for message in self._frames.feed(data):
            if "signal" in message:
                self._ranks.signal(message["signal"], message.get("rank"))
            elif "reap" in message:
                self._ranks.reap(message["reap"])
            elif "alive" in message:
                self._send(message)
            elif "close" in message:
                self._going = False
            elif "payload" in message:
                if self._payload is None:
                    self._payload = memory_file("payload", b"")
                append(self._payload, base64.b64decode(message["payload"]))
            else:
                self._start(message)

    def _start(self, message: dict[str, Any]) -> None:
        env = environment.inherited() | message["environment"]
        for name, text in message["compared"].items():
            if env.get(name) != text:
                self._send({"differs": name})
        # The address of the launcher's host, if ssh reports it.
        seen = env.get("SSH_CONNECTION", "").partition(" ")[0]
        descriptor = memory_file("secret", bytes.fromhex(message["secret"]))
        try:
            limits.make_room(_FILES_OF_A_RANK * len(message["ranks"]), "the ranks of this host")
            for rank in message["ranks"]:
                variables = {**env, **rank["environment"]}
                variables["HORORING_SECRET_FD"] = str(descriptor)
                if seen:
                    addresses = variables["HORORING_RENDEZVOUS"]
                    port = addresses.rpartition(":")[2]
                    variables["HORORING_RENDEZVOUS"] = (
                        f"{protocol.show_address(seen, int(port))},{addresses}"
                    )
                program = Program(
                    rank["rank"], message["command"], variables, message["directory"],
                    message.get("sharing", 0), self._payload, answers=self._payload is not None,
                )  # fmt: skip
                self._ranks.start(program, descriptor)
        except OSError as error:
            self._send({"error": limits.why_not_started(error, message["command"][0])})
        finally:
            os.close(descriptor)


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    """Return when the launcher requests it or has ended."""
    _Agent().run()

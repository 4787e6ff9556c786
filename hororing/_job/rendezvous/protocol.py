"""The protocol between store and members: frames, and proofs that both have the secret.

A frame is its length (4 bytes, big endian) and a JSON object in ASCII. A connection begins with

    store  -> member  nonce
    member -> store   hello and proof: version, job, rank, size, host, pid, nonce, uid
    store  -> member  proof
    store  -> member  welcome

Whoever connects proves first, so the store gives nobody a text to try guessed secrets on.

The second connection of a process of an elastic job then carries other data: from the process, one
byte at intervals as a sign of life; to it, frames of fixed size (`over`, `updated`).

A proof is HMAC-SHA256 with the job's secret over the name of the proving side, both nonces and the
whole hello, so a recorded proof is useless, towards either side. Data is neither authenticated
otherwise nor encrypted, as with MPI, NCCL and gloo.

Pure: no sockets, no clock, no environment.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import math
import re
import secrets
import struct
from dataclasses import asdict, dataclass
from typing import Any

VERSION = 3
LENGTH_BYTES = 4
# The longest frame before the other side is known, and after that.
FIRST_BYTES = 4096
MAX_BYTES = 2**20
# The longest text of a rank: in JSON, a character has up to 12 bytes.
TEXT_CHARACTERS = 2**15
CHARACTER_BYTES = 12
SECRET_BYTES = 32
_NONCE_BYTES = 16
_UID_BYTES = 8
MAX_RANKS = 2**20

_WORD, _WORD_BITS = re.compile("[A-Z]?[a-z]{4,}|[A-Z]{4,}"), 13
_KINDS = (("[0-9]", 10), ("[a-z]", 26), ("[A-Z]", 26), ("[^0-9A-Za-z]", 32), ("[^ -~]", 100))
_MIN_BITS, _MIN_CHARACTERS = 72, 8

# The layout of Frame in csrc/membership/membership.h: kind, rank, generation, stamp, what, text.
_OVER_BYTES = 132
_FRAME = struct.Struct(f"<Iiqqi{_OVER_BYTES}s")

STORE, MEMBER = "store", "member"


class ProtocolError(Exception):
    """Received bytes that neither a store nor a member sends."""


def printable(text: str) -> str:
    """`text` of a stranger, with "?" for what would move the cursor of a terminal."""
    return "".join(each if each.isprintable() else "?" for each in text)


def encode(message: dict[str, Any]) -> bytes:
    """Make a frame. ValueError if it would be longer than MAX_BYTES."""
    body = _text(message)
    if len(body) > MAX_BYTES:
        raise ValueError(f"a message of {len(body)} bytes, of {MAX_BYTES} that are allowed")
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def length(head: bytes, most: int) -> int:
    """The size in bytes of the body that follows the first LENGTH_BYTES of a frame."""
    size = int.from_bytes(head, "big")
    if size > most:
        raise ProtocolError(f"a frame of {size} bytes, of {most} that are allowed")
    return size


def decode(body: bytes) -> dict[str, Any]:
    """Read the body of a frame."""
    try:
        message = json.loads(body.decode("ascii"), parse_constant=_no_number)
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        message = None
    if not isinstance(message, dict):
        raise ProtocolError(f"a frame that is not a JSON object: {body[:40]!r}")
    return message


class Frames:
    """Assembles messages from the bytes of a connection."""

    def __init__(self) -> None:
        self._received = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Add received bytes, and return the messages that are now complete."""
        self._received += data
        messages = []
        while len(self._received) >= LENGTH_BYTES:
            end = LENGTH_BYTES + length(bytes(self._received[:LENGTH_BYTES]), MAX_BYTES)
            if len(self._received) < end:
                break
            messages.append(decode(bytes(self._received[LENGTH_BYTES:end])))
            del self._received[:end]
        return messages


def _no_number(text: str) -> None:
    raise ValueError(text)  # NaN and infinity are not JSON


def take(message: dict[str, Any], name: str, kind: type) -> Any:
    """Return a value of a message. ProtocolError unless it is of `kind`."""
    value = message.get(name)
    if kind is float and type(value) is int:
        return value
    if type(value) is not kind:
        raise ProtocolError(f"{name} is not of type {kind.__name__}")
    return value


@dataclass(frozen=True)
class Hello:
    """A member's identity, as it states it. `pid` is only for messages."""

    job: str
    rank: int
    size: int
    host: str
    pid: int
    nonce: str
    # For a process of an elastic job, which has no rank until the store gives it one (rank -1, size
    # 0): different for every membership.
    uid: str = ""
    beats: bool = False  # its second connection, for signs of life

    def message(self) -> dict[str, Any]:
        """The first frame of a connection."""
        return {"hororing": VERSION, **asdict(self)}

    def title(self) -> str:
        """Describe the member in error texts."""
        if self.uid:
            return f"the process {self.pid} on host {self.host}"
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


def parse_hello(message: dict[str, Any]) -> Hello:
    """Check the first frame of a connection."""
    if take(message, "hororing", int) != VERSION:
        raise ProtocolError(f"version {message['hororing']} of the protocol, this is {VERSION}")
    texts = {name: take(message, name, str) for name in ("job", "host", "nonce", "uid")}
    numbers = {name: take(message, name, int) for name in ("rank", "size", "pid")}
    elastic = texts["uid"] != "" and (numbers["rank"], numbers["size"]) == (-1, 0)
    if not elastic and not 0 <= numbers["rank"] < numbers["size"] <= MAX_RANKS:
        raise ProtocolError(f"rank {numbers['rank']} of {numbers['size']}")
    if elastic and not re.fullmatch(rf"[0-9a-f]{{{2 * _UID_BYTES}}}", texts["uid"]):
        raise ProtocolError("no uid")
    if not re.fullmatch(rf"[0-9a-f]{{{2 * _NONCE_BYTES}}}", texts["nonce"]):
        raise ProtocolError("no nonce")
    if not texts["host"].isprintable() or len(texts["host"]) > 255:
        raise ProtocolError("no name of a host")
    return Hello(**texts, **numbers, beats=take(message, "beats", bool))


def new_nonce() -> str:
    """A number that has never been used."""
    return secrets.token_hex(_NONCE_BYTES)


def new_uid(process: int = 0) -> str:
    """The id of a membership. `process`: the launcher's number for the process."""
    return f"{process % 2**32:08x}" + secrets.token_hex(_UID_BYTES - 4)


def process_of(uid: str) -> int:
    """The launcher's number for the process."""
    return int(uid[:8], 16)


def new_secret() -> bytes:
    """The secret of a new job."""
    return secrets.token_bytes(SECRET_BYTES)


def is_guessable(secret: bytes) -> bool:
    """Whether fewer than about 2**72 tries find it: words, years and repetitions, for example.

    A word counts as one of 2**13. Any other character counts as one of its kinds in this text.
    """
    text = secret.decode("latin-1")
    text = text[: (text + text).find(text, 1)]  # once, if it repeats itself
    words = _WORD.findall(text)
    rest = _WORD.sub("", text)
    alphabet = sum(size for kind, size in _KINDS if re.search(kind, rest))
    bits = _WORD_BITS * len(words) + len(rest) * math.log2(max(alphabet, 1))
    return bits < _MIN_BITS or len(set(text)) < _MIN_CHARACTERS


def proof(secret: bytes, side: str, store_nonce: str, hello: Hello) -> str:
    """Return the proof that `side` (STORE or MEMBER) knows the secret, for this connection."""
    signed = _text({"side": side, "store": store_nonce, "hello": hello.message()})
    return hmac.new(secret, signed, hashlib.sha256).hexdigest()


def is_proof(claimed: Any, secret: bytes, side: str, store_nonce: str, hello: Hello) -> bool:
    """Whether `claimed` is that proof."""
    wanted = proof(secret, side, store_nonce, hello)
    return (
        isinstance(claimed, str)
        and claimed.isascii()  # compare_digest refuses others
        and hmac.compare_digest(claimed, wanted)
    )


def over(generation: int, rank: int, why: str) -> bytes:
    """Return the frame for the end of this generation; `rank` is to blame."""
    text = why.encode()[: _OVER_BYTES - 1].decode(errors="ignore").encode()
    return _FRAME.pack(1, rank, generation, 0, 0, text)


def updated(generation: int, stamp: int, what: int) -> bytes:
    """Return the frame for changes of hosts and processes since this generation began."""
    return _FRAME.pack(2, -1, generation, stamp, what, b"")


def parse_address(text: str) -> tuple[str, int]:
    """Read ``host:port``, ``1.2.3.4:port`` or ``[::1]:port``. ValueError with the problem."""
    found = re.fullmatch(r"(?:\[([^\[\]]+)\]|([^\[\]:\s/]+)):(\d{1,5})", text)
    if found is None or not 0 < int(found[3]) < 2**16 or not text.isprintable():
        raise ValueError(f"{text!r} is not an address: write host:port or [IPv6 address]:port")
    return found[1] or found[2], int(found[3])


def show_address(host: str, port: int) -> str:
    """Text that `parse_address` reads."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only processes of this host can connect to it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def check_secret(secret: bytes, insecure: bool) -> None:
    """ValueError if there is no secret, unless that is what the user wants."""
    if not secret and not insecure:
        raise ValueError(
            "the job has no secret, and its store is not on a loopback address: give every rank "
            "the same HORORING_SECRET_FILE (from openssl rand -hex 32) or HORORING_SECRET_KEY; or "
            "set HORORING_INSECURE=1 if every process that can reach this network may take part"
        )


def _text(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":"), sort_keys=True).encode("ascii")

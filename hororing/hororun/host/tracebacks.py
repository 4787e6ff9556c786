"""The last words of ranks that fail: the same text of several ranks once, as [0-7]. Pure.

A rank's traceback is held back until the job has ended, and shown with those of the others. One of
a rank that lives on, as of a logger, is shown unchanged. HORORING_LOG_LEVEL=debug shortens nothing.
"""

from __future__ import annotations

import re
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

_HEADER = b"Traceback (most recent call last):"
_FATAL = b"Fatal Python error: "
# What ends a process, as a rule: also a file that is not Python, a wrong flag, no such script.
_BEGIN = re.compile(
    rb'Traceback \(most recent call last\):|  File ".*", line \d+\r?\n?$|usage: '
    rb"|Fatal Python error: |\S+: can't open file "
)
_LINKS = (b"During handling of the above", b"The above exception was the direct")
_CARETS = re.compile(rb"\s+[~^]+\s*$")
_FRAME = re.compile(rb'\s+File "(.*)", line (\d+),? in (.*)')
# The same failure, seen by requests of several names.
_REQUEST = re.compile(rb"^((?:\w+\.)*\w+: )\w+ '[^']*'(?: \(\w+\))?: (?=deadlock|stalled|rank \d)")
_OURS = b"hororing.errors."
_LOST = re.compile(rb"^hororing\.errors\.(PeerLost|ShutDown)Error: .*?rank (\d+)")
# How TensorFlow reports an error of ours, below the stack of its graph.
_IN_GRAPH = re.compile(rb"^(\w+Error: .*) \[hororing \d+ -?\d+\]$")
_INSTALLED = re.compile(rb"[\\/](hororing|(site|dist)-packages)[\\/]")

_LIVES_S = 10.0  # a rank that has not ended by then lives on; frameworks take seconds to end
_PAUSE_S = 0.25  # what it prints after such a pause is another text
_FRAMES, _OF_TWO = 4, 2  # innermost ones that are shown, if one group is shown and if two are
_MESSAGE_LINES, _LAST_LINES = 9, 3
_OTHERS = 8  # groups that have a line each

Shown = tuple[Sequence[int], bytes]


@dataclass
class Held:
    """Lines that are held back."""

    lines: list[bytes] = field(default_factory=list)
    at: float = field(default_factory=time.monotonic)  # of the last line

    def takes(self, line: bytes, now: float) -> bool:
        """Whether a new line belongs to it."""
        if self.is_over(now):
            return False
        if not line.startswith(_HEADER) or not self._is_complete():
            return True
        last = [each for each in self.lines if each.strip()][-1]
        return last.startswith(_LINKS)

    def is_of_end(self) -> bool:
        """Whether it only says that the rank was interrupted, or has lost another one."""
        message = _parse(self.lines).message
        return bool(message) and message[0].startswith((b"KeyboardInterrupt", _OURS))

    def is_over(self, now: float) -> bool:
        """Whether what its rank prints now shows that it lives on."""
        return now - self.at > _PAUSE_S and self._is_complete()

    def due_at(self) -> float:
        """When to show it, unless its rank has ended."""
        return self.at + _LIVES_S

    def _is_complete(self) -> bool:
        return any(line.strip() and not line.startswith((b" ", _HEADER)) for line in self.lines)


def begins(line: bytes) -> bool:
    """Whether such a text begins with this line."""
    return _BEGIN.match(line) is not None


@dataclass(frozen=True)
class _Words:
    """The parts of a text: of the last exception of a chain, and all before it."""

    before: tuple[bytes, ...]
    frames: tuple[tuple[bytes, ...], ...]  # a line "File ...", and of the source
    message: tuple[bytes, ...]

    def where(self) -> bytes:
        """The innermost frame of the user's, in a line."""
        if not self.frames:
            return b""
        own = [frame for frame in self.frames if not _INSTALLED.search(frame[0])] or self.frames
        found = _FRAME.match(own[-1][0])
        if found is None:
            return own[-1][0].strip()
        source = own[-1][1].strip() if len(own[-1]) > 1 else b""
        return b"%b:%b, in %b%b" % (*found.groups(), b": " + source if source else b"")


def _parse(lines: Iterable[bytes]) -> _Words:
    clean = [line.rstrip() for line in lines if line.strip()]
    if clean[0].startswith(_FATAL):
        return _of_crash(clean)
    begin = max((n for n, line in enumerate(clean) if line == _HEADER), default=-1)
    end = begin + 1
    while end < len(clean) and clean[end].startswith(b" "):
        end += 1
    message = clean[end:]
    ours = bool(message) and message[0].startswith(_OURS)
    for line in message:
        if found := _IN_GRAPH.match(line):
            message, ours = [_OURS + found[1]], True
            break
    frames: list[tuple[bytes, ...]] = []
    for line in clean[begin + 1 : end]:
        if _FRAME.match(line) or not frames:
            frames.append((line,))
        elif not (_CARETS.match(line) and ours):
            frames[-1] += (line,)
    if ours:
        frames = [each for each in frames if not _INSTALLED.search(each[0])] or frames
    before = _shortened(clean[: max(begin, 0)])
    return _Words(before, tuple(frames), _cut(message))


def _shortened(chain: Sequence[bytes]) -> tuple[bytes, ...]:
    """Of each earlier exception of a chain: where it was raised, its message, the link."""
    kept: list[bytes] = []
    frames: list[bytes] = []
    for line in chain:
        if line.startswith(b" "):
            frames = [line] if _FRAME.match(line) else [*frames, line]
        elif line != _HEADER:
            kept += [*(each for each in frames if not _CARETS.match(each)), line]
            frames = []
    return tuple(kept)


def _cut(message: Sequence[bytes]) -> tuple[bytes, ...]:
    if len(message) <= _MESSAGE_LINES + _LAST_LINES:
        return tuple(message)
    left = len(message) - _MESSAGE_LINES - _LAST_LINES
    more = b"... %d lines more (HORORING_LOG_LEVEL=debug)" % left
    return (*message[:_MESSAGE_LINES], more, *message[-_LAST_LINES:])


def _of_crash(lines: Sequence[bytes]) -> _Words:
    """What faulthandler writes: the thread that has crashed, most recent call first."""
    begin = next((n for n, line in enumerate(lines) if line.startswith(b"Current thread")), 0)
    stack: list[bytes] = []
    for line in lines[begin + 1 :]:
        if not line.startswith(b"  "):
            break
        stack.append(line)
    own = [line for line in stack if not _INSTALLED.search(line)] or stack
    return _Words((), tuple((line,) for line in own[::-1]), (lines[0],))


def fold(held: Mapping[int, Held], cause: int | None, known: set[Hashable]) -> list[Shown]:
    """Return the lines to show, each with its ranks.

    Parameters
    ----------
    held : by rank.
    cause : the rank that is to blame, whose text comes last. None: unknown.
    known : what has been shown before, as of a process that this one has replaced: a line is enough
        for the same text. Gets those of `held`.
    """
    groups: dict[_Words, list[int]] = {}
    for rank in sorted(held):
        groups.setdefault(_parse(held[rank].lines), []).append(rank)
    shown: list[Shown] = []
    for words in [each for each in groups if each in known]:
        where = b": ".join(filter(None, (words.where(), _why(words))))
        shown.append((groups.pop(words), b"again: " + where))
    if not groups:
        return shown
    known.update(groups)
    by_message: dict[bytes, list[_Words]] = {}
    for words in groups:
        by_message.setdefault(_normal(words.message), []).append(words)
    main = next((words for words, ranks in groups.items() if cause in ranks), next(iter(groups)))
    told = by_message.pop(_normal(main.message))
    others = [words for alike in by_message.values() for words in alike]
    for words in others[:_OTHERS]:
        shown.append((groups[words], b": ".join(filter(None, (words.where(), _why(words))))))
    if len(others) > _OTHERS:
        shown.append(([], b"... and %d ranks more" % sum(len(groups[w]) for w in others[_OTHERS:])))
    return shown + _told(told, groups)


def _normal(message: Sequence[bytes]) -> bytes:
    return _REQUEST.sub(rb"\1", b"\n".join(message))


def _why(words: _Words) -> bytes:
    first = words.message[0] if words.message else b""
    lost = _LOST.match(first)
    return b"has lost rank " + lost[2] if lost else first


def _told(told: Sequence[_Words], groups: Mapping[_Words, list[int]]) -> list[Shown]:
    """Tell of groups with one message."""
    every = sorted(rank for words in told for rank in groups[words])
    count = _FRAMES if len(told) == 1 else _OF_TWO
    shown: list[Shown] = []
    left = max(len(words.frames) for words in told) - count
    if told[0].frames and _FRAME.match(told[0].frames[0][0]):
        most = b"most recent call last"
        more = b"%b; HORORING_LOG_LEVEL=debug shows %d more" % (most, left) if left > 0 else most
        shown.append((every, b"Traceback (" + more + b"):"))
    for number, words in enumerate(told[: _OTHERS + 2]):
        ranks = groups[words]
        if number >= _OF_TWO:
            shown.append((ranks, b"  " + words.where()))
            continue
        shown += [(ranks, line) for line in words.before]
        shown += [(ranks, line) for frame in words.frames[-count:] for line in frame]
    message = _normal(told[0].message) if len(told) > 1 else b"\n".join(told[0].message)
    return shown + [(every, line) for line in message.split(b"\n")]


def ranks_text(ranks: Sequence[int]) -> str:
    """Write ranks in short: 0,2-7."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)

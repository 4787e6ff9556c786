"""The output of ranks: whole lines, each with its rank, to the terminal or to files."""

from __future__ import annotations

import contextlib
import io
import re
import select
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence
from pathlib import Path
from typing import IO

from hororing.hororun.host import tracebacks
from hororing.hororun.host.local import STDERR, STDOUT

_TAIL_LINES = 10
_FAR_LINES = 20  # then they are shown again
# Of an incomplete line that is held back: from a rank beside others, and from one alone.
_LONGEST_BYTES, _LONGEST_ALONE_BYTES = 2**22, 2**16
_TAIL_BYTES = 2**16  # of a line in an error text
_UNREAD_MS = 1000  # after that, output is lost if the job has to end
# Progress bars also end their lines with \r.
_END = re.compile(rb"\r\n|\r(?=[^\n])|\n")
_COLOURS = [36, 33, 32, 35, 34, 96, 93, 92, 95, 94]


class Output:
    """Assembles lines. Bytes are unchanged, whatever the encoding.

    If several ranks share a stream, or lines are tagged, an incomplete line gets an end: the last
    one of a rank, and one of more than 4 MiB. What cannot be written, on a full disk for example,
    is lost: an error is logged, and the next piece is tried again.

    Parameters
    ----------
    streams : the targets of standard output and standard error: unbuffered, and open.
    tag : start each line with its rank.
    colour : streams with coloured tags.
    only_from : ranks whose standard output is shown; None: all. Errors are always shown.
    directory : write each rank's output there, as rank.N/stdout and rank.N/stderr. Only rank 0's is
        also shown.
    elastic : ranks are process numbers; files are in process.N.
    folds : hold tracebacks back for `fold`; the job calls `show_due`.

    Attributes
    ----------
    ranks : present rank by process number in an elastic job; None: not elastic.
    later : when, by time.monotonic, `show_due` is to call a function once; jobs wake up for it.
    is_to_end : whether the user has requested the end of the job, even if nobody reads its output.
    """

    def __init__(
        self,
        streams: dict[str, io.RawIOBase],
        size: int,
        *,
        tag: bool,
        colour: Collection[str] = (),
        only_from: Collection[int] | None = None,
        directory: str | None = None,
        elastic: bool = False,
        folds: bool = False,
    ) -> None:
        self.ranks: dict[int, int] | None = {} if elastic else None
        self.is_to_end: Callable[[], bool] = lambda: False
        self.heard: Callable[[str], None] = lambda _: None  # is told the launcher's lines, too
        self.later: tuple[float, Callable[[], None]] | None = None
        self._streams = streams
        self._width = len(str(size - 1))
        self._tag = tag
        self._alone = size == 1 and not tag and not elastic  # others' lines cannot come between
        self._colour = colour
        self._only_from = only_from
        self._directory = None if directory is None else Path(directory)
        self._files: dict[tuple[int, str], IO[bytes]] = {}
        self._lost: dict[str, int] = {}  # bytes that could not be written, by path or stream
        self._parts: dict[tuple[int, str], bytearray] = {}
        self._tails: dict[int, deque[bytes]] = {}
        self._folds = folds
        self._held: dict[int, tracebacks.Held] = {}
        self._known: set[Hashable] = set()  # texts of tracebacks that were shown
        self._ended: set[int] = set()
        self._shown = 0  # lines of standard error
        self._shown_at: dict[int, int] = {}  # the last one of each rank

    @property
    def files_per_rank(self) -> int:
        """The number of files that stay open for each rank."""
        return 0 if self._directory is None else 2

    def write(self, rank: int, stream: str, data: bytes) -> None:
        """Add a piece; b"": the stream has ended."""
        parts = self._parts.pop((rank, stream), bytearray())
        looked_at = max(len(parts) - 1, 0)  # the last byte may be half of an end
        parts += data
        end = 0
        lines = []
        for found in _END.finditer(parts, looked_at):
            lines.append(bytes(parts[end : found.end()]))
            end = found.end()
        del parts[:end]
        longest = _LONGEST_ALONE_BYTES if self._alone else _LONGEST_BYTES
        if parts and (not data or len(parts) > longest):
            no_end = self._alone or parts.endswith(b"\r")
            lines.append(bytes(parts) if no_end else bytes(parts) + b"\n")
        elif parts:
            self._parts[rank, stream] = parts
        if stream == STDERR:
            tail = self._tails.setdefault(rank, deque(maxlen=_TAIL_LINES))
            tail.extend(line[-_TAIL_BYTES:] for line in lines if line.strip())
        if self._directory is not None:
            self._to_file(rank, stream, data)
            if not data and self.ranks is not None and (rank, stream) in self._files:
                _close(self._files.pop((rank, stream)))  # there may be many by the end
        if stream == STDERR and self._folds:
            lines = self._held_back(rank, lines)
        elif lines and rank in self._held and self._held[rank].is_over(time.monotonic()):
            self._show_lines(rank, STDERR, self._held.pop(rank).lines)
        self._show_lines(rank, stream, lines)

    def _show_lines(self, rank: int, stream: str, lines: Sequence[bytes]) -> None:
        if self._directory is not None and self._rank(rank) != 0:
            return
        if stream == STDERR or self._only_from is None or self._rank(rank) in self._only_from:
            self._show(stream, b"".join(self._tagged(rank, stream, line) for line in lines))
        if stream == STDERR and lines:
            self._shown += len(lines)
            self._shown_at[rank] = self._shown

    def _held_back(self, rank: int, lines: Sequence[bytes]) -> list[bytes]:
        """Return the lines to show now."""
        shown: list[bytes] = []
        now = time.monotonic()
        for line in lines:
            held = self._held.get(rank)
            if held is not None and not held.takes(line, now):
                shown += self._held.pop(rank).lines
                held = None
            if held is None and tracebacks.begins(line):
                held = self._held[rank] = tracebacks.Held()
            if held is None:
                shown.append(line)
            else:
                held.lines.append(line)
                held.at = now
        return shown

    def due_s(self) -> float | None:
        """Time until `show_due` has something to do; None: nothing."""
        times = [held.due_at() for rank, held in self._held.items() if rank not in self._ended]
        times += [] if self.later is None else [self.later[0]]
        return max(min(times) - time.monotonic(), 0.0) if times else None

    def show_due(self) -> None:
        """Show what was held back of ranks that live on; do what is due."""
        if self.later is not None and time.monotonic() >= self.later[0]:
            start, self.later = self.later[1], None
            start()
        for rank in [*self._held.keys() - self._ended]:
            if time.monotonic() >= self._held[rank].due_at():
                self._show_lines(rank, STDERR, self._held.pop(rank).lines)

    def ended(self, rank: int, *, failed: bool) -> None:
        """Note the end of a rank. Its last words wait for `fold` if it has failed."""
        self._ended.add(rank)
        if not failed and rank in self._held:
            self._show_lines(rank, STDERR, self._held.pop(rank).lines)

    def fold(self, cause: int | None = None, *, interrupted: bool = False) -> None:
        """Show the last words of all ranks that have ended, those of `cause` last.

        `interrupted`: not what ranks say about the end that the user has requested.
        """
        held = {rank: self._held.pop(rank) for rank in [*self._held] if rank in self._ended}
        for rank in [rank for rank, each in held.items() if interrupted and each.is_of_end()]:
            del held[rank]
            self._shown_at[rank] = self._shown
        if not held:
            return
        for ranks, line in tracebacks.fold(held, cause, self._known):
            names = tracebacks.ranks_text(ranks)
            if self.ranks is not None:
                names = ",".join(self._name(rank) for rank in ranks)
            tag = f"[{names:>{self._width}}] " if ranks and self._tag else ""
            self._show(STDERR, tag.encode() + line + b"\n")
        for rank in held:
            self._shown_at[rank] = self._shown

    def _name(self, rank: int) -> str:
        now = self._rank(rank)
        return f"p{rank}" if now is None else str(now)

    def repeats(self, rank: int) -> list[bytes]:
        """The last lines of a rank's standard error, unless they were just shown."""
        lately = self._folds and self._shown - self._shown_at.get(rank, -_FAR_LINES) < _FAR_LINES
        return [] if lately else self.tail(rank)

    def open_files(self, size: int) -> None:
        """Create the files of all ranks now, so that errors show up early. OSError."""
        if self._directory is not None:
            for rank in range(size):
                for stream in (STDOUT, STDERR):
                    self._file(rank, stream)

    def tail(self, rank: int) -> list[bytes]:
        """The last lines of a rank's standard error."""
        last = bytes(self._parts.get((rank, STDERR), b"")[-_TAIL_BYTES:])
        lines = [*self._tails.get(rank, ()), last]
        return [line.rstrip() for line in lines if line.strip()][-_TAIL_LINES:]

    def log(self, text: str) -> None:
        """Print a line of the launcher."""
        self._show(STDERR, f"hororun: {text}\n".encode("utf-8", "surrogateescape"))
        self.heard(text)

    def close(self) -> None:
        """Show incomplete lines, and close files."""
        for rank, stream in list(self._parts):
            self.write(rank, stream, b"")
        for rank in list(self._held):
            self._show_lines(rank, STDERR, self._held.pop(rank).lines)
        for path, count in self._lost.items():
            self.log(f"ERROR: {path} lacks the last {count} bytes")
        self._lost.clear()
        for file in self._files.values():
            _close(file)
        self._files.clear()

    def _tagged(self, rank: int, stream: str, line: bytes) -> bytes:
        if not self._tag:
            return line
        tag = f"[{self._name(rank):>{self._width}}]".encode()
        if stream in self._colour:
            tag = b"\x1b[%dm%b\x1b[0m" % (_COLOURS[rank % len(_COLOURS)], tag)
        return tag + b" " + line

    def _rank(self, rank: int) -> int | None:
        return rank if self.ranks is None else self.ranks.get(rank)

    def _show(self, stream: str, data: bytes) -> None:
        name, left = {STDOUT: "standard output", STDERR: "standard error"}[stream], memoryview(data)
        while left and (file := self._streams.get(stream)) is not None:
            try:
                if self._is_read(file):
                    left = left[file.write(left[: select.PIPE_BUF]) or 0 :]
                    self._found_again(name)
                    continue
            except BrokenPipeError:  # its reader has ended; the job continues
                pass
            except OSError as error:
                self._lose(name, left, error)
                return
            except Exception:
                del self._streams[stream]  # raise it once: the job ends and closes
                raise
            del self._streams[stream]

    def _is_read(self, file: io.RawIOBase) -> bool:
        """Wait until PIPE_BUF bytes fit in. False: nobody reads, and the job has to end."""
        with contextlib.suppress(OSError, AttributeError):  # it is no file
            room = select.poll()
            room.register(file.fileno(), select.POLLOUT)
            while not room.poll(_UNREAD_MS):
                if self.is_to_end():
                    return False
        return True

    def _to_file(self, rank: int, stream: str, data: bytes) -> None:
        left, path = memoryview(data), str(self._path(rank, stream))
        try:
            file = self._file(rank, stream)
            if left and path in self._lost:
                file.write(b"\nhororun: %d bytes are missing here\n" % self._lost[path])
                self._found_again(path)
            while left:
                left = left[file.write(left) :]
        except OSError as error:
            self._lose(path, left, error)

    def _lose(self, path: str, data: memoryview, error: OSError) -> None:
        """Count what could not be written, and log the first time."""
        known = path in self._lost
        self._lost[path] = self._lost.get(path, 0) + len(data)
        if not known:
            why = error.strerror or error
            self.log(f"ERROR: cannot write {path}: {why}; until that works, output is lost")

    def _found_again(self, path: str) -> None:
        count = self._lost.pop(path, None)
        if count is not None:
            self.log(f"ERROR: {path} is written again, and lacks {count} bytes")

    def _path(self, rank: int, stream: str) -> Path:
        assert self._directory is not None
        kind = "rank" if self.ranks is None else "process"
        return self._directory / f"{kind}.{rank:0{self._width}d}" / stream

    def _file(self, rank: int, stream: str) -> IO[bytes]:
        """Create it the first time. OSError, with its name."""
        if (rank, stream) not in self._files:
            path = self._path(rank, stream)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._files[rank, stream] = path.open("wb", buffering=0)
        return self._files[rank, stream]


def _close(file: IO[bytes]) -> None:
    with contextlib.suppress(OSError):  # NFS notices a full disk only now
        file.close()

"""A folder of this user, in which no other user can read, write, or take a name first.

Processes of one user on one host find the same folder without talking: the first of `candidates`
that can be used. Another user may own a name in a shared folder such as /dev/shm, or make a FIFO or
a link of it. Nothing here follows that, waits for it, or believes it: it is a PermissionError that
names path and owner.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import stat
from collections.abc import Iterable
from errno import EPERM
from pathlib import Path

MAX_BYTES = 2**16
_IN_HOME = ".hororing"
_SHARED = ("/dev/shm", "/tmp")  # they exist nearly everywhere, and everybody can write there


def candidates() -> list[Path]:
    """The places for this user's folder, best first: others cannot touch what is in the home."""
    user = os.geteuid()
    shared = [Path(each) / f"hororing-{user}" for each in _SHARED]
    try:
        home = pwd.getpwuid(user).pw_dir
    except KeyError:  # a container without a line for this user
        return shared
    return [Path(home) / _IN_HOME, *shared]


def open_folder(path: Path) -> Path:
    """Return `path`, a folder of mode 0700 of this user, which it makes if it does not exist.

    OSError: its parent does not exist or is read-only, for example. PermissionError: `path` belongs
    to another user, is accessible to others, or is not a folder.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    check(path, os.lstat(path), stat.S_IFDIR)
    return path


def find(places: Iterable[Path] | None = None) -> Path:
    """Return the first of `places` (default: `candidates()`) that `open_folder` accepts.

    PermissionError: none; the text says why for each.
    """
    reasons = []
    for path in candidates() if places is None else places:
        try:
            return open_folder(path)
        except OSError as error:
            reasons.append(describe(error, path))
    raise PermissionError(EPERM, f"no folder for this user alone: {'; '.join(reasons)}")


def read(path: Path, most: int = MAX_BYTES) -> bytes:
    """Return at most `most` bytes of a file of this user that others cannot access.

    Never waits. OSError, such as FileNotFoundError; PermissionError: as `check`.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        number = os.open(path, flags)
    except OSError:
        check(path, os.lstat(path), stat.S_IFREG)  # says more than "permission denied"
        raise
    with os.fdopen(number, "rb") as file:
        check(path, os.fstat(number), stat.S_IFREG)
        return file.read(most)


def publish(path: Path, data: bytes, *, replace: bool = False) -> None:
    """Make the complete file at once, readable by this user only.

    FileExistsError: it exists, and `replace` is not set. OSError: it cannot be written.
    """
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    number = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(number)
        if replace:
            os.replace(fresh, path)
        else:
            os.link(fresh, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(fresh)


def check(path: Path, about: os.stat_result, kind: int) -> None:
    """PermissionError unless it is of this kind (S_IFREG, S_IFDIR) and this user's alone."""
    what = {stat.S_IFDIR: "folder", stat.S_IFREG: "regular file"}[kind]
    if about.st_uid != os.geteuid():
        why = f"it belongs to {user_name(about.st_uid)}"
    elif stat.S_IFMT(about.st_mode) != kind:
        why = f"it is not a {what}"
    elif stat.S_IMODE(about.st_mode) & 0o077:
        why = f"it is accessible to other users (mode {stat.S_IMODE(about.st_mode):04o})"
    else:
        return
    raise PermissionError(EPERM, f"{why}; remove it, or have it removed", str(path))


def describe(error: OSError, path: Path) -> str:
    """The text of an error about `path`."""
    return f"{path}: {error.strerror or error}"


def user_name(number: int) -> str:
    """Name a user in error texts."""
    with contextlib.suppress(KeyError):
        return f"user {pwd.getpwuid(number).pw_name} ({number})"
    return f"user {number}"

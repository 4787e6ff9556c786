"""The secret of a job whose ranks are given none: only their user's processes on this host know it.

It is derived from 32 random bytes in a file that only the user can read (`private_folder`), and
that the first process makes. So another user of the host can neither join nor be taken for rank 0.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
from pathlib import Path

from hororing._job import private_folder
from hororing._job.rendezvous.protocol import SECRET_BYTES, new_secret

_FILE = "key"


def secret_of(job: str, given: bytes = b"") -> bytes:
    """Return a secret that other users do not know, even if they know `job` and `given`.

    OSError: there is no place for the key; the text names each and why.
    """
    text = b"hororing job\0" + job.encode() + b"\0" + given
    return hmac.new(_key(), text, hashlib.sha256).digest()


def _key() -> bytes:
    """The user's key, which is made if it does not exist."""
    reasons = []
    for folder in private_folder.candidates():
        try:
            return _key_in(private_folder.open_folder(folder) / _FILE)
        except OSError as error:
            reasons.append(private_folder.describe(error, folder))
    raise PermissionError(
        errno.EPERM,
        "no secret is given, and there is no place for a key that only this user can read "
        f"({'; '.join(reasons)}): give every rank the same HORORING_SECRET_FILE",
    )


def _key_in(path: Path) -> bytes:
    try:
        key = private_folder.read(path)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):  # another process was faster
            private_folder.publish(path, new_secret())
        key = private_folder.read(path)
    if len(key) != SECRET_BYTES:
        raise OSError(errno.EINVAL, f"{path.name} does not hold a key: remove it", str(path))
    return key

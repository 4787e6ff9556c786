"""Errors of compiled programs: JAX raises its own exception, with our text in it."""

from __future__ import annotations

import re
from typing import Final

import jax

from hororing._engine.core import error_for

# csrc/jax/completion.cc writes it, and XLA puts its own text before and after.
_FAILURE: Final = re.compile(r"\w+Error: (.*?) \[hororing (\d+) (-?\d+)\]", re.DOTALL)


def convert_error(error: BaseException) -> Exception | None:
    """Return the exception of hororing for an error of a compiled program, or None.

    Parameters
    ----------
    error : BaseException
        What `jax.block_until_ready` or the use of a result has raised.

    Returns
    -------
    Exception or None
        A MismatchError, PeerLostError and so on, as the same call outside of a compiled function
        raises it; None if the error is not from hororing.

    Examples
    --------
    >>> try:
    ...     jax.block_until_ready(step(batch))
    ... except jax.errors.JaxRuntimeError as error:
    ...     if isinstance(hvd.convert_error(error), hvd.PeerLostError):
    ...         save_and_exit()
    """
    failure = _FAILURE.search(str(error)) if isinstance(error, _raised) else None
    if failure is None:
        return None
    text, code, rank = failure.groups()
    return error_for(int(code), text, int(rank))


_raised: Final = jax.errors.JaxRuntimeError

__all__ = ["convert_error"]

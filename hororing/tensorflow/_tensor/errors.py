"""Our exceptions as scripts for Horovod catch them in eager mode: as TensorFlow's, too."""

from __future__ import annotations

from typing import Any, Final

import tensorflow as tf

from hororing import errors


def _text(given: tuple[Any, ...]) -> Any:
    """The message; Keras makes errors again as TensorFlow does: node, operation, message, code."""
    return given[0] if len(given) == 1 else given[2]


class MismatchError(errors.MismatchError, tf.errors.FailedPreconditionError):  # type: ignore[misc]
    """Ranks disagree about one tensor."""

    def __init__(self, *given: Any) -> None:
        tf.errors.FailedPreconditionError.__init__(self, None, None, _text(given))

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep the text when the exception is pickled."""
        return type(self), (self.message,)


class DuplicateNameError(errors.DuplicateNameError, tf.errors.InvalidArgumentError):  # type: ignore[misc]
    """A request of that name is in flight on this rank."""

    def __init__(self, *given: Any) -> None:
        tf.errors.InvalidArgumentError.__init__(self, None, None, _text(given))

    __reduce__ = MismatchError.__reduce__


class InvalidArgumentError(ValueError, tf.errors.InvalidArgumentError):  # type: ignore[misc]
    """An argument that the core refuses."""

    def __init__(self, *given: Any) -> None:
        tf.errors.InvalidArgumentError.__init__(self, None, None, _text(given))

    __reduce__ = MismatchError.__reduce__


_BOTH: Final[dict[type[Exception], Any]] = {
    errors.MismatchError: MismatchError,
    errors.DuplicateNameError: DuplicateNameError,
    ValueError: InvalidArgumentError,
}


def as_both(error: Exception) -> Exception:
    """Return `error`, or one of the same text that is TensorFlow's as well as ours."""
    kind = _BOTH.get(type(error))
    return error if kind is None else kind(str(error)).with_traceback(error.__traceback__)

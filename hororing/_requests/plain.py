"""Plain values as JSON: what ranks may send where nothing of a peer is unpickled.

These are None, bool, int, float, str, bytes, list, tuple, dict and set, nested at will, and types
that modules `register`. Subclasses do not count, because reading them would make another type.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

_SCALARS = (bool, int, float, str, type(None))
_by_type: dict[type, tuple[str, Callable[[Any], Any]]] = {}
_by_name: dict[str, Callable[[Any], Any]] = {}


def register(
    kind: type, name: str, to_plain: Callable[[Any], Any], from_plain: Callable[[Any], Any]
) -> None:
    """Let values of `kind` travel as what `to_plain` makes of them, under `name`.

    `from_plain` gets what any process may have sent. It must do no more than make such a value.
    """
    _by_type[kind] = (name, to_plain)
    _by_name[name] = from_plain


register(bytes, "bytes", lambda value: base64.b64encode(value).decode(), base64.b64decode)
register(tuple, "tuple", list, tuple)
register(dict, "dict", lambda value: [list(each) for each in value.items()], dict)
register(set, "set", list, set)


def dumps(value: Any) -> bytes:
    """Return the value as JSON. TypeError names a type that is not plain."""
    return json.dumps(_tagged(value)).encode("ascii")


def loads(text: bytes | bytearray | memoryview) -> Any:
    """Return the value. ValueError for anything that `dumps` does not write."""
    try:
        return _untagged(json.loads(bytes(text)))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a plain value: {type(error).__name__}: {error}") from None


def _tagged(value: Any) -> Any:
    if type(value) in _SCALARS:
        return value
    if type(value) is list:
        return [_tagged(each) for each in value]
    if type(value) not in _by_type:
        raise TypeError(f"a {type(value).__name__} is not a plain value")
    name, to_plain = _by_type[type(value)]
    return {name: _tagged(to_plain(value))}


def _untagged(value: Any) -> Any:
    if isinstance(value, list):
        return [_untagged(each) for each in value]
    if isinstance(value, dict):
        ((name, inner),) = value.items()
        return _by_name[name](_untagged(inner))
    return value

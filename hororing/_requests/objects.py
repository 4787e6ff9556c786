"""Sends any Python object to all ranks, or from all ranks, with cloudpickle.

Reading a pickle can run any code, so ranks that have not proved to belong to the job
(HORORING_INSECURE=1) exchange plain values only, as JSON.

A broadcast sends the size first, as int64, then the payload as bytes; an allgather sends both as
one request. Without `name` all ranks use one default name, whatever types their objects have.
"""

from __future__ import annotations

import array
import struct
from typing import Any, Final

import cloudpickle

from hororing._engine import state
from hororing._requests import arguments, handles, plain
from hororing._requests.handles import DTYPES, View
from hororing._requests.names import check_name, naming, note_submitted
from hororing._requests.process_sets import ProcessSet, check_member, global_process_set

_SIZE: Final = struct.Struct("<q")
_INSECURE: Final = (
    "with HORORING_INSECURE=1 any process may be a rank, so nothing is unpickled and only plain "
    "values (numbers, texts, bytes, lists, tuples, dicts, sets) are sent: give every rank the same "
    "HORORING_SECRET_FILE instead"
)
# A rank whose object cannot be pickled sends this instead of a size, so that no rank waits for it.
_CANNOT_PICKLE: Final = -1


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return, on every rank, the object that rank `root_rank` passes.

    Other ranks' `obj` is ignored. `root_rank` counts among all ranks of the job. The root
    gets its own object back, not a copy.

    Raises
    ------
    TypeError : the name is not a str, or `process_set` is not a ProcessSet.
    ValueError : on the other ranks, if the root's object cannot be pickled; the root itself
        raises the error of pickle. With HORORING_INSECURE=1, if it is not a plain value.

    Examples
    --------
    >>> epoch = hvd.broadcast_object(epoch)
    >>> config = hvd.broadcast_object({"lr": 0.1} if hvd.rank() == 0 else None)
    """
    members = check_member(process_set, "broadcast_object")
    root_rank = arguments.check_root(root_rank, "broadcast_object")
    is_root = state.rank() == root_rank
    payload, failure = _dump(obj) if is_root else (bytearray(), None)
    size = array.array("q", [_CANNOT_PICKLE if failure else len(payload)])

    def send_payload(_: None) -> Any:
        if failure is not None:
            raise failure
        if size[0] == _CANNOT_PICKLE:
            raise ValueError(
                f"broadcast_object '{given}': rank {root_rank} cannot pickle its object{_hint()}"
            )
        buffer = payload if is_root else bytearray(size[0])
        handles.wait(_start_broadcast(buffer, "uint8", size[0], root_rank, f"{given}.t", members))
        return obj if is_root else _load(buffer, root_rank, given)

    with naming(name, "broadcast_object", members) as given:
        check_name(given)
        started = _start_broadcast(size, "int64", 1, root_rank, f"{given}.sz", members)
        note_submitted(given)
    return handles.wait_and_go_on(started, send_payload)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return a list of the objects of all ranks of the process set, in rank order.

    Raises
    ------
    TypeError : the name is not a str, or `process_set` is not a ProcessSet.
    ValueError : on the other ranks, if a rank's object cannot be pickled; that rank raises
        the error of pickle. With HORORING_INSECURE=1, if one is not a plain value.

    Examples
    --------
    >>> hvd.allgather_object({"rank": hvd.rank()})  # on one rank
    [{'rank': 0}]
    """
    members = check_member(process_set, "allgather_object")
    payload, failure = _dump(obj)
    payload[:0] = _SIZE.pack(_CANNOT_PICKLE if failure else len(payload))
    view = View(handles.address_of(payload), 0, DTYPES["uint8"], (len(payload),))
    with naming(name, "allgather_object", members) as given:
        check_name(given)
        handle = handles.submit(
            handles.ALLGATHER, f"{given}.t", [view], keep=payload,
            finish=lambda handle: handles.take(handle, 0).buffer, process_set=members,
            blocking=True,
        )  # fmt: skip
        note_submitted(given)
    gathered = memoryview(handles.wait(handle))
    if failure is not None:
        raise failure
    objects, broken, begin = [], [], 0
    for rank in process_set.ranks:
        (size,) = _SIZE.unpack_from(gathered, begin)
        begin += _SIZE.size
        if size == _CANNOT_PICKLE:
            broken.append(rank)
        else:
            objects.append(gathered[begin : begin + size])
            begin += size
    if broken:
        raise ValueError(
            f"allgather_object '{given}': rank{'s' if broken[1:] else ''} "
            f"{', '.join(map(str, broken))} cannot pickle their object{_hint()}"
        )
    return [_load(each, rank, given) for each, rank in zip(objects, process_set.ranks, strict=True)]


def _dump(obj: Any) -> tuple[bytearray, BaseException | None]:
    proven = state.peers_are_proven()
    try:
        return bytearray(cloudpickle.dumps(obj) if proven else plain.dumps(obj)), None
    except Exception as error:  # an object's own __reduce__ may raise anything
        return bytearray(), error if proven else ValueError(f"{error}; {_INSECURE}")


def _load(text: bytearray | memoryview, rank: int, name: str) -> Any:
    if state.peers_are_proven():
        return cloudpickle.loads(text)
    try:
        return plain.loads(text)
    except ValueError as error:
        raise ValueError(f"'{name}': rank {rank} has sent {error}; {_INSECURE}") from None


def _hint() -> str:
    return "" if state.peers_are_proven() else f": {_INSECURE}"


def _start_broadcast(
    buffer: Any, dtype: str, count: int, root_rank: int, name: str, members: int
) -> int:
    address = handles.address_of(buffer)
    return handles.submit(
        handles.BROADCAST,
        name,
        [View(address, address, DTYPES[dtype], (count,))],
        keep=buffer,
        finish=lambda _: None,
        process_set=members,
        root=root_rank,
        blocking=True,
    )

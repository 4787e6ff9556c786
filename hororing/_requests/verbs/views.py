"""Converts tensors to requests of the core, and their results to tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any, Generic

from hororing._requests import handles
from hororing._requests.adapter import Adapter, T
from hororing._requests.handles import View
from hororing._requests.names import naming

first = itemgetter(0)


class Requests(Generic[T]):
    """The common part of the verbs over one array type."""

    def __init__(self, adapter: Adapter[T]) -> None:
        self.adapter = adapter

    def _checked(self, tensors: Iterable[T], verb: str, *, writable: bool = False) -> list[T]:
        checked = [self.adapter.check(tensor, verb) for tensor in tensors]
        if not checked:
            raise ValueError(f"{verb}: there are no tensors; pass at least one")
        if writable:
            for tensor in checked:
                self.adapter.check_writable(tensor, verb)
        return checked

    def _view(self, source: T, output: T | None = None) -> View:
        address, dtype, shape = self.adapter.describe(source)
        return View(
            address,
            0 if output is None else self.adapter.describe(output)[0],
            dtype,
            shape,
            self.adapter.device(source),
        )

    def _submit(
        self,
        collective: int,
        verb: str,
        name: str | None,
        views: list[View],
        *,
        process_set: int,
        finish: Callable[[int], Any],
        **rest: Any,
    ) -> int:
        """Like `handles.submit`; None is the default name of `verb`."""
        with naming(name, verb, process_set) as given:
            if views[0].device != handles.HOST:
                finish, rest = self._on_device(views[0].device, finish, **rest)
            return handles.submit(
                collective, given, views, process_set=process_set, finish=finish, **rest
            )

    def _on_device(
        self,
        device: int,
        finish: Callable[[int], Any],
        *,
        keep: object,
        streams: Sequence[int] | None = None,
        **rest: Any,
    ) -> tuple[Callable[[int], Any], dict[str, Any]]:
        """Return `finish` and the other arguments for `handles.submit`.

        What this thread computes after `finish` comes after the results, and so does later work in
        the streams in which they were computed or submitted: their memory returns there when it is
        no longer needed.
        """
        stream = self.adapter.stream(device)
        computed_in = {stream, *(streams or ())}

        def finish_on_device(handle: int) -> Any:
            here = self.adapter.stream(device)
            for each in {here, *computed_in}:
                handles.wait_in_stream(handle, each)
            if computed_in != {here}:
                self.adapter.record(keep)
            return finish(handle)

        return finish_on_device, {"keep": keep, "stream": stream, "streams": streams, **rest}

    def _gathered(self, handle: int, index: int, like: T) -> T:
        """Take a result whose size only the core knew."""
        adapter = self.adapter
        device = adapter.device(like)
        if device == handles.HOST:
            return adapter.gathered(handles.take(handle, index), like)
        result = adapter.empty_rows(like, handles.rows(handle, index))
        address, _, shape = adapter.describe(result)
        if 0 not in shape:
            handles.move(handle, index, address, adapter.stream(device))
        return result

    def _written(self, targets: list[T], outputs: list[T]) -> list[T]:
        """Copy results back into tensors that had to be copied."""
        for target, output in zip(targets, outputs, strict=True):
            if output is not target:
                self.adapter.copy(target, output)
        self.adapter.mark_written(targets)
        return targets

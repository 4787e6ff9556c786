"""Collectives that copy: broadcast, gather, scatter, all_gather and all_to_all; and the barrier."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from hororing._requests import control
from hororing.errors import MismatchError, StalledError
from hororing.torch._tensor.verbs import adapter, verbs
from hororing.torch.distributed.base import (
    Group,
    Tensors,
    dist,
    fill,
    request,
    same_shape,
    single,
)
from hororing.torch.distributed.forms import AllgatherOptions
from hororing.torch.distributed.work import Work


class Exchanges(Group):
    """Collectives that copy tensors between ranks."""

    @request
    def broadcast(self, name: str, tensors: Any, opts: Any) -> Work:
        """Copy the root's tensor to all ranks."""
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        handle = verbs.start_broadcast(
            single(tensors, "broadcast"), self._root(opts), name, self._set, in_place=True,
            blocking=not opts.asyncOp,
        )  # fmt: skip
        return self._work("broadcast", name, handle, tensors, opts)

    @request
    def allgather(
        self, name: str, outputs: list[Tensors], inputs: Tensors, opts: Any = None
    ) -> Work:
        """Copy every rank's tensor into a list; ranks may differ in the first dimension."""
        tensor, targets = single(inputs, "all_gather"), single(outputs, "all_gather")
        return self._gather("all_gather", name, [list(targets)], [tensor], opts)

    @request
    def allgather_coalesced(
        self, name: str, outputs: list[Tensors], inputs: Tensors, opts: Any = None
    ) -> Work:
        """Like `allgather` with several tensors, which are lists of `outputs` by rank."""
        opts = opts or AllgatherOptions()
        self._check_count("all_gather_coalesced", "lists of outputs", outputs)
        if any(len(each) != len(inputs) for each in outputs):
            raise ValueError(
                f"all_gather_coalesced: every list of outputs must have {len(inputs)} tensors, as "
                "the inputs are"
            )
        return self._gather(
            "all_gather_coalesced", name, [list(each) for each in zip(*outputs, strict=True)],
            inputs, opts,
        )  # fmt: skip

    def _gather(
        self, verb: str, name: str, outputs: list[Tensors], inputs: Tensors, opts: Any
    ) -> Work:
        """Gather each input into its outputs, which are in rank order."""
        for targets in outputs:
            self._check_count(verb, "outputs", targets)
        # Send equal shapes as one row, so that differing ranks are detected; else the tensor's
        # rows.
        alike = [same_shape([one, *targets]) for one, targets in zip(inputs, outputs, strict=True)]
        sent = [
            tensor.unsqueeze(0) if even or tensor.dim() == 0 else tensor
            for tensor, even in zip(inputs, alike, strict=True)
        ]

        def finish(gathered: tuple[torch.Tensor, ...]) -> None:
            for rows, targets, even in zip(gathered, outputs, alike, strict=True):
                sizes = [1 if even or not each.dim() else each.shape[0] for each in targets]
                if sum(sizes) != len(rows):
                    raise MismatchError(
                        f"{verb} '{name}': the ranks have sent {len(rows)} rows together, but the "
                        f"outputs have {sizes}"
                    )
                parts = torch.split(rows, self._in_set_order(sizes))
                fill(verb, targets, self._in_group_order(parts))

        handle = verbs.gather_async(
            verb, sent, name, process_set=self._set, blocking=not opts.asyncOp
        )
        return self._work(
            verb, name, handle, list(itertools.chain.from_iterable(outputs)), opts, finish
        )

    @request
    def _allgather_base(
        self, name: str, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> Work:
        """Concatenate the tensors of all ranks into one."""
        opts = opts or AllgatherOptions()
        return self._gather_into("all_gather_into_tensor", name, [output], [tensor], opts)

    @request
    def allgather_into_tensor_coalesced(
        self, name: str, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        """Like `_allgather_base` with several tensors, in one request."""
        opts = opts or AllgatherOptions()
        return self._gather_into("all_gather_into_tensor_coalesced", name, outputs, inputs, opts)

    def _gather_into(
        self, verb: str, name: str, outputs: Tensors, inputs: Tensors, opts: Any
    ) -> Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            self._check_whole(verb, "output", output, "input", tensor)

        def finish(gathered: tuple[torch.Tensor, ...]) -> None:
            for output, rows in zip(outputs, gathered, strict=True):
                ordered = rows if self._is_ascending else torch.stack(self._in_group_order(rows))
                adapter.copy(output, ordered.reshape(output.shape))

        handle = verbs.gather_async(
            verb, [tensor.unsqueeze(0) for tensor in inputs], name, process_set=self._set,
            blocking=not opts.asyncOp,
        )  # fmt: skip
        return self._work(verb, name, handle, outputs, opts, finish)

    @request
    def gather(self, name: str, outputs: list[Tensors], inputs: Tensors, opts: Any) -> Work:
        """Copy every rank's tensor, all of one shape, into a list on the root."""
        tensor, root = single(inputs, "gather"), self._root(opts)
        targets = list(single(outputs, "gather")) if root == self._ranks[self._place] else []
        if targets:
            self._check_count("gather", "outputs", targets)

        def finish(answer: tuple[torch.Tensor, torch.Tensor]) -> None:
            if targets:
                fill("gather", targets, self._in_group_order(torch.split(answer[0], 1)))

        splits = [int(rank == root) for rank in sorted(self._ranks)]
        handle = verbs.exchange_async(tensor.unsqueeze(0), splits, name, self._set)
        return self._work("gather", name, handle, targets, opts, finish)

    @request
    def scatter(self, name: str, outputs: Tensors, inputs: list[Tensors], opts: Any) -> Work:
        """Copy one of the root's tensors, all of one shape, to each rank."""
        output = single(outputs, "scatter")
        if self._root(opts) == self._ranks[self._place]:
            sources = single(inputs, "scatter")
            self._check_count("scatter", "inputs", sources)
            rows = torch.stack([source.detach() for source in self._in_set_order(sources)])
        else:
            rows = output.detach().new_empty((0, *output.shape))
        splits = [int(len(rows) > 0)] * len(self._ranks)

        def finish(answer: tuple[torch.Tensor, torch.Tensor]) -> None:
            fill("scatter", [output], [answer[0]])

        handle = verbs.exchange_async(rows, splits, name, self._set)
        return self._work("scatter", name, handle, [output], opts, finish)

    @request
    def alltoall_base(
        self,
        name: str,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> Work:
        """Send rows to every rank; splits are rows per rank, or empty for equal parts."""
        verb = "all_to_all_single"
        opts = opts or dist.AllToAllOptions()
        sends = self._splits(verb, "input", tensor, input_splits)
        receives = self._splits(verb, "output", output, output_splits)

        def finish(answer: tuple[torch.Tensor, torch.Tensor]) -> None:
            rows, counts = answer[0], self._in_group_order(answer[1].tolist())
            if counts != receives:
                raise MismatchError(
                    f"{verb} '{name}': this rank expects {receives} rows from the ranks of the "
                    f"group, which have sent {counts}"
                )
            if not self._is_ascending:
                parts = torch.split(rows, self._in_set_order(counts))
                rows = torch.cat(self._in_group_order(parts))
            adapter.copy(output, rows.reshape(output.shape))

        if not self._is_ascending:
            tensor = torch.cat(self._in_set_order(torch.split(tensor.detach(), sends)))
            sends = self._in_set_order(sends)
        handle = verbs.exchange_async(tensor, sends, name, self._set, blocking=not opts.asyncOp)
        return self._work(verb, name, handle, [output], opts, finish)

    @request
    def alltoall(self, name: str, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """Send a tensor to every rank; sizes may differ."""
        verb = "all_to_all"
        opts = opts or dist.AllToAllOptions()
        self._check_count(verb, "inputs", inputs)
        self._check_count(verb, "outputs", outputs)
        inputs = self._in_set_order(inputs)
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in inputs])

        def finish(answer: tuple[torch.Tensor, torch.Tensor]) -> None:
            parts = torch.split(answer[0], answer[1].tolist())
            fill(verb, outputs, self._in_group_order(parts))

        handle = verbs.exchange_async(
            flat, [tensor.numel() for tensor in inputs], name, self._set,
            blocking=not opts.asyncOp,
        )  # fmt: skip
        return self._work(verb, name, handle, outputs, opts, finish)

    @request
    def barrier(self, name: str, opts: Any = None) -> Work:
        """Wait for all ranks."""
        handle = control.start_barrier(name, self._members(), blocking=not opts.asyncOp)
        return self._work("barrier", name, handle, [], opts)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks.

        The ranks use torch's store, so this works while requests of the group hang.

        Raises
        ------
        StalledError : on every rank that has called it, after `timeout` (a timedelta or seconds;
            None: the group's). It names the first late rank; all if `wait_all_ranks`. PeerLostError
            and the like if the job has ended.
        """
        self._check_alive("monitored_barrier")
        seconds = self._timeout_s if timeout is None else timeout
        seconds = seconds.total_seconds() if isinstance(seconds, timedelta) else float(seconds)
        missing = self._board.missing(len(self._ranks), seconds)
        missing = [0] if missing is None else missing
        if missing:
            several = wait_all_ranks and len(missing) > 1
            who = f"Ranks {str(missing)[1:-1]}" if several else f"Rank {missing[0]}"
            why = f"{who} failed to pass monitoredBarrier in {seconds:g} s"
            # All texts are gloo's, which scripts and PyTorch's tests match.
            if self._place != 0:
                why = (
                    f"Rank {self._place} successfully reached monitoredBarrier, but received "
                    f"errors while waiting for send/recv from rank 0: {why}"
                )
            elif seconds <= 0:
                why = f"Rank 0 timed out in monitoredBarrier: {why}"
            raise StalledError(f"monitored_barrier: {why}, in {self!r}")

    # The names in torch 2.13; those above are its earlier names.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    all_to_all_single = alltoall_base

    def _splits(
        self, verb: str, what: str, tensor: torch.Tensor, splits: Sequence[int]
    ) -> list[int]:
        rows, size = tensor.shape[0] if tensor.dim() else 0, len(self._ranks)
        if not splits:
            if rows % size:
                raise ValueError(
                    f"{verb}: the {rows} rows of the {what} cannot be split equally among {size} "
                    "ranks; pass splits"
                )
            return [rows // size] * size
        if len(splits) != size or sum(splits) != rows:
            raise ValueError(
                f"{verb}: the {what} has {rows} rows for {size} ranks, but its splits are "
                f"{list(splits)}"
            )
        return list(splits)

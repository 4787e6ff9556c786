"""The one `Verbs` over torch tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hororing._requests import arguments
from hororing._requests.verbs import Verbs
from hororing.torch._tensor.adapter import TorchAdapter


class TorchVerbs(Verbs[torch.Tensor]):
    """Knows which operations are defined for complex numbers, which travel as pairs."""

    def reduce_async(
        self, verb: str, tensors: Iterable[Any], in_place: bool, name: str | None, op: int,
        *rest: Any, **options: Any,
    ) -> int:  # fmt: skip
        """Refuse operations that would treat the two parts of a number separately."""
        tensors = list(tensors)
        if op not in (arguments.Average, arguments.Sum):
            for tensor in tensors:
                if isinstance(tensor, torch.Tensor) and tensor.is_complex():
                    what = verb if name is None else f"{verb} '{name}'"
                    raise ValueError(
                        f"{what}: op={arguments.op_name(op)} is not defined for {tensor.dtype}; "
                        "use Average or Sum"
                    )
        return super().reduce_async(verb, tensors, in_place, name, op, *rest, **options)


adapter = TorchAdapter()
verbs: Verbs[torch.Tensor] = TorchVerbs(adapter)

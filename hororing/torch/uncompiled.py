"""How verbs behave inside torch.compile: they interrupt the graph.

A graph may drop, merge and reorder what it holds, differently on every rank, and verbs must do
none of that. (Operators with ordered effects are respected when torch traces, but not when
TorchInductor of torch 2.13 schedules: it moved them against each other on some of the ranks.)
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F) -> F:
    """Make torch.compile call `function` as it is, between two graphs.

    `torch.compiler.disable` imports the compiler, which takes a second; here that is left to
    those who compile.
    """
    disabled: Callable[..., Any] | None = None
    modules = sys.modules

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if disabled is None:
            if "torch._dynamo" not in modules:
                return function(*args, **kwargs)
            from torch._dynamo.decorators import disable, skip

            skip(call)  # this frame; `disable` is for all below
            disabled = disable(function)  # type: ignore[no-untyped-call]
            assert disabled is not None
        return disabled(*args, **kwargs)

    return cast(F, call)


def leave_uncompiled(function: Callable[..., Any]) -> None:
    """Make torch.compile call `function` as it is, but perhaps not what it calls.

    `torch.compiler.disable` puts a function around it that costs more than a gradient hook does.
    """
    if not isinstance(function, FunctionType):
        return  # it has no frame that could be compiled
    from torch._dynamo.decorators import skip

    skip(function)

"""How verbs behave inside torch.compile: they interrupt the graph.

A graph may drop, merge and reorder operations, differently on every rank, which verbs do not allow.
(Operators with ordered effects are respected when torch traces, but not when TorchInductor of torch
2.13 schedules: it reordered them on some of the ranks.)
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])

# With the parameters of the function itself. Tracebacks show these lines: there are as many before
# them.
_LINES_BEFORE = sys._getframe().f_lineno
_SOURCE = """
def call{signature}:
    if not traced() and callback() is None:
        return function({arguments})
    return disabled()({arguments})
"""


def _compiler() -> object:
    return sys.modules.get("torch._dynamo")


# Returns torch's callback for frames of Python on this thread: None outside of compiled functions.
# Does not import the compiler, which takes a second. Old releases lack this function.
_callback: Callable[[], object] = getattr(
    torch._C._dynamo.eval_frame, "get_eval_frame_callback", _compiler
)
# True while the compiler traces; it would warn of `_callback`.
_traced: Callable[[], bool] = getattr(torch.compiler, "is_dynamo_compiling", lambda: False)


def uncompiled(function: F) -> F:
    """Make torch.compile call `function` as it is, between two graphs.

    `torch.compiler.disable` adds about 5 us to a call, more than it takes to submit a tensor, so
    only scripts that compile pay for it. Others pay 0.1 us; `*args, **kwargs` would be 2 us.
    """
    kept: Callable[..., Any] | None = None

    def disabled() -> Callable[..., Any]:
        nonlocal kept
        if kept is None:
            from torch._dynamo.decorators import disable, skip

            skip(call)  # this frame; `disable` is for all below
            kept = disable(function)  # type: ignore[no-untyped-call]
        return cast(Callable[..., Any], kept)

    parameters = inspect.signature(function).parameters.values()
    given = [p for p in parameters if p.default is not p.empty]
    signature = inspect.Signature(
        [
            p.replace(annotation=p.empty, default=p.empty if p.default is p.empty else None)
            for p in parameters
        ]
    )
    kinds = inspect.Parameter
    stars: dict[object, str] = {kinds.VAR_POSITIONAL: "*", kinds.VAR_KEYWORD: "**"}
    arguments = [
        f"{p.name}={p.name}" if p.kind is p.KEYWORD_ONLY else stars.get(p.kind, "") + p.name
        for p in parameters
    ]
    source = "\n" * _LINES_BEFORE + _SOURCE.format(
        signature=signature, arguments=", ".join(arguments)
    )
    scope = {
        "__name__": __name__, "callback": _callback, "traced": _traced, "function": function,
        "disabled": disabled,
    }  # fmt: skip
    exec(compile(source, __file__, "exec"), scope)
    call = cast(FunctionType, scope["call"])
    call.__defaults__ = tuple(p.default for p in given if p.kind is not p.KEYWORD_ONLY)
    call.__kwdefaults__ = {p.name: p.default for p in given if p.kind is p.KEYWORD_ONLY}
    return cast(F, functools.wraps(function)(call))


def leave_uncompiled(function: Callable[..., Any]) -> None:
    """Make torch.compile call `function` as it is, but perhaps not the functions that it calls.

    `torch.compiler.disable` puts a function around it that costs more than a gradient hook does.
    """
    if not isinstance(function, FunctionType):
        return  # it has no frame that could be compiled
    from torch._dynamo.decorators import skip

    skip(function)

"""Reduce operations, and checks of the verbs' arguments other than tensors.

Framework-neutral. The core checks sizes, ranks and process sets.
"""

from __future__ import annotations

import operator
import sys
import warnings
from collections.abc import Iterable
from typing import Any, Final

from hororing import errors
from hororing._engine import state
from hororing._requests.names import WORLD_SET

Average: Final = 0
Sum: Final = 1
Adasum: Final = 2
Min: Final = 3
Max: Final = 4
Product: Final = 5

_OP_NAMES: Final = {
    Average: "Average",
    Sum: "Sum",
    Adasum: "Adasum",
    Min: "Min",
    Max: "Max",
    Product: "Product",
}


# Their names in enumerations of other libraries, such as torch.distributed.ReduceOp. Their numbers
# mean something else.
_OF_NAMES: Final = {
    "AVG": Average,
    "MEAN": Average,
    "SUM": Sum,
    "MIN": Min,
    "MAX": Max,
    "PRODUCT": Product,
}


def choose_op(op: Any, average: bool | None) -> int:
    """Return the operation for `op` and the deprecated `average`."""
    if average is not None:
        if op is not None:
            raise ValueError(
                "allreduce: the op parameter supersedes average; please provide only one of them"
            )
        warnings.warn(
            "parameter `average` is deprecated; use op=Average or op=Sum",
            DeprecationWarning,
            stacklevel=frames_to_script(),
        )
        return Average if average else Sum
    return check_op(Average if op is None else op)


def frames_to_script() -> int:
    """The number of frames from the caller to the first that is neither ours nor a framework's."""
    frame, level = sys._getframe(1), 1
    ours = ("hororing", "torch", "tensorflow", "keras")
    while frame.f_back and frame.f_globals["__name__"].partition(".")[0] in ours:
        frame, level = frame.f_back, level + 1
    return level


def check_op(op: Any) -> int:
    """Return the number of the operation `op`, which may be torch.distributed's, for example.

    UnsupportedOpError for an unknown operation, TypeError for another kind of object.
    """
    number = _number_of(op)
    if number in _OP_NAMES:
        return number
    known = ", ".join(f"{name} ({number})" for number, name in _OP_NAMES.items())
    raise errors.UnsupportedOpError(f"there is no reduce operation {op!r}; use one of {known}")


def _number_of(op: Any) -> int:
    if type(op) is int:
        return op
    member = getattr(op, "op", op)  # torch.distributed.ReduceOp(...) holds one
    if hasattr(type(member), "__members__") and not isinstance(member, int):
        return _OF_NAMES.get(member.name, -1)
    try:
        if not isinstance(op, bool):
            return operator.index(op)
    except TypeError:
        pass
    names = ", ".join(_OP_NAMES.values())
    raise TypeError(
        f"op must be one of hvd.{names.replace(', ', ', hvd.')} or a member of "
        f"torch.distributed.ReduceOp, not {type(op).__name__} ({op!r})"
    )


def check_scatter_op(op: Any, verb: str) -> int:
    """Return the operation `op`; UnsupportedOpError unless reduce-scatter can do it."""
    number = check_op(op)
    if number not in (Average, Sum):
        raise errors.UnsupportedOpError(
            f"{verb}: op={op_name(number)} is not supported; use Average or Sum, or allreduce"
        )
    return number


def check_adasum(process_set: int, verb: str) -> None:
    """Raise NotImplementedError if Adasum is impossible, as Horovod does."""
    if process_set != WORLD_SET:
        raise NotImplementedError(
            f"{verb}: op=Adasum works among all ranks only, not in a process set; use op=Average"
        )
    size = state.size()
    if size & (size - 1):
        raise NotImplementedError(
            f"{verb}: op=Adasum needs a number of ranks that is a power of two, not {size}; use "
            "op=Average"
        )


def check_flag(what: str, name: str, value: Any) -> None:
    """Raise TypeError for anything but True, False, 1, 0 and None. A text such as "no" is true."""
    if value not in (0, 1, None):
        raise TypeError(f"{what}: {name} must be True or False, not {value!r}")


def check_root(root_rank: int, verb: str) -> int:
    """Return `root_rank` if it is an integer."""
    try:
        return operator.index(root_rank)
    except TypeError:
        raise TypeError(
            f"{verb}: root_rank must be an int, not {type(root_rank).__name__} ({root_rank!r})"
        ) from None


OF_A_LAYER = "those of a layer are in layer.weights"


def check_variables(
    variables: Iterable[Any], verb: str, instead: str = "use broadcast for tensors"
) -> list[Any]:
    """Return the variables, of any framework, as a list. TypeError for other objects.

    `instead`: the advice at the end of its text.
    """
    if hasattr(variables, "assign"):
        raise TypeError(f"{verb} takes a list of variables; pass [variable]")
    checked = list(variables)
    for variable in checked:
        if not hasattr(variable, "assign"):
            raise TypeError(f"{verb} takes variables, not {type(variable).__name__}; {instead}")
    return checked


def check_factors(prescale: float, postscale: float, verb: str) -> tuple[float, float]:
    """Return the factors if they are numbers."""
    for name, factor in (("prescale_factor", prescale), ("postscale_factor", postscale)):
        if isinstance(factor, str) or not hasattr(factor, "__float__"):
            raise TypeError(
                f"{verb}: {name} must be a number, not {type(factor).__name__} ({factor!r})"
            )
    return float(prescale), float(postscale)


def check_weight(weight: Any, verb: str) -> float | None:
    """Return the weight if it is a number or None. The core checks its value."""
    if weight is None:
        return None
    try:
        if not isinstance(weight, str):
            return float(weight)
    except (TypeError, ValueError, OverflowError):
        pass
    raise TypeError(f"{verb}: weight must be a number, not {type(weight).__name__} ({weight!r})")


def check_splits(splits: Any, dimensions: int = 1, dtype: str = "int32") -> list[int]:
    """Return the splits of an alltoall as a list. The core checks their number and size."""
    if dimensions != 1:
        raise ValueError(f"alltoall: splits must have one dimension, not {dimensions}")
    if dtype != "int32":
        raise ValueError(f"alltoall: splits must be int32, not {dtype}; convert the tensor")
    try:
        return [operator.index(split) for split in splits]
    except TypeError:
        raise ValueError(f"alltoall: splits must be a list of integers, not {splits!r}") from None


def op_name(op: int) -> str:
    """Name of a valid operation, for messages."""
    return _OP_NAMES[op]


def check_text(argument: str, value: object) -> None:
    """Raise TypeError unless `value` is a str."""
    if not isinstance(value, str):
        raise TypeError(f"{argument} must be a str, not {type(value).__name__} ({value!r})")

"""``mpirun -np 4 python -m hororing evaluate train.py:evaluate_one checkpoints/*.pt``."""

from __future__ import annotations

import argparse
import importlib
import os
import runpy
import sys
from collections.abc import Callable
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument(
        "function",
        help="module:name or file.py:name of a function that takes a path, loads what is there and "
        "returns what hororing's evaluate returned; called on every rank",
    )
    parser.add_argument("checkpoints", nargs="+", help="paths, in the order of the evaluation")
    parser.add_argument(
        "--output",
        help="a file for a line of JSON per checkpoint; those that it has are not evaluated again",
    )


def run(chosen: argparse.Namespace) -> int:
    """Evaluate one shard per rank; rank 0 prints. Return the exit code."""
    import hororing.numpy as hvd
    from hororing.toolkit.data.evaluation import evaluate_checkpoints

    try:
        function = _find(chosen.function)
    except (ImportError, AttributeError, KeyError, OSError, ValueError) as error:
        print(f"evaluate: cannot find {chosen.function!r}: {error}", file=sys.stderr)
        return 2
    hvd.init()
    results = evaluate_checkpoints(chosen.checkpoints, function, chosen.output)
    if hvd.rank() == 0:
        for path, metrics in results.items():
            values = (f"{name} {each.mean:.6g}" for name, each in metrics.items())
            print(f"{path}: {', '.join(values)}")
    hvd.shutdown()
    return 0


def _find(text: str) -> Callable[[str], Any]:
    where, separator, name = text.rpartition(":")
    if not separator:
        raise ValueError("write module:name or file.py:name")
    if where.endswith(".py"):
        sys.path.insert(0, os.path.dirname(os.path.abspath(where)))  # as Python does for a script
        found = runpy.run_path(where, run_name=where)[name]
    else:
        found = getattr(importlib.import_module(where), name)
    if not callable(found):
        raise ValueError(f"{name} is not a function")
    function: Callable[[str], Any] = found
    return function

"""The command horovodrun: hororun for scripts written for Horovod, whose imports work unchanged.

It has hororun's flags, which include Horovod's, and takes abbreviations of them, as Horovod's does.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence

from hororing.hororun import command

_PYTHON = re.compile(r"python(\d+(\.\d+)*)?$")
_WITH_VALUE = re.compile(r"-[bBdEhiIOPqRsSuvVx]*[XW]$")  # its value is the next word
_MODULE = "hororing.as_horovod"


def main(words: Sequence[str] | None = None) -> int:
    """Run it, and return its exit code."""
    given = list(sys.argv[1:] if words is None else words)
    return command.main(expanded(given), prog="horovodrun", changed=with_alias)


def expanded(words: list[str]) -> list[str]:
    """Write abbreviated flags in full, but not those of the program.

    >>> expanded(["--num-p", "2", "python", "train.py", "--num-p", "3"])
    ['--num-proc', '2', 'python', 'train.py', '--num-p', '3']
    """
    # argparse itself would take the program's flags for abbreviations of ours.
    flags = command.arguments_parser()._option_string_actions
    left, done = list(words), []
    while left and left[0].startswith("-") and left[0] != "--":
        name, equals, value = left.pop(0).partition("=")
        if name.startswith("--") and name not in flags:
            meant = {id(flags[each]): each for each in flags if each.startswith(name)}
            name = next(iter(meant.values())) if len(meant) == 1 else name
        done.append(name + equals + value)
        takes = getattr(flags.get(name), "nargs", 0)
        count = 0 if equals else 1 if takes is None else takes if isinstance(takes, int) else 0
        done += left[:count]
        del left[:count]
    return done + left


def with_alias(program: list[str]) -> list[str]:
    """Let Python run its script by `hororing.as_horovod`; another program is not changed.

    >>> with_alias(["python", "-u", "train.py", "--epochs", "3"])
    ['python', '-u', '-m', 'hororing.as_horovod', 'train.py', '--epochs', '3']
    """
    if not program or _MODULE in program:
        return program
    if not _PYTHON.match(os.path.basename(program[0])):
        if program[0].endswith(".py"):
            return [sys.executable, "-m", _MODULE, *program]
        print(
            f"horovodrun: {program[0]} is not python: scripts that it starts import hororing as "
            f"horovod if they are run by python -m {_MODULE}",
            file=sys.stderr,
        )
        return program
    at = 1
    while at < len(program) and program[at].startswith("-") and program[at][:2] not in ("-m", "-c"):
        at += 2 if _WITH_VALUE.match(program[at]) else 1
    return [*program[:at], "-m", _MODULE, *program[at:]]

"""What became of ranks, in sentences."""

from __future__ import annotations

import itertools
import os
import re
import signal
from collections.abc import Sequence

from hororing.testing.doing import is_library
from hororing.testing.messages import Doing
from hororing.testing.pool import Outcome

PHASES = ("setup", "call", "teardown")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in ')
_INNER = (f"{os.sep}_pytest{os.sep}", f"{os.sep}hororing{os.sep}testing{os.sep}")


def phase_of(outcome: Outcome) -> str:
    """The phase in which a rank was when it died or was ended."""
    done = {each.when for each in outcome.phases}
    if "setup" in done and "call" not in done and outcome.phases[0].data["outcome"] != "passed":
        return "teardown"
    return next((each for each in PHASES if each not in done), "teardown")


def ranks(numbers: Sequence[int]) -> str:
    """Name ranks."""
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))


def troubles(outcomes: Sequence[Outcome], when: str, limit_s: float) -> str:
    """What went wrong, if ranks have died or were ended, with their stacks."""
    dead = [each for each in outcomes if each.died is not None]
    stuck = [each for each in outcomes if each.died is None and each.ended is None]
    left = [each for each in outcomes if each.ended is not None and each.ended.escaped]
    states = [state(each) for each in [*dead, *stuck, *left]]
    for each in outcomes:
        lost = each.failing is not None and each.failing.blame == "peers"
        if each.failing is not None and lost and not each.trouble:
            states.append(f"rank {each.rank} lost it: {first_line(each.failing.error)}")
        elif stuck and not dead and not each.trouble and each.ended is not None:
            line = f" at line {each.ended.line}" if each.ended.line else ""
            states.append(f"rank {each.rank} ended the test{line}")
    text = "; ".join(states)
    if stuck and not any(each.failed_at for each in outcomes):
        text = f"no end of {when} within {limit_s:g} s: {text}"
    stacks = [f"rank {each.rank}:\n{_stack(each.doing)}" for each in [*dead, *stuck]
              if _stack(each.doing)]  # fmt: skip
    return "\n\n".join([text, *stacks])


def first_line(text: str) -> str:
    """The first line, "" if there is none."""
    return text.partition("\n")[0]


def state(outcome: Outcome) -> str:
    """What became of a rank that is in trouble."""
    who = f"rank {outcome.rank}"
    if outcome.ended is not None:
        return f"{who} left the test: {outcome.ended.escaped}"
    if outcome.died is not None:
        return f"{who} {_end(outcome.died)} in {phase_of(outcome)}{_place(outcome.doing)}"
    return f"{who} {_doing(outcome.doing)}"


def _stack(doing: Doing | None) -> str:
    """The stack, innermost last; of faulthandler's, the main thread's part that is a test's."""
    if doing is None or doing.what:
        return "" if doing is None else doing.stack.rstrip()
    main = doing.stack.rpartition("(most recent call first):\n")[2].splitlines()
    frames = [line for line in main if _FRAME.match(line)]
    frames = list(itertools.dropwhile(_is_inner, frames))
    own = itertools.takewhile(lambda line: not _is_inner(line), frames)
    return "\n".join([*own][::-1])


def _is_inner(line: str) -> bool:
    return any(each in line for each in _INNER)


def _place(doing: Doing | None) -> str:
    found = _FRAME.findall(_stack(doing))
    users = [each for each in found if not is_library(each[0])] or found
    return f" at {os.path.basename(users[-1][0])}:{users[-1][1]}" if users else ""


def _end(code: int) -> str:
    if code >= 0:
        return f"ended its process with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _doing(doing: Doing | None) -> str:
    if doing is None:
        return "was ended"
    if not doing.what:
        return f"is{_place(doing) or ' in native code'}"
    place = f" at {os.path.basename(doing.file)}:{doing.line}" if doing.file else ""
    requests = f" ({', '.join(doing.requests)})" if doing.requests else ""
    return f"{doing.what}{place}{requests}"

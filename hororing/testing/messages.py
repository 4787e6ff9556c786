"""What the process of the tests and its ranks tell each other; all of it travels by `channel`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

HORORING, GLOO = "hororing", "gloo"
BACKENDS = (HORORING, GLOO)


# ---------------------------------------------------------------------------------------------
# To the fork server and to ranks


@dataclass(frozen=True)
class Suite:
    """How ranks collect the tests: with the options of the process that runs them.

    `arguments` name the files with the mark `ranks`; `worker` is what pytest-xdist tells a worker.
    """

    arguments: list[str]
    options: dict[str, Any]
    worker: dict[str, Any] | None


@dataclass(frozen=True)
class Plan:
    """What a process prepares before ranks are forked from it, or before it becomes one."""

    path: list[str]
    argv: list[str]
    suite: Suite | None  # None: ranks call functions
    modules: Sequence[str] = ()  # to import before that
    coverage: Mapping[str, Any] | None = None  # how the process of the tests is measured


@dataclass(frozen=True)
class Seat:
    """The place of a process among ranks. The descriptors follow in the order of `FILES`."""

    rank: int
    size: int
    variables: Mapping[str, str]
    folder: str  # for pytest's temporary folders; "": pytest's own


FILES = 4  # control, watch, the secret of the job, the store of torch.distributed


@dataclass(frozen=True)
class World:
    """What is initialised for one test, or one call."""

    number: int  # of this test among those of the ranks
    backend: str = HORORING
    init: bool = True
    port: int = 0  # a free one, for MASTER_PORT


@dataclass(frozen=True)
class Test:
    """Run a test. `next_id`: the next one of these ranks, for which fixtures are kept."""

    node_id: str
    next_id: str
    world: World


@dataclass(frozen=True)
class Call:
    """Call a function. `payload` is from `hororun.call.describe`."""

    payload: bytes
    world: World


@dataclass(frozen=True)
class Finish:
    """Tear down the fixtures that are left, and end."""


@dataclass(frozen=True)
class Terminal:
    """The answer to `Debugging`; with descriptors for stdin and stdout, if it is `lent`."""

    lent: bool


# ---------------------------------------------------------------------------------------------
# From ranks


@dataclass(frozen=True)
class Hello:
    """A rank is ready. Descriptors: of its stacks, and, if it captures, of stdout and stderr."""


@dataclass(frozen=True)
class Begun:
    """The world of the test exists on this rank."""


@dataclass(frozen=True)
class Failing:
    """An exception has ended a phase; its report follows. `blame`: as that of `Phase`."""

    when: str
    blame: str
    error: str  # the exception's type and text
    at: float  # time.monotonic()


@dataclass(frozen=True)
class Phase:
    """The report of one phase of a test, as pytest serialises it.

    `blame`: "" there was no exception, "own", or "peers": it reports another rank's end.
    """

    when: str
    data: dict[str, Any]
    at: float  # time.monotonic()
    blame: str
    error: str


@dataclass(frozen=True)
class Killing:
    """The test wants this rank to die now."""


@dataclass(frozen=True)
class Debugging:
    """The debugger begins, and needs the terminal, or ends."""

    begins: bool


@dataclass(frozen=True)
class Warned:
    """A warning, for pytest's summary."""

    message: Any
    when: str
    node_id: str
    location: tuple[str, int, str] | None


@dataclass(frozen=True)
class Answer:
    """The result of a function, as `hororun.call.packed` makes it."""

    body: bytes


@dataclass(frozen=True)
class Ended:
    """The test or the call has ended on this rank; `line` of the test, 0: unknown."""

    line: int = 0
    escaped: str = ""  # what left pytest itself, such as pytest.exit()
    quits: bool = False  # the user has quit the debugger


@dataclass(frozen=True)
class Doing:
    """What the main thread of a rank is doing."""

    what: str  # "waits in dist.all_reduce(loss): 4 x float32"; "": unknown
    file: str
    line: int
    stack: str
    requests: list[str] = field(default_factory=list)  # that the engine has not finished

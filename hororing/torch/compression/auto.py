"""Compression.auto: measures whether compression pays, for which buckets, by which method.

    uncompressed: 2 + 5 steps | each method: 2 + 5 + 1 | what was chosen: 2 + 5 + 1 | watched

1. Without compression each rank measures the time of a step, its wait for gradients after backward,
   and the time of their reduction from the first hook on. If the shortest wait, that of the
   straggler, is less than MIN_WAIT of a step, nothing is compressed.
2. Each method is tried on all parts (the buckets). Ranks measure the step, the work of each bucket,
   and, in the last step, the cosine between a bucket's exact sum and the compressed one.
3. For each part: gain = bytes saved * seconds per byte without compression - work. The method of
   the largest gain is chosen, or none. Methods with a cosine below `least_cosine` are excluded.
4. The choice is measured like a method. The measured choice with the shortest step is used;
   compression must shorten the step by at least MIN_GAIN.
5. Every `sample_steps` steps cosines are measured again, and the mean loss is compared with that of
   earlier windows, if the script reports it. Compression may end for a part, or for all.

All ranks make the same decisions, from the same maxima and sums over ranks. In the first
measurement ranks vote after each step whether to end it, as in torch/_optimizer/auto_groups.py,
since ranks that have joined count fewer steps. All this is one generator, `_program`, which yields
None to wait for the end of the next step, and the handle of each collective.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from collections import deque
from collections.abc import Generator
from logging import INFO, WARNING
from typing import Any, Final, NamedTuple

import torch

from hororing._engine import statistics as engine_statistics
from hororing._engine.logs import logger
from hororing._requests import arguments
from hororing._requests.compression import StatefulCompression
from hororing.torch._optimizer.distributed import Distributed
from hororing.torch._optimizer.grouping import Entry
from hororing.torch._optimizer.step import Step
from hororing.torch._tensor.verbs import verbs
from hororing.torch.compression.grouping import Compressed
from hororing.torch.compression.int8 import Int8
from hororing.torch.compression.method import Link, Method, Piece, Steps
from hororing.torch.compression.powersgd import PowerSGD
from hororing.torch.ops import synchronize

SKIPPED: Final = 2  # steps that allocate memory and warm up factors
MEASURED: Final = 5  # steps
MIN_WAIT: Final = 0.05  # of a step
MIN_GAIN: Final = 0.02  # of a step

Choices = dict[int, Method]  # by the number of the part; the others are not compressed
Program = Generator[int | None, Any, None]

clock = time.perf_counter


@dataclasses.dataclass(frozen=True)
class Auto(StatefulCompression):
    """Compresses the buckets where measurements show a gain.

    Parameters
    ----------
    methods : tuple of Method, optional
        The methods to try, in this order.
    least_cosine : float, optional
        A bucket with a smaller cosine of exact and compressed sum is not compressed.
    sample_steps : int, optional
        Steps between two checks of cosines and losses.
    scope : {"all", "hosts"}
        Of all methods; see `StatefulCompression`.
    """

    methods: tuple[Method, ...] = (Int8(), PowerSGD())
    least_cosine: float = 0.5
    sample_steps: int = 100

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        if not self.methods or not all(isinstance(each, Method) for each in self.methods):
            raise ValueError(
                f"Compression.auto: methods={self.methods!r} must be a tuple of methods, such as "
                "Compression.int8"
            )
        if not isinstance(self.least_cosine, int | float) or not -1 <= self.least_cosine <= 1:
            raise ValueError(
                f"Compression.auto: least_cosine={self.least_cosine!r} is not in [-1, 1]"
            )
        if not isinstance(self.sample_steps, int) or self.sample_steps < 1:
            raise ValueError(f"Compression.auto: sample_steps={self.sample_steps} must be positive")

    @property
    def candidates(self) -> list[Method]:
        """The methods, with this scope."""
        scope = {} if self.scope == "all" else {"scope": self.scope}
        return [dataclasses.replace(each, **scope) for each in self.methods]


@dataclasses.dataclass(frozen=True)
class Exact(Method):
    """Sends gradients unchanged in the first step; buckets compare the options of all ranks."""

    of: Auto = Auto()

    def traffic(self, param: torch.Tensor, ranks: int) -> float:
        """Return 1: as many bytes as without compression."""
        return 1.0

    def reduce(self, piece: Piece, link: Link) -> Steps:
        """Sum the gradients uncompressed."""
        total = yield link.sum(piece.flat.clone(), "sum")
        piece.flat.zero_()
        total /= piece.divisor
        return piece.parts(total), [{} for _ in piece.given], torch.isfinite(total).all()


class Times(NamedTuple):
    """Seconds of one step, or their medians."""

    whole: float
    waiting: float  # for gradients after backward
    reducing: float  # from the first hook on


class Chosen(Compressed):
    """Buckets of which measurements choose those that are compressed."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        assert isinstance(self.method, Auto)
        self._auto = self.method
        self._choices: Choices = {0: Exact(of=self._auto)}
        self._program: Program | None = None
        self._handle = 0  # of the program's collective
        self._answer: Any = None
        self._advanced = False  # the program has seen this step
        self._last = Times(0.0, 0.0, 0.0)
        self._ended_s = self._sent_s = clock()
        self._losses: list[float] = [0.0, 0.0]  # their sum and number since the last sample

    def begin(self, step: Step, gradients: dict[int, Entry]) -> None:
        """Start to measure."""
        super().begin(step, gradients)
        self._start()

    def _start(self) -> None:
        self._program, self._handle, self._answer = self._run(), 0, None

    def choice(self, part: int) -> Method | None:
        """Return how a part is compressed."""
        return self._choices.get(part)

    def release(self) -> None:
        """Measure no more."""
        super().release()
        self._program = None  # it refers to this grouping

    def begin_anew(self) -> None:
        """Measure again: the ranks have changed."""
        self._choices = {0: Exact(of=self._auto)}
        super().begin_anew()
        self._start()

    # -- measuring ------------------------------------------------------------------------------

    def before_wait(self) -> None:
        """Note when all gradients of this rank are computed."""
        if self._program is not None:
            self.step.await_device()
        self._sent_s = clock()
        super().before_wait()

    def after_wait(self) -> None:
        """Note the times of the step."""
        if self._program is not None:
            self.step.await_device()
        now_s = clock()
        self._last = Times(now_s - self._ended_s, now_s - self._sent_s, now_s - self.step.began_s)
        self._ended_s = now_s

    def note_loss(self, loss: float) -> None:
        """Record the loss of a step."""
        self._losses[0] += loss
        self._losses[1] += 1

    # -- the program ----------------------------------------------------------------------------

    def agree(self) -> None:
        """Continue the program."""
        program = self._program
        if program is None or self._advanced:
            return
        try:
            while True:
                if self._handle:  # kept by an interrupt
                    self._answer, self._handle = synchronize(self._handle), 0
                answer, self._answer = self._answer, None
                handle = program.send(answer)
                if handle is None:
                    break
                self._handle = handle
        except StopIteration:
            self._program = None
        except Exception:
            self._program, self._handle = None, 0
            raise
        self._advanced = True

    @property
    def agrees(self) -> bool:
        """Whether the program has continued."""
        return self._advanced or self._program is None

    def restart(self, *, reduced: bool) -> None:
        """Let the program continue in the next step."""
        self._advanced = False

    def _agree(self, values: list[float], op: int, what: str) -> int:
        """Start to combine numbers of all ranks."""
        members = self.options.process_set
        tensor = torch.tensor(values, dtype=torch.float64, device="cpu")
        return verbs.allreduce_async_(
            tensor, name=f"{self.prefix}.auto.{what}", op=op, process_set=members
        )

    def _run(self) -> Program:
        if not self.parts:
            self._log("not used: no gradient is large")
            return
        self._use({})
        size = len(self.options.process_set.ranks)
        plain = yield from self._measure_plain(size)
        if plain.waiting < MIN_WAIT * plain.whole:
            self._log(f"not used: a step waits {plain.waiting / plain.whole:.1%} for gradients")
            return
        seconds_per_byte = plain.reducing / max(
            1, sum(param.nbytes for param, _ in self.gradients.values())
        )
        # The measured choices, with seconds of a step and the minimum cosine of their sums.
        found = [(plain.whole * (1 - MIN_GAIN), 1.0, Choices())]
        best: dict[int, tuple[float, Method]] = {}  # gain and method
        for method in self._auto.candidates:
            choices = dict.fromkeys(range(len(self.parts)), method)
            work_s, cosines = yield from self._try(choices, found)
            for part, cosine in cosines.items():
                params = [param for param in self.parts[part] if method.compresses(param)]
                saved = sum(param.nbytes * (1 - method.traffic(param, size)) for param in params)
                gain = saved * seconds_per_byte - work_s[part]
                if cosine >= self._auto.least_cosine and gain > best.get(part, (0.0,))[0]:
                    best[part] = gain, method
        if best:
            yield from self._try({part: method for part, (_, method) in best.items()}, found)
        whole, cosine, choices = min(found, key=lambda each: each[0])
        self._use(choices)
        if not choices:
            self._log("not used: it does not shorten the step")
            return
        self._log(f"steps of {whole:.4f} s instead of {plain.whole:.4f} s", cosine)
        yield from self._watch()

    def _measure_plain(self, size: int) -> Generator[int | None, Any, Times]:
        """Measure until all ranks have done enough steps."""
        steps: deque[Times] = deque(maxlen=MEASURED)
        for count in itertools.count(1):
            steps.append(self._last)
            votes = yield self._agree([float(count >= SKIPPED + MEASURED)], arguments.Sum, "vote")
            if votes[0] == size:
                break
            yield None
        whole, waiting, reducing = (statistics.median(each) for each in zip(*steps, strict=True))
        agreed = yield self._agree([whole, -waiting, -reducing], arguments.Max, "plain")
        return Times(float(agreed[0]), -float(agreed[1]), -float(agreed[2]))

    def _try(
        self, choices: Choices, found: list[tuple[float, float, Choices]]
    ) -> Generator[int | None, Any, tuple[dict[int, float], dict[int, float]]]:
        """Return the seconds of work and the cosine of each part; add usable choices to `found`."""
        self._use(choices)
        for _ in range(SKIPPED):
            yield None
        before = {part: bucket.work_s for part, bucket in self.buckets.items()}
        steps = []
        for _ in range(MEASURED):
            yield None
            steps.append(self._last.whole)
        work_s = [(each.work_s - before[part]) / MEASURED for part, each in self.buckets.items()]
        self._sample()  # at the end: with cold factors sums are farthest from the exact ones
        yield None
        cosines = yield from self._cosines()
        agreed = yield self._agree([statistics.median(steps), *work_s], arguments.Max, "try")
        whole, *work_s = agreed.tolist()
        lowest = min(cosines.values(), default=1.0)
        if lowest >= self._auto.least_cosine:
            found.append((whole, lowest, choices))
        return dict(zip(self.buckets, work_s, strict=True)), cosines

    def _watch(self) -> Program:
        """Check cosines and losses every `sample_steps` steps, until nothing is compressed."""
        losses: deque[float] = deque(maxlen=3)
        while self.buckets:
            for _ in range(self._auto.sample_steps - 1):
                yield None
            self._sample()
            yield None
            cosines = yield from self._cosines()
            total, count = (yield self._agree(self._losses, arguments.Sum, "losses")).tolist()
            self._losses = [0.0, 0.0]
            if count:
                losses.append(total / count)
            rising = len(losses) == 3 and losses[0] < losses[1] < losses[2]
            if not all(map(math.isfinite, losses)) or rising:
                self._use({})
                means = ", ".join(f"{each:.4g}" for each in losses)
                self._log(f"no longer used: mean losses were {means}", level=WARNING)
                return
            wrong = {part for part, each in cosines.items() if each < self._auto.least_cosine}
            if wrong:
                self._use({p: each for p, each in self._choices.items() if p not in wrong})
                lowest = min(cosines.values())
                self._log(
                    f"no longer used for {len(wrong)} buckets: a compressed sum has the cosine "
                    f"{lowest:.2f} with the exact one", level=WARNING,
                )  # fmt: skip

    def _sample(self) -> None:
        """Make buckets compare their next sums with exact ones."""
        for bucket in self.buckets.values():
            bucket.samples = True

    def _cosines(self) -> Generator[int | None, Any, dict[int, float]]:
        """Return the last cosines, minima over ranks: only leaders of hosts have some."""
        mine = [-each.cosine for each in self.buckets.values()]
        agreed = yield self._agree(mine, arguments.Max, "cosines")
        return {part: -value for part, value in zip(self.buckets, agreed.tolist(), strict=True)}

    def _use(self, choices: Choices) -> None:
        self._choices = choices
        self.form(self.wanted)
        kept = {name for bucket in self.buckets.values() for name in bucket.names}
        for name in self.memory.contents.keys() - kept:
            del self.memory.contents[name]

    def _log(self, why: str, cosine: float = 1.0, level: int = INFO) -> None:
        counts: dict[str, Any] = {"none": len(self.parts) - len(self._choices)}
        for method in self._choices.values():
            counts[method.name] = counts.get(method.name, 0) + 1
        engine_statistics.show("compression", self, self.prefix, {**counts, "least_cosine": cosine})
        if self.options.process_set.rank() == 0:
            what = "Compression.auto of %s: %s; buckets: %s"
            logger.log(level, what, self.prefix, why, counts)


def note_loss(optimizer: Distributed, loss: float | torch.Tensor) -> None:
    """Report the loss of a step. If its means rise for two windows, nothing is compressed.

    A window has `sample_steps` steps; the mean includes the losses of all ranks. Blocks only for a
    tensor on a device. A method of optimizers with Compression.auto.
    """
    grouping = optimizer._reducer.grouping if optimizer._reducer is not None else None
    if isinstance(grouping, Chosen):
        grouping.note_loss(float(loss.detach() if isinstance(loss, torch.Tensor) else loss))

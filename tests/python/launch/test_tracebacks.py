"""What a user sees of a mistake: short, each text once, with the lines of all ranks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Hashable
from pathlib import Path

import pytest
from hororun_jobs import HORORUN, environment, run

from hororing._engine.tracebacks import shorten
from hororing.hororun.host import tracebacks
from hororing.hororun.host.local import STDERR
from hororing.hororun.host.output import Output

MISTAKES = Path(__file__).parents[1] / "support" / "mistakes.py"


def held(text: str) -> tracebacks.Held:
    return tracebacks.Held([f"{line}\n".encode() for line in text.splitlines()])


def traceback(line: int, message: str, code: str = "main()") -> str:
    header = "Traceback (most recent call last):"
    return f'{header}\n  File "a.py", line {line}, in f\n    {code}\n{message}'


def folded(
    texts: dict[int, str], cause: int | None = None, known: set[Hashable] | None = None
) -> list[str]:
    of_ranks = {rank: held(text) for rank, text in texts.items()}
    found = tracebacks.fold(of_ranks, cause, set() if known is None else known)
    return [f"{tracebacks.ranks_text(ranks)}|{line.decode()}" for ranks, line in found]


def test_equal_tracebacks_are_shown_once():
    assert folded(dict.fromkeys((0, 2, 3, 4), traceback(3, "ValueError: bad"))) == [
        "0,2-4|Traceback (most recent call last):",
        '0,2-4|  File "a.py", line 3, in f',
        "0,2-4|    main()",
        "0,2-4|ValueError: bad",
    ]


def test_a_replacement_that_fails_as_before_has_one_line():
    known: set[Hashable] = set()
    assert len(folded({0: traceback(3, "ValueError: bad")}, None, known)) == 4
    found = folded({3: traceback(3, "ValueError: bad"), 4: traceback(3, "OSError: x")}, 4, known)
    assert found[:2] == [
        "3|again: a.py:3, in f: main(): ValueError: bad",
        "4|Traceback (most recent call last):",
    ]
    assert len(found) == 5


def test_a_deadlock_has_the_lines_of_all_and_its_message_once():
    why = "deadlock: for 30 s each of these ranks has waited"
    texts = {
        rank: traceback(rank, f"hororing.errors.StalledError: allreduce 'x{rank}': {why}")
        for rank in range(3)
    }
    assert folded(texts) == [
        "0-2|Traceback (most recent call last):",
        '0|  File "a.py", line 0, in f',
        "0|    main()",
        '1|  File "a.py", line 1, in f',
        "1|    main()",
        "2|  a.py:2, in f: main()",
        f"0-2|hororing.errors.StalledError: {why}",
    ]


def test_who_lost_the_culprit_has_one_line_and_the_culprit_the_last_word():
    lost = "hororing.errors.PeerLostError: allreduce 'x': rank 1 failed: ValueError: bad"
    shown = folded({0: traceback(9, lost), 1: traceback(4, "ValueError: bad"), 2: lost}, cause=1)
    assert shown[0] == "0|a.py:9, in f: main(): has lost rank 1"
    assert shown[1] == "2|has lost rank 1"
    assert shown[-1] == "1|ValueError: bad"


def test_long_stacks_chains_and_messages_are_cut():
    chain = "\n".join([
        *traceback(1, "KeyError: 'lr'").splitlines(),
        "",
        "The above exception was the direct cause of the following exception:",
        "",
        "Traceback (most recent call last):",
        *(f'  File "b.py", line {n}, in g' for n in range(6)),
        "ValueError: " + "\n".join(map(str, range(30))),
    ])  # fmt: skip
    shown = folded({0: chain})
    assert shown[0].endswith("(most recent call last; HORORING_LOG_LEVEL=debug shows 2 more):")
    assert '0|  File "b.py", line 1, in g' not in shown
    assert "0|KeyError: 'lr'" in shown
    assert "0|... 18 lines more (HORORING_LOG_LEVEL=debug)" in shown
    assert shown[-1] == "0|29"


class _Stream:
    def __init__(self) -> None:
        self.text = b""

    def write(self, data: memoryview) -> int:
        self.text += bytes(data)
        return len(data)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_a_rank_that_lives_on_has_its_traceback_shown_unchanged(clock: list[float]):
    stream = _Stream()
    output = Output({STDERR: stream}, 2, tag=True, folds=True)  # type: ignore[dict-item]
    logged = traceback(3, "ValueError: bad").encode() + b"\n"
    output.write(1, STDERR, logged[:20])
    output.write(1, STDERR, logged[20:])
    output.show_due()
    assert stream.text == b""
    assert output.due_s() is not None
    clock[0] = 0.5
    output.write(1, STDERR, b"continues\n")  # another text, after a pause
    whole = b"".join(b"[1] " + line for line in logged.splitlines(keepends=True))
    assert stream.text == whole + b"[1] continues\n"
    output.write(1, STDERR, logged)
    clock[0] = 12.0
    output.show_due()
    assert stream.text == (whole + b"[1] continues\n") + whole
    assert output.due_s() is None
    output.write(0, STDERR, logged)
    output.ended(0, failed=True)
    output.write(1, STDERR, logged)
    output.ended(1, failed=False)  # a success needs no last words
    assert stream.text.count(b"[1] ValueError") == 3
    output.fold(0)
    assert stream.text.endswith(b"[0] ValueError: bad\n")
    assert output.repeats(0) == []


def test_frames_are_the_users(monkeypatch: pytest.MonkeyPatch):
    import hororing.numpy as hvd

    def files() -> list[str]:
        try:
            hvd.allreduce("text", name="x")
        except TypeError as error:
            shorten(error)
            trace, found = error.__traceback__, []
            while trace is not None:
                found.append(Path(trace.tb_frame.f_code.co_filename).name)
                trace = trace.tb_next
            return found
        raise AssertionError

    assert files() == [Path(__file__).name]
    monkeypatch.setenv("HORORING_LOG_LEVEL", "debug")
    assert len(files()) > 1


# ---------------------------------------------------------------------------------------------
# Jobs


def mistake(name: str, *, size: int = 2, flags: tuple[str, ...] = (), **env: str) -> list[str]:
    """Make a mistake, and return the lines that it costs."""
    env = {"HORORING_DEADLOCK_S": "1", **env}
    done = run("-np", str(size), *flags, sys.executable, str(MISTAKES), name, **env)
    return (done.stdout + done.stderr).splitlines()


def test_a_deadlock_names_both_lines_and_no_machinery():
    lines = mistake("metric_of_rank_0")
    text = "\n".join(lines)
    assert len(lines) <= 12, text
    assert re.search(r'\[0\] .*File ".*mistakes.py", line \d+, in evaluate', text)
    assert re.search(r'\[1\] .*File ".*mistakes.py", line \d+, in metric_of_rank_0', text)
    assert text.count("deadlock: for 1 s") == 1
    assert "engine" not in text
    assert "NEGOTIATE" not in text


def test_a_crash_has_a_stack_and_debug_has_everything():
    lines = mistake("crashes")
    assert any(re.search(r'File ".*mistakes.py", line \d+ in crashes', each) for each in lines)
    assert "[1] Fatal Python error: Segmentation fault" in lines
    assert lines[-1] == "hororun: rank 1 was killed by SIGSEGV"
    assert len(lines) <= 12
    text = "\n".join(mistake("shapes", HORORING_LOG_LEVEL="debug"))
    assert "in fail" in text


def test_ctrl_c_prints_one_line():
    # No time limit: it counts from a state, not from a start.
    process = subprocess.Popen(
        [*HORORUN, "-np", "2", sys.executable, str(MISTAKES), "interrupted"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
        start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert "begun" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60)[1] == "hororun: ended by SIGINT\n"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


NAMES = re.findall(r"^def (\w+)\(", MISTAKES.read_text(), re.M)


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("name", sorted({*NAMES} - {"interrupted"}))
def test_a_mistake_costs_few_lines(name: str, size: int):
    if size == 8 and name.startswith(("torch", "keras", "tf")):
        pytest.skip("a framework eight times")
    env = {"TF_CPP_MIN_LOG_LEVEL": "3", "HORORING_STALL_WARNING_S": "1"}
    if name.startswith(("torch", "keras", "tf")):
        framework = name.partition("_")[0]
        pytest.importorskip("tensorflow" if framework == "tf" else framework)
    lines = [each for each in mistake(name, size=size, **env) if "0000 00:00" not in each]
    lines = [each for each in lines if "before absl::InitializeLog()" not in each]
    assert len(lines) <= (12 if size == 2 else 14), "\n".join(lines)

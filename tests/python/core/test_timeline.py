"""The timeline of whole jobs: its contents, its common clock, and that it is always readable."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import json
import os
import re
import resource
import signal
import tempfile
import threading
import time
from pathlib import Path

import mpirun
import numpy as np
import pytest
import session
import tiers
from live_job import LiveJob, poll
from timeline_ranks import LAYERS, ROWS, STEPS, WIDTH

import hororing.numpy as hvd
from hororing import errors
from hororing.toolkit.stragglers import read_timeline

RANKS = Path(__file__).parents[1] / "support/timeline_ranks.py"
SIZES = tiers.choose([2, 3], push=[3])
GRADIENTS = [f"{2 * layer}.{kind}" for layer in range(LAYERS) for kind in ("weight", "bias")]


@dataclasses.dataclass
class Span:
    """Times are integers in nanoseconds, so that adjacent spans do not seem to overlap."""

    name: str
    tensor: str
    row: str
    begin: int
    end: int
    bytes: int | None = None

    def overlaps(self, other: Span) -> bool:
        return self.begin < other.end and other.begin < self.end

    def covers(self, other: Span) -> bool:
        return self.begin <= other.begin and other.end <= self.end


def nanoseconds(microseconds: float) -> int:
    return round(1000 * microseconds)


class Timeline:
    """A timeline file, read back without a viewer."""

    def __init__(self, path: Path) -> None:
        self.events: list[dict] = json.loads(path.read_text(encoding="utf-8"))
        self.rows = {
            (event["pid"], event["tid"]): event["args"]["name"]
            for event in self.events
            if event["name"] == "thread_name"
        }
        self.processes = {
            event["pid"]: event["args"]["name"]
            for event in self.events
            if event["name"] == "process_name"
        }

    def spans(self, rank: int, name: str = "") -> list[Span]:
        """Return the spans of a rank, ordered by begin; `name` may be a prefix."""
        found = []
        opened: dict[str, Span] = {}
        for event in self.events:
            if event["pid"] != rank + 1 or not event["name"].startswith(name):
                continue
            row = self.rows.get((event["pid"], event["tid"]), "")
            arguments = event.get("args", {})
            span = Span(
                event["name"],
                arguments.get("tensor", ""),
                row,
                nanoseconds(event.get("ts", 0)),
                nanoseconds(event.get("ts", 0)) + nanoseconds(event.get("dur", 0)),
                arguments.get("bytes"),
            )
            if event["ph"] == "X":
                found.append(span)
            elif event["ph"] == "b":
                opened[event["id"]] = span
            elif event["ph"] == "e":
                opened[event["id"]].end = nanoseconds(event["ts"])
                found.append(opened.pop(event["id"]))
        assert opened == {}
        return sorted(found, key=lambda span: (span.begin, -span.end))

    def tensors(self, rank: int, name: str) -> collections.Counter[str]:
        return collections.Counter(span.tensor for span in self.spans(rank, name))

    def marks(self) -> list[dict]:
        return [event for event in self.events if event["name"] == "CYCLE_START"]


@functools.cache
def trained(size: int) -> Timeline:
    """Return the timeline of a training."""
    pytest.importorskip("torch")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "timeline.json")
        # The parameters would be compared at the first reduction: a request of its own.
        environment = {"HORORING_TIMELINE": str(path), "HORORING_CHECK_PARAMETERS": "0"}
        job = mpirun.run(RANKS, size, "train", environment=environment)
        assert job.returncode == 0, job.report()
        assert job.outputs == [""] * size, job.report()
        return Timeline(path)


@pytest.fixture(params=SIZES)
def size(request: pytest.FixtureRequest) -> int:
    return request.param


# ---------------------------------------------------------------------------------------------
# A training


def test_every_rank_is_a_process_and_every_row_has_a_name(size: int):
    timeline = trained(size)
    assert sorted(timeline.processes) == list(range(1, size + 1))
    for pid, name in timeline.processes.items():
        assert re.fullmatch(rf"rank {pid - 1} \(.+\)", name)
    assert timeline.marks() == []  # they were not requested
    tids = {event["tid"]: event["pid"] for event in timeline.events}
    assert min(tids) >= 1
    used = {(event["pid"], event["tid"]) for event in timeline.events}
    assert len(used) == len(tids), "a tid belongs to one process only"
    assert used == set(timeline.rows)
    for rank in range(size):
        names = [name for (pid, _), name in timeline.rows.items() if pid == rank + 1]
        assert len(set(names)) == len(names)
        assert {"caller", "engine", "negotiation"} <= set(names)


def test_events_have_what_the_format_asks_for(size: int):
    for event in trained(size).events:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] in "be":
            assert event["cat"]
            assert event["id"]
        assert event["ph"] in "MXbei"


def gradients(timeline: Timeline, rank: int, stage: str) -> dict[str, list[Span]]:
    """Return the spans of a stage by gradient, without the earlier broadcasts of parameters."""
    begin = timeline.spans(rank, "HOOK")[0].begin
    found: dict[str, list[Span]] = {}
    for span in timeline.spans(rank, stage):
        if span.begin >= begin and span.tensor in GRADIENTS:
            found.setdefault(span.tensor, []).append(span)
    return found


def test_every_gradient_goes_through_every_stage_on_every_rank(size: int):
    timeline = trained(size)
    for rank in range(size):
        for stage in ("HOOK", "VIEW", "SUBMIT", "NEGOTIATE_ALLREDUCE"):
            counted = {name: len(spans) for name, spans in gradients(timeline, rank, stage).items()}
            assert counted == dict.fromkeys(GRADIENTS, STEPS), stage
        assert timeline.spans(rank, "PLAN")
        batches = timeline.spans(rank, "ALLREDUCE")
        assert sum(tensors_in(batch) for batch in batches) == STEPS * len(GRADIENTS)
        completed = [span.tensor for span in timeline.spans(rank, "COMPLETE")]
        for batch in batches:
            inside = [span for span in timeline.spans(rank) if batch.covers(span)]
            for stage in ("PACK", "REDUCE", "UNPACK"):
                several = f"{tensors_in(batch)} tensors"
                labels = {span.tensor for span in inside if span.name == stage}
                assert labels <= {several if tensors_in(batch) > 1 else batch.tensor}
                # In a small batch, a rank may have nothing to reduce.
                assert labels or batch.bytes < 4 * WIDTH * WIDTH, stage
            assert batch.tensor in completed


def tensors_in(batch: Span) -> int:
    """Return the number of tensors in a batch, whose name lists the first ones."""
    listed, _, more = batch.tensor.partition(" and ")
    names = listed.split(", ")
    assert set(names) <= set(GRADIENTS)
    return len(names) + int(more.removesuffix(" more") or 0)


def test_other_collectives_are_shown_like_gradients(size: int):
    timeline = trained(size)
    for rank in range(size):
        for other in ("BROADCAST", "ALLGATHER"):
            assert timeline.spans(rank, other)
            assert timeline.spans(rank, f"NEGOTIATE_{other}")
        assert timeline.tensors(rank, "NEGOTIATE_BROADCAST")["0.weight"] == 1
        assert timeline.tensors(rank, "SUBMIT")[ROWS] == 1


def test_stages_say_how_many_bytes_they_move(size: int):
    timeline = trained(size)
    for rank in range(size):
        for stage in ("VIEW", "SUBMIT", "NEGOTIATE_ALLREDUCE"):
            for name, spans in gradients(timeline, rank, stage).items():
                expected = 4 * WIDTH * (WIDTH if name.endswith("weight") else 1)
                assert {span.bytes for span in spans} == {expected}, (stage, name)
        total = sum(span.bytes for span in timeline.spans(rank, "ALLREDUCE"))
        assert total == STEPS * LAYERS * 4 * (WIDTH * WIDTH + WIDTH)
        mine = [s.bytes for s in timeline.spans(rank, "NEGOTIATE_ALLGATHER") if s.tensor == ROWS]
        assert mine == [8 * (rank + 1)]


def test_the_stages_of_a_gradient_follow_one_another(size: int):
    timeline = trained(size)
    for rank in range(size):
        stages = ("HOOK", "VIEW", "SUBMIT", "NEGOTIATE_ALLREDUCE")
        found = [gradients(timeline, rank, stage) for stage in stages]
        for name in GRADIENTS:
            for step in range(STEPS):
                hook, view, submit, negotiation = (spans[name][step] for spans in found)
                assert hook.covers(view)
                assert hook.covers(submit)
                assert view.end <= submit.begin <= negotiation.begin <= negotiation.end
                assert {hook.row, view.row, submit.row} == {hook.row}
                assert negotiation.row == "negotiation"


def test_the_engines_stages_lie_inside_their_batch(size: int):
    timeline = trained(size)
    for rank in range(size):
        engine = [span for span in timeline.spans(rank) if span.row == "engine"]
        batches = [span for span in engine if span.name in ("ALLREDUCE", "BROADCAST", "ALLGATHER")]
        assert {span.name for span in engine} == {
            *("PLAN", "ALLREDUCE", "BROADCAST", "ALLGATHER", "PACK", "REDUCE", "UNPACK"),
            "COMPLETE",
        }
        for span in engine:
            if span.name in ("PACK", "REDUCE", "UNPACK"):
                assert any(batch.covers(span) for batch in batches), span
        for earlier, later in itertools.pairwise(batches):
            assert earlier.end <= later.begin


def test_all_ranks_are_on_one_clock(size: int):
    """An allreduce ends on no rank before it has begun on all ranks."""
    timeline = trained(size)
    batches = [timeline.spans(rank, "ALLREDUCE") for rank in range(size)]
    assert len({tuple(span.tensor for span in each) for each in batches}) == 1
    for same in zip(*batches, strict=True):
        for one in same:
            assert all(one.overlaps(other) for other in same), same
    # The first allreduce ends on every rank before the last one begins on any.
    first, last = (timeline.spans(0, "ALLREDUCE")[at] for at in (0, -1))
    for rank in range(size):
        mine = timeline.spans(rank, "ALLREDUCE")
        assert mine[0].overlaps(first)
        assert mine[-1].overlaps(last)
        assert mine[0].end < last.begin


def test_gradients_travel_while_backward_still_runs(size: int):
    """A batch of a step is reduced before the step's last gradient is ready."""
    timeline = trained(size)
    for rank in range(size):
        hooks = timeline.spans(rank, "HOOK")
        steps = [hooks[at : at + 2 * LAYERS] for at in range(0, len(hooks), 2 * LAYERS)]
        assert len(steps) == STEPS
        batches = timeline.spans(rank, "ALLREDUCE")
        overlapping = [
            step
            for step in steps
            if any(step[0].begin < batch.begin < step[-1].begin for batch in batches)
        ]
        # In nearly all steps; on a busy machine, in some.
        assert overlapping, f"rank {rank}: in no step"


# ---------------------------------------------------------------------------------------------
# The job is killed


@pytest.mark.parametrize("size", SIZES)
def test_a_killed_job_leaves_a_whole_file(size: int, tmp_path: Path):
    path = tmp_path / "timeline.json"
    with LiveJob(RANKS, size, "work_on", HORORING_TIMELINE=str(path)) as job:
        pids = [job.pid(rank) for rank in range(size)]
        reduced = [f'"name":"REDUCE","ph":"X","pid":{rank + 1},' for rank in range(size)]
        assert poll(lambda: path.exists() and all(map(path.read_text().__contains__, reduced)))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        job.end()
        assert job.files_left() == set()
    timeline = Timeline(path)
    for rank in range(size):
        assert timeline.spans(rank, "REDUCE")
        assert any(tensor.startswith("tensor ") for tensor in timeline.tensors(rank, "SUBMIT"))


# ---------------------------------------------------------------------------------------------
# At run time: cases run on every rank


def paths(*names: str) -> list[Path]:
    """Return files in a new folder, the same on every rank."""
    folder = tempfile.mkdtemp() if hvd.rank() == 0 else ""
    return [Path(hvd.broadcast_object(folder, root_rank=0), name) for name in names]


def reduce(name: str) -> None:
    assert hvd.allreduce(np.ones(4), name=name, op=hvd.Sum)[0] == hvd.size()


def seen(path: Path) -> list[set[str]]:
    """Return the tensors that each rank has submitted according to the file."""
    timeline = Timeline(path)
    return [
        {tensor for tensor in timeline.tensors(rank, "SUBMIT") if tensor.startswith("t ")}
        for rank in range(hvd.size())
    ]


def case_before_init_there_is_no_timeline() -> None:
    for call in (lambda: hvd.start_timeline("/nowhere/t.json"), hvd.stop_timeline):
        with pytest.raises(ValueError, match="has not been initialized"):
            call()
    hvd.init()


def case_a_timeline_holds_what_is_between_start_and_stop() -> None:
    (path,) = paths("t.json")
    reduce("t before")
    hvd.start_timeline(path)  # on all ranks; rank 0's call counts
    hvd.barrier()
    for name in ("t one", "t two"):
        reduce(name)
    hvd.barrier()
    hvd.stop_timeline()
    if hvd.rank() == 0:
        # The file is complete when stop_timeline returns.
        assert seen(path) == [{"t one", "t two"}] * hvd.size()
        assert Timeline(path).marks() == []
    hvd.stop_timeline()  # has no effect
    hvd.barrier()
    reduce("t after")
    if hvd.rank() == 0:
        assert seen(path) == [{"t one", "t two"}] * hvd.size()


def case_stop_is_no_error_if_another_rank_has_ended_its_script() -> None:
    (path,) = paths("t.json")
    hvd.start_timeline(path)
    hvd.barrier()
    reduce("t last")
    if hvd.rank() == 0:
        if hvd.size() > 1:
            with pytest.raises(errors.ShutDownError):
                hvd.barrier()
        hvd.stop_timeline()
        assert seen(path) == [{"t last"}] * hvd.size()
    hvd.shutdown()
    hvd.init()


def case_start_while_started_goes_on_in_the_new_file() -> None:
    first, second = paths("first.json", "second.json")
    if hvd.rank() == 0:
        hvd.start_timeline(str(first))
    hvd.barrier()
    reduce("t first")
    hvd.barrier()
    if hvd.rank() == 0:
        hvd.start_timeline(str(second), mark_cycles=True)
        assert seen(first) == [{"t first"}] * hvd.size()
    hvd.barrier()
    reduce("t second")
    hvd.barrier()
    if hvd.rank() == 0:
        hvd.stop_timeline()
        assert seen(second) == [{"t second"}] * hvd.size()
        assert Timeline(first).marks() == []
        assert Timeline(second).marks() != []


def case_start_with_the_path_in_use_is_ignored() -> None:
    (path,) = paths("t.json")
    hvd.start_timeline(path)
    hvd.barrier()
    reduce("t first")
    hvd.barrier()
    hvd.start_timeline(path)
    hvd.barrier()
    reduce("t second")
    hvd.barrier()
    hvd.start_timeline(path, mark_cycles=True)  # which can be added
    hvd.barrier()
    reduce("t third")
    hvd.barrier()
    hvd.stop_timeline()
    if hvd.rank() == 0:
        assert seen(path) == [{"t first", "t second", "t third"}] * hvd.size()
        assert Timeline(path).marks() != []


def case_an_earlier_file_is_begun_anew() -> None:
    (path,) = paths("t.json")
    for name in ("t long ago", "t now"):
        hvd.start_timeline(path)
        hvd.barrier()
        reduce(name)
        hvd.barrier()
        hvd.stop_timeline()
        hvd.barrier()
    if hvd.rank() == 0:
        assert seen(path) == [{"t now"}] * hvd.size()


def case_a_path_with_a_zero_character_is_an_error() -> None:
    with pytest.raises(ValueError, match="holds a zero character"):
        hvd.start_timeline("t.json\0")


def begin_again(path: Path, **environment: str) -> None:
    hvd.shutdown()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HORORING_TIMELINE", str(path))
        for name, text in environment.items():
            patch.setenv(f"HORORING_TIMELINE_{name}", text)
        hvd.init()


def case_the_timeline_is_about_the_steps_that_are_asked_for() -> None:
    some, none = paths("some.json", "none.json")
    for path, steps in ((some, "3:5"), (none, "90:91")):
        begin_again(path, STEPS=steps)
        for _ in range(8):
            reduce("t one")
            reduce("t two")
            hvd.allreduce(np.ones(1))  # an unnamed call does not matter
        hvd.shutdown()
        if path is some and path.exists():  # on rank 0, and on ranks that see its files
            timeline = Timeline(path)
            for rank in sorted(pid - 1 for pid in timeline.processes):
                counted = timeline.tensors(rank, "NEGOTIATE_ALLREDUCE")
                assert (counted["t one"], counted["t two"]) == (3, 3), counted
        assert not none.exists()
    hvd.init()


def case_cycles_are_marked_when_asked_for() -> None:
    (path,) = paths("t.json")
    pids = range(1, hvd.size() + 1)
    begin_again(path, MARK_CYCLES="1")
    for _ in range(STEPS):
        reduce("t cycle")
    hvd.barrier()
    hvd.shutdown()
    if path.exists():
        marks = Timeline(path).marks()
        assert {(each["ph"], each["s"], each["pid"]) for each in marks} == {
            ("i", "g", pid) for pid in pids
        }
        assert len(marks) >= len(pids) * STEPS
    hvd.init()


def case_a_long_timeline_keeps_its_last_part() -> None:
    (path,) = paths("t.json")
    alone = hvd.size() == 1  # its events fit, and it records no collectives
    begin_again(path, BYTES="600000")
    for step in range(600):
        hvd.allreduce(np.ones(1), name=f"t {step}")
        time.sleep(0.002)  # ranks send events five times a second
    hvd.barrier()
    hvd.shutdown()
    if path.exists() and not alone:
        assert len(path.read_text()) <= 600_003
        recording = read_timeline(path)
        found = [int(c.name[2:]) for c in recording.collectives if c.name.startswith("t ")]
        assert len(found) > 20
        assert found == list(range(600 - len(found), 600))
    hvd.init()


def case_a_path_that_cannot_be_written_is_an_error_on_rank_0() -> None:
    missing, good = paths("no/such/folder/t.json", "good.json")
    if hvd.rank() == 0:
        with pytest.raises(ValueError, match=r"cannot write the timeline '.*no/such/folder"):
            hvd.start_timeline(missing)
        with pytest.raises(ValueError, match="cannot write the timeline"):
            hvd.start_timeline(missing.parents[3])  # a folder
        with pytest.raises(ValueError, match=r"cannot write .*/dev/full.*not a regular file"):
            hvd.start_timeline("/dev/full")
    else:
        hvd.start_timeline(missing)
    hvd.barrier()
    assert not missing.exists()
    hvd.stop_timeline()
    hvd.start_timeline(good)
    hvd.barrier()
    reduce("t good")
    hvd.barrier()
    hvd.stop_timeline()
    if hvd.rank() == 0:
        assert seen(good) == [{"t good"}] * hvd.size()


def case_a_full_disk_is_logged_once_and_does_not_stop_the_job() -> None:
    (path,) = paths("t.json")
    hvd.start_timeline(path)
    hvd.barrier()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    with tempfile.TemporaryFile("w+") as log:
        stderr = os.dup(2)
        os.dup2(log.fileno(), 2)
        if hvd.rank() == 0:  # as on a full disk
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
        for step in range(300):
            reduce(f"t {step}")
            time.sleep(0.003)  # ranks send events five times a second
        hvd.barrier()
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        os.dup2(stderr, 2)
        os.close(stderr)
        log.seek(0)
        logged = log.read().count("cannot write to the timeline")
    assert logged == (hvd.rank() == 0)
    hvd.stop_timeline()
    if hvd.rank() == 0:
        Timeline(path)  # valid JSON, with complete events


def case_several_threads_have_rows_of_their_own_and_a_strange_name_is_kept() -> None:
    (path,) = paths("t.json")
    hvd.start_timeline(path)
    hvd.barrier()
    strange = 't "quoted" \\ \t </script> größer 数'

    def play(number: int) -> None:
        for step in range(20):
            reduce(f"t {number}.{step}")

    threads = [threading.Thread(target=play, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reduce(strange)
    hvd.barrier()
    hvd.stop_timeline()
    if hvd.rank() == 0:
        names = {f"t {number}.{step}" for number in range(4) for step in range(20)}
        assert seen(path) == [names | {strange}] * hvd.size()
        timeline = Timeline(path)
        for rank in range(hvd.size()):
            rows: dict[str, list[Span]] = {}
            for span in timeline.spans(rank, "SUBMIT"):
                rows.setdefault(span.row, []).append(span)
            for row in rows.values():
                for earlier, later in itertools.pairwise(row):
                    assert earlier.end <= later.begin or earlier.covers(later)


def case_a_timeline_may_be_running_at_shutdown() -> None:
    (path,) = paths("t.json")
    hvd.start_timeline(path)
    hvd.barrier()
    reduce("t last")
    hvd.barrier()
    hvd.shutdown()
    hvd.init()
    if hvd.rank() == 0:
        assert seen(path) == [{"t last"}] * hvd.size()
    hvd.barrier()


test_at_run_time = session.on_ranks(globals(), 1, 2, 3, session="numpy")

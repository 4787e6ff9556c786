"""The diagnosis of stragglers: in synthetic timelines, and in real jobs with injected delays."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import mpirun
import numpy as np
import pytest
import session

from hororing import __main__ as main
from hororing.toolkit.stragglers import StragglerInjector, diagnose, read_timeline, replay

TENSORS = ["conv", "dense", "bias"]


def write(path: Path, hosts: list[str], events: list[tuple]) -> Path:
    """Write a timeline of negotiations: (rank, seconds, tensor, other arguments)."""
    records = [
        {"name": "process_name", "ph": "M", "pid": r + 1, "args": {"name": f"rank {r} ({h})"}}
        for r, h in enumerate(hosts)
    ]
    for rank, at, tensor, more in events:
        head = {"name": "NEGOTIATE_ALLREDUCE", "pid": rank + 1, "cat": "negotiate"}
        args = {"tensor": tensor, "bytes": 4, **more}
        records.append({**head, "ph": "b", "id": "1", "ts": at * 1e6, "args": args})
        records.append({**head, "ph": "e", "id": "1", "ts": at * 1e6 + 1})
    path.write_text(json.dumps(records))
    return path


def synchronous(delays: np.ndarray, step_s: float = 0.1) -> list[tuple]:
    """Return events of ranks that work for `step_s` plus a delay, and then wait for all."""
    events, now = [], 5.0
    for row in delays:
        arrivals = now + step_s + row
        for i, tensor in enumerate(TENSORS):
            for rank, at in enumerate(arrivals):
                events.append((rank, at - 0.01 * (len(TENSORS) - 1 - i), tensor, {}))
        now = arrivals.max()
    return events


def test_of_the_last_part_of_a_timeline_what_all_ranks_have_counts(tmp_path):
    delays = np.zeros((41, 4))
    delays[:, 2] = 0.3
    events = synchronous(delays)
    # Rank 0 has lost more events than the others, and the newest events come first.
    kept = [e for i, e in enumerate(events) if i > 60 and (e[0] != 0 or i > 130)]
    path = write(tmp_path / "t", ["h"] * 4, kept[200:] + kept[:200])
    with pytest.raises(AssertionError):
        assert diagnose(read_timeline(path)).persistent == [2]
    records = json.loads(path.read_text())
    records.append({"name": "process_labels", "ph": "M", "pid": 1, "args": {"labels": "x"}})
    path.write_text(json.dumps(records))
    found = diagnose(read_timeline(path))
    assert (found.persistent, found.random) == ([2], [])
    assert 28 <= found.steps <= 31


def test_a_rank_that_is_always_late_is_persistent_and_what_it_costs_is_exact(tmp_path):
    delays = np.zeros((41, 4))
    delays[:, 2] = 0.3
    found = diagnose(read_timeline(write(tmp_path / "t", ["h"] * 4, synchronous(delays))))
    assert (found.persistent, found.random, found.slow_hosts) == ([2], [], [])
    assert found.steps == 40  # the begin of the first step is unknown
    late = found.ranks[2]
    assert (late.late_steps, late.late_share) == (40, 1.0)
    assert [late.behind_s, late.waited_for_s, late.waited_s] == pytest.approx([0.3, 36.0, 0.0])
    assert found.ranks[0].waited_s == pytest.approx(12.0)
    assert found.lost_s == pytest.approx(12.0)
    assert found.seconds == pytest.approx(16.0)
    assert found.tolerance_s == pytest.approx(0.01)
    for collective in read_timeline(tmp_path / "t").collectives:
        assert collective.lateness == pytest.approx([0, 0, 0.3, 0])
    assert found.predicted["local SGD, period 8"] == pytest.approx(1.0)
    assert "persistently late: rank 2. Averaging less often cannot help" in str(found)


def test_random_delays_are_random_and_predictions_are_the_replay_of_their_draws(tmp_path):
    delays = StragglerInjector(0.1, 0.5, seed=8).delays(201, 4)
    path = write(tmp_path / "t", ["a", "a", "b", "b"], synchronous(delays))
    found = diagnose(read_timeline(path))
    assert (found.persistent, found.random) == ([], [0, 1, 2, 3])
    assert "late by chance: ranks 0, 1, 2 and 3. Local" in str(found)
    draws = 0.1 + delays[1:]
    # If more than half of the ranks are late at once, being late is normal.
    told = delays[1:][np.count_nonzero(delays[1:], axis=1) <= 2]
    for rank in range(4):
        assert found.ranks[rank].late_steps == np.count_nonzero(told[:, rank])
    assert found.lost_s == pytest.approx(told.max(1).sum())
    for name, levels in {
        "local SGD, period 2": {2: 4},
        "local SGD, period 8": {8: 4},
        "hierarchical SGD, hosts 2, all 8": {2: 2, 8: 4},
    }.items():
        expected = replay(draws, {1: 4}) / replay(draws, levels)
        assert found.predicted[name] == pytest.approx(expected, rel=1e-6)
    assert "Local or hierarchical SGD averages less often" in str(found)


def test_many_stragglers_are_told_from_few(tmp_path):
    delays = StragglerInjector.thirty_percent(0.5, seed=8).delays(100, 4)
    found = diagnose(read_timeline(write(tmp_path / "t", ["h"] * 4, synchronous(delays))))
    assert found.persistent == []
    assert "averaging less often gains little" in str(found)


def test_a_host_whose_ranks_are_all_late_is_named(tmp_path):
    delays = np.tile([0, 0, 0.2, 0.2], (10, 1))
    hosts = ["quick", "quick", "slow one", "slow one"]
    found = diagnose(read_timeline(write(tmp_path / "t", hosts, synchronous(delays))))
    assert (found.persistent, found.slow_hosts) == ([2, 3], ["slow one"])
    assert "host slow one: all its ranks are late" in str(found)
    assert found.predicted == {}  # too few steps


def test_waits_within_a_step_do_not_hide_who_is_late(tmp_path):
    events, now = [], 5.0
    for step in range(41):
        arrivals = now + 0.1 + np.array([0, 0, 0.3, 0])
        for i, tensor in enumerate(TENSORS):  # gradients: nobody waits between them
            events += [(rank, at - 0.02 + 0.01 * i, tensor, {}) for rank, at in enumerate(arrivals)]
        # backward() has waited for all of them
        arrivals = arrivals.max() + 0.001 + np.array([0, 0.02 * (step % 2), 0, 0])
        events += [(rank, at, "loss", {}) for rank, at in enumerate(arrivals)]
        now = arrivals.max()
    found = diagnose(read_timeline(write(tmp_path / "t", ["h"] * 4, events)))
    assert (found.persistent, found.random) == ([2], [1])
    assert (found.ranks[2].late_steps, found.ranks[1].late_steps) == (40, 20)
    assert found.ranks[2].behind_s == pytest.approx(0.3)
    assert found.ranks[1].behind_s == pytest.approx(0.02)
    assert found.ranks[0].waited_s == pytest.approx(40 * 0.3 + 20 * 0.02)
    assert found.lost_s == pytest.approx(40 * 0.3)


def test_no_stragglers_are_no_stragglers(tmp_path):
    jitter = np.random.default_rng(1).random((50, 4)) * 0.004
    found = diagnose(read_timeline(write(tmp_path / "t", ["h"] * 4, synchronous(jitter))))
    assert (found.persistent, found.random, found.lost_s) == ([], [], 0)
    assert "no stragglers" in str(found)
    strict = diagnose(read_timeline(tmp_path / "t"), tolerance_s=1e-3)
    assert all(rank.late_steps for rank in strict.ranks)


def test_sets_with_equal_names_are_apart_and_peers_of_a_late_rank_are_not_blamed(tmp_path):
    # Pairs average in every step, all ranks in every fourth; rank 3 is always late by 0.2 s.
    events, clock = [], np.full(4, 1.0)
    for step in range(1, 41):
        clock += 0.1 + np.array([0, 0, 0, 0.2])
        for pair in (0, 1):
            members = slice(2 * pair, 2 * pair + 2)
            for rank in (2 * pair, 2 * pair + 1):
                events.append((rank, clock[rank], "weights", {"process_set": 1 + pair}))
            clock[members] = clock[members].max()
        if step % 4 == 0:
            events += [(rank, clock[rank], "weights", {}) for rank in range(4)]
            clock[:] = clock.max()
    found = diagnose(read_timeline(write(tmp_path / "t", ["h"] * 4, events)))
    assert (found.persistent, found.random) == ([3], [])
    assert found.ranks[2].waited_s == pytest.approx(39 * 0.2)
    assert found.ranks[0].waited_s == pytest.approx(10 * 4 * 0.2)
    assert found.predicted == {}  # these are not steps of all ranks


def test_a_rank_that_has_joined_is_not_late(tmp_path):
    events = synchronous(np.zeros((10, 2)))
    for i, (rank, at, tensor, _) in enumerate(events):
        if rank == 1 and at > 5.5:
            events[i] = (rank, at + 0.5, tensor, {"joined": True})
    found = diagnose(read_timeline(write(tmp_path / "t", ["h"] * 2, events)))
    assert found.persistent == found.random == []


def test_the_timeline_of_a_killed_job_counts_as_far_as_it_goes(tmp_path):
    delays = np.zeros((30, 3))
    delays[:, 0] = 0.2
    events = synchronous(delays)
    events = [event for event in events if event[0] != 2 or event[1] < 10]  # some are missing
    found = diagnose(read_timeline(write(tmp_path / "t", ["h"] * 3, events)))
    assert found.persistent == [0]
    assert found.steps < 29


def test_unnamed_collectives_are_a_step_each(tmp_path):
    events = [
        (rank, 1 + step + 0.3 * rank, f"allreduce.noname.{step}", {})
        for step in range(10)
        for rank in range(2)
    ]
    assert diagnose(read_timeline(write(tmp_path / "t", ["h"] * 2, events))).steps == 9


def test_calls_of_torch_distributed_of_one_size_are_the_same_in_every_step(tmp_path):
    events = []
    for step in range(10):
        for i, size in enumerate((4096, 1024)):  # two buckets
            name = f"group1.{2 * step + i + 1}" + f".then{2 * step + 1}.1" * (step % 2)
            for rank in range(2):
                events.append((rank, 1 + step + 0.1 * i + 0.3 * rank, name, {"bytes": size}))
    found = diagnose(read_timeline(write(tmp_path / "t", ["h"] * 2, events)))
    assert (found.steps, found.persistent, found.random) == (9, [1], [])
    assert found.ranks[1].behind_s == pytest.approx(0.3)


def test_the_command_prints_a_report_or_says_what_is_wrong(tmp_path, capsys):
    path = write(tmp_path / "t.json", ["h"] * 2, synchronous(np.tile([0, 0.2], (9, 1))))
    assert main.main(["stragglers", str(path)]) == 0
    assert "persistently late: rank 1" in capsys.readouterr().out
    assert main.main(["stragglers", str(path), "--json", "--tolerance-ms", "500"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["persistent"], report["tolerance_s"]) == ([], 0.5)
    assert report["ranks"][1]["kind"] == "punctual"
    for content, text in (
        ("{", "is not a timeline"),
        ("[]", "does not name its ranks"),
        ('[{"name": "x"}, 3]', "is not a list of events"),
        (json.dumps(json.loads(path.read_text())[:4]), "0 steps of 2 ranks were recorded"),
        (json.dumps(json.loads(path.read_text())[:1]), "0 steps of 1 rank were recorded"),
    ):
        path.write_text(content)
        assert main.main(["stragglers", str(path)]) == 1
        assert text in capsys.readouterr().err
    assert main.main(["stragglers", str(tmp_path / "none")]) == 1
    assert "did the job set HORORING_TIMELINE?" in capsys.readouterr().err


def test_the_report_ends_quietly_where_nobody_reads_it(tmp_path):
    path = write(tmp_path / "t.json", ["h"] * 2, synchronous(np.tile([0, 0.2], (9, 1))))
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "hororing", "stragglers", str(path), "--json"]
    done = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, check=False, timeout=60)
    os.close(writes)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


# ---------------------------------------------------------------------------------------------
# Real ranks. The delays are far longer than those of a busy machine, which may also count as late.

DELAY_S = 0.1


def train(steps: int, late: StragglerInjector, process_set=None) -> None:
    import hororing.numpy as hvd

    for _ in range(steps):
        late()
        more = {"process_set": process_set} if process_set else {}
        handles = [hvd.allreduce_async(np.ones(9), name=tensor, **more) for tensor in TENSORS]
        for handle in handles:
            hvd.synchronize(handle)


def case_a_rank_that_is_delayed_in_every_step_is_found_while_it_runs():
    import hororing.numpy as hvd
    from hororing.toolkit.stragglers import StragglerWatch

    hvd.init(process_sets="dynamic")
    culprit = random.Random(mpirun.seed()).randrange(hvd.size())
    with StragglerWatch(tolerance_s=DELAY_S / 2) as watch:
        train(9, StragglerInjector(1.0, DELAY_S, ranks=[culprit]))
    found = watch.diagnosis  # on every rank
    assert found.persistent == [culprit], found
    assert found.steps == 8
    others = (hvd.size() - 1) * 8 * DELAY_S
    assert 0.5 * others < found.ranks[culprit].waited_for_s, found


def case_random_delays_are_found_to_be_random():
    from hororing.toolkit.stragglers import StragglerWatch

    late = StragglerInjector(0.25, DELAY_S, seed=5)
    with StragglerWatch(tolerance_s=DELAY_S / 2) as watch:
        train(24, late)
    drawn = np.count_nonzero(late.delays(24)[1:], axis=0)
    found = watch.diagnosis
    assert found.persistent == [], found
    for rank, count in enumerate(drawn):
        # If half of the ranks are late at once, they are not later than half of the ranks.
        assert found.ranks[rank].late_steps <= count + 5, (found, drawn)
    assert sum(rank.late_steps for rank in found.ranks) >= 0.6 * sum(drawn), (found, drawn)


def case_sets_are_told_apart():
    import hororing.numpy as hvd
    from hororing.toolkit.stragglers import StragglerWatch

    pairs = [hvd.add_process_set([0, 1]), hvd.add_process_set([2, 3])]
    mine = pairs[hvd.rank() // 2]
    with StragglerWatch(tolerance_s=DELAY_S / 2) as watch:
        train(6, StragglerInjector(1.0, DELAY_S, ranks=[3]), mine)
    found = watch.diagnosis
    assert found.persistent == [3], found
    assert found.ranks[2].waited_s > max(4 * DELAY_S, found.ranks[0].waited_s), found


def case_a_watch_says_why_it_cannot():
    from hororing.toolkit.stragglers import StragglerWatch

    for wrong in ("5 ms", -1.0, float("nan")):
        with pytest.raises(ValueError, match=f"from 0 on, not {wrong!r}"):
            StragglerWatch(tolerance_s=wrong)
    watch = StragglerWatch()
    with pytest.raises(ValueError, match="0 steps of 4 ranks were recorded"), watch:
        pass
    with pytest.raises(RuntimeError, match="have not ended"):
        _ = watch.diagnosis
    steps = {"HORORING_TIMELINE": "steps.json", "HORORING_TIMELINE_STEPS": "10:12"}
    with (
        mock.patch.dict(os.environ, steps),
        pytest.raises(ValueError, match="HORORING_TIMELINE_STEPS chooses the steps"),
        watch,
    ):
        pass


def case_a_watch_lets_a_timeline_be_and_reads_its_part():
    import hororing.numpy as hvd
    from hororing.toolkit.stragglers import StragglerWatch

    path = Path(os.environ["TMPDIR"], "stragglers.json")
    hvd.start_timeline(path)
    hvd.barrier()
    train(4, StragglerInjector(1.0, DELAY_S, ranks=[0]))
    for culprit in (1, 2):
        with StragglerWatch(tolerance_s=DELAY_S / 2) as watch:
            train(6, StragglerInjector(1.0, DELAY_S, ranks=[culprit]))
        assert watch.diagnosis.persistent == [culprit], watch.diagnosis
        assert watch.diagnosis.steps == 5
    train(1, StragglerInjector(0.0, DELAY_S))
    hvd.stop_timeline()
    if hvd.rank() == 0:
        names = [each.name for each in read_timeline(path).collectives]
        assert names.count(TENSORS[0]) == 4 + 2 * 6 + 1
    hvd.barrier()


def case_a_rank_that_joins_early_is_not_late():
    import hororing.numpy as hvd

    folder = Path(os.environ["TMPDIR"], "joined.json")
    hvd.start_timeline(folder)
    hvd.barrier()
    train(8 if hvd.rank() else 4, StragglerInjector(1.0, DELAY_S, ranks=[1]))
    hvd.join()
    hvd.stop_timeline()
    if hvd.rank() == 0:
        recording = read_timeline(folder)
        gone = [c for c in recording.collectives if np.isnan(c.arrivals[0])]
        assert len(gone) == 4 * len(TENSORS), recording
        assert diagnose(recording, DELAY_S / 2).persistent == [1]
    hvd.barrier()


test_in_a_job_of_four_ranks = session.on_ranks(globals(), 4, push=[4])

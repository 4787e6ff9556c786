"""Predictions: recorded phases, the engine's rule, the cost of a network, and the report."""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from hororing import __main__ as main
from hororing.toolkit.predict import Network, predict, read_profile
from hororing.toolkit.predict.network import agreement, exchange
from hororing.toolkit.predict.replay import Variant, end_of_batches, groups, plan, step_times
from hororing.toolkit.predict.report import fitted

ROOT = Path(__file__).parents[3]
SIZES = {"w1": 4_000_000, "w2": 1_000_000, "loss": 4}
S_PER_BYTE, FIXED_S = 1e-9, 50e-6


def timeline(path, ranks=2, steps=12, hosts=1, late_ms=0.0):
    """Steps of 10 ms of computing: w1 after 6 ms, w2 after 9, then a loss that is waited for.

    The last rank is later by `late_ms` in every fourth step.
    """
    events = []
    for rank in range(ranks):
        name = f"rank {rank} (node{rank * hosts // ranks})"
        events.append({"name": "process_name", "ph": "M", "pid": rank + 1, "args": {"name": name}})
    free, number = 0.0, itertools.count()
    for step in range(steps):
        more = [late_ms * (rank == ranks - 1 and step % 4 == 0) * 1e-3 for rank in range(ranks)]
        for phase in ({"w1": 6e-3, "w2": 9e-3}, {"loss": 1e-3}):
            engine = free
            for tensor, after in phase.items():
                at = [free + after + each * (tensor != "loss") for each in more]
                begin = max(engine, *at)
                engine = begin + FIXED_S + SIZES[tensor] * S_PER_BYTE
                for rank in range(ranks):
                    about = {"tensor": tensor, "bytes": SIZES[tensor]}
                    each = {"pid": rank + 1, "args": about}
                    found, us = str(next(number)), 1e6
                    if tensor != "loss":
                        events.append(
                            {**each, "name": "HOOK", "ph": "X", "ts": at[rank] * us, "dur": 1}
                        )
                    events += [
                        {**each, "name": "SUBMIT", "ph": "X", "ts": at[rank] * us, "dur": 1},
                        {**each, "name": "NEGOTIATE_ALLREDUCE", "cat": "negotiate", "ph": "b",
                         "id": found, "ts": at[rank] * us},
                        {**each, "name": "NEGOTIATE_ALLREDUCE", "cat": "negotiate", "ph": "e",
                         "id": found, "ts": begin * us},
                        {**each, "name": "ALLREDUCE", "ph": "X", "ts": begin * us,
                         "dur": (engine - begin) * us},
                        {**each, "name": "COMPLETE", "ph": "X", "ts": engine * us, "dur": 0},
                    ]  # fmt: skip
            free = engine
    path.write_text(json.dumps(events))
    return path


def test_steps_have_phases_and_the_network_is_fitted(tmp_path):
    profile = read_profile(timeline(tmp_path / "t.json"))
    assert [phase.names for phase in profile.phases] == [("w1", "w2"), ("loss",)]
    # w2 is ready before w1 is reduced, and counts from the same begin.
    np.testing.assert_allclose(profile.phases[0].ready_s, [[[6e-3, 9e-3]] * 2] * 10, rtol=1e-6)
    np.testing.assert_allclose(profile.phases[1].ready_s, 1e-3, rtol=1e-6)
    assert fitted(profile.batches) == (pytest.approx(FIXED_S, rel=1e-6), pytest.approx(1e-9))
    # 6 ms; w1 takes 4.05 ms, then w2 1.05 ms; 1 ms and the loss.
    assert np.median(profile.step_s) == pytest.approx(6e-3 + 4.05e-3 + 1.05e-3 + 1.05e-3, rel=1e-4)


def test_a_rank_whose_first_calls_are_missing(tmp_path):
    path = timeline(tmp_path / "t.json")
    events = json.loads(path.read_text())
    of_rank_1 = [e for e in events if e["pid"] == 2 and e["name"] == "SUBMIT"]
    path.write_text(json.dumps([e for e in events if e not in of_rank_1[:1]]))
    profile = read_profile(path)
    assert [phase.names for phase in profile.phases] == [("w1", "w2"), ("loss",)]
    np.testing.assert_allclose(profile.phases[0].ready_s[1:], [[[6e-3, 9e-3]] * 2] * 8, rtol=1e-6)


def test_the_replay_of_a_recording_takes_as_long(tmp_path):
    for late_ms in (0.0, 8.0):
        profile = read_profile(timeline(tmp_path / "t.json", ranks=4, steps=80, late_ms=late_ms))
        found = predict(profile, [4, 8], seed=3)
        assert found.replayed_s == pytest.approx(found.recorded_s, rel=0.05)
        spread = predict(profile, [4, 8, 32, 128], bits_per_s=100e9, latency_s=1e-6)
        lost = [point.lost["stragglers"] for point in spread.points]
        if late_ms:  # every fourth step of one rank of four: soon one is late in every step
            assert lost[0] < lost[1] < lost[2]
            assert lost[-1] > 0.3
            assert next(iter(spread.remedies)).startswith("average weights")
        else:
            assert max(lost) < 1e-6


def test_bandwidth_and_latency_are_told_apart(tmp_path):
    profile = read_profile(timeline(tmp_path / "t.json", ranks=2, hosts=2))
    slow = predict(profile, [2, 8, 64], bits_per_s=1e9, latency_s=1e-6)
    assert slow.limit.endswith("because of bandwidth")
    assert slow.limit.startswith("stops scaling between 2 and 8 ranks")
    assert "int8 gradients (Compression.int8)" in slow.remedies
    gain, low, high = slow.remedies["int8 gradients (Compression.int8)"]
    assert 1.5 < low <= gain <= high < 4
    far = predict(profile, [2, 8, 64], bits_per_s=1e12, latency_s=20e-3)
    assert far.limit.endswith("because of latency")
    good = predict(profile, [2, 8], bits_per_s=1e12, latency_s=1e-6)
    assert good.limit == ""
    assert "scales to 8 ranks" in str(good)
    assert good.points[1].strong_speedup > 2
    again = predict(profile, [2, 4])  # the network of the recording
    assert again.points[0].step_s == pytest.approx(again.recorded_s, rel=0.05)


def test_input_ends_the_scaling_where_data_comes_too_slowly(tmp_path):
    profile = read_profile(timeline(tmp_path / "t.json"))  # 12.15 ms
    found = predict(profile, [2, 8, 64], bits_per_s=1e12, samples_per_s=20_000, batch=16)
    # 64 ranks take 1,024 samples in a step, for which the source needs 51.2 ms.
    assert found.points[2].step_s == pytest.approx(51.2e-3)
    assert found.points[0].lost["input"] == 0
    assert found.limit.endswith("because of input")
    assert not {"twice the batch per rank", "int8 gradients (Compression.int8)"} & {*found.remedies}
    assert "latency  input  strong" in str(found)
    assert "input" not in predict(profile, [2, 8]).points[0].lost
    for wrong in ({"batch": 16}, {"samples_per_s": 1e3}, {"batch": 0, "samples_per_s": 1e3}):
        with pytest.raises(ValueError, match=r"batch=.*: both, above 0, or neither"):
            predict(profile, [2], **wrong)


def test_the_engines_rule():
    def cost(nbytes):
        return 1.0 + nbytes

    ready, sizes = np.array([1.0, 1.5, 2.1, 9.0]), np.array([1.0, 2.0, 3.0, 4.0])
    # The first alone, the next two when it is done, at 3; the last at 9.
    assert end_of_batches(ready, sizes, cost, lambda count: 0.0) == pytest.approx(14, abs=1e-3)
    assert end_of_batches(ready[:3], sizes[:3], cost, lambda count: 0.0) == pytest.approx(
        3 + 1 + 5, abs=1e-3
    )
    best = min(
        end_of_groups(ready, sizes, ends, cost)
        for count in range(4)
        for ends in itertools.combinations(range(1, 4), count)
    )
    assert end_of_groups(ready, sizes, groups(ready, sizes, cost)[:-1], cost) == best


def end_of_groups(ready, sizes, ends, cost):
    free, first = 0.0, 0
    for end in (*ends, len(ready)):
        free = max(free, ready[end - 1]) + cost(sizes[first:end].sum())
        first = end
    return free


def test_batches_are_those_of_the_core():
    path = ROOT / "build/editable" / ("_testing" + sysconfig.get_config_var("EXT_SUFFIX"))
    if not path.exists():
        pytest.skip("the test module is not built")
    spec = importlib.util.spec_from_file_location("_testing", path)
    core = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(core)
    draw = random.Random(5)
    for _ in range(200):
        sizes = [draw.choice([4, 60, 64, 1000, 70_000]) for _ in range(draw.randrange(1, 30))]
        limit = draw.choice([64, 1024, 100_000])
        assert plan(sizes, limit) == core.plan_fusion([(7, size) for size in sizes], limit)


def test_the_network_of_a_known_cluster():
    net = Network("net", 4, 1e-6, 10e9, 10e-6, 1e9, 1e-6, "made up")
    assert exchange(net, 1, 1e6) == agreement(net, 1, 3) == 0.0
    # 16 ranks on 4 hosts: each host sends 3/4 of the bytes twice over its NIC.
    assert exchange(net, 16, 64e6) == pytest.approx(2 * 0.75 * 64e6 / 1e9, rel=0.02)
    with pytest.raises(ValueError, match="6 ranks are not full hosts of 4"):
        exchange(net, 6, 1e6)


def test_fewer_averages_wait_less_for_late_ranks(tmp_path):
    profile = read_profile(timeline(tmp_path / "t.json", ranks=4, steps=80, late_ms=8.0))
    net = Network("net", 4, 0.0, np.inf, 0.0, np.inf, 0.0, "free")
    every = step_times(profile, net, 32)
    seldom = step_times(profile, net, 32, Variant(period=8))
    assert len(seldom) == 96
    mean = float(profile.compute_s.mean())
    assert mean < seldom.mean() < every.mean()


def test_the_command(tmp_path, capsys):
    path = str(timeline(tmp_path / "t.json", ranks=2))
    plot = tmp_path / "scaling.svg"
    command = ["predict", path, "--ranks", "4,2", "--network", "25Gbit", "--latency", "20us"]
    if importlib.util.find_spec("matplotlib"):
        command += ["--plot", str(plot)]
    assert main.main(command) == 0
    said = capsys.readouterr().out
    assert said.startswith("recorded: 2 ranks on 1 host, ")
    assert "predicted at 25 Gbit/s and 20 us, 2 ranks per host" in said
    assert plot.exists() == ("--plot" in command)
    assert main.main([*command, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert [point["ranks"] for point in figures["points"]] == [2, 4]
    assert main.main(["predict", path, "--ranks", "3", "--network", "1Gbit"]) == 1
    assert "3 ranks are not full hosts of 2" in capsys.readouterr().err
    assert main.main(["predict", str(tmp_path / "none"), "--ranks", "3"]) == 1
    assert "HORORING_TIMELINE" in capsys.readouterr().err
    for wrong in (["--ranks", "x"], ["--ranks", "2", "--network", "fast"]):
        with pytest.raises(SystemExit):
            main.main(["predict", path, *wrong])


def test_other_collectives_are_refused_and_few_steps_too(tmp_path):
    path = timeline(tmp_path / "t.json", steps=5)
    with pytest.raises(ValueError, match=r"has 3 equal steps of 2 ranks; .* at least 5 of two"):
        read_profile(path)
    path = timeline(tmp_path / "t.json")
    path.write_text(path.read_text().replace("NEGOTIATE_ALLREDUCE", "NEGOTIATE_ALLGATHER"))
    with pytest.raises(ValueError, match=r"steps have ALLGATHER 'w1'; predictions know allreduce"):
        read_profile(path)


def test_broadcasts_before_the_steps_do_not_matter(tmp_path):
    path = timeline(tmp_path / "t.json")
    events = json.loads(path.read_text())
    asked = [each for each in events if each["name"] == "NEGOTIATE_ALLREDUCE"]
    first = [{**each, "name": "NEGOTIATE_BROADCAST", "ts": 0.0} for each in asked]
    path.write_text(json.dumps(first + events))
    read_profile(path)

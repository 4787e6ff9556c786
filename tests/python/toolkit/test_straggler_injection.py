"""Injected stragglers: seeded, repeatable, by rank and host; and their effect on a real job."""

from __future__ import annotations

import time

import numpy as np
import pytest
import session

from hororing.toolkit.stragglers import StragglerInjector, injection

HOSTS = ["a", "a", "b", "b"]


@pytest.fixture
def slept(monkeypatch):
    naps: list[float] = []
    monkeypatch.setattr(injection.time, "sleep", naps.append)
    return naps


def test_draws_depend_on_seed_step_and_rank_alone():
    whole = injection.uniform(5, 8, 100)
    np.testing.assert_array_equal(injection.uniform(5, 8, 60, 40), whole[40:])
    np.testing.assert_array_equal(injection.uniform(5, 3, 100), whole[:, :3])
    assert not np.array_equal(injection.uniform(6, 8, 100), whole)
    assert len(np.unique(whole)) == whole.size


@pytest.mark.parametrize("probability", [0.01, 0.1, 0.3, 0.9])
def test_delays_come_as_often_as_asked_for_on_each_rank_independently(probability):
    steps = 20000
    late = StragglerInjector(probability, 0.5, seed=11).delays(steps, 4) > 0
    tolerance = 5 * np.sqrt(probability * (1 - probability) / steps)  # five standard deviations
    np.testing.assert_allclose(late.mean(0), probability, atol=tolerance)
    both = (late[:, 0] & late[:, 1]).mean()
    assert abs(both - probability**2) < 5 * np.sqrt(probability**2 / steps)
    again = (late[1:] & late[:-1]).mean()
    assert abs(again - probability**2) < 5 * np.sqrt(probability**2 / steps)


def test_every_rank_sleeps_what_the_prediction_says(slept):
    predicted = StragglerInjector(0.3, 0.25, seed=2, host_of=HOSTS).delays(50)
    for rank in range(4):
        slept.clear()
        injector = StragglerInjector(0.3, 0.25, seed=2, rank=rank)
        taken = []
        for _ in range(50):
            before = len(slept)
            injector("arguments", of="hooks")
            taken.append(sum(slept[before:]))
        assert taken == predicted[:, rank].tolist()
        assert injector.late_steps == np.count_nonzero(predicted[:, rank]) > 0


def test_a_resumed_injector_goes_on_with_the_same_draws(slept):
    first, second = (StragglerInjector(0.5, 1.0, seed=4, rank=1) for _ in range(2))
    for _ in range(20):
        first()
    second.load_state_dict(first.state_dict())
    slept.clear()
    for _ in range(20):
        second()
    expected = StragglerInjector(0.5, 1.0, seed=4).delays(40, 2)[20:, 1]
    assert len(slept) == np.count_nonzero(expected)


def test_a_fixed_host_is_late_in_every_step_and_nobody_else():
    for host in (1, "b"):
        delays = StragglerInjector.fixed_host(host, 0.1, host_of=HOSTS).delays(7)
        np.testing.assert_array_equal(delays, np.tile([0, 0, 0.1, 0.1], (7, 1)))
    both = StragglerInjector(1.0, 0.1, hosts=["b"], ranks=[0, 3], host_of=HOSTS).delays(1)
    assert both.tolist() == [[0, 0, 0, 0.1]]


def test_thirty_percent_means_of_all_ranks_in_every_step():
    delays = StragglerInjector.thirty_percent(1.0, seed=1).delays(4000, 16)
    assert abs((delays > 0).mean() - 0.3) < 0.01


def test_injection_that_is_off_only_counts(slept):
    for injector in (StragglerInjector(), StragglerInjector(0.5), StragglerInjector(0, 1.0)):
        for _ in range(100):
            injector()
        assert (injector.step, injector.late_steps, slept) == (100, 0, [])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"probability": 1.5}, "probability must be in 0 .. 1, not 1.5"),
        ({"probability": float("nan")}, "probability"),
        ({"delay_s": -1}, "delay_s"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        StragglerInjector(**arguments)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"ranks": [4]}, "there is no rank 4 among 4"),
        ({"hosts": ["c"]}, r"there is no host 'c'; there are \['a', 'b'\]"),
        ({"hosts": [2]}, "there is no host 2"),
    ],
)
def test_ranks_and_hosts_that_do_not_exist_are_named(arguments, text):
    with pytest.raises(ValueError, match=text):
        StragglerInjector(rank=0, host_of=HOSTS, **arguments)


def test_ranks_that_do_not_exist_are_named_by_the_first_call_if_init_comes_later():
    injector = StragglerInjector(0.5, 0.1, rank=0, ranks=[-1])
    with pytest.raises(ValueError, match="there is no rank -1"):
        injector()
    with pytest.raises(ValueError, match="there is no rank -1"):
        injector.delays(1, ranks=2)
    with pytest.raises(TypeError):
        StragglerInjector(ranks=[1.0])


def case_a_late_rank_delays_the_collective_of_all():
    import hororing.numpy as hvd

    hvd.init()
    with pytest.raises(ValueError, match=f"there is no rank 9 among {hvd.size()}"):
        StragglerInjector(ranks=[9])
    injector = StragglerInjector(1.0, 0.15, ranks=[1], hosts=[0])
    for step in range(3):
        before = time.perf_counter()  # a rank may lose its core after the barrier
        hvd.barrier()
        begin = time.perf_counter()
        injector()
        assert hvd.rank() != 1 or time.perf_counter() - begin > 0.14
        hvd.allreduce(np.ones(3), name="gradient")
        assert time.perf_counter() - before > 0.14, step
    assert injector.late_steps == 3 * (hvd.rank() == 1)


def case_an_injector_is_a_hook_of_torch():
    import torch

    layer = torch.nn.Linear(2, 2)
    injector = StragglerInjector(1.0, 0.01)
    layer.register_forward_pre_hook(injector)
    layer(torch.ones(1, 2))
    assert injector.late_steps == 1


test_in_a_job_of_two_ranks = session.on_ranks(globals(), 2, push=[2], session="numpy")

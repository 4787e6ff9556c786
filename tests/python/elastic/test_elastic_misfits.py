"""Processes that join an elastic job and cannot take part in it. Push tier, 8 s."""

from __future__ import annotations

import re
from pathlib import Path

from elastic_ranks import DEADLINE_S, ElasticJob

STATE = """
import os, sys, time
import numpy as np
import hororing.numpy as hvd
from hororing import elastic; from hororing._engine import membership

hvd.init()
SHAPES = {"w": eval(os.environ.get("SHAPE", "[3]")), "v": [2]}


class Weights(elastic.ObjectState):
    def _parts(self):
        return {**super()._parts(), **{name: str(shape) for name, shape in SHAPES.items()}}

    def sync(self):
        for name, shape in SHAPES.items():
            hvd.broadcast(np.zeros(shape), 0, name=name)
        super().sync()


@elastic.run
def train(state):
    print("world", membership.generation(), hvd.rank(), hvd.size(), state.step, flush=True)
    stopped = 0
    while not stopped:
        there = np.array(os.path.exists(sys.argv[1]), int)
        stopped = hvd.allreduce(there, op=hvd.Max, name="stopped")
        state.step += 1
        state.commit()


state = Weights(hvd.broadcast_object, hvd.rank, step=0)
try:
    train(state)
except hvd.MismatchError as error:
    print("error", error, flush=True)
    raise
print("end", state.step, flush=True)
"""


def test_a_newcomer_with_another_setting_raises_and_those_who_train_do_not_notice(tmp_path: Path):
    stop = tmp_path / "stop"
    with ElasticJob(np=2, max_np=3) as job:
        job.begin(2, str(stop))
        newcomer = job.start(str(stop), HORORING_FUSION_BYTES="1MiB")
        assert job.ranks[newcomer].wait(DEADLINE_S) == 1
        (lost,) = job.lost()
        assert lost.refused
        assert "HORORING_FUSION_BYTES: 1MiB here, 64MiB in the job" in lost.why
        assert len(job.worlds()) == 1
        stop.touch()
        job.ends(0, 1)


def test_a_newcomer_whose_state_has_another_form_raises_and_the_others_go_on(tmp_path: Path):
    stop = tmp_path / "stop"
    with ElasticJob(np=2, max_np=3) as job:
        job.begin(2, str(stop), script=STATE)
        newcomer = job.start(str(stop), script=STATE, SHAPE="[4]")
        assert job.ranks[newcomer].wait(DEADLINE_S) == 1
        job.wait(lambda: all(job.started(each, 3) for each in (0, 1)))
        assert "'w' is [4] here, [3] in the job" in job.lines[newcomer][-1]
        assert [each.pid for each in job.lost()] == [job.ranks[newcomer].pid]
        joins = job.start(str(stop), script=STATE)
        job.wait(lambda: job.started(joins, 4))
        stop.touch()
        steps = [line.split()[1] for line in job.ends(0, 1, joins)]
        assert steps == steps[:1] * 3


def test_a_newcomer_that_trains_with_another_shape_raises_and_the_others_go_on(tmp_path: Path):
    stop = tmp_path / "stop"
    script = STATE.replace("int)", "int).reshape([1] * int(os.environ.get('DIMENSIONS', 1)))")
    with ElasticJob(np=2, max_np=3) as job:
        job.begin(2, str(stop), script=script)
        newcomer = job.start(str(stop), script=script, DIMENSIONS="2")
        assert job.ranks[newcomer].wait(DEADLINE_S) == 1
        job.wait(lambda: all(job.started(each, 3) for each in (0, 1)))
        assert "shapes differ" in job.lines[newcomer][-1]
        assert [each.pid for each in job.lost()] == [job.ranks[newcomer].pid]
        stop.touch()
        job.ends(0, 1)


def test_states_that_differ_from_the_start_are_an_error_on_every_rank(tmp_path: Path):
    with ElasticJob(np=2) as job:
        first = job.start(str(tmp_path / "stop"), script=STATE)
        second = job.start(str(tmp_path / "stop"), script=STATE, SHAPE="[4]")
        assert [job.ranks[each].wait(DEADLINE_S) for each in (first, second)] == [1, 1]
        for each in (first, second):
            job.wait(lambda each=each: job.lines[each])
            text = (
                r"error elastic: the states of the ranks differ: 'w' is \[.\] on rank 0, \[.\] on"
            )
            assert re.match(text, job.lines[each][-1])
        assert len(job.worlds()) == 1

"""Elastic jobs of real processes without a launcher: deaths, newcomers, ends. Push tier, 8 s."""

from __future__ import annotations

from pathlib import Path

import pytest
from elastic_ranks import ElasticJob

from hororing.rendezvous.generations import Done, Joined


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_survivors_go_on_in_the_same_processes_and_a_newcomer_joins(tmp_path: Path, transport: str):
    stop = tmp_path / "stop"
    with ElasticJob(np=3, max_np=3) as job:
        for _ in range(3):
            job.start(str(stop), HORORING_TRANSPORT=transport)
        job.wait(lambda: all(job.started(each, 1) for each in range(3)))
        # Rank 0, whatever it has, is not special.
        first = job.process_of(0)
        job.ranks[first].kill()
        rest = sorted({0, 1, 2} - {first})
        job.wait(lambda: all(job.started(each, 2) for each in rest))
        assert job.lost()[0].rank == 0
        for each in rest:
            assert "error PeerLostError 0" in job.lines[each]
        # Members leave for it in agreement: no error.
        new = job.start(str(stop), HORORING_TRANSPORT=transport)
        job.wait(lambda: all(job.started(each, 3) for each in [*rest, new]))
        assert sum(line.startswith("error") for each in rest for line in job.lines[each]) == 2
        stop.touch()
        ends = job.ends(*rest, new)
        assert len(set(ends)) == 1, ends
        assert [world.generation for world in job.worlds()] == [1, 2, 3]
        members = job.worlds()[-1].members
        assert members[0].step > 0
        assert members[2].pid == job.ranks[new].pid
        assert members[2].step == 0
        job.wait(lambda: sum(isinstance(event, Done) for event in job.events) == 3)
        assert sum(isinstance(event, Joined) for event in job.events) == 4

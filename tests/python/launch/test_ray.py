"""Ranks as actors of Ray, in a real local cluster. Full tier, 105 s; skipped without Ray."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiers

from hororing.errors import RunError

ROOT = Path(__file__).parents[3]
FOUND = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not FOUND, reason="Ray is missing: pip install 'hororing[ray]'")


def test_without_ray_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch):
    """Push tier, 0 s."""
    monkeypatch.delitem(sys.modules, "hororing.ray", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        ImportError, match=r"hororing.ray needs Ray .*pip install 'hororing\[ray\]'"
    ):
        importlib.import_module("hororing.ray")


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """Ray with resources for two ranks, and two fake GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # otherwise Ray leaves a file in the home folder
        patch.setenv("HORORING_STALL_WARNING_S", "33")
        ray = pytest.importorskip("ray")
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        ray.init(num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False)
        yield ray
        ray.shutdown()


@pytest.fixture
def executor(ray: Any) -> Iterator[Any]:
    from hororing.ray import RayExecutor

    made = RayExecutor(RayExecutor.create_settings(nics="lo"), num_workers=2, use_gpu=True)
    yield made
    made.shutdown()


# Functions of the ranks.


class Counter:
    def __init__(self, begin: int, *, step: int) -> None:
        import hororing.numpy as hvd

        hvd.init()
        self.value, self.step = begin + hvd.rank(), step

    def count(self) -> int:
        self.value += self.step
        return self.value


def total(factor: float, *, offset: int) -> dict[str, Any]:
    import hororing.numpy as hvd

    hvd.init()
    mine = np.full(3, factor * (hvd.rank() + offset))
    return {
        "rank": hvd.rank(),
        "size": hvd.size(),
        "local": (hvd.local_rank(), hvd.local_size()),
        "sum": hvd.allreduce(mine, op=hvd.Sum).tolist(),
        "variables": dict(os.environ),
    }


def fails(how: str) -> int:
    import hororing.numpy as hvd

    hvd.init()
    if hvd.rank() == 1:
        if how == "killed":
            os.kill(os.getpid(), 9)
        raise KeyError("of one")
    if how != "raised alone":
        hvd.barrier()
    return hvd.rank()


@tiers.full
@needs_ray
def test_results_and_objects_of_ranks(executor: Any):
    executor.start(Counter, [10], {"step": 5}, extra_env_vars={"OF_THIS_TEST": 7})
    answers = executor.run(total, (2.0,), {"offset": 1})
    assert [each["rank"] for each in answers] == [0, 1]
    for rank, each in enumerate(answers):
        assert (each["size"], each["local"], each["sum"]) == (2, (rank, 2), [6.0] * 3)
        told = each["variables"]
        assert told["OF_THIS_TEST"] == "7"
        assert told["HORORING_STALL_WARNING_S"] == "33"  # inherited from this process
        assert told["HORORING_INTERFACE"] == "lo"
        assert told["CUDA_VISIBLE_DEVICES"] == "0,1"
        secrets = [name for name in told if name.startswith("HORORING_SECRET")]
        assert secrets == ["HORORING_SECRET_FD"]  # a file descriptor
    assert executor.execute(lambda counter: counter.count()) == [15, 16]
    assert executor.execute_single(lambda counter: counter.count()) == 20
    from ray import get

    assert [each["rank"] for each in get(executor.run_remote(total, [1.0], {"offset": 0}))] == [
        0,
        1,
    ]
    with pytest.raises(RunError, match="call shutdown"):
        executor.start()


@tiers.full
@needs_ray
def test_failures_name_the_rank_and_what_can_go_on_goes_on(executor: Any):
    with pytest.raises(RunError, match=r"call start\(\) first"):
        executor.run(fails, ["raised alone"])
    executor.start()
    with pytest.raises(RunError, match=r"run: rank 1 on .* raised KeyError: 'of one'") as raised:
        executor.run(fails, ["raised alone"])
    assert raised.value.rank == 1
    assert "in fails" in raised.value.traceback
    assert isinstance(raised.value.__cause__, KeyError)
    assert len(executor.run(total, [1.0], {"offset": 0})) == 2
    # The other rank waits for the one that raised.
    with pytest.raises(RunError, match=r"raised KeyError: 'of one'; rank 0 on .* did not return"):
        executor.run(fails, ["raised"])
    with pytest.raises(RunError, match=r"call start\(\) first"):
        executor.run(fails, ["raised"])
    executor.start()
    with pytest.raises(RunError, match=r"run: the actor of rank 1 on .* has died") as died:
        executor.run(fails, ["killed"])
    assert died.value.rank == 1
    executor.start()
    assert len(executor.run(total, [1.0], {"offset": 0})) == 2


@tiers.full
@needs_ray
def test_a_cluster_without_room_is_an_error(ray: Any):
    from hororing.ray import RayExecutor

    settings = RayExecutor.create_settings(placement_group_timeout_s=1)
    for where, text in (
        ({"num_workers": 3}, r"no room for 3 times \{'CPU': 1\} within 1 s; it has .*'CPU': 2.0"),
        ({"num_hosts": 2}, r"no room for 2 times \{'CPU': 1\} on different nodes"),
    ):
        with pytest.raises(RunError, match=text):
            RayExecutor(settings, **where).start()
    ends = time.monotonic() + 60
    while ray.available_resources().get("CPU") != 2.0:  # resources are released
        assert time.monotonic() < ends
        time.sleep(0.1)


@tiers.full
@needs_ray
def test_horovods_name_is_the_same_and_elastic_jobs_have_a_way_out():
    program = (
        "import hororing.as_horovod, hororing.ray\n"
        "hororing.as_horovod.install()\n"
        "from horovod.ray import RayExecutor\n"
        "assert RayExecutor is hororing.ray.RayExecutor\n"
        "try: import horovod.ray.elastic\n"
        "except ImportError as error: assert 'min_workers' in str(error), error\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@tiers.full
@needs_ray
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "num_workers=None, num_hosts=None: give one of them"),
        ({"num_workers": 2, "num_hosts": 1}, "num_workers=2, num_hosts=1: give one of them"),
        ({"num_workers": 0}, "num_workers=0 is not a whole number from 1"),
        ({"num_workers": 2, "gpus_per_worker": 1}, "gpus_per_worker=1 needs use_gpu=True"),
        ({"num_workers": 1, "reset_limit": 3}, "reset_limit=3 needs min_workers"),
        ({"num_hosts": 1, "min_workers": 1}, "num_hosts excludes min_workers"),
        ({"min_workers": 1, "num_workers_per_host": 2}, "num_workers_per_host needs num_hosts"),
        ({"num_workers": 4, "num_workers_per_host": 2}, "num_workers_per_host needs num_hosts"),
        ({"num_workers": 1, "elastic_timeout": 5}, "elastic_timeout=5 needs min_workers"),
        ({"min_workers": 1, "override_discovery": False}, "override_discovery=False"),
        (
            {"min_workers": 3, "num_workers": 2},
            "min_workers=3, num_workers=2, .*ascend",
        ),
        ({"min_workers": 1, "cooldown_range": (0, 1)}, r"cooldown_range=\(0, 1\) must ascend"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: dict[str, Any], text: str):
    from hororing.ray import RayExecutor

    with pytest.raises(ValueError, match=text):
        RayExecutor(**arguments)
    with pytest.raises(ValueError, match="ssh"):
        RayExecutor.create_settings(ssh_identity_file="key")


class Folder:
    """Files through which the ranks of an elastic job report to the test."""

    def __init__(self, path: str, *, fails: bool = False) -> None:
        self.path, self.fails = Path(path), fails

    def train(self) -> tuple[int, int, float, list[Any]]:
        import hororing.numpy as hvd
        from hororing import elastic
        from hororing._engine import membership

        hvd.init()
        state = elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0, total=0.0)

        @elastic.run
        def loop(state: Any) -> None:
            stop = False
            while not stop:
                told = np.array([1.0, 0.0 if hvd.rank() else (self.path / "stop").exists()])
                ranks, stop = hvd.allreduce(told, op=hvd.Sum)
                if self.fails and state.step == 5:
                    raise KeyError("of all")
                state.total += ranks
                state.step += 1
                pids = [each.pid for each in membership.history()[-1].members]
                if hvd.rank() == 0:
                    (self.path / "new").write_text(f"{membership.generation()} {pids}")
                    (self.path / "new").rename(self.path / "members")
                state.commit()

        loop(state)
        sizes = [(world.step, len(world.members)) for world in membership.history()]
        return os.getpid(), state.step, state.total, sizes


@tiers.full
@needs_ray
def test_of_an_elastic_job_only_the_lost_actor_starts_again(ray: Any, tmp_path: Path):
    from hororing.ray import RayExecutor

    def members(size: int, after: int) -> tuple[int, list[int]]:
        ends = time.monotonic() + 60
        while time.monotonic() < ends:
            told = (tmp_path / "members").read_text() if (tmp_path / "members").exists() else "0 []"
            generation, pids = int(told.split()[0]), json.loads(told.partition(" ")[2])
            if len(pids) == size and generation > after:
                return generation, pids
            time.sleep(0.05)
        raise AssertionError(told)

    executor = RayExecutor(RayExecutor.create_settings(nics="lo"), min_workers=1, max_workers=2)
    executor.start(Folder, [str(tmp_path)])
    with pytest.raises(RunError, match="the ranks of an elastic job change"):
        executor.execute_single(Folder.train)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(executor.execute, Folder.train)
        try:
            generation, (lost, stays) = members(2, 0)
            os.kill(lost, signal.SIGKILL)  # rank 0
            generation, found = members(2, generation)
            assert found[0] == stays  # it has the state
            os.kill(found[1], signal.SIGSTOP)
            generation, again = members(2, generation)
            assert again[0] == stays
            assert len({lost, *found, *again}) == 4
        finally:
            (tmp_path / "stop").touch()
        results = running.result(60)
    pids, steps, totals, sizes = zip(*results, strict=True)
    assert list(pids) == again
    assert len(set(steps)) == len(set(totals)) == 1
    first = [*(step for step, _ in sizes[0]), steps[0]]
    counted = sum(n * (first[i + 1] - first[i]) for i, (_, n) in enumerate(sizes[0]))
    assert totals[0] == counted, sizes
    executor.shutdown()


@tiers.full
@needs_ray
def test_an_elastic_job_that_cannot_go_on_tells_why(ray: Any, tmp_path: Path):
    from hororing.ray import RayExecutor

    few = RayExecutor(min_workers=3, elastic_timeout=1)
    few.start()
    with pytest.raises(RunError, match=r"at least 3 .*each actor needs {'CPU': 1.*'CPU': 2.0"):
        few.run(total, [1.0], {"offset": 0})
    fails = RayExecutor(min_workers=1, max_workers=2, reset_limit=3)
    fails.start(Folder, [str(tmp_path)], {"fails": True})
    with pytest.raises(RunError, match=r"raised KeyError: 'of all'") as raised:
        fails.execute(Folder.train)
    assert isinstance(raised.value.__cause__, KeyError)
    two = RayExecutor(min_workers=2)
    two.start()
    answers = two.run(total, [1.0], {"offset": 1})
    assert [each["sum"] for each in answers] == [[3.0] * 3] * 2


def train(told: dict[str, Any]) -> None:
    import ray.train

    import hororing.numpy as hvd

    hvd.init()
    here = ray.train.get_context()
    assert (here.get_world_rank(), here.get_local_rank()) == (hvd.rank(), hvd.local_rank())
    sums = hvd.allreduce(np.full(3, told["factor"]), op=hvd.Sum).tolist()
    first = not Path(told["mark"]).exists()
    hvd.barrier()
    if first and hvd.rank() == 1:
        Path(told["mark"]).touch()
        raise KeyError("of one")
    hvd.barrier()
    if hvd.rank() == 0:
        Path(told["answer"]).write_text(f"{hvd.size()} {sums} {os.environ['OF_THIS_TEST']}")


@tiers.full
@needs_ray
def test_a_trainer_of_ray_train_and_its_second_try(ray: Any, tmp_path: Path):
    for needed in ("pyarrow", "pandas"):
        pytest.importorskip(needed, reason="pip install 'ray[train]'")
    pytest.importorskip("torch")
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from hororing.ray import HororingConfig

    mark, answer = tmp_path / "tried", tmp_path / "answer"
    TorchTrainer(
        train,
        train_loop_config={"factor": 2.0, "mark": str(mark), "answer": str(answer)},
        torch_config=HororingConfig(env={"OF_THIS_TEST": 7}),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path=str(tmp_path / "results"), failure_config=FailureConfig(max_failures=1)
        ),
    ).fit()
    assert mark.exists()
    assert answer.read_text() == "2 [4.0, 4.0, 4.0] 7"


TWO_NODES = """
import os, ray
from ray.cluster_utils import Cluster
from hororing.ray import RayExecutor

def where():
    import hororing.numpy as hvd
    hvd.init()
    hvd.barrier()
    return (
        hvd.rank(), os.environ["HORORING_LOCAL_RANK"], ray.get_runtime_context().get_node_id(),
        os.environ["HORORING_RENDEZVOUS"],
    )

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
cluster.add_node(num_cpus=2)
ray.init(address=cluster.address)
executor = RayExecutor(num_hosts=2, num_workers_per_host=2)
executor.start()
ranks, local_ranks, nodes, stores = zip(*executor.run(where))
executor.shutdown()
assert ranks == (0, 1, 2, 3), ranks
assert local_ranks == ("0", "1", "0", "1"), local_ranks
assert nodes[0] == nodes[1] != nodes[2] == nodes[3], nodes
assert {each.rpartition(":")[0] for each in stores} == {ray.util.get_node_ip_address()}, stores
ray.shutdown()
cluster.shutdown()
"""


@tiers.full
@needs_ray
def test_ranks_of_a_node_are_neighbours():
    subprocess.run(
        [sys.executable, "-c", TWO_NODES],
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"},
        check=True,
        timeout=200,
    )

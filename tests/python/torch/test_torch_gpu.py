"""hororing.torch with tensors on GPUs, over the fake of tests/fake_gpu: the cases of other files,
through NCCL and through host memory, and those only for devices.

Nothing here needs a GPU, or shows that one works: benchmarks/gpu.sh does, on a machine with GPUs.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import fake_gpu
import mpirun
import pytest
import tiers
import torch

import hororing.torch as hvd
from hororing import errors
from hororing.torch._tensor.verbs import verbs

ROOT = Path(__file__).parents[3]
FAKE = fake_gpu.path()
WHY_NOT = "the fake GPU is not built; make test-cpp builds it"


def case_tensors_travel_by_nccl_or_by_the_host() -> None:
    hvd.init()
    before = fake_gpu.count("collectives")
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool):
        mine = torch.ones(3, dtype=dtype)
        assert hvd.allreduce(mine, op=hvd.Max, name=f"x{dtype}").tolist() == [1, 1, 1]
    went = fake_gpu.count("collectives") - before
    assert went == (0 if os.environ["HORORING_GPU"] == "staged" else 5)


def case_an_optimizer_trains_as_on_one_rank() -> None:
    rank, size = hvd.rank(), hvd.size()
    for options in (
        {},
        {"compression": hvd.Compression.fp16},
        {"compression": hvd.Compression.bf16},
        {"num_groups": 2},
        {"backward_passes_per_step": 2},
    ):
        torch.manual_seed(mpirun.seed())
        model = torch.nn.Sequential(
            torch.nn.Linear(7, 33), torch.nn.Tanh(), torch.nn.Linear(33, 65), torch.nn.Linear(65, 2)
        )
        alone = torch.nn.Sequential(*(type(x)() if not list(x.parameters()) else torch.nn.Linear(
            x.in_features, x.out_features) for x in model))  # fmt: skip
        alone.load_state_dict(model.state_dict())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        passes = int(options.get("backward_passes_per_step", 1))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters(),
            **options,
        )  # fmt: skip
        plain = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
        data = torch.randn(3, passes, size, 5, 7)
        for step in data:
            optimizer.zero_grad()
            plain.zero_grad()
            for batch in step:
                model(batch[rank]).square().mean().backward()
                alone(batch.flatten(0, 1)).square().mean().backward()
            optimizer.step()
            plain.step()
        tolerance = 2e-2 if "compression" in options else 1e-5
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def case_gradients_of_one_stream_share_an_event() -> None:
    model = torch.nn.ParameterList(torch.ones(3) for _ in range(100))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(prefix="many")
    )
    before = fake_gpu.count("recorded")
    sum(parameter.sum() for parameter in model).backward()
    optimizer.synchronize()
    # Batches have 1, 2, 4, ... gradients, and each batch of the engine needs one event.
    assert fake_gpu.count("recorded") - before < 40


def check_gradients_of_two_streams(prefix: str, **options: Any) -> None:
    streams = [fake_gpu.new_stream(), fake_gpu.new_stream()]
    current = streams[0]
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(40)]

    first_pass = True  # it sends all gradients at its end, when autograd has waited for them

    def computed(parameter: torch.Tensor, index: int) -> None:
        nonlocal current
        if first_pass:
            return
        current = streams[index % 2]
        assert parameter.grad is not None
        grad, late = parameter.grad, parameter.grad + hvd.rank() + index
        grad.fill_(-1e9)
        if current == streams[1]:  # computes longer than the other
            fake_gpu.run_in(current, lambda: time.sleep(0.002))
        fake_gpu.run_in(current, lambda: grad.copy_(late))

    for index, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(
            lambda parameter, index=index: computed(parameter, index)
        )
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=0.1),
        [(f"{prefix}.{i}", p) for i, p in enumerate(parameters)],
        **options,
    )
    one_stream = verbs.adapter.stream
    verbs.adapter.stream = lambda device: current
    sum(parameter.sum() for parameter in parameters).backward()
    fake_gpu.synchronize(current)  # the host does not wait for the fake's streams
    optimizer.zero_grad()
    first_pass = False
    fake_gpu.set_("delay_us", 500)
    try:
        sum(parameter.sum() for parameter in parameters).backward()
        optimizer.synchronize()
    finally:
        fake_gpu.set_("delay_us", 20)
        verbs.adapter.stream = one_stream
    for stream in streams:
        fake_gpu.synchronize(stream)
    for index, parameter in enumerate(parameters):
        wanted = 1 + index + (hvd.size() - 1) / 2
        torch.testing.assert_close(parameter.grad, torch.full((3,), wanted))


def case_gradients_of_two_streams_are_waited_for_in_both() -> None:
    """The hook of one gradient submits others, which other streams compute later."""
    check_gradients_of_two_streams("two")


def case_groups_of_gradients_of_two_streams_are_waited_for_in_both() -> None:
    check_gradients_of_two_streams("grouped", num_groups=3)


def case_memory_that_another_stream_uses_is_kept_for_it() -> None:
    """Tensors are submitted in one stream and awaited in another, or computed in others."""
    recorded: list[Any] = []
    here, there = fake_gpu.new_stream(), fake_gpu.new_stream()
    original = verbs.adapter.stream, verbs.adapter.record
    verbs.adapter.record = recorded.append
    try:
        for waited_in in (here, there):
            verbs.adapter.stream = lambda device: here
            name = f"moved.{waited_in == there}"
            mine = torch.ones(3)
            handle = hvd.allreduce_async(mine, op=hvd.Sum, name=name)
            verbs.adapter.stream = lambda device, waited_in=waited_in: waited_in
            result = hvd.synchronize(handle)
            fake_gpu.synchronize(waited_in)
            assert result.tolist() == [hvd.size()] * 3
            assert len(recorded) == (waited_in == there)
    finally:
        verbs.adapter.stream, verbs.adapter.record = original
    ((sources, outputs),) = recorded
    assert sources[0] is mine
    assert outputs[0] is result


def case_batch_norm_sees_all_batches() -> None:
    torch.manual_seed(mpirun.seed())
    rank, size = hvd.rank(), hvd.size()
    ours, plain = hvd.SyncBatchNorm(4), torch.nn.BatchNorm1d(4)
    everything = torch.randn(size, 6, 4)
    mine = everything[rank].clone().requires_grad_()
    whole = everything.flatten(0, 1).requires_grad_()
    result, expected = ours(mine), plain(whole)
    torch.testing.assert_close(result, expected[rank * 6 : rank * 6 + 6])
    result.square().sum().backward()
    expected.square().sum().backward()
    assert whole.grad is not None
    torch.testing.assert_close(mine.grad, whole.grad[rank * 6 : rank * 6 + 6])
    torch.testing.assert_close(ours.running_var, plain.running_var)


def case_sparse_gradients_go_together_with_their_shapes() -> None:
    table = torch.nn.Embedding(10, 3, sparse=True)
    hvd.broadcast_parameters(table.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(table.parameters(), lr=1.0), table.named_parameters()
    )
    before = table.weight.detach().clone()
    table(torch.tensor([hvd.rank(), 9])).sum().backward()
    optimizer.step()
    moved = (before - table.weight.detach())[:, 0]
    wanted = [1 / hvd.size() if row < hvd.size() else 0.0 for row in range(9)] + [1.0]
    torch.testing.assert_close(moved, torch.tensor(wanted))


def case_handles_that_nobody_waits_for_keep_their_memory() -> None:
    for _ in range(20):
        model = torch.nn.Linear(50, 50)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(prefix="gone.")
        )
        model(torch.ones(1, 50)).sum().backward()
        del optimizer, model
        hvd.barrier()


def case_tensors_are_held_longer_for_nccl() -> None:
    for _ in range(2):  # the first one chooses between NCCL and the host
        hvd.allreduce(torch.ones(3), name="held")
    held_ms = 1 if os.environ["HORORING_GPU"] == "staged" else 5
    assert hvd.statistics()["cycle_time_ns"] == held_ms * 10**6


def case_a_captured_step_is_refused() -> None:
    hvd.barrier()
    fake_gpu.capture(True)
    with pytest.raises(ValueError, match="captured into a CUDA graph"):
        hvd.allreduce(torch.ones(1), name="captured")
    fake_gpu.capture(False)
    assert hvd.allreduce(torch.ones(1), name="captured").tolist() == [1]


def case_captured_backward_passes_are_reduced_when_they_are_replayed() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(prefix="graph")
    )
    x = torch.full((1, 3), 1.0 + hvd.rank())
    hvd.barrier()
    fake_gpu.capture(True)
    model(x).sum().backward()
    fake_gpu.capture(False)
    assert model.weight.grad is not None
    for _ in range(2):
        model.weight.grad.copy_(x.expand(2, 3))  # as the graph would
        before = model.weight.detach().clone()
        optimizer.step()
        torch.testing.assert_close(before - model.weight, torch.full((2, 3), (1 + hvd.size()) / 2))


def case_gradients_are_not_waited_for_in_a_capture() -> None:
    if hvd.size() == 1:  # there is no reduction
        return
    model = torch.nn.Linear(3, 2)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(prefix="refused")
    )
    hvd.barrier()
    fake_gpu.capture(True)  # as if the backward passes were captured, too
    with pytest.raises(ValueError, match="captured into a CUDA graph"):
        optimizer.synchronize()
    fake_gpu.capture(False)
    hvd.barrier()
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def case_another_device_is_refused() -> None:
    with pytest.raises(ValueError, match="one process per GPU"):
        hvd.join(device=7)


def case_joined_ranks_take_part() -> None:
    if hvd.rank() == 0:
        assert hvd.allreduce(torch.full((5,), 3.0), op=hvd.Sum, name="late").tolist() == [3] * 5
    assert hvd.join(device=hvd.local_rank()) == 0


def case_nothing_forbidden_was_called_and_nothing_is_left() -> None:
    hvd.shutdown()
    assert fake_gpu.violations() == ""
    with pytest.raises(errors.NotInitializedError):
        hvd.allreduce(torch.ones(1))
    left = {what: fake_gpu.count(what) for what in ("communicators", "pinned", "memory", "streams")}
    assert set(left.values()) == {0}, left


if "FAKE_GPU" in os.environ:  # on the ranks of a job
    fake_gpu.stand_in()
    _own = {name: globals().pop(name) for name in mpirun.case_names(dict(globals()))}
    for _module in os.environ.get("BORROWED", "").split():
        _borrowed = vars(importlib.import_module(_module))
        globals().update({f"{n}_of_{_module}": _borrowed[n] for n in mpirun.case_names(_borrowed)})
    # Sums of tensors on devices are negotiated.
    globals().pop(
        "case_the_sums_of_a_backward_pass_need_no_negotiation_of_test_sync_batch_norm", None
    )
    # NCCL does not define the maximum of NaN and a number.
    if os.environ["HORORING_GPU"] == "nccl":
        globals().pop("case_infinities_and_not_a_number_travel_by_torch_of_test_conformance", None)
    if os.environ.get("BORROWED"):
        _own = {name: case for name, case in _own.items() if "nothing_forbidden" in name}
    globals().update(_own)


@pytest.mark.timeout(mpirun.CASES_LIMIT_S + 20)
@pytest.mark.skipif(FAKE is None, reason=WHY_NOT)
@pytest.mark.parametrize("case", mpirun.case_names(globals()))
@pytest.mark.parametrize(
    ("size", "way"), tiers.choose([(1, "auto"), (3, "auto"), (2, "staged")], push=[(3, "auto")])
)
def test_case(case: str, size: int, way: str):
    assert FAKE is not None
    variables = fake_gpu.environment(FAKE, HORORING_GPU=way)
    mpirun.cases_of(__file__, size, **variables).check(case)


@tiers.full
@pytest.mark.timeout(mpirun.CASES_LIMIT_S + 20)
@pytest.mark.skipif(FAKE is None, reason=WHY_NOT)
@pytest.mark.skipif(bool(mpirun.why_no_hosts()), reason=mpirun.why_no_hosts())
@pytest.mark.parametrize("case", mpirun.case_names(globals()))
def test_across_hosts_that_nccl_does_not_connect(case: str):
    """The fake's communicators are files in /dev/shm, and every emulated host has its own."""
    assert FAKE is not None
    variables = fake_gpu.environment(FAKE, HORORING_GPU="staged")
    mpirun.cases_of(__file__, 4, "2,2", **variables).check(case)


@tiers.full
@pytest.mark.skipif(FAKE is None, reason=WHY_NOT)
def test_what_measures_a_machine_with_gpus_runs_to_its_end(tmp_path: Path):
    """One call, as on that machine. The figures of the fake mean nothing."""
    script = ROOT / "benchmarks/gpu.sh"
    environment = os.environ | mpirun.launch_environment(str(tmp_path)) | {"FAKE_GPU": str(FAKE)}
    ran = subprocess.run(
        ["bash", str(script), str(tmp_path)], capture_output=True, text=True, env=environment,
        timeout=220, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for ranks in ("1", "2", "2_nccl"):
        found = json.loads((tmp_path / f"gpu_check_{ranks}.json").read_text())
        assert len(found["checks"]) == 20
        assert set(found["checks"].values()) == {"ok"}
        assert found["circumstances"]["nccl"] == 23203
    measured = json.loads((tmp_path / "gpu_step_2.json").read_text())
    assert measured["ranks"] == 2
    measured = json.loads((tmp_path / "gpu_step.json").read_text())
    assert set(measured["steps"]) == {"plain", "hororing", "DDP", "DDP, bucket view"}
    # Even for a single rank, which measures hooks, fusion and NCCL.
    assert measured["reduced_per_step"]["tensors"] == 29
    assert measured["reduced_per_step"]["batches"] < 29


@pytest.mark.skipif(FAKE is None, reason=WHY_NOT)
def test_what_measures_a_machine_with_gpus_names_what_the_machine_lacks(tmp_path: Path):
    environment = os.environ | {"FAKE_GPU": str(FAKE), "PYTHON": shutil.which("false") or ""}
    ran = subprocess.run(
        ["bash", str(ROOT / "benchmarks/gpu.sh"), str(tmp_path)], capture_output=True, text=True,
        env=environment, timeout=60, check=False,
    )  # fmt: skip
    assert ran.returncode == 1
    assert "-- build: exit code 1" in ran.stdout, ran.stdout
    assert "-- python: left out, hororing cannot be imported" in ran.stdout
    assert "-- python: left out" in (tmp_path / "gpu_log.txt").read_text()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("size", "way"), [(1, "nccl"), (2, "nccl"), (4, "nccl"), (2, "staged"), (4, "staged")]
)
def test_every_verb_is_right_on_a_gpu(size: int, way: str):
    if way == "nccl" and size > torch.cuda.device_count():
        pytest.skip(f"needs {size} GPUs")
    job = mpirun.run(
        ROOT / "benchmarks/gpu_check.py", size, environment={"HORORING_GPU": way}, timeout_s=110
    )
    assert job.returncode == 0, job.report()


@tiers.full
@pytest.mark.skipif(FAKE is None, reason=WHY_NOT)
@pytest.mark.parametrize(
    ("module", "size", "way"),
    [
        ("test_torch_verbs", 2, "nccl"),
        ("test_sync_batch_norm", 2, "nccl"),
        ("test_weights", 3, "auto"),
        ("test_torch_mixed_precision", 4, "nccl"),
        ("test_conformance", 2, "nccl"),
        ("test_conformance", 2, "staged"),
    ],
)
def test_what_holds_on_the_cpu_holds_on_devices(module: str, size: int, way: str):
    assert FAKE is not None
    variables = fake_gpu.environment(
        FAKE, HORORING_GPU=way, BORROWED=module, CONFORMANCE_PLAYERS="torch",
        HORORING_DYNAMIC_PROCESS_SETS="1",
    )  # fmt: skip
    job = mpirun.run(__file__, size, script=False, timeout_s=200, environment=variables)
    cases = [name for name in job.results[0] if name.endswith(f"_of_{module}")]
    assert len(cases) > 5, job.report()
    for case in cases:
        job.check(case)

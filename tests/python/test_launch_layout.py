"""Where processes go: hosts, instances, replicas, NUMA nodes; and what mpirun is told of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import mpirun
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hororing import __main__ as main
from hororing.hosts import Host, parse_hosts, read_hostfile
from hororing.toolkit.layout import bind, numa
from hororing.toolkit.layout.jobs import Job, export_config, import_config, plan, replicas_of


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", [Host("a")]),
        ("a:4, b", [Host("a", 4), Host("b")]),
        ("pod[0-2,7]:8,login", [Host(f"pod{i}", 8) for i in (0, 1, 2, 7)] + [Host("login")]),
        ("n[08-11].cluster", [Host(f"n{i}.cluster") for i in ("08", "09", "10", "11")]),
        ("10.0.0.[1-2]:2", [Host("10.0.0.1", 2), Host("10.0.0.2", 2)]),
    ],
)
def test_hosts_with_ranges_are_understood(text, hosts):
    assert parse_hosts(text) == hosts


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not understood"),
        ("a,,b", "'' is not understood"),
        ("a:x", "'a:x' is not understood"),
        ("a[3-1]", r"\[3-1\]"),
        ("a[]", "not a number or a range"),
        ("a[x]", r"\[x\] in 'a\[x\]'"),
        ("a,a", "'a' comes twice"),
        ("a[0-2],a1", "'a1' comes twice"),
    ],
)
def test_hosts_that_make_no_sense_are_refused(text, reason):
    with pytest.raises(ValueError, match=reason):
        parse_hosts(text)


def test_host_files_are_read(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# ours\na slots=4\n\nb  # the slow one\n")
    assert read_hostfile(file) == [Host("a", 4), Host("b")]
    file.write_text("a\nb slot=4\n")
    with pytest.raises(ValueError, match=r"hosts:2: expected 'name slots=N'"):
        read_hostfile(file)


# Graphcore's machines: 16 replicas a host, in 8 instances on 8 NUMA nodes.
@pytest.mark.parametrize("hosts", [1, 4, 8, 16])
def test_the_published_machines_come_out(hosts):
    job = Job(
        num_replicas=16 * hosts, num_instances=8 * hosts, hosts=f"pod[1-{hosts}]",
        numa_aware=True, numa_nodes=8,
    )  # fmt: skip
    layout = plan(job)
    assert (layout.replicas_per_instance, layout.instances_per_host) == (2, 8)
    assert len(layout.instances) == 8 * hosts
    assert [i for each in layout.instances for i in each.replicas] == [*range(16 * hosts)]
    for each in layout.instances:
        assert each.numa_node == each.local_rank == each.rank % 8
        assert each.host == f"pod{each.rank // 8 + 1}"
    if hosts == 16:
        assert (layout.replicas, len(layout.instances)) == (256, 128)
        assert str(layout).startswith("256 replicas in 128 instances on 16 hosts: 8 instances")
        assert str(layout).splitlines()[-1].split() == ["pod16", "127", "7", "7", "254-255"]


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 5), st.integers(1, 9))
def test_every_replica_has_one_place(hosts, per_host, per_instance, nodes):
    instances = hosts * per_host
    job = Job(instances, instances * per_instance, f"h[1-{hosts}]", True, nodes)
    layout = plan(job)
    assert [r for each in layout.instances for r in each.replicas] == [*range(layout.replicas)]
    for host in layout.hosts:
        here = [each for each in layout.instances if each.host == host.name]
        assert [each.local_rank for each in here] == [*range(per_host)]
        used = [[each.numa_node for each in here].count(node) for node in range(nodes)]
        assert max(used) - min(used) <= 1  # round-robin
    for each in layout.instances:
        assert replicas_of(each.rank, instances, layout.replicas) == each.replicas


def test_one_number_says_both():
    assert plan(Job(num_instances=4)).replicas == 4
    assert len(plan(Job(num_replicas=4)).instances) == 4


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        (Job(), "give num_instances or num_replicas"),
        (Job(4, 6), "num_replicas: 6 cannot be divided evenly over num_instances: 4"),
        (Job(0), "num_instances: 0"),
        (Job(5, hosts="a,b"), "num_instances: 5 cannot be divided evenly over the number of hosts"),
        (Job(8, hosts="a:8,b:2"), "host b has 2 slots, and 4 instances"),
        (Job(2, only_output_from=(2,)), "only_output_from: there is no rank 2 among 2"),
        (Job(2, numa_nodes=0), "numa_nodes"),
        (Job(2, numa_nodes=2), "numa_nodes: without numa_aware nothing is bound"),
    ],
)
def test_numbers_that_do_not_fit_are_named(job, reason):
    with pytest.raises(ValueError, match=reason):
        plan(job)
    with pytest.raises(ValueError, match="rank 4 is none of 4"):
        replicas_of(4, 4, 8)


def test_the_mpirun_line_says_all_of_it():
    command = ("python3", "train.py", "--name", "a b")
    assert (
        plan(Job(2, command=command)).mpirun_line() == "mpirun -np 2 python3 train.py --name 'a b'"
    )
    job = Job(
        4, 8, "a,b:9", numa_aware=True, tag_output=True, only_output_from=(0, 3),
        environment=("LR",), mpi_args=("--oversubscribe",), command=command,
    )  # fmt: skip
    assert plan(job).mpirun() == [
        *("mpirun", "-np", "4", "-H", "a:2,b:2", "--output", "tag", "--bind-to", "none"),
        *("-x", "LR", "--oversubscribe"),
        *("python3", "-m", "hororing.toolkit.layout.bind", "--numa-aware"),
        *("--only-output-from", "0,3", "--", *command),
    ]
    with pytest.raises(ValueError, match="command: there is none"):
        plan(Job(2)).mpirun()


def test_a_job_goes_to_a_file_and_back(tmp_path):
    file = tmp_path / "job.json"
    job = Job(4, 8, "a,b", True, 2, True, (0,), ("LR",), ("--oversubscribe",), ("python", "x.py"))
    export_config(job, file)
    assert import_config(file) == job
    assert import_config(file, num_instances=2).num_instances == 2
    for content, reason in (
        ("{", "job.json: "),
        ("[]", "no object"),
        ('{"instances": 4}', "'instances' is none of num_instances, num_replicas"),
        ('{"num_instances": "4"}', "num_instances cannot be '4'"),
        ('{"command": "x"}', "command cannot be 'x'"),
    ):
        file.write_text(content)
        with pytest.raises(ValueError, match=reason):
            import_config(file)


def test_the_command_prints_what_it_is_asked_for(tmp_path, capsys):
    flags = ["layout", "-H", "a,b", "--num-replicas", "8", "-np", "4"]
    assert main.main(flags) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[0] == "host"
    assert main.main([*flags, "--dry-run", "--", "python", "train.py", "--lr", "1"]) == 0
    assert capsys.readouterr().out == "mpirun -np 4 -H a:2,b:2 python train.py --lr 1\n"
    file = str(tmp_path / "job.json")
    assert main.main([*flags, "--only-output-from", "0,2-3", "--export-config", file]) == 0
    assert json.loads(Path(file).read_text())["only_output_from"] == [0, 2, 3]
    assert capsys.readouterr().out == ""
    arguments = ["layout", "--import-config", file, "-np", "8", "--print-topology"]
    assert main.main(arguments) == 0
    assert "8 replicas in 8 instances" in capsys.readouterr().out
    (tmp_path / "hosts").write_text("a slots=1\nb slots=4\n")
    assert main.main(["layout", "--hostfile", str(tmp_path / "hosts"), "-np", "4"]) == 1
    assert "host a has 1 slots" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------
# NUMA nodes


def tree(root: Path, cores: dict[int, str], memory: str | None = None) -> Path:
    """A sysfs of nodes with lists of cores."""
    for node, text in cores.items():
        (root / f"node{node}").mkdir(parents=True)
        (root / f"node{node}/cpulist").write_text(text + "\n")
    (root / "online").write_text(",".join(map(str, cores)) + "\n")
    if memory is not None:
        (root / "has_memory").write_text(memory + "\n")
    return root


ALL = frozenset(range(64))


def test_instances_go_round_the_nodes_with_their_cores(tmp_path):
    nodes = numa.read_nodes(tree(tmp_path / "n", {0: "0-3,8-11", 1: "4-7,12-15"}, "0-1"))
    assert [sorted(node.cores) for node in nodes] == [
        [0, 1, 2, 3, 8, 9, 10, 11],
        [4, 5, 6, 7, 12, 13, 14, 15],
    ]
    chosen = [numa.choose(local_rank, nodes, ALL) for local_rank in range(5)]
    assert [each.node for each in chosen] == [0, 1, 0, 1, 0]
    assert [each.memory_node for each in chosen] == [0, 1, 0, 1, 0]
    assert chosen[1].cores == nodes[1].cores
    assert not any(each.notice for each in chosen)


def test_only_cores_that_the_process_may_use_count(tmp_path):
    nodes = numa.read_nodes(tree(tmp_path / "n", {0: "0-3", 1: "4-7", 2: "8-11"}))
    allowed = frozenset({2, 3, 8})
    chosen = [numa.choose(local_rank, nodes, allowed) for local_rank in range(3)]
    found = [(each.node, sorted(each.cores)) for each in chosen]
    assert found == [(0, [2, 3]), (2, [8]), (0, [2, 3])]


def test_nodes_of_memory_alone_and_nodes_without_memory(tmp_path):
    nodes = numa.read_nodes(tree(tmp_path / "n", {0: "0-1", 1: "2-3", 4: ""}, "0,4"))
    assert [(node.number, node.has_memory) for node in nodes] == [(0, True), (1, False)]
    second = numa.choose(1, nodes, ALL)
    assert (second.node, second.memory_node) == (1, None)
    assert second.notice == "NUMA node 1 has no memory: only cores bound"


@pytest.mark.parametrize("cores", [{0: "0-63"}, {}])
def test_one_node_means_that_nothing_is_bound_and_a_notice(tmp_path, cores):
    root = tree(tmp_path / "n", cores) if cores else tmp_path / "none"
    chosen = numa.choose(3, numa.read_nodes(root), ALL)
    assert (chosen.node, chosen.cores, chosen.memory_node) == (None, ALL, None)
    assert chosen.notice.startswith(f"nothing is bound: there is {len(cores)} NUMA node")


def test_a_process_is_bound_and_so_is_what_it_starts(tmp_path):
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core only")
    root = tree(tmp_path / "n", {0: str(cores[0]), 1: str(cores[1])}, "0")
    script = (
        "import os, sys, pathlib; from hororing.toolkit.layout import numa\n"
        "bound = numa.bind(int(sys.argv[2]), pathlib.Path(sys.argv[1]))\n"
        "print(bound.node, bound.memory_node, bound.notice, sep='|', flush=True)\n"
        "os.execvp(sys.executable, [sys.executable, '-c', '''import ctypes, os, platform\n"
        "mode, mask = ctypes.c_int(), (ctypes.c_ulong * 16)()\n"
        'call = {"x86_64": 239, "aarch64": 236}[platform.machine()]\n'
        "ctypes.CDLL(None).syscall(call, ctypes.byref(mode), mask, 1024, None, 0)\n"
        "print(sorted(os.sched_getaffinity(0)), mode.value, mask[0])'''])\n"
    )
    for local_rank in (0, 1):
        done = subprocess.run(
            [sys.executable, "-c", script, str(root), str(local_rank)],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        told, found = done.stdout.splitlines()
        node, memory, notice = told.split("|")
        assert node == str(local_rank)
        assert found.startswith(f"[{cores[local_rank]}] ")
        if local_rank == 1:
            assert notice == "NUMA node 1 has no memory: only cores bound"
        elif memory == "None":  # not allowed here
            assert notice.startswith("memory is not bound to NUMA node 0: ")
        else:
            assert found.split()[-2:] == ["2", "1"]  # MPOL_BIND, to node 0


def test_only_the_chosen_ranks_print_and_all_keep_their_errors(tmp_path):
    program = ("import os, sys; rank = os.environ['OMPI_COMM_WORLD_RANK']\n"
               "print('out', rank); print('err', rank, file=sys.stderr)")  # fmt: skip
    command = (sys.executable, "-c", program)
    job = Job(3, numa_aware=True, only_output_from=(1,), tag_output=True, command=command)
    launch = plan(job).mpirun()
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, **mpirun.launch_environment(str(tmp_path)), "PATH": path}
    done = subprocess.run(launch, env=environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        line for line in done.stdout.splitlines() if "out 1" in line
    ]
    assert "out 1" in done.stdout
    assert all(f"err {rank}" in done.stdout + done.stderr for rank in range(3))
    assert "1]" in done.stdout  # tagged
    if len(numa.read_nodes()) < 2:
        assert done.stderr.count("nothing is bound") == 1


def tell_where_we_are() -> None:
    import hororing.numpy as hvd
    from hororing.extension import host_names
    from hororing.toolkit.stragglers import StragglerInjector

    hvd.init()
    print(json.dumps([host_names(), hvd.local_rank()]))
    late = StragglerInjector.fixed_host("host1", 0.01)
    late()
    assert late.late_steps == (host_names()[hvd.rank()] == "host1")


@pytest.mark.skipif(bool(mpirun.why_no_hosts()), reason=mpirun.why_no_hosts())
def test_ranks_of_two_hosts_are_where_the_layout_says():
    layout = plan(Job(4, hosts="host[0-1]"))
    job = mpirun.run(__file__, 4, hosts="2,2")
    assert job.returncode == 0, job.report()
    for instance in layout.instances:
        names, local_rank = json.loads(job.outputs[instance.rank].splitlines()[-1])
        assert names == [each.host for each in layout.instances]
        assert local_rank == instance.local_rank


def test_a_command_that_is_not_there_says_so():
    words = [sys.executable, "-m", "hororing.toolkit.layout.bind", "--", "no-such-command"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (127, "no-such-command: No such file or directory\n")


@pytest.mark.parametrize("ranks", ["x", "3-1"])
def test_ranks_that_are_none_are_named(ranks, capsys):
    for command in (main.main, bind.main):
        words = ["--only-output-from", ranks, "--", "python", "train.py"]
        with pytest.raises(SystemExit):
            command(["layout", *words] if command is main.main else words)
        assert ranks in capsys.readouterr().err


if __name__ == "__main__":
    tell_where_we_are()

"""The placement of ranks: hosts, allocations, replicas, NUMA nodes. Push tier, 4 s."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import mpirun
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hororing.hororun import command
from hororing.hororun.flags import allocation
from hororing.hororun.flags.host_lists import Host, parse_hosts, read_hostfile
from hororing.hororun.host import bind, numa
from hororing.hororun.job import plan, start


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", [Host("a")]),
        ("a:4, b", [Host("a", 4), Host("b")]),
        ("pod[0-2,7]:8,login", [Host(f"pod{i}", 8) for i in (0, 1, 2, 7)] + [Host("login")]),
        ("n[08-11].cluster", [Host(f"n{i}.cluster") for i in ("08", "09", "10", "11")]),
        ("r[0-1]n[1-2]:3", [Host(f"r{r}n{n}", 3) for r in (0, 1) for n in (1, 2)]),
        ("10.0.0.[1-2]:2", [Host("10.0.0.1", 2), Host("10.0.0.2", 2)]),
        ("[fd00::1]:1,[fd00::2]", [Host("fd00::1", 1), Host("fd00::2")]),
        ("fd00::1,me@[fe80::2%eth0]:3", [Host("fd00::1"), Host("me@fe80::2%eth0", 3)]),
        ("a:2,b,a:3,b", [Host("a", 5), Host("b", 2)]),
        ("a[0-2],a1", [Host("a0"), Host("a1", 2), Host("a2")]),
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
        ("-l:1", "'-l' begins with '-'"),
        ("x[fd00::1]", r"\[fd00::1\] in 'x\[fd00::1\]'"),
    ],
)
def test_hosts_that_make_no_sense_are_refused(text, reason):
    with pytest.raises(ValueError, match=reason):
        parse_hosts(text)


def test_hosts_that_differ_only_in_their_domain_are_told_apart(monkeypatch):
    known = {"node1.rack1": "127.0.0.1", "node1.rack2": "192.0.2.7", "node1.rack3": "192.0.2.8"}
    resolve = socket.getaddrinfo

    def translated(host, *rest, **more):
        if host == "node1.nowhere":
            raise OSError("Name or service not known")
        return resolve(known.get(host, host), *rest, **more)

    monkeypatch.setattr(socket, "gethostname", lambda: "node1")
    monkeypatch.setattr(socket, "getaddrinfo", translated)
    named = start.named_hosts("node1.rack1:1,node1.rack2:1,node1.rack3:1", None)
    assert [start.is_local(host.name) for host in named] == [True, False, False]
    with pytest.raises(ValueError, match=r"node1 and node1\.rack1 are both this host"):
        start.named_hosts("node1,node1.rack1", None)
    assert start.is_local("node1.nowhere")  # as before: the name says so
    start._is_own.cache_clear()


def test_host_files_are_read(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("\ufeff# ours\na slots=4\n\nb  # the slow one\nc:2 # as in -H\n::1 slots=3\n")
    assert read_hostfile(file) == [Host("a", 4), Host("b"), Host("c", 2), Host("::1", 3)]
    file.write_text(
        "a slots = 2\nb slots=1 max_slots=4\nc  max-slots= 3 slots =2\nd max-slots=8\na slots=3\n"
        "[fd00::1] slots=1\n[fd00::2]:2\npod[0-1] slots=4\n"
    )
    assert read_hostfile(file) == [
        Host("a", 5), Host("b", 1), Host("c", 2), Host("d", 8), Host("fd00::1", 1),
        Host("fd00::2", 2), Host("pod0", 4), Host("pod1", 4),
    ]  # fmt: skip
    for wrong in (
        "b slot=4",
        "b slots=2 max_slots=x",
        "b:x",
        "b c",
        "b=2",
        "b slots=1 slots=1",
        "b:1 slots=1",
        "-b",
    ):
        file.write_text(f"a\n{wrong}\n")
        with pytest.raises(ValueError, match=r"hosts:2: expected 'name slots=N'"):
            read_hostfile(file)
    file.write_text("a slots=4 max_slots=2\n")
    with pytest.raises(ValueError, match=r"hosts:1: 4 slots, of at most 2"):
        read_hostfile(file)


# Graphcore's machines: 16 replicas per host, in 8 ranks on 8 NUMA nodes.
@pytest.mark.parametrize("hosts", [1, 4, 8, 16])
def test_the_published_machines_come_out(hosts: int):
    placed = plan.place(parse_hosts(f"pod[1-{hosts}]"), 8 * hosts, None, None)
    replicas = [plan.replicas_of(each.rank, len(placed), 16 * hosts) for each in placed]
    assert [i for each in replicas for i in each] == [*range(16 * hosts)]
    assert {each.local_size for each in placed} == {8}
    if hosts == 16:
        table = plan.topology(placed, 256, lambda place: str(place.local_rank % 8)).splitlines()
        assert table[0] == "256 replicas in 128 ranks on 16 hosts: 2 of each rank"
        assert table[1].split() == ["host", "rank", "local", "rank", "NUMA", "node", "replicas"]
        assert table[-1].split() == ["pod16", "127", "7", "7", "254-255"]


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 5), st.integers(1, 9))
def test_every_replica_has_one_place(hosts: int, per_host: int, per_rank: int, nodes: int):
    size = hosts * per_host
    placed = plan.place(parse_hosts(f"h[1-{hosts}]"), size, None, None)
    replicas = [plan.replicas_of(each.rank, size, size * per_rank) for each in placed]
    assert [r for each in replicas for r in each] == [*range(size * per_rank)]
    there = [numa.Node(number, frozenset({number})) for number in range(nodes)]
    chosen = [
        numa.choose(each.local_rank, there, ALL).node
        for each in placed
        if not each.rank // per_host
    ]
    used = [chosen.count(node) for node in range(nodes)]
    assert max(used) - min(used) <= 1 or nodes == 1  # in turn


def hororun(*words: str) -> int:
    try:
        return command.main(words)
    except SystemExit as end:
        return int(str(end.code))


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("", "how many ranks?"),
        ("-np 4 --num-replicas 6", "6 replicas cannot be divided evenly over 4 ranks"),
        ("-np 5 -H a,b", "-np 5 cannot be divided evenly over 2 hosts"),
        ("-H a:8,b:2 --num-replicas 8", "8 replicas cannot be divided evenly over 10 ranks"),
        ("-np 0", "'0' is not a whole number from 1"),
        ("-np 2 --only-output-from 2", "there is no rank 2 among 2"),
        ("-np 2 --only-output-from 3-1", "'3-1' is not a number or a range"),
        ("-np 2 --num-replicas much", "'much' is not a whole number from 1"),
        ("-np 2 --import-config /none/such", "No such file or directory: '/none/such'"),
        ("-np 2 --export-config /none/such", "No such file or directory: '/none/such'"),
    ],
)
def test_what_does_not_fit_is_named(flags: str, reason: str, capsys: pytest.CaptureFixture[str]):
    assert hororun(*flags.split(), "true") == 2
    assert reason in capsys.readouterr().err
    with pytest.raises(ValueError, match="there is no rank 4 among 4"):
        plan.replicas_of(4, 4, 8)


def test_the_topology_is_shown_before_the_job_or_alone(capsys: pytest.CaptureFixture[str]):
    assert (
        hororun("--print-topology", "-H", "a,localhost", "--num-replicas", "4", "--numa-aware") == 0
    )
    table = capsys.readouterr().out.splitlines()
    assert table[0] == "4 replicas in 4 ranks on 2 hosts: 1 of each rank"
    assert table[2].split() == ["a", "0", "0", "?", "0"]
    node = numa.choose(0, numa.read_nodes(), frozenset(os.sched_getaffinity(0))).node
    assert table[4].split()[-2:] == ["-" if node is None else str(node), "2"]
    words = ["--print-topology", "--dry-run", "-np", "2", "--num-replicas", "8", "true"]
    assert hororun(*words) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "8 replicas in 2 ranks on 1 host: 4 of each rank"
    assert lines[2].split() == ["localhost", "1", "1", "4-7"]
    assert all("HORORING_NUM_REPLICAS=8" in line for line in lines[3:])


def test_the_mpirun_line_says_all_of_it(capsys: pytest.CaptureFixture[str]):
    flags = (
        "--mpi --dry-run -np 4 --num-replicas 8 -H a,b:9 --numa-aware --only-output-from 0,3 "
        "-x PATH --mpi-args=--oversubscribe"
    )
    assert hororun(*flags.replace("a,b:9", "a:2,b:9").split(), "python3", "train.py", "a b") == 0
    assert shlex.split(capsys.readouterr().out) == [
        *("mpirun", "-np", "4", "-H", "a:2,b:2", "--output", "tag", "-x", "PATH"),
        *("-x", "HORORING_NUM_REPLICAS=8", "--bind-to", "none", "--oversubscribe"),
        *(
            "python3",
            "-m",
            "hororing.hororun.host.bind",
            "--numa-aware",
            "--only-output-from",
            "0,3",
        ),
        *("--", "python3", "train.py", "a b"),
    ]


def test_flags_go_to_a_file_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "job.json"
    flags = ["-np", "4", "-x", "A=1", "--fusion-bytes", "1MiB"]
    assert hororun(*flags, "--export-config", str(file), "--dry-run", "--", "env", "-np", "7") == 0
    assert json.loads(file.read_text()) == {
        "flags": [*flags, "--dry-run"], "command": ["env", "-np", "7"],
    }  # fmt: skip
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o644)
    assert hororun(*flags, "--export-config", str(file), "--dry-run", "--", "env", "-np", "7") == 0
    assert file.stat().st_mode & 0o777 == 0o600
    capsys.readouterr()
    assert hororun(*flags, "--export-config", str(file), "--dry-run", "--", "env", "-np", "7") == 0
    before = capsys.readouterr().out
    assert before.count("A=1") == before.count("/env -np 7") == 4
    assert hororun(f"--import-config={file}") == 0
    assert capsys.readouterr().out == before
    both = tmp_path / "both"
    changed = ["-np", "2", "-x", "A=2", "--export-config", str(both)]
    assert hororun("--import-config", str(file), *changed, "true") == 0
    assert json.loads(both.read_text())["command"] == ["true"]
    after = capsys.readouterr().out.splitlines()
    assert len(after) == 2
    assert all("A=2" in line and line.endswith("/true") for line in after)
    for content in ("{", "[]", '{"flags": []}', '{"flags": [3], "command": []}', '{"flags": 3}'):
        file.write_text(content)
        assert hororun("--import-config", str(file)) == 2
        assert "no file of --export-config" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------
# Batch allocations


@pytest.mark.parametrize(
    ("variables", "file", "wanted"),
    [
        ({"SLURM_JOB_NODELIST": "n[1-3],gpu7", "SLURM_TASKS_PER_NODE": "4(x2),2(x1),1"}, "",
         "n1:4 n2:4 n3:2 gpu7:1"),
        ({"SLURM_JOB_NODELIST": "r[0-1]n[08-09]", "SLURM_TASKS_PER_NODE": "8(x4)"}, "",
         "r0n08:8 r0n09:8 r1n08:8 r1n09:8"),
        ({"SLURM_JOB_NODELIST": "a"}, "", "a:None"),
        ({"PBS_NODEFILE": "FILE"}, "a.x\nb.x\na.x\n", "a.x:2 b.x:1"),
        ({"LSB_DJOB_HOSTFILE": "FILE", "LSB_HOSTS": "c"}, "a\na\nb\n", "a:2 b:1"),
        ({"LSB_HOSTS": "a a b"}, "", "a:2 b:1"),
        ({"SLURM_NTASKS": "4"}, "", ""),
    ],
)  # fmt: skip
def test_hosts_of_an_allocation_are_found(
    variables: dict[str, str], file: str, wanted: str, tmp_path: Path
):
    path = tmp_path / "hosts"
    path.write_text(file)
    found = allocation.find(
        {name: text.replace("FILE", str(path)) for name, text in variables.items()}
    )
    hosts = [] if found is None else [f"{host.name}:{host.slots}" for host in found.hosts]
    assert " ".join(hosts) == wanted


NODES = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "1(x2)"}
STEP = {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}


@pytest.mark.parametrize(
    ("variables", "flags", "code", "wanted"),
    [
        (NODES, "", 0, "n2: HORORING_RANK=1 HORORING_SIZE=2"),
        (NODES, "--nproc-per-node 2", 0, "n2: HORORING_RANK=3 HORORING_SIZE=4"),
        (NODES, "-np 1", 0, "n1: HORORING_RANK=0 HORORING_SIZE=1"),
        (NODES, "-H b:1", 0, "b: HORORING_RANK=0 HORORING_SIZE=1"),
        (NODES, "-np 6", 0, "n2: HORORING_RANK=3 HORORING_SIZE=6"),
        (NODES, "-np 3", 2, "evenly over 2 hosts: give slots (these hosts are those of the Slurm"),
        (
            NODES | {"SLURM_TASKS_PER_NODE": "2,1"},
            "-np 4",
            2,
            "the hosts have 3 slots (these hosts",
        ),
        (NODES | STEP, "", 2, "srun has started hororun itself as several tasks"),
        (
            NODES | {"SLURM_TASKS_PER_NODE": "1(x3)"},
            "",
            2,
            "is for 3 nodes, and SLURM_JOB_NODELIST",
        ),
        (NODES | {"SLURM_TASKS_PER_NODE": "many"}, "", 2, "SLURM_TASKS_PER_NODE=many: expected"),
        (
            {"SLURM_JOB_NODELIST": "a[b"},
            "",
            2,
            "SLURM_JOB_NODELIST: hosts: 'a[b' is not understood",
        ),
        ({"PBS_NODEFILE": "/dev/null"}, "", 2, "PBS_NODEFILE: it names no host"),
        (
            {"PBS_NODEFILE": "/none/such"},
            "",
            2,
            "=/none/such cannot be read (No such file or directory); unset it",
        ),
    ],
)
def test_a_job_goes_to_the_hosts_of_its_allocation(
    variables: dict[str, str], flags: str, code: int, wanted: str,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    for name in [each for each in os.environ if each.startswith(("SLURM", "PBS", "LSB", "PMI"))]:
        monkeypatch.delenv(name)
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    assert hororun("--dry-run", *flags.split(), "true") == code
    out, errors = capsys.readouterr()
    assert wanted in (errors if code else out)


# ---------------------------------------------------------------------------------------------
# NUMA nodes


def tree(root: Path, cores: dict[int, str], memory: str | None = None) -> Path:
    """Create a sysfs of nodes with lists of cores."""
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
        "import os, sys, pathlib; from hororing.hororun.host import numa\n"
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
        elif memory == "None":  # not permitted on this machine
            assert notice.startswith("memory is not bound to NUMA node 0: ")
        else:
            assert found.split()[-2:] == ["2", "1"]  # MPOL_BIND, to node 0


def test_only_the_chosen_ranks_print_and_all_keep_their_errors(tmp_path):
    program = ("import os, sys; rank = os.environ['OMPI_COMM_WORLD_RANK']\n"
               "print('out', rank); print('err', rank, file=sys.stderr)")  # fmt: skip
    script = tmp_path / "print.py"
    script.write_text(program)
    words = ["-m", "hororing.hororun", "-np", "3", "--mpi", "--numa-aware", "--only-output-from"]
    launch = [sys.executable, *words, "1", sys.executable, script]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, **mpirun.launch_environment(str(tmp_path)), "PATH": path}
    done = subprocess.run(launch, env=environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()[1:]  # after mpirun's line
    assert lines
    assert lines == [line for line in lines if "out 1" in line]
    assert all(f"err {rank}" in done.stdout + done.stderr for rank in range(3))
    assert "1]" in lines[0]  # tagged output
    if len(numa.read_nodes()) < 2:
        assert done.stderr.count("nothing is bound") == 1
    script.write_text(program.replace("OMPI_COMM_WORLD_RANK", "HORORING_RANK"))
    launch.remove("--mpi")
    done = subprocess.run(launch, env=environment, capture_output=True, text=True, timeout=90)
    assert (done.returncode, done.stdout) == (0, "[1] out 1\n"), done.stderr
    assert done.stderr.count("nothing is bound") == (len(numa.read_nodes()) < 2)


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
    placed = plan.place(parse_hosts("host[0-1]"), 4, None, None)
    job = mpirun.run(__file__, 4, hosts="2,2")
    assert job.returncode == 0, job.report()
    for instance in placed:
        names, local_rank = json.loads(job.outputs[instance.rank].splitlines()[-1])
        assert names == [each.host for each in placed]
        assert local_rank == instance.local_rank


def test_a_command_that_is_not_there_says_so():
    words = [sys.executable, "-m", "hororing.hororun.host.bind", "--", "no-such-command"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (127, "no-such-command: No such file or directory\n")


@pytest.mark.parametrize("ranks", ["x", "3-1"])
def test_ranks_that_are_none_are_named(ranks: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        bind.main(["--only-output-from", ranks, "--", "python", "train.py"])
    assert ranks in capsys.readouterr().err


if __name__ == "__main__":
    tell_where_we_are()

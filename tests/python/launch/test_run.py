"""hororing.run: functions on the ranks of a new job. Push tier, 10 s."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import linecache
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import mpirun
import numpy as np
import pytest
import tiers
from hororun_jobs import is_alive, replace, wait_until

import hororing
from hororing._job import launchers
from hororing.errors import PeerLostError, RunError

ROOT = Path(__file__).parents[3]
NOTEBOOK = ROOT / "examples/notebook.ipynb"
DEADLINE_S = 150.0


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the tests independent of the launcher that has started them."""
    monkeypatch.setattr(launchers, "detect", lambda: launchers.Launch())


def script(text: str, *words: str) -> subprocess.Popen[str]:
    """Start a program whose functions are those of `__main__`. Ctrl-C ends it."""
    return subprocess.Popen(
        [sys.executable, "-c", text, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # Shells make background processes ignore SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip


def total(factor: float, *, offset: int = 0) -> tuple[int, int, list[float]]:
    import hororing.numpy as hvd

    hvd.init()
    print("rank", hvd.rank(), "says", "\N{SNOWMAN}")
    mine = np.full(3, factor * (hvd.rank() + offset))
    return hvd.rank(), hvd.size(), hvd.allreduce(mine, op=hvd.Sum).tolist()


class OwnError(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code = code


def one_fails(others_wait: bool) -> None:
    import hororing.numpy as hvd

    hvd.init()
    if hvd.rank() == 1:
        raise OwnError(3, "of one")
    if others_wait:
        hvd.barrier()


def ends(how: str) -> Any:
    if os.environ["RANK"] == "0":
        time.sleep(600 if how in ("kill", "lock", "exit 3") else 0)
        return 0
    if how == "kill":
        print("last words", file=sys.stderr)
        os.kill(os.getpid(), signal.SIGKILL)
    if how.startswith("exit"):
        sys.exit(int(how[-1]))
    if how == "class":

        class Local:
            def __reduce__(self) -> tuple[Any, ...]:
                return int, ("no number",)

        return Local()
    return threading.Lock()


def big(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.float64) + int(os.environ["RANK"])


# ---------------------------------------------------------------------------------------------
# Results


def test_results_come_in_the_order_of_ranks(capsys: pytest.CaptureFixture[str]):
    assert hororing.run(total, (2.0,), {"offset": 1}, np=3) == [
        (rank, 3, [12.0] * 3) for rank in range(3)
    ]
    lines = sorted(capsys.readouterr().out.splitlines())
    assert lines == [f"[{rank}] rank {rank} says \N{SNOWMAN}" for rank in range(3)]
    secret = 41
    assert hororing.run(lambda: secret + 1) == [42]  # one rank, and a closure
    networks = ["absent0", "lo"]
    assert hororing.run(os.getenv, ("HORORING_INTERFACE",), network_interfaces=networks) == [
        "absent0,lo"
    ]
    hororing.run(print, ("\N{SNOWMAN}" * 9999,))
    assert capsys.readouterr().out == "\N{SNOWMAN}" * 9999 + "\n"


def test_results_may_be_large_and_print_goes_to_files(tmp_path: Path):
    count = 13_107_200  # 100 MiB
    (found,) = hororing.run(big, [count], np=1, output_filename=str(tmp_path))
    assert np.array_equal(found, np.arange(count, dtype=np.float64))
    assert (tmp_path / "rank.0/stdout").read_text() == ""


def test_a_full_disk_ends_no_job_and_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for rank in range(2):
        (tmp_path / f"rank.{rank}").mkdir()
        (tmp_path / f"rank.{rank}" / "stdout").symlink_to("/dev/full")
    before = os.listdir("/proc/self/fd")
    assert hororing.run(print, ("a line",), np=2, output_filename=str(tmp_path)) == [None] * 2
    told = capsys.readouterr().err
    for rank in range(2):
        path = tmp_path / f"rank.{rank}" / "stdout"
        assert f"ERROR: cannot write {path}: No space left on device; until that works" in told
        assert f"ERROR: {path} lacks the last 7 bytes" in told
    closed = io.StringIO()
    closed.close()
    with contextlib.redirect_stdout(closed), pytest.raises(ValueError, match="closed file"):
        hororing.run(print, ("a line",), np=2)
    assert os.listdir("/proc/self/fd") == before


def test_any_thread_can_call_it_also_in_an_event_loop():
    found: list[Any] = []

    def call() -> None:
        found.append(hororing.run(os.getcwd, np=2, env={"A": "b"}))

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()

    async def cell() -> list[Any]:
        return hororing.run(os.getenv, ("A",), np=1, env={"A": "b"})

    assert asyncio.run(cell()) == ["b"]
    for thread in threads:
        thread.join(DEADLINE_S)
    assert found == [[os.getcwd()] * 2] * 2


# ---------------------------------------------------------------------------------------------
# Failures


def test_functions_of_a_script_work_in_a_process_that_it_has_spawned(tmp_path: Path):
    file = tmp_path / "search.py"
    file.write_text(
        "import multiprocessing, hororing\n"
        "def work(x): return x + 1\n"
        "def job(): assert hororing.run(work, (1,), np=1) == [2]\n"
        "if __name__ == '__main__':\n"
        "    process = multiprocessing.get_context('spawn').Process(target=job)\n"
        "    process.start(); process.join(); raise SystemExit(process.exitcode)\n"
    )
    command = [sys.executable, str(file)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, env=env, timeout=DEADLINE_S, check=True)


@pytest.mark.parametrize("others_wait", [True, False])
def test_the_exception_of_a_rank_is_raised_with_its_traceback(others_wait: bool):
    with pytest.raises(RunError, match=r"run: rank 1 raised OwnError: \(3, 'of one'\)") as caught:
        hororing.run(one_fails, [others_wait], np=2)
    error = caught.value
    assert isinstance(error.__cause__, OwnError)
    assert (error.rank, error.exit_code, error.__cause__.code) == (1, 1, 3)
    assert 'raise OwnError(3, "of one")' in error.traceback
    assert "call.py" not in error.traceback
    assert error.traceback.rstrip() in str(error)


@pytest.mark.parametrize(
    ("how", "wanted", "code"),
    [
        ("kill", "rank 1 was killed by SIGKILL; the last.*\n    last words", -9),
        ("exit 3", "rank 1 has failed with exit code 3", 3),
        ("exit 0", "rank 1 has ended without a result", 0),
        ("lock", "rank 1 raised TypeError: the result cannot be pickled: TypeError: cannot", 1),
        ("class", "the result of rank 1 cannot be read here: ValueError: invalid literal", None),
    ],
)
def test_a_rank_without_a_result_is_named(how: str, wanted: str, code: int | None):
    with pytest.raises(RunError, match=wanted) as caught:
        hororing.run(ends, [how], np=2)
    assert (caught.value.rank, caught.value.exit_code) == (1, code)


def raises_beside_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(600,)).start()
    raise OwnError(3, "with a thread")


@tiers.full
def test_a_thread_that_goes_on_hides_no_exception():
    """6 s. Python waits for the thread at the end."""
    with pytest.raises(RunError, match="with a thread") as caught:
        hororing.run(raises_beside_a_thread)
    assert isinstance(caught.value.__cause__, OwnError)


def lonely() -> None:
    import hororing.numpy as hvd

    hvd.init()
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.barrier()


def test_a_rank_that_was_killed_is_blamed_not_those_who_noticed():
    with pytest.raises(RunError, match="rank 1 was killed by SIGKILL") as caught:
        hororing.run(lonely, np=2)
    assert not isinstance(caught.value.__cause__, PeerLostError)


@pytest.mark.parametrize(
    ("how", "kind", "wanted"),
    [
        ({"func": 3}, TypeError, "run: func is 3"),
        ({"args": [threading.Lock()]}, TypeError, "arguments cannot be pickled: TypeError"),
        ({"args": 0.1}, TypeError, r"run: args is 0.1: write a tuple"),
        ({"hosts": ["a:2"]}, TypeError, "write a text, as 'a:4,b:4'"),
        ({"env": {"A": None}}, TypeError, "the variable 'A' is None: leave it out"),
        ({"env": {3: "A"}}, TypeError, "the name of the variable 3 is not"),
        ({"np": 0}, ValueError, "np=0 is not a whole number from 1"),
        ({"np": 3, "hosts": "localhost:2"}, ValueError, "-np 3: the hosts have 2 slots"),
        ({"hosts": "localhost:0"}, ValueError, "run: the hosts have no slots"),
        ({"start_timeout": "5"}, ValueError, "run: start_timeout='5' is not a number of seconds"),
        ({"grace": -1}, ValueError, "run: grace=-1 is not a number of seconds"),
        ({"np": 2, "num_proc": 3}, ValueError, "np=2 contradicts num_proc=3"),
        ({"use_mpi": True}, ValueError, "start a script with mpirun"),
        ({"min_num_proc": 3, "np": 2}, ValueError, "--min-np 3, -np 2, --max-np 2: they must asc"),
        ({"min_np": 0}, ValueError, "min_np=0 is not a whole number from 1"),
        ({"min_np": 1, "min_num_proc": 2}, ValueError, "min_np=1 contradicts min_num_proc=2"),
        ({"slots": 2}, ValueError, "--slots-per-host is for elastic jobs: give --min-np"),
        ({"reset_limit": 2}, ValueError, "reset_limit is for elastic jobs: give min_np"),
        ({"rsh_agent": "a 'b"}, ValueError, "No closing quotation"),
        ({"env": ["A=1"]}, TypeError, "a dict, not "),
        ({"gpus": 2}, TypeError, "there is no argument 'gpus'"),
        ({"executable": "no-such"}, ValueError, "there is no program 'no-such'"),
        ({"hosts": "b:1", "rsh_agent": "/bin/false"}, RunError, "host b: it cannot be reached"),
    ],
)
def test_what_cannot_be_is_an_error(how: dict[str, Any], kind: type[Exception], wanted: str):
    with pytest.raises(kind, match=wanted):
        hororing.run(**{"func": os.getpid, **how})


def sizes() -> int:
    import hororing.numpy as hvd

    hvd.init()
    return hvd.size()


def test_a_rank_cannot_call_it(monkeypatch: pytest.MonkeyPatch):
    rank = launchers.Launch("torchrun", 2, 4, mpi=False, sign="WORLD_SIZE=4")
    monkeypatch.setattr(launchers, "detect", lambda: rank)
    with pytest.raises(ValueError, match=r"is rank 2 of a job itself \(torchrun has .* WORLD_SIZE"):
        hororing.run(os.getpid)
    monkeypatch.setenv("HORORING_ALONE", "1")
    # None is the default of Horovod's arguments.
    ignored = {"verbose": 2, "use_mpi": False, "start_timeout": None, "grace": None}
    assert hororing.run(sizes, np=2, **ignored) == [2, 2]  # ranks are not alone


# ---------------------------------------------------------------------------------------------
# Elastic jobs


def survivors(how: str) -> tuple[int, int, int]:
    import hororing.numpy as hvd
    from hororing import elastic
    from hororing._requests.objects import broadcast_object

    if how == "fails":
        raise KeyError("nothing")
    hvd.init()
    state = elastic.ObjectState(broadcast_object, hvd.rank, step=0)

    @elastic.run
    def train(state: Any) -> tuple[int, int, int]:
        first = elastic.history()[-1].generation == 1
        while state.step < 20:
            if first and state.step == 5 and hvd.rank() == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            hvd.allreduce(np.ones(1), name="step")
            state.step += 1
            state.commit()
        return hvd.rank(), hvd.size(), state.step

    result: tuple[int, int, int] = train(state)
    return result


def test_an_elastic_job_returns_what_its_last_ranks_return():
    results = hororing.run(survivors, ("lives",), np=3, min_np=2)
    assert results == [(rank, len(results), 20) for rank in range(len(results))]
    assert len(results) in (2, 3)  # the third may have been replaced


def test_an_elastic_job_that_cannot_go_on_tells_why():
    with pytest.raises(RunError, match="raised KeyError: 'nothing'") as caught:
        hororing.run(survivors, ("fails",), np=2, min_np=1)
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(RunError, match=r"ended before a process had called hvd.init\(\)"):
        hororing.run(os.getpid, np=2, min_np=1)


def leaves(hosts: str) -> tuple[int, int]:
    import hororing.numpy as hvd
    from hororing import elastic
    from hororing._requests.objects import broadcast_object

    hvd.init()

    @elastic.run
    def train(state: Any) -> tuple[int, int]:
        if hvd.size() == 2:
            replace(Path(hosts), "localhost:1\n")
            try:
                while True:
                    time.sleep(0.01)
                    state.commit()
            finally:
                time.sleep(1 - hvd.rank())  # rank 1 has ended before the next generation forms
        return hvd.rank(), hvd.size()

    result: tuple[int, int] = train(elastic.ObjectState(broadcast_object, hvd.rank))
    return result


def test_a_process_whose_slot_was_removed_owes_no_result(tmp_path: Path):  # push tier, 3 s
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:2\n")
    script = f"cat {hosts}"
    found = hororing.run(leaves, (str(hosts),), np=2, min_np=1, host_discovery_script=script)
    assert found == [(0, 1)]


# ---------------------------------------------------------------------------------------------
# Ends

WAITS = """
import hororing, os, signal, sys, time
def work(how):
    if how == "stubborn":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    print(f"pid={os.getpid()}")
    time.sleep(600)
try:
    hororing.run(work, sys.argv[1:], np=2, grace=0.2)
except KeyboardInterrupt:
    print("interrupted", signal.getsignal(signal.SIGINT) == signal.default_int_handler)
    print(hororing.run(os.getenv, ("RANK",), np=1))
"""


def test_ctrl_c_ends_a_job_whose_output_nobody_reads():
    process = script(
        "import hororing\ndef work():\n    while True: print('x' * 200)\nhororing.run(work, np=2)\n"
    )
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.3)  # the pipe is full long before
    process.send_signal(signal.SIGINT)
    assert process.wait(DEADLINE_S) == -signal.SIGINT


@pytest.mark.parametrize("how", ["ordinary", "stubborn"])
def test_ctrl_c_ends_the_ranks_and_is_raised(how: str):
    process = script(WAITS, how)
    assert process.stdout is not None
    pids = [int(process.stdout.readline().partition("pid=")[2]) for _ in range(2)]
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, out) == (0, "interrupted True\n['0']\n"), errors
    assert not any(map(is_alive, pids))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_ranks_die_with_the_caller(number: signal.Signals):
    process = script(WAITS, "ordinary")
    assert process.stdout is not None
    pids = [int(process.stdout.readline().partition("pid=")[2]) for _ in range(2)]
    process.send_signal(number)
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == -number
    wait_until(lambda: not any(map(is_alive, pids)))


# ---------------------------------------------------------------------------------------------
# Other hosts, Horovod's name, notebooks


def where(data: np.ndarray) -> tuple[str, int, np.ndarray]:
    if os.environ["RANK"] == "3":
        raise OwnError(3, "there")
    return os.environ.get("ON", "here"), int(os.environ["LOCAL_RANK"]), data * 2


def test_functions_and_results_travel_to_other_hosts_and_back(rsh: str):
    data = np.arange(400_000.0)  # more than a frame and a pipe hold
    found = hororing.run(where, [data], hosts="localhost:1,b:2", rsh_agent=rsh)
    assert [each[:2] for each in found] == [("here", 0), ("b", 0), ("b", 1)]
    for _, _, doubled in found:
        assert np.array_equal(doubled, data * 2)
    with pytest.raises(
        RunError, match=r"rank 3 on host c raised OwnError: \(3, 'there'\)"
    ) as error:
        hororing.run(where, [0], np=4, hosts="localhost:1,b:2,c:1", rsh_agent=rsh)
    assert isinstance(error.value.__cause__, OwnError)


@tiers.full
@pytest.mark.skipif(bool(mpirun.why_no_hosts()), reason=mpirun.why_no_hosts())
def test_ranks_of_hosts_with_networks_of_their_own(tmp_path: Path):
    """6 s."""
    program = tmp_path / "caller.py"
    program.write_text(
        "import os, sys\nimport hororing\n"
        "def work():\n"
        "    import hororing.numpy as hvd, numpy as np\n"
        "    hvd.init()\n"
        "    host = os.uname().nodename\n"
        "    return host, hvd.allreduce(np.full(9, hvd.rank() + 1.0), op=hvd.Sum).tolist()\n"
        "agent = os.environ['PRTE_MCA_plm_ssh_agent']\n"
        "print(hororing.run(work, hostfile=sys.argv[1], np=3, rsh_agent=agent))\n"
    )
    caller = tmp_path / "caller"
    # hosts.sh starts it as it starts mpirun: --hostfile FILE -np N.
    caller.write_text(f'#!/bin/sh\nexec {sys.executable} {program} "$2"\n')
    caller.chmod(0o755)
    done = subprocess.run(
        [mpirun.HOSTS, "1,2", caller],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{[(host, [6.0] * 9) for host in ('host0', 'host1', 'host1')]}\n"


def test_horovods_run_means_the_same():
    process = script(
        "import hororing.as_horovod; hororing.as_horovod.install()\n"
        "import horovod, horovod.runner\n"
        "from horovod.common.exceptions import HorovodInternalError\n"
        "def work(x):\n"
        "    import horovod.common.basics\n"
        "    raise HorovodInternalError(horovod.common.basics.__name__) if x else 0\n"
        "assert horovod.run is horovod.runner.run\n"
        "try: horovod.run(work, (1,), num_proc=1, verbose=2, use_gloo=True)\n"
        "except RuntimeError as error: print(repr(error.__cause__))\n"
    )
    out, errors = process.communicate(timeout=DEADLINE_S)
    assert out == "HororingInternalError('hororing._api.basics')\n", errors


def test_tracebacks_show_the_code_of_cells():
    cell = "def work():\n    return 1 / 0  # in a cell\n"
    linecache.cache["<cell 7>"] = (len(cell), None, cell.splitlines(keepends=True), "<cell 7>")
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(cell, "<cell 7>", "exec"), names)
    with pytest.raises(RunError, match=r"return 1 / 0  # in a cell"):
        hororing.run(names["work"])


def cells() -> list[str]:
    notebook = json.loads(NOTEBOOK.read_text())
    return ["".join(each["source"]) for each in notebook["cells"] if each["cell_type"] == "code"]


@tiers.full
def test_the_cells_of_a_notebook_run_in_a_process_with_an_event_loop():
    """6 s."""
    # Like a kernel, except for IPython: in one namespace, while the loop runs.
    process = script(
        "import asyncio, json, sys\n"
        "async def kernel():\n"
        "    names = sys.modules['__main__'].__dict__\n"
        "    for number, cell in enumerate(json.loads(sys.argv[1])):\n"
        "        exec(compile(cell, f'<cell {number}>', 'exec'), names)\n"
        "asyncio.run(kernel())\n",
        json.dumps(cells()),
    )
    out, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, errors
    (accuracies,) = re.findall(r"accuracies: (.*), (.*)", out)
    assert min(map(float, accuracies)) > 0.8
    assert "[1] rank 1 has trained on" in out


@tiers.full
def test_a_notebook_runs_in_a_real_kernel():
    """25 s."""
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    broken = "def work():\n    raise KeyError('of a cell')\nhororing.run(work, np=2)"
    notebook.cells.append(nbformat.v4.new_code_cell(broken))
    client = nbclient.NotebookClient(notebook, timeout=int(DEADLINE_S), kernel_name="python3")
    with pytest.raises(nbclient.exceptions.CellExecutionError, match=r"raise KeyError\('of a cell"):
        client.execute()
    shown = json.dumps(notebook)
    assert "rank 1 has trained on" in shown
    assert "accuracies: " in shown

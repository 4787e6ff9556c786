"""init, shutdown and queries in a job of one process, without a launcher."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import threading

import pytest
from live_job import poll

import hororing.numpy as hvd
from hororing import errors
from hororing._api import built, init
from hororing._engine import mpi, shutdown, state
from hororing._job import launchers, local_ranks
from hororing._job.launchers import KUBERNETES, Launch, detect, prepare_mpi

QUERIES = [
    hvd.rank,
    hvd.size,
    hvd.local_rank,
    hvd.local_size,
    hvd.cross_rank,
    hvd.cross_size,
    hvd.is_homogeneous,
]


@pytest.fixture
def engine():
    init.start(Launch())
    yield
    hvd.shutdown()


def run(script: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environ},
    )


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_before_init_raises_both_kinds(query):
    assert not hvd.is_initialized()
    with pytest.raises(ValueError, match=r"has not been initialized; use hvd\.init\(\)\."):
        query()
    with pytest.raises(errors.HororingInternalError):
        query()


@pytest.mark.usefixtures("engine")
def test_one_process_is_rank_0_of_1():
    assert hvd.is_initialized()
    assert state.topology() == state.Topology(0, 1, 0, 1, 0, 1, True)
    assert [query() for query in QUERIES] == [0, 1, 0, 1, 0, 1, True]


@pytest.mark.usefixtures("engine")
def test_a_second_init_does_nothing():
    hvd.init()
    assert hvd.size() == 1


def test_init_works_again_after_shutdown():
    for _ in range(3):
        hvd.init()
        assert hvd.size() == 1
        hvd.shutdown()
        assert not hvd.is_initialized()
    hvd.shutdown()  # has no effect, and raises no error


def test_callbacks_run_at_every_init(monkeypatch: pytest.MonkeyPatch):
    calls: list[int] = []
    monkeypatch.setattr(state.process, "at_init", [])
    state.at_init(lambda: calls.append(1))
    for _ in range(2):
        hvd.init()
        hvd.shutdown()
    assert calls == [1, 1]


@pytest.mark.parametrize(
    ("comm", "text"),
    [
        ("world", "neither None, nor a list of ranks"),
        (3, "neither None, nor a list of ranks"),
        ([], "not a list of ranks"),
        ([0, "1"], "not a list of ranks"),
        ([-1], "not a list of ranks"),
        ([True], "not a list of ranks"),
        ([0, 0], "lists a rank twice"),
        ([0, 1], "ranks that do not exist"),
    ],
)
def test_a_bad_comm_is_a_value_error(comm: object, text: str):
    with pytest.raises(ValueError, match=text):
        hvd.init(comm=comm)
    assert not hvd.is_initialized()


def test_the_list_of_the_only_rank_is_the_world():
    hvd.init(comm=[0])
    assert hvd.size() == 1
    hvd.shutdown()


def test_a_bad_variable_fails_init_and_leaves_no_engine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HORORING_FUSION_BYTES", "lots")
    with pytest.raises(ValueError, match="HORORING_FUSION_BYTES='lots'"):
        hvd.init()
    assert not hvd.is_initialized()


def test_what_is_built():
    assert built.gloo_built() is False
    assert built.gloo_enabled() is False
    assert type(built.nccl_built()) is int
    assert built.nccl_built() == 0 or built.nccl_built() >= 21400
    assert built.cuda_built() is True
    for query in (built.ddl_built, built.ccl_built, built.rocm_built):
        assert query() is False
    assert isinstance(built.mpi_built(), bool)


@pytest.mark.usefixtures("engine")
def test_mpi_threads_are_no_matter_in_a_job_of_one_rank(monkeypatch: pytest.MonkeyPatch):
    hvd.init()
    assert built.mpi_threads_supported()
    monkeypatch.setattr(mpi, "is_built", lambda: False)
    with pytest.raises(ValueError, match="MPI is not enabled"):
        built.mpi_threads_supported()


def test_mpi_threads_supported_before_init_is_an_error():
    with pytest.raises(ValueError, match="has not been initialized"):
        built.mpi_threads_supported()


@pytest.mark.usefixtures("engine")
def test_a_forked_child_knows_its_place_has_no_engine_and_ends():
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            assert hvd.is_initialized()
            hvd.shutdown()  # does nothing
            assert [query() for query in QUERIES] == [0, 1, 0, 1, 0, 1, True]
            hvd.init()
        except errors.NotInitializedError as error:
            os.write(writer, str(error).encode())
        finally:
            shutdown._at_exit(lambda: None)
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        assert "forked" in pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    assert hvd.size() == 1


def test_a_forked_child_that_ends_by_sys_exit_ends():
    script = """
import os, sys
import numpy as np
import hororing.numpy as hvd
import hororing.numpy as r
r.init()
handle = hvd.allreduce_async(np.ones(1))
child = os.fork()
if child == 0:
    try:
        hvd.synchronize(handle)
    except hvd.NotInitializedError:  # it is the parent's
        sys.exit(5)
hvd.synchronize(handle)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
assert r.is_initialized()
print("fine")
"""
    done = run(script)
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


def test_a_script_that_does_not_shut_down_ends():
    done = run("import hororing.numpy as r; r.init(); print(r.rank())")
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


def test_an_exit_of_a_thread_is_silent():
    for word in ("sys.exit(3)", "exit(3)"):
        thread = f"thread = threading.Thread(target=lambda: {word}); thread.start(); thread.join()"
        ran = run(f"import sys, threading, hororing.numpy as hvd; hvd.init(); {thread}")
        assert (ran.returncode, ran.stderr) == (0, "")


def test_a_signal_handler_may_call_shutdown_while_the_script_does(monkeypatch: pytest.MonkeyPatch):
    class Interrupted:
        """The core, whose hr_shutdown is interrupted as soon as it has returned."""

        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

        def hr_shutdown(self, *args: object) -> int:
            code = real.hr_shutdown(*args)
            hvd.shutdown()
            return code

    real = shutdown.lib
    init.start(Launch())
    monkeypatch.setattr(shutdown, "lib", Interrupted())
    # In a thread: it would wait for its own lock.
    thread = threading.Thread(target=hvd.shutdown, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert not hvd.is_initialized()


def test_sigwait_gets_signals_though_the_engine_has_threads():
    done = run("""
import os, signal
from hororing._api.init import init  # NumPy has threads of its own
from hororing._engine.shutdown import shutdown
init()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})
for sent in (signal.SIGUSR1, signal.SIGTERM):
    os.kill(os.getpid(), sent)
    assert signal.sigtimedwait({sent}, 20).si_signo == sent
shutdown()
print("fine")""")
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


@pytest.mark.parametrize("allowed", [0, 1])
def test_threads_that_cannot_be_created_are_an_exception(allowed: int):
    done = run(f"""
import os, resource
from hororing._api.init import init
from hororing._engine.state import is_initialized
if os.geteuid() == 0:  # no limit for it
    os.setgid(65534), os.setuid(65534)
limit = len(os.listdir("/proc/self/task")) + {allowed}
resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))
try:
    init()
except RuntimeError as error:
    print(error)
assert not is_initialized()""")
    assert done.returncode == 0, done.stderr
    assert "thread" in done.stdout


def test_an_exception_is_shown_and_ends_the_script():
    done = run("import hororing.numpy as r; r.init(); raise KeyError('lost')")
    assert done.returncode == 1
    assert "KeyError: 'lost'" in done.stderr


@pytest.mark.parametrize(("code", "own"), [(3, 3), (256, 1), (1024, 1)])
def test_who_ends_because_of_an_exit_of_a_peer_has_its_code_but_never_0(code: int, own: int):
    ended = f"raise ShutDownError('rank 1 has ended by sys.exit({code})')"
    done = run(f"import hororing.numpy as r; from hororing.errors import *; r.init(); {ended}")
    assert done.returncode == own, done.stderr


def test_hooks_of_the_script_are_kept():
    script = """
import sys
sys.excepthook = lambda *a: print("mine", a[0].__name__)
import hororing.numpy as r
r.init()
raise KeyError
"""
    assert run(script).stdout == "mine KeyError\n"


INTERRUPTED = """
import sys, threading
import hororing.numpy as r
r.init()
def report():
    try:
        1 / 0
    except ZeroDivisionError:
        sys.excepthook(*sys.exc_info())
report()
thread = threading.Thread(target=report)
thread.start()
thread.join()
print("size", r.size())
"""


def test_the_engine_runs_on_where_the_interpreter_does():
    for script, options in ((INTERRUPTED, []), (INTERRUPTED + "1 / 0", ["-i"])):
        done = subprocess.run(
            [sys.executable, *options, "-c", script],
            input="1 / 0\nprint('again', r.size())\n",
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.stdout == ("size 1\nagain 1\n" if options else "size 1\n"), done
        assert done.stderr.count("ZeroDivisionError: division by zero") == (4 if options else 2)


@pytest.mark.parametrize("wrapped", [False, True])
def test_after_its_end_a_query_says_what_has_ended_it(wrapped: bool):
    script = """
import atexit, sys
import hororing.numpy as r
def ask():
    try:
        r.rank()
    except r.NotInitializedError as error:
        print(error)
ask()
atexit.register(ask)
r.init()
r.shutdown()
ask()
r.init()
"""
    if wrapped:  # like libraries that report errors
        script += """
def hook(*what, before=sys.excepthook):
    before(*what)
sys.excepthook = hook
"""
    before = "hororing has not been initialized; use hvd.init()."
    assert run(script + "raise KeyError('lost')").stdout.splitlines() == [
        before,
        before + " It has ended before: shutdown() was called",
        before + " It has ended before: KeyError: 'lost'",
    ]


def test_import_starts_no_thread_and_loads_no_mpi():
    script = """
import threading, hororing._api.init
assert threading.active_count() == 1
assert "libmpi" not in open("/proc/self/maps").read()
hororing._api.init.init()
assert "libmpi" not in open("/proc/self/maps").read()
"""
    assert run(script).returncode == 0


def test_init_from_several_threads_makes_one_engine():
    failures: list[BaseException] = []

    def play() -> None:
        try:
            hvd.init()
            assert hvd.size() == 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=play) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    hvd.shutdown()
    assert failures == []


@pytest.mark.usefixtures("engine")
def test_every_log_line_names_its_rank(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, logger="hororing"):
        logging.getLogger("hororing").warning("%d per cent is 100%%", 5)
    assert caplog.messages == ["[rank 0] 5 per cent is 100%"]


def test_log_lines_of_the_core_reach_stderr_before_the_end():
    done = run("import hororing.numpy as r; r.init()", HORORING_TIMELINE="/no/such/folder/t.json")
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert re.match(r"\d{4}-.* ERROR hororing: \[rank 0\] no timeline: .*/no/such/folder", line)


def test_the_time_can_be_left_out():
    environ = {"HORORING_TIMELINE": "/no/such/folder/t.json", "HORORING_LOG_HIDE_TIME": "1"}
    done = run("import hororing.numpy as r; r.init()", **environ)
    assert done.stderr.startswith("ERROR hororing: [rank 0] ")


def test_the_scripts_own_logging_gets_the_lines_alone():
    script = """
import logging
logging.basicConfig(format="MINE %(message)s")
import hororing.numpy as r
r.init()
"""
    (line,) = run(script, HORORING_TIMELINE="/no/such/folder/t.json").stderr.splitlines()
    assert line.startswith("MINE [rank 0] no timeline: ")


def test_the_level_is_that_of_the_variable():
    script = "import hororing.numpy as r; r.init()"
    quiet = run(script, HORORING_TIMELINE="/no/such/folder/t.json", HORORING_LOG_LEVEL="fatal")
    assert quiet.stderr == ""
    loud = run(script, HORORING_LOG_LEVEL="debug")
    assert "[rank 0] running as rank 0 of 1" in loud.stderr


def test_the_level_counts_before_ranks_have_met():
    place = {"HORORING_RANK": "0", "HORORING_SIZE": "2", "HORORING_RENDEZVOUS": "192.0.2.1:9"}
    more = {"HORORING_SECRET_KEY": f"{7**30:x}", "HORORING_TIMEOUT_S": "1"}
    script = "import hororing.numpy as r; r.init()"
    for level, lines in (("error", []), ("warning", ["WARNING hororing: [rank 0] rank 0 did not"])):
        done = run(script, **place, **more, HORORING_LOG_LEVEL=level, HORORING_LOG_HIDE_TIME="1")
        logged = [line for line in done.stderr.splitlines() if "did not start a store" in line]
        assert [line[:41] for line in logged[:-1]] == lines  # the last is the error's


OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "3",
}
TORCHRUN = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
SRUN = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
}


@pytest.mark.parametrize(
    ("environ", "expected", "launched"),
    [
        ({}, Launch(), False),
        (OPEN_MPI, Launch("Open MPI", 3, 4, 1, 2), True),
        (
            {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
            Launch("Open MPI", 0, 1),
            False,
        ),
        (
            {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
            Launch("PMI", 1, 2, 1, 2),
            True,
        ),
        (
            {"PMIX_RANK": "2", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"},
            Launch("Slurm", 2, 8, 0),
            True,
        ),
        # A step with one task in an allocation of eight.
        (
            {"PMIX_RANK": "0", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1"},
            Launch("Slurm", 0, 1),
            False,
        ),
        ({"PMIX_RANK": "0"}, Launch("PMIx", 0), True),
        # Inside jobs of other launchers, mpirun counts.
        ({**OPEN_MPI, **SRUN, **TORCHRUN}, Launch("Open MPI", 3, 4, 1, 2), True),
        # Processes that MPI does not connect.
        (TORCHRUN, Launch("torchrun", 3, 4, 1, 2, mpi=False), True),
        ({"WORLD_SIZE": "2"}, Launch("torchrun", None, 2, mpi=False), True),
        (SRUN, Launch("srun", 3, 4, 1, mpi=False), True),
        ({**SRUN, **TORCHRUN}, Launch("torchrun", 3, 4, 1, 2, mpi=False), True),
        (
            {
                "HOROVOD_SIZE": "4",
                "HOROVOD_RANK": "3",
                "HOROVOD_LOCAL_RANK": "1",
                "HOROVOD_LOCAL_SIZE": "2",
            },
            Launch("horovodrun", 3, 4, 1, 2, mpi=False),
            True,
        ),
        ({"JOB_COMPLETION_INDEX": "0"}, Launch(KUBERNETES, 0, mpi=False), True),
        (
            {"JOB_COMPLETION_INDEX": "3", "HORORING_SIZE": "4"},
            Launch(KUBERNETES, 3, 4, mpi=False),
            True,
        ),
        # One process, or no sign of another.
        ({"WORLD_SIZE": "1", "RANK": "0"}, Launch(), False),
        ({"WORLD_SIZE": "", "RANK": "1"}, Launch(), False),
        ({"WORLD_SIZE": "all"}, Launch(), False),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, Launch(), False),
        (
            {"JOB_COMPLETION_INDEX": "0", "HORORING_SIZE": "1"},
            Launch(KUBERNETES, 0, 1, mpi=False),
            False,
        ),
        # The batch script of an allocation, and an interactive step in one.
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, Launch(), False),
        ({**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, Launch(), False),
    ],
)
def test_launchers_are_recognised(environ: dict[str, str], expected: Launch, launched: bool):
    assert detect(environ) == expected
    assert detect(environ).launched is launched


INIT = "import hororing.numpy as r; r.init(**{}); print(r.size(), r.mpi_enabled())"


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"WORLD_SIZE": "2", "RANK": "0"}, "WORLD_SIZE=2"),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, "SLURM_NTASKS=2"),
        ({"JOB_COMPLETION_INDEX": "1"}, "JOB_COMPLETION_INDEX=1"),
        ({"HOROVOD_SIZE": "2", "HOROVOD_RANK": "0"}, "HOROVOD_SIZE=2"),
    ],
)
def test_processes_that_nothing_connects_are_an_error_and_no_jobs_of_one_rank(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], told: str
):
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    for comm in (None, [0]):
        with pytest.raises(ValueError, match=f"{told} .*HORORING_ALONE=1"):
            hvd.init(comm=comm)
        assert not hvd.is_initialized()
    monkeypatch.setenv("HORORING_ALONE", "1")
    hvd.init()
    assert hvd.size() == 1
    hvd.shutdown()


@pytest.mark.skipif(not mpi.is_built(), reason="hororing was built without MPI")
@pytest.mark.parametrize(
    "environ",
    [
        {"PMI_SIZE": "2", "PMI_RANK": "0"},  # as the mpiexec of another MPI
        {"PMIX_RANK": "1"},
    ],
)
def test_a_launcher_that_mpi_does_not_know_is_an_error(environ: dict[str, str]):
    for comm in ("", "comm=[0]"):
        done = run(INIT.format(f"dict({comm})"), **environ)
        assert "ValueError: init: the launcher started 2 processes" in done.stderr, done
        assert "HORORING_ALONE=1" in done.stderr
    done = run(INIT.format({}), **environ, HORORING_ALONE="1")
    assert (done.returncode, done.stdout) == (0, "1 False\n"), done.stderr


def test_an_mpi_that_cannot_be_loaded_is_an_error():
    environ = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}
    done = run(INIT.format({}), **environ, HORORING_MPI_LIBRARY="/no/such/libmpi.so.40")
    assert "TransportError: the MPI library /no/such/libmpi.so.40 cannot be loaded" in done.stderr


def test_a_process_has_ended_though_nobody_has_asked_for_its_exit_code():
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert poll(lambda: local_ranks.began(child) is None)
    os.waitpid(child, 0)


ERRORS_RETURN = {"OMPI_MCA_mpi_initial_errhandler": "mpi_errors_return"}


def test_mpi_is_prepared_for_one_host_and_the_users_settings_win():
    one_host = Launch("Open MPI", 0, 2, 0, 2)
    environ = {"OMPI_MCA_btl": "self,tcp"}
    prepare_mpi(one_host, environ)
    assert environ == {
        "OMPI_MCA_btl": "self,tcp",
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_osc": "^ucx",
        **ERRORS_RETURN,
    }


@pytest.mark.parametrize(("least", "btl"), [(0, "self,sm"), (1 << 60, "self,sm,tcp")])
def test_on_one_host_nobody_listens_where_shared_memory_is_enough(
    monkeypatch: pytest.MonkeyPatch, least: int, btl: str
):
    monkeypatch.setattr(launchers, "_MIN_SHARED_MEMORY_BYTES", least)
    environ: dict[str, str] = {}
    prepare_mpi(Launch("Open MPI", 0, 2, 0, 2), environ)
    assert environ["OMPI_MCA_btl"] == btl


@pytest.mark.parametrize(
    "started_by",
    [Launch("Open MPI", 0, 4, 0, 2), Launch("Open MPI", 0, 2), Launch("PMI", 0, 2), Launch()],
)
def test_other_mpis_and_several_hosts_keep_their_defaults(started_by: Launch):
    environ: dict[str, str] = {}
    prepare_mpi(started_by, environ)
    assert environ == (ERRORS_RETURN if started_by.launcher == "Open MPI" else {})

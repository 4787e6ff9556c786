"""Runs tests on several ranks, under a real mpirun.

A test file has functions `case_...`, which run on every rank, and one test that checks their
results (`on_ranks`). One job per file and size runs all its cases, in the order of the file. A case
that fails ends the job, and all later cases fail, too. Files of one session share a job per size,
because importing a framework takes longer than the cases of most files (session.py).

mpirun starts this file as a program: mpirun.py OUT --script FILE ARGS... runs FILE as a script,
with the output of rank r in OUT/r.out; mpirun.py OUT FILE... runs the cases of each FILE
(on_rank.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import pretend_hosts

# For a quick start of Open MPI 5 on one machine, as root, with more ranks than cores.
LAUNCH_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_btl": "self,sm,tcp",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_osc": "^ucx",
    "OMP_NUM_THREADS": "1",
}


def launch_environment(folder: str) -> dict[str, str]:
    """Return the variables of a job that keeps its files in `folder`.

    mpirun's default folder is named after its process id, and stays when mpirun is killed. A later
    mpirun with the same id fails: "The PMIx server's listener thread failed to start".
    """
    return {**LAUNCH_ENVIRONMENT, "TMPDIR": folder}


# Variables that ranks on other hosts need; mpirun forwards only those that are named.
FORWARDED = [
    name
    for name in ("OMP_NUM_THREADS", "PYTHONPATH")
    if name in LAUNCH_ENVIRONMENT or name in os.environ
]

HOSTS = Path(__file__).parents[2] / "hosts.sh"
# With it, malloc returns freed memory to the system.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "HORORING_RANK")

# Time limit of one file, including the start of the job. On a quiet machine the slowest takes 20 s,
# and on two cores at a load of 11 more than 200 s.
CASES_LIMIT_S = 400.0

# A rank that waits in vain fails before the job's time limit.
# Longer than a pause of TensorFlow: a tf.data iterator that is freed may wait for its autotuning
# thread, which then sleeps for up to 60 s.
STALL_ENVIRONMENT = {"HORORING_STALL_WARNING_S": "10", "HORORING_STALL_SHUTDOWN_S": "90"}


@dataclasses.dataclass
class Job:
    """A job that has ended."""

    size: int
    returncode: int | None  # None: it was killed at its time limit
    outputs: list[str]  # by rank
    launcher_output: str
    results: list[dict[str, str]]  # by rank and case: "" or a traceback
    seed: int = 0

    def report(self) -> str:
        """Return the output of all ranks, for failures."""
        ended = "was killed at its time limit" if self.returncode is None else "ended"
        parts = [f"job of {self.size} ranks {ended}, code {self.returncode}, seed {self.seed}"]
        parts += [f"--- rank {rank} printed\n{text}" for rank, text in enumerate(self.outputs)]
        return "\n".join([*parts, "--- mpirun printed", self.launcher_output])

    def check(self, case: str) -> None:
        """Raise AssertionError unless `case` passed on every rank."""
        assert all(result.get(case) == "" for result in self.results), "\n".join(
            [
                f"{case} failed on {self.size} ranks",
                *(f"--- rank {r}: {x.get(case, 'not run')}" for r, x in enumerate(self.results)),
                self.report(),
            ]
        )


def new_seed() -> int:
    """Return the seed of a job: TEST_SEED, or a random one."""
    return int(os.environ.get("TEST_SEED", random.randrange(2**32)))


def launcher() -> str:
    """Return the path of mpirun, preferably of this environment."""
    folders = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    found = shutil.which("mpirun", path=os.pathsep.join(folders))
    assert found, "mpirun is not on the PATH"
    return found


def start(
    out: str,
    size: int,
    program: Sequence[str],
    variables: dict[str, str],
    hosts: str = "",
    names: str = "",
    options: Iterable[str] = (),
    by: str = "mpirun",
) -> subprocess.Popen[bytes]:
    """Start this file as a program on `size` ranks. The launcher's output goes to OUT/launcher.out.

    `by` is the launcher (mpirun, hororun, or "" for none), and `options` are its options.
    """
    command = [sys.executable, __file__, out, *program]
    if names:
        command = ["env", *pretend_hosts.variables(names), *command]
    if hosts:
        # Only named variables reach other hosts.
        named = [word for name in (*FORWARDED, *variables) for word in ("-x", name)]
        command = [str(HOSTS), *hosts.split(), launcher(), *options, *named, *command]
    elif by == "hororun":
        command = [sys.executable, "-m", "hororing.hororun", *options, "-np", str(size), *command]
    elif by:
        command = [launcher(), *options, "-np", str(size), *command]
    with open(Path(out, "launcher.out"), "wb") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **launch_environment(out), **variables},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    _watch(process, out)
    return process


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a job; its emulated hosts end with the script that made them."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.pid in _watched:
        _watched.discard(process.pid)
        _tell_guard(str(-process.pid))


_watched: set[int] = set()


def _watch(process: subprocess.Popen[bytes], folder: str) -> None:
    """Let a job end with this process, however that ends. `folder` is its TMPDIR."""
    _watched.add(process.pid)
    _tell_guard(f"{process.pid} TMPDIR={folder}")


def _tell_guard(line: str) -> None:
    stdin = _guard().stdin
    assert stdin is not None
    stdin.write(f"{line}\n".encode())
    stdin.flush()


@functools.cache
def _guard() -> subprocess.Popen[bytes]:
    from hororing.hororun.host import guard

    command = [sys.executable, "-I", "-S", guard.__file__]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def run(
    file: str | Path,
    size: int,
    *args: str,
    script: bool = True,
    timeout_s: float = 90,
    environment: dict[str, str] | None = None,
    hosts: str = "",
    names: str = "",
) -> Job:
    """Run `file` on `size` ranks; a single rank runs without mpirun.

    `hosts`: the number of ranks on each emulated host, as "2,2", and options of hosts.sh.
    `names`: the host name that each rank sees, as "a,a,b,b" (pretend_hosts.py).
    """
    seed = new_seed()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as out:
        program = [*(["--script"] if script else []), str(file), *args]
        variables = {**STALL_ENVIRONMENT, "TEST_SEED": str(seed), **(environment or {})}
        by = "mpirun" if size > 1 else ""
        process = start(out, size, program, variables, hosts, names, by=by)
        code: int | None
        try:
            code = process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:  # also at the test's own limit
            kill(process)
        return collect(out, size, code, seed)


def collect(out: str, size: int, code: int | None, seed: int, number: int = 0) -> Job:
    """Return the results of file number `number` of a job, from `out`."""
    files = [Path(out, str(rank)) for rank in range(size)]
    printed = [
        _text(f.with_suffix(f".{number}.out")) or _text(f.with_suffix(".out")) for f in files
    ]
    results = [json.loads(_text(f.with_suffix(f".{number}.json")) or "{}") for f in files]
    return Job(size, code, printed, _text(Path(out, "launcher.out")), results, seed)


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


@functools.cache
def cases_of(file: str, size: int, hosts: str = "", **environment: str) -> Job:
    """Run the cases of a test file, once."""
    return run(
        file, size, script=False, timeout_s=CASES_LIMIT_S, hosts=hosts, environment=environment
    )


@functools.cache
def why_no_hosts() -> str:
    """Return why this machine cannot emulate several hosts, or "" if it can."""
    check = subprocess.run([str(HOSTS), "--check"], capture_output=True, text=True, check=False)
    return "" if check.returncode == 0 else check.stderr.strip() or "hosts.sh does not run"


def case_names(namespace: dict[str, object]) -> list[str]:
    """Return the cases of a module, in their order."""
    return [name for name in namespace if name.startswith("case_")]


def cases_in(*files: str) -> list[str]:
    """Return the cases of files that only ranks can import."""
    text = "\n".join((Path(__file__).parent / file).read_text() for file in files)
    return re.findall(r"^def (case_\w+)", text, flags=re.MULTILINE)


# ---------------------------------------------------------------------------------------------
# On the ranks


def seed() -> int:
    """Return a number that is the same on every rank, and new in every run."""
    return int(os.environ["TEST_SEED"])


def _main() -> None:
    out, *rest = sys.argv[1:]
    told = (os.environ.get(name) for name in RANK_VARIABLES)
    rank = next(filter(None, told), "0")
    sys.path.insert(0, str(Path(__file__).parent))
    import on_rank

    if rest[0] == "--script":
        on_rank.print_to(Path(out, f"{rank}.out"))
        Path(out, f"{rank}.pid").write_text(str(os.getpid()))
        sys.argv = rest[1:]
        sys.path.insert(0, str(Path(sys.argv[0]).parent))  # as Python does
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        on_rank.run_files(rest, Path(out, rank))


if __name__ == "__main__":
    _main()

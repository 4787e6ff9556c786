"""Runs tests on several ranks, under a real mpirun.

A test file holds functions `case_...`, which run on every rank, and one test that asks for their
results (`on_ranks`). One job per file and size runs all its cases, in the order of the file; a case
that fails ends the job, and the cases after it fail with it. Files of one session share a job per
size, since importing a framework takes longer than most files' cases (session.py).

As a program (what mpirun starts): mpirun.py OUT --script FILE ARGS... runs FILE as a script, and
what rank r prints goes to OUT/r.out; mpirun.py OUT FILE... runs the cases of each FILE
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

# How Open MPI 5 starts quickly on one machine, as root, with more ranks than cores.
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
    """The variables of a job that keeps its files in `folder`.

    mpirun's own folder has its process id in its name, and stays when mpirun is killed. Another
    one that gets the same id fails to start: "The PMIx server's listener thread failed to start".
    """
    return {**LAUNCH_ENVIRONMENT, "TMPDIR": folder}


# Of the environment of the tests, what ranks on other hosts need: mpirun sends it only when told.
FORWARDED = [
    name
    for name in ("OMP_NUM_THREADS", "PYTHONPATH")
    if name in LAUNCH_ENVIRONMENT or name in os.environ
]

HOSTS = Path(__file__).parents[1] / "hosts.sh"
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "HORORING_RANK")

# For the cases of one file, with the start of the job. On a quiet machine the slowest take 20 s.
CASES_LIMIT_S = 200.0

# A rank that waits in vain says so soon, instead of running into the job's time limit.
STALL_ENVIRONMENT = {"HORORING_STALL_WARNING_S": "10", "HORORING_STALL_SHUTDOWN_S": "60"}


@dataclasses.dataclass
class Job:
    """A job that has ended."""

    size: int
    returncode: int | None  # None: it ran out of time and was killed
    outputs: list[str]  # what each rank printed
    launcher_output: str
    results: list[dict[str, str]]  # of each rank, by case: "" or a traceback
    seed: int = 0

    def report(self) -> str:
        """Everything there is to know about a failure."""
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
    """Of a job: HORORING_TEST_SEED, or another one each time."""
    return int(os.environ.get("HORORING_TEST_SEED", random.randrange(2**32)))


def launcher() -> str:
    """Where mpirun is: that of this environment first."""
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
    """Start this file as a program on `size` ranks; what the launcher prints: OUT/launcher.out.

    `options` are those of the launcher, and `by` is which one: mpirun, hororun, or none at all.
    """
    command = [sys.executable, __file__, out, *program]
    if names:
        command = ["env", *pretend_hosts.variables(names), *command]
    if hosts:
        # Variables reach another host only when they are named.
        named = [word for name in (*FORWARDED, *variables) for word in ("-x", name)]
        command = [str(HOSTS), *hosts.split(), launcher(), *options, *named, *command]
    elif by == "hororun":
        command = [sys.executable, "-m", "hororing.hororun", *options, "-np", str(size), *command]
    elif by:
        command = [launcher(), *options, "-np", str(size), *command]
    with open(Path(out, "launcher.out"), "wb") as output:
        return subprocess.Popen(
            command,
            env={**os.environ, **launch_environment(out), **variables},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a job; its hosts end with the script that made them."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


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
    """Run `file` on `size` ranks; also without mpirun, when that is one.

    `hosts`: how many of them each pretend host has, as "2,2", and options of hosts.sh.
    `names`: of the host that each rank believes it is on, as "a,a,b,b" (pretend_hosts.py).
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
            kill(process)
            code = None
        return collect(out, size, code, seed)


def collect(out: str, size: int, code: int | None, seed: int, number: int = 0) -> Job:
    """What a job left in `out`; `number`: of which of its files."""
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
    """Why this machine cannot pretend to be several hosts; "": it can."""
    check = subprocess.run([str(HOSTS), "--check"], capture_output=True, text=True, check=False)
    return "" if check.returncode == 0 else check.stderr.strip() or "hosts.sh does not run"


def case_names(namespace: dict[str, object]) -> list[str]:
    """The cases of a module, in its order."""
    return [name for name in namespace if name.startswith("case_")]


def cases_in(*files: str) -> list[str]:
    """The cases of files that only ranks can import."""
    text = "\n".join(Path(__file__).with_name(file).read_text() for file in files)
    return re.findall(r"^def (case_\w+)", text, flags=re.MULTILINE)


# ---------------------------------------------------------------------------------------------
# On the ranks


def seed() -> int:
    """A number that is the same on every rank and new in every run."""
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

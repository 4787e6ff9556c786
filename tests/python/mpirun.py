"""Runs tests on several ranks, under a real mpirun.

A test file holds functions `case_...`, which run on every rank, and one test that asks for their
results. One job per file and size runs all its cases, in the order of the file; a case that
fails ends the job, and the cases after it fail with it.

As a program (what mpirun starts): mpirun.py OUT FILE runs the cases of FILE, mpirun.py OUT FILE
ARGS... with `--script` in front runs FILE as a script; either way what rank r prints goes to
OUT/r.out.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib.util
import json
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
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


HOSTS = Path(__file__).parents[1] / "hosts.sh"

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
    seed = int(os.environ.get("HORORING_TEST_SEED", random.randrange(2**32)))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as out:
        command = [sys.executable, __file__, out, *(["--script"] if script else []), str(file)]
        variables = {**STALL_ENVIRONMENT, "TEST_SEED": str(seed), **(environment or {})}
        if names:
            command = ["env", *pretend_hosts.variables(names), *command]
        if size > 1:
            mpirun = shutil.which("mpirun", path=os.pathsep.join(
                [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
            ))  # fmt: skip
            assert mpirun, "mpirun is not on the PATH"
            if hosts:
                # Variables reach another host only when they are named.
                names = [word for name in ("OMP_NUM_THREADS", *variables) for word in ("-x", name)]
                command = [str(HOSTS), *hosts.split(), mpirun, *names, *command]
            else:
                command = [mpirun, "-np", str(size), *command]
        process = subprocess.Popen(
            [*command, *args],
            env={**os.environ, **launch_environment(out), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        code: int | None
        try:
            launcher_output, _ = process.communicate(timeout=timeout_s)
            code = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # hosts end with the script that made them
            launcher_output, _ = process.communicate()
            code = None
        files = [Path(out, f"{rank}") for rank in range(size)]
        return Job(
            size,
            code,
            [_text(file.with_suffix(".out")) for file in files],
            launcher_output,
            [json.loads(_text(file.with_suffix(".json")) or "{}") for file in files],
            seed,
        )


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


@functools.cache
def cases_of(file: str, size: int, hosts: str = "", **environment: str) -> Job:
    """Run the cases of a test file, once."""
    return run(file, size, script=False, timeout_s=110, hosts=hosts, environment=environment)


@functools.cache
def why_no_hosts() -> str:
    """Why this machine cannot pretend to be several hosts; "": it can."""
    check = subprocess.run([str(HOSTS), "--check"], capture_output=True, text=True, check=False)
    return "" if check.returncode == 0 else check.stderr.strip() or "hosts.sh does not run"


def case_names(namespace: dict[str, object]) -> list[str]:
    """The cases of a module, in its order."""
    return [name for name in namespace if name.startswith("case_")]


# ---------------------------------------------------------------------------------------------
# On the ranks


def seed() -> int:
    """A number that is the same on every rank and new in every run."""
    return int(os.environ["TEST_SEED"])


def _run_cases(file: str, results: Path) -> None:
    spec = importlib.util.spec_from_file_location("cases", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["cases"] = module
    spec.loader.exec_module(module)
    done: dict[str, str] = {}
    for name in case_names(vars(module)):
        print(f"{name}", flush=True)
        try:
            getattr(module, name)()
            done[name] = ""
        except BaseException:
            done[name] = traceback.format_exc()
            raise  # peers must not wait for this rank
        finally:
            results.write_text(json.dumps(done))
    # Python looks for cycles when it ends: among torch's objects for a quarter of the time of its
    # import. How jobs end is tested by scripts, which end as they do for users.
    gc.freeze()


def _main() -> None:
    out, *rest = sys.argv[1:]
    rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or "0"
    log = os.open(Path(out, f"{rank}.out"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # A line is one write, also where PYTHONUNBUFFERED is set: the engine's thread logs there, too.
    sys.stdout.reconfigure(line_buffering=True, write_through=False)
    sys.path.insert(0, str(Path(__file__).parent))
    if rest[0] == "--script":
        sys.argv = rest[1:]
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        _run_cases(rest[0], Path(out, f"{rank}.json"))


if __name__ == "__main__":
    _main()

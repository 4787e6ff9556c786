"""Elastic jobs whose processes are not started by hororun: `python -m hororing store`.

The processes have the variables of an Indexed Job's pods, or those of mpirun. Push tier, 8 s.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mpirun
import nemesis_replay
import pytest
import tiers
from live_job import PATIENCE_S, poll

from hororing.__main__ import main
from hororing.hororun import store_command
from hororing.hororun.host.agent import free_port

ROOT = Path(__file__).parents[3]
RANKS = Path(__file__).parents[1] / "support/nemesis_ranks.py"
SECRET = "of these tests, 32 characters ..."


class Outside:
    """A store, and the processes of a test. As a context manager it ends all of them.

    Parameters
    ----------
    flags : flags of the store.
    on : returns a prefix for commands by host number, such as to run them in a namespace.
    place : the address at which the store listens, and processes find it.
    """

    def __init__(
        self,
        folder: Path,
        *flags: str,
        on: Callable[[int], list[str]] = lambda host: [],
        place: str = "",
        **variables: str,
    ) -> None:
        self._folder, self._on = folder, on
        self.place = place or f"127.0.0.1:{free_port()}"
        self._variables = {"HORORING_SECRET_KEY": SECRET, "PYTHONPATH": str(ROOT), **variables}
        self.stop_file, self.history = folder / "stop", folder / "membership.jsonl"
        self.processes: list[subprocess.Popen[bytes]] = []
        self.store = self._popen(
            "store", on(0), [sys.executable, "-m", "hororing", "store", "--listen", self.place,
                             "--membership", str(self.history), *flags], {},
        )  # fmt: skip

    def __enter__(self) -> Outside:
        return self

    def __exit__(self, *_: object) -> None:
        for each in [*self.processes, self.store]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(each.pid, signal.SIGKILL)
            each.wait()

    def _popen(
        self, name: str, on: list[str], command: list[str], variables: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        told = {**self._variables, **variables}
        words = ["env", *(f"{key}={value}" for key, value in told.items()), *command]
        with (self._folder / name).open("wb") as out:
            return subprocess.Popen(
                [*on, *([shlex.join(words)] if on else words)],
                stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def start(self, host: int = 0, launcher: list[str] | None = None, **variables: str) -> None:
        """Start a process, or a launcher of processes."""
        words = [*(launcher or []), sys.executable, str(RANKS), str(self.stop_file)]
        told = {"HORORING_ELASTIC": "1", "HORORING_RENDEZVOUS": self.place, **variables}
        name = f"out.{len(self.processes)}"
        self.processes.append(self._popen(name, self._on(host), words, told))

    def pod(self, index: int, host: int = 0) -> None:
        """Start the process of a pod."""
        self.start(host, JOB_COMPLETION_INDEX=str(index))

    def worlds(self) -> list[dict[str, Any]]:
        with contextlib.suppress(FileNotFoundError):
            lines = self.history.read_text().splitlines(keepends=True)
            return [json.loads(line) for line in lines if line.endswith("\n")]
        return []

    def told(self, name: str = "out.*") -> str:
        return "".join(path.read_text() for path in sorted(self._folder.glob(name)))

    def pids(self) -> list[int]:
        return [each["pid"] for each in self.worlds()[-1]["members"]]

    def wait(self, size: int, after: int = 0) -> int:
        """Wait until a later generation of `size` ranks makes steps; return its number."""

        def works() -> int:
            worlds = self.worlds()
            if not worlds or len(worlds[-1]["members"]) != size:
                return 0
            number = int(worlds[-1]["generation"])
            return number if number > after and f"\nstep {number} " in self.told() else 0

        number = poll(works)
        assert number, (self.worlds(), self.told("store"), self.told()[-2000:])
        return number

    def end(self) -> None:
        """Stop the job. All processes must succeed, with the bits of a replay."""
        self.stop_file.touch()
        for each in [*self.processes, self.store]:
            each.wait(PATIENCE_S)
        told = self.told()
        assert self.store.returncode == 0, (self.told("store"), told[-2000:])
        assert "WRONG" not in told
        ends = {tuple(line.split()) for line in told.splitlines() if line.startswith("end ")}
        assert len(ends) == 1, (ends, told[-2000:])
        _, steps, _, _, crc = next(iter(ends))
        assert list(nemesis_replay.replay(self.worlds(), int(steps)))[-1] == int(crc)


def test_of_the_pods_of_a_job_only_the_lost_one_starts_again(tmp_path: Path):  # push tier, 5 s
    with Outside(tmp_path, "-np", "3", "--min-np", "2", "--linger", "1") as job:
        for index in range(3):
            job.pod(index)
        generation = job.wait(3)
        before = job.pids()
        os.kill(before[0], signal.SIGKILL)  # rank 0
        generation = job.wait(2, generation)
        job.pod([each.pid for each in job.processes].index(before[0]))
        job.wait(3, generation)
        assert set(before[1:]) < set(job.pids())  # the others are the same processes
        job.end()
        codes = [each.returncode for each in job.processes]
        assert sorted(codes) == [-9, 0, 0, 0]
        assert "its connection closed unexpectedly" in job.told("store")


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun")
def test_a_job_of_mpirun_shrinks(tmp_path: Path):  # push tier, 3 s
    with Outside(tmp_path, "-np", "3", "--min-np", "1") as job:
        launcher = ["mpirun", "--enable-recovery", "-np", "3"]
        job.start(launcher=launcher, **mpirun.launch_environment(str(tmp_path)))
        generation = job.wait(3)
        os.kill(job.pids()[0], signal.SIGKILL)
        job.wait(2, generation)
        job.end()
        assert job.processes[0].returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_store(number: signal.Signals, tmp_path: Path):  # push tier, 1 s
    with Outside(tmp_path, "-np", "1") as job:
        assert poll(lambda: "waits for" in job.told("store"))
        job.store.send_signal(number)
        assert job.store.wait(PATIENCE_S) == 128 + number
        assert job.told("store").splitlines()[-1] == f"store: ended by {number.name}"
        assert "Traceback" not in job.told("store")


def test_a_job_that_has_lost_its_state_has_failed(tmp_path: Path):  # push tier, 1 s
    with Outside(tmp_path, "-np", "1") as job:
        job.pod(0)
        job.wait(1)
        os.kill(job.pids()[0], signal.SIGKILL)
        assert job.store.wait(PATIENCE_S) == 1
        assert "no process is left that has the state of the training" in job.told("store")


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("-np 2 --min-np 3", "--min-np 3, -np 2, --max-np 2: they must ascend from 1"),
        ("-np 2 --min-np 0", "--min-np 0, -np 2, --max-np 2: they must ascend from 1"),
        ("-np 2 --linger -1", "--linger -1 is not a number of seconds"),
        ("-np 2 --linger nan", "--linger nan is not a number of seconds"),
        ("-np 2 --membership /no/file", "No such file or directory: '/no/file'"),
        ("-np 2 --listen 99999", "--listen 99999 is not a port"),
        ("-np 2 --listen 29411", "the job has no secret"),
        ("-np 2 --listen here", "'here' is not an address"),
    ],
)
def test_flags_of_the_store_that_do_not_fit(
    words: str, wanted: str, capfd: pytest.CaptureFixture[str]
):
    assert main(["store", *words.split()]) == 2
    assert wanted in capfd.readouterr().err


def test_the_elastic_manifest_for_kubernetes_is_consistent():
    text = (ROOT / "examples/clusters/kubernetes_elastic.yaml").read_text()
    service, store, job = text.split("---\n")

    def values(field: str, part: str = job) -> list[str]:
        return re.findall(rf'^[ -]*{field}: "?([^\s"]+)', part, re.MULTILINE)

    def variable(name: str, part: str = job) -> str:
        return values("value", part.partition(f"- name: {name}\n")[2])[0]

    assert values("job-name", service) == values("name", store)[:1]
    words = re.findall(r"command: \[(.*)\]", store)[0].replace('"', "").split(", ")
    flags = argparse.ArgumentParser()
    store_command.add_arguments(flags)
    told = flags.parse_args(words[4:])
    assert words[:4] == ["python", "-m", "hororing", "store"]
    assert values("completions") == values("parallelism") == [str(told.num_proc)]
    assert variable("HORORING_ELASTIC") == "1"
    assert variable("HORORING_RENDEZVOUS") == f"{values('name', service)[0]}:{told.listen}"
    for part in (store, job):
        secret = Path(variable("HORORING_SECRET_FILE", part))
        assert values("mountPath", part) == [str(secret.parent)]
        assert f"create secret generic {values('secretName', part)[0]} " in service
        assert f"--from-literal={secret.name}=" in service


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[str]:
    """Yield an agent for four emulated hosts: AGENT host1 COMMAND."""
    command = tmp_path / "told"
    command.write_text(
        f'#!/bin/bash\necho "$PRTE_MCA_plm_ssh_agent" > {tmp_path}/agent\nexec sleep 600\n'
    )
    command.chmod(0o755)
    hosts = subprocess.Popen(
        [str(mpirun.HOSTS), "1,1,1,1", str(command)],
        start_new_session=True,
    )  # fmt: skip
    try:
        yield poll(lambda: (tmp_path / "agent").exists() and (tmp_path / "agent").read_text())
    finally:
        os.killpg(hosts.pid, signal.SIGTERM)
        hosts.wait()


@tiers.full
@pytest.mark.skipif(bool(mpirun.why_no_hosts()), reason=mpirun.why_no_hosts())
def test_pods_of_several_hosts_are_replaced(tmp_path: Path, agent: str):  # full tier, 15 s
    def on(host: int) -> list[str]:
        return [agent.strip(), f"host{host}"]

    flags = ["-np", "3", "--min-np", "2", "--linger", "1"]
    with Outside(tmp_path, *flags, on=on, place="10.77.0.1:29411") as job:
        for index in range(3):
            job.pod(index, host=index + 1)
        generation = job.wait(3)
        for _ in range(3):
            hit = job.worlds()[-1]["members"][0]
            index = int(hit["host"].removeprefix("host")) - 1
            os.kill(hit["pid"], signal.SIGKILL)
            generation = job.wait(2, generation)
            time.sleep(0.2)
            job.pod(index, host=index + 1)
            generation = job.wait(3, generation)
        job.end()

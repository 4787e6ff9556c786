"""A Slurm of one node on this machine, for tests: daemons that end with the test.

Its programs are on PATH, or in the folder TEST_SLURM, which contains the unpacked Debian
packages (dpkg -x) slurmctld, slurmd, slurm-client, slurm-wlm-basic-plugins, libmunge2, libhwloc15
and liblua5.1-0. It does not change the system.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

_UP_S = 60.0
_UNPACKED = os.environ.get("TEST_SLURM", "")
_LIBRARIES = Path(_UNPACKED, "usr/lib/x86_64-linux-gnu")
_PATH = f"{_UNPACKED}/usr/sbin:{_UNPACKED}/usr/bin" if _UNPACKED else os.environ.get("PATH")

_CONFIG = """
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/none
CredType=cred/none
MpiDefault=none
SlurmctldPort={port}
SlurmdPort={next_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmUser={user}
SlurmdUser={user}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/linear
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP OverSubscribe=YES
"""


def _program(name: str) -> str | None:
    return shutil.which(f"{name}-wlm", path=_PATH) or shutil.which(name, path=_PATH)


def why_not() -> str:
    """Return why Slurm cannot run here, or "" if it can."""
    lacks = [name for name in ("slurmctld", "slurmd", "slurmstepd", "srun") if not _program(name)]
    return f"there is no {', '.join(lacks)}" if lacks else ""


@contextlib.contextmanager
def cluster(folder: Path, port: int) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Run the daemons; yield the path of srun and the variables that it needs."""
    for name in ("state", "spool"):
        (folder / name).mkdir()
    text = _CONFIG.format(
        host=socket.gethostname(), port=port, next_port=port + 1, folder=folder,
        user=os.environ.get("USER", "root") if os.getuid() else "root",
    )  # fmt: skip
    variables = {"SLURM_CONF": str(folder / "slurm.conf")}
    if _UNPACKED:
        text += f"PluginDir={_LIBRARIES}/slurm-wlm\n"
        variables["LD_LIBRARY_PATH"] = f"{_LIBRARIES}/slurm-wlm:{_LIBRARIES}"
    (folder / "slurm.conf").write_text(text)
    env = {**os.environ, **variables}
    stepd = str(_program("slurmstepd"))
    commands = [
        [str(_program("slurmctld")), "-D"],
        [str(_program("slurmd")), "-D", "-d", stepd, "-N", socket.gethostname()],
    ]
    with open(folder / "daemons.log", "wb") as log, contextlib.ExitStack() as stack:
        for command in commands:
            daemon = subprocess.Popen(command, env=env, stdout=log, stderr=log)
            stack.callback(daemon.wait)
            stack.callback(daemon.kill)
        srun = str(_program("srun"))
        deadline = time.monotonic() + _UP_S
        while True:
            tried = subprocess.run(
                ["timeout", "10", srun, "--immediate=5", "true"], env=env, capture_output=True,
                check=False,
            )  # fmt: skip
            if tried.returncode == 0:
                break
            assert time.monotonic() < deadline, (folder / "daemons.log").read_text()
            time.sleep(0.2)
        yield srun, variables

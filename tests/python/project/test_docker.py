"""The recipes of the images: their RUN steps, which run here, and compose.yaml.

The tests have no image registry, so they build no image; docs/clusters.md says which images were
built, and how.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import tiers
import yaml
from mpirun import LAUNCH_ENVIRONMENT

ROOT = Path(__file__).parents[3]
IMAGES = ("cpu", "cuda")
SCRIPT = """
import hororing.numpy as hvd, numpy as np
hvd.init()
print("sum", int(hvd.allreduce(np.int64(hvd.rank() + 1), op=hvd.Sum)))
"""


def instructions(image: str) -> list[tuple[str, str]]:
    """Return (FROM, debian...), (RUN, ...), ... with continuation lines joined."""
    text = (ROOT / "packaging/docker" / f"{image}.Dockerfile").read_text()
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line]


def runs(image: str) -> list[str]:
    return [rest for word, rest in instructions(image) if word == "RUN"]


def shell(command: str, **environ: str) -> str:
    inherited = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    done = subprocess.run(
        ["sh", "-ec", command],
        env={**inherited, **LAUNCH_ENVIRONMENT, **environ},
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("image", IMAGES)
def test_the_bases_are_pinned_and_the_user_is_not_root(image: str):
    steps = instructions(image)
    for word, rest in steps:
        if word == "FROM":
            assert re.match(r"[a-z/]+:[a-z-]*[0-9]", rest), rest
        assert word != "HEALTHCHECK"
    (user,) = (rest for word, rest in steps if word == "USER")
    assert int(user) > 0
    assert steps[-1] == ("CMD", '["python", "-m", "hororing", "info"]')


@tiers.full
@pytest.mark.skipif(
    shutil.which("apt-get") is None or not any(Path("/var/lib/apt/lists").glob("*_Packages*")),
    reason="needs apt-get, and lists of what there is",
)
@pytest.mark.parametrize("step", [r for r in runs("cpu") if "apt-get install" in r])
def test_the_packages_exist(step: str):
    (install,) = (part for part in step.split("&&") if "apt-get install" in part)
    shell(install.replace("install -y", "install -y --simulate"))


def test_both_images_build_and_install_in_the_same_way():
    def own(image: str) -> list[str]:
        return [step for step in runs(image) if "pip" in step]

    assert own("cpu") == own("cuda")
    assert len(own("cpu")) == 2


@tiers.full
@pytest.mark.timeout(400)
def test_the_recipe_gives_an_environment_in_which_mpirun_works(tmp_path: Path):
    sources = tmp_path / "source"
    listed = shell(f"git -C {shlex.quote(str(ROOT))} ls-files -co --exclude-standard")
    for name in listed.splitlines():
        if (ROOT / name).exists():
            (sources / name).parent.mkdir(parents=True, exist_ok=True)
            (sources / name).write_bytes((ROOT / name).read_bytes())
    for step in runs("cpu"):
        if "pip" in step:
            here = re.sub(r"(?<!\w)/(?=(build|source|wheels|opt)\b)", f"{tmp_path}/", step)
            # The smallest extra. A compiler cache has compiled these sources before.
            shell(here, EXTRAS="keras", CCACHE_BASEDIR=str(sources))
    path = f"{tmp_path}/opt/hororing/bin:{os.environ['PATH']}"
    assert "works (one process)" in shell("python -m hororing info", PATH=path)
    out = shell(f"mpirun -np 2 python -c {shlex.quote(SCRIPT)}", PATH=path)
    assert out.splitlines() == ["sum 3", "sum 3"]


def test_two_containers_are_two_hosts_of_one_job():
    job = yaml.safe_load((ROOT / "packaging/docker" / "compose.yaml").read_text())
    hosts = job["services"]
    assert set(hosts) == {"host1", "host2"}
    for name, host in hosts.items():
        assert host["hostname"] == name
        assert host["shm_size"] == "1gb"  # Docker's own 64 MiB is less than init() accepts
        assert (
            ROOT / "packaging/docker" / host["build"]["context"] / host["build"]["dockerfile"]
        ).exists()
        assert (ROOT / shlex.split(host["command"])[-1]).exists()
    ranks, secret = [], secrets.token_hex(32)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for name, host in hosts.items():
        # The variables of its file, with another port and addresses that exist here.
        variables = {**host["environment"], "HORORING_SECRET_KEY": secret}
        assert variables["HORORING_RENDEZVOUS"] == "host1:29411"
        variables |= {"HORORING_RENDEZVOUS": f"127.0.0.1:{port}", "HORORING_HOSTNAME": name}
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-c", SCRIPT],
                env={**os.environ, **variables},
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    assert [each.communicate(timeout=60)[0] for each in ranks] == ["sum 3\n", "sum 3\n"]

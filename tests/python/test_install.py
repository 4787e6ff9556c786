"""A wheel, built from a copy of the sources and installed into a fresh environment."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import tiers
from mpirun import LAUNCH_ENVIRONMENT

pytestmark = tiers.full

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
import hororing.numpy as hvd
import numpy as np
hvd.init()
assert "torch" not in sys.modules
total = hvd.allreduce(np.arange(4) + hvd.rank(), op=hvd.Sum)
print(f"rank {hvd.rank()} of {hvd.size()}: {total.tolist()}", flush=True)
"""


def command(*words: str | Path, **environ: str) -> str:
    # The environment under test, not the one that runs the tests.
    inherited = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    done = subprocess.run(
        [str(word) for word in words],
        env={**inherited, **LAUNCH_ENVIRONMENT, **environ},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"
    for name in command("git", "-C", ROOT, "ls-files", "-co", "--exclude-standard").splitlines():
        if (ROOT / name).exists():  # not deleted since the last commit
            (sources / name).parent.mkdir(parents=True, exist_ok=True)
            (sources / name).write_bytes((ROOT / name).read_bytes())
    flags = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder)
    # For a compiler cache, if there is one, these are the sources that were compiled already.
    command(sys.executable, "-m", "pip", "wheel", *flags, sources, CCACHE_BASEDIR=str(sources))
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.timeout(400)
def test_one_wheel_serves_every_python(wheel: Path):
    assert "-cp310-abi3-linux_" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert {"hororing/_core.abi3.so", "hororing/lib/libhororing.so", "hororing/py.typed"} < {*names}
    assert not [name for name in names if name.startswith(("tests", "csrc", "buildtools"))]


@pytest.mark.timeout(400)
def test_a_wheel_works_in_another_environment(wheel: Path, tmp_path: Path):
    venv.create(tmp_path / "env", with_pip=True)
    bin = tmp_path / "env/bin"
    command(bin / "python", "-m", "pip", "install", "--quiet", wheel)
    assert "allreduce         works" in command(bin / "python", "-m", "hororing", "info")
    path = f"{bin}{os.pathsep}{os.environ['PATH']}"
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    printed = command("mpirun", "-np", "2", bin / "python", script, PATH=path)
    assert sorted(printed.splitlines()) == [f"rank {r} of 2: [1, 3, 5, 7]" for r in range(2)]
    assert command(bin / "python", script) == "rank 0 of 1: [0, 1, 2, 3]\n"

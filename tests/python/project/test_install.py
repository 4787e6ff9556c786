"""The wheel, in environments without a compiler and without MPI, and with either MPI.

Full tier, 2 to 4 minutes on two cores, to compile the core and three layers, and to fetch MPIs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import tiers
from mpirun import LAUNCH_ENVIRONMENT

pytestmark = [tiers.full, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[3]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")

# Linear regression; each rank has half of the data.
TRAINING = """
import sys
import hororing.numpy as hvd
import numpy as np

hvd.init()
assert "torch" not in sys.modules
inputs = np.random.default_rng(1).normal(size=(200, 3))[hvd.rank() :: hvd.size()]
targets = inputs @ np.array([1.0, -2.0, 3.0])
weights = hvd.broadcast(np.full(3, float(hvd.rank())), root_rank=0, name="weights")
for step in range(100):
    gradient = 2 * inputs.T @ (inputs @ weights - targets) / len(inputs)
    weights -= 0.1 * hvd.allreduce(gradient, op=hvd.Average, name="gradient")
same = hvd.allgather(weights[None])
assert (same == same[0]).all()
print(f"rank {hvd.rank()} of {hvd.size()}: {np.round(weights, 6).tolist()}", flush=True)
"""
TRAINED = [f"rank {rank} of 2: [1.0, -2.0, 3.0]" for rank in range(2)]


def command(*words: str | Path, **environ: str) -> str:
    # The environment under test, not the one that runs the tests.
    inherited = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    done = subprocess.run(
        [str(word) for word in words],
        env={**inherited, **LAUNCH_ENVIRONMENT, **environ},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output of `make wheel` for a copy of the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"
    for name in command("git", "-C", ROOT, "ls-files", "-co", "--exclude-standard").splitlines():
        if (ROOT / name).exists():  # not deleted since the last commit
            (sources / name).parent.mkdir(parents=True, exist_ok=True)
            (sources / name).write_bytes((ROOT / name).read_bytes())
    made = folder / "dist"
    script = sources / "packaging/wheel/make_wheel.py"
    command(sys.executable, script, made, "--mpi", folder / "mpi")
    return made


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (built,) = dist.glob("*.whl")
    return built


def test_one_wheel_serves_every_python_and_every_mpi(wheel: Path, tmp_path: Path):
    assert "-cp310-abi3-manylinux_2_" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path)
    metadata = Parser().parsestr((*tmp_path.glob("*.dist-info/METADATA"),)[0].read_text())
    needed = {each for each in metadata.get_all("Requires-Dist") if "extra ==" not in each}
    assert needed == {"numpy", "cffi>=1.15", "cloudpickle"}
    layers = {f"hororing/lib/libhororing_mpi_{abi}.so" for abi in ("openmpi", "mpich", "abi")}
    assert {"hororing/_core.abi3.so", "hororing/lib/libhororing.so", "hororing/py.typed"} < names
    assert layers < names
    folders = {name.split("/")[0] for name in names}
    assert folders == {  # no copied library
        "hororing", "hororing/torch_backend.py", f"hororing-{metadata['Version']}.dist-info"
    }  # fmt: skip
    for library in tmp_path.rglob("*.so"):
        dynamic = command("readelf", "-d", library).splitlines()
        paths = [line.split("[")[1] for line in dynamic if "PATH)" in line]
        assert all(path.strip("]") in ("$ORIGIN", "$ORIGIN/lib") for path in paths), library


def test_the_sdist_holds_what_makes_the_wheel(dist: Path):
    (sdist,) = dist.glob("*.tar.gz")
    listed = command("tar", "-tf", sdist)
    for name in ("Makefile", "CMakeLists.txt", "packaging/wheel/backend.py", "csrc/capi/process.h"):
        assert f"/{name}\n" in listed


def environment(folder: Path, python: str, *requirements: str | Path) -> dict[str, str]:
    """Return the variables of an environment with these packages, and nothing else on PATH."""
    command(python, "-m", "venv", folder)
    command(folder / "bin/python", "-m", "pip", "install", "--quiet", *requirements)
    tools = folder / "tools"
    tools.mkdir()
    for name in ("sh", "env", "dirname", "uname", "hostname"):  # scripts such as mpirun need them
        (tools / name).symlink_to(str(shutil.which(name)))
    path = f"{folder / 'bin'}{os.pathsep}{tools}"
    for compiler in ("cc", "gcc", "c++", "g++", "clang"):
        assert shutil.which(compiler, path=path) is None
    (folder / "train.py").write_text(TRAINING)
    return {"PATH": path, "LD_LIBRARY_PATH": ""}


@pytest.mark.parametrize("version", PYTHONS)
def test_without_compiler_and_mpi_two_ranks_train(wheel: Path, tmp_path: Path, version: str):
    found = [
        shutil.which(f"python{version}"),
        *Path.home().glob(f".pyenv/versions/{version}.*/bin/python"),
    ]
    python = next((str(each) for each in found if each and runs(each)), None)
    if python is None:
        pytest.skip(f"there is no Python {version}")
    variables = environment(tmp_path, python, wheel)
    bin = tmp_path / "bin"
    info = command(bin / "hororing", "info", **variables)
    assert "allreduce         works" in info
    assert "MPI layers        openmpi, mpich, abi\n" in info
    trained = command(
        *(bin / "hororun", "-np", "2", bin / "python", tmp_path / "train.py"), **variables
    )
    assert sorted(re.sub(r"^\[\d\] ", "", line) for line in trained.splitlines()) == TRAINED


def runs(python: str | Path) -> bool:
    done = subprocess.run([python, "--version"], capture_output=True, check=False)
    return done.returncode == 0  # not a shim of pyenv for a version that is not active


@pytest.mark.parametrize(("package", "abi"), [("openmpi", "openmpi"), ("mpich", "mpich")])
def test_two_ranks_train_with_whatever_mpi_is_installed(
    wheel: Path, tmp_path: Path, package: str, abi: str
):
    variables = environment(tmp_path, sys.executable, f"hororing[{package}] @ {wheel.as_uri()}")
    bin = tmp_path / "bin"
    info = command(bin / "hororing", "info", **variables)
    (line,) = (line for line in info.splitlines() if line.startswith("MPI  "))
    assert line.endswith(f", ABI {abi}")
    assert f"{tmp_path}/lib/libmpi.so" in line
    for transport in ("auto", "mpi"):
        trained = command(
            *(bin / "mpirun", "-np", "2", bin / "python", tmp_path / "train.py"),
            **variables,
            HORORING_TRANSPORT=transport,
        )
        assert sorted(re.findall(r"rank .*?]", trained)) == TRAINED


def test_the_standard_abi_of_mpi_5_serves_too(wheel: Path, tmp_path: Path):
    variables = environment(tmp_path, sys.executable, f"hororing[mpich] @ {wheel.as_uri()}")
    bin = tmp_path / "bin"
    variables["HORORING_MPI_LIBRARY"] = f"{tmp_path}/lib/libmpi_abi.so.1"
    assert ", ABI abi\n" in command(bin / "hororing", "info", **variables)
    trained = command(
        *(bin / "mpirun", "-np", "2", bin / "python", tmp_path / "train.py"),
        **variables,
        HORORING_TRANSPORT="mpi",
    )
    # Hydra may join the lines of two ranks, and print an empty line after them.
    assert sorted(re.findall(r"rank .*?]", trained)) == TRAINED

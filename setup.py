"""Drives CMake, which builds the core, and compiles the module of its C interface.

All else about the package is in pyproject.toml. Results:

    hororing/_core.abi3.so             what Python imports, made by cffi, and
    hororing/_tensors.abi3.so          what it does for every tensor, built by CMake; both linked to
    hororing/lib/libhororing.so        the core, which loads for jobs of several ranks
    hororing/lib/libhororing_mpi_*.so  the MPI transport, one for each ABI of MPI that was found
    hororing/lib/mpi_folders.txt       where the library of an installed MPI is
    hororing/lib/libhororing_tensorflow.so   operations for TensorFlow's graphs
    hororing/lib/libhororing_jax.so    custom calls for JAX's compiled programs
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "packaging/wheel"))

import core_ffi  # noqa: E402
import machine  # noqa: E402

LIMITED_API = 0x030A0000  # CPython 3.10 and later, as in CMakeLists.txt


def version() -> str:
    """The version, which is written in CMakeLists.txt only."""
    found = re.search(r"project\(hororing VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text())
    assert found, "CMakeLists.txt has no version"
    return found[1]


def dependencies() -> list[str]:
    """What the installed package needs. A build with one MPI, of a wheel, gets its mpirun."""
    common = ["numpy", "cffi>=1.15", "cloudpickle"]
    wrappers = machine.mpi_wrappers()
    wheel = machine.wheel_of(wrappers[0]) if len(wrappers) == 1 else ""
    return [*common, machine.MPI_WHEELS[wheel]] if wheel else common


def layers(build: Path) -> dict[str, list[str]]:
    """The layers for MPI that CMake has found, and the folders of their libraries."""
    lines = (build / "mpi_layers.txt").read_text().splitlines()
    return {line.split(";")[0]: line.split(";")[1:] for line in lines}


class BuildCore(build_ext):
    """CMake first, then the module."""

    def run(self) -> None:
        """Build everything; into the source tree for an editable installation."""
        # setuptools gives editable installations a fresh folder each time; ours makes the second
        # one quick. Both are as far below the sources as the Makefile's, for compiler caches.
        build = ROOT / "build/editable" if self.inplace else Path(f"{self.build_temp}-core")
        build = build.resolve()
        libraries = self._cmake(build)
        target = ROOT / "hororing" if self.inplace else Path(self.build_lib) / "hororing"
        self._copy(build, libraries, target)

        source = Path(self.build_temp) / "_core.c"
        core_ffi.write(ROOT / "csrc/capi/hororing.h", source)
        (core,) = self.extensions
        core.sources = [str(source)]
        core.include_dirs = [str(ROOT / "csrc")]
        core.library_dirs = [str(build)]
        # Whatever changed, changed the core or the header: compiling this again takes a second.
        self.force = True
        super().run()

    def _cmake(self, build: Path) -> list[str]:
        """Build; names of the libraries for hororing/lib."""
        cmake = machine.cmake()
        if cmake is None:
            raise SystemExit(
                "hororing needs CMake 3.20 or later to be built: pip install cmake "
                "(without --no-build-isolation pip does that itself)"
            )
        wrappers = machine.mpi_wrappers()
        if not wrappers:
            print("hororing: no MPI (neither mpicc nor MPICC): jobs need hororun")
        configure = [
            cmake,
            *("-S", str(ROOT), "-B", str(build)),
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DHORORING_MPICC={';'.join(wrappers) or 'OFF'}",
            f"-DHORORING_PYTHON_INCLUDE={sysconfig.get_path('include')}",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        ]
        print("+", shlex.join(configure), flush=True)
        subprocess.run(configure, check=True)
        cores = len(os.sched_getaffinity(0))
        make = [cmake, "--build", str(build), "--parallel", str(cores), "--target"]
        # Libraries only: tests and the test module are the Makefile's business.
        libraries = ["hororing", "hororing_tensorflow", "hororing_jax", *layers(build)]
        print("+", shlex.join([*make, *libraries]), flush=True)
        subprocess.run([*make, *libraries, "hororing_python"], check=True)
        return libraries

    def _copy(self, build: Path, libraries: list[str], package: Path) -> None:
        target = package / "lib"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        tensors = package / "_tensors.abi3.so"
        tensors.unlink(missing_ok=True)
        shutil.copy2(build / tensors.name, tensors)
        for library in libraries:
            # A new file: overwriting one that a process has mapped would crash it.
            shutil.copy2(build / f"lib{library}.so", target)
        # A wheel of an MPI is in the environment, wherever that is; _engine/mpi.py looks there.
        if not any(machine.wheel_of(wrapper) for wrapper in machine.mpi_wrappers()):
            folders = [folder for each in layers(build).values() for folder in each]
            (target / "mpi_folders.txt").write_text("".join(f"{each}\n" for each in folders))


setup(
    version=version(),
    install_requires=dependencies(),
    ext_modules=[
        Extension(
            core_ffi.MODULE,
            [],
            libraries=["hororing"],
            extra_link_args=["-Wl,-rpath,$ORIGIN/lib"],
            define_macros=[("Py_LIMITED_API", hex(LIMITED_API))],
            py_limited_api=True,
        ),
    ],
    cmdclass={"build_ext": BuildCore},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)

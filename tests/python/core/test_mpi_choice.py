"""The choice of the MPI library and of the layer. Push tier, 1 s; with MPICH: test_install.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hororing._engine import mpi
from hororing.errors import TransportError


@pytest.fixture
def layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of an installation without layers, in an environment without MPI."""
    folder = tmp_path / "lib/python3/site-packages/hororing/lib"
    folder.mkdir(parents=True)
    monkeypatch.setattr(mpi, "_FOLDER", folder)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return folder


def add(layers: Path, *abis: str) -> None:
    for abi in abis:
        (layers / f"libhororing_mpi_{abi}.so").touch()


def test_a_build_without_mpi_says_so(layers: Path):
    assert not mpi.is_built()
    with pytest.raises(TransportError, match="built without MPI"):
        mpi._choose(None, "none")


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ("/no/such/libmpi.so.12", r"/no/such/libmpi\.so\.12 cannot be loaded"),
        ("libm.so.6", r"libm\.so\.6 has no binary interface of MPI"),
    ],
)
def test_a_library_that_is_named_counts_alone(
    layers: Path, monkeypatch: pytest.MonkeyPatch, named: str, told: str
):
    add(layers, "openmpi", "mpich")
    monkeypatch.setattr(mpi, "_loaded", lambda: None)
    with pytest.raises(TransportError, match=told):
        mpi._choose(named, "Open MPI")


@pytest.mark.skipif(not mpi.is_usable(), reason="there is no MPI")
def test_a_library_without_a_layer_is_named(layers: Path):
    found = mpi.describe()
    add(layers, *({"openmpi", "mpich"} - {found.abi}))
    for named in (found.path, None):  # None: it is loaded already
        with pytest.raises(TransportError, match=f"ABI '{found.abi}', for which .* no layer"):
            mpi._choose(named, "none")


@pytest.mark.skipif(not mpi.is_usable(), reason="there is no MPI")
def test_a_second_mpi_in_a_process_is_refused():
    with pytest.raises(TransportError, match=r"libm\.so\.6, but the process has loaded .* already"):
        mpi._choose("libm.so.6", "none")


def test_no_library_is_an_error_that_names_what_was_looked_for(
    layers: Path, monkeypatch: pytest.MonkeyPatch
):
    add(layers, "openmpi")
    monkeypatch.setattr(mpi, "_loaded", lambda: None)
    monkeypatch.setattr(mpi, "_SONAMES", {"openmpi": ("libno_such_mpi.so.40",)})
    with pytest.raises(TransportError, match=r"there is no libno_such_mpi\.so\.40; pip install"):
        mpi._choose(None, "none")


def test_the_launcher_decides_which_library_is_tried_first(layers: Path, tmp_path: Path):
    add(layers, "openmpi", "mpich")
    for name in ("libmpi.so.40", "libmpi.so.12"):
        (tmp_path / "lib" / name).touch()
    openmpi, mpich = f"{tmp_path}/lib/libmpi.so.40", f"{tmp_path}/lib/libmpi.so.12"
    for launcher, first, last in (
        ("Open MPI", openmpi, mpich),
        ("none", openmpi, mpich),
        ("PMI", mpich, openmpi),
    ):
        tried = list(mpi._candidates(launcher))
        assert tried[0] == first
        assert tried.index(first) < tried.index(Path(first).name) < tried.index(last)
        assert "libmpi_abi.so.1" not in tried  # of no use without a layer


def test_the_library_beside_mpirun_and_the_one_of_the_build_are_found(layers: Path, tmp_path: Path):
    add(layers, "mpich")
    (layers / "mpi_folders.txt").write_text(f"{tmp_path}/opt\n")
    for folder in ("bin", "lib64", "opt"):
        (tmp_path / folder).mkdir()
    (tmp_path / "bin/mpirun").touch(mode=0o755)
    for folder in ("opt", "lib64"):
        (tmp_path / folder / "libmpi.so.12").touch()
    tried = list(mpi._candidates("PMI"))
    assert tried == [
        f"{tmp_path}/lib64/libmpi.so.12", f"{tmp_path}/opt/libmpi.so.12", "libmpi.so.12",
        "libmpich.so.12",
    ]  # fmt: skip

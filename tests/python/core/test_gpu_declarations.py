"""The declarations of CUDA and NCCL in csrc/gpu, against installed headers and libraries."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from hororing._engine import nccl

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tools"))

import kernels  # noqa: E402


def folder_of(header: str, *candidates: Path) -> Path:
    for folder in candidates:
        if (folder / header).exists():
            return folder
    pytest.skip(f"there is no {header}")


def installed(pattern: str) -> list[Path]:
    """Return the parts of CUDA in NVIDIA's Python packages, or in triton's."""
    return [path for folder in sys.path for path in sorted(Path(folder).glob(pattern))]


def nccl_include() -> Path:
    packages = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
    found = []
    for package in packages:
        try:
            found.append(
                Path(str(metadata.distribution(package).locate_file("nvidia/nccl/include")))
            )
        except metadata.PackageNotFoundError:
            continue
    return folder_of("nccl.h", *found, Path("/usr/include"))


def test_what_we_declare_of_cuda_and_nccl_is_what_their_headers_say():
    toolkits = sorted(Path("/usr/local").glob("cuda*/include"), reverse=True)
    cuda = folder_of("cuda.h", *toolkits, Path("/usr/include"), *installed("nvidia/cu*/include"))
    for part in ("crt/host_config.h", "nv/target"):  # in packages of their own since CUDA 13
        folder_of(part, cuda, cuda / "cccl")
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    assert compiler
    command = [compiler, "-std=c++17", "-fsyntax-only", f"-I{ROOT / 'csrc'}"]
    folders = (cuda, cuda / "cccl", nccl_include())  # since CUDA 13 <nv/target> is in cccl
    headers = [word for folder in folders for word in ("-isystem", str(folder))]
    source = ROOT / "tests/cpp/gpu_declarations.cc"
    done = subprocess.run([*command, *headers, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_nccl_of_a_package_is_found_and_loaded_without_a_framework():
    nccl_include()
    assert nccl.libraries().endswith("nvidia/nccl/lib/libnccl.so.2:libnccl.so.2")
    script = (
        "import sys, hororing._api.built; version = hororing._api.built.nccl_built();"
        "assert version >= 21400, version; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_library_that_is_named_and_not_there_is_none(monkeypatch: pytest.MonkeyPatch):
    from hororing._api import built

    monkeypatch.setenv("HORORING_NCCL_LIBRARY", "/nowhere/libnccl.so.2")
    assert built.nccl_built() == 0


def test_the_embedded_kernels_are_for_every_gpu_that_a_ptxas_compiles_for(tmp_path: Path):
    places = [Path(found) for found in [shutil.which("ptxas")] if found]
    places += sorted(Path("/usr/local").glob("cuda*/bin/ptxas"))
    places += installed("nvidia/cu*/bin/ptxas") + installed("triton/backends/nvidia/bin/ptxas")
    if not places:
        pytest.skip("there is no ptxas")
    embedded = (ROOT / "csrc/gpu/kernels.inc").read_text()
    ptx = tmp_path / "kernels.ptx"
    ptx.write_text(embedded.removeprefix('R"ptx(').removesuffix(')ptx"\n'))
    for ptxas in places:
        told = subprocess.run([ptxas, "--help"], capture_output=True, text=True, check=True).stdout
        gpus = {int(number) for number in re.findall(r"'sm_(\d+)'", told)}
        assert 90 in gpus
        for gpu in sorted(gpu for gpu in gpus if gpu >= kernels.LEAST_GPU):
            command = [ptxas, f"-arch=sm_{gpu}", "-o", str(tmp_path / "kernels.cubin"), str(ptx)]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, (str(ptxas), gpu, done.stderr)


def test_the_embedded_kernel_is_that_of_its_source(tmp_path: Path):
    nvcc = shutil.which("nvcc") or next(map(str, Path("/usr/local").glob("cuda*/bin/nvcc")), None)
    if nvcc is None:
        pytest.skip("there is no nvcc")
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    if "release 13.0" not in version:
        pytest.skip("another nvcc than that of CUDA 13.0 writes another text")
    committed = (ROOT / "csrc/gpu/kernels.inc").read_text()
    assert kernels.compile_kernels(nvcc) == committed

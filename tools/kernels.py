"""Compiles csrc/gpu/kernels.cu to csrc/gpu/kernels.inc: PTX, as a string of C++.

Only who changes the kernel needs it, and with it nvcc (CUDA 13): `make kernels`. PTX is what the
driver compiles for the GPU that it finds. The version of the language and the GPU that nvcc writes
into it are its own; we declare the oldest that have all that the kernel uses, so that drivers since
CUDA 11.2 take it for GPUs since Maxwell, and have ptxas check that. What a driver makes of it is
the same either way.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "csrc/gpu"
ARCHITECTURE = 75  # compute capability 7.5: the least that CUDA 13 compiles for
LANGUAGE = "7.2"  # of PTX: CUDA 11.2
LEAST_GPU = 50  # compute capability 5.0: Maxwell, the least that CUDA 12 knows


def compile_kernels(nvcc: str) -> str:
    """Return the text of kernels.inc."""
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / "kernels.ptx"
        command = [
            nvcc,
            "-std=c++17",
            "-O3",
            f"-arch=compute_{ARCHITECTURE}",
            "--ptx",
            "-o",
            str(ptx),
        ]
        subprocess.run([*command, str(FOLDER / "kernels.cu")], check=True)
        # Comments hold the machine's paths, and nothing that the driver reads.
        code = re.sub(r"//[^\n]*", "", ptx.read_text())
        code = re.sub(r"^\.version .*$", f".version {LANGUAGE}", code, flags=re.MULTILINE)
        code = re.sub(r"^\.target .*$", f".target sm_{LEAST_GPU}", code, flags=re.MULTILINE)
        ptx.write_text(code)
        ptxas = Path(nvcc).with_name("ptxas")
        subprocess.run(
            [str(ptxas), f"-arch=sm_{ARCHITECTURE}", "-o", "/dev/null", str(ptx)], check=True
        )
    lines = [line.rstrip() for line in code.splitlines() if line.strip()]
    return 'R"ptx(' + "\n".join(lines) + '\n)ptx"\n'


def main() -> None:
    """Write kernels.inc."""
    nvcc = sys.argv[1] if len(sys.argv) > 1 else shutil.which("nvcc")
    if nvcc is None:
        sys.exit("kernels: there is no nvcc in PATH; pass its path: make kernels NVCC=...")
    (FOLDER / "kernels.inc").write_text(compile_kernels(nvcc))


if __name__ == "__main__":
    main()

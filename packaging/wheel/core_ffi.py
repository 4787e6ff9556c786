"""Makes the C source of hororing._core from csrc/capi/hororing.h, which is the one place where
the C interface is declared (cffi in API mode; limited API, so one binary for every CPython).
"""

from __future__ import annotations

import re
from pathlib import Path

from cffi import FFI

MODULE = "hororing._core"


def declarations(header: str) -> str:
    """What cffi reads: `header` without preprocessor lines and the braces of extern "C"."""
    text = re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)
    text = re.sub(r"#ifdef __cplusplus.*?#endif", "", text, flags=re.DOTALL)
    return re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE)


def write(header: Path, target: Path) -> None:
    """Generate the C source of the module."""
    ffi = FFI()
    ffi.cdef(declarations(header.read_text()))
    ffi.set_source(MODULE, '#include "capi/hororing.h"')
    target.parent.mkdir(parents=True, exist_ok=True)
    ffi.emit_c_code(str(target))

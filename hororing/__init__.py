"""hororing: data-parallel training on many processes.

Use it through the module of your framework::

    import hororing.torch as hvd      # PyTorch
    import hororing.numpy as hvd      # plain arrays

Start the script with hororun or mpirun, or a function of it with `hororing.run`. Importing hororing
starts nothing and touches no MPI; `init()` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

try:
    from hororing._core import ffi as _ffi
    from hororing._core import lib as _lib
    from hororing._tensors import PlainTensors as _PlainTensors  # noqa: F401
except ImportError as error:  # a source tree that was not built, or a damaged installation
    from pathlib import Path as _Path

    _remedy = "install it again: pip install ."
    if (_Path(__file__).parents[1] / "CMakeLists.txt").exists():
        _remedy = (
            "this is the source folder, which hides an installed hororing: run from another "
            "folder, or build in place with pip install -e ."
        )
    raise ImportError(f"hororing's core cannot be loaded ({error}); {_remedy}") from error

__version__: str = _ffi.string(_lib.hr_version()).decode()

if _lib.hr_abi_version() != _lib.HR_ABI_VERSION:
    raise ImportError(
        f"hororing/_core was built for version {_lib.HR_ABI_VERSION} of the C interface, "
        f"hororing/lib has version {_lib.hr_abi_version()}; install hororing again"
    )

if TYPE_CHECKING:
    from hororing.hororun.function import run as run
else:

    def __getattr__(name: str) -> object:
        """`run`, which ranks do not need."""
        if name == "run":
            from hororing.hororun.function import run

            return run
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""hororing: data-parallel training on many processes.

Use it through the module of your framework::

    import hororing.torch as hvd      # PyTorch
    import hororing.numpy as hvd      # plain arrays

Start the script with hororun or mpirun, or a function of it with `hororing.run`. Importing this
package loads nothing; `init()` starts the engine.

For users: numpy, torch, tensorflow, keras, elastic, ray, spark, toolkit, testing, as_horovod,
as_ccl, errors and extension; `hororun` is the launcher, torch_backend what `import torch` finds. A
name that begins with "_" is private. The private floors, each of which knows only those before it:
config and errors < _job (how this process becomes rank r of n) < _engine (the engine of this
process) < _requests (from a tensor to a request and back) < _api (Horovod's names) < _adapters
(what adapters share) < guard (what notices wrong replicas).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hororing.hororun.function import run as run

    __version__: str
else:

    def __getattr__(name: str) -> object:
        """Load what needs the core or the launcher when it is used."""
        if name == "run":
            from hororing.hororun.function import run

            return run
        if name == "__version__":
            from hororing._engine.core import VERSION

            return VERSION
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}: import hororing.torch, .tensorflow, "
            ".keras or .numpy as hvd"
        )

"""Makes Python's import system find hororing's modules under Horovod's names.

The finder precedes all others and answers for every name that begins with "horovod": with our own
module object, never a second copy, or with an ImportError that names what does not exist. An
installed Horovod is hidden, not changed.
"""

from __future__ import annotations

import importlib
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from multiprocessing import spawn
from types import ModuleType
from typing import Any

import hororing
from hororing.as_horovod.names import MODULES, WAYS_OUT, remedy

_HOROVODS_NAME = {ours: name for name, ours in MODULES.items()}


def _missing_text(name: str) -> str:
    return f"{name} is not part of hororing {hororing.__version__}: {remedy(name)}"


class _Loader(Loader):
    """Loads a module of ours under Horovod's name."""

    def __init__(self, ours: str) -> None:
        self.ours = ours

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None  # an empty module, which is dropped at once

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        name = module.__spec__.name
        ours = importlib.import_module(self.ours)
        if "__getattr__" not in vars(ours):
            ours.__getattr__ = _lazy_submodules(name)  # type: ignore[method-assign]
        # The import system uses the module that it finds here.
        sys.modules[name] = ours


def _lazy_submodules(module: str) -> Callable[[str], Any]:
    """`__getattr__` of a module: its submodules need no import, as in Horovod."""

    def get(attribute: str) -> Any:
        name = f"{module}.{attribute}"
        if name in MODULES and _finder.our_spec(name) is not None:
            return importlib.import_module(name)
        if attribute.startswith("__"):  # Python looks for them
            raise AttributeError(f"module {module!r} has no attribute {attribute!r}")
        raise AttributeError(_missing_text(name))

    return get


class _Finder(MetaPathFinder):
    """Answers for Horovod's modules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "horovod":
            self._refuse_attribute(fullname)
            return None
        ours = self.our_spec(fullname)
        if ours is None:
            # Not a ModuleNotFoundError, which `from package import module` replaces by its own.
            raise ImportError(_missing_text(fullname), name=fullname)
        is_package = ours.submodule_search_locations is not None
        return ModuleSpec(fullname, _Loader(ours.name), origin=ours.origin, is_package=is_package)

    def _refuse_attribute(self, fullname: str) -> None:
        """`from horovod.torch import elastic` requests hororing.torch.elastic."""
        parent, _, child = fullname.rpartition(".")
        if parent not in _HOROVODS_NAME:
            return
        name = f"{_HOROVODS_NAME[parent]}.{child}"
        if (name in MODULES or name in WAYS_OUT) and self.our_spec(name) is None:
            raise ImportError(_missing_text(name), name=name)

    def our_spec(self, name: str) -> ModuleSpec | None:
        """Find our module through the other finders; None if there is none."""
        ours = MODULES.get(name)
        if ours is None:
            return None
        package = importlib.import_module(ours.rpartition(".")[0])
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(ours, package.__path__)
            if spec is not None:
                return spec
        return None


_finder = _Finder()


class InstallWhenUnpickled:
    """Installs the finder in the process in which it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return install, ()


def install() -> None:
    """Map ``import horovod`` and its modules to hororing, in this process and its workers.

    Does nothing if called again.

    Raises
    ------
    ImportError : another horovod has been imported already.
    """
    if _finder in sys.meta_path:
        return
    imported = sys.modules.get("horovod")
    if imported is not None:
        raise ImportError(
            f"a horovod has been imported already, from {getattr(imported, '__file__', None)}: "
            "call hororing.as_horovod.install() before the first `import horovod`, or start the "
            "script with python -m hororing.as_horovod"
        )
    sys.meta_path.insert(0, _finder)
    _install_in_workers()


def _install_in_workers() -> None:
    """Install the finder in workers that multiprocessing spawns and that import horovod again.

    They unpickle their preparation data before that import.
    """
    prepare = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {**prepare(name), "hororing.as_horovod": InstallWhenUnpickled()}

    spawn.get_preparation_data = get_preparation_data
    # Since Python 3.14, a fork server would import the script itself, and it gets no such data.
    multiprocessing.set_forkserver_preload([])

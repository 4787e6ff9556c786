"""A rank of a test's job: it runs the cases of one file, or of several in turn.

For each file, OUT.n.out has the output of this rank, OUT.n.json has the results by case ("" or a
traceback), and OUT.n.done exists once all cases have passed.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import mpirun


def print_to(file: Path) -> None:
    """Send the output of this process, including that of native code, to `file`."""
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    # One write per line, even with PYTHONUNBUFFERED, because the engine's thread logs there, too.
    sys.stdout.reconfigure(line_buffering=True, write_through=False)


def run_files(files: Sequence[str], out: Path) -> None:
    """Run the cases of every file; a failure ends the process."""
    for number, file in enumerate(files):
        print_to(out.with_suffix(f".{number}.out"))
        restore = _remember()
        _run_cases(file, out.with_suffix(f".{number}.json"))
        if number < len(files) - 1:
            restore()
        out.with_suffix(f".{number}.done").touch()
    # At exit, Python collects cycles; with torch's objects this takes a quarter of its import time.
    # Other tests check how jobs end, by scripts that end normally.
    gc.freeze()


def _run_cases(file: str, results: Path) -> None:
    done: dict[str, str] = {}

    def record(name: str, call: Callable[[], None]) -> None:
        try:
            call()
            done[name] = ""
        except BaseException:
            done[name] = traceback.format_exc()
            raise  # ends this rank, so that peers do not wait for it
        finally:
            results.write_text(json.dumps(done))

    module = _load(file)
    for name in mpirun.case_names(vars(module)):
        print(name, flush=True)
        record(name, getattr(module, name))


def _load(file: str) -> ModuleType:
    if (folder := str(Path(file).parent)) not in sys.path:
        sys.path.append(folder)  # for the other tests there
    spec = importlib.util.spec_from_file_location("cases", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["cases"] = module
    spec.loader.exec_module(module)
    return module


def _remember() -> Callable[[], None]:
    """Return a function that restores the process for the next file."""
    environment = dict(os.environ)
    filters = list(warnings.filters)

    def restore() -> None:
        hororing = sys.modules.get("hororing._engine.shutdown")
        if hororing is not None:
            hororing.shutdown()
        os.environ.clear()
        os.environ.update(environment)
        warnings.filters[:] = filters
        random.seed()
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.set_default_dtype(torch.float32)
            torch.set_grad_enabled(True)
            # Imports triton, in a CUDA build; if TensorFlow was imported before, that crashes.
            if torch.are_deterministic_algorithms_enabled():
                torch.use_deterministic_algorithms(False)
        tensorflow = sys.modules.get("tensorflow")
        if tensorflow is not None:
            tensorflow.config.run_functions_eagerly(False)
            tensorflow.keras.backend.set_floatx("float32")
            tensorflow.keras.backend.clear_session()
        sys.modules.pop("cases", None)
        gc.collect()

    return restore

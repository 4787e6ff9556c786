"""Runs a script for Horovod with hororing::

    mpirun -np 4 python -m hororing.as_horovod train.py ...
    mpirun -np 4 python -m hororing.as_horovod -m package.train ...
    mpirun -np 4 python -m hororing.as_horovod -c 'import horovod.torch; ...' ...

The script sees what it would see if Python had been given the same arguments: `sys.argv`,
`sys.path`, `__main__`. The module `__main__` is replaced for good, because exit hooks and
long-lived threads still need it; `runpy` would restore it when the script has ended.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import NoReturn

from hororing.as_horovod.finder import install
from hororing.as_horovod.hints import hint


def main(arguments: list[str]) -> None:
    """Run the program that `arguments` name, as python does."""
    parser = _parser()
    first, *rest = arguments or [""]
    run: Callable[[str], None] = _run_file
    if first[:2] in ("-m", "-c"):
        # Like python: the value may be attached to the option, and ends our options.
        what, *rest = [first[2:], *rest] if first[2:] else rest or [""]
        run = _run_module if first[:2] == "-m" else _run_code
    else:
        what = first
    if not what or (run is _run_file and first.startswith("-")):
        parser.parse_args(arguments)
        parser.error("give a script, -m module, or -c code")
    install()
    sys.argv[1:] = rest
    run(what)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hororing.as_horovod",
        usage="%(prog)s [-h] (script | -m module | -c code) [arguments of the script ...]",
        description="Run a script for Horovod with hororing: in it, `import horovod.torch` gives "
        "hororing.torch. Launch it with mpirun.",
        epilog="docs/migrating.md says what differs and what is missing.",
    )
    parser.add_argument("-m", metavar="module", help="run a module or package")
    parser.add_argument("-c", metavar="code", help="run the text of a program")
    parser.add_argument("script", nargs="?", help="a file, or a folder or zip with __main__.py")
    return parser


def _run_code(text: str) -> None:
    sys.argv[0] = "-c"
    _set_first_path("")
    _become_main(lambda: compile(text, "<string>", "exec", dont_inherit=True), {})


def _run_module(name: str) -> None:
    sys.argv[0] = "-m"  # while its parent packages are imported
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name += ".__main__"
            spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if not name.startswith(str(error.name)):
            raise  # a package on the way to it lacks something
        spec = None
    if spec is None or spec.loader is None:
        _fail(f"no module named {name}")
    assert spec.origin is not None
    sys.argv[0] = spec.origin
    _run_spec(spec, {"__spec__": spec, "__package__": spec.parent})


def _run_file(script: str) -> None:
    sys.argv[0] = script
    spec = PathFinder.find_spec("__main__", [script])  # None unless it is a folder or a zip
    if spec is not None:
        _set_first_path(script)
        _run_spec(spec, {"__spec__": spec, "__package__": ""})
        return
    file = os.path.abspath(script)
    if os.path.isdir(file):
        _fail(f"no __main__.py in {script!r}")
    loader = SourceFileLoader("__main__", file)
    try:
        source = loader.get_data(file)
    except OSError as error:
        _fail(f"can't open file {file!r}: {error.strerror}", 2)
    _set_first_path(str(Path(file).resolve().parent))
    _become_main(
        lambda: loader.source_to_code(source, file), {"__file__": file, "__loader__": loader}
    )


def _run_spec(spec: ModuleSpec, names: dict[str, object]) -> None:
    loader = spec.loader
    get_code = getattr(loader, "get_code", None)
    if get_code is None:
        _fail(f"{spec.name} has no Python code to run")
    _become_main(
        lambda: get_code(spec.name),
        {"__file__": spec.origin, "__cached__": spec.cached, "__loader__": loader, **names},
    )


def _set_first_path(entry: str) -> None:
    """Replace the path entry of `python -m hororing.as_horovod`, the current folder."""
    if not (getattr(sys.flags, "safe_path", False) or sys.flags.isolated):  # else there is none
        sys.path[0] = entry


def _fail(text: str, code: int = 1) -> NoReturn:
    print(f"python -m hororing.as_horovod: {text}", file=sys.stderr)
    sys.exit(code)


def _become_main(compiled: Callable[[], CodeType], names: dict[str, object]) -> None:
    module = ModuleType("__main__")
    vars(module).update(names)
    sys.modules["__main__"] = module
    try:
        exec(compiled(), vars(module))
    except SystemExit:
        raise
    except BaseException as error:
        trace, hook = _without_this_file(error.__traceback__), sys.excepthook

        def show(kind: type[BaseException], value: BaseException, _: object) -> None:
            hook(kind, value.with_traceback(trace), trace)
            change = hint(value)
            if change is not None:
                print(f"python -m hororing.as_horovod: {change}", file=sys.stderr)

        sys.excepthook = show  # for the interpreter, which calls it at the end of a script
        raise


def _without_this_file(trace: TracebackType | None) -> TracebackType | None:
    """Start with the script's first frame; None if it was not even compiled."""
    while trace is not None and trace.tb_frame.f_globals is not sys.modules["__main__"].__dict__:
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    main(sys.argv[1:])

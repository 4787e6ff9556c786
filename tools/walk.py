"""Write build/walk.md: the functions that one gradient passes through, from a trace.

    $ make walk

The core is built into build/walk without optimization and with -finstrument-functions; a preloaded
library records every function that it enters. Python's functions come from `sys.setprofile`. The
trace covers the last backward pass of a few steps of a model with one parameter, on rank 0, from
the call of `backward()` to its return. Which thread runs the loop varies: the page shows the trace
with the median number of functions. Needs Open MPI and Python 3.11.

The page omits functions of headers, constructors and destructors, unnamed functions, and code that
makes no decisions about a gradient: csrc/base (status, clock, kernels), csrc/trace (timeline),
csrc/transport (bytes between ranks) and the message codec. Repeated calls count once.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "walk"
PAGE = ROOT / "build" / "walk.md"
LEFT_OUT = ("csrc/base/", "csrc/trace/", "csrc/transport/", "csrc/negotiation/codec")
STEPS = 12
TRACES = 3
WORLDS = {"one host, 2 ranks": "a,a", "two hosts of 2 ranks": "a,a,b,b"}

# Records pairs of thread and address while it is on.
SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>
#define MOST (1 << 20)
static void *seen[MOST];
static int thread[MOST], count, on;
__attribute__((no_instrument_function)) void __cyg_profile_func_enter(void *at, void *from) {
  (void)from;
  if (!__atomic_load_n(&on, __ATOMIC_RELAXED)) return;
  const int i = __atomic_fetch_add(&count, 1, __ATOMIC_RELAXED);
  if (i >= MOST) return;
  seen[i] = at;
  thread[i] = (int)syscall(SYS_gettid);
}
__attribute__((no_instrument_function)) void __cyg_profile_func_exit(void *at, void *from) {
  (void)at; (void)from;
}
void walk_mark(void *label) { __cyg_profile_func_enter(label, 0); }
void walk_switch(int to) { __atomic_store_n(&on, to, __ATOMIC_SEQ_CST); }
void walk_write(const char *path) {
  FILE *file = fopen(path, "w");
  for (int i = 0; i < (count < MOST ? count : MOST); ++i) {
    Dl_info info = {0};
    if ((unsigned long)seen[i] < 1 << 20) fprintf(file, "%d - %lx\\n", thread[i], (long)seen[i]);
    else if (dladdr(seen[i], &info)) fprintf(file, "%d %s %lx\\n", thread[i], info.dli_fname,
                                             (long)((char *)seen[i] - (char *)info.dli_fbase));
  }
  fclose(file);
}
"""


# ---------------------------------------------------------------------------------------------
# In a rank


def trace(path: str) -> None:
    """Train a parameter; rank 0 writes the functions of the last backward pass to `path`."""
    import torch

    import hororing.torch as hvd

    shim = ctypes.CDLL(os.environ["WALK_SHIM"])
    package = str(Path(hvd.__file__).parents[1])
    names: dict[tuple[str, str], int] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        unnamed = frame.f_code.co_name.startswith("<")  # a comprehension, for example
        if event == "call" and file.startswith(package) and not unnamed:
            where = file.removeprefix(str(Path(package).parent) + "/"), frame.f_code.co_qualname
            shim.walk_mark(ctypes.c_void_p(names.setdefault(where, len(names) + 1)))

    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(256, 256, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 256)).sum()
        traced = step == STEPS - 1 and hvd.rank() == 0
        if traced:
            sys.setprofile(note)
            shim.walk_switch(1)
        loss.backward()
        if traced:
            shim.walk_switch(0)
            sys.setprofile(None)
        if step == STEPS - 1 and not traced:
            time.sleep(1)  # rank 0 must get no report of the barrier while it is traced
        hvd.barrier()  # else another rank may end the job while this one is traced
        optimizer.step()
    if hvd.rank() == 0:
        shim.walk_write(f"{path}.raw".encode())
        lines = [f"{number} {file} {name}\n" for (file, name), number in names.items()]
        Path(f"{path}.names").write_text("".join(lines))
    hvd.shutdown()


# ---------------------------------------------------------------------------------------------
# Its trace


class Function(tuple[str, str]):
    """A file below the root, and the name of a function."""


def functions(path: Path) -> dict[int, list[Function]]:
    """Return the functions that each thread entered, in the order of their first calls."""
    names = {}
    for line in Path(f"{path}.names").read_text().splitlines():
        number, file, name = line.split(" ", 2)
        names[int(number)] = Function((file, name))
    raw = [line.split() for line in Path(f"{path}.raw").read_text().splitlines()]
    of_library = {each: resolve(each, raw) for each in {row[1] for row in raw} - {"-"}}
    found: dict[int, list[Function]] = {}
    for thread, library, offset in raw:
        at = int(offset, 16)
        function = names.get(at) if library == "-" else of_library[library].get(at)
        known = found.setdefault(int(thread), [])
        if function is not None and function not in known:
            known.append(function)
    return {thread: known for thread, known in found.items() if known}


def resolve(library: str, raw: Iterable[list[str]]) -> dict[int, Function]:
    """Return the functions at these addresses of a library, without those that are omitted."""
    places = sorted({int(row[2], 16) for row in raw if row[1] == library})
    text = subprocess.run(
        ["addr2line", "-f", "-C", "-e", library, *map(hex, places)],
        check=True, capture_output=True, text=True,
    ).stdout.splitlines()  # fmt: skip
    result = {}
    for place, name, where in zip(places, text[::2], text[1::2], strict=True):
        file = os.path.normpath(where.partition(":")[0])
        if f"{ROOT}/csrc/" not in file or not file.endswith(".cc") or "{lambda" in name:
            continue
        file = file.removeprefix(f"{ROOT}/")
        *of_class, last = plain(name).split("::")
        if not file.startswith(LEFT_OUT) and last.lstrip("~") not in of_class[-1:]:
            result[place] = Function((file, "::".join([*of_class, last])))
    return result


def plain(name: str) -> str:
    """Return a name without our namespaces, arguments and results."""
    name = re.sub(r"\(anonymous namespace\)::|hororing::|\[abi:cxx11\]", "", name)
    while (shorter := re.sub(r"<[^<>]*>", "", name)) != name:
        name = shorter
    return name.partition("(")[0].split(" ")[-1]


# ---------------------------------------------------------------------------------------------
# Outside


def build() -> None:
    """Build the instrumented core, and copy the package beside it."""
    core = BUILD / "core"
    include = subprocess.run(
        [sys.executable, "-c", "import sysconfig; print(sysconfig.get_path('include'))"],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    flags = f"-O0 -g -finstrument-functions -finstrument-functions-exclude-file-list=/usr/,{BUILD}"
    configure = ["cmake", "-S", str(ROOT), "-B", str(core), "-DCMAKE_BUILD_TYPE=Debug",
                 f"-DCMAKE_CXX_FLAGS={flags}", f"-DHORORING_PYTHON_INCLUDE={include}"]  # fmt: skip
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    targets = ["hororing", "hororing_mpi_openmpi", "hororing_python"]
    command = ["cmake", "--build", str(core), "--parallel", "2", "--target", *targets]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    shutil.rmtree(BUILD / "hororing", ignore_errors=True)
    shutil.copytree(ROOT / "hororing", BUILD / "hororing", ignore=shutil.ignore_patterns("*.pyc"))
    for library in core.glob("libhororing*.so"):
        shutil.copy(library, BUILD / "hororing" / "lib")
    shutil.copy(core / "_tensors.abi3.so", BUILD / "hororing")
    (BUILD / "shim.c").write_text(SHIM)
    shim = ["cc", "-O1", "-shared", "-fPIC", str(BUILD / "shim.c"), "-o", str(BUILD / "shim.so")]
    subprocess.run(shim, check=True)


def run(hosts: str) -> dict[int, list[Function]]:
    """Trace a job whose ranks are on these hosts."""
    sys.path.insert(0, str(ROOT / "tests" / "python"))
    import pretend_hosts

    preload, names = pretend_hosts.variables(hosts)
    path = BUILD / hosts.replace(",", "")
    shim = BUILD / "shim.so"
    command = ["mpirun", "-np", str(len(hosts.split(","))), "env", f"PYTHONPATH={BUILD}",
               f"WALK_SHIM={shim}", f"{preload}:{shim}", names, sys.executable, __file__,
               "--trace", str(path)]  # fmt: skip
    subprocess.run(command, check=True, timeout=300)
    return functions(path)


def main() -> None:
    """Build, trace, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.trace:
        return trace(arguments.trace)
    build()
    PAGE.write_text(page({world: typical(hosts) for world, hosts in WORLDS.items()}))


def typical(hosts: str) -> dict[int, list[Function]]:
    """Return a trace with the median number of functions."""
    traces = sorted((run(hosts) for _ in range(TRACES)), key=count_functions)
    print(hosts, [count_functions(each) for each in traces])
    return traces[TRACES // 2]


def count_functions(threads: dict[int, list[Function]]) -> int:
    """Count the different functions of a trace."""
    return len(set().union(*threads.values()))


def page(worlds: dict[str, dict[int, list[Function]]]) -> str:
    """Return the text of the page."""
    about = (
        "`make walk` generates this page from a trace (`tools/walk.py`). It lists the "
        "functions that rank 0 enters between the call of `backward()` and its return, in a step "
        "after the first ones, for a model with one parameter. Each function counts once, where "
        "its thread first entered it; consecutive functions of a file share a row. Left out are "
        "functions of headers, constructors and destructors, and what only carries bytes or notes "
        "times: `csrc/base`, `csrc/trace`, `csrc/transport` and the codec of messages. "
        "docs/architecture.md explains the stages."
    )
    text = ["# The walk of one gradient", "", *textwrap.wrap(about, 120)]
    for world, threads in worlds.items():
        files = {file for known in threads.values() for file, _ in known}
        text += ["", f"## {world[0].upper()}{world[1:]}", ""]
        text += [f"{count_functions(threads)} functions in {len(files)} files."]
        for known in threads.values():
            in_python = any(file.endswith(".py") for file, _ in known)
            text += ["", f"### {'The thread that calls backward()' if in_python else 'The engine'}"]
            text += ["", "| file | functions |", "|---|---|"]
            for file, row in itertools.groupby(known, key=lambda function: function[0]):
                text.append(f"| `{file}` | {', '.join(f'`{name}`' for _, name in row)} |")
    return "\n".join(text) + "\n"


if __name__ == "__main__":
    main()

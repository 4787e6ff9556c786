"""The fences between the folders (docs/architecture.md), each as one line."""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from hororing._api import exports

ROOT = Path(__file__).parents[3]
CORE = sorted(p for p in (ROOT / "csrc").rglob("*") if p.suffix in {".cc", ".h", ".inc"})
PACKAGE = sorted((ROOT / "hororing").rglob("*.py"))

FOLDERS = {
    "base": set(),
    "trace": {"base"},
    "kernels": {"base"},
    "transport": {"base", "kernels"},
    "collective": {"base", "kernels", "transport"},
    "backend": {"base", "kernels", "transport", "collective", "trace"},
    "gpu": {"base", "kernels", "transport", "collective", "trace", "backend"},
    "negotiation": {"base", "transport", "trace"},
}
FOLDERS["engine"] = set(FOLDERS)
FOLDERS["membership"] = {"base"}
FOLDERS["capi"] = set(FOLDERS)
FOLDERS["tensorflow"] = FOLDERS["jax"] = {"capi", "base"}
FOLDERS["python"] = {"capi"}
FRAMEWORKS = ("torch", "tensorflow", "keras", "jax")
TOOLKIT = {("toolkit", framework) for framework in ("torch", "tensorflow", "keras")}
# The toolkit may import the API of scripts, and the API for extensions.
PUBLIC = {
    "hororing", "hororing.config", "hororing.errors", "hororing.extension", "hororing.numpy",
}  # fmt: skip
PUBLIC_OF = {
    "torch": {"hororing.torch.ops", "hororing.torch.extension"},
    "keras": {"hororing.keras.extension"},
    "tensorflow": set(),
}
# Folders that may use two adapters: differences of the frameworks under Keras, and
# hororing.keras as hororing.tensorflow.keras.
BETWEEN = {("keras", "backends"), ("tensorflow", "keras")}


def users(files: Iterable[Path], pattern: str) -> set[str]:
    """Return the files whose code (not comments) matches."""
    found = set()
    for file in files:
        text = file.read_text()
        if file.suffix != ".py":
            text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
        if re.search(pattern, text, flags=re.MULTILINE):
            found.add(str(file.relative_to(ROOT)))
    return found


def test_the_fences_see_the_files():
    assert len(CORE) > 30
    assert len(PACKAGE) > 5
    assert users(CORE, r"#include <vector>")


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_includes_only_the_folders_below_it(folder: str):
    for file in (ROOT / "csrc" / folder).rglob("*.*"):
        included = set(re.findall(r'#include "([a-z_]+)/', file.read_text()))
        assert included <= FOLDERS[folder] | {folder}, file


def test_mpi_has_one_folder_that_nobody_else_includes():
    files = users(CORE, r"#include [<\"](mpi|transport/mpi/)")
    assert {str(Path(file).parent) for file in files} == {"csrc/transport/mpi"}


def test_no_header_of_nccl_or_cuda_and_their_names_in_one_folder():
    assert users(CORE, r"#include [<\"](nccl|cuda)") == set()
    # These load libraries: CUDA and NCCL, the MPI of this machine, and TensorFlow.
    assert {str(Path(file).parent) for file in users(CORE, r"\bdlopen\(|\bdlsym\(")} == {
        "csrc/gpu",
        "csrc/tensorflow",
        "csrc/transport",
        "csrc/transport/mpi",
    }


def test_pybind11_is_for_tests_only():
    assert users(CORE, r"#include <pybind11") == set()


def test_no_framework_header_and_no_python_in_the_core():
    assert users(CORE, r"#include [<\"](torch|tensorflow/c|tsl|xla|ATen|c10|numpy)") == set()
    pythons = users(CORE, r"#include [<\"](Python|structmember)")
    assert {str(Path(file).parent) for file in pythons} == {"csrc/python"}


def test_the_core_names_no_framework():
    named = users(CORE, rf"(?i)\b({'|'.join(FRAMEWORKS)})\b")
    assert {str(Path(file).parent) for file in named} <= {"csrc/tensorflow", "csrc/jax"}


def test_the_core_reads_no_environment():
    assert users(CORE, r"\b(secure_)?getenv\b|\benviron\b") == set()


def test_the_core_does_not_sleep_to_wait():
    assert users(CORE, r"\bsleep_for\b|\bsleep_until\b|\b(u|nano)?sleep\(") == set()


def test_the_engine_has_no_friends():
    # engine/shared.h is the state that callers share with the loop; any thread may use it.
    assert users(CORE, r"\bfriend\b") == set()


def test_no_exception_leaves_the_c_interface():
    for file in (ROOT / "csrc/capi").glob("*.cc"):
        exports = re.findall(r"^HR_EXPORT[^;{]*\{$", file.read_text(), re.MULTILINE)
        assert all(export.endswith(" try {") for export in exports), file


def test_threads_are_the_engines():
    assert users(CORE, r"std::(thread|async|jthread)\b|pthread_create") == {
        "csrc/engine/engine.cc",
        "csrc/engine/engine.h",
        "csrc/membership/membership.cc",
        "csrc/membership/membership.h",  # sends beats to the store of an elastic job
        "csrc/tensorflow/wait.cc",  # calls TensorFlow back
        "csrc/jax/completion.cc",  # calls XLA back
    }


def test_the_package_reads_the_environment_in_one_place():
    # A function of Horovod's API also sets variables for its caller.
    assert users(PACKAGE, r"os\.environ|os\.getenv|os\.putenv") == {
        "hororing/config/environment.py",
        "hororing/as_horovod/horovod/common/util.py",
    }


def test_the_core_is_loaded_in_one_place():
    assert users(PACKAGE, r"^\s*(from|import) hororing\._core\b") == {"hororing/_engine/core.py"}


def test_adapters_know_neither_each_other_nor_the_core():
    for framework in FRAMEWORKS:
        files = [f for f in PACKAGE if f.relative_to(ROOT / "hororing").parts[0] == framework]
        assert users(files, r"hororing\._core") == set()
        files = [f for f in files if f.relative_to(ROOT / "hororing").parts[:2] not in BETWEEN]
        others = "|".join({*FRAMEWORKS} - {framework})
        assert users(files, rf"^\s*(from|import) hororing\.({others})\b") == set()
        if framework == "tensorflow":  # its layers are Keras layers
            others = others.replace("keras", "torch")
        assert users(files, rf"^\s*(from|import) ({others})\b") == set()


def imports(node: ast.AST) -> Iterable[str]:
    """Return imported names of hororing, even in functions and under TYPE_CHECKING."""
    for child in ast.walk(node):
        if isinstance(child, ast.ImportFrom) and child.module:
            yield from (f"{child.module}.{each.name}" for each in child.names)
        if isinstance(child, ast.Import):
            yield from (each.name for each in child.names)


def modules(files: Iterable[Path]) -> dict[str, Path]:
    return {
        ".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): f
        for f in files
    }


def test_modules_do_not_import_one_another_in_a_circle():
    files = modules(PACKAGE)
    del files["hororing"]  # loads `run` on demand
    below = {
        name: {
            found if found in files else found.rpartition(".")[0]
            for found in imports(ast.parse(file.read_text()))
        }
        - {name}
        for name, file in files.items()
    }
    graphlib.TopologicalSorter(below).prepare()  # CycleError names the modules


# From the lowest floor up; a module may import its own floor's entry and those of lower floors.
FLOORS = (
    "errors torch_backend", "config", "_job", "_engine", "_requests", "_api", "numpy", "elastic",
    "_adapters", "extension", "guard", "torch jax hororun", "keras ray spark", "tensorflow",
    "toolkit as_horovod as_ccl testing watch", "__main__",
)  # fmt: skip
LEVEL = {entry: level for level, entries in enumerate(FLOORS) for entry in entries.split()}
# The backend of Keras for TensorFlow uses that adapter, whose Keras 2 part uses hororing.keras.
UPWARDS = {("hororing/keras/backends/tensorflow.py", "tensorflow"),
           ("hororing/keras/backends/tensorflow_batch_norm.py", "tensorflow")}  # fmt: skip


def entry_of(path: Path) -> str:
    return path.relative_to(ROOT / "hororing").parts[0].removesuffix(".py")


def test_each_floor_knows_only_those_below_it():
    entries = {entry_of(path) for path in PACKAGE} - {"__init__"}
    assert entries == {*LEVEL}, "a new entry at the top of hororing/ needs its floor here"
    found = set()
    for file in PACKAGE:
        own = entry_of(file)
        for name in imports(ast.parse(file.read_text())) if own != "__init__" else ():
            other = name.split(".")[1] if name.startswith("hororing.") else own
            if other in LEVEL and other != own and LEVEL[other] >= LEVEL[own]:
                found.add((str(file.relative_to(ROOT)), other))
    assert found == UPWARDS


def test_only_adapters_import_frameworks():
    neutral = [
        f
        for f in PACKAGE
        if f.relative_to(ROOT / "hororing").parts[0] not in FRAMEWORKS
        and f.relative_to(ROOT / "hororing").parts[:2] not in TOOLKIT
    ]
    assert users(neutral, rf"^\s*(from|import) ({'|'.join(FRAMEWORKS)})\b") == set()
    # On demand, if torch's launcher has started the ranks (ADR 43).
    loads = rf"import_module\([\"']({'|'.join(FRAMEWORKS)})\b"
    assert users(neutral, loads) == {
        "hororing/_job/rendezvous/torch_store.py", "hororing/torch_backend.py"
    }  # fmt: skip


@pytest.mark.parametrize(("folder", "library"), [("ray", "ray"), ("spark", "pyspark")])
def test_clusters_have_one_folder_each(folder: str, library: str):
    others = [f for f in PACKAGE if f.relative_to(ROOT / "hororing").parts[0] != folder]
    assert users(others, rf"^\s*(from|import) ({library}|hororing\.{folder})\b") == set()
    assert users(PACKAGE, rf"^\s*(from|import) {library}\b")


def tools(part: str) -> list[Path]:
    return [f for f in PACKAGE if f.relative_to(ROOT / "hororing").parts[:2] == ("toolkit", part)]


PARTS = sorted(path.name for path in (ROOT / "hororing/toolkit").glob("[a-z]*/"))


def test_only_the_table_of_commands_knows_the_toolkit():
    others = [f for f in PACKAGE if f.relative_to(ROOT / "hororing").parts[0] != "toolkit"]
    assert users(others, r"hororing\.toolkit|import.*\btoolkit\b") == {"hororing/__main__.py"}
    assert users([ROOT / "hororing/__main__.py"], r"^\s*(from|import) .*toolkit") == set()


def is_public(name: str, modules: set[str]) -> bool:
    """Whether `name` is one of `modules`, or among the names that one of them publishes."""
    if name in modules:
        return True
    module, _, what = name.rpartition(".")
    file = ROOT / f"{module.replace('.', '/')}.py"
    text = file.read_text() if file.exists() else ""
    listed = re.search(r"^__all__ = (\[.*?\])$", text, flags=re.MULTILINE | re.DOTALL)
    published = ast.literal_eval(listed[1]) if listed else [what.lstrip("_")]
    if "__all__ += exports.__all__" in text:
        published += exports.__all__
    return module in modules and what in published


@pytest.mark.parametrize("part", PARTS)
def test_the_toolkit_uses_public_names(part: str):
    others = set(FRAMEWORKS) - {part}
    files = tools(part)
    assert files
    for file in files:
        text = file.read_text()
        for name in {each for each in imports(ast.parse(text)) if each.startswith("hororing")}:
            if name.startswith("hororing.toolkit."):
                assert name.split(".")[2] not in others, f"{file}: {name}"
            else:
                assert is_public(name, PUBLIC | PUBLIC_OF.get(part, set())), f"{file}: {name}"
    assert users(files, r"\bhvd\._") == set()
    if part == "tensorflow":
        others -= {"keras"}
    assert users(files, rf"^\s*(from|import) ({'|'.join(others)})\b") == set()


def test_feature_conditionals_are_in_factories():
    processor = r"^#if defined\(__(x86_64|aarch64)__\)$"  # for the pause instruction, for example
    for file in CORE:
        if file.name in {"factory.cc", "hororing.h"} or file.parent.name in {"base", "kernels"}:
            continue  # kernels are chosen there, the C header serves two languages
        for line in re.findall(r"^#\s*if.*$", file.read_text(), flags=re.MULTILINE):
            assert re.match(processor, line) or "HORORING_VERSION" in line, f"{file}: {line}"

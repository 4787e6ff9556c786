"""Scripts for Horovod run unchanged under python -m hororing.as_horovod."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import mpirun
import pytest
import tiers
from hypothesis import given
from hypothesis import strategies as st

import hororing
from hororing import errors
from hororing._api import built
from hororing.as_horovod.horovod.common import exceptions, util
from hororing.as_horovod.names import MODULES, WAYS_OUT

SCRIPTS = Path(__file__).parent / "horovod_scripts"
AS_HOROVOD = ("-m", "hororing.as_horovod")


def python(
    *arguments: str | Path, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )


def printed(program: str, *arguments: str, cwd: Path | None = None, **environment: str) -> str:
    """Return the output of a program that runs as one for Horovod."""
    done = python(*AS_HOROVOD, "-c", program, *arguments, cwd=cwd, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def job(
    size: int,
    *arguments: str | Path,
    cwd: Path | None = None,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run `mpirun python -m hororing.as_horovod`, also without mpirun on one rank."""
    command = [sys.executable, *AS_HOROVOD, *map(str, arguments)]
    if size > 1:
        command = [mpirun.launcher(), "-np", str(size), *command]
    return subprocess.run(
        command,
        cwd=cwd,
        env={
            **os.environ,
            **mpirun.LAUNCH_ENVIRONMENT,
            **mpirun.STALL_ENVIRONMENT,
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=110,
    )


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


# ---------------------------------------------------------------------------------------------
# Names


# Packages that some modules need and the tests may lack.
NEEDED = {"horovod.ray": "ray", "horovod.spark": "pyspark"}


def exists(ours: str) -> bool:
    try:
        return importlib.util.find_spec(ours) is not None
    except ImportError:  # its package does not exist
        return False


EACH_IS_OURS = """
import importlib, sys
ours = {ours}
for name in ours:
    module = importlib.import_module(name)
    assert module is sys.modules[name] is sys.modules[ours[name]], name
    assert module.__spec__.name == module.__name__ == ours[name], module
import horovod.torch as hvd, hororing.torch
import horovod
assert horovod.torch is hvd is hororing.torch
from horovod.common.exceptions import HorovodInternalError
assert hororing.torch.HororingInternalError is HorovodInternalError
assert horovod.__version__ == "0.28.1"
"""

SMALL_NAMES = """
import horovod.tensorflow as hvd, keras, tensorflow as tf
from horovod.tensorflow import util
plain, kerass = tf.Variable(1.0), keras.Variable([2.0])
refs = hvd.vars_to_refs([plain, [kerass]])
assert len({refs, util.vars_to_refs((plain, (kerass,)))}) == 1
found, (inner,) = hvd.refs_to_vars(refs)
assert found is plain and inner.numpy() == [2]
assert hvd._executing_eagerly()
assert not tf.function(util._executing_eagerly)()
assert [n for n in range(9) if hvd.check_num_rank_power_of_2(n)] == [1, 2, 4, 8]
choose = hvd.handle_average_backwards_compatibility
assert choose(None, None) == hvd.Average and choose(None, False) == hvd.Sum
assert not hasattr(hvd, "LocalGradientAggregationHelper")
"""


def test_modules_are_attributes_of_their_packages_without_importing_them():
    pytest.importorskip("torch")
    program = (
        "import horovod.torch as hvd, horovod\n"
        "print(horovod.common.exceptions.HorovodInternalError is hvd.HorovodInternalError)\n"
        "from horovod import torch\n"
        "print(torch is hvd, hvd.mpi_ops.allreduce is hvd.allreduce)"
    )
    assert printed(program).split() == ["True"] * 3


def test_the_runners_names_that_scripts_use_are_there():
    program = (
        "from horovod.runner.common.util.env import get_env_rank_and_size\n"
        "import horovod\n"
        "assert horovod.runner.common.util.env.get_env_rank_and_size is get_env_rank_and_size\n"
        "print(*get_env_rank_and_size())"
    )
    assert printed(program) == "0 1"
    assert printed(program, OMPI_COMM_WORLD_RANK="2", OMPI_COMM_WORLD_SIZE="3") == "2 3"
    assert printed(program, HOROVOD_RANK="1", HOROVOD_SIZE="2") == "1 2"


REFUSED = (
    ("import horovod.mxnet as hvd", "horovod.mxnet", "hororing.numpy"),
    ("import horovod.runner.launch", "horovod.runner.launch", "hororun -np"),
    (
        "import horovod.common.basics as basics; basics.HorovodBasics",
        "horovod.common.basics.HorovodBasics",
        "hororing info",
    ),
    (
        "import horovod.common.util as util; util.get_ext_suffix",
        "horovod.common.util.get_ext_suffix",
        "hororing info",
    ),
    (
        "import horovod.torch.mpi_ops as ops; ops.nonsense",
        "horovod.torch.mpi_ops.nonsense",
        "docs/migrating.md",
    ),
    (
        "import horovod.tensorflow as hvd; hvd.LocalGradientAggregationHelper",
        "horovod.tensorflow.LocalGradientAggregationHelper",
        "backward_passes_per_step",
    ),
    ("import horovod.data", "horovod.data", "DataLoader"),
    ("import horovod.nonsense", "horovod.nonsense", "docs/migrating.md"),
    # A module of hororing that Horovod does not have: a second copy of it would be a trap.
    ("import horovod.torch.reducer", "horovod.torch.reducer", "docs/migrating.md"),
    (
        "import horovod.tensorflow.data.compute_service",
        "horovod.tensorflow.data",
        "Dataset.shard()",
    ),
    (
        "from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelper",
        "horovod.tensorflow.gradient_aggregation",
        "backward_passes_per_step",
    ),
    ("import horovod.keras.nonsense", "horovod.keras.nonsense", "docs/migrating.md"),
)


@pytest.fixture(scope="module")
def answers() -> list[tuple[str, str]]:
    """Return types and texts of all these exceptions, from one process, for fewer imports."""
    pytest.importorskip("torch")
    pytest.importorskip("tensorflow")
    ours = {
        name: module
        for name, module in MODULES.items()
        if exists(module) and (name not in NEEDED or exists(NEEDED[name]))
    }
    assert {"horovod", "horovod.torch", "horovod.torch.mpi_ops", "horovod.common.util"} <= {*ours}
    assert {"horovod.tensorflow", "horovod.tensorflow.keras.callbacks", "horovod.keras"} <= {*ours}
    statements = [statement for statement, _, _ in REFUSED]
    program = (
        "import json, sys\n"
        "for statement in json.loads(sys.argv[1]):\n"
        "    try:\n"
        "        exec(statement, {'__name__': '__main__'})\n"
        "        kind, text = 'none', ''\n"
        "    except Exception as error:\n"
        "        kind, text = type(error).__name__, str(error)\n"
        "    print(json.dumps([kind, text]))\n"
    )
    statements = [*statements, EACH_IS_OURS.format(ours=ours), SMALL_NAMES]
    output = printed(program, json.dumps(statements))
    return [tuple(json.loads(line)) for line in output.splitlines()]


def test_a_module_of_horovod_is_our_module_itself(answers: list[tuple[str, str]]):
    assert answers[len(REFUSED)] == ("none", "")


def test_small_names_of_horovod_tensorflow_are_there(answers: list[tuple[str, str]]):
    assert answers[len(REFUSED) + 1] == ("none", "")


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=lambda i: REFUSED[i][0])
def test_what_does_not_exist_is_named_with_the_way_out(number: int, answers: list[tuple[str, str]]):
    statement, name, way_out = REFUSED[number]
    if exists(MODULES.get(name, "hororing.nonsense")):
        pytest.skip(f"{name} exists by now")
    kind, text = answers[number]
    is_attribute = ";" in statement and not statement.startswith("from")
    assert kind == ("AttributeError" if is_attribute else "ImportError")
    assert text.startswith(f"{name} is not part of hororing {hororing.__version__}: ")
    assert way_out in text


def test_hasattr_and_find_spec_answer_for_what_does_not_exist():
    program = (
        "import horovod, importlib.util\n"
        "print(hasattr(horovod, 'elastic'), hasattr(horovod, 'nonsense'))\n"
        "try: importlib.util.find_spec('horovod.elastic')\n"
        "except ImportError as error: print(error.name)"
    )
    assert printed(program).split() == ["False", "False", "horovod.elastic"]


def test_a_module_is_found_from_the_day_on_which_it_exists(tmp_path: Path):
    write(tmp_path, {"elastic.py": "mark = 1"})
    program = (
        "import sys, hororing\n"
        "hororing.__path__.insert(0, sys.argv[1])\n"
        "import horovod.common.elastic as elastic\n"
        "print(elastic.mark)\n"
        "assert sys.modules['hororing.elastic'] is elastic\n"
    )
    assert printed(program, str(tmp_path)) == "1"


def test_another_horovod_is_hidden(tmp_path: Path):
    write(tmp_path, {"horovod/__init__.py": "raise SystemExit('the wrong one')"})
    program = "import horovod; print(horovod.__version__)"
    assert printed(program, PYTHONPATH=str(tmp_path)) == "0.28.1"


def test_another_horovod_that_was_imported_before_is_an_error(tmp_path: Path):
    write(tmp_path, {"horovod/__init__.py": ""})
    program = "import horovod, hororing.as_horovod; hororing.as_horovod.install()"
    done = python("-c", program, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert f"imported already, from {tmp_path}/horovod/__init__.py" in done.stderr
    assert "install() before the first `import horovod`" in done.stderr


def test_install_works_from_python_and_once():
    program = (
        "import sys, hororing.as_horovod as a\n"
        "assert 'horovod' not in sys.modules\n"
        "before = len(sys.meta_path)\n"
        "a.install(); a.install()\n"
        "import horovod.common.util\n"
        "a.install()\n"
        "print(len(sys.meta_path) - before, horovod.common.util.num_rank_is_power_2(4))"
    )
    done = python("-c", program)
    assert done.stdout == "1 True\n", done.stderr


def test_the_table_has_ways_out_for_modules_only_and_no_row_twice():
    assert len(set(MODULES.values())) == len(MODULES)
    assert all(name.partition(".")[0] == "horovod" for name in [*MODULES, *WAYS_OUT])
    # Horovod's module and hororing's have the same name.
    assert all(ours.endswith("." + name.rpartition(".")[2]) for name, ours in MODULES.items())


# ---------------------------------------------------------------------------------------------
# The same behaviour as python

PROGRAM = """\
import atexit, os, sys
main = sys.modules["__main__"]
def shown(path):
    return os.path.relpath(path) if path else path
print(sys.argv, __name__, main.__dict__ is globals(), shown(sys.path[0]))
print(shown(globals().get("__file__", "")), getattr(__spec__, "name", None), __package__)
class Here: pass
@atexit.register
def end():
    print("end", sys.modules["__main__"].Here is Here)
how = (sys.argv[1:] or ["return"])[0]
def fail():
    if how == "error":
        raise ValueError("on purpose")
    if how == "interrupt":
        raise KeyboardInterrupt
    if how == "hook":
        sys.excepthook = lambda kind, value, trace: print("hook", kind, trace.tb_lineno)
        raise OSError("for the hook")
    sys.exit({"code": 7, "text": "bye", "return": None}[how])
if how != "return":
    fail()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripts")
    write(
        folder,
        {
            "train.py": PROGRAM,
            "scripts/train.py": PROGRAM,
            "package/__init__.py": "",
            "package/__main__.py": PROGRAM,
            "package/train.py": "from . import other\n" + PROGRAM,
            "package/other.py": "",
            "application/__main__.py": PROGRAM,
            "broken.py": "x = = 1\n",
            "lacks.py": "import no_such_module\n",
        },
    )
    (folder / "link.py").symlink_to(folder / "scripts" / "train.py")
    with zipfile.ZipFile(folder / "train.zip", "w") as archive:
        archive.writestr("__main__.py", PROGRAM)
    return folder


def both_ways(
    folder: Path, *arguments: str, **environment: str
) -> tuple[subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]:
    return (
        python(*AS_HOROVOD, *arguments, cwd=folder, **environment),
        python(*arguments, cwd=folder, **environment),
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["train.py"],
        ["train.py", "return", "-m", "-c", "--", "-h", "--epochs=3", "a b", ""],
        ["scripts/train.py"],
        ["./scripts/../train.py"],
        ["link.py"],
        ["-m", "package", "return", "-h"],
        ["-m", "package.train", "return", "--", "-c"],
        ["-mtrain", "return", "1"],
        ["-c", PROGRAM, "return", "-m"],
        [f"-c{PROGRAM}"],
        ["application", "return"],
        ["train.zip"],
        ["train.py", "code"],
        ["train.py", "text"],
        ["train.py", "error"],
        ["train.py", "interrupt"],
        ["train.py", "hook"],
        ["-m", "package.train", "code"],
        ["-c", PROGRAM, "text"],
        ["broken.py"],
        ["lacks.py"],
    ],
    ids=lambda arguments: " ".join(arguments).replace(PROGRAM, "PROGRAM"),
)
def test_a_program_cannot_tell_the_difference(folder: Path, arguments: list[str]):
    ours, pythons = both_ways(folder, *arguments)
    assert (ours.stdout, ours.stderr) == (pythons.stdout, pythons.stderr)
    assert ours.returncode == pythons.returncode


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.11 has safe paths")
def test_a_safe_path_stays_safe(folder: Path):
    ours, pythons = both_ways(folder, "scripts/train.py", PYTHONSAFEPATH="1")
    assert ours.stdout == pythons.stdout


def test_a_traceback_through_a_module_begins_in_the_module(folder: Path):
    done = python(*AS_HOROVOD, "-m", "package.train", "error", cwd=folder)
    first = done.stderr.splitlines()[1]
    assert done.stderr.startswith("Traceback (most recent call last):\n"), done.stderr
    assert "package/train.py" in first
    assert "hororing/as_horovod" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["nothing.py"], 2, "can't open file"),
        (["package/nothing"], 2, "can't open file"),
        (["scripts"], 1, "no __main__.py in 'scripts'"),
        (["-m", "nothing"], 1, "no module named nothing"),
        (["-m", "package.nothing"], 1, "no module named package.nothing"),
        (["-m", "nothing.train"], 1, "no module named nothing.train"),
        ([], 2, "give a script"),
        (["-m"], 2, "expected one argument"),
        (["--np", "2", "train.py"], 2, "unrecognized arguments: --np"),
    ],
    ids=lambda value: str(value),
)
def test_what_cannot_be_run_is_said_in_a_line(
    folder: Path, arguments: list[str], code: int, text: str
):
    done = python(*AS_HOROVOD, *arguments, cwd=folder)
    assert done.returncode == code
    assert text in done.stderr.splitlines()[-1], done.stderr
    assert "Traceback" not in done.stderr


def test_help_tells_what_it_is_for():
    done = python(*AS_HOROVOD, "--help")
    assert done.returncode == 0
    assert "(script | -m module | -c code)" in done.stdout


WORKERS = """\
import multiprocessing, sys
from concurrent.futures import ProcessPoolExecutor
import horovod.common.util as util

def work(n):
    return "horovod.common.util" in sys.modules and util.num_rank_is_power_2(n)

if __name__ == "__main__":
    for method in ("spawn", "forkserver", "fork"):
        context = multiprocessing.get_context(method)
        with ProcessPoolExecutor(1, mp_context=context) as pool:  # dead workers end it
            print(method, list(pool.map(work, [4, 6])))
"""


@pytest.mark.parametrize("form", [["workers.py"], ["-m", "workers"]], ids=["script", "module"])
def test_workers_of_every_start_method_know_horovod(tmp_path: Path, form: list[str]):
    write(tmp_path, {"workers.py": WORKERS})
    done = python(*AS_HOROVOD, *form, cwd=tmp_path)
    lines = [f"{method} [True, False]" for method in ("spawn", "forkserver", "fork")]
    assert done.stdout.splitlines() == lines, done.stderr


# ---------------------------------------------------------------------------------------------
# horovod.common


def test_exceptions_are_ours():
    assert exceptions.HorovodInternalError is errors.HororingInternalError
    assert exceptions.HostsUpdatedInterrupt is errors.HostsUpdatedInterrupt
    assert exceptions.HostsUpdatedInterrupt(skip_sync=True).skip_sync


def test_a_version_mismatch_is_an_import_error_that_knows_both_versions():
    error = exceptions.HorovodVersionMismatchError("torch", "1.0", "2.0")
    assert isinstance(error, ImportError)
    again = pickle.loads(pickle.dumps(error))
    assert (again.name, again.version, again.installed_version) == ("torch", "1.0", "2.0")
    assert str(again) == exceptions.get_version_mismatch_message("torch", "1.0", "2.0")
    assert "torch 2.0 is installed" in str(again)


@given(st.lists(st.integers()), st.integers(1, 12))
def test_a_split_list_has_all_items_in_order_and_even_pieces(items: list[int], pieces: int):
    split = util.split_list(items, pieces)
    assert len(split) == pieces
    assert [item for piece in split for item in piece] == items
    lengths = [len(piece) for piece in split]
    assert lengths == sorted(lengths, reverse=True)
    assert max(lengths) - min(lengths) <= 1


def test_powers_of_two():
    powers = [n for n in range(-4, 70) if util.num_rank_is_power_2(n)]
    assert powers == [1, 2, 4, 8, 16, 32, 64]


def test_iterables():
    assert all(map(util.is_iterable, ([], "text", range(2), {}, iter([]))))
    assert not any(map(util.is_iterable, (1, None, int)))


@pytest.mark.parametrize(
    ("version", "target", "expected"),
    [
        ("2.13.0", "2.1.0", True),
        ("2.1.0", "2.13.0", False),
        ("2.13.0+cpu", "2.13.0", True),
        ("2.1rc1", "2.1.0", True),
        ("2", "2.0.1", False),
        ("10.0.0", "9.9.9", True),
    ],
)
def test_versions_compare_by_number(version: str, target: str, expected: bool):
    assert util.is_version_greater_equal_than(version, target) is expected


@pytest.mark.parametrize(
    ("version", "target"),
    [("2.0.0", "2.0"), ("2.0.0", "2.0.0.0"), ("2.0.0", "2.0.x"), (2.0, "2.0.0"), ("new", "2.0.0")],
)
def test_what_is_no_version_is_an_error(version: str, target: str):
    with pytest.raises(ValueError, match="version"):
        util.is_version_greater_equal_than(version, target)


def test_env_sets_variables_for_a_while(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TEST_A", "before")
    monkeypatch.delenv("TEST_B", raising=False)
    monkeypatch.setenv("TEST_C", "there")
    with util.env(TEST_A="now", TEST_B="new", TEST_C=None):
        assert (os.environ["TEST_A"], os.environ["TEST_B"]) == ("now", "new")
        assert "TEST_C" not in os.environ
    assert (os.environ["TEST_A"], os.environ["TEST_C"]) == ("before", "there")
    assert "TEST_B" not in os.environ


def test_average_and_op_are_one_choice():
    class Operations:
        Average, Sum = "average", "sum"

    choose = util.get_average_backwards_compatibility_fun(Operations)
    assert choose(None, None) == "average"
    assert choose("max", None) == "max"
    with pytest.deprecated_call():
        assert [choose(None, average) for average in (True, False)] == ["average", "sum"]
    with pytest.raises(ValueError, match="exclude each other"):
        choose("max", True)


def test_what_works_here(capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("torch")
    assert util.extension_available("torch")
    assert not util.extension_available("mxnet", verbose=True)
    assert util.mpi_built(verbose=True) == built.mpi_built()
    assert (util.gloo_built(), util.ddl_built(), util.ccl_built()) == (False, False, False)
    assert util.nccl_built() == built.nccl_built()
    assert util.gpu_available("torch") == (built.cuda_built() or built.rocm_built())
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "adapter for mxnet: no"
    assert len(said) == 2
    util.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2")
    with pytest.raises(ImportError, match=r"horovod\.mxnet does not work here"):
        util.check_extension("horovod.mxnet", "HOROVOD_WITH_MXNET", __file__, "mpi_lib")


# ---------------------------------------------------------------------------------------------
# Jobs


def finished(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last line of a job that has succeeded."""
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("size", tiers.choose([1, 2, 4], push=[2]))
def test_a_plain_loop_with_clipping_and_accumulation_trains_and_resumes(size: int, tmp_path: Path):
    script, checkpoint = SCRIPTS / "plain_loop.py", tmp_path / "last.pt"
    first = job(size, script, "--checkpoint", checkpoint, "--epochs", "2", "--fp16-allreduce")
    assert finished(first) == f"done: 2 epochs, 0 of them resumed, {size} ranks"
    second = job(size, script, "--checkpoint", checkpoint, "--epochs", "4")
    assert finished(second) == f"done: 4 epochs, 2 of them resumed, {size} ranks"
    epochs = [line.split(":")[0] for line in (first.stdout + second.stdout).splitlines()]
    assert epochs == ["epoch 0", "epoch 1", "done", "epoch 2", "epoch 3", "done"]  # rank 0 only


@pytest.mark.parametrize("size", tiers.choose([1, 2, 4], push=[2]))
def test_mixed_precision_trains_and_skips_the_same_steps_everywhere(size: int):
    line = finished(job(size, SCRIPTS / "mixed_precision.py"))
    assert line.startswith("done: loss ")
    assert line.endswith(f", {size} ranks")


ENDING = """\
import sys
import horovod.common.util
import hororing.numpy as hvd  # which is quicker to import than a framework
hvd.init()
x = hvd.broadcast_object(hvd.rank(), root_rank=hvd.size() - 1, name="x")
print(f"rank {hvd.rank()} of {hvd.size()}: {x} {sys.argv[1:]}\\n", end="", flush=True)
fails = hvd.rank() == hvd.size() - 1
hvd.barrier()
hvd.shutdown()
if fails:
    sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("size", "form", "code"),
    [(1, ["ending.py"], 5), (2, ["-m", "ending"], 0), (4, ["ending.py"], 5)],
)
def test_arguments_and_exit_codes_pass_through_mpirun(
    size: int, form: list[str], code: int, tmp_path: Path
):
    write(tmp_path, {"ending.py": ENDING})
    done = job(size, *form, str(code), "--lr", "1", cwd=tmp_path)
    assert done.returncode == code, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"rank {rank} of {size}: {size - 1} {[str(code), '--lr', '1']}" for rank in range(size)
    ]


FAILING = """
import atexit, os, sys, time
import hororing.numpy as hvd
from horovod.common.exceptions import HorovodInternalError

def wait():  # mpirun ends rank 0 soon after rank 1
    end = time.monotonic() + 60
    while not os.path.exists(sys.argv[1]) and time.monotonic() < end:
        time.sleep(0.01)

hvd.init()
if hvd.rank() == 1:
    atexit.register(wait)
    raise KeyError("on purpose")
try:
    hvd.barrier()
except HorovodInternalError as error:
    with open("written", "w") as file:
        file.write(str(error))
    os.rename("written", sys.argv[1])
    raise
"""


def test_an_exception_of_one_rank_ends_all_with_its_traceback(tmp_path: Path):
    seen = tmp_path / "seen"
    done = job(2, "-c", FAILING, seen, cwd=tmp_path)
    assert done.returncode != 0
    assert "KeyError: 'on purpose'" in done.stderr
    assert "rank 1 failed: KeyError: 'on purpose'" in seen.read_text()
    assert "hororing/as_horovod" not in done.stderr


def test_rank_0_says_what_horovods_variables_do_not_do():
    program = (
        "import hororing.numpy as hvd, hororing.config\n"
        "hvd.init()\n"
        "assert hororing.config.load()['FUSION_BYTES'] == 4096\n"
        "hvd.barrier()"
    )
    done = job(
        2, "-c", program, HOROVOD_ENABLE_XLA_OPS="1", HOROVOD_BATCH_D2D_MEMCOPIES="1",
        HOROVOD_LOG_LEVEL="INFO", HOROVOD_FUSION_THRESHOLD="4096",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "HOROVOD_" in line]
    assert len(said) == 2, done.stderr
    assert all("[rank 0] " in line for line in said)
    assert "WARNING" in said[0]
    assert "HOROVOD_ENABLE_XLA_OPS=1 has no effect here: no operation is" in said[0]
    assert "INFO" in said[1]
    assert said[1].endswith("ignored, since they have no meaning here: HOROVOD_BATCH_D2D_MEMCOPIES")


@pytest.mark.parametrize("size", tiers.choose([1, 2, 4], push=[2]))
def test_uneven_data_trains_with_join(size: int):
    done = job(size, SCRIPTS / "uneven_data.py")
    assert finished(done) == f"done: 3 epochs, {size} ranks"


OLD_SCRIPTS = {
    "optimizer.variables()": (
        "type('Optimizer', (), {'variables': []})().variables()",
        "optimizer.variables, without brackets",
    ),
    "optimizer.variables() in a tf.function": (
        "raise TypeError('in user code:\\n    use(optimizer.variables())\\n"
        "    TypeError: \\'list\\' object is not callable')",
        "optimizer.variables, without brackets",
    ),
    "experimental_run_tf_function": (
        "(lambda optimizer: None)(0, experimental_run_tf_function=False)",
        "experimental_run_tf_function.* leave it out",
    ),
    "an .h5 file": (
        "raise ValueError('Unknown variable: k. This optimizer can only be called for the variables"
        " it was originally built with. When')",
        "save .keras files",
    ),
    "ImageDataGenerator": ("from types import ImageDataGenerator", "image_dataset_from_directory"),
}


@pytest.mark.parametrize("old", OLD_SCRIPTS)
def test_a_script_for_keras_2_is_told_what_to_change(old: str, tmp_path: Path):
    # The errors have the texts of Keras 3, whose import takes seconds.
    program, change = OLD_SCRIPTS[old]
    (tmp_path / "train.py").write_text(program)
    done = python(*AS_HOROVOD, "train.py", cwd=tmp_path)
    assert done.returncode == 1
    told = done.stderr.splitlines()[-1]
    assert re.search(change, told), done.stderr
    assert "TF_USE_LEGACY_KERAS=1" in told


def test_other_errors_have_no_hint(tmp_path: Path):
    (tmp_path / "train.py").write_text("[]()")
    done = python(*AS_HOROVOD, "train.py", cwd=tmp_path)
    assert done.stderr.splitlines()[-1] == "TypeError: 'list' object is not callable"


@tiers.full
def test_a_tensorflow_loop_trains_and_leaves_a_checkpoint(tmp_path: Path):
    pytest.importorskip("tensorflow")
    done = job(2, SCRIPTS / "tensorflow_loop.py", "--checkpoints", tmp_path)
    assert finished(done) == "done: 60 steps, 2 ranks", done.stderr
    assert len([*tmp_path.glob("*.index")]) == 1


@tiers.full
@pytest.mark.parametrize("keras", ["3", "2"])
def test_a_keras_script_with_callbacks_trains_and_goes_on_from_its_checkpoint(
    keras: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("tensorflow")
    if keras == "2":
        pytest.importorskip("tf_keras")
        monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")
    done = job(2, SCRIPTS / "keras_fit.py", "--checkpoints", tmp_path)
    assert finished(done) == "done: 6 epochs, 2 ranks", done.stderr
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == [f"epoch-{number}.keras" for number in range(1, 7)]
    assert "learning rate warmup is over" in done.stdout

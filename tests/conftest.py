"""Tiers (tiers.py) and shared jobs (session.py)."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hororun_jobs
import hypothesis
import pytest
import session as shared_jobs

# A CUDA build of PyTorch imports triton with its first optimizer, which crashes if TensorFlow 2.21
# has been imported before.
with contextlib.suppress(ImportError):
    import triton  # noqa: F401


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also what only make test-all runs")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: only in make test-all")
    # No limits of time: on a busy machine, an example may wait for a core. The push tier tries the
    # same examples in every run.
    hypothesis.settings.register_profile(
        "tests",
        deadline=None,
        derandomize=not config.getoption("--full"),
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("tests")


def pytest_report_header() -> str:
    missing = [name for name in ("torch", "tensorflow", "keras", "jax") if not find_spec(name)]
    return f"without {', '.join(missing)}: their tests are left out" if missing else ""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the garbage collector, which takes a third of the time otherwise."""
    gc.disable()
    collected = yield
    gc.freeze()  # later collections skip the imported frameworks
    gc.enable()
    return collected


@pytest.hookimpl(trylast=True)  # after -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--full"):
        left_out = [item for item in items if item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("full")]
    items[:] = shared_jobs.plan(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Choose the process for each test of `pytest -n`."""
    from xdist.scheduler import LoadScopeScheduling

    class ByJob(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return shared_jobs.group(nodeid)

    return ByJob(config, log)


@pytest.fixture(autouse=True, scope="module")
def _no_engine_is_left() -> Iterator[None]:
    """End the engine that a file has started, so that the order of files does not matter."""
    yield
    engine = sys.modules.get("hororing._engine.shutdown")
    if engine is not None:
        engine.shutdown()


@pytest.fixture
def rsh(tmp_path: Path) -> str:
    """Replace ssh by a script on this host, with another environment and folder, and a greeting."""
    script = tmp_path / "rsh"
    script.write_text(
        '#!/bin/sh\nhost=$1; shift\necho "welcome to $host"\ncd /\n'
        'exec env -i HOME=/ PATH=/usr/bin:/bin ON=$host sh -c "$*"\n'
    )
    script.chmod(0o755)
    return str(script)


@pytest.fixture
def started() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    made = []

    def make(*words: str) -> subprocess.Popen[str]:
        made.append(hororun_jobs.start(*words))
        return made[-1]

    yield make
    for process in made:
        process.kill()
        process.communicate()

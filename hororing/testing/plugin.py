"""The plug-in of pytest: tests with the mark `ranks` run on ranks, all others as always.

pytest loads it wherever hororing is installed, so it imports the rest only for such a test.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from hororing.testing.mark import (
    HELP,
    INTERLEAVE_HELP,
    SEED,
    SIZE,
    seeds_of,
    size_of,
    wish_of,
)  # fmt: skip

_KEY = pytest.StashKey[Any]()  # the `session.Ranks` of a session


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the settings."""
    parser.addini("ranks_limit_s", "time limit of each phase of a test on ranks, in s", default="5")
    parser.addini("ranks_backend", "of torch.distributed: hororing or gloo", default="hororing")


def pytest_configure(config: pytest.Config) -> None:
    """Describe the marks."""
    config.addinivalue_line("markers", HELP)
    config.addinivalue_line("markers", INTERLEAVE_HELP)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test for each number of ranks, and for each seed."""
    mark = metafunc.definition.get_closest_marker("ranks")
    pace = metafunc.definition.get_closest_marker("interleave")
    if mark is None:
        if pace is not None:
            pytest.fail("interleave: the test needs pytest.mark.ranks, too", pytrace=False)
        return
    sizes = wish_of(mark).sizes
    if len(sizes) > 1:
        _parametrize(metafunc, SIZE, list(sizes), "ranks")
    if pace is not None:
        _parametrize(metafunc, SEED, seeds_of(pace), "seed")


def _parametrize(metafunc: pytest.Metafunc, name: str, values: list[int], shown: str) -> None:
    if name not in metafunc.fixturenames:
        metafunc.fixturenames.append(name)
    ids = [f"{shown}={each}" for each in values]
    metafunc.parametrize(name, values, indirect=True, ids=ids)


@pytest.fixture
def interleave(request: pytest.FixtureRequest) -> int:
    """Return the seed of this test."""
    return int(request.param)


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> int:
    """Return the number of ranks of this test."""
    return size_of(request.node)


def _is_for_ranks(item: pytest.Item) -> bool:
    """Whether this process lets ranks run the test, and is none itself."""
    return size_of(item) > 0 and not item.config.pluginmanager.hasplugin("hororing-rank")


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item) -> bool | None:
    """Leave the limits of pytest-timeout to ranks, where a traceback shows what took so long."""
    return _is_for_ranks(item) or None


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> bool | None:
    """See `pytest_timeout_set_timer`."""
    return _is_for_ranks(item) or None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test on ranks, unless this process is one of them."""
    if not _is_for_ranks(item):
        return None
    found = item.config.stash.get(_KEY, None)
    if found is None:
        from hororing.testing.session import Ranks

        found = item.config.stash[_KEY] = Ranks(item.session)
    found.run(item, nextitem)
    return True


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """End the ranks after the last test, before pytest-cov adds up what they have measured."""
    try:
        return (yield)
    finally:
        _finish(session)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """End the ranks, if the session has ended in another way."""
    _finish(session)


def _finish(session: pytest.Session) -> None:
    found = session.config.stash.get(_KEY, None)
    if found is not None:
        found.finish()


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the ranks at once."""
    found = config.stash.get(_KEY, None)
    if found is not None:
        found.close()

"""The plug-in of pytest: tests with the mark `ranks` run on ranks, all others as always.

pytest loads it wherever hororing is installed, so it imports the rest only for such a test.
"""

from __future__ import annotations

from typing import Any

import pytest

from hororing.testing.mark import HELP, SIZE, size_of, wish_of

_KEY = pytest.StashKey[Any]()  # the `session.Ranks` of a session


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the settings."""
    parser.addini("ranks_limit_s", "time limit of each phase of a test on ranks, in s", default="5")
    parser.addini("ranks_backend", "of torch.distributed: hororing or gloo", default="hororing")


def pytest_configure(config: pytest.Config) -> None:
    """Describe the mark."""
    config.addinivalue_line("markers", HELP)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test for each number of ranks."""
    mark = metafunc.definition.get_closest_marker("ranks")
    if mark is None:
        return
    sizes = wish_of(mark).sizes
    if len(sizes) > 1:
        if SIZE not in metafunc.fixturenames:
            metafunc.fixturenames.append(SIZE)
        metafunc.parametrize(SIZE, sizes, indirect=True, ids=[f"ranks={each}" for each in sizes])


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> int:
    """Return the number of ranks of this test."""
    return size_of(request.node)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test on ranks, unless this process is one of them."""
    if not size_of(item) or item.config.pluginmanager.hasplugin("hororing-rank"):
        return None
    found = item.config.stash.get(_KEY, None)
    if found is None:
        from hororing.testing.session import Ranks

        found = item.config.stash[_KEY] = Ranks(item.session)
    found.run(item, nextitem)
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tear down the fixtures of ranks, and end them."""
    found = session.config.stash.get(_KEY, None)
    if found is not None:
        found.finish()


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the ranks, if the session has ended in another way."""
    found = config.stash.get(_KEY, None)
    if found is not None:
        found.close()

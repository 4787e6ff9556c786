"""The table of docs/security.md: a test holds each row. Push tier, 1 s."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hororing._job.rendezvous.client import Member, RendezvousError
from hororing.hororun.job import start

ROOT = Path(__file__).parents[3]


def test_each_way_to_start_has_a_row_and_each_row_a_test():
    page = (ROOT / "docs/security.md").read_text()
    table = page.partition("| started by |")[2].partition("\n\n")[0].splitlines()[2:]
    cells = [[each.strip() for each in row.strip("|").split(" | ")] for row in table]
    assert {len(row) for row in cells} == {5}
    ways = " ".join(row[0] for row in cells)
    for way in ("hororun", "own variables", "torchrun", "srun", "file:///", "hororing store",
                "Ray", "Spark", "mpirun", "HORORING_INSECURE"):  # fmt: skip
        assert way in ways
    files = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "tests").rglob("*.cc")]
    tests = "\n".join(each.read_text() for each in files)
    for row in cells:
        name = row[4].strip("` ")
        assert re.search(rf"^(def |TEST\(){name}\(?", tests, flags=re.MULTILINE), row


@contextmanager
def opened(store: Any) -> Iterator[Any]:
    store.start_thread()
    try:
        yield store
    finally:
        store.stop()


def test_stores_of_our_launchers_admit_nobody_without_the_secret():
    made, secret = start.new_store(2, several_hosts=False)
    with opened(made) as store:
        told = {"job": store.job, "rank": 1, "size": 2, "timeout_s": 10}
        for wrong in (b"", b"x" * 32, secret[:-1]):
            with pytest.raises(RendezvousError, match="does not have the secret"):
                Member(f"127.0.0.1:{store.port}", secret=wrong, insecure=True, **told)
        Member(f"127.0.0.1:{store.port}", secret=secret, **told).done()
    assert len(secret) == 32
    assert start.new_store(2, several_hosts=False)[1] != secret
    # Ray and Spark take the same store; elastic jobs make such a secret themselves.
    for file in ("ray/ranks.py", "spark/driver.py", "ray/elastic.py", "hororun/job/start.py"):
        text = (ROOT / "hororing" / file).read_text()
        assert re.search(r"start\.new_store\(|protocol\.new_secret\(\)", text), file


def test_what_unpickles_is_what_the_page_names():
    found = {
        str(file.relative_to(ROOT / "hororing"))
        for file in (ROOT / "hororing").rglob("*.py")
        if re.search(r"pickle\.loads?\(|torch\.load\(|\bnp\.load\(", file.read_text())
    }
    own = {
        "elastic/saved.py",  # save_to's file
        "testing/channel.py",  # a pair of sockets without a name
        "toolkit/tracking/record.py",  # a copy
        "torch/snapshot.py",  # weights_only: no code
    }
    launchers = {
        "hororun/call.py", "hororun/function.py", "ray/elastic.py", "ray/tuning.py",
        "spark/task.py",
    }  # fmt: skip
    # Of ranks: `objects` refuses pickles without a proof, and then torch/state.py gets none.
    assert found - own - launchers == {"_requests/objects.py", "torch/state.py"}

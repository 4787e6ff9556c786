"""The page about a running job, `hororing top` and the metrics (docs/watching.md).

Push tier, 12 s: one job, in which rank 2 is late at first, and rank 1 hangs later.
"""

from __future__ import annotations

import http.client
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hororun_jobs
import pytest

from hororing.watch import hub, links, metrics, page, sampler
from hororing.watch import job as job_module
from hororing.watch.findings import Seen, of_hosts, of_late_ranks, of_links, of_waits
from hororing.watch.rates import History, Rates

ROOT = Path(__file__).parents[3]
RANK = """
import logging, os, sys, time
import numpy as np
import hororing.numpy as hvd
from hororing.extension import show

def load_batch():
    time.sleep(0.005 + 0.03 * (hvd.rank() == 2))
    while hvd.rank() == 1 and os.path.exists(sys.argv[1]):
        time.sleep(0.01)

hvd.init()
if hvd.rank() == 0:
    logging.getLogger("hororing").warning("guard: %s differs", "x" * 400)
for step in range(100000):
    load_batch()
    for handle in [hvd.allreduce_async(np.ones(1000, np.float32), name=n) for n in ("a", "b")]:
        hvd.synchronize(handle)
    show(step, loss=0.25, samples=step * 8, **{"[bold]loss[/bold]": 0.5})
"""


class Told:
    """What the page of a job tells."""

    def __init__(self, url: str) -> None:
        self.port = int(re.search(r":(\d+)/", url)[1])  # type: ignore[index]
        self.token = url.partition("token=")[2]

    def ask(
        self, path: str, method: str = "GET", **headers: str
    ) -> tuple[int, str, dict[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(
            method, path, headers={k.replace("_", "-"): v for k, v in headers.items()}
        )
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), dict(answer.getheaders())

    def get(self, path: str) -> str:
        status, text, _ = self.ask(path, Authorization=f"Bearer {self.token}")
        assert status == 200, text
        return text

    def state(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self.get("/state"))
        return told

    def until(self, true: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait for a state of the job."""
        end = time.monotonic() + 60
        while True:
            state = self.state()["state"]
            if state is not None and true(state):
                return dict(state)
            assert time.monotonic() < end, state
            time.sleep(0.2)

    def finding(self, true: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait for one."""
        state = self.until(lambda state: any(map(true, state["findings"])))
        return dict(next(filter(true, state["findings"])))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Told, Path]]:
    folder = tmp_path_factory.mktemp("job")
    (folder / "rank.py").write_text(RANK)
    process = hororun_jobs.start(
        "--page", "0", "--grace", "1", "-np", "3",
        sys.executable, str(folder / "rank.py"), str(folder / "hang"),
    )  # fmt: skip
    assert process.stderr is not None
    said = process.stderr.readline()
    assert said.startswith("page: http://127.0.0.1:"), said
    assert "ssh -L" in process.stderr.readline()
    told = Told(said.split()[1])
    yield told, folder / "hang"
    process.terminate()
    process.communicate(timeout=60)
    with pytest.raises(ConnectionError):  # it ends with the job
        told.ask("/")


def test_the_late_rank_is_named_and_the_numbers_are_shown(job: tuple[Told, Path]):
    told, _ = job
    late = told.finding(lambda each: each["kind"] == "late" and each["ranks"] == [2])
    assert "ranks 0, 1 wait for it" in late["text"]
    state = told.until(lambda state: state["samples_per_s"] and state["step_s"])
    assert [each["rank"] for each in state["ranks"]] == [0, 1, 2]
    assert state["step_s"] > 0.03
    assert state["metrics"]["values"]["loss"] == 0.25
    assert state["samples_per_s"] > 0
    assert state["shared_memory_bytes_per_s"] > 0
    logged = [each["text"] for each in state["findings"] if each["kind"] == "log"]
    assert [each[:37] for each in logged] == ["WARNING [rank 0] guard: xxxxxxxxxxxxx"]
    assert len(logged[0]) < 400
    assert any("joined" in each["text"] for each in told.state()["notes"])
    assert any("guard" in each["text"] for each in told.state()["notes"])


def test_metrics_are_parsed_by_prometheus_and_documented(job: tuple[Told, Path]):
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    told, _ = job
    families = {f.name: f for f in parser.text_string_to_metric_families(told.get("/metrics"))}
    steps = {s.labels["rank"]: s.value for s in families["hororing_steps"].samples}
    assert sorted(steps) == ["0", "1", "2"]
    assert min(steps.values()) > 0
    assert families["hororing_step_seconds"].samples[0].value > 0.03
    listed = (ROOT / "docs/watching.md").read_text()
    for name, family in families.items():
        assert f"`{name.removeprefix('hororing_')}`" in listed, name
        assert not family.unit or name.endswith(family.unit)
    # Alerts and the dashboard use names that exist.
    for file in (ROOT / "packaging/prometheus").iterdir():
        for used in re.findall(r"\bhororing_[a-z_]+", file.read_text()):
            assert used.removesuffix("_total") in families, f"{file}: {used}"


def test_nobody_without_the_token_learns_anything_and_nobody_can_do_anything(
    job: tuple[Told, Path], tmp_path: Path
):
    told, _ = job
    good = f"Bearer {told.token}"
    for path in ("/", "/state", "/metrics", "/page.js", "/else", "/?token=wrong"):
        assert told.ask(path)[0] == 401
    assert told.ask("/state", Authorization="Bearer " + "0" * 32)[0] == 401
    # A name of another site that resolves to this host.
    assert told.ask("/state", Authorization=good, Host="evil.example:80")[0] == 403
    assert told.ask("/../hub.py", Authorization=good)[0] == 404
    assert told.ask("/state", "POST", Authorization=good)[0] == 501
    status, _, headers = told.ask(f"/?token={told.token}")
    assert (status, headers["Location"]) == (303, "/")
    cookie = headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    status, text, headers = told.ask("/", Cookie=cookie.partition(";")[0])
    assert status == 200
    assert "page.js" in text
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    with pytest.raises(OSError):  # noqa: PT011 - of any kind: it listens on loopback only
        http.client.HTTPConnection("127.0.0.2", told.port, timeout=1).request("GET", "/")
    file = tmp_path / "token"
    file.write_text("0123456789abcdef\n")
    file.chmod(0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        hub.token(str(file))
    file.chmod(0o600)
    assert hub.token(str(file)) == "0123456789abcdef"
    file.write_text("short")
    with pytest.raises(ValueError, match="16"):
        hub.token(str(file))


@pytest.mark.skipif(importlib.util.find_spec("rich") is None, reason="rich is not installed")
def test_top_shows_a_job_to_which_it_is_attached_later(job: tuple[Told, Path]):
    told, _ = job
    told.finding(lambda each: each["kind"] == "late")
    name = told.state()["state"]["job"]
    shown = subprocess.run(
        [sys.executable, "-m", "hororing", "top", "--once", "--job", name],
        capture_output=True,
        text=True,
        env=hororun_jobs.environment(COLUMNS="200"),
        timeout=60,
    )
    assert shown.returncode == 0, shown.stderr
    assert "[bold]loss[/bold] 0.5" in shown.stdout  # no markup
    assert f"job {name}  3 of 3 ranks here" in shown.stdout
    assert "rank 2 is late" in shown.stdout
    assert "loss 0.25" in shown.stdout


def test_a_hang_is_named_with_the_stack_of_the_rank_that_others_wait_for(job: tuple[Told, Path]):
    told, hang = job
    hang.touch()
    found = told.finding(lambda each: each["kind"] in ("waiting", "hang") and each["stack"])
    assert found["ranks"] == [1]
    assert "ranks 0, 2 have waited" in found["text"]
    assert "allreduce 'a'" in found["text"]
    assert "in load_batch" in found["stack"]
    hang.unlink()
    told.finding(lambda each: each["kind"] == "late" and each["ranks"] == [2])


# ---------------------------------------------------------------------------------------------
# Without a job


def seen(pending: list[tuple[str, str, float]] = [], state: str = "S", **rates: float) -> Seen:  # noqa: B006
    numbers = {
        "seconds": 2.0, "steps": 20, "step_s": 0.1, "waited_s": 0.05, "batch_s": 0.01,
        "blocked_s": 0.05, "cpu_s": 0.02, "queued_s": 0.001, "disk_s": 0.0, "throttled_s": 0.0,
        "queued_share": 0.01, "core_share": 0.3, "batches": 10.0, "tensors": 20.0,
        "shared_memory": 0.0, "between_hosts": 0.0, "other": 0.0, "samples": None, **rates,
    }  # fmt: skip
    waits = [{"request": r, "kind": k, "for_ns": s * 1e9} for r, k, s in pending]
    sample = {
        "pending": waits, "kernel": {"state": state}, "stack": "", "host": "h", "sampled_by": "h",
    }  # fmt: skip
    return Seen(sample, Rates(**numbers))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cause", "own"),
    [
        ("idle", {}),
        ("compute", {"cpu_s": 0.07}),
        ("core", {"queued_s": 0.04}),
        ("disk", {"disk_s": 0.05}),
        ("throttled", {"throttled_s": 0.05, "queued_s": 0.01}),
    ],
)
def test_the_cause_of_lateness_is_the_figure_that_explains_it(cause: str, own: dict[str, float]):
    ranks = {0: seen(), 1: seen(waited_s=0.0, **own), 2: seen(), 3: seen()}
    (found,) = of_late_ranks(ranks)
    assert (found.ranks, found.cause) == ([1], cause)
    assert found.text.startswith("rank 1 is late: by 50.0 ms in a step of 100.0 ms, in which ranks")
    assert of_late_ranks({0: seen(), 1: seen(waited_s=0.045)}) == []
    # Where all wait for a core, the one that is a little later does not sleep.
    full = {rank: seen(queued_s=0.05, queued_share=0.5) for rank in range(3)}
    (found,) = of_late_ranks({**full, 3: seen(waited_s=0.035, queued_s=0.05, queued_share=0.5)})
    assert found.cause == "core"


def test_without_steps_lateness_is_that_of_a_second():
    none: dict[str, Any] = {"steps": 0, "step_s": None}
    (found,) = of_late_ranks({0: seen(**none, waited_s=0.5), 1: seen(**none)})
    assert "rank 1 is late: by 450.0 ms in each second, in which rank 0 waits for it" in found.text
    idle = {"batches": 0.0, **none}
    assert of_late_ranks({0: seen(**idle, waited_s=0.5), 1: seen(**idle)}) == []


def test_waits_name_those_that_are_missing_and_a_stopped_rank():
    waits = [("allreduce 'x'", "submitted", 3.0)]
    (found,) = of_waits({0: seen(waits), 1: seen(state="T"), 2: seen(waits)}, 0.1)
    assert (found.kind, found.ranks, found.cause) == ("waiting", [1], "stopped")
    assert "ranks 0, 2 have waited 3.0 s for rank 1, which has not submitted" in found.text
    # A long step is no hang; five seconds of usual steps of 100 ms are.
    waits = [("allreduce 'x'", "submitted", 6.0)]
    assert of_waits({0: seen(waits), 1: seen()}, 30.0)[0].kind == "waiting"
    assert of_waits({0: seen(waits), 1: seen()}, 0.1)[0].kind == "hang"
    runs = [("allreduce 'x'", "agreed", 6.0)]
    (found,) = of_waits({0: seen(runs), 1: seen(runs, state="T")}, 0.1)
    assert (found.kind, found.ranks) == ("hang", [1])
    assert of_waits({0: seen(waits), 1: seen(waits)}, 0.1) == []


def test_a_slow_link_and_a_host_without_cores_are_named():
    def link(rank: int, speed: float, busy: float) -> dict[str, Any]:
        return {
            "rank": rank, "peer": rank + 1, "host": f"h{rank}", "peer_host": f"h{rank + 1}",
            "bytes_per_s": 1e6, "busy_share": busy, "speed": speed, "rtt_s": 0.001,
            "retransmits_per_s": 0.0,
        }  # fmt: skip

    (found,) = of_links([link(0, 1e8, 0.1), link(1, 2e7, 0.8), link(2, 1e8, 0.1)])
    assert found.ranks == [1, 2]
    assert "rank 1 (h1) sends rank 2 (h2) 20 MB/s" in found.text
    assert of_links([link(0, 1e8, 0.9), link(1, 9e7, 0.9)]) == []
    # Link 0 is slow since acknowledgements wait where rank 1 sends; link 2 is fast.
    (found,) = of_links([link(0, 2e7, 0.9), link(1, 3e7, 0.85), link(2, 1e8, 0.1)])
    assert found.ranks == [1, 2]
    assert of_links([link(0, 2e7, 0.9), link(1, 7e7, 0.85), link(2, 1e8, 0.1)]) == []
    back = {**link(1, 2e7, 0.8), "peer": 0, "peer_host": "h0"}  # between two hosts: the busier one
    (other,) = of_links([link(0, 2e7, 0.6), back, link(2, 1e8, 0.1)])
    assert other.ranks == [1, 0]
    # Rank 2 is late, because its data comes late.
    (late,) = of_late_ranks({0: seen(), 1: seen(), 2: seen(waited_s=0.0)}, [found])
    assert late.cause == "link"
    assert late.text.endswith("Its link with rank 1 is slow.")
    host = {"host": "h", "cores": 2, "steal_share": 0.3}
    (found,) = of_hosts([host], {0: seen()})
    assert "the hypervisor takes 30%" in found.text


def test_a_wait_for_a_core_from_before_the_window_is_no_share_over_1():
    totals = (
        "steps",
        "step_began_at_ns",
        "waited_ns",
        "batch_ns",
        "blocked_ns",
        "batches",
        "tensors",
    )
    paths = ("shm_direct", "at_once", "three_phase", "ring", "rank_order", "other")
    kernel = ("main_cpu_ns", "cpu_ns", "queued_ns", "disk_ns", "throttled_ns")
    window = History()
    for at_ns, queued_ns in ((0, 0), (2_000_000_000, 2_500_000_000)):
        window.add(
            {
                "pid": 1, "at_ns": at_ns, "shown": {},
                "totals": dict.fromkeys([*totals, *(f"bytes_{each}" for each in paths)], 0),
                "kernel": {**dict.fromkeys(kernel, 0), "queued_ns": queued_ns, "state": "R"},
            }
        )  # fmt: skip
    rates = window.rates()
    assert rates is not None
    assert rates.queued_share == 1.0


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"own_s": 0.05, "cpu_s": 0.04}, "outside hororing (they compute for longer), by 50.0 ms"),
        ({"own_s": 0.05, "cpu_s": 0.01}, "such as their data loader), by 50.0 ms"),
        ({"own_s": 0.01, "queued_s": 0.01, "batch_s": 0.04}, "moving and reducing the data takes"),
    ],
)
def test_what_has_grown_in_slower_steps_is_named(more: dict[str, float], why: str):
    names = ("own_s", "waited_s", "batch_s", "cpu_s", "queued_s", "disk_s", "throttled_s")
    usual = {"step_s": 0.1, "step_bytes": 4e6, **dict.fromkeys(names, 0.01)}
    watched = job_module.Job("j")
    watched.points.extend({**usual, "at": float(second)} for second in range(40))
    assert watched._slower(watched._usual()) == []
    watched.points.append(
        {**usual, "at": 41.0, "step_s": 0.15, **{n: 0.01 + more[n] for n in more}}
    )
    (found,) = watched._slower(watched._usual())
    assert found.text.startswith("steps take 150.0 ms, 100.0 ms in the last minutes: ")
    assert why in found.text


def test_a_process_without_a_rank_is_not_shown_yet(monkeypatch: pytest.MonkeyPatch):
    one = sampler.Sampler("-")
    for pid in (1, 2):
        one._ranks[pid] = sampler._Rank(os.open("/dev/null", os.O_RDONLY))
    monkeypatch.setattr(one, "_read", lambda pid, _: {"rank": {1: 3, 2: None}[pid]})
    assert one.sample()["ranks"] == [{"rank": 3}]
    one.close()


def test_connections_between_ranks_have_both_their_ends():
    sides = [(0, {"own": "a 1", "other": "b 2"}), (1, {"own": "b 2", "other": "a 1"}),
             (1, {"own": "b 3", "other": "store 4"})]  # fmt: skip
    found = [(each["rank"], each["peer"]) for each in links.joined(sides)]
    assert found == [(0, 1), (1, 0)]


def test_hororun_tells_the_page_its_job_its_hosts_and_what_it_says(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    told: list[tuple[str, str]] = []
    heard = SimpleNamespace(
        **{n: lambda text, n=n: told.append((n, text)) for n in ("set_job", "add_host", "note")}
    )
    lines = "job 12\nhost node2\nnote 10:00:00 process 1 has arrived\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    page.obey(heard)  # type: ignore[arg-type]
    assert told == [
        ("set_job", "12"), ("add_host", "node2"), ("note", "10:00:00 process 1 has arrived"),
    ]  # fmt: skip
    assert capfd.readouterr().out == "ready\n"


def test_metrics_of_nothing_are_valid():
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    assert list(parser.text_string_to_metric_families(metrics.openmetrics([{}]).decode()))

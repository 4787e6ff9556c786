"""Prometheus scrapes the page as docs/watching.md says; its alerts fire (packaging/prometheus).

Full tier, 20 s. Needs Debian's package prometheus, with promtool.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import textwrap
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hororun_jobs
import pytest
from test_watching import RANK, ROOT

pytest.importorskip("prometheus_client")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(shutil.which("promtool") is None, reason="no Prometheus"),
]
RULES = ROOT / "packaging/prometheus/alerts.yml"
FIRES = """
rule_files: [{rules}]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {{series: 'hororing_findings{{job="a", kind="hang"}}', values: '0 0 1x5'}}
      - {{series: 'hororing_findings{{job="b", kind="late"}}', values: '1x8'}}
    alert_rule_test:
      - {{eval_time: 2m, alertname: HororingHangs, exp_alerts: []}}
      - eval_time: 4m
        alertname: HororingHangs
        exp_alerts:
          - exp_labels: {{job: a, kind: hang, severity: critical}}
            exp_annotations:
              summary: "Job a hangs: ranks wait for one that does not submit its tensor"
  - interval: 1m
    input_series:
      - {{series: 'hororing_step_seconds{{job="a"}}', values: '0.1x30'}}
      - {{series: 'hororing_step_seconds{{job="b"}}', values: '0.1x30'}}
      - {{series: 'hororing_late_seconds{{job="a", rank="0"}}', values: '0x30'}}
      - {{series: 'hororing_late_seconds{{job="a", rank="1"}}', values: '0.03x30'}}
      - {{series: 'hororing_late_seconds{{job="b", rank="1"}}', values: '0.01x30'}}
    alert_rule_test:
      - eval_time: 15m
        alertname: HororingStraggler
        exp_alerts:
          - exp_labels: {{job: a, severity: warning}}
            exp_annotations:
              summary: "Job a loses more than a fifth of each step to a late rank"
  - interval: 1m
    input_series:
      - {{series: 'hororing_step_seconds{{job="a"}}', values: '0.1x60 0.2x40'}}
      - {{series: 'hororing_step_seconds{{job="b"}}', values: '0.1x60 0.11x40'}}
    alert_rule_test:
      - {{eval_time: 60m, alertname: HororingSlower, exp_alerts: []}}
      - eval_time: 80m
        alertname: HororingSlower
        exp_alerts:
          - exp_labels: {{job: a, severity: warning}}
            exp_annotations:
              summary: "Steps of job a take 30 % longer than in the last hours"
"""


def test_alerts_fire_when_they_should(tmp_path: Path):
    (tmp_path / "fires.yml").write_text(FIRES.format(rules=RULES))
    done = subprocess.run(
        ["promtool", "test", "rules", tmp_path / "fires.yml"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def until(ask: Callable[[], Any]) -> Any:
    """Wait for an answer that is true."""
    end = time.monotonic() + 60
    while True:
        try:
            if found := ask():
                return found
        except OSError:  # it does not listen yet
            pass
        assert time.monotonic() < end, ask()
        time.sleep(0.3)


def test_prometheus_scrapes_the_page_and_the_dashboard_has_its_figures(tmp_path: Path):
    token, port, page_port = tmp_path / "token", free_port(), free_port()
    token.touch(mode=0o600)
    token.write_text("0123456789abcdef" * 2)
    page = (ROOT / "docs/watching.md").read_text()
    config = re.search(r"```yaml\n(scrape_configs:.*?)```", page, re.DOTALL)[1]  # type: ignore[index]
    config = config.replace("/etc/prometheus/hororing.token", str(token))
    config = config.replace("127.0.0.1:8088", f"127.0.0.1:{page_port}")
    (tmp_path / "prometheus.yml").write_text(
        textwrap.dedent("global: {scrape_interval: 1s, evaluation_interval: 1s}\n")
        + f"rule_files: [{RULES}]\n{config}"
    )
    (tmp_path / "rank.py").write_text(RANK)
    job = hororun_jobs.start(
        "--page", str(page_port), "--page-token-file", str(token), "--grace", "1", "-np", "3",
        sys.executable, str(tmp_path / "rank.py"), str(tmp_path / "hang"),
    )  # fmt: skip
    server = subprocess.Popen(
        ["prometheus", f"--config.file={tmp_path}/prometheus.yml",
         f"--storage.tsdb.path={tmp_path}/data", f"--web.listen-address=127.0.0.1:{port}"],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip

    def asked(path: str, **query: str) -> Any:
        url = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]

    try:
        until(lambda: asked("query", query="rate(hororing_steps_total[10s]) > 0")["result"])
        # One job, by the page's own label, and every rank of it.
        ranks = asked("query", query="hororing_late_seconds")["result"]
        assert len({each["metric"]["job"] for each in ranks}) == 1
        assert sorted(each["metric"]["rank"] for each in ranks) == ["0", "1", "2"]
        until(lambda: [a for a in asked("alerts")["alerts"]
                       if a["labels"]["alertname"] == "HororingStraggler"])  # fmt: skip
        dashboard = json.loads((ROOT / "packaging/prometheus/dashboard.json").read_text())
        queries = [t["expr"] for panel in dashboard["panels"] for t in panel["targets"]]
        empty = []
        for query in queries:
            query = query.replace("$job", ".+").replace("$__rate_interval", "10s")
            if "link" not in query and not asked("query", query=query)["result"]:
                empty.append(query)
        assert not empty
        (tmp_path / "hang").touch()
        until(lambda: [a for a in asked("alerts")["alerts"]
                       if a["labels"]["alertname"] == "HororingHangs"])  # fmt: skip
    finally:
        server.terminate()
        job.terminate()
        job.communicate(timeout=60)
        said = server.communicate(timeout=60)[1]
    assert "level=error" not in said, said

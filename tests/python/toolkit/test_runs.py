"""All runs: filters, groups, what explains the order, the page, and its server."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest

from hororing import __main__ as main
from hororing.toolkit.runs import export, load, page
from hororing.toolkit.tracking import read_run
from hororing.toolkit.tracking.run_file import RunFile


def write(folder, count, curve=3):
    """Runs whose loss depends on lr most, on the optimizer less, and not on the seed."""
    for i in range(count):
        lr, kind = 10 ** -(i % 7), ("sgd", "adam")[i // 7 % 2]
        file = RunFile.of(folder, f"run {i:04d}")
        config = {"lr": lr, "optimizer": {"name": kind}}
        about = {"seed": i, "time": 100.0 - i, "ranks": 2, "maximize": ["accuracy"]}
        file.begin({"name": f"run {i:04d}", "config": config, **about})
        for step in range(curve):
            loss = abs(i % 7 - 3) + (kind == "sgd") * 0.1 + 1 / (step + 1)
            file.log(step, {"loss": loss, "accuracy": 1 / (1 + loss)})
        file.close("completed" if i % 5 else "failed")


def names(runs):
    return [row.run.name for row in runs.rows]


def test_filters_orders_and_groups(tmp_path):
    write(tmp_path, 28)
    (tmp_path / "other.jsonl").write_text("{}\n")
    runs = load(tmp_path)
    assert len(runs.rows) == 28
    assert list(runs.unreadable) == [str(tmp_path / "other.jsonl")]
    assert (runs.params, runs.metrics) == (["lr", "optimizer.name"], ["loss", "accuracy"])
    assert names(runs.where("lr<=0.001", "optimizer.name=adam", "status!=failed", "run 001")) == [
        "run 0011", "run 0012", "run 0013",
    ]  # fmt: skip
    assert len(runs.where("optimizer.name!=adam").rows) == 14
    with pytest.raises(ValueError, match=r"no run has 'rate'; there are lr, optimizer\.name, loss"):
        runs.where("rate<1")
    assert names(runs.sorted("loss"))[:2] == ["run 0010", "run 0024"]
    assert names(runs.sorted("accuracy", down=True))[:2] == ["run 0010", "run 0024"]
    assert runs.best("accuracy").run.name == "run 0010"
    groups = runs.groups("optimizer.name")
    assert {value: len(group.rows) for value, group in groups.items()} == {"sgd": 14, "adam": 14}
    assert names(groups["sgd"].sorted("loss"))[0] == "run 0003"
    # The later ones began first here, and each stands for what was better than all before.
    assert names(runs.records("loss")) == ["run 0027", "run 0026", "run 0025", "run 0024"]
    weights = runs.weights("loss")
    assert list(weights) == ["lr", "optimizer.name"]
    assert weights["lr"] > 0.5 > 0.2 > weights["optimizer.name"]


def test_values_that_are_missing_or_not_finite_come_last(tmp_path):
    for name, values in (("a", [float("nan")]), ("b", [2.0]), ("c", []), ("d", [1.0])):
        file = RunFile.of(tmp_path, name)
        file.begin({"config": {"x": name}})
        for value in values:
            file.log(0, {"loss": value})
        file.close("completed")
    runs = load(tmp_path)
    assert names(runs.sorted("loss"))[:2] == ["d", "b"]
    assert names(runs.sorted("loss", down=True))[:2] == ["b", "d"]
    assert runs.best("loss").run.name == "d"
    assert runs.weights("loss") == {}
    data = json.loads(re.search(r'id="data">(.*?)</script>', page(runs))[1])
    assert data["runs"][0]["values"]["loss"] == "nan"


def test_the_command(tmp_path, capsys):
    write(tmp_path, 28)
    assert main.main(["runs", str(tmp_path), "--limit", "2", "--where", "optimizer.name=sgd"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].split() == ["status", "lr", "loss", "accuracy"]
    assert said[1].startswith("run 0003  completed")
    assert said[3] == "... 12 more runs (--limit)"
    assert said[4].startswith("best loss of 14 runs: 0.433333, run 0003; lr=0.001")
    assert main.main(["runs", str(tmp_path), "--note", "run 0003", "why not"]) == 0
    noted = read_run(tmp_path / "run 0003.jsonl")
    assert (noted.notes, noted.status) == (["why not"], "completed")
    html = tmp_path / "runs.html"
    assert main.main(["runs", str(tmp_path), "--group", "lr", "--html", str(html)]) == 0
    assert html.exists()
    for wrong, text in (
        (["--metric", "f1"], "--metric: no run has 'f1'"),
        (["--note", "x", "y"], "there is no run 'x'"),
        (["--maximize", "f1"], "maximize: no run has a metric 'f1'"),
    ):
        assert main.main(["runs", str(tmp_path), *wrong]) == 1
        assert text in capsys.readouterr().err
    assert main.main(["runs", str(tmp_path / "none")]) == 1


def test_the_page_is_one_file_and_markup_in_records_stays_text(tmp_path):
    file = RunFile.of(tmp_path, "a")
    file.begin({"name": "</script><script>alert(1)</script>", "config": {}})
    for step in range(1000):
        file.log(step, {"loss": 1.0 / (step + 1)})
    file.close("completed")
    text = page(load(tmp_path))
    assert text.count("<script") == 2
    assert not re.search(r"""(src|href)\s*=|https?://|@import|url\(""", text)
    assert "default-src 'none'" in text
    data = json.loads(re.search(r'id="data">(.*?)</script>', text)[1])
    assert data["runs"][0]["name"].startswith("</script>")
    steps, values = data["runs"][0]["curves"]["loss"]
    assert len(steps) <= 201
    assert (steps[-1], values[-1]) == (999, 0.001)


def test_thousands_of_runs_load_in_a_second_of_this_processor(tmp_path):
    write(tmp_path, 300, curve=20)
    load(tmp_path)
    begin = time.process_time()
    load(tmp_path)
    assert time.process_time() - begin < 0.3  # of 300; 3,000 take 0.5 s on an idle machine


def test_the_server_wants_the_token_and_the_host(tmp_path):
    write(tmp_path, 3)
    command = [sys.executable, "-m", "hororing", "runs", str(tmp_path), "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as serving:
        stopper = threading.Timer(60, serving.kill)
        stopper.start()
        try:
            address = next(x for x in serving.stdout if x.startswith("http://127.0.0.1:")).split()[
                0
            ]
            with urllib.request.urlopen(address) as answer:
                assert b"run 0002" in answer.read()
            bare = address.partition("?")[0]
            for url, headers in (
                (bare, {}),
                (f"{bare}?token=x", {}),
                (address, {"Host": "elsewhere.example"}),
            ):
                with pytest.raises(urllib.error.HTTPError, match="403"):
                    urllib.request.urlopen(urllib.request.Request(url, headers=headers))
            body = json.dumps({"run": "run 0001", "text": "look here"}).encode()
            urllib.request.urlopen(urllib.request.Request(address, data=body)).close()
            with pytest.raises(urllib.error.HTTPError, match="400"):
                urllib.request.urlopen(urllib.request.Request(address, data=b"[]"))
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(urllib.request.Request(bare, data=body))
        finally:
            stopper.cancel()
            serving.kill()
    assert read_run(tmp_path / "run 0001.jsonl").notes == ["look here"]


def test_export_for_tensorboard(tmp_path):
    pytest.importorskip("tensorboard.summary")
    from hororing.toolkit.tracking import TensorBoard

    write(tmp_path / "runs", 2)
    runs = load(tmp_path / "runs")
    assert export((row.run for row in runs.rows), [TensorBoard(str(tmp_path / "logs"))]) == 2
    assert len(list((tmp_path / "logs").glob("run 000?/*"))) == 2

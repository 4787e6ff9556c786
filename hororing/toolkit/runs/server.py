"""Serves the page to the user of this machine: on loopback, with a token in the address."""

from __future__ import annotations

import hmac
import http.server
import json
import secrets
import urllib.parse
from collections.abc import Callable

_MOST_BYTES = 64 << 10  # of a note
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def serve(page: Callable[[], str], note: Callable[[str, str], None], port: int) -> None:
    """Serve until Ctrl-C. The page is made anew for each request.

    A request needs the token, and the Host that was printed: a page of another site that a browser
    shows can reach the port as well.

    Parameters
    ----------
    note : callable
        Adds a text to a run's record.
    port : int
        0: any.
    """
    token = secrets.token_urlsafe(24)

    class Handler(http.server.BaseHTTPRequestHandler):
        timeout = 10.0  # seconds: a client that is silent does not hold the others up

        def do_GET(self) -> None:
            if self._allowed():
                self._answer(200, page(), "text/html; charset=utf-8")

        def do_POST(self) -> None:
            if not self._allowed():
                return
            try:
                length = int(self.headers.get("Content-Length", "0"))
                if not 0 < length <= _MOST_BYTES:
                    raise ValueError(f"a note has at most {_MOST_BYTES} bytes")
                given = json.loads(self.rfile.read(length))
                note(str(given["run"]), str(given["text"]))
            except (KeyError, TypeError, ValueError, OSError) as error:
                self._answer(400, str(error))
            else:
                self._answer(200, "noted")

        def _allowed(self) -> bool:
            address = urllib.parse.urlsplit(self.path)
            given = urllib.parse.parse_qs(address.query).get("token", [""])[0]
            known = hmac.compare_digest(given.encode(), token.encode())
            if known and address.path == "/" and self.headers.get("Host") == host:
                return True
            self._answer(403, "open the address that python -m hororing runs has printed")
            return False

        def _answer(self, code: int, text: str, kind: str = "text/plain; charset=utf-8") -> None:
            data = text.encode()
            self.send_response(code)
            for name, value in {**_HEADERS, "Content-Type": kind}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler) as serving:
        serving.daemon_threads = True
        host = f"127.0.0.1:{serving.server_address[1]}"
        print(f"http://{host}/?token={token}  (Ctrl-C ends it)", flush=True)
        try:
            serving.serve_forever()
        except KeyboardInterrupt:
            return

"""`hororing page`: serves the page of the jobs that run here, beside any launcher.

hororun starts it for --page, and tells it through standard input which job and which hosts.
"""

from __future__ import annotations

import argparse
import getpass
import os
import shlex
import socket
import sys
import threading

from hororing.watch.hub import Hub, token
from hororing.watch.server import Server

NONE = "-"  # no job has this id


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("--port", type=int, default=0, help="of 127.0.0.1 (a free one)")
    parser.add_argument("--job", help="this job only, by its id")
    parser.add_argument("--hosts", default="", metavar="a,b", help="other hosts of the job")
    parser.add_argument(
        "--rsh-agent", default="ssh -T --", metavar="CMD", help="CMD HOST COMMAND runs it there"
    )
    parser.add_argument(
        "--token-file", metavar="FILE", help="what to log in with, in a file of mode 0600"
    )
    parser.add_argument(
        "--all-users", action="store_true", help="for root: other users' processes, too"
    )
    parser.add_argument("--of-hororun", action="store_true", help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Serve until ^C, or until hororun ends."""
    try:
        secret = token(arguments.token_file)
    except (OSError, ValueError) as error:
        print(f"hororing page: {error}", file=sys.stderr)
        return 1
    names = [name for name in arguments.hosts.split(",") if name]
    rsh = shlex.split(arguments.rsh_agent)
    # hororun tells which job is its own: until then nothing is shown.
    job = NONE if arguments.of_hororun else arguments.job
    hub = Hub(job, names, rsh, arguments.all_users)
    try:
        server = Server(arguments.port, hub, secret)
    except (OSError, OverflowError) as error:
        print(f"hororing page: port {arguments.port}: {error}", file=sys.stderr)
        return 1
    shown = "" if arguments.token_file else f"?token={secret}"
    print(address(server.port, shown), file=sys.stderr, flush=True)
    serving = threading.Thread(target=server.serve_forever, args=(0.2,), daemon=True)
    serving.start()
    try:
        if arguments.of_hororun:
            obey(hub)
        else:
            serving.join()
    except KeyboardInterrupt:
        pass
    server.shutdown()
    hub.close()
    return 0


def address(port: int, query: str) -> str:
    """How to reach the page, from here and from elsewhere."""
    url = f"http://127.0.0.1:{port}/{query}"
    host = socket.gethostname()
    return (
        f"page: {url}\n"
        f"      from elsewhere, first: ssh -L {port}:127.0.0.1:{port} {getpass.getuser()}@{host}"
    )


def obey(hub: Hub) -> None:
    """Read from hororun: "job ID" once it is known, "host NAME" of another host, "note TEXT".

    And "process N", the number of a process that an elastic job has started.
    """
    os.write(1, b"ready\n")
    for line in sys.stdin:
        what, _, name = line.rstrip("\n").partition(" ")
        if what == "job":
            hub.set_job(name)
        elif what == "host":
            hub.add_host(name)
        elif what == "note":
            hub.note(name)
        elif what == "process":
            hub.processes = max(hub.processes, int(name) + 1)

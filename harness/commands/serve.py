"""`harness serve`: serves the store as web pages to browsers on this machine."""

from __future__ import annotations

import argparse
import contextlib
import errno
import signal
import socket
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from harness.errors import OperatorError, how_to_get
from harness.serve.guard import App
from harness.signals import ended_by_signals
from harness.store import Store
from harness.units import plural

if TYPE_CHECKING:
    import uvicorn

__all__ = ["make_server", "require_serve", "serve_command"]

ADDRESS = "127.0.0.1"
MAX_HEAD_BYTES = 32_768
"""Limit of a request's line and headers."""

GRACE_S = 5
"""How long the shutdown waits for pending answers."""


def serve_command(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGHUP, which return 0, or SIGTERM, which exits with 143 after a clean shutdown. Raises
    OperatorError if a package or the store is missing, or the port is not available."""
    require_serve()
    from harness.serve.app import RunList, make_app
    from harness.serve.guard import loopback_hosts
    from harness.serve.launch import Launcher

    store = Store(arguments.store)
    if not arguments.allow_run:
        store.require()
    listener = _listen(arguments.port)
    port = listener.getsockname()[1]
    launcher = Launcher(store.root) if arguments.allow_run else None
    with contextlib.closing(listener):
        runs = RunList(store)
        number = len(runs.get(is_kept=True).runs)  # read before the first page is requested
        # Live views never end on their own: they poll whether the server is shutting down.
        server = make_server(
            make_app(runs, hosts=loopback_hosts(port), launcher=launcher, is_ending=lambda: bool(server.should_exit))
        )
        what = "can start runs" if arguments.allow_run else "read-only"
        print(f"http://{ADDRESS}:{port}/  {plural(number, 'run')}; {what}; stop it with Ctrl-C", flush=True)
        with ended_by_signals(), _ended_by_sighup(server):
            try:
                server.run(sockets=[listener])
            except KeyboardInterrupt:
                pass
            finally:
                if launcher is not None:
                    launcher.stop(_say)
    return 0


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the terminal may be closed; the run must be stopped anyway
        print(f"harness: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _ended_by_sighup(server: uvicorn.Server) -> Iterator[None]:
    """Closing the terminal (SIGHUP) ends the server as Ctrl-C does, and a run started here; under nohup it goes on."""

    def end(number: int, frame: object) -> None:
        server.should_exit = True

    before = signal.getsignal(signal.SIGHUP)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def make_server(app: App) -> uvicorn.Server:
    """A server for an application: HTTP/1.1 only, requests bounded in size and time, proxy headers ignored."""
    import uvicorn

    from harness.serve.accepting import MAX_CONNECTIONS, RoomyServer
    from harness.serve.connections import PatientProtocol

    config = uvicorn.Config(
        app, loop="asyncio", http=PatientProtocol, ws="none", lifespan="off", log_level="warning", access_log=False,
        proxy_headers=False, server_header=False, limit_concurrency=MAX_CONNECTIONS,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES, timeout_graceful_shutdown=GRACE_S,
    )  # fmt: skip
    return RoomyServer(config)


def require_serve() -> None:
    """Raise OperatorError, with the fix, if the packages of the `serve` extra are missing."""
    for name in ("starlette", "uvicorn"):
        try:
            __import__(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            mend = how_to_get("'splitbrain[serve]'").replace("use CPython", "install splitbrain[serve]")
            raise OperatorError(f"harness serve needs {name}: {mend}") from None


def _listen(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((ADDRESS, port))
        listener.listen()  # requests before the server's start wait for it
    except OSError as error:
        listener.close()
        reason = "already in use" if error.errno == errno.EADDRINUSE else error.strerror
        raise OperatorError(f"--port {port}: {reason}: choose another port, or 0 for any free one") from None
    return listener

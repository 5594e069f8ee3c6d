"""The cluster daemon: the process that keeps a cluster up between `harness cluster up` and `harness cluster down`.

A cluster lives as long as the harness that created it, which makes cleanup reliable. So `up` starts this process in the
background; it creates the cluster, starts the system, and then answers requests on a Unix socket in the cluster's
directory, one JSON line each way. It is the harness of its run: `harness clean` leaves it alone while it is alive, and
removes what it leaves behind when it is killed.

    python -m harness.cluster_daemon SPEC     a Spec as JSON; the first line printed reports that it is up, or why not
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from harness import registry
from harness.clusters.base import RemoteHosts, RunsCommands
from harness.clusters.own_machine import short_socket_path
from harness.errors import HarnessError, OperatorError, SystemUnderTestError
from harness.run_state import RunState
from harness.systems.base import RefusesFaults
from nemesis.mechanisms.shell import ShellError

__all__ = ["CONTROL", "DESCRIPTION", "MAX_MESSAGE_BYTES", "NO_SYSTEM", "ClusterDaemon", "Spec", "connect_control"]

CONTROL = "control.sock"
LOCK = "lock"
DESCRIPTION = "cluster.json"
NO_SYSTEM = "none"

MAX_MESSAGE_BYTES = 8 << 20
"""Limit of a request or answer: the largest is a command's output, which agents cut at a mebibyte or two."""

LOG_SUFFIX = ".log"
"""Suffix of the logs of programs' output (Program.log_name)."""

EXEC_TIMEOUT_S = 600.0
"""For a command of `cluster exec`."""

STATUS_TIMEOUT_S = 2.0
_OPERATION_TIMEOUT_S = 3.0
_BACKLOG = 16
_PORTS_WITHOUT_SYSTEM = (10911,)
"""Ports of hosts without a system: one port, so that what works on any cluster can be tried."""

_LAST_ANSWER_TIMEOUT_S = 5.0
"""For the client that requested `down` to read its answer."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """The cluster to keep up; `directory` has the control socket, `work_dir` the hosts' files of this session."""

    name: str
    directory: str
    work_dir: str
    cluster: str
    reason: str
    nodes: int
    system: str
    options: Mapping[str, str]


def connect_control(directory: str) -> socket.socket:
    """A connection to the daemon of the cluster in `directory`. Raises OSError if there is none."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        with short_socket_path(directory, CONTROL) as path:
            connection.connect(path)
    except BaseException:
        connection.close()
        raise
    return connection


@contextlib.contextmanager
def _only_daemon(spec: Spec) -> Iterator[None]:
    """Lock the cluster's directory during a `with` block: a second daemon would overwrite the files of the first one's
    hosts and take over its socket, so that no command could reach the first. Raises OperatorError."""
    lock = os.open(os.path.join(spec.directory, LOCK), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            mend = "wait until it has ended, or choose another --name"
            raise OperatorError(f"cluster {spec.name} is being brought up or taken down: {mend}") from None
        except OSError as error:  # a file system without locks
            logger.warning("%s is not held: %s", spec.directory, error)
        yield
    finally:
        os.close(lock)


class ClusterDaemon:
    """A cluster with a system on it; answers requests about it."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._cluster: Any = None
        self._system: Any = None
        self._down = asyncio.Event()
        self._is_down: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        self._answering: set[asyncio.Task[Any]] = set()

    async def serve(self) -> None:
        """Bring everything up, report it, serve until `down` or SIGTERM, take everything down.

        Raises OperatorError or SystemUnderTestError if that fails, HarnessError if something could not be taken down.
        """
        spec = self._spec
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._down.set)
        system_class = None if spec.system == NO_SYSTEM else registry.load("systems", spec.system)
        state = RunState.create(f"{spec.name}-{secrets.token_hex(3)}")
        server: asyncio.Server | None = None
        try:
            self._cluster = registry.load("clusters", spec.cluster)(
                node_count=spec.nodes,
                run=state,
                work_dir=spec.work_dir,
                ports=_PORTS_WITHOUT_SYSTEM if system_class is None else system_class.ports,
                extra_hosts=() if system_class is None else system_class.extra_hosts,
                **spec.options,
            )
            try:
                await self._cluster.start()
                if system_class is not None:
                    self._system = system_class(
                        cluster=self._cluster,
                        settings={},
                        keys=1,
                        log_dir=spec.work_dir,
                        operation_timeout_s=_OPERATION_TIMEOUT_S,
                    )
                    await self._system.start()
                server = await self._listen()
                self._describe(state.run_id)
                print(json.dumps({"up": await self._status()}), flush=True)
                await self._down.wait()
            finally:
                problems = await self._take_down()
                self._is_down.set_result(problems)
            if problems:
                raise HarnessError("; ".join(problems))
        finally:
            if server is not None:
                server.close()
                if self._answering:
                    await asyncio.wait(self._answering, timeout=_LAST_ANSWER_TIMEOUT_S)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(spec.directory, CONTROL))
            state.close()

    async def _take_down(self) -> list[str]:
        """Stop everything; returns what went wrong."""
        problems = []
        for work in (self._system, self._cluster):
            if work is not None:
                try:
                    await work.stop()
                except Exception as error:
                    logger.exception("taking down")
                    problems.append(str(error) or type(error).__name__)
        return problems

    async def _listen(self) -> asyncio.Server:
        listener = socket.socket(socket.AF_UNIX)
        listener.setblocking(False)
        with short_socket_path(self._spec.directory, CONTROL) as path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            listener.bind(path)
        os.chmod(os.path.join(self._spec.directory, CONTROL), 0o600)
        return await asyncio.start_unix_server(self._serve, sock=listener, limit=MAX_MESSAGE_BYTES, backlog=_BACKLOG)

    def _describe(self, run_id: str) -> None:
        with open(os.path.join(self._spec.directory, DESCRIPTION), "w", encoding="utf-8") as file:
            json.dump({**dataclasses.asdict(self._spec), "run_id": run_id, "pid": os.getpid()}, file, indent=2)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
        try:
            line = await reader.readline()
            if line:
                answer = await self._answer(json.loads(line))
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        except (OSError, ValueError) as error:
            logger.info("a request could not be answered: %s", error)
        finally:
            writer.close()

    async def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            match request.get("op"):
                case "status":
                    return await self._status()
                case "down":
                    self._down.set()
                    problems = await asyncio.shield(self._is_down)
                    return {"pid": os.getpid(), "work_dir": self._spec.work_dir, "problems": problems}
                case "logs":
                    return await self._logs(str(request["host"]))
                case "exec":
                    return await self._exec(str(request["host"]), [str(word) for word in request["argv"]])
                case other:
                    return {"error": f"unknown request {other!r}"}
        except (OperatorError, ShellError, OSError, ValueError) as error:
            return {"error": str(error)}
        except Exception as error:
            logger.exception("a request failed")
            return {"error": f"{type(error).__name__}: {error}"}

    @property
    def _hosts(self) -> list[str]:
        return [*self._cluster.hosts, *self._cluster.extra_hosts]

    def _known(self, host: str) -> str:
        if host not in self._hosts:
            raise OperatorError(f"there is no host {host}; known: {', '.join(self._hosts)}")
        return host

    async def _status(self) -> dict[str, Any]:
        """For every host its address, whether its program runs, and the role and term that it reports."""
        system = self._system
        tells_role = not isinstance(system, RefusesFaults) or system.tells_leader

        async def one(host: str) -> dict[str, Any]:
            row: dict[str, Any] = {"host": host, "address": self._cluster.bind_address(host), "program": None}
            if system is None or (process := system.process(host)) is None:
                return row
            status = process.exit_status()
            row["program"] = "runs" if status is None else f"ended with status {status}"
            if host in self._cluster.hosts and status is None and tells_role:
                said = await system.status(host, timeout_s=STATUS_TIMEOUT_S)
                row |= {"role": said.get("role"), "term": said.get("term")} if said else {"role": "no answer"}
            return row

        rows = await asyncio.gather(*(one(host) for host in self._hosts))
        return {**dataclasses.asdict(self._spec), "pid": os.getpid(), "hosts": rows}

    async def _logs(self, host: str) -> dict[str, Any]:
        """Paths of a host's logs on this machine, fetched if needed. Other files next to them (a disk image, fault
        state) are left out."""
        self._known(host)
        if isinstance(self._cluster, RemoteHosts):
            problems = await self._cluster.fetch([host])
            if problems:
                raise OperatorError(f"cannot fetch all logs: {problems[0]}")
        directory = os.path.join(self._spec.work_dir, host)
        names = sorted(os.listdir(directory)) if os.path.isdir(directory) else []
        paths = [os.path.join(directory, name) for name in names]
        return {"paths": [path for path in paths if path.endswith(LOG_SUFFIX) and os.path.isfile(path)]}

    async def _exec(self, host: str, argv: list[str]) -> dict[str, Any]:
        """Run a command on a host, next to its programs, and as root if its agent is."""
        self._known(host)
        if not isinstance(self._cluster, RunsCommands):
            raise OperatorError(f"cannot run commands on the hosts of cluster {self._spec.cluster}")
        status, output, errors = await self._cluster.run(host, argv, timeout_s=EXEC_TIMEOUT_S)
        return {"status": status, "stdout": output, "stderr": errors}


async def _serve(spec: Spec) -> None:
    with _only_daemon(spec):
        await ClusterDaemon(spec).serve()


def main(arguments: list[str]) -> int:
    """Keep the specified cluster up; returns 0 if it was taken down cleanly, 1 otherwise."""
    spec = Spec(**json.loads(arguments[0]))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        asyncio.run(_serve(spec))
    except (OperatorError, SystemUnderTestError, HarnessError) as error:
        kind = "operator" if isinstance(error, OperatorError) else "harness"
        with contextlib.suppress(BrokenPipeError):  # the `up` command is long gone
            print(json.dumps({"error": str(error), "fault": kind}), flush=True)
        logger.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`harness cluster up|status|down|logs|exec`: a cluster that stays up, owned by a daemon."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import select
import subprocess
import sys
import time
from datetime import UTC, datetime
from typing import Any

from rich.table import Table

from harness import registry
from harness.cli_cluster import cluster_options_of
from harness.cluster_daemon import CONTROL, MAX_MESSAGE_BYTES, NO_SYSTEM, Spec, connect_control
from harness.clusters import user_namespace
from harness.clusters.abilities import OwnWorld
from harness.clusters.base import ClusterUnavailable
from harness.clusters.options import require_cluster
from harness.clusters.select import choose
from harness.errors import HarnessError, OperatorError
from harness.report import OutputConsole
from harness.run_state import process_start_ticks
from harness.test import MAX_NODES

__all__ = ["cluster_command"]

UP_TIMEOUT_S = 600.0
"""For hosts and system to come up; building an image takes the longest."""

DOWN_TIMEOUT_S = 300.0
"""For fetching the data and taking everything down."""

_ANSWER_TIMEOUT_S = 660.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")


def cluster_command(arguments: argparse.Namespace) -> int:
    """Perform one action on one cluster; returns the exit status. Raises OperatorError, HarnessError."""
    if not _NAME.fullmatch(arguments.name):
        raise OperatorError(f"--name {arguments.name!r}: letters, digits, '_' and '-' only, 32 at most")
    directory = os.path.join(os.path.abspath(arguments.dir), arguments.name)
    match arguments.cluster_action:
        case "up":
            return _up(arguments, directory)
        case "status":
            _print_status(_ask(directory, arguments.name, {"op": "status"}))
            return 0
        case "down":
            return _down(directory, arguments.name)
        case "logs":
            return _logs(directory, arguments)
        case _:
            return _exec(directory, arguments)


def _up(arguments: argparse.Namespace, directory: str) -> int:
    if not 1 <= arguments.nodes <= MAX_NODES:
        raise OperatorError(f"--nodes must be 1 to {MAX_NODES}, not {arguments.nodes}")
    if _is_up(directory):
        raise OperatorError(
            f"cluster {arguments.name} is already up: harness cluster down --name {arguments.name}, "
            "or choose another --name"
        )
    try:
        choice = choose(arguments.cluster)
    except ClusterUnavailable as error:
        raise OperatorError(f"--cluster {arguments.cluster}: {error}") from None
    cluster_class = registry.load("clusters", choice.name)
    if isinstance(cluster_class, OwnWorld):
        raise OperatorError(f"--cluster {choice.name}: a simulated cluster lasts only as long as its run")
    if arguments.system != NO_SYSTEM:
        registry.load("systems", arguments.system)
    options = cluster_options_of(arguments)
    require_cluster(cluster_class, options)
    if "inventory" in options:
        options["inventory"] = os.path.abspath(options["inventory"])
    spec = Spec(
        name=arguments.name,
        directory=directory,
        work_dir=os.path.join(directory, f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}"),
        cluster=choice.name,
        reason=choice.reason,
        nodes=arguments.nodes,
        system=arguments.system,
        options=options,
    )
    argv = [sys.executable, "-m", "harness.cluster_daemon", json.dumps(dataclasses.asdict(spec))]
    environment = None
    if choice.in_user_namespace:
        argv = user_namespace.reexec_command(argv) or argv
        environment = user_namespace.reexec_environment()
    try:
        os.makedirs(directory, exist_ok=True)
        log = open(os.path.join(directory, "daemon.log"), "ab")  # noqa: SIM115 - closed below
    except OSError as error:
        raise OperatorError(f"--dir: cannot write in {directory}: {error.strerror}") from None
    with log:
        daemon = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True, env=environment
        )
    try:
        answer = _first_line(daemon, directory)
    except BaseException:
        daemon.terminate()
        daemon.wait()
        raise
    if "up" not in answer:
        daemon.wait()
        raise (OperatorError if answer.get("fault") == "operator" else HarnessError)(answer["error"])
    _print_status(answer["up"])
    return 0


def _first_line(daemon: subprocess.Popen[bytes], directory: str) -> dict[str, Any]:
    """The daemon's first message: that it is up, or why not. Raises HarnessError."""
    assert daemon.stdout is not None
    if not select.select([daemon.stdout], [], [], UP_TIMEOUT_S)[0]:
        raise HarnessError(f"the cluster was not up within {UP_TIMEOUT_S:g} s: see {directory}/daemon.log")
    line = daemon.stdout.readline()
    if not line:
        raise HarnessError(f"the cluster's daemon ended: see {directory}/daemon.log")
    return dict(json.loads(line))


def _is_up(directory: str) -> bool:
    try:
        connect_control(directory).close()
    except OSError:
        return False
    return True


def _ask(directory: str, name: str, request: dict[str, Any]) -> dict[str, Any]:
    """The daemon's answer to a request. Raises OperatorError if there is no daemon or it refuses."""
    try:
        connection = connect_control(directory)
    except OSError:
        died = os.path.exists(os.path.join(directory, CONTROL))
        hint = "its daemon died: harness clean removes what it left" if died else f"harness cluster up --name {name}"
        raise OperatorError(f"cluster {name} is not up ({hint})") from None
    with connection:
        connection.settimeout(_ANSWER_TIMEOUT_S)
        connection.sendall(json.dumps(request).encode() + b"\n")
        data = b""
        while not data.endswith(b"\n") and len(data) <= MAX_MESSAGE_BYTES:
            try:
                piece = connection.recv(1 << 16)
            except TimeoutError:
                raise HarnessError(f"the daemon of cluster {name} does not answer") from None
            if not piece:
                break
            data += piece
    if not data:
        raise HarnessError(f"the daemon of cluster {name} ended without an answer: see {directory}/daemon.log")
    answer = dict(json.loads(data))
    if "error" in answer:
        raise OperatorError(str(answer["error"]))
    return answer


def _print_status(status: dict[str, Any]) -> None:
    console = OutputConsole(highlight=False)
    console.print(f"cluster {status['name']}: {status['cluster']} ({status['reason']}), system {status['system']}")
    table = Table("host", "address", "program", "role", "term", box=None, padding=(0, 2, 0, 0))
    for row in status["hosts"]:
        table.add_row(*(str(row.get(name) or "-") for name in ("host", "address", "program", "role", "term")))
    console.print(table)


def _down(directory: str, name: str) -> int:
    answer = _ask(directory, name, {"op": "down"})
    pid = int(answer["pid"])
    start_ticks = process_start_ticks(pid)
    deadline_s = time.monotonic() + DOWN_TIMEOUT_S
    while start_ticks is not None and process_start_ticks(pid) == start_ticks:
        if time.monotonic() > deadline_s:
            raise HarnessError(
                f"cluster {name} did not go down within {DOWN_TIMEOUT_S:g} s: see {directory}/daemon.log"
            )
        time.sleep(0.05)
    if answer["problems"]:
        raise HarnessError(
            f"taking cluster {name} down: {'; '.join(answer['problems'])} (try again with harness clean)"
        )
    print(f"cluster {name} is down; its data and logs are in {answer['work_dir']}")
    return 0


def _logs(directory: str, arguments: argparse.Namespace) -> int:
    paths = _ask(directory, arguments.name, {"op": "logs", "host": arguments.host})["paths"]
    for path in paths:
        if len(paths) > 1:
            print(f"==> {path} <==")
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                sys.stdout.write(line)
    return 0


def _exec(directory: str, arguments: argparse.Namespace) -> int:
    argv = arguments.argv[1:] if arguments.argv[:1] == ["--"] else arguments.argv
    if not argv:
        raise OperatorError("no command given: harness cluster exec HOST -- COMMAND")
    answer = _ask(directory, arguments.name, {"op": "exec", "host": arguments.host, "argv": argv})
    sys.stdout.write(answer["stdout"])
    sys.stderr.write(answer["stderr"])
    status = int(answer["status"])
    return status if status >= 0 else 128 - status

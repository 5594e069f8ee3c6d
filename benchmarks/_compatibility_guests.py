"""Sets up both brokers for comparison with their name servers, and runs unmodified third-party clients against each."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks._apache_broker import APACHE_VERSION, serve_apache, serve_apache_name_server, serve_apache_proxy
from benchmarks.crash_loop import wait_ready
from benchmarks.store_exchange import serve_ours
from harness.errors import OperatorError
from harness.sdk.install import fetched, maven, npm
from node.remoting import Command, RemotingClient, RequestCode

__all__ = [
    "ALI_ONS_VERSION",
    "GO_VERSION",
    "Side",
    "build_go_peer",
    "create_topics",
    "run_ali_ons",
    "run_grpc",
    "run_java",
    "run_mqadmin",
    "run_peer",
    "serve_both_sides",
]

PEERS = Path(__file__).resolve().parent.parent / "tests" / "node" / "interop" / "java"
ALI_ONS_VERSION, GO_VERSION, GRPC_VERSION = "3.12.0", "v2.1.2", "5.0.7"
CLUSTER, BROKER_NAME = "splitbrain", "broker-a"
ROUTE_TIMEOUT_S = 60.0
"""Timeout for routes; a broker that failed to register with its name server tries again after half a minute."""
PEER_TIMEOUT_S = 300
"""Timeout of all calls of a client together, on a busy machine."""
MOVED_IN_5 = ("org.apache.rocketmq.common.protocol.heartbeat.", "org.apache.rocketmq.remoting.protocol.heartbeat.")
NO_LOG = '<configuration><root level="OFF"/></configuration>'
OUR_CONFIGURATION = """
self_id = "n1"
listen = "127.0.0.1:10911"
data_dir = "{data_dir}"
name_servers = ["{name_server}"]
[classic]
[transactions]
timeout_s = 1
check_interval_s = 1
"""
APACHE_SETTINGS = {
    **{"brokerClusterName": CLUSTER, "enablePropertyFilter": "true", "mapedFileSizeCommitLog": 64 << 20},
    **{"transactionTimeOut": 1000, "transactionCheckInterval": 1000, "waitTimeMillsInSendQueue": 10_000},
    **{"osPageCacheBusyTimeOutMills": 20_000},
}
"""Settings by which transactions are checked quickly, as on ours, and messages are not refused on a busy machine."""


class Side(NamedTuple):
    """A broker with its name server, and a directory for the clients that run against it."""

    name: str
    name_server: str
    broker: str
    directory: Path


@contextlib.contextmanager
def serve_both_sides(work: Path, version: str = APACHE_VERSION) -> Iterator[tuple[Side, Side]]:
    """Run Apache's broker and name server, and ours, during the block. Raises OperatorError if Apache's cannot be
    fetched, AssertionError if one does not come up."""
    with contextlib.ExitStack() as stack:
        theirs, ours = work / "apache", work / "ours"
        for directory in (theirs, ours):
            directory.mkdir(parents=True)
        name_server = stack.enter_context(serve_apache_name_server(theirs / "name-server", version))
        broker = stack.enter_context(
            serve_apache(
                theirs / "store", theirs / "broker", version=version, namesrvAddr=name_server, **APACHE_SETTINGS
            )
        )
        stack.callback(broker.process.kill)  # an orderly stop takes six seconds, and the store is not needed
        our_name_server = stack.enter_context(_our_name_server(ours))
        configuration = ours / "broker.toml"
        configuration.write_text(
            OUR_CONFIGURATION.format(data_dir=ours / "data", name_server=our_name_server), encoding="utf-8"
        )
        our_broker = stack.enter_context(serve_ours(configuration))
        yield Side("apache", name_server, broker.address, theirs), Side("ours", our_name_server, our_broker, ours)


@contextlib.contextmanager
def _our_name_server(directory: Path) -> Iterator[str]:
    log = directory / "name-server.log"
    command = [sys.executable, "-m", "node", "nameserver", "--listen", "127.0.0.1:0"]
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            yield wait_ready(log, process, 0)
        finally:
            process.terminate()


async def _wait_for_routes(client: RemotingClient, name_server: str, topics: Iterable[str]) -> None:
    """Wait until the name server has routes of the topics: a broker may register a new topic some time later, and
    clients get routes only there."""
    async with asyncio.timeout(ROUTE_TIMEOUT_S):
        for topic in topics:
            fields = {"topic": topic}
            while True:
                command = Command.request(RequestCode.GET_ROUTE_INFO_BY_TOPIC, fields)
                if (await client.invoke(name_server, command, timeout_ms=20_000)).code == 0:
                    break
                await asyncio.sleep(0.1)


async def create_topics(
    side: Side, topics: Mapping[str, int], *, types: Mapping[str, str] | None = None, ordered_group: str = ""
) -> None:
    """Create topics (name -> number of queues), with message types from `types`, and a group for ordered consumption.
    Raises AssertionError if the broker refuses, TimeoutError if the name server does not get their routes."""
    client = RemotingClient()
    try:
        for topic, queues in topics.items():
            fields: dict[str, Any] = {"topic": topic, "defaultTopic": "TBW102", "readQueueNums": queues, "perm": 6}
            fields |= {"writeQueueNums": queues, "topicFilterType": "SINGLE_TAG", "topicSysFlag": 0, "order": "false"}
            fields["attributes"] = f"+message.type={types[topic]}" if types and topic in types else ""
            command = Command.request(RequestCode.UPDATE_AND_CREATE_TOPIC, fields)
            reply = await client.invoke(side.broker, command, timeout_ms=20_000)
            assert reply.code == 0, (side.name, topic, reply.remark)
        await _wait_for_routes(client, side.name_server, topics)
        if ordered_group:
            body = json.dumps({"groupName": ordered_group, "consumeMessageOrderly": True}).encode()
            command = Command.request(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTION_GROUP, {}, body)
            assert (await client.invoke(side.broker, command, timeout_ms=20_000)).code == 0
    finally:
        await client.close()


def run_java(side: Side, peer: str, version: str, *arguments: str, **properties: str) -> list[dict[str, Any]]:
    """Run a peer of `tests/node/interop/java` with rocketmq-tools of a version; returns the objects that it prints, one
    per line. Raises OperatorError if Maven cannot fetch the tools, AssertionError if the peer fails."""
    recipe = maven(f"org.apache.rocketmq:rocketmq-tools:{version}")
    directory = side.directory / f"{peer}-{version}"
    (directory / "conf").mkdir(parents=True)
    for name in ("logback.xml", "conf/logback_tools.xml"):
        (directory / name).write_text(NO_LOG, encoding="utf-8")
    text = (PEERS / f"{peer}.java").read_text(encoding="utf-8")
    source = directory / f"{peer}.java"
    source.write_text(text.replace(*MOVED_IN_5) if version.startswith("5") else text, encoding="utf-8")
    known = {
        **{
            "user.home": directory,
            "java.io.tmpdir": directory,
            "rocketmq.home.dir": directory,
            "rocketmq.client.logUseSlf4j": "true",
        },
        **{"logback.configurationFile": directory / "logback.xml", **properties},
    }
    command = [
        *("java", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xmx256m"),
        *(f"-D{name}={value}" for name, value in known.items()),
        *("-cp", recipe.environment(fetched(recipe))["CLASSPATH"], str(source), *arguments),
    ]
    return run_peer(command, directory)


def run_peer(
    command: Sequence[str], directory: Path, environment: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    """Run a peer, which must succeed; returns the objects that it prints, one per line. Raises AssertionError."""
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, timeout=PEER_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr).decode(errors="replace")[-3000:]
    return [json.loads(line) for line in done.stdout.decode().splitlines() if line.startswith('{"')]


def run_grpc(side: Side) -> list[dict[str, Any]]:
    """Run tests/node/interop/java/GrpcPeer.java at a proxy in front of the broker. Returns and raises as `run_java`."""
    recipe = maven(f"org.apache.rocketmq:rocketmq-client-java:{GRPC_VERSION}")
    class_path = recipe.environment(fetched(recipe))["CLASSPATH"]
    with serve_apache_proxy(side.name_server, CLUSTER, side.directory / "proxy") as proxy:
        command = ["java", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", f"-Duser.home={side.directory}"]
        command.append(f"-Djava.io.tmpdir={side.directory}")
        return run_peer([*command, "-cp", class_path, str(PEERS / "GrpcPeer.java"), proxy], side.directory)


def build_go_peer(directory: Path) -> Path:
    """Build the program of tests/node/interop/go with an unmodified rocketmq-client-go; returns its path. Raises
    OperatorError if Go cannot fetch and build that in time, AssertionError if the peer's own code is wrong."""
    go = shutil.which("go")
    if go is None:
        raise OperatorError("go is not installed")
    directory.mkdir(parents=True)
    shutil.copy(PEERS.parent / "go" / "peer.go", directory)
    module = f"github.com/apache/rocketmq-client-go/v2@{GO_VERSION}"
    environment = {**os.environ, "CGO_ENABLED": "0"}
    build = ("build", "-gcflags=all=-N -l", "-ldflags=-s -w", "-o", "peer", ".")  # quick to build: it is run once
    for words in (("mod", "init", "peer"), ("get", module), build):
        try:
            done = subprocess.run(
                [go, *words], cwd=directory, env=environment, capture_output=True, text=True, timeout=600, check=False
            )
        except subprocess.TimeoutExpired:
            raise OperatorError(f"go {' '.join(words)} takes longer than ten minutes") from None
        assert done.returncode == 0 or words[0] != "build", done.stderr[-2000:]
        if done.returncode != 0:
            raise OperatorError(f"go {' '.join(words)}: {done.stderr.strip()[-200:]}")
    return directory / "peer"


def run_ali_ons(side: Side, messages: int, **task: Any) -> list[dict[str, Any]]:
    """Run tests/node/interop/ali_ons_peer.js on a task, with an unmodified ali-ons, until it ends or has received
    `messages` messages; returns the objects that it prints. Raises OperatorError if npm cannot fetch ali-ons,
    AssertionError if the peer fails."""
    recipe = npm(f"ali-ons@{ALI_ONS_VERSION}")
    environment = {**os.environ, **recipe.environment(fetched(recipe))}
    command = ["node", str(PEERS.parent / "ali_ons_peer.js"), json.dumps({"nameServer": side.name_server, **task})]
    said: list[dict[str, Any]] = []
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        stop = threading.Timer(PEER_TIMEOUT_S, process.kill)
        stop.start()
        try:
            assert process.stdout is not None and process.stdin is not None
            for line in process.stdout:
                said.append(json.loads(line))
                if sum("body" in each for each in said) == messages and not process.stdin.closed:
                    process.stdin.close()
        finally:
            stop.cancel()
            process.kill()
    return said


def run_mqadmin(side: Side, version: str, lines: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Mqadmin's answer to each command line, in the format of MqadminPeer.java. Message bodies that mqadmin writes to
    files are removed."""
    script = side.directory / "mqadmin.txt"
    script.write_text("".join("\t".join(line) + "\n" for line in lines), encoding="utf-8")
    answers = run_java(side, "MqadminPeer", version, side.name_server, str(script))
    for answer in answers:
        for line in answer["out"].splitlines():
            if line.startswith("Message Body Path:"):
                Path(line.partition(":")[2].strip()).unlink(missing_ok=True)
    return answers

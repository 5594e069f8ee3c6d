"""A local broker of Apache RocketMQ 4.9.7 for benchmarks and tests, started on a store and stopped in an orderly way,
with its name server and proxy."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.sdk.install import fetched, maven
from harness.systems.rocketmq import LOG_TO_CONSOLE, LOGGING_OF_5, OPENED, PACKAGES

__all__ = [
    "APACHE_VERSION",
    "PROXY_VERSION",
    "ApacheBroker",
    "apache_classpath",
    "serve_apache",
    "serve_apache_name_server",
    "serve_apache_proxy",
]

APACHE_VERSION = "4.9.7"
PROXY_VERSION = "5.3.3"
"""Version of the gRPC proxy, and of the broker and name server that it needs."""
START_TIMEOUT_S = 300.0
"""Timeout for the start of a JVM, and for building queues and index from a large log, on a busy machine."""
STOP_TIMEOUT_S = 120.0
SHORT_LIVED = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
"""Java options for a process that lives for seconds, in which its second compiler would not pay off."""


@dataclass
class ApacheBroker:
    """A running broker, or name server."""

    address: str
    process: subprocess.Popen[bytes]
    log: Path

    def said(self) -> str:
        """The end of its log."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-3000:]


PORTS = (12_002, 32_000)
"""Range below Linux's ephemeral ports, which begin at 32,768."""


def apache_classpath(version: str = APACHE_VERSION) -> str:
    """Jars of broker and name server, fetched by Maven if they are not cached. Raises OperatorError."""
    recipe = maven(*(name.format(version) for name in PACKAGES))
    return recipe.environment(fetched(recipe))["CLASSPATH"]


def _free_port() -> int:
    """A port that is free together with the two before it and the one after it, which the broker uses too. It is no
    ephemeral port: the kernel could assign such a port to another program in the seconds until the broker is up."""
    while True:
        port = random.randrange(*PORTS, 4)
        with contextlib.ExitStack() as stack:
            try:
                for offset in (-2, -1, 0, 1):
                    listener = stack.enter_context(socket.socket())
                    listener.bind(("127.0.0.1", port + offset))
            except OSError:
                continue
            return port


@contextlib.contextmanager
def serve_apache(store: Path, work: Path, *, version: str = APACHE_VERSION, **settings: Any) -> Iterator[ApacheBroker]:
    """Run a broker on the store, which it creates if necessary; `settings` go into its configuration. It is stopped in
    an orderly way at the end of the block. Raises AssertionError if it does not come up, TimeoutExpired if it does not
    stop."""
    port = _free_port()
    configuration = {
        **{"brokerName": "broker-a", "brokerId": 0, "listenPort": port, "haListenPort": port + 1},
        **{"brokerIP1": "127.0.0.1", "brokerIP2": "127.0.0.1", "storePathRootDir": store},
        **{"storePathCommitLog": store / "commitlog", "diskMaxUsedSpaceRatio": 95, "warmMapedFileEnable": "false"},
        **settings,
    }
    options = ["-Xms256m", "-Xmx512m", "-XX:MaxDirectMemorySize=256m"]
    options += (f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in OPENED)
    options += ["-Drocketmq.broker.diskSpaceWarningLevelRatio=0.99"]
    options += ["-Drocketmq.broker.diskSpaceCleanForciblyRatio=0.98"]
    with _serve("broker", version, work, configuration, options) as broker:
        yield broker


@contextlib.contextmanager
def serve_apache_name_server(work: Path, version: str = APACHE_VERSION) -> Iterator[str]:
    """Run a name server; yields its address. Raises as `serve_apache`."""
    configuration = {"listenPort": _free_port(), "kvConfigPath": work / "kvConfig.json"}
    with _serve("namesrv", version, work, configuration, ["-Xmx128m"]) as name_server:
        yield name_server.address


@contextlib.contextmanager
def serve_apache_proxy(name_server: str, cluster: str, work: Path) -> Iterator[str]:
    """Run a proxy of RocketMQ 5 for the brokers of a name server; yields its gRPC address. Raises as `serve_apache`."""
    port = _free_port()
    work.mkdir(parents=True)
    configuration = {
        **{"rocketMQClusterName": cluster, "namesrvAddr": name_server, "proxyMode": "CLUSTER"},
        **{"grpcServerPort": port, "remotingListenPort": port + 1, "useEndpointPortFromRequest": False},
    }
    path, logging = work / "rmq-proxy.json", work / "logback.xml"
    path.write_text(json.dumps(configuration), encoding="utf-8")
    logging.write_text(LOG_TO_CONSOLE.format(prefix=LOGGING_OF_5), encoding="utf-8")
    recipe = maven(f"org.apache.rocketmq:rocketmq-proxy:{PROXY_VERSION}")
    command = [
        *("java", *SHORT_LIVED, "-Xmx400m", "-XX:MaxDirectMemorySize=256m", *_at_home(work)),
        *(f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in OPENED),
        *(f"-Drmq.logback.configurationFile={logging}", "-cp", recipe.environment(fetched(recipe))["CLASSPATH"]),
        *("org.apache.rocketmq.proxy.ProxyStartup", "-pc", str(path)),
    ]
    with _run("proxy", work, command, port, RMQ_PROXY_HOME=str(work)) as proxy:
        yield proxy.address


def _at_home(work: Path) -> tuple[str, ...]:
    """Java options that put its files into `work`, also the temporary libraries and keys that a killed Java leaves."""
    return (f"-Duser.home={work}", f"-Djava.io.tmpdir={work}")


@contextlib.contextmanager
def _serve(
    program: str, version: str, work: Path, configuration: Mapping[str, Any], options: Sequence[str]
) -> Iterator[ApacheBroker]:
    (work / "conf").mkdir(parents=True, exist_ok=True)
    logging = work / "conf" / f"logback_{program}.xml"
    prefix = "" if version.startswith("4") else LOGGING_OF_5
    logging.write_text(LOG_TO_CONSOLE.format(prefix=prefix), encoding="utf-8")
    lines = (f"{name}={value}\n" for name, value in configuration.items())
    (work / f"{program}.conf").write_text("".join(lines), encoding="utf-8")
    command = [
        *("java", *SHORT_LIVED, *options, *_at_home(work), "-cp", apache_classpath(version)),
        f"-Drmq.logback.configurationFile={logging}",
        *(f"org.apache.rocketmq.{program}.{program.capitalize()}Startup", "-c", str(work / f"{program}.conf")),
    ]
    with _run(program, work, command, configuration["listenPort"]) as server:
        yield server


@contextlib.contextmanager
def _run(program: str, work: Path, command: Sequence[str], port: int, **environment: str) -> Iterator[ApacheBroker]:
    log = work / f"{program}.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            cwd=work,
            env={**os.environ, "ROCKETMQ_HOME": str(work), **environment},
        )
    server = ApacheBroker(f"127.0.0.1:{port}", process, log)
    try:
        _wait_listening(server, port)
        yield server
        process.terminate()
        process.wait(STOP_TIMEOUT_S)
    finally:
        process.kill()
        process.wait()


def _wait_listening(broker: ApacheBroker, port: int) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        assert broker.process.poll() is None, f"Apache's program has ended: {broker.said()}"
        assert time.monotonic() < deadline_s, f"Apache's program does not come up: {broker.said()}"
        time.sleep(0.1)

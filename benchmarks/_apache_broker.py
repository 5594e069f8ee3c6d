"""A broker of Apache RocketMQ 4.9.7 on this machine, for benchmarks and tests: started on a store, stopped in order;
and its name server."""

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
"""Of the proxy for gRPC, and of the broker and name server that it is made for."""
START_TIMEOUT_S = 300.0
"""For a JVM, and for queues and index to be made of a large log, on a machine that is busy."""
STOP_TIMEOUT_S = 120.0
SHORT_LIVED = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
"""What is asked for seconds ends before its second compiler has given back what it took."""


@dataclass
class ApacheBroker:
    """A running broker, or name server."""

    address: str
    process: subprocess.Popen[bytes]
    log: Path

    def said(self) -> str:
        """The end of what it has logged."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-3000:]


PORTS = (12_002, 32_000)
"""Below those that Linux gives away by itself, from 32,768 on."""


def apache_classpath(version: str = APACHE_VERSION) -> str:
    """Jars of broker and name server, fetched by Maven where the cache has them not. Raises OperatorError."""
    recipe = maven(*(name.format(version) for name in PACKAGES))
    return recipe.environment(fetched(recipe))["CLASSPATH"]


def _free_port() -> int:
    """A port of which the two before and the one behind are free as well: the broker takes them. None that the kernel
    gives to whoever connects or asks for any: it could be taken before the broker is up, which takes seconds."""
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
    """A broker on the store, which it may have to make; `settings` go into its configuration. At the end of the block
    it is stopped in order. Raises AssertionError where it does not come up; TimeoutExpired where it does not stop."""
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
    """A name server; gives its address. Raises as `serve_apache`."""
    configuration = {"listenPort": _free_port(), "kvConfigPath": work / "kvConfig.json"}
    with _serve("namesrv", version, work, configuration, ["-Xmx128m"]) as name_server:
        yield name_server.address


@contextlib.contextmanager
def serve_apache_proxy(name_server: str, cluster: str, work: Path) -> Iterator[str]:
    """A proxy of RocketMQ 5 in front of the brokers of a name server; gives the address for gRPC. Raises as
    `serve_apache`."""
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
    """Its files, and the native libraries and keys that a Java which is killed leaves among the temporary ones."""
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

"""A broker of Apache RocketMQ 4.9.7 on this machine, for benchmarks and tests: started on a store, stopped in order."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.sdk.install import fetched, maven
from harness.systems.rocketmq import LOG_TO_CONSOLE, OPENED

__all__ = ["APACHE_VERSION", "ApacheBroker", "apache_classpath", "serve_apache"]

APACHE_VERSION = "4.9.7"
START_TIMEOUT_S = 300.0
"""For a JVM, and for queues and index to be made of a large log, on a machine that is busy."""
STOP_TIMEOUT_S = 120.0


@dataclass
class ApacheBroker:
    """A running broker."""

    address: str
    process: subprocess.Popen[bytes]
    log: Path

    def said(self) -> str:
        """The end of what it has logged."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-3000:]


def apache_classpath() -> str:
    """The broker's jars, fetched by Maven where the cache has them not. Raises OperatorError."""
    recipe = maven(f"org.apache.rocketmq:rocketmq-broker:{APACHE_VERSION}")
    return recipe.environment(fetched(recipe))["CLASSPATH"]


def _free_port() -> int:
    """A port of which the two before and the one behind are free as well: the broker takes them."""
    while True:
        with contextlib.ExitStack() as stack:
            port = 0
            try:
                for offset in (0, -2, 1):
                    listener = stack.enter_context(socket.socket())
                    listener.bind(("127.0.0.1", port + offset if port else 0))
                    port = port or listener.getsockname()[1]
            except OSError:
                continue
            return port


@contextlib.contextmanager
def serve_apache(store: Path, work: Path, **settings: Any) -> Iterator[ApacheBroker]:
    """A broker on the store, which it may have to make; `settings` go into its configuration. At the end of the block
    it is stopped in order. Raises AssertionError where it does not come up; TimeoutExpired where it does not stop."""
    port = _free_port()
    (work / "conf").mkdir(parents=True, exist_ok=True)
    (work / "conf" / "logback_broker.xml").write_text(LOG_TO_CONSOLE, encoding="utf-8")
    configuration = {
        **{"brokerName": "broker-a", "brokerId": 0, "listenPort": port, "haListenPort": port + 1},
        **{"brokerIP1": "127.0.0.1", "brokerIP2": "127.0.0.1", "storePathRootDir": store},
        **{"storePathCommitLog": store / "commitlog", "diskMaxUsedSpaceRatio": 95, "warmMapedFileEnable": "false"},
        **settings,
    }
    lines = (f"{name}={value}\n" for name, value in configuration.items())
    (work / "broker.conf").write_text("".join(lines), encoding="utf-8")
    command = [
        *("java", "-Xms256m", "-Xmx512m", "-XX:+UseSerialGC", "-XX:MaxDirectMemorySize=256m"),
        *(f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in OPENED),
        *(f"-Duser.home={work}", "-Drocketmq.broker.diskSpaceWarningLevelRatio=0.99"),
        *("-Drocketmq.broker.diskSpaceCleanForciblyRatio=0.98", "-cp", apache_classpath()),
        *("org.apache.rocketmq.broker.BrokerStartup", "-c", str(work / "broker.conf")),
    ]
    log = work / "broker.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, cwd=work, env={**os.environ, "ROCKETMQ_HOME": str(work)}
        )
    broker = ApacheBroker(f"127.0.0.1:{port}", process, log)
    try:
        _wait_listening(broker, port)
        yield broker
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
        assert broker.process.poll() is None, f"Apache's broker has ended: {broker.said()}"
        assert time.monotonic() < deadline_s, f"Apache's broker does not come up: {broker.said()}"
        time.sleep(0.1)

"""Comparison of brokers under the same lean load: this code, another commit or directory, and Apache's.

    python -m benchmarks node_versus
    python -m benchmarks node_versus --against aaa149d --against apache --json FIGURES
    python -m benchmarks node_versus --replication dledger --flush async --loads one,batch --page docs/node-speed.md
    python -m benchmarks node_versus --python pypy3 --against here@python3 --against apache

All are started, warmed up, and then loaded in turn, round by round, so that drifts of the machine's speed affect all
equally. Contestants that are not loaded are stopped (SIGSTOP): Apache's group of three uses a third to two thirds of a
core in the seconds after a load, and a fifth when idle for long. The loads (`benchmarks/_load.py`) are 64 senders with
keyed messages of 128 bytes: one by one, in batches of 32, and one by one to a queue that the topic does not have, which
is refused. CPU is the time of the master's process per message or refusal, over the load and the second after it, in
which the broker dispatches what was sent. Printed are medians over the rounds, and for each other contestant the median
of the ratios within each round.

`--page` writes the table into a page, replacing the existing one.

`--python` names the interpreter of this code's brokers, and NAME@PROGRAM that of another contestant's (`here` is this
code again); without it that is the interpreter of the benchmark. The load generator always uses the latter.

Apache's broker, the only other contestant unless `--against` names some, is RocketMQ 4.9.7, fetched through Maven, with
its own defaults except for a heap of 1 GiB.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._apache_broker import apache_classpath
from benchmarks._node_page import with_section
from benchmarks.node_bench import QUEUES, READY_TIMEOUT_S, SETTLE_S, Group, find_master, run_load
from harness.runtime import harness_runtime
from harness.systems.rocketmq import LOG_TO_CONSOLE, OPENED
from node.client import BrokerClient, ClientError
from node.remoting import RemotingClient

__all__ = ["conditions_of", "main", "ratios_of", "table_of"]

LOADS: Mapping[str, tuple[object, ...]] = {
    "one": (),
    "batch": ("--batch", 32),
    "refused": ("--first-queue", 1000),
}
"""Arguments of the load generator."""
WARM_UP_S = 20.0
"""Load before the first round for each contestant, needed by Java's compiler."""
NODES = 3
"""Members of a DLedger group."""
START_TIMEOUT_S = 120.0
ASK_AGAIN_S = 0.5
LEAD_HOLDS_S = 3.0
"""A group whose master stays the same for this long is assumed to have no election in progress."""


class ApacheGroup(Group):
    """Apache's brokers. In classic HA the first one is the master."""

    def _command(self, node: str, config: str) -> tuple[list[str], Mapping[str, str]]:
        home = os.path.join(self._directory, node)
        Path(home, "conf").mkdir(parents=True, exist_ok=True)
        Path(home, "conf", "logback_broker.xml").write_text(LOG_TO_CONSOLE.format(prefix=""), encoding="utf-8")
        argv = [
            *("java", "-Xms1g", "-Xmx1g", "-XX:MaxDirectMemorySize=1g"),
            *(f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in OPENED),
            *(f"-Duser.home={home}", f"-Djava.io.tmpdir={home}", "-Drocketmq.broker.diskSpaceWarningLevelRatio=0.99"),
            "-Drocketmq.broker.diskSpaceCleanForciblyRatio=0.98",
            *("org.apache.rocketmq.broker.BrokerStartup", "-c", config),
        ]
        return argv, {"ROCKETMQ_HOME": home, "CLASSPATH": apache_classpath()}

    def _config(self, node: str) -> str:
        home, port = os.path.join(self._directory, node), self.addresses[node].rpartition(":")[2]
        is_group = self._replication == "dledger"
        peers = ";".join(f"{name}-{address}" for name, address in self._ledger.items())
        lines = {
            **{"brokerClusterName": "benchmarks", "brokerName": "broker-a"},  # no topic may have the cluster's name
            **{"brokerId": 1 if is_group else self._number(node), "brokerRole": self._role(node)},
            **{"flushDiskType": f"{self._flush_mode.upper()}_FLUSH", "autoCreateTopicEnable": "false"},
            **{"brokerIP1": "127.0.0.1", "brokerIP2": "127.0.0.1", "listenPort": port},
            **{"haListenPort": self._ledger[node].rpartition(":")[2], "storePathRootDir": f"{home}/store"},
            **{"storePathCommitLog": f"{home}/store/commitlog", "diskMaxUsedSpaceRatio": 95},
            **{"enableDLegerCommitLog": str(is_group).lower(), "dLegerGroup": "broker-a", "dLegerPeers": peers},
            "dLegerSelfId": node,
        }
        return "\n".join(f"{name}={value}" for name, value in lines.items())

    def _number(self, node: str) -> int:
        return self.ids.index(node)

    def _role(self, node: str) -> str:
        # In a group only the leader may report that it is no slave; until the election all report this role.
        if self._number(node) or self._replication == "dledger":
            return "SLAVE"
        return "SYNC_MASTER" if self._replication == "sync" else "ASYNC_MASTER"

    async def master_with_topic(self) -> str:
        """The leading member, once it has the topic. Raises TimeoutError."""
        asking = BrokerClient(name_servers=[], runtime=harness_runtime(None), request_timeout_ms=1000)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while True:
                    for node, address in self.addresses.items():
                        try:
                            if (await asking.broker_config(address))["brokerRole"] != "SLAVE":
                                await asking.create_topic("bench", queues=QUEUES, address=address)
                                return node
                        except (ClientError, KeyError):
                            pass
                    await asyncio.sleep(ASK_AGAIN_S)
        finally:
            await asking.close()


class _Contestant:
    """One group that is loaded in turn with others."""

    def __init__(self, name: str, group: Group) -> None:
        self.name = name
        self.group = group
        self.master = ""

    def start(self) -> None:
        for node in self.group.ids:
            self.group.start(node)
        self._settle()

    def resume(self) -> None:
        """Let the group run until `pause`, and wait for its master: after a long stop it may elect another one."""
        self.group.resume()
        self._settle()

    def _settle(self) -> None:
        before = ""
        self.master = asyncio.run(self._find_master())
        while before != self.master:
            time.sleep(LEAD_HOLDS_S)
            before, self.master = self.master, asyncio.run(self._find_master())

    async def _find_master(self) -> str:
        if isinstance(self.group, ApacheGroup):
            return await self.group.master_with_topic()
        client = RemotingClient(name="bench")
        try:
            return await find_master(client, self.group, timeout_s=READY_TIMEOUT_S)
        finally:
            await client.close()

    def measure(self, load: str, seconds: float) -> dict[str, float]:
        """One round of a load: messages or refusals per second, median latency, the master's CPU time per answer, and
        the share of refused sends: Apache's broker refuses those that wait for longer than 200 ms."""
        before_s = self.group.cpu_s(self.master)
        figures = run_load(
            "send", self.group.addresses[self.master], *LOADS[load], "--seconds", seconds, "--warm-up", 1
        )
        time.sleep(SETTLE_S)
        each = 32 if load == "batch" else 1
        done, wanted = figures["answers"] * each, "refused" if load == "refused" else "stored"
        rate = figures["errors"] / figures["seconds"] if wanted == "refused" else figures["per_s"]
        if not rate:
            raise RuntimeError(f"{self.name}, {load}: {figures['errors']:.0f} errors, none {wanted}")
        cpu_us = (self.group.cpu_s(self.master) - before_s) * 1e6 / done
        share = figures["errors"] / figures["answers"]
        return {"per_s": rate, "p50_ms": figures.get("p50_ms", 0.0), "cpu_us": cpu_us, "refused": share}


def _tree_of(words: str, directory: str) -> str:
    """The directory of another tree: `words` itself, or one to which the commit of that name is exported."""
    if words == "here":
        return os.getcwd()
    if os.path.isdir(words):
        return os.path.abspath(words)
    tree = os.path.join(directory, f"tree-{words}")
    os.mkdir(tree)
    archive = subprocess.run(["git", "archive", words], check=True, stdout=subprocess.PIPE).stdout
    subprocess.run(["tar", "-x", "-C", tree], check=True, input=archive)
    return tree


def _program(name: str) -> str:
    """The path of an interpreter. Raises SystemExit if there is none of that name."""
    path = shutil.which(name)
    if path is None:
        raise SystemExit(f"no such program: {name}")
    return path


def _version_of(python: str) -> str:
    """Name and version of an interpreter: "PyPy 3.11.11"."""
    script = "import platform; print(platform.python_implementation(), platform.python_version())"
    return subprocess.run(
        [_program(python), "-c", script], check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()


def _contestants(options: argparse.Namespace, replication: str, flush: str, directory: str) -> list[_Contestant]:
    """The groups of this tree and of the others, not started yet."""
    made = []
    for number, words in enumerate((f"here@{options.python}", *options.against)):
        own = os.path.join(directory, str(number))
        os.mkdir(own)
        common: dict[str, Any] = {
            "nodes": NODES if replication == "dledger" else 2, "flush_mode": flush, "timing": "default",
            "replication": replication,
        }  # fmt: skip
        name, _, python = words.partition("@")
        if name == "apache":
            group: Group = ApacheGroup(own, **common)
        else:
            group = Group(own, **common, tree=_tree_of(name, own), python=_program(python or sys.executable))
        made.append(_Contestant("here" if number == 0 else words, group))
    return made


def measure(options: argparse.Namespace, replication: str, flush: str) -> list[dict[str, Any]]:
    """All rounds of one kind of replication and flush: a row for each round, load and contestant."""
    directory = tempfile.mkdtemp(prefix="splitbrain-versus-")
    rows: list[dict[str, Any]] = []
    started: list[_Contestant] = []
    try:
        for contestant in _contestants(options, replication, flush, directory):
            started.append(contestant)
            contestant.start()
            for load in options.loads:
                contestant.measure(load, options.warm_up / len(options.loads))
            contestant.group.pause()
        for number, load in itertools.product(range(options.rounds), options.loads):
            turn = number % len(started)
            for contestant in (*started[turn:], *started[:turn]):
                contestant.resume()
                figures = contestant.measure(load, options.seconds)
                contestant.group.pause()
                rows.append({
                    "replication": replication, "flush": flush, "load": load, "round": number,
                    "contestant": contestant.name, "machine_load": os.getloadavg()[0], **figures,
                })  # fmt: skip
    finally:
        for contestant in started:
            contestant.group.stop()
        shutil.rmtree(directory)
    return rows


def ratios_of(rows: Sequence[Mapping[str, Any]], other: str, figure: str) -> list[float]:
    """The figure of the other contestant divided by ours, for each round, for rows of one load."""
    by_round: dict[int, dict[str, float]] = {}
    for row in rows:
        by_round.setdefault(row["round"], {})[row["contestant"]] = row[figure]
    return [each[other] / each["here"] for each in by_round.values() if other in each and "here" in each]


def table_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The rows as a Markdown table: medians over the rounds, and medians of the ratios within each round."""
    lines = [
        "| replication | flush | load | whose | messages/s | p50 ms | CPU us/message | lowest to highest"
        " | refused | our rate : theirs | our CPU : theirs |",
        "|---|---|---|---|--:|--:|--:|---|--:|--:|--:|",
    ]
    cells: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        cells.setdefault((row["replication"], row["flush"], row["load"]), []).append(row)
    for cell, own in cells.items():
        for name in dict.fromkeys(row["contestant"] for row in own):
            mine = [row for row in own if row["contestant"] == name]
            rate, p50, cpu = (median(row[figure] for row in mine) for figure in ("per_s", "p50_ms", "cpu_us"))
            lowest, highest = (end(row["cpu_us"] for row in mine) for end in (min, max))
            words = [*cell, name, f"{rate:,.0f}", f"{p50:.2f}", f"{cpu:.1f}", f"{lowest:.1f} to {highest:.1f}"]
            words.append("all" if cell[2] == "refused" else f"{median(row['refused'] for row in mine):.1%}")
            for figure in ("per_s", "cpu_us"):
                shares = [] if name == "here" else ratios_of(own, name, figure)
                words.append(f"{1 / median(shares):.2f}" if shares else "-")
            lines.append(f"| {' | '.join(words)} |")
    return lines


def conditions_of(conditions: Mapping[str, Any]) -> str:
    """The conditions under which the figures of a table were measured, as a paragraph."""
    return (
        f"{conditions['cpus']} CPUs shared by the load generator and all brokers (load average of the quarter of an"
        f" hour before: {conditions['load_average']:.1f}); {conditions['python']}; 64 lean senders over 4"
        f" connections, messages of 128 bytes, each with a UNIQ_KEY; {conditions['rounds']} alternating rounds of"
        f" {conditions['seconds']:g} s for each load after one of warm-up, and {conditions['warm_up']:g} s of load"
        " before the first round. `one` sends single messages, `batch` batches of 32, `refused` single messages to a "
        "queue that does not exist. Brokers not under load are stopped (SIGSTOP). CPU is that of the master's process. "
        "Figures are medians; ratios are medians of the ratios of each round."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(description="Brokers beside each other, in alternation.")
    parser.add_argument(
        "--against", action="append", metavar="NAME[@PROGRAM]",
        help="a commit, a directory, here, or apache (the default), and an interpreter; may be given several times",
    )  # fmt: skip
    parser.add_argument("--python", default=sys.executable, help="the interpreter of this code's brokers")
    parser.add_argument("--replication", default="single,dledger", help="of single, async, sync, dledger")
    parser.add_argument("--flush", default="async,sync")
    parser.add_argument("--loads", default="one,batch,refused", help=f"of {', '.join(LOADS)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of load in each round, after one of warming up")
    parser.add_argument("--warm-up", type=float, default=WARM_UP_S, help="seconds of load before the first round")
    parser.add_argument("--json", metavar="FILE", help="also write every round to FILE")
    parser.add_argument("--page", metavar="FILE", help="also write the table into a page of Markdown")
    options = parser.parse_args(arguments)
    options.against = options.against or ["apache"]
    options.loads = options.loads.split(",")
    if any(words.startswith("apache@") for words in options.against):
        parser.error("apache runs on Java: give it no interpreter")
    unknown = [load for load in options.loads if load not in LOADS]
    if unknown:
        parser.error(f"no such load: {', '.join(unknown)}")
    conditions = {
        "cpus": os.cpu_count(), "python": _version_of(options.python), "load_average": os.getloadavg()[2],
        "rounds": options.rounds, "seconds": options.seconds, "warm_up": options.warm_up,
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    for replication, flush in itertools.product(options.replication.split(","), options.flush.split(",")):
        rows += measure(options, replication, flush)
        print("\n".join(table_of(rows)), flush=True)
    if options.page:
        page = Path(options.page)
        section = "\n".join([conditions_of(conditions), "", *table_of(rows)])
        page.write_text(with_section(page.read_text(encoding="utf-8"), section), encoding="utf-8")
    if options.json:
        Path(options.json).write_text(json.dumps({"conditions": conditions, "rows": rows}, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

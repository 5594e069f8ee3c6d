"""Our broker in place of Apache's: the same plug-in and clients, with another program and its configuration.

    harness run benchmarks/plugins/our_broker.py:OurBroker --set replication=async

The timings are RocketMQ's own, not the fast ones of the harness's tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.sdk import Host, Status
from harness.systems.rocketmq import NAME_SERVER, ROLES, TOPIC, RocketMQ, RocketMQClient

ROOT = Path(__file__).resolve().parents[2]


class OurBroker(RocketMQ):
    """The broker of this repository, started as Apache's is in harness.systems.rocketmq."""

    client = RocketMQClient
    install = ()  # type: ignore[assignment]  # plug-ins do not annotate their class attributes
    settings: Mapping[str, Any] = {"replication": tuple(ROLES), "flush": RocketMQ.settings["flush"]}  # type: ignore[assignment]

    def files(self, host: Host) -> Mapping[str, str]:
        """A configuration in TOML."""
        if host.name == NAME_SERVER:
            return {}
        lines = [
            f'self_id = "{host.name}"',
            'group = "broker-a"',
            'broker_name = "broker-a"',
            'cluster_name = "tested"',
            f'listen = "{host.listen("broker")}"',
            f'data_dir = "{host.path("store")}"',
            f'name_servers = ["{self.others[NAME_SERVER].advertise("nameserver")}"]',
            f'flush_mode = "{self.settings["flush"]}"',
            'timing = "default"',
            *(self._group(host) if self.settings["replication"] == "dledger" else self._classic(host)),
            "[[topics]]",
            f'name = "{TOPIC}"',
            f"queues = {self.keys}",
        ]
        return {"broker.toml": "\n".join(lines) + "\n"}

    def _group(self, host: Host) -> list[str]:
        peers = [f'{each.name} = "{each.advertise("dledger")}"' for each in self.hosts]
        return ["[dledger]", f'listen = "{host.listen("dledger")}"', "[dledger.peers]", *peers]

    def _classic(self, host: Host) -> list[str]:
        leads = host.number == self.master
        return [
            "[classic]",
            f'broker_role = "{ROLES[self.settings["replication"]] if leads else "SLAVE"}"',
            f"broker_id = {0 if leads else host.number}",
            f"ha_listen_port = {self.ports['ha']}",
            'ha_mismatch = "heal"',
        ]

    def command(self, host: Host) -> list[str]:
        """The command of a broker, or of the name server."""
        if host.name == NAME_SERVER:
            return [host.python, "-m", "node", "nameserver", "--listen", host.listen("nameserver")]
        return [host.python, "-m", "node", "broker", "--config", host.path("broker.toml")]

    def environment(self, host: Host) -> Mapping[str, str]:
        """Where Python finds the node."""
        return {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}

    async def start_together(self) -> None:
        """Does nothing: topics are in the configuration."""

    async def status(self, host: Host) -> Status:
        """The broker's own status report."""
        table: Mapping[str, Any] = await self.asking.runtime_info(host.address("broker"))
        facts = {name: table[name] for name in ("role", "brokerRole") if name in table}
        return Status(leads=table["role"] == "LEADER", end=int(table.get("committedPos", -1)), facts=facts)

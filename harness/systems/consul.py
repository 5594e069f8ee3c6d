"""Consul, whose servers replicate a key-value store by Raft; a static Go program, accessed through its HTTP API.

`read` is Consul's consistency mode. With `consistent` the leader asks a quorum whether it still leads before it
answers. With `default`, Consul's default, it relies on its lease. With `stale` any server answers from its own state.

Transactions are optimistic: what they have read must be unchanged when they commit (`check-index`), so that each is one
entry of the log. Elections are tuned for servers that are close to each other (`raft_multiplier` 1, as Consul's manual
advises for production).

Seen with 1.14.11:

- With `read=default` a leader that was paused for as long as an election takes has answered some of the requests that
  had piled up before it noticed that its lease was over: 3 of 6 runs of `--workload register --nemesis pause=@leader
  --nemesis-interval 2` or 3 with `--concurrency 60 --rate 2000 --operation-timeout 5` or 6 were not linearizable, and
  0 of 3 with 200 clients, nor the one with `--nemesis partition=leader`: the lease ends before an election can.
- A server does not sync its `node-id` file. If it loses power soon after its first start, the file is empty, and the
  server refuses to start ("NodeID in … is invalid"), although its Raft log is whole (`--nemesis power=crash`). With
  `node_id=configured` its identity comes from the configuration instead.
"""

import asyncio
import base64
import json
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from harness.sdk import Client, Host, HttpError, JsonHttp, Refused, Status, System, get, go

READS = {"consistent": "consistent", "default": "", "stale": "stale"}
NO_LEADER = "No cluster leader"
"""Consul's answer to a request that no server has begun to execute: its own servers repeat even writes after it."""
ATTEMPTS = 20
PAUSE_S = 0.01


class Consul(System):
    """Consul 1.14.11, a key-value store replicated by Raft."""

    install = go("github.com/hashicorp/consul@v1.14.11", ignore_replace=True)
    ports = {"http": 8500, "server": 8300, "serf": 8301}
    settings = {"read": ("consistent", "default", "stale"), "node_id": ("configured", "generated")}
    setting_descriptions = {
        "read": "whether a read asks a quorum (consistent), relies on the leader's lease, or asks only the own server",
        "node_id": "whether a server's identity is configured, or made up and kept in a file as Consul does by default",
    }
    stored = {"log": "data/raft/raft.db"}
    long_request = "http", b"GET /v1/agent/metrics HTTP/1.1\r\nHost: consul\r\n\r\n"

    def files(self, host: Host) -> dict[str, str]:
        own_id = {"node_id": str(uuid.uuid5(uuid.NAMESPACE_DNS, host.name))}
        configuration = {
            "server": True,
            "bootstrap_expect": len(self.hosts),
            "node_name": host.name,
            **(own_id if self.settings["node_id"] == "configured" else {}),
            "data_dir": host.path("data"),
            "client_addr": host.ip,
            "bind_addr": host.ip,
            "ports": {
                **{"http": host.ports["http"], "server": host.ports["server"], "serf_lan": host.ports["serf"]},
                **dict.fromkeys(("serf_wan", "dns", "grpc", "grpc_tls"), -1),
            },
            "retry_join": [each.address("serf", host) for each in self.hosts if each is not host],
            "retry_interval": "1s",
            "performance": {"raft_multiplier": 1},
            "connect": {"enabled": False},
            "disable_update_check": True,
        }
        return {"consul.json": json.dumps(configuration, indent=1)}

    def command(self, host: Host) -> list[str]:
        return [host.installed("consul"), "agent", "-config-file", host.path("consul.json")]

    async def ready(self, host: Host) -> bool:
        return bool(await get(f"{host.url('http')}/v1/status/leader"))

    async def status(self, host: Host) -> Status:
        raft = (await get(f"{host.url('http')}/v1/agent/self"))["Stats"]["raft"]
        return Status(leads=raft["state"] == "Leader", term=int(raft["term"]), end=int(raft["last_log_index"]))


class ConsulClient(Client):
    async def open(self) -> None:
        self.http, self.node = JsonHttp(self.url("http")), self.host.name
        self.mode = READS[self.settings["read"]]
        await self.http.get("/v1/status/leader")

    async def close(self) -> None:
        await self.http.close()

    async def read(self, key: int) -> Any:
        return (await self.entry(f"registers/{key}"))[1]

    async def write(self, key: int, value: Any) -> None:
        await self.put(f"registers/{key}", value)

    async def cas(self, key: int, old: Any, new: Any) -> bool:
        for _ in range(ATTEMPTS):
            index, value = await self.entry(f"registers/{key}")
            if value != old:
                return False
            if await self.put(f"registers/{key}", new, f"?cas={index}"):
                return True
        raise Refused("others changed the key in each attempt")

    async def add(self, value: int) -> None:
        await self.put(f"set/{value}", value)

    async def members(self) -> list[int]:
        try:
            keys = await self.http.get(f"/v1/kv/set/?keys&{self.mode}")
        except HttpError as error:
            if error.status == 404:
                return []
            raise
        return [int(key.rpartition("/")[2]) for key in keys]

    async def increment(self, by: int) -> None:
        for _ in range(ATTEMPTS):
            index, value = await self.entry("counter")
            if await self.put("counter", (value or 0) + by, f"?cas={index}"):
                return
            await asyncio.sleep(PAUSE_S)
        raise Refused("others changed the counter in each attempt")

    async def value(self) -> int:
        return (await self.entry("counter"))[1] or 0

    async def transact(self, micro_operations: list[list[Any]]) -> list[list[Any]]:
        """Read all keys, compute, and commit if none of them has changed since."""
        names = {key: f"transactions/{key}" for _, key, _ in micro_operations}
        found = await self.commit([{"Verb": "get-or-empty", "Key": name} for name in names.values()], self.mode)
        state = dict(zip(names, map(entry_of, found), strict=True))
        done, changed = apply(micro_operations, {key: value for key, (_, value) in state.items()})
        if changed:
            await self.commit(list(guarded(names, {key: index for key, (index, _) in state.items()}, changed)))
        return done

    async def commit(self, operations: list[dict[str, Any]], mode: str = "") -> list[Mapping[str, Any]]:
        """Execute one transaction; returns the entries of its results."""
        try:
            said = await self.http.put(f"/v1/txn?{mode}", [{"KV": each} for each in operations])
        except HttpError as error:
            if error.status == 409:
                raise Refused("a key has changed since it was read") from error
            raise not_begun(error) from error
        return [each["KV"] for each in said["Results"] or []]

    async def entry(self, name: str) -> tuple[int, Any]:
        """The index of the last change of a key, 0 if there was none, and the value."""
        try:
            return entry_of((await self.http.get(f"/v1/kv/{name}?{self.mode}"))[0])
        except HttpError as error:
            if error.status == 404:
                return 0, None
            raise

    async def put(self, name: str, value: Any, condition: str = "") -> bool:
        try:
            return bool(await self.http.put(f"/v1/kv/{name}{condition}", value))
        except HttpError as error:
            raise not_begun(error) from error


def not_begun(error: HttpError) -> Exception:
    """The error, or a Refused if it says that the request has had no effect."""
    return Refused(NO_LEADER) if error.body.strip() == NO_LEADER else error


def entry_of(said: Mapping[str, Any]) -> tuple[int, Any]:
    value = said.get("Value")
    return said.get("ModifyIndex", 0), None if value is None else json.loads(base64.b64decode(value))


def apply(micro_operations: Iterable[list[Any]], state: dict[int, Any]) -> tuple[list[list[Any]], dict[int, Any]]:
    """Perform the steps of a transaction on `state`; returns them with what they read, and the changed keys."""
    done, changed = [], dict[int, Any]()
    for kind, key, value in micro_operations:
        now = changed.get(key, state[key])
        if kind == "r":
            done.append([kind, key, now])
            continue
        done.append([kind, key, value])
        if kind == "append":
            changed[key] = [*(now or []), value]
        else:
            changed[key] = (now or 0) + value if kind == "add" else value
    return done, changed


def guarded(
    names: Mapping[int, str], indexes: Mapping[int, int], changed: Mapping[int, Any]
) -> Iterable[dict[str, Any]]:
    """The steps of a Consul transaction that changes keys if none of those in `names` has changed."""
    for key, name in names.items():
        is_new = indexes[key] == 0
        yield {"Verb": "check-not-exists", "Key": name} if is_new else {
            "Verb": "check-index", "Key": name, "Index": indexes[key]
        }  # fmt: skip
    for key, value in changed.items():
        yield {"Verb": "set", "Key": names[key], "Value": base64.b64encode(json.dumps(value).encode()).decode()}

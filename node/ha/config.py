"""A broker's configuration of classic HA, and the timings of its two sides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from node.config_reader import ConfigReader, check_dialled_address, integer_in, one_of

__all__ = ["BROKER_ROLES", "HaConfig", "HaTimings", "read_ha"]

BROKER_ROLES: Final = ("ASYNC_MASTER", "SYNC_MASTER", "SLAVE")
MISMATCHES: Final = ("refuse", "heal")
MAX_BROKER_ID: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class HaTimings:
    """In seconds."""

    heartbeat_s: float
    """Either side sends a heartbeat after this long with nothing to send (R: haSendHeartbeatInterval)."""
    housekeeping_s: float
    """The connection is closed after this long without a byte from the other side (R: haHousekeepingInterval)."""
    retry_s: float
    """Pause after a connection failed or ended (S4: 5 s); also the timeout of connecting."""
    slave_timeout_s: float
    """How long a message waits for a slave (R: slaveTimeout, 3 s; S4: 5 s)."""


TIMINGS: Final[Mapping[str, HaTimings]] = {
    "default": HaTimings(heartbeat_s=5.0, housekeeping_s=20.0, retry_s=5.0, slave_timeout_s=3.0),
    "fast": HaTimings(heartbeat_s=0.5, housekeeping_s=2.0, retry_s=0.5, slave_timeout_s=1.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HaConfig:
    """One broker's part in classic HA. Sizes are in bytes; a time of 0 means that of the timing profile."""

    role: str
    broker_id: int
    """0 for the master, from 1 on for slaves."""
    listen_port: int = 0
    """Where the master listens for slaves; 0: the port for clients plus one (R: haListenPort)."""
    master_address: str = ""
    """The master that a slave copies; empty: the one that the name server names (R: haMasterAddress)."""
    mismatch: str = "refuse"
    """What a slave does if its log is not a copy of the master's: "refuse" waits for an operator, "heal" gives up what
    the master lacks."""
    slave_timeout_ms: int = 0
    fallbehind_max_bytes: int = 256 << 20
    """How far the best slave may be behind and still count (R: haSlaveFallbehindMax)."""
    batch_bytes: int = 32 << 10
    """Bytes of the log in one frame (R: haTransferBatchSize)."""
    heartbeat_ms: int = 0
    housekeeping_ms: int = 0

    @property
    def is_slave(self) -> bool:
        return self.role == "SLAVE"

    @property
    def is_sync(self) -> bool:
        return self.role == "SYNC_MASTER"

    def timings(self, profile: str) -> HaTimings:
        """The profile's timings, overridden by those that are configured."""
        usual = TIMINGS[profile]
        return HaTimings(
            heartbeat_s=self.heartbeat_ms / 1000 or usual.heartbeat_s,
            housekeeping_s=self.housekeeping_ms / 1000 or usual.housekeeping_s,
            retry_s=usual.retry_s,
            slave_timeout_s=self.slave_timeout_ms / 1000 or usual.slave_timeout_s,
        )


def read_ha(reader: ConfigReader) -> HaConfig | None:
    """Read the HA keys of the table [classic]; None if it has no `broker_role`: a broker without slaves."""
    role = reader.take("broker_role", one_of(("", *BROKER_ROLES)), "")
    milliseconds = integer_in(0, 86_400_000)
    config = HaConfig(
        role=role,
        broker_id=reader.take("broker_id", integer_in(0, MAX_BROKER_ID), 1 if role == "SLAVE" else 0),
        listen_port=reader.take("ha_listen_port", integer_in(0, 65535), 0),
        master_address=reader.take("ha_master_address", check_dialled_address, ""),
        mismatch=reader.take("ha_mismatch", one_of(MISMATCHES), "refuse"),
        slave_timeout_ms=reader.take("slave_timeout_ms", milliseconds, 0),
        fallbehind_max_bytes=reader.take("ha_slave_fallbehind_max_bytes", integer_in(0, 1 << 60), 256 << 20),
        batch_bytes=reader.take("ha_transfer_batch_bytes", integer_in(1, 8 << 20), 32 << 10),
        heartbeat_ms=reader.take("ha_send_heartbeat_interval_ms", milliseconds, 0),
        housekeeping_ms=reader.take("ha_housekeeping_interval_ms", milliseconds, 0),
    )
    if role and config.is_slave != bool(config.broker_id):
        reader.problem("broker_id", "is 0 for a master and at least 1 for a slave")
    return config if role else None

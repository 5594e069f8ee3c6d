"""How long a log is kept: the rule for removing its oldest file (R: CleanCommitLogService), and how many snapshots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from node.config_reader import ConfigReader, integer_in

__all__ = ["EXPIRY_CHECK_S", "RetentionConfig", "SnapshotConfig", "read_retention", "read_snapshots"]

EXPIRY_CHECK_S: Final = 60.0
"""Time between two checks for files to remove; the delete hour has sixty of them (R: 10 s)."""

HOUR_MS: Final = 3_600_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionConfig:
    """A file is removed when what follows it is older than the retention, in the delete hour; or, at any hour, when the
    log takes more than its share of the space it may use. There is no policy that refuses writes instead."""

    retention_hours: int = 72
    """Age at which a file of the log may be removed (R: fileReservedTime)."""
    delete_hour: int = 4
    """Hour of the day, in UTC, at which old files are removed (R: deleteWhen)."""
    disk_capacity_bytes: int = 0
    """Space available to the log; 0: its size is not limited."""
    disk_max_ratio_percent: int = 75
    """Share of that space beyond which files are removed at any hour and age (R: diskMaxUsedSpaceRatio)."""

    def lets_go(self, *, now_ms: int, next_stored_ms: int | None, log_bytes: int) -> bool:
        """Whether the oldest file may be removed: `next_stored_ms` is when the first message after it was stored (None
        if none follows), `log_bytes` the size of the whole log."""
        allowed_bytes = int(self.disk_capacity_bytes * self.disk_max_ratio_percent / 100)
        if allowed_bytes and log_bytes > allowed_bytes:
            return True
        is_hour = now_ms // HOUR_MS % 24 == self.delete_hour
        return is_hour and next_stored_ms is not None and now_ms - next_stored_ms > self.retention_hours * HOUR_MS


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotConfig:
    """When a member of a DLedger group takes snapshots on its own, and how many it keeps."""

    threshold_entries: int = 100_000
    """Entries after which one is taken (R: snapshotThreshold, 1000, and off); 0: only when one is needed, before the
    beginning of the log is removed or for a follower."""
    kept: int = 3
    """Snapshots that are kept (R: maxSnapshotReservedNum)."""


def read_snapshots(reader: ConfigReader) -> SnapshotConfig:
    """A SnapshotConfig, from a table that also has other keys."""
    defaults = SnapshotConfig()
    return SnapshotConfig(
        threshold_entries=reader.take("snapshot_threshold", integer_in(0, 1_000_000_000), defaults.threshold_entries),
        kept=reader.take("snapshots_kept", integer_in(1, 100), defaults.kept),
    )


def read_retention(reader: ConfigReader) -> dict[str, Any]:
    """The fields of a RetentionConfig, from a table that also has other keys."""
    defaults = RetentionConfig()
    return {
        "retention_hours": reader.take("retention_hours", integer_in(1, 87_600), defaults.retention_hours),
        "delete_hour": reader.take("delete_hour", integer_in(0, 23), defaults.delete_hour),
        "disk_capacity_bytes": reader.take("disk_capacity_bytes", integer_in(0, 1 << 60), defaults.disk_capacity_bytes),
        "disk_max_ratio_percent": reader.take(
            "disk_max_ratio_percent", integer_in(10, 95), defaults.disk_max_ratio_percent
        ),
    }

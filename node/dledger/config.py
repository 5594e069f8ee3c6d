"""The configuration of a DLedger group's member: its peers, the location of its log, its limits and timings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal

__all__ = ["DEFAULT_TIMING", "FAST_TIMING", "TIMINGS", "DLedgerConfig", "DLedgerTiming", "FlushMode"]

FlushMode = Literal["sync", "async"]

PAGE_BYTES: Final = 4096
"""The unit of `flush_least_pages` (R: MappedFile.OS_PAGE_SIZE)."""

MEBIBYTE = 1024 * 1024

MAX_ENTRY_SIZE_BYTES = 8 * MEBIBYTE
"""The largest entry of any log: in base64 it must fit into a frame of 16 MiB. RocketMQ's messages are 4 MiB at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DLedgerTiming:
    """All durations. The defaults are DLedger's own (R) unless said otherwise."""

    heartbeat_interval_ms: int = 2000
    max_heartbeat_leak: int = 3
    """Heartbeats that may be missed: the lease is this many intervals."""
    min_vote_interval_ms: int = 300
    max_vote_interval_ms: int = 1000
    """A candidate waits for a random time between the two before it asks for votes, and again between rounds."""
    vote_wait_ms: int = 2000
    """How long a candidate waits for answers, plus a random part of `max_vote_interval_ms`."""
    rpc_timeout_ms: int = 3000
    """For votes, heartbeats, COMPARE and TRUNCATE. Two requests in a row without an answer close the connection."""
    push_rpc_timeout_ms: int = 3000
    """For APPEND and COMMIT, whose answers wait for the follower's disk."""
    push_timeout_ms: int = 1000
    """The oldest unanswered APPEND of a peer is sent again after this long; also how long a follower keeps an
    entry that does not continue its log."""
    commit_interval_ms: int = 1000
    """A separate COMMIT is sent at most this often, to a peer that gets no APPEND."""
    leak_check_interval_ms: int = 1000
    error_backoff_ms: int = 500
    """A dispatcher pauses this long after an error (seeds S0, S2)."""
    ack_timeout_ms: int = 2500
    """How long an append may wait for a quorum."""
    barrier_timeout_ms: int = 3000
    """How long a read may wait for the leader to confirm its leadership."""
    read_hedge_ms: int = 20
    """How long reads wait for the quorum that was asked before the other members are asked as well: a few round trips
    of a local network."""
    watermark_log_interval_ms: int = 3000
    checkpoint_interval_ms: int = 3000
    transfer_timeout_ms: int = 1000
    """How long a leader waits for its successor to catch up, and how long the successor waits to catch up and then to
    win its election (R)."""
    preferred_check_interval_ms: int = 1000
    """How often a leader checks whether a preferred member could lead instead (R)."""
    disk_stall_ms: int = 6000
    """A leader whose disk has not completed a flush for this long steps down."""
    clock_drift_ratio: float = 0.1
    """By how much two members' monotonic clocks may differ in rate; a leader's lease is shortened by this fraction."""

    @property
    def lease_ms(self) -> int:
        """How long a follower stays with its leader after the last heartbeat, and votes for no one else."""
        return self.heartbeat_interval_ms * self.max_heartbeat_leak


DEFAULT_TIMING: Final = DLedgerTiming()

FAST_TIMING: Final = DLedgerTiming(
    heartbeat_interval_ms=100,
    max_heartbeat_leak=5,
    min_vote_interval_ms=40,
    max_vote_interval_ms=160,
    vote_wait_ms=300,
    rpc_timeout_ms=400,
    push_rpc_timeout_ms=1000,
    push_timeout_ms=400,
    commit_interval_ms=100,
    leak_check_interval_ms=250,
    error_backoff_ms=50,
    barrier_timeout_ms=1500,
    disk_stall_ms=1000,
)
"""For harness runs, so that a minute holds many elections: a lease of half a second. The stall limit is two leases,
because on a shared machine an ordinary fsync may take a few hundred milliseconds."""

TIMINGS: Final[Mapping[str, DLedgerTiming]] = MappingProxyType({"default": DEFAULT_TIMING, "fast": FAST_TIMING})


@dataclass(frozen=True, slots=True, kw_only=True)
class DLedgerConfig:
    """One member's configuration.

    `peers` maps every member's id, this one's included, to the address that this node dials for it; `listen` is the
    address that this node listens on ("ip:port", port 0 for any). The log lies below `data_dir`/dledger.
    """

    group: str
    self_id: str
    peers: Mapping[str, str]
    listen: str
    data_dir: str
    flush_mode: FlushMode = "sync"
    """`sync`: an entry counts as held by a member once it is synced. `async`: once it is written, as in DLedger (R);
    a power cut may then lose acknowledged entries."""
    flush_interval_ms: int = 10
    """Mode `async`: the shortest time between two syncs (R: flushFileInterval; flushIntervalCommitLog elsewhere)."""
    flush_least_pages: int = 0
    """Mode `async`: the fewest unsynced pages of 4 KiB worth a sync (R: flushCommitLogLeastPages; DLedger: 0)."""
    flush_thorough_interval_ms: int = 10_000
    """Mode `async`: after this long everything is synced, however little (R: flushCommitLogThoroughInterval)."""
    timing: DLedgerTiming = field(default_factory=DLedgerTiming)
    step_down_on_stalled_disk: bool = True
    members_may_change: bool = False
    """Whether members may be added to and removed from the group while it runs. If so, a member accepts leaders and
    candidates that it does not know: they may have joined while it was down."""
    joins: bool = False
    """Whether this member joins a running group: it belongs to the group only once the group's log says so. `peers`
    then lists the members that it may hear from until that time, and this one."""
    preferred_leaders: tuple[str, ...] = ()
    """Members to which any other leader transfers its leadership when they can take it, in order of preference (R:
    preferredLeaderIds)."""
    max_transfer_lag: int = 1000
    """The most entries that a member may lack and still be given leadership (R: maxLeadershipTransferWaitIndex)."""
    snapshot_threshold_entries: int = 100_000
    """Applied entries after which a snapshot is taken (R: snapshotThreshold, 1000, but off by default); 0: only when
    one is needed, which is before the log loses its beginning and for a follower."""
    snapshots_kept: int = 3
    """How many snapshots are kept (R: maxSnapshotReservedNum)."""
    snapshot_removes_log: bool = False
    """Whether entries that a snapshot includes are removed from the log, file by file. If not, something else decides
    how long the log is kept, such as a broker's retention."""
    snapshot_log_kept_entries: int = 10
    """The last included entries that are kept then, for followers that are nearly up to date (R)."""
    data_segment_size_bytes: int = 1024 * MEBIBYTE
    """Must be the same on all members: positions are part of the entries."""
    index_segment_size_bytes: int = 5 * 1024 * 1024 * 32
    max_pending_appends: int = 10_000
    """Appends that may wait for a quorum; beyond, LEADER_PENDING_FULL (R)."""
    max_pending_bytes: int = 64 * MEBIBYTE
    """Bytes of the log that may wait for this node's disk; beyond, LEADER_PENDING_FULL."""
    max_cached_bytes: int = 32 * MEBIBYTE
    """The newest entries kept in memory for followers that are nearly up to date and for readers."""
    max_pending_pushes: int = 1000
    """Entries in flight to one peer, from which on nothing more is pushed to it (seeds S0, S2), and those of one push:
    a push is not cut to fill up the rest, which would have to be committed and dispatched apart."""
    push_pipeline_depth: int = 3
    """Pushes in flight to one peer: while one is being written, others are on their way there and back. Entries that
    are appended meanwhile share the next push: a push for each would cost both sides more than the entries do."""
    max_push_bytes: int = 256 * 1024
    """Bytes of entries in one push, unless a single entry is larger: a few milliseconds of work for either side."""
    peer_push_throttle_point_bytes: int = 300 * MEBIBYTE
    peer_push_quota_bytes: int = 20 * MEBIBYTE
    """A peer that is further behind than the throttle point gets at most this much per second."""

    def __post_init__(self) -> None:
        problems = []
        if self.self_id not in self.peers:
            problems.append(f"peers has no entry for this member, {self.self_id}")
        if self.data_segment_size_bytes < 4096:
            problems.append("data_segment_size_bytes is below 4096")
        if self.index_segment_size_bytes < 32 or self.index_segment_size_bytes % 32:
            problems.append("index_segment_size_bytes is no multiple of 32")
        for name in (
            "max_pending_appends",
            "max_pending_bytes",
            "max_pending_pushes",
            "push_pipeline_depth",
            "flush_interval_ms",
            "flush_thorough_interval_ms",
            "snapshots_kept",
        ):
            if getattr(self, name) < 1:
                problems.append(f"{name} is below 1")
        if self.joins and not self.members_may_change:
            problems.append("joins is for groups whose members_may_change")
        strangers = [member for member in self.preferred_leaders if member not in self.peers]
        if strangers:
            problems.append(f"preferred_leaders names {', '.join(strangers)}, which peers does not")
        for name in ("flush_least_pages", "snapshot_threshold_entries", "snapshot_log_kept_entries"):
            if getattr(self, name) < 0:
                problems.append(f"{name} is below 0")
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def member_ids(self) -> tuple[str, ...]:
        """Every member, in an order that is the same on all of them."""
        return tuple(sorted(self.peers))

    @property
    def quorum_size(self) -> int:
        """Members that make a majority."""
        return len(self.peers) // 2 + 1

    @property
    def ledger_dir(self) -> str:
        return f"{self.data_dir}/dledger"

    @property
    def max_entry_size_bytes(self) -> int:
        """The largest entry, header included. Alone in a file, it must leave room for a blank's header."""
        return min(self.data_segment_size_bytes - 8, MAX_ENTRY_SIZE_BYTES)

"""The interfaces that faults act on.

A nemesis knows nothing of namespaces, containers or simulated links. It gets its hosts from a `Target` and
acts through small interfaces; each cluster implements those it can. An interface that a cluster lacks is
`None` on its target, and the harness reports it by name before the test starts.

Vocabulary: a *link* is a directed pair (source host, destination host). A *grudge* maps a host to the hosts
whose packets it drops, so {b: {a}} cuts only the direction a -> b, and one-way cuts are ordinary values.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from nemesis.triggers import Occurrence, Trigger

__all__ = [
    "ABILITIES",
    "DOWN",
    "MONOTONIC_PPM",
    "PAUSED",
    "PROBE_ATTEMPTS",
    "RUNNING",
    "BitFlipped",
    "Clients",
    "ClockReading",
    "ClockSkew",
    "Clocks",
    "CountsRefusals",
    "CountsTraffic",
    "DiskFault",
    "DiskProbe",
    "DiskStep",
    "Disks",
    "FaultMet",
    "FindsBypasses",
    "Grudge",
    "Link",
    "LinkMeasure",
    "LinkShape",
    "LinkTraffic",
    "Links",
    "NameFault",
    "NameLookup",
    "Names",
    "Network",
    "Operator",
    "PowerCut",
    "ProbeResult",
    "ProcessMember",
    "ProcessView",
    "Processes",
    "ReplicaView",
    "ResourceLimit",
    "ResourceUse",
    "Resources",
    "SeesMembers",
    "SlowClient",
    "Target",
    "Triggers",
    "UnreadAnswers",
    "links_of",
]

ABILITIES: Mapping[str, Sequence[str]] = {
    "network": ("cut",),
    "processes": ("kill", "pause"),
    "clocks": ("wall", "monotonic"),
    "disks": (
        *("stall-fsync", "stall", "slow", "full", "error-write", "error-fsync", "error-read", "power", "flip"),
        *("freeze", "fill", "shutdown", "crash"),
    ),
    "links": ("delay", "loss", "duplicate", "reorder", "rate", "corrupt"),
    "resources": ("cpu", "memory", "processes", "descriptors"),
    "operator": ("transfer", "members", "promote"),
    "clients": ("stuck", "slow"),
    "names": ("gone", "silent", "slow", "wrong", "unused"),
}
"""Interface -> its possible abilities. A cluster can have an interface and lack some of its abilities. `operator`
depends on the system under test alone, `clients` on the system and the cluster, the others on the cluster."""

Grudge = Mapping[str, frozenset[str]]
"""destination host -> source hosts whose packets the destination drops"""


class Link(NamedTuple):
    """One direction between two hosts: packets from `source` to `destination`."""

    source: str
    destination: str


def links_of(grudge: Grudge) -> frozenset[Link]:
    """The directed links that a grudge cuts."""
    return frozenset(Link(source, destination) for destination, sources in grudge.items() for source in sources)


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result of probing one link. `passed` is True when the probe's bytes arrived at the destination.

    `partial` means that the link was probed in several ways (existing and new connections, say) with different
    results. Then `passed` is True, since something arrived, but the link is neither cut nor whole.

    `was_sent` is False if the source could send nothing at all: then nothing can have arrived, whether or not the link
    is cut.
    """

    link: Link
    passed: bool
    detail: str = ""
    partial: bool = False
    was_sent: bool = True


PROBE_ATTEMPTS = 20
"""Datagrams that a probe sends until one arrives: one lost packet on a lossy link is not a cut. The worst shaped link
loses 40 %, so all of them get lost once in a hundred million probes; with four attempts it would be one in forty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTraffic:
    """What the programs on two hosts have sent along one link since the cluster was started, not counting the harness's
    own traffic. `passed_bytes` arrived, `stopped_bytes` ran into a cut, as did `stopped_connections` if the network
    counts connection attempts separately. Bytes include packet headers if the network sees them."""

    passed_bytes: int = 0
    stopped_bytes: int = 0
    stopped_connections: int = 0

    @property
    def was_used(self) -> bool:
        """Whether there was any traffic at all."""
        return bool(self.passed_bytes or self.ran_into_cut)

    @property
    def ran_into_cut(self) -> bool:
        """Whether anything was stopped."""
        return bool(self.stopped_bytes or self.stopped_connections)

    def since(self, earlier: LinkTraffic) -> LinkTraffic:
        """The traffic since an earlier reading. Raises ValueError when the counters were reset in between."""
        found = LinkTraffic(
            passed_bytes=self.passed_bytes - earlier.passed_bytes,
            stopped_bytes=self.stopped_bytes - earlier.stopped_bytes,
            stopped_connections=self.stopped_connections - earlier.stopped_connections,
        )
        if min(found.passed_bytes, found.stopped_bytes, found.stopped_connections) < 0:
            raise ValueError("the counters of a link were reset: its traffic is not known")
        return found


@runtime_checkable
class CountsTraffic(Protocol):
    """A network that counts what the programs on its hosts send each other."""

    async def traffic(self, links: Collection[Link]) -> Mapping[Link, LinkTraffic]:
        """The traffic that passed each of these links, and the traffic that was stopped."""
        ...


@runtime_checkable
class FindsBypasses(Protocol):
    """A network that its hosts' programs can bypass, and that detects it when they do."""

    async def bypasses(self, links: Collection[Link]) -> Sequence[str]:
        """How traffic between the ends of these links bypasses them now, or may, as lines that name the fix; empty if
        it does not."""
        ...


class Network(Protocol):
    """The network between the hosts of a cluster."""

    async def cut(self, fault_id: str, grudge: Grudge) -> None:
        """Drop packets as `grudge` says until `heal(fault_id)`. Cuts of several faults add up."""
        ...

    async def heal(self, fault_id: str) -> None:
        """Undo one fault's cut; links that another fault also cuts stay cut. Idempotent."""
        ...

    async def heal_all(self) -> None:
        """Undo every cut. Idempotent; safe in any state, even half-way through a failed `cut`."""
        ...

    async def probe(self, links: Collection[Link], *, timeout_s: float) -> Sequence[ProbeResult]:
        """Send real bytes along each link and see whether they arrive within `timeout_s` seconds.

        The bytes take the path that the nodes' own packets take. One result per link, in the given order.
        """
        ...


RUNNING = "running"
PAUSED = "paused"
DOWN = "down"


@dataclass(frozen=True, slots=True)
class ProcessView:
    """The state of a replica's processes at one moment. `state` is RUNNING, PAUSED or DOWN; `starts` counts how often
    the replica was started in this run; `pids` are the pids, on its host, of the first process of each of its programs
    that has not ended, empty when down or not known. `ended_by_itself`: the replica is down although no fault has ended
    it since its last start. `was_forced`: a fault sent it SIGTERM, and it took a SIGKILL to end it;
    `forced_total` counts how often that has happened in this run."""

    host: str
    state: str
    starts: int
    pids: Sequence[int] = ()
    ended_by_itself: bool = False
    was_forced: bool = False
    forced_total: int = 0


class ProcessMember(NamedTuple):
    """One process of a replica, as the kernel of its host sees it, identified by its pid and its start time in ticks
    since boot. `letter` is its state in /proc: R, S, D, T, ... `meets_signal` tells of a process that waits in the
    kernel (D) that it will stop, or end, before it runs again."""

    pid: int
    start_ticks: int
    letter: str
    name: str
    meets_signal: bool = False

    def __str__(self) -> str:
        return f"process {self.pid} ({self.name})"


@runtime_checkable
class SeesMembers(Protocol):
    """Processes that are visible one by one: a replica's first process and all that it started."""

    async def members(self, host: str) -> Sequence[ProcessMember] | None:
        """The processes of the replica of `host` since its last start that have not ended; None if not known."""
        ...


class Processes(Protocol):
    """The replicas' processes, one replica per host. Faults add up: a replica is up when no fault keeps it down, and
    runs when no fault pauses it. Every method returns once its effect is complete."""

    async def end(self, fault_id: str, hosts: Collection[str], *, signal_name: str = "KILL") -> None:
        """End the replicas of `hosts` by SIGKILL, or SIGTERM for "TERM", and keep them down until released."""
        ...

    async def crash_loop(self, fault_id: str, hosts: Collection[str], *, up_s: float) -> None:
        """Kill the replicas, start them again, and kill them again after `up_s` seconds, until released."""
        ...

    async def pause(self, fault_id: str, hosts: Collection[str]) -> None:
        """Stop the replicas by SIGSTOP until released; a replica that is started meanwhile is stopped as well."""
        ...

    async def release(self, fault_id: str) -> None:
        """Undo one fault: continue and start again what no other fault holds. Also starts replicas of its hosts
        that ended on their own. Idempotent."""
        ...

    async def release_all(self) -> None:
        """Undo every fault and start every replica that is down. Idempotent; safe in any state."""
        ...

    async def revive(self, hosts: Collection[str]) -> Sequence[str]:
        """Start replicas that have ended although no fault keeps them down. Returns those started."""
        ...

    async def look(self, host: str) -> ProcessView:
        """The state of the processes themselves, as their host sees them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceLimit:
    """What a replica may use at most; `kind` is an ability of resources. "cpu": `percent` of one processor. "memory":
    `spare_mib` beyond the data that its processes hold at that moment, and no more than they use then. "processes" and
    "descriptors": no more than exist at that moment."""

    kind: str
    percent: int = 0
    spare_mib: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceUse:
    """What the kernel reports about one kind of limit on one replica. `met` counts how often the limit was hit since
    the cluster was started, None if the kernel does not count that; `astray` are the replica's processes that are not
    under the limit, by name; `detail` is limit and usage as text."""

    is_limited: bool
    met: int | None
    astray: Sequence[str] = ()
    detail: str = ""


class Resources(Protocol):
    """Limits on what replicas may use of their hosts. If a host has several limits of one kind, the lowest counts."""

    async def limit(self, fault_id: str, limits: Mapping[str, ResourceLimit]) -> None:
        """Limit the current processes of the hosts' replicas, and the processes that these start, until released."""
        ...

    async def usage(self, host: str, kind: str) -> ResourceUse:
        """What the kernel reports about one kind of limit on the replica of `host`, whether or not one is set."""
        ...

    async def release(self, fault_id: str) -> None:
        """Undo one fault. Idempotent; safe after half a `limit`."""
        ...

    async def release_all(self) -> None:
        """Undo every limit. Idempotent; safe in any state."""
        ...


MONOTONIC_PPM = (-750_000, 2_000_000)
"""Bounds on the total rate error of a monotonic clock under all faults: from a quarter of its rate to three times its
rate. It must always go forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockSkew:
    """How a host's clock differs from the true one: by an offset, by a rate that accumulates from the injection on,
    and by a strobe, an offset that comes and goes every period. If `step_ms` is above 0, the accumulated error is reset
    each time it reaches that value: the clock is stepped right. `affects_monotonic` changes the rate of the monotonic
    clock instead of the wall clock, and nothing else: a monotonic clock never goes back."""

    offset_ms: int = 0
    rate_ppm: int = 0
    strobe_ms: int = 0
    strobe_period_ms: int = 0
    affects_monotonic: bool = False
    step_ms: int = 0

    @property
    def is_constant(self) -> bool:
        """Whether the wall clock is off by the same amount all the time: it is set once, and left alone after that."""
        return not (self.rate_ppm or self.strobe_ms or self.affects_monotonic)

    def gained_ms(self, elapsed_s: float) -> float:
        """The error (ms) that the rate alone accumulates in `elapsed_s` seconds."""
        gained_ms = self.rate_ppm * elapsed_s / 1000
        return math.fmod(gained_ms, self.step_ms) if self.step_ms else gained_ms


@dataclass(frozen=True, slots=True)
class ClockReading:
    """Clocks as reported by a replica, or as read where it runs. `offset_ms` is its wall clock minus the true one (the
    harness's, corrected by the baseline skew between hosts if there is one), within `uncertainty_ms` either way;
    `monotonic_s` is its monotonic clock at the true monotonic time `at_s`."""

    offset_ms: float
    uncertainty_ms: float
    monotonic_s: float
    at_s: float


@dataclass(frozen=True, slots=True)
class FaultMet:
    """How often the replica of one host, its children included, has met a fault since the fault began: how many `calls`
    it made that the fault applies to, and how many of them `met` it; None if that cannot be counted. `past` describes
    what else the replica does that may bypass the fault; empty if nothing such is known."""

    calls: int | None
    met: int | None
    past: str = ""


class Clocks(Protocol):
    """The clocks that the replicas read. Skews of several faults add up."""

    def mechanism(self, host: str) -> str:
        """The mechanism that skews the clock of a host's replica, in a word or two."""
        ...

    async def skew(self, fault_id: str, skews: Mapping[str, ClockSkew]) -> None:
        """Skew the clocks of hosts until released; in force on return."""
        ...

    async def release(self, fault_id: str) -> None:
        """Undo one fault: wall clocks step back to the true time, monotonic clocks continue at the true rate from
        where they are. Idempotent."""
        ...

    async def release_all(self) -> None:
        """Undo every skew. Idempotent; safe in any state."""
        ...

    async def reaches(self, host: str, pid: int | None, *, monotonic: bool = False) -> str | None:
        """None when the process `pid` of `host` feels a skew of the wall clock in force, or of the `monotonic` one;
        otherwise why not, in one line."""
        ...

    async def read(
        self, host: str, *, pauses_s: Sequence[float] = (), apart_ms: float = 0.0, timeout_s: float
    ) -> Sequence[ClockReading]:
        """Read the clocks where the host's replica runs: one reading more than there are pauses (s). If `apart_ms` is
        above 0, stops once two readings of the wall clock are that far apart (ms). Raises RuntimeError when nothing
        could be read within `timeout_s` seconds."""
        ...

    async def met(self, fault_id: str) -> Mapping[str, FaultMet]:
        """How often the replica of each host has read a clock that a fault skews, by host."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFault:
    """What is wrong with a host's disk; `kind` is an ability of disks other than power and crash, `delay_ms` for slow.

    The kinds that affect a whole file system are `freeze` (changes wait in the kernel), `fill` (no space is left) and
    `shutdown` (every access fails until it is mounted again, for which the host's programs are ended).
    """

    kind: str
    delay_ms: int = 0


@dataclass(frozen=True, slots=True)
class DiskStep:
    """How one step of a disk probe ended: "ok", the name of an error (ENOSPC, EIO), "no answer" if it had not
    returned when time was up, or "not tried". `seconds` is how long it took, or how long the probe waited for it."""

    outcome: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class DiskProbe:
    """The result of probing a host's disk, step by step, on the file system and in the path of the replica's data."""

    host: str
    write: DiskStep
    sync: DiskStep
    read: DiskStep


@dataclass(frozen=True, slots=True)
class PowerCut:
    """What a power cut removed from a host's disk. `recorded` is how many changes by its replica the log of unsynced
    data had recorded since the previous cut. None where the mechanism cannot count."""

    lost_operations: int | None
    lost_bytes: int | None
    detail: str = ""
    recorded: int | None = None


@dataclass(frozen=True, slots=True)
class BitFlipped:
    """One changed byte: `before` became `after`, at `offset` of the file. `inode` is the file's inode number; 0 if it
    has none."""

    path: str
    offset: int
    before: int
    after: int
    inode: int = 0

    def __str__(self) -> str:
        return f"byte {self.offset} of {self.path} is {self.after:#04x}, was {self.before:#04x}"


class Disks(Protocol):
    """The disks that hold the replicas' data. Faults of several ids add up."""

    async def impair(self, fault_id: str, faults: Mapping[str, DiskFault]) -> None:
        """Put disk faults in force on hosts until released."""
        ...

    async def expect_cut(self, fault_id: str, hosts: Collection[str]) -> float:
        """Announce that the power of running replicas will be cut. If their unsynced changes have not been logged since
        their start, logging begins now, and what they wrote before is taken as durable. Returns how many seconds they
        should keep running before the cut; 0 if everything is logged already. Raises RuntimeError."""
        ...

    async def cut_power(self, fault_id: str, host: str, *, kind: str = "ext4", seed: int = 0) -> PowerCut:
        """Lose what `host` wrote and did not sync, by a model of what a sync makes durable (`ext4`, `posix`, `torn`),
        or what the kernel had not written yet (`crash`). `seed` decides random choices. Its replica must be down.

        Raises RuntimeError when the loss cannot be determined reliably.
        """
        ...

    def lost(self, fault_id: str) -> Mapping[str, PowerCut]:
        """What the power cuts of a fault removed, by host; until it is released."""
        ...

    async def flip_bit(self, fault_id: str, host: str, *, files: str, place: float, bit: int) -> BitFlipped:
        """Flip a bit at rest, in the largest of the files that match the glob pattern `files` below the data directory
        of `host`, at `place` from 0 (its beginning) to 1 (the end of its non-zero data). Its replica must be down. The
        bit is restored when the fault is released, unless the byte has been written since. Raises RuntimeError.
        """
        ...

    def flipped(self, fault_id: str) -> Mapping[str, BitFlipped]:
        """The bits that a fault has flipped, by host; until it is released."""
        ...

    async def release(self, fault_id: str) -> None:
        """Undo one fault. Idempotent; safe after half an `impair`."""
        ...

    async def release_all(self) -> None:
        """Undo every fault; frozen file systems are thawed. Idempotent; safe in any state."""
        ...

    async def probe(self, host: str, *, timeout_s: float) -> DiskProbe:
        """Write, sync and read a small file beside the replica's data, as its process would."""
        ...

    def mechanism(self, host: str) -> str:
        """The mechanism that injects faults into the replica of a host, in a word or two."""
        ...

    async def reaches(self, host: str, pid: int | None) -> str | None:
        """None when the process `pid` of `host` feels disk faults; otherwise why not, in one line."""
        ...

    async def met(self, fault_id: str) -> Mapping[str, FaultMet]:
        """How often the replica of each host has met a fault of `impair`, by host. For flipped bits, how often it has
        read one, if that is counted. Empty for any other fault."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkShape:
    """How bad one direction of a link is: a delay of `delay_ms` plus or minus `jitter_ms`; percentages of packets
    that are lost, duplicated, sent ahead of the delayed ones, or have a bit flipped; a rate limit in bytes per second
    (0: no limit)."""

    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    loss_percent: float = 0.0
    duplicate_percent: float = 0.0
    reorder_percent: float = 0.0
    rate_bytes_per_s: float = 0.0
    corrupt_percent: float = 0.0

    def __post_init__(self) -> None:
        for name in ("delay_ms", "jitter_ms", "rate_bytes_per_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}")
        for name in ("loss_percent", "duplicate_percent", "reorder_percent", "corrupt_percent"):
            if not 0 <= getattr(self, name) <= 100:
                raise ValueError(f"{name} must be 0 to 100, not {getattr(self, name)}")

    def on_top_of(self, other: LinkShape) -> LinkShape:
        """Two faults on one link: delays add up, losses are independent, the lower rate counts."""

        def either(one: float, two: float) -> float:
            return 100 * (1 - (1 - one / 100) * (1 - two / 100))

        rates = [rate for rate in (self.rate_bytes_per_s, other.rate_bytes_per_s) if rate]
        return LinkShape(
            delay_ms=self.delay_ms + other.delay_ms,
            jitter_ms=self.jitter_ms + other.jitter_ms,
            loss_percent=either(self.loss_percent, other.loss_percent),
            duplicate_percent=either(self.duplicate_percent, other.duplicate_percent),
            reorder_percent=either(self.reorder_percent, other.reorder_percent),
            rate_bytes_per_s=min(rates, default=0.0),
            corrupt_percent=either(self.corrupt_percent, other.corrupt_percent),
        )


@dataclass(frozen=True, slots=True)
class LinkMeasure:
    """What the harness's probe packets met on one link. `delays_ms` has one entry for each that arrived, in the
    order of sending, accurate to `within_ms`, because two hosts' clocks are compared. `seconds` is from the first
    sending to the last arrival. Packets that arrived with changed bytes count as `damaged` and not as received. Those
    that the source could not send are not counted."""

    link: Link
    sent: int
    received: int
    duplicates: int
    out_of_order: int
    delays_ms: Sequence[float]
    seconds: float
    damaged: int = 0
    within_ms: float = 0.0


@runtime_checkable
class CountsRefusals(Protocol):
    """Links whose hosts count the packets that they drop as damaged."""

    async def refused(self, hosts: Collection[str]) -> Mapping[str, int]:
        """TCP segments that the kernel of each host has dropped for a wrong checksum since it was started."""
        ...


class Links(Protocol):
    """The quality of the links between hosts. Shapes of several faults on one link add up."""

    @property
    def mechanism(self) -> str:
        """The mechanism that shapes the links, in a word or two: netem, the relay, proxies."""
        ...

    async def shape(self, fault_id: str, shapes: Mapping[Link, LinkShape]) -> None:
        """Make directed links bad until released; in force on return."""
        ...

    async def release(self, fault_id: str) -> None:
        """Undo one fault's shaping. Idempotent."""
        ...

    async def release_all(self) -> None:
        """Undo all shaping. Idempotent; safe in any state."""
        ...

    async def measure(
        self, links: Collection[Link], *, count: int, size_bytes: int, timeout_s: float
    ) -> Mapping[Link, LinkMeasure]:
        """Send `count` probe packets of `size_bytes` along each link and observe how they arrive; waits at most
        `timeout_s` seconds for the last of them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowClient:
    """Clients of one host that hardly read responses: how many there are, and how many bytes per second each reads."""

    connections: int
    bytes_per_s: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadAnswers:
    """What the kernel of a host reports about the replica's ends of slow clients' connections: how many there are, how
    many of them have data in their send queue, and how much. `read_bytes` is what these clients have read, of at most
    `may_read_bytes` by then; `closed` counts connections that the replica has ended."""

    connections: int
    stuck: int
    queued_bytes: int
    read_bytes: int = 0
    may_read_bytes: int = 0
    closed: int = 0

    def __str__(self) -> str:
        ended = f", {self.closed} closed by the replica" if self.closed else ""
        queued = f"{self.queued_bytes} bytes in the send queues of {self.stuck}"
        return f"{queued} of {self.connections} connections, {self.read_bytes} bytes read{ended}"


class Clients(Protocol):
    """Clients that the harness connects to the replicas in addition to those of the workload."""

    async def connect(self, fault_id: str, clients: Mapping[str, SlowClient]) -> None:
        """Connect clients to the replicas of hosts, and have them request long responses until released. A client whose
        connection the replica ends reconnects."""
        ...

    async def unread(self, fault_id: str) -> Mapping[str, UnreadAnswers]:
        """The state of a fault's connections, by host; also after they are released."""
        ...

    async def release(self, fault_id: str) -> None:
        """Close the connections of one fault. Idempotent."""
        ...

    async def release_all(self) -> None:
        """Close the connections of every fault. Idempotent; safe in any state."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NameFault:
    """How the name service of a host answers queries for others; `kind` is an ability of names, `delay_ms` the delay of
    slow answers. Names that are gone do not exist (NXDOMAIN); wrong names resolve to another host, unused names to an
    address that nobody has; a silent service does not answer."""

    kind: str
    delay_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NameLookup:
    """The result of a query for one name: `found` is an address, "gone" for a name that does not exist, or "silent"
    if no answer came in time. `right` is the address that the name should resolve to, `leads_to_host` whether `found`
    is the address of any host, `seconds` how long it took."""

    name: str
    found: str
    right: str
    leads_to_host: bool
    seconds: float


class Names(Protocol):
    """The name service by which the programs of each host find the other hosts. If several faults are in force, silent
    takes precedence over gone, gone over wrong and unused, and the longest delay counts."""

    async def disturb(self, fault_id: str, faults: Mapping[str, NameFault]) -> None:
        """Put faults in force on hosts until released; in force on return."""
        ...

    async def look_up(self, host: str, *, timeout_s: float) -> Sequence[NameLookup]:
        """Query the service of a host for every other host, as its programs would; waits `timeout_s` seconds for an
        answer. These queries are not counted. Raises RuntimeError when the host cannot be reached."""
        ...

    async def reaches(self, host: str) -> str | None:
        """None when every process of the host's replica uses this service and no other before it; otherwise why not, in
        one line."""
        ...

    async def met(self, fault_id: str) -> Mapping[str, FaultMet]:
        """How often the replica of each host has queried the address of another host since the fault began, and how
        often the answer was faulty."""
        ...

    async def release(self, fault_id: str) -> None:
        """Undo one fault. Idempotent; safe after half a `disturb`."""
        ...

    async def release_all(self) -> None:
        """Undo every fault. Idempotent; safe in any state."""
        ...


class Triggers(Protocol):
    """Events at replicas as they happen: observed by the cluster, or read from the replicas' logs."""

    async def wait(self, trigger: Trigger, *, since_s: float, timeout_s: float) -> Occurrence | None:
        """The trigger's first occurrence since a time of the event loop; None when there is none within `timeout_s`
        seconds."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """What a replica reports about itself. `term` is -1 and `members` empty if the system has no such concept.
    `members` are the members of its group as it knows them, including those of an uncommitted change if
    `members_committed` is False. `end` is the end of its log in the system's own unit, -1 if not known."""

    host: str
    leads: bool
    takes_writes: bool
    follows: bool
    term: int = -1
    members: frozenset[str] = frozenset()
    members_committed: bool = True
    end: int = -1


class Operator(Protocol):
    """What an operator of the system does on purpose, through the system's own requests. Each method tries once."""

    async def view(self, host: str, *, timeout_s: float) -> ReplicaView | None:
        """What the replica of `host` reports about itself; None when it does not answer in time."""
        ...

    async def transfer(self, fault_id: str, host: str) -> None:
        """Have the leader transfer leadership to `host`. Raises RuntimeError with the reason if that is refused."""
        ...

    def transferred(self, fault_id: str) -> tuple[str, int] | None:
        """(host, term) of the leader that a completed transfer led to; None while none is complete."""
        ...

    async def remove(self, fault_id: str, host: str) -> None:
        """Remove `host` from the group until it is let in again. Raises RuntimeError."""
        ...

    async def let_in(self, fault_id: str) -> None:
        """Add the hosts that a fault removed to the group again. Idempotent. Raises RuntimeError."""
        ...

    async def promote(self, fault_id: str, host: str) -> None:
        """Make the replica of `host` the master and restart it as such; the former master is down. Raises
        RuntimeError."""
        ...

    async def release_all(self) -> None:
        """Let in every removed host. Idempotent; safe in any state."""
        ...


class Target(Protocol):
    """What a nemesis may act on during one run. An interface that this cluster lacks is None."""

    @property
    def hosts(self) -> Sequence[str]:
        """Names of the hosts that run replicas, in a fixed order (n1, n2, ...)."""
        ...

    @property
    def network(self) -> Network | None: ...

    @property
    def processes(self) -> Processes | None: ...

    @property
    def clocks(self) -> Clocks | None: ...

    @property
    def disks(self) -> Disks | None: ...

    @property
    def links(self) -> Links | None: ...

    @property
    def resources(self) -> Resources | None: ...

    @property
    def operator(self) -> Operator | None: ...

    @property
    def triggers(self) -> Triggers | None: ...

    @property
    def clients(self) -> Clients | None: ...

    @property
    def names(self) -> Names | None: ...

    def missing(self, interface: str, ability: str) -> str | None:
        """Why this target lacks an ability of an interface (see ABILITIES), as one line that names the fix; None
        if it has the ability."""
        ...

    def stored_files(self, role: str) -> str | None:
        """Where a replica keeps its files with a role (log, vote, checkpoint): a glob pattern below its data
        directory. None if the system, with its settings, has no such files."""
        ...

    async def leaders(self) -> Sequence[str]:
        """Hosts whose replicas now report that they lead, the highest term first. Empty when none does."""
        ...

    async def answers(self, host: str, *, timeout_s: float) -> bool:
        """Whether the replica of `host` answers a status request within `timeout_s` seconds."""
        ...

    @property
    def tells_time(self) -> bool:
        """Whether replicas can be asked for the time at all."""
        ...

    async def read_clock(self, host: str, *, timeout_s: float) -> ClockReading | None:
        """The clocks that the replica of `host` reports; None when it does not answer."""
        ...

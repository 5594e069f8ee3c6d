"""The interfaces that faults act on.

A nemesis knows nothing of namespaces, containers or simulated links. It asks a `Target` for its hosts and
acts through small interfaces; each cluster implements those it can. An interface that a cluster lacks is
`None` on its target, and the harness says so by name before the test starts.

Vocabulary: a *link* is a directed pair (source host, destination host). A *grudge* maps a host to the hosts
whose packets it drops, so {b: {a}} cuts only the direction a -> b and one-way cuts are ordinary values.
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
"""Interface -> what it may be able to do. A cluster can have an interface and lack some of its abilities; `operator` is
the system's own affair, on any cluster, and `clients` that of both."""

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
    """What a probe of one link saw. `passed` is True when the probe's bytes arrived at the destination.

    `partial` says that a link was probed in several ways (existing and new connections, say) that did not
    agree. Then `passed` is True, since something arrived, but the link is neither cut nor whole.
    """

    link: Link
    passed: bool
    detail: str = ""
    partial: bool = False


PROBE_ATTEMPTS = 20
"""Datagrams along a link within a probe's time while none has arrived: one lost packet on a lossy link is not a cut.
The worst shaped link loses 40 %, so all of them once in a hundred million; four would be one probe in forty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTraffic:
    """What the programs on two hosts have sent along one link since the cluster was started; what the harness sent
    itself is not counted. `passed_bytes` arrived, `stopped_bytes` ran into a cut, as did `stopped_connections` where a
    network sees attempts to connect apart from bytes. Bytes are those that the network carries, headers included where
    it sees them."""

    passed_bytes: int = 0
    stopped_bytes: int = 0
    stopped_connections: int = 0

    @property
    def was_used(self) -> bool:
        """Whether there was anything at all."""
        return bool(self.passed_bytes or self.ran_into_cut)

    @property
    def ran_into_cut(self) -> bool:
        """Whether anything was stopped."""
        return bool(self.stopped_bytes or self.stopped_connections)

    def since(self, earlier: LinkTraffic) -> LinkTraffic:
        """What there was since an earlier reading. Raises ValueError when the counting began anew in between."""
        found = LinkTraffic(
            passed_bytes=self.passed_bytes - earlier.passed_bytes,
            stopped_bytes=self.stopped_bytes - earlier.stopped_bytes,
            stopped_connections=self.stopped_connections - earlier.stopped_connections,
        )
        if min(found.passed_bytes, found.stopped_bytes, found.stopped_connections) < 0:
            raise ValueError("the counters of a link began anew: nothing can be said of what passed it")
        return found


@runtime_checkable
class CountsTraffic(Protocol):
    """A network that counts what the programs on its hosts send each other."""

    async def traffic(self, links: Collection[Link]) -> Mapping[Link, LinkTraffic]:
        """What went along each of these links, and what did not get through."""
        ...


@runtime_checkable
class FindsBypasses(Protocol):
    """A network that its hosts' programs can get around, and that sees when they do."""

    async def bypasses(self, links: Collection[Link]) -> Sequence[str]:
        """What goes, or may go, between the ends of these links and not over them, as lines that name the mend; none
        when there is nothing of the kind at this moment."""
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
        """Undo every cut. Idempotent; safe in any state, also half-way through a failed `cut`."""
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
    """What one look at a replica's process saw. `state` is RUNNING, PAUSED or DOWN; `starts` counts how often
    the replica was started in this run; `pids` are the numbers on its host of the first process of each of its
    programs that has not ended, none when down or not known; `ended_by_itself` says of one that is down that it was
    started and no fault has ended it since; `was_forced` of one that a fault has ended by SIGTERM that it took a
    SIGKILL in the end."""

    host: str
    state: str
    starts: int
    pids: Sequence[int] = ()
    ended_by_itself: bool = False
    was_forced: bool = False


class ProcessMember(NamedTuple):
    """One process of a replica, as the kernel of its host knows it: its number and the time of its start, in ticks
    since the host's own, are nobody else's. `letter` is its state as in /proc: R, S, D, T, ... Of one that waits in the
    kernel (D) `meets_signal` says that it stops, or ends, before it runs on."""

    pid: int
    start_ticks: int
    letter: str
    name: str
    meets_signal: bool = False

    def __str__(self) -> str:
        return f"process {self.pid} ({self.name})"


@runtime_checkable
class SeesMembers(Protocol):
    """Processes of which every single one is seen: a replica's own and all that it started."""

    async def members(self, host: str) -> Sequence[ProcessMember] | None:
        """Those of the replica of `host`, as it was last started, that have not ended; None where nobody tells."""
        ...


class Processes(Protocol):
    """The replicas' processes, one a host. Faults add up: a replica is up when no fault keeps it down, and
    runs when no fault pauses it. Every method returns once what it asks for is so."""

    async def end(self, fault_id: str, hosts: Collection[str], *, signal_name: str = "KILL") -> None:
        """End the replicas of `hosts` by SIGKILL, or SIGTERM for "TERM", and keep them down until released."""
        ...

    async def crash_loop(self, fault_id: str, hosts: Collection[str], *, up_s: float) -> None:
        """Kill the replicas, start them again, and kill them again after `up_s` seconds, until released."""
        ...

    async def pause(self, fault_id: str, hosts: Collection[str]) -> None:
        """Stop the replicas by SIGSTOP until released; one that is started meanwhile is stopped as well."""
        ...

    async def release(self, fault_id: str) -> None:
        """Undo one fault: continue and start again what no other fault holds. Also starts replicas of its hosts
        that ended by themselves. Idempotent."""
        ...

    async def release_all(self) -> None:
        """Undo every fault and start every replica that is down. Idempotent; safe in any state."""
        ...

    async def revive(self, hosts: Collection[str]) -> Sequence[str]:
        """Start replicas that have ended although no fault keeps them down. Returns those started."""
        ...

    async def look(self, host: str) -> ProcessView:
        """The state of the process itself, asked of its host."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceLimit:
    """How little a replica may use; `kind` is an ability of resources. `percent` of one processor for "cpu";
    `spare_mib` for "memory", beyond the data that its processes hold at that moment, and no more than they use then; of
    "processes" and "descriptors" there are to be no more than there are."""

    kind: str
    percent: int = 0
    spare_mib: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceUse:
    """What the kernel says of one kind of limit on one replica. `met` counts how often the limit kept it from something
    since the cluster was started, None where the kernel does not count; `astray` are its processes that the limit does
    not reach, by name; `detail` has limit and use in words."""

    is_limited: bool
    met: int | None
    astray: Sequence[str] = ()
    detail: str = ""


class Resources(Protocol):
    """What replicas may use of their hosts. Of several limits of one kind on a host the lowest counts."""

    async def limit(self, fault_id: str, limits: Mapping[str, ResourceLimit]) -> None:
        """Limit the processes that the replicas of hosts have now, and what these start, until released."""
        ...

    async def usage(self, host: str, kind: str) -> ResourceUse:
        """What the kernel says of one kind of limit on the replica of `host`, whether or not there is one."""
        ...

    async def release(self, fault_id: str) -> None:
        """Undo one fault. Idempotent; safe after half a `limit`."""
        ...

    async def release_all(self) -> None:
        """Undo every limit. Idempotent; safe in any state."""
        ...


MONOTONIC_PPM = (-750_000, 2_000_000)
"""How far the rate of a monotonic clock may be off, by all faults together: a quarter of it, and three times. It has to
go forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockSkew:
    """How a host's clock differs from the true one: by an offset, by a rate that adds up from the injection on,
    and by a strobe, an offset that comes and goes every period. What the rate has added up to is gone each time it has
    come to `step_ms`, where that is above 0: the clock is stepped right. `affects_monotonic` moves the monotonic clock
    instead of the wall clock, by the rate only: it never goes back."""

    offset_ms: int = 0
    rate_ppm: int = 0
    strobe_ms: int = 0
    strobe_period_ms: int = 0
    affects_monotonic: bool = False
    step_ms: int = 0

    def gained_ms(self, elapsed_s: float) -> float:
        """What the rate alone makes of the clock in so many seconds."""
        gained_ms = self.rate_ppm * elapsed_s / 1000
        return math.fmod(gained_ms, self.step_ms) if self.step_ms else gained_ms


@dataclass(frozen=True, slots=True)
class ClockReading:
    """What a replica itself said of its clocks, or what is read in its place. `offset_ms` is its wall clock less the
    true one (the harness's, where hosts differ by nature less that difference too), right to `uncertainty_ms` either
    way; `monotonic_s` is its monotonic clock at the true monotonic time `at_s`."""

    offset_ms: float
    uncertainty_ms: float
    monotonic_s: float
    at_s: float


@dataclass(frozen=True, slots=True)
class FaultMet:
    """What the replica of one host has met of a fault since it began, its children included: how many `calls` it made
    that the fault is about, and how many of them `met` it. None where that cannot be counted. `past` says in words what
    else it does that may go past the fault; empty where nothing of the kind is known."""

    calls: int | None
    met: int | None
    past: str = ""


class Clocks(Protocol):
    """The clocks that the replicas read. Skews of several faults add up."""

    def mechanism(self, host: str) -> str:
        """What moves the clock of a host's replica, in a word or two."""
        ...

    async def skew(self, fault_id: str, skews: Mapping[str, ClockSkew]) -> None:
        """Skew the clocks of hosts until released; in force on return."""
        ...

    async def release(self, fault_id: str) -> None:
        """Undo one fault: wall clocks step back to the truth, monotonic clocks go at the true rate from where
        they are. Idempotent."""
        ...

    async def release_all(self) -> None:
        """Undo every skew. Idempotent; safe in any state."""
        ...

    async def reaches(self, host: str, pid: int | None, *, monotonic: bool = False) -> str | None:
        """None when a skew of the wall clock that is in force, or of the `monotonic` one, is felt by the process `pid`
        of `host`; otherwise why not, in one line."""
        ...

    async def read(
        self, host: str, *, pauses_s: Sequence[float] = (), apart_ms: float = 0.0, timeout_s: float
    ) -> Sequence[ClockReading]:
        """What is read in the place of the host's replica: one reading more than there are pauses (s), and none after
        the wall clock was seen `apart_ms` (ms) apart, where that is above 0. Raises RuntimeError when nothing could be
        read within `timeout_s` seconds."""
        ...

    async def met(self, fault_id: str) -> Mapping[str, FaultMet]:
        """How often the replica of each host has read a clock that a fault skews, by host."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFault:
    """What is wrong with a host's disk; `kind` is an ability of disks other than power and crash, `delay_ms` for slow.

    Those of a file system as a whole are `freeze` (changes wait in the kernel), `fill` (no space is left in it) and
    `shutdown` (every access fails until it is mounted again, for which the host's programs are ended).
    """

    kind: str
    delay_ms: int = 0


@dataclass(frozen=True, slots=True)
class DiskStep:
    """How one step of a disk probe ended: "ok", the name of an error (ENOSPC, EIO), "no answer" when it had not
    returned when time was up, or "not tried". `seconds` is how long it took, or was waited for."""

    outcome: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class DiskProbe:
    """What a probe of a host's disk saw, step by step, on the file system and by the path of the replica's data."""

    host: str
    write: DiskStep
    sync: DiskStep
    read: DiskStep


@dataclass(frozen=True, slots=True)
class PowerCut:
    """What a power cut took from a host's disk, and how many changes the account of what is not synced had seen of its
    replica since the cut before. None where the mechanism cannot count it."""

    lost_operations: int | None
    lost_bytes: int | None
    detail: str = ""
    recorded: int | None = None


@dataclass(frozen=True, slots=True)
class BitFlipped:
    """One byte that is another one now: `before` became `after`, at `offset` of the file. `inode` is the number of
    the file in its file system; 0 where it has none."""

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
        """Say that the power of running replicas will be cut. Where it is not known from their
        start what they have not synced, it is from now on, and what they wrote before is taken as durable. Returns for
        how many seconds they should run on before the cut; 0 where all is known. Raises RuntimeError."""
        ...

    async def cut_power(self, fault_id: str, host: str, *, kind: str = "ext4", seed: int = 0) -> PowerCut:
        """Lose what `host` wrote and did not sync, by a model of what a sync makes durable (`ext4`, `posix`, `torn`),
        or what the kernel had not written yet (`crash`). `seed` decides what is left to chance. Its replica must be
        down.

        Raises RuntimeError when the loss cannot be vouched for.
        """
        ...

    def lost(self, fault_id: str) -> Mapping[str, PowerCut]:
        """What the power cuts of a fault took, by host; until it is released."""
        ...

    async def flip_bit(self, fault_id: str, host: str, *, files: str, place: float, bit: int) -> BitFlipped:
        """Flip a bit at rest, in the largest of the files that match a pattern below the data directory of `host`, at
        a place from 0 (its begin) to 1 (the end of what is not zero). Its replica must be down; the bit is
        put back when the fault is released, unless the byte has been written since. Raises RuntimeError.
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
        """What makes the replica of a host meet the faults, in a word or two."""
        ...

    async def reaches(self, host: str, pid: int | None) -> str | None:
        """None when faults here are felt by the process `pid` of `host`; otherwise why not, in one line."""
        ...

    async def met(self, fault_id: str) -> Mapping[str, FaultMet]:
        """What the replica of each host has met of a fault of `impair`, by host. Of flipped bits, how often it has read
        one, where that is counted; nothing for another fault."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkShape:
    """How bad one direction of a link is. A delay of `delay_ms` give or take `jitter_ms`; percentages of packets
    that are lost, sent twice, sent ahead of the delayed ones, or have a bit flipped on their way; a rate in bytes per
    second (0: no limit)."""

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
    """What probe packets of the harness met on one link. `delays_ms` has one entry for each that arrived, in the
    order of sending, right to `within_ms`: two hosts' clocks are known no better. `seconds` is from the first sending
    to the last arrival. Packets that came with other bytes than they were sent with are counted as `damaged` and not as
    received."""

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
    """Links whose hosts count the packets that they refuse as damaged."""

    async def refused(self, hosts: Collection[str]) -> Mapping[str, int]:
        """How many segments of TCP the kernel of each host has refused for a wrong checksum since it was started."""
        ...


class Links(Protocol):
    """The quality of the links between hosts. Shapes of several faults on one link add up."""

    @property
    def mechanism(self) -> str:
        """What shapes them, in a word or two: netem, the relay, proxies."""
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
        """Send `count` probe packets of `size_bytes` along each link and see how they arrive; waits at most
        `timeout_s` seconds for the last of them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowClient:
    """Clients of one host that hardly read what they are answered: how many, and how many bytes a second each reads."""

    connections: int
    bytes_per_s: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadAnswers:
    """What the kernel of a host says of the replica's own ends of the connections of slow clients: how many there are,
    how many of them have something in their send queue, and how much that is. `read_bytes` is what these clients have
    read, of `may_read_bytes` that they were to read by then; `closed` counts connections that the replica has ended."""

    connections: int
    stuck: int
    queued_bytes: int
    read_bytes: int = 0
    may_read_bytes: int = 0
    closed: int = 0

    def __str__(self) -> str:
        ended = f", {self.closed} ended by the replica" if self.closed else ""
        queued = f"{self.queued_bytes} bytes in the send queues of {self.stuck} connections"
        return f"{queued} of {self.connections}, {self.read_bytes} read{ended}"


class Clients(Protocol):
    """Clients that the harness connects to the replicas beside those of the workload."""

    async def connect(self, fault_id: str, clients: Mapping[str, SlowClient]) -> None:
        """Connect clients to the replicas of hosts, and have them ask for long answers until released. One whose
        connection the replica ends connects again."""
        ...

    async def unread(self, fault_id: str) -> Mapping[str, UnreadAnswers]:
        """What has become of them, by host; also once they are released."""
        ...

    async def release(self, fault_id: str) -> None:
        """Close what one fault has connected. Idempotent."""
        ...

    async def release_all(self) -> None:
        """Close all of them. Idempotent; safe in any state."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NameFault:
    """What the name service of a host does to the names of others; `kind` is an ability of names, `delay_ms` how late
    it answers, for slow. A name that is gone does not exist; wrong ones lead to another host, unused ones to an
    address that nobody has; a silent service answers nothing."""

    kind: str
    delay_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NameLookup:
    """What a question for one name came to: `found` is an address, "gone" for a name that does not exist, or "silent"
    when no answer came within the time. `right` is the address that it should lead to, `seconds` what it took."""

    name: str
    found: str
    right: str
    seconds: float


class Names(Protocol):
    """The name service by which the programs of each host find the other hosts. Faults of several ids add up: silent
    before gone, gone before wrong and unused, and the longest delay."""

    async def disturb(self, fault_id: str, faults: Mapping[str, NameFault]) -> None:
        """Put faults in force on hosts until released; in force on return."""
        ...

    async def look_up(self, host: str, *, timeout_s: float) -> Sequence[NameLookup]:
        """Ask the service of a host for every other host, as its programs would; waits `timeout_s` seconds for an
        answer. Such questions are not counted. Raises RuntimeError when the host cannot be asked."""
        ...

    async def reaches(self, host: str) -> str | None:
        """None when every process of the host's replica has this service and no other before it; otherwise why not, in
        one line."""
        ...

    async def met(self, fault_id: str) -> Mapping[str, FaultMet]:
        """How often the replica of each host has asked for the address of another one since the fault began, and how
        often the fault was in its answer."""
        ...

    async def release(self, fault_id: str) -> None:
        """Undo one fault. Idempotent; safe after half a `disturb`."""
        ...

    async def release_all(self) -> None:
        """Undo every fault. Idempotent; safe in any state."""
        ...


class Triggers(Protocol):
    """What replicas do, as it happens: seen by the cluster, or read from what they log at once."""

    async def wait(self, trigger: Trigger, *, since_s: float, timeout_s: float) -> Occurrence | None:
        """The trigger's first occurrence since a time of the event loop; None when there is none within `timeout_s`
        seconds."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """What a replica says of itself when asked. `term` is -1 and `members` empty where the system has no such thing;
    `members` are the replicas that it holds for its group, those of a change that is not committed yet included if
    `members_committed` is False. `end` is how far its log goes, in the system's own unit."""

    host: str
    leads: bool
    takes_writes: bool
    follows: bool
    term: int = -1
    members: frozenset[str] = frozenset()
    members_committed: bool = True
    end: int = -1


class Operator(Protocol):
    """What somebody who runs the system does to it on purpose, by the system's own requests. Each method tries once."""

    async def view(self, host: str, *, timeout_s: float) -> ReplicaView | None:
        """What the replica of `host` says of itself; None when it does not answer in time."""
        ...

    async def transfer(self, fault_id: str, host: str) -> None:
        """Have the leader give its lead to `host`. Raises RuntimeError with what it was refused with."""
        ...

    def transferred(self, fault_id: str) -> tuple[str, int] | None:
        """Who said that it leads, and in which term, when a transfer was done; None while none was."""
        ...

    async def remove(self, fault_id: str, host: str) -> None:
        """Have `host` belong to the group no longer, until it is let in again. Raises RuntimeError."""
        ...

    async def let_in(self, fault_id: str) -> None:
        """Have those that a fault removed belong to the group again. Idempotent. Raises RuntimeError."""
        ...

    async def promote(self, fault_id: str, host: str) -> None:
        """Make the replica of `host` the master and restart it as such; the former master is down. Raises
        RuntimeError."""
        ...

    async def release_all(self) -> None:
        """Let in whoever was removed. Idempotent; safe in any state."""
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
        """Why this target lacks an ability of an interface (see ABILITIES), as one line that names what mends
        it; None when it has it."""
        ...

    def stored_files(self, role: str) -> str | None:
        """Where a replica keeps its files with a role (log, vote, checkpoint): a pattern for glob below its data
        directory. None where the system, with its settings, has no such files."""
        ...

    async def leaders(self) -> Sequence[str]:
        """Hosts that call themselves leader right now, by asking the system under test; the highest term
        first. Empty when nobody answers as leader."""
        ...

    async def answers(self, host: str, *, timeout_s: float) -> bool:
        """Whether the replica of `host` answers a question about itself within `timeout_s` seconds."""
        ...

    @property
    def tells_time(self) -> bool:
        """Whether replicas can be asked for the time at all."""
        ...

    async def read_clock(self, host: str, *, timeout_s: float) -> ClockReading | None:
        """The clocks of the replica of `host` by its own word; None when it does not answer."""
        ...

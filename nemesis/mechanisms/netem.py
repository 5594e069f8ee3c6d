"""Bad links by means of the kernel: tc with netem for each peer, in an htb tree on the device that leads to it.

    root   5b1a:   htb, whose unclassified packets go straight through: peers without a shape are not affected
    class  5b1a:N  one for each different shape in force on the device, with its rate
    qdisc  5b2N:   netem below it: delay, jitter, loss, duplication, reordering, flipped bits
    filter prio N  u32, one for each shaped pair of addresses, to the class of its shape

A link is shaped where its packets leave their source, one direction at a time. The handle 5b1a: marks the tree as ours:
a device whose root queue somebody else has set is not touched, and only a root with that handle is ever deleted.
Packets still queued when their link is healed are lost, as with a router that is switched off. If no link is shaped,
the device has no queue of ours at all: the tree is created with the first shape and removed with the last, and both
are verified by reading the device's queues back.

Two choices are due to how netem works. Every netem has a rate far above any device's, because without a rate jitter
reorders packets, which is a separate fault here; with one, packets leave in the order in which they came. And a netem
that duplicates must be the only netem of its device: kernels since 6.16, and 6.1.147 before it, refuse anything else
(see `netem_can`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from nemesis.mechanisms.shell import HostShell, ShellError
from nemesis.target import LinkShape

__all__ = [
    "MARK",
    "TRIAL_DEVICE",
    "Netem",
    "Pair",
    "install_lines",
    "netem_can",
    "remove_argv",
    "remove_trial_argv",
    "trial_argv",
]

MARK = "5b1a:"
"""The handle of our root queues; the relay marks its packets with the same number."""

_FIRST_LEAF = 0x5B20
MAX_SHAPES = 200
"""Different shapes on one device: far more than overlapping faults need; their handles start at 5b21:."""

_DIRECT_RATE = "100gbit"
"""Rate of a netem whose rate only serves to keep packets in order: far above any device's."""

_DIRECT_CLASS = "10gbit burst 1mb cburst 1mb"
"""Rate of a class without a rate limit. htb counts bursts in clock ticks; with a higher rate they round to none."""

_LIMIT_PACKETS = 20_000
"""Packets that can wait in one netem: 24 ms at ten gigabits per second in full packets; this bounds memory."""

_MAX_BACKLOG_S = 1.0
"""A link with a rate limit queues this much in full packets and drops the rest, as a router's buffer would."""

_PACKET_BYTES = 1500

TRIAL_DEVICE = "sb-trial"
"""The temporary device on which the probe builds a tree."""

Pair = tuple[str, str]
"""Addresses of source and destination, IPv4."""


def netem_can(shapes: Collection[LinkShape]) -> bool:
    """Whether one device can have all these shapes: a shape that duplicates must be the only one."""
    different = set(shapes)
    return len(different) <= MAX_SHAPES and (len(different) < 2 or not any(s.duplicate_percent for s in different))


def _netem_words(shape: LinkShape) -> str:
    limit = _LIMIT_PACKETS
    if shape.rate_bytes_per_s:
        # Packets held back by the delay, in addition to those queued by the rate limit.
        waits_s = _MAX_BACKLOG_S + (shape.delay_ms + shape.jitter_ms) / 1000
        limit = max(2, min(limit, round(waits_s * shape.rate_bytes_per_s / _PACKET_BYTES)))
    words = [f"limit {limit}"]
    if shape.delay_ms or shape.jitter_ms:
        words.append(f"delay {shape.delay_ms:.3f}ms")
        if shape.jitter_ms:
            words.append(f"{shape.jitter_ms:.3f}ms")
    if shape.loss_percent:
        words.append(f"loss random {shape.loss_percent:.4f}%")
    if shape.duplicate_percent:
        words.append(f"duplicate {shape.duplicate_percent:.4f}%")
    if shape.corrupt_percent:
        words.append(f"corrupt {shape.corrupt_percent:.4f}%")
    if shape.reorder_percent and shape.delay_ms:  # without a delay there is nothing to overtake
        words.append(f"reorder {shape.reorder_percent:.4f}%")
    else:
        words.append(f"rate {_DIRECT_RATE}")
    return " ".join(words)


def _rate(shape: LinkShape) -> str:
    return f"{round(shape.rate_bytes_per_s * 8)}bit" if shape.rate_bytes_per_s else _DIRECT_CLASS


@dataclass(frozen=True, slots=True)
class _Tree:
    """The tree on one device: number -> shape, and pair -> (number of its filter, number of its shape)."""

    shapes: Mapping[int, LinkShape]
    pairs: Mapping[Pair, tuple[int, int]]


_NOTHING = _Tree({}, {})


def _tree_for(wanted: Mapping[Pair, LinkShape], before: _Tree) -> _Tree:
    """The tree that shapes `wanted`; parts that stay keep their numbers from `before`."""
    kept = {shape: number for number, shape in before.shapes.items() if shape in set(wanted.values())}
    free = (number for number in range(1, 2 * MAX_SHAPES + 1) if number not in before.shapes)
    for shape in dict.fromkeys(wanted.values()):
        if shape not in kept:
            kept[shape] = next(free)
    used = {number for number, _ in before.pairs.values()}
    free_filters = (number for number in range(1, 2 * len(wanted) + len(used) + 1) if number not in used)
    pairs = {}
    for pair, shape in wanted.items():
        number = before.pairs[pair][0] if before.pairs.get(pair, (0, 0))[1] == kept[shape] else next(free_filters)
        pairs[pair] = (number, kept[shape])
    return _Tree({number: shape for shape, number in kept.items()}, pairs)


def _change_lines(device: str, before: _Tree, after: _Tree) -> list[str]:
    """tc commands that change `before` into `after`: first new classes, then filters, then removal of unused parts. A
    packet takes its old class or its new one, but always one of them."""
    lines = []
    for number, shape in after.shapes.items():
        if number not in before.shapes:
            leaf = f"{_FIRST_LEAF + number:x}:"
            lines += [
                f"class add dev {device} parent {MARK} classid {MARK}{number:x} htb rate {_rate(shape)} quantum 60000",
                f"qdisc add dev {device} parent {MARK}{number:x} handle {leaf} netem {_netem_words(shape)}",
            ]
    for (source, destination), (number, shape_number) in after.pairs.items():
        if before.pairs.get((source, destination)) != (number, shape_number):
            lines.append(
                f"filter add dev {device} parent {MARK} protocol ip prio {number} u32 match ip src {source}/32 "
                f"match ip dst {destination}/32 flowid {MARK}{shape_number:x}"
            )
    lines += [
        f"filter del dev {device} parent {MARK} protocol ip prio {number}"
        for pair, (number, shape_number) in before.pairs.items()
        if after.pairs.get(pair) != (number, shape_number)
    ]
    lines += [
        f"class del dev {device} classid {MARK}{number:x}" for number in before.shapes if number not in after.shapes
    ]
    return lines


def install_lines(device: str, wanted: Mapping[Pair, LinkShape]) -> list[str]:
    """tc commands that put a whole tree for `wanted` on a device that has none."""
    return [f"qdisc add dev {device} root handle {MARK} htb default 0", *_change_lines(
        device, _NOTHING, _tree_for(wanted, _NOTHING)
    )]  # fmt: skip


_REMOVE = f"""
for device in "$@"; do
    tc qdisc show dev "$device" 2>/dev/null | grep -q '^qdisc htb {MARK} root' || continue
    tc qdisc del dev "$device" root handle {MARK} || exit 1
done
"""


def remove_argv(devices: Collection[str]) -> list[str]:
    """A command that removes our trees from devices if they have any, and nobody else's."""
    return ["sh", "-c", _REMOVE, "netem", *sorted(devices)]


_REMOVE_TRIAL = f"if ip link show dev {TRIAL_DEVICE} >/dev/null 2>&1; then ip link del dev {TRIAL_DEVICE}; fi"


def remove_trial_argv() -> list[str]:
    """A command that removes the probe's device if it exists."""
    return ["sh", "-c", _REMOVE_TRIAL]


def trial_argv() -> list[str]:
    """A command that tests on a temporary device, which it removes, whether the kernel supports everything needed: it
    builds the whole tree with every netem option used here and reads it back. Status 0 if so."""
    one = LinkShape(delay_ms=1, jitter_ms=1, loss_percent=1, rate_bytes_per_s=1000)
    two = LinkShape(delay_ms=1, reorder_percent=1, corrupt_percent=1)
    alone = LinkShape(duplicate_percent=1)
    first = install_lines(TRIAL_DEVICE, {("192.0.2.1", "192.0.2.2"): one, ("192.0.2.1", "192.0.2.3"): two})
    second = install_lines(TRIAL_DEVICE, {("192.0.2.1", "192.0.2.2"): alone})
    script = f"""
command -v tc >/dev/null || {{ echo "tc is missing: install iproute2" >&2; exit 1; }}
{_REMOVE_TRIAL}
ip link add {TRIAL_DEVICE} type veth peer name {TRIAL_DEVICE}2 || exit 1
trap 'ip link del dev {TRIAL_DEVICE}' EXIT
try() {{ printf '%s\\n' "$1" | tc -batch - && tc qdisc show dev {TRIAL_DEVICE} | grep -q '^qdisc netem' || exit 1; }}
try '{chr(10).join(first)}'
tc qdisc del dev {TRIAL_DEVICE} root handle {MARK} || exit 1
try '{chr(10).join(second)}'
"""
    return ["sh", "-c", script]


class Netem:
    """The trees of one host's devices. `devices` maps each peer's address to the device that leads to it."""

    def __init__(self, shell: HostShell, host: str, devices: Mapping[str, str], *, tc: str = "tc") -> None:
        self._shell = shell
        self._host = host
        self._devices = dict(devices)
        self._tc = tc
        self._applied: dict[str, _Tree | None] = dict.fromkeys(sorted(set(devices.values())), _NOTHING)

    @property
    def devices(self) -> Sequence[str]:
        """The devices that may get a tree."""
        return list(self._applied)

    async def foreign_root(self) -> str | None:
        """Why these devices must not be shaped: somebody has set a root queue. None if they may be.

        The kernel's default queue has the handle 0:, and some devices have none. Raises ShellError.
        """
        for device in self._applied:
            for kind, handle, is_root in await self._queues(device):
                if is_root and handle not in ("0:", MARK):
                    return f"{device} has a queue of its own ({kind} {handle})"
        return None

    async def apply(self, wanted: Mapping[Pair, LinkShape]) -> None:
        """Shape exactly these pairs, whose sources are this host; in force and verified on return. Raises ShellError.

        After a failure the state of a device counts as unknown; the next call removes its tree and builds a new one.
        """
        for device, before in list(self._applied.items()):
            here = {pair: shape for pair, shape in wanted.items() if self._devices[pair[1]] == device}
            after = _tree_for(here, before or _NOTHING) if here else _NOTHING
            if after == before:
                continue
            self._applied[device] = None
            # Old and new queues coexist for a moment, which does not work with a netem that duplicates.
            begins_anew = before is None or not netem_can([*before.shapes.values(), *after.shapes.values()])
            if begins_anew or not here:
                await self._shell.run(self._host, remove_argv([device]))
            if here:
                if begins_anew or before is None or before == _NOTHING:
                    after = _tree_for(here, _NOTHING)
                    lines = install_lines(device, here)
                else:
                    lines = _change_lines(device, before, after)
                await self._shell.run(self._host, [self._tc, "-batch", "-"], stdin="\n".join(lines) + "\n")
            await self._verify(device, after)
            self._applied[device] = after

    def forget(self) -> None:
        """Treat the state of every device as unknown: the next `apply` builds everything anew."""
        self._applied = dict.fromkeys(self._applied)

    async def _verify(self, device: str, tree: _Tree) -> None:
        found = await self._queues(device)
        leaves = sorted(handle for kind, handle, _ in found if kind == "netem")
        wanted = sorted(f"{_FIRST_LEAF + number:x}:" for number in tree.shapes)
        has_root = any(is_root and handle == MARK for _, handle, is_root in found)
        if leaves != wanted or has_root != bool(tree.shapes):
            raise ShellError(
                self._host, [self._tc, "qdisc", "show", "dev", device], 0,
                f"the device should have {', '.join(wanted) or 'no queue of ours'}, and has "
                f"{', '.join(' '.join(entry[:2]) for entry in found) or 'none'}",
            )  # fmt: skip

    async def _queues(self, device: str) -> list[tuple[str, str, bool]]:
        """(kind, handle, whether it is the root) of each queue of a device."""
        shown = await self._shell.run(self._host, [self._tc, "qdisc", "show", "dev", device])
        words = [line.split() for line in shown.splitlines()]
        return [(line[1], line[2], "root" in line) for line in words if len(line) > 3 and line[0] == "qdisc"]

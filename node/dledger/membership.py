"""Who belongs to a group, as its log says: the configuration a member starts with, changed by entries of the log.

One member is added or removed at a time (Ongaro's thesis, 4.1). Two groups that differ by one member have no disjoint
majorities, so an entry that changes the group counts as soon as it is in a member's log, committed or not, and is
forgotten when it is truncated. The next change waits until the last one is committed, and the first of a term
until the term's own entry is, as a later finding on that algorithm asks. DLedger's candidates may try again in a term
that has had a leader; here, whoever follows a leader has thereby voted for it, durably, or else the members of a group
that has changed twice could elect another one in the same term.

After Raft's InstallSnapshot the group is that of the snapshot. Here a log that begins anew, because the leader's begins
later, keeps of the group what is known to be committed, from the former log or from the snapshot, whichever is newer.
What the former log said behind that is forgotten with it: nothing would ever take it back. What is kept counts even
while the new log ends before it: in an earlier group this member might be a majority, and it no longer has the entries
that say otherwise.

An entry of this kind (magic 3) holds the whole group: {"peers": {id: address}}. The address is where those dial the
member that have none for it in their own configuration.

DLedger has no such thing: its groups are what every member's configuration says.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from node.dledger.entry import CONFIG_MAGIC, BadEntry, Entry
from node.dledger.rpc import DLedgerCode, DLedgerError

__all__ = ["MAX_MEMBERS", "Membership", "are_members", "check_members", "decode_members", "encode_members", "peers_in"]

MAX_MEMBERS = 15
"""Of a group: every entry goes to each of them, and a majority has to answer."""

MAX_ADDRESS_CHARACTERS = 128

_BASE_INDEX = -1
"""In the place of an entry's index: what the configuration says."""


class Membership:
    """The group as this member knows it. `peers` maps ids to addresses; listeners are called after each change."""

    def __init__(self, self_id: str, peers: Mapping[str, str], *, joins: bool = False) -> None:
        self._self_id = self_id
        self._own_addresses = dict(peers)
        base = {member: address for member, address in peers.items() if not (joins and member == self_id)}
        self._history: list[tuple[int, dict[str, str]]] = [(_BASE_INDEX, base)]
        self._kept_index = _BASE_INDEX
        """What is known of the group up to here is committed, whether the log holds it or not."""
        self._listeners: list[Callable[[], None]] = []
        self._derive()

    def _derive(self) -> None:
        peers = self._history[-1][1]
        self.ids: tuple[str, ...] = tuple(sorted(peers))
        """Every member, in an order that is the same on all of them."""
        self.others: tuple[str, ...] = tuple(member for member in self.ids if member != self._self_id)
        self.quorum_size = len(peers) // 2 + 1
        """Members that make a majority."""
        self.includes_self = self._self_id in peers
        self.others_needed = self.quorum_size - self.includes_self
        """Other members that make a majority with this one, where it counts."""

    @property
    def index(self) -> int:
        """The entry that says so; -1 for the configuration."""
        return self._history[-1][0]

    @property
    def peers(self) -> Mapping[str, str]:
        """Every member's id and address."""
        return self._history[-1][1]

    def knows(self, member: str) -> bool:
        """Whether `member` belongs to the group, or has belonged to it lately."""
        return any(member in peers for _, peers in self._history) or member in self._own_addresses

    def address(self, member: str) -> str | None:
        """Where this member dials another one: as its own configuration says, else as the log does."""
        own = self._own_addresses.get(member)
        if own is not None:
            return own
        return next((peers[member] for _, peers in reversed(self._history) if member in peers), None)

    def configured_address(self, member: str) -> str | None:
        """Where this member's own configuration has another one, which counts before what the log says."""
        return self._own_addresses.get(member)

    def put(self, entry: Entry) -> None:
        """An entry that changes the group is in the log now. Raises BadEntry."""
        peers = decode_members(entry)
        if entry.index > self._kept_index:
            self._history.append((entry.index, peers))
            self._changed()

    def cut(self, end_index: int) -> None:
        """The log was cut before `end_index`: what later entries said is forgotten."""
        end_index = max(end_index, self._kept_index + 1)
        if self._history[-1][0] >= end_index:
            self._history = [item for item in self._history if item[0] < end_index]
            self._changed()

    def log_is_gone(self, committed_index: int) -> None:
        """The log is forgotten as a whole: what entries behind `committed_index` said never was, the rest is kept."""
        self.cut(committed_index + 1)
        self._kept_index = self.index

    def at(self, index: int) -> tuple[int, dict[str, str]]:
        """The entry that said who belonged to the group at `index`, and what; -1 and nobody for the configuration."""
        found = [item for item in self._history if 0 <= item[0] <= index]
        return found[-1] if found else (_BASE_INDEX, {})

    def adopt(self, index: int, peers: Mapping[str, str]) -> None:
        """A snapshot says who belonged to the group since entry `index`, which is committed. Only later ones count."""
        if index > self._kept_index:
            self._kept_index = index
            self._history = [(index, dict(peers)), *(item for item in self._history if item[0] > index)]
            self._changed()

    def forget_before(self, committed_index: int) -> None:
        """Keep of what was said up to there, which is committed, only the last: it is never taken back."""
        if len(self._history) == 1:
            return
        committed = [number for number, item in enumerate(self._history) if item[0] <= committed_index]
        del self._history[: committed[-1]]

    def restore(self, history: Sequence[tuple[int, dict[str, str]]], last_index: int) -> None:
        """Go on from what a checkpoint and the log, which ends with `last_index`, say. A checkpoint speaks of no later
        entry unless that is committed."""
        known = sorted(history, key=lambda item: item[0])
        if known:
            self._history += known  # and the configuration stays below them: they may all be truncated
            self._kept_index = max((index for index, _ in known if index > last_index), default=_BASE_INDEX)
            self._changed()

    def snapshot(self, last_index: int) -> tuple[tuple[int, dict[str, str]], ...]:
        """What entries up to `last_index` say, and what is kept, for a checkpoint; nothing while there is nothing."""
        return tuple(item for item in self._history if 0 <= item[0] <= max(last_index, self._kept_index))

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener()` whenever the group has changed, or what changed it is gone again."""
        self._listeners.append(listener)

    def _changed(self) -> None:
        self._derive()
        for listener in self._listeners:
            listener()


def encode_members(peers: Mapping[str, str]) -> bytes:
    """The body of an entry that says who belongs to the group."""
    return json.dumps({"peers": dict(sorted(peers.items()))}, separators=(",", ":")).encode()


def decode_members(entry: Entry) -> dict[str, str]:
    """What such an entry says. Raises BadEntry."""
    peers = peers_in(entry.body)
    if entry.magic != CONFIG_MAGIC or peers is None:
        raise BadEntry(f"entry {entry.index} does not say who belongs to the group")
    return peers


def peers_in(body: bytes) -> dict[str, str] | None:
    """What the body of such an entry says; None where it is none."""
    try:
        peers = json.loads(body)["peers"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return dict(peers) if are_members(peers) else None


def check_members(entry: Entry) -> None:
    """Raises DLedgerError UNEXPECTED_ARGUMENT where such an entry says nothing of use."""
    try:
        decode_members(entry)
    except BadEntry as error:
        raise DLedgerError(DLedgerCode.UNEXPECTED_ARGUMENT, str(error)) from error


def are_members(peers: Any) -> bool:
    """Whether this is a map of ids to addresses, of a size that a group may have."""
    return (
        isinstance(peers, dict)
        and 0 < len(peers) <= MAX_MEMBERS
        and all(isinstance(text, str) and 0 < len(text) <= MAX_ADDRESS_CHARACTERS for text in peers.values())
    )

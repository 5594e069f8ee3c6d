"""The members of a group, as its log defines them: the configuration a member starts with, changed by log entries.

One member is added or removed at a time (Ongaro's thesis, 4.1). Two groups that differ by one member have no disjoint
majorities, so an entry that changes the group takes effect as soon as it is in a member's log, committed or not, and is
forgotten when it is truncated. Each change waits until the previous one is committed, and the first of a term until
the leader's own entry of that term is committed, as a later correction of that algorithm demands. DLedger's candidates
may try again in a term that has had a leader; here, a member that follows a leader has thereby voted for it, durably.
Otherwise the members of a group that has changed twice could elect another leader in the same term.

After Raft's InstallSnapshot the group is that of the snapshot. Here a log that begins anew, because the leader's begins
later, keeps the newest group known to be committed, from the former log or from the snapshot. Changes in the former log
after that are forgotten with it, because nothing would ever undo them. The group that is kept counts even while the new
log ends before its entry: in an earlier group this member might be a majority, and it no longer has the entries that
say otherwise.

An entry of this kind (magic 3) holds the whole group: {"peers": {id: address}}. A member dials another at this address
unless its own configuration has one.

DLedger has no such entries: every member's configuration defines its group.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from node.dledger.entry import CONFIG_MAGIC, BadEntry, Entry
from node.dledger.rpc import DLedgerCode, DLedgerError

__all__ = ["MAX_MEMBERS", "Membership", "are_members", "check_members", "decode_members", "encode_members", "peers_in"]

MAX_MEMBERS = 15
"""The most members of a group: every entry goes to each of them, and a majority has to answer."""

MAX_ADDRESS_CHARACTERS = 128

_BASE_INDEX = -1
"""Stands in for an entry's index: the group is that of the configuration."""


class Membership:
    """The group as this member knows it. `peers` maps ids to addresses; listeners are called after each change."""

    def __init__(self, self_id: str, peers: Mapping[str, str], *, joins: bool = False) -> None:
        self._self_id = self_id
        self._own_addresses = dict(peers)
        base = {member: address for member, address in peers.items() if not (joins and member == self_id)}
        self._history: list[tuple[int, dict[str, str]]] = [(_BASE_INDEX, base)]
        self._kept_index = _BASE_INDEX
        """The group as of this index is known to be committed, whether the log holds that entry or not."""
        self._listeners: list[Callable[[], None]] = []
        self._derive()

    def _derive(self) -> None:
        peers = self._history[-1][1]
        self.ids: tuple[str, ...] = tuple(sorted(peers))
        """Every member, in an order that is the same on all of them."""
        self.others: tuple[str, ...] = tuple(member for member in self.ids if member != self._self_id)
        self.quorum_size = len(peers) // 2 + 1
        """How many members make a majority."""
        self.includes_self = self._self_id in peers
        self.others_needed = self.quorum_size - self.includes_self
        """How many other members make a majority, together with this one if it belongs to the group."""

    @property
    def index(self) -> int:
        """Index of the entry that defines the current group; -1 for the configuration."""
        return self._history[-1][0]

    @property
    def peers(self) -> Mapping[str, str]:
        """Every member's id and address."""
        return self._history[-1][1]

    def knows(self, member: str) -> bool:
        """Whether `member` belongs to the group, has belonged to it lately, or is in the configuration."""
        return any(member in peers for _, peers in self._history) or member in self._own_addresses

    def address(self, member: str) -> str | None:
        """The address at which this member dials another one: from its own configuration, else from the log."""
        own = self._own_addresses.get(member)
        if own is not None:
            return own
        return next((peers[member] for _, peers in reversed(self._history) if member in peers), None)

    def configured_address(self, member: str) -> str | None:
        """Another member's address in this member's own configuration, which takes precedence over the log."""
        return self._own_addresses.get(member)

    def put(self, entry: Entry) -> None:
        """Apply an entry that changes the group, which is in the log now. Raises BadEntry."""
        peers = decode_members(entry)
        if entry.index > self._kept_index:
            self._history.append((entry.index, peers))
            self._changed()

    def cut(self, end_index: int) -> None:
        """The log was cut before `end_index`: undo what entries from there on changed."""
        end_index = max(end_index, self._kept_index + 1)
        if self._history[-1][0] >= end_index:
            self._history = [item for item in self._history if item[0] < end_index]
            self._changed()

    def log_is_gone(self, committed_index: int) -> None:
        """The whole log is forgotten: undo what entries after `committed_index` changed, and keep the rest."""
        self.cut(committed_index + 1)
        self._kept_index = self.index

    def at(self, index: int) -> tuple[int, dict[str, str]]:
        """The entry that defined the group at `index`, and that group; -1 and an empty one for the configuration."""
        found = [item for item in self._history if 0 <= item[0] <= index]
        return found[-1] if found else (_BASE_INDEX, {})

    def adopt(self, index: int, peers: Mapping[str, str]) -> None:
        """Adopt a snapshot's group, which the committed entry `index` defined; only changes after it are kept."""
        if index > self._kept_index:
            self._kept_index = index
            self._history = [(index, dict(peers)), *(item for item in self._history if item[0] > index)]
            self._changed()

    def forget_before(self, committed_index: int) -> None:
        """Of the groups up to `committed_index`, keep only the last: it is committed and never undone."""
        if len(self._history) == 1:
            return
        committed = [number for number, item in enumerate(self._history) if item[0] <= committed_index]
        del self._history[: committed[-1]]

    def restore(self, history: Sequence[tuple[int, dict[str, str]]], last_index: int) -> None:
        """Restore the groups from a checkpoint and the log, which ends with `last_index`. A checkpoint names later
        entries only if they are committed."""
        known = sorted(history, key=lambda item: item[0])
        if known:
            self._history += known  # the configuration stays below them: they may all be truncated
            self._kept_index = max((index for index, _ in known if index > last_index), default=_BASE_INDEX)
            self._changed()

    def snapshot(self, last_index: int) -> tuple[tuple[int, dict[str, str]], ...]:
        """The groups that entries up to `last_index` define, and the kept one, for a checkpoint."""
        return tuple(item for item in self._history if 0 <= item[0] <= max(last_index, self._kept_index))

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener()` whenever the group has changed, or a change was undone."""
        self._listeners.append(listener)

    def _changed(self) -> None:
        self._derive()
        for listener in self._listeners:
            listener()


def encode_members(peers: Mapping[str, str]) -> bytes:
    """The body of an entry that defines the group."""
    return json.dumps({"peers": dict(sorted(peers.items()))}, separators=(",", ":")).encode()


def decode_members(entry: Entry) -> dict[str, str]:
    """The group that such an entry defines. Raises BadEntry."""
    peers = peers_in(entry.body)
    if entry.magic != CONFIG_MAGIC or peers is None:
        raise BadEntry(f"entry {entry.index} does not say who belongs to the group")
    return peers


def peers_in(body: bytes) -> dict[str, str] | None:
    """The group in the body of such an entry; None if the body is not valid."""
    try:
        peers = json.loads(body)["peers"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return dict(peers) if are_members(peers) else None


def check_members(entry: Entry) -> None:
    """Raises DLedgerError UNEXPECTED_ARGUMENT if such an entry defines no valid group."""
    try:
        decode_members(entry)
    except BadEntry as error:
        raise DLedgerError(DLedgerCode.UNEXPECTED_ARGUMENT, str(error)) from error


def are_members(peers: Any) -> bool:
    """Whether this is a mapping of ids to addresses, with as many members as a group may have."""
    return (
        isinstance(peers, dict)
        and 0 < len(peers) <= MAX_MEMBERS
        and all(isinstance(text, str) and 0 < len(text) <= MAX_ADDRESS_CHARACTERS for text in peers.values())
    )

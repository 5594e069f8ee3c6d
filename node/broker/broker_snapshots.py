"""The broker as a state machine: what its snapshots hold, and how a broker continues from one.

A broker derives most of what it knows from its log, and while the log exists from its first entry on, it needs
nothing else. A log that has lost its beginning no longer tells the next offset of queues without messages, which
delayed messages were delivered, and which transactions are open. So before files of the log are removed, a snapshot is
taken. A member whose queues have to be derived anew, because it fell behind, is new, or has lost them, starts from the
newest snapshot that reaches the log's beginning. It holds, as of the entry that it ends with:

    queues                 the next offset of every queue
    derived                delayed messages delivered, timer messages that wait, messages that POP consumers hold, open
                           transactions
    position               where that entry ends in the log
    topics, offsets, groups  the tables of topics, consumers' offsets and subscription groups

The log still holds messages from before that entry. They enter their queues again, which follows from the log alone,
but nothing else is derived from them: it is in the snapshot. The tables are not part of the log; a member takes over
only entries that it does not know, and copies the master's tables within seconds anyway (`slave_sync`).
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from typing import Any

from node.broker.consumer_offsets import ConsumerOffsets
from node.broker.dispatch_batch import DispatchBatch
from node.broker.dispatcher import Derivation, Dispatcher
from node.broker.ledger import Ledger
from node.broker.subscription_groups import SubscriptionGroups
from node.broker.topics import TopicTable
from node.dledger import DLedgerServer
from node.dledger.files import LedgerCorrupt
from node.dledger.snapshot import Snapshot
from node.store.queue_store import QueueStore
from node.store.record import RecordSummary

__all__ = ["BASIS", "BrokerSnapshots"]

logger = logging.getLogger("node.broker")

BASIS = "basis"
"""Name of this derivation in the dispatch checkpoint."""

IN_SNAPSHOTS = ("delay", "pop", "timers", "transactions")
"""The derivations that are part of snapshots."""

_UNREADABLE = (KeyError, TypeError, AttributeError, ValueError, RecursionError)


class BrokerSnapshots:
    """The snapshots of a broker on a DLedger log; on another log, they do nothing. Call `attach` when everything that
    they cover exists, before the log starts."""

    def __init__(self, ledger: Ledger, queues: QueueStore) -> None:
        self.ledger = ledger if isinstance(ledger, DLedgerServer) else None
        self._queues = queues
        self._derivations: Mapping[str, Derivation] = {}
        self.index = -1
        """The last entry of the snapshot from which everything was derived; -1 if the whole log was there."""
        self.end_pos = 0
        """Where that entry ends: everything before is in the snapshot."""
        self._states: dict[str, Any] = {}
        self._tables: Tables | None = None

    def derivations(self, without_snapshots: Derivation, **derivations: Derivation) -> Mapping[str, Derivation]:
        """The derivations of a dispatcher, wrapped so that they continue from a snapshot if they have to. On a log
        without snapshots, `without_snapshots` is the basis."""
        if self.ledger is None:
            return {BASIS: without_snapshots, **derivations}
        self._derivations = {name: each for name, each in derivations.items() if name in IN_SNAPSHOTS}
        others = {name: each for name, each in derivations.items() if name not in self._derivations}
        based = {name: _Based(name, each, self) for name, each in self._derivations.items()}
        return {BASIS: self, **based, **others}

    def attach(
        self, dispatcher: Dispatcher, topics: TopicTable, offsets: ConsumerOffsets, groups: SubscriptionGroups
    ) -> None:
        """From now on, take snapshots of these."""
        if self.ledger is None:
            return
        self._tables = Tables(topics, offsets, groups)
        self.ledger.snapshots.attach(_State(self, dispatcher))
        self.ledger.add_commit_listener(self.ledger.snapshots.applied)

    # As a derivation of the dispatcher: the first one, before those that query it

    def dispatch(self, record: RecordSummary) -> None:
        """Nothing is derived from messages here."""

    def dispatch_batch(self, batch: DispatchBatch) -> None:
        """Nothing is derived from messages that are not special."""

    def snapshot(self) -> Any:
        """What a restart has to know until it has dispatched the log up to the basis again."""
        return {"index": self.index, "endPos": self.end_pos, "presumed": self._queues.presumed}

    def restore(self, state: Any) -> None:
        """Continue from a checkpoint; None: everything is derived anew. Raises OSError if the log's beginning is gone
        and every snapshot that covered it is damaged."""
        self.index, self.end_pos, self._states = -1, 0, {}
        if state is not None:  # it is empty in checkpoints of earlier versions
            self.index, self.end_pos = int(state.get("index", -1)), int(state.get("endPos", 0))
            for topic, queue_id in state.get("presumed", ()):
                self._queues.presume(topic, queue_id, None)
            return
        assert self.ledger is not None
        begin_index = self.ledger.store.ledger_begin_index
        if begin_index <= 0:
            return
        snapshots = self.ledger.snapshots
        snapshot = snapshots.basis(begin_index - 1)
        if snapshot is None and snapshots.files.damaged:
            raise snapshots.missing(begin_index)
        if snapshot is None:
            logger.warning("the log begins at entry %d, and no snapshot says what was before", begin_index)
            return
        try:
            self._load(snapshot)
        except _UNREADABLE as error:
            raise LedgerCorrupt(snapshots.files.directory, 0, f"a snapshot is no broker's: {error!r}") from error

    def _load(self, snapshot: Snapshot) -> None:
        queues = json.loads(snapshot.files["queues"])
        self._states = json.loads(snapshot.files["derived"])
        self.index, self.end_pos = snapshot.index, int(json.loads(snapshot.files["position"])["endPos"])
        for topic, offsets in queues.items():
            for queue_id, offset in offsets.items():
                self._queues.presume(topic, int(queue_id), int(offset))
        logger.warning("deriving everything from the snapshot of entry %d on", snapshot.index)
        if self._tables is not None:
            self._tables.fill(snapshot.files)

    async def flush(self) -> None:
        """Nothing to do: the snapshot is durable."""

    def state_of(self, name: str) -> Any:
        """The state of a derivation in the basis; None if it has none."""
        return self._states.get(name)

    def capture(self, dispatcher: Dispatcher) -> Mapping[str, bytes]:
        """The files of a snapshot, as of what is dispatched."""
        assert self.ledger is not None and self._tables is not None
        queues: dict[str, dict[int, int]] = {}
        for (topic, queue_id), end in self._queues.ends():
            queues.setdefault(topic, {})[queue_id] = end
        last = self.ledger.store.get(dispatcher.dispatched_index)
        if last is None:
            raise ValueError(f"entry {dispatcher.dispatched_index} is gone")
        files = {
            "queues": queues,
            "derived": {name: each.snapshot() for name, each in self._derivations.items()},
            "position": {"endPos": last.end_pos},
        } | self._tables.documents()
        return {name: json.dumps(content, separators=(",", ":")).encode() for name, content in files.items()}


class _Based:
    """A derivation that ignores messages that its snapshot already includes."""

    def __init__(self, name: str, derivation: Derivation, basis: BrokerSnapshots) -> None:
        self._name = name
        self._derivation = derivation
        self._basis = basis
        self.flush = derivation.flush

    def snapshot(self) -> Any:
        return self._derivation.snapshot()

    def dispatch(self, record: RecordSummary) -> None:
        if record.physical_offset >= self._basis.end_pos:
            self._derivation.dispatch(record)

    def dispatch_batch(self, batch: DispatchBatch) -> None:
        """Ignored: none of these messages is special."""

    def restore(self, state: Any) -> None:
        self._derivation.restore(self._basis.state_of(self._name) if state is None else state)


class _State:
    """What is dispatched, as the state of which snapshots are taken."""

    def __init__(self, snapshots: BrokerSnapshots, dispatcher: Dispatcher) -> None:
        self._snapshots = snapshots
        self._dispatcher = dispatcher

    @property
    def applied_index(self) -> int:
        return max(self._dispatcher.dispatched_index, self._snapshots.index)

    @property
    def applied_term(self) -> int:
        """-1, unknown, until the queues have caught up with the basis."""
        if self._dispatcher.dispatched_index < self._snapshots.index:
            return -1
        return self._dispatcher.dispatched_term

    def capture(self) -> Mapping[str, bytes]:
        return self._snapshots.capture(self._dispatcher)


class Tables:
    """The tables that are kept beside the log."""

    def __init__(self, topics: TopicTable, offsets: ConsumerOffsets, groups: SubscriptionGroups) -> None:
        self._topics = topics
        self._offsets = offsets
        self._groups = groups
        self._filling: set[asyncio.Task[None]] = set()

    def documents(self) -> dict[str, Any]:
        """Their contents."""
        return {
            "topics": self._topics.document(),
            "offsets": self._offsets.document(),
            "groups": self._groups.document(),
        }

    def fill(self, files: Mapping[str, bytes]) -> None:
        """Take over entries that are unknown here. Known ones stay: they may be older or newer. Raises what reading a
        table raises."""
        topics, offsets, groups = (json.loads(files[name]) for name in ("topics", "offsets", "groups"))
        self._offsets.replace({"offsetTable": _merged(offsets["offsetTable"], self._offsets.document()["offsetTable"])})
        own = self._groups.document()
        key = "subscriptionGroupTable"
        self._groups.replace(own | {key: groups[key] | own[key]})
        own = self._topics.document()
        key = "topicConfigTable"
        task = asyncio.get_running_loop().create_task(self._replace_topics(own | {key: topics[key] | own[key]}))
        self._filling.add(task)
        task.add_done_callback(self._filling.discard)

    async def _replace_topics(self, content: Mapping[str, Any]) -> None:
        try:
            await self._topics.replace(content)
        except (OSError, *_UNREADABLE) as error:
            logger.error("the topics of a snapshot could not be taken over: %s", error)


def _merged(theirs: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Two tables of tables merged into one; where both have an entry, `own` wins."""
    return {key: theirs.get(key, {}) | own.get(key, {}) for key in theirs.keys() | own.keys()}

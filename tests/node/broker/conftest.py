"""A fake replicated log, controlled by the test, and the parts of a broker around it."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from node.broker.client_manager import ClientManager
from node.broker.consumer_offsets import ConsumerOffsets
from node.broker.controller import BrokerController
from node.broker.dispatcher import Dispatcher
from node.broker.ledger import DLedgerCode, DLedgerError, EntryBatch, ReadMode, Role
from node.broker.memory_window import MemoryWindow
from node.broker.message_store import MessageStore
from node.broker.pull import PullHolds
from node.broker.reads import ReadGate
from node.broker.role import RoleChangeHandler
from node.broker.subscription_groups import SubscriptionGroups
from node.broker.topics import TopicTable
from node.config import TopicConfig, parse_broker_config
from node.remoting import Command, RemotingClient
from node.runtime import DiskUsage, Runtime
from node.store.queue_store import QueueStore

HEADER_SIZE_BYTES = 48


@dataclass
class FakeEntry:
    index: int
    term: int
    body_pos: int
    body: bytes
    is_message: bool = True


@dataclass
class FakeState:
    self_id: str = "n1"
    role: Role = Role.FOLLOWER
    term: int = 0
    leader_id: str | None = None

    @property
    def is_leader(self) -> bool:
        return self.role is Role.LEADER


class FakeStore:
    def __init__(self) -> None:
        self.entries: list[FakeEntry] = []
        self.ledger_begin_index = 0
        self.committed_index = -1
        self.end_pos = 0

    @property
    def ledger_end_index(self) -> int:
        return self.entries[-1].index if self.entries else self.ledger_begin_index - 1

    @property
    def committed_pos(self) -> int:
        return self.end_pos

    def add(self, term: int, body: bytes, *, is_message: bool = True) -> FakeEntry:
        pos = self.end_pos + HEADER_SIZE_BYTES
        entry = FakeEntry(self.ledger_end_index + 1, term, pos, body, is_message)
        self.entries.append(entry)
        self.end_pos = pos + len(body)
        return entry

    def get(self, index: int) -> FakeEntry | None:
        at = index - self.ledger_begin_index
        return self.entries[at] if 0 <= at < len(self.entries) else None

    @property
    def durable_index(self) -> int:
        return self.committed_index

    def holds(self, index: int, term: int) -> bool:
        entry = self.get(index)
        return entry is not None and entry.term == term

    def read_committed(self, first_index: int, last_index: int) -> Sequence[EntryBatch]:
        """Nothing: the dispatcher then reads each entry on its own."""
        return ()

    def read_records(self, places: Sequence[tuple[int, int]]) -> list[bytes]:
        return [self.read_bytes(position, size_bytes) for position, size_bytes in places]

    def read_bytes(self, pos: int, size_bytes: int) -> bytes:
        for entry in self.entries:
            if entry.body_pos <= pos < entry.body_pos + len(entry.body):
                return entry.body[pos - entry.body_pos :][:size_bytes]
        raise OSError(f"nothing at {pos}")


class FakeLedger:
    """Appends are committed at once unless `commit_by_hand`; `become` changes the role."""

    def __init__(self) -> None:
        self.store = FakeStore()
        self.member_state = FakeState()
        self.commit_by_hand = False
        self.refuse_with: DLedgerCode | None = None
        self.barriers: list[ReadMode] = []
        self.barrier_error: DLedgerError | None = None
        self.started = self.stopped = False
        self._pending: list[tuple[FakeEntry, Callable[[Exception | None], object]]] = []
        self._commit_listeners: list[Callable[[], None]] = []
        self._role_listeners: list[Callable[[int, Role], None]] = []

    async def start(self) -> None:
        self.started = True

    async def stop(self) -> None:
        self.stopped = True

    def add_commit_listener(self, listener: Callable[[], None]) -> None:
        self._commit_listeners.append(listener)

    def add_role_listener(self, listener: Callable[[int, Role], None]) -> None:
        self._role_listeners.append(listener)

    def become(self, role: Role, term: int, *, leader_id: str | None = None, noop: bool = True) -> None:
        state = self.member_state
        state.role, state.term = role, term
        state.leader_id = state.self_id if role is Role.LEADER else leader_id
        if role is Role.LEADER and noop:
            self.store.add(term, b"", is_message=False)
            if not self.commit_by_hand:
                self.commit()
        for listener in self._role_listeners:
            listener(term, role)

    def takes_together(self, count: int, size_bytes: int) -> bool:
        return True

    def append_batch(
        self,
        sizes: Sequence[int],
        encode: Callable[[Sequence[int]], Sequence[bytes]],
        on_done: Callable[[Exception | None], object],
    ) -> tuple[int, int, int]:
        if not self.member_state.is_leader:
            raise DLedgerError(DLedgerCode.NOT_LEADER, "not the leader")
        if self.refuse_with is not None:
            raise DLedgerError(self.refuse_with, "refused")
        places, place = [], self.store.end_pos
        for size_bytes in sizes:
            places.append(place + HEADER_SIZE_BYTES)
            place += HEADER_SIZE_BYTES + size_bytes
        bodies = encode(places)
        assert [len(body) for body in bodies] == list(sizes)
        entries = [self.store.add(self.member_state.term, body) for body in bodies]
        self._pending.append((entries[-1], on_done))
        if not self.commit_by_hand:
            self.commit()
        return entries[0].index, entries[-1].index, self.member_state.term

    def commit(self, index: int | None = None) -> None:
        self.store.committed_index = self.store.ledger_end_index if index is None else index
        pending, self._pending = self._pending, []
        for entry, on_done in pending:
            if entry.index <= self.store.committed_index:
                on_done(None)
            else:
                self._pending.append((entry, on_done))
        for listener in self._commit_listeners:
            listener()

    def fail_pending(self, code: DLedgerCode) -> None:
        self.fail_pending_with(DLedgerError(code, "failed"))

    def fail_pending_with(self, error: Exception) -> None:
        pending, self._pending = self._pending, []
        for _, on_done in pending:
            on_done(error)

    async def read_barrier(self, mode: ReadMode) -> int:
        self.barriers.append(mode)
        if self.barrier_error is not None:
            raise self.barrier_error
        if mode is not ReadMode.UNSAFE and not self.member_state.is_leader:
            raise DLedgerError(DLedgerCode.NOT_LEADER, "not the leader")
        return self.store.committed_index

    def ask_barrier(self, mode: ReadMode, then: Callable[[int | DLedgerError], object]) -> bool:
        self.barriers.append(mode)
        if mode is not ReadMode.UNSAFE and not self.member_state.is_leader:
            raise DLedgerError(DLedgerCode.NOT_LEADER, "not the leader")
        then(self.barrier_error or self.store.committed_index)
        return True


class ManualClock:
    def __init__(self) -> None:
        self.now_ms = 1_700_000_000_000

    def wall_ms(self) -> int:
        return self.now_ms

    def monotonic_ns(self) -> int:
        return self.now_ms * 1_000_000


class PlainFile:
    """A file of the real file system, without a thread: enough if no test stalls the disk."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)

    def size_bytes(self) -> int:
        return os.fstat(self._descriptor).st_size

    def read(self, offset: int, size_bytes: int) -> bytes:
        return os.pread(self._descriptor, size_bytes, offset)

    async def write(self, offset: int, data: bytes, *, sync: bool = False) -> None:
        os.pwrite(self._descriptor, data, offset)

    async def sync(self) -> None:
        os.fsync(self._descriptor)

    async def truncate(self, size_bytes: int) -> None:
        os.ftruncate(self._descriptor, size_bytes)

    def close(self) -> None:
        os.close(self._descriptor)


class PlainDisk:
    async def create(self, path: str) -> PlainFile:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return PlainFile(path)

    def open(self, path: str) -> PlainFile:
        return PlainFile(path)

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def list(self, path: str) -> list[str]:
        return sorted(os.listdir(path)) if os.path.isdir(path) else []

    def make_dirs(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)

    def read_file(self, path: str) -> bytes:
        with open(path, "rb") as file:
            return file.read()

    async def write_file_atomic(self, path: str, data: bytes) -> None:
        with open(f"{path}.tmp", "wb") as file:
            file.write(data)
        os.replace(f"{path}.tmp", path)

    async def remove(self, path: str) -> None:
        if os.path.exists(path):
            os.remove(path)

    async def sync_dir(self, path: str) -> None:
        assert os.path.isdir(path)

    used_ratio = 0.5

    def usage(self, path: str) -> DiskUsage:
        assert os.path.isdir(path)
        return DiskUsage(1000, int(1000 * self.used_ratio))


@dataclass
class FakeConnection:
    """The parts of a connection that processors use."""

    remote_address: str = "127.0.0.1:50000"
    is_closing: bool = False
    state: dict[str, Any] = field(default_factory=dict)
    callbacks: list[Callable[[Any], object]] = field(default_factory=list)

    def on_close(self, callback: Callable[[Any], object]) -> None:
        self.callbacks.append(callback)

    def close(self) -> None:
        self.is_closing = True
        for callback in self.callbacks:
            callback(self)


def new_runtime(clock: ManualClock | None = None) -> Runtime:
    return Runtime(clock=clock or ManualClock(), disk=PlainDisk(), random=random.Random(1))


class Parts:
    """A broker's parts around a fake log, without the network. `data_dir` survives for another `Parts`."""

    def __init__(self, data_dir: str, ledger: FakeLedger | None = None, *, mode: ReadMode = ReadMode.READ_INDEX):
        self.ledger = ledger or FakeLedger()
        self.clock = ManualClock()
        self.runtime = new_runtime(self.clock)
        self.data_dir = data_dir
        self.queues = QueueStore(self.runtime.disk, f"{data_dir}/consumequeue", units_per_file=7)
        self.holds = PullHolds(max_held=100)
        self.dispatcher = Dispatcher(self.ledger.store, self.queues, on_arrival=self.holds.wake)
        self.store = MessageStore(
            ledger=self.ledger, queues=self.queues, clock=self.clock, pending=self.dispatcher.pending
        )
        self.changes: list[bool] = []
        self.roles = RoleChangeHandler(
            ledger=self.ledger,
            dispatcher=self.dispatcher,
            store=self.store,
            on_changed=lambda: self.changes.append(self.store.is_master),
        )
        self.gate = ReadGate(
            ledger=self.ledger,
            dispatcher=self.dispatcher,
            mode=mode,
            not_leader_remark=lambda: "NOT_LEADER leader=n2 addr=-",
        )
        self.topics = TopicTable(
            self.runtime.disk,
            f"{data_dir}/topics.json",
            [
                TopicConfig(name="t", queues=4),
                TopicConfig(name="read-only", perm=4),
                TopicConfig(name="write-only", perm=2),
            ],
        )
        self.topics.load()
        self.groups = SubscriptionGroups(self.runtime.disk, f"{data_dir}/subscriptionGroup.json")
        self.offsets = ConsumerOffsets(self.runtime.disk, f"{data_dir}/consumerOffset.json")
        self.clients = ClientManager(may_notify=lambda group: True)
        self.connection = FakeConnection()
        self.memory = MemoryWindow(self.ledger.store, memory_bytes=1 << 30, percent=40)
        self.ledger.add_commit_listener(self.dispatcher.notify)

    async def start(self, *, master: bool = True) -> None:
        await self.dispatcher.start()
        self.roles.start()
        if master:
            self.ledger.become(Role.LEADER, 1)
            await until(lambda: self.store.is_master)

    async def stop(self) -> None:
        await self.roles.stop()
        await self.dispatcher.stop()


async def until(condition: Callable[[], bool], *, timeout_s: float = 5.0) -> None:
    """Let the loop run until `condition` holds; fails after `timeout_s`."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while not condition():
        assert loop.time() < deadline, "the condition never held"
        await asyncio.sleep(0.001)


def send_request(topic: str = "t", queue_id: int = 0, body: bytes = b"hello", **fields: Any) -> Command:
    return Command.request(10, {"topic": topic, "queueId": queue_id, "bornTimestamp": 5, **fields}, body)


@pytest.fixture
def make_parts(tmp_path: Any) -> Callable[..., Parts]:
    return lambda ledger=None, **options: Parts(str(tmp_path), ledger, **options)


@pytest.fixture
def helpers() -> Any:
    """`until`, `send_request` and the fakes, for tests that need more than parts."""

    return SimpleNamespace(
        until=until,
        send_request=send_request,
        FakeLedger=FakeLedger,
        FakeConnection=FakeConnection,
        PlainDisk=PlainDisk,
        new_runtime=new_runtime,
    )


class Case:
    """A started broker and a client of it. `clock` is the broker's wall clock, set by hand."""

    def __init__(self, broker: BrokerController, ledger: Any, client: RemotingClient, clock: ManualClock) -> None:
        self.broker, self.ledger, self.client, self.clock = broker, ledger, client, clock

    async def ask(self, code: int, fields: dict[str, Any] | None = None, body: bytes = b"") -> Command:
        address = f"127.0.0.1:{self.broker.port}"
        return await self.client.invoke(address, Command.request(code, fields or {}, body), timeout_ms=5000)

    async def send(self, body: bytes = b"x", topic: str = "t", queue_id: int = 0) -> Command:
        return await self.ask(310, {"b": topic, "e": queue_id}, body)

    async def pull(self, offset: int = 0, topic: str = "t", queue_id: int = 0, **fields: Any) -> Command:
        return await self.ask(11, {"topic": topic, "queueId": queue_id, "queueOffset": offset, **fields})

    async def table(self) -> dict[str, str]:
        table: dict[str, str] = json.loads((await self.ask(28)).body)["table"]
        return table


CONFIG = """
self_id = "n3"
listen = "127.0.0.1:0"
data_dir = "{data_dir}"
name_servers = [{name_servers}]
read_mode = "{read_mode}"
[dledger]
listen = "127.0.0.1:20911"
[dledger.peers]
n2 = "127.0.0.1:20912"
n3 = "127.0.0.1:20911"
[dledger.clients]
n2 = "192.0.2.2:10911"
[[topics]]
name = "t"
queues = 2
"""


@pytest.fixture
def new_broker(tmp_path: Any) -> Callable[..., tuple[BrokerController, Any]]:
    """Makes a broker and the fake log that it uses."""

    def make(
        *,
        read_mode: str = "read_index",
        name_servers: str = "",
        ledger: Any = None,
        clock: ManualClock | None = None,
        **changes: str,
    ) -> tuple[BrokerController, Any]:
        text = CONFIG.format(data_dir=tmp_path / "data", read_mode=read_mode, name_servers=name_servers)
        ledger = ledger or FakeLedger()
        ledger.member_state.self_id = "n3"
        config = parse_broker_config(text, [f"{key}={value}" for key, value in changes.items()])
        runtime = new_runtime(clock)
        return BrokerController(config, runtime, make_ledger=lambda *_: ledger), ledger

    return make


@pytest.fixture
def run_case(new_broker: Any) -> Callable[..., None]:
    def runner(
        scenario: Callable[[Case], Awaitable[None]],
        *,
        read_mode: str = "read_index",
        master: bool = True,
        ledger: Any = None,
        clock: ManualClock | None = None,
        **changes: str,
    ) -> None:
        async def main() -> None:
            wall_clock = clock or ManualClock()
            broker, log = new_broker(read_mode=read_mode, ledger=ledger, clock=wall_clock, **changes)
            client = RemotingClient()
            await broker.start()
            try:
                if master:
                    log.become(Role.LEADER, log.member_state.term + 1)
                    await until(lambda: broker.store.is_master)
                await scenario(Case(broker, log, client, wall_clock))
            finally:
                await client.close()
                await broker.stop()
                assert log.stopped

        asyncio.run(main())

    return runner

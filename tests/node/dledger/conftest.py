"""Members of a DLedger group for tests: on simulated hosts (virtual time, faults at will) and on real sockets."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextvars import copy_context
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from checker.trace import check_traces, parse_trace
from checker.trace.models.raft import Raft
from checker.verdict import Result
from harness.clusters.sim.host import Incarnation, SimHost
from harness.clusters.sim.lane import LANE
from harness.clusters.sim.loop import SimLoop
from harness.clusters.sim.network import SimNetwork
from harness.clusters.sim.simulation import run_simulated
from node.dledger import FAST_TIMING, DLedgerConfig, DLedgerServer, DLedgerStore, Entry
from node.dledger.tracing import trace_member
from node.runtime import Runtime
from node.store.segments import SegmentError

T = TypeVar("T")
PORT = 20911
DATA_DIR = "/data"
SMALL = {"data_segment_size_bytes": 4096, "index_segment_size_bytes": 640, "timing": FAST_TIMING}
"""Small files, so that every test crosses their ends, and the fast timings."""


def _body(body: bytes, position: int) -> bytes:
    return body


class World:
    """Simulated hosts n1, n2, ... on one network; programs run on them."""

    def __init__(self, names: tuple[str, ...]) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        self.loop = loop
        self.names = names
        self.network = SimNetwork(loop)
        self.hosts = {
            name: SimHost(loop, self.network, name, f"10.0.0.{number}") for number, name in enumerate(names, 1)
        }

    def process(self, name: str) -> Incarnation:
        """The process on a host; one that does nothing is started if none runs."""

        async def idle(process: Incarnation) -> None:
            await process.stop_requested.wait()

        host = self.hosts[name]
        if not host.is_running:
            host.boot()
            host.start(idle)
        assert host.process is not None
        return host.process

    def on(self, name: str, call: Callable[[], T]) -> T:
        """Call `call` inside the process on a host: the tasks that it starts end with that process."""
        context = copy_context()
        context.run(LANE.set, self.process(name))
        return context.run(call)

    async def run(self, name: str, coroutine: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine as the process on a host and wait for it. If the process is killed, the coroutine never ends,
        not even when cancelled; a caller that waits with a timeout is released nevertheless."""
        task = self.on(name, lambda: asyncio.get_running_loop().create_task(coroutine()))
        ended = self.loop.create_future()
        task.add_done_callback(lambda _: ended.cancelled() or ended.set_result(None))
        try:
            await ended
        except asyncio.CancelledError:
            task.cancel()
            raise
        return task.result()

    async def until(self, condition: Callable[[], bool], *, within_s: float = 60.0, every_s: float = 0.002) -> None:
        """Wait until a condition holds, polling every `every_s`; fails after `within_s` virtual seconds."""
        deadline_s = self.loop.time() + within_s
        while not condition():
            assert self.loop.time() < deadline_s, "the condition never held"
            await asyncio.sleep(every_s)

    def content(self, name: str, directory: str) -> bytes:
        """The bytes of all files below a directory of a host, in order of their names."""
        disk = self.hosts[name].disk
        return b"".join(bytes(disk.inode(path).cache) for path in disk.paths() if path.startswith(f"{directory}/"))


class Bench(World):
    """One host with a log store, and ways to crash it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(("n1",))
        self.config = DLedgerConfig(
            group="g", self_id="n1", peers={"n1": "10.0.0.1:1"}, listen="10.0.0.1:1", data_dir=DATA_DIR, **options
        )
        self.disk = self.hosts["n1"].disk

    @property
    def runtime(self) -> Runtime:
        return self.process("n1").runtime

    async def open(self) -> DLedgerStore:
        """Open the store in the running process. Raises what opening raises."""
        store = self.on("n1", lambda: DLedgerStore(self.config, self.runtime))
        await self.run("n1", store.open)
        return store

    async def close(self, store: DLedgerStore) -> None:
        await self.run("n1", store.close)

    def kill(self) -> None:
        self.hosts["n1"].kill()

    def power_fail(self) -> None:
        self.hosts["n1"].power_fail()

    def append(self, store: DLedgerStore, *bodies: bytes, term: int = 1) -> list[Entry]:
        """Append entries as a leader."""
        return [
            self.on("n1", lambda body=body: store.append_as_leader(term, len(body), lambda _: body))  # type: ignore[misc]
            for body in bodies
        ]

    async def flushed(self, store: DLedgerStore) -> None:
        """Wait until the whole log is durable."""
        await self.until(lambda: store.durable_index == store.ledger_end_index)

    async def killed_before_the_name_is_synced(self, path: str, write: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """`write` makes or replaces a file; the sync of its directory fails, and the process is killed: the file
        exists, but its name may not be durable."""
        before = self.disk.get(path)
        task = self.on("n1", lambda: asyncio.get_running_loop().create_task(write()))
        await self.until(lambda: self.disk.get(path) is not before, every_s=10e-6)  # a sync takes 200 us
        self.disk.fail("sync")
        with pytest.raises(OSError, match="Input/output"):
            await task
        self.disk.heal()
        self.kill()

    def path(self, position: int) -> str:
        """The data file that holds a position."""
        size = self.config.data_segment_size_bytes
        return f"{DATA_DIR}/dledger/data/{position - position % size:020d}"

    def flip(self, position: int, bit: int = 0) -> None:
        """Flip one bit of the log on the disk."""
        self.disk.flip_bit(self.path(position), position % self.config.data_segment_size_bytes, bit)


class Group(World):
    """A DLedger group, one member on each host. Errors of members that could not start are in `ended`."""

    def __init__(self, size: int, server: type[DLedgerServer], *, joining: int = 0, **options: Any) -> None:
        super().__init__(tuple(f"n{number}" for number in range(1, size + joining + 1)))
        self.addresses = {name: f"{host.address}:{PORT}" for name, host in self.hosts.items()}
        joiners = self.names[size:]
        self.names = self.names[:size]
        peers = {name: self.addresses[name] for name in self.names}
        self.configs = {
            name: DLedgerConfig(
                group="g",
                self_id=name,
                peers=peers | {name: self.addresses[name]},
                listen=self.addresses[name],
                data_dir=DATA_DIR,
                joins=name in joiners,
                **options,
            )
            for name in (*self.names, *joiners)
        }
        self.server = server
        self.members: dict[str, DLedgerServer] = {}
        self.ended: dict[str, BaseException] = {}
        self.roles: list[tuple[float, str, int, str]] = []
        """(time, member, term, role) of every change."""

    def __getitem__(self, name: str) -> DLedgerServer:
        return self.members[name]

    async def start(self, *names: str) -> None:
        """Start members (all, by default) and wait until they have read their logs."""
        for name in names or self.names:
            self.hosts[name].boot()
            self.hosts[name].start(self._program(name))
        await self.until(lambda: all(name in self.members or name in self.ended for name in names or self.names))

    def _program(self, name: str) -> Callable[[Incarnation], Coroutine[Any, Any, None]]:
        async def program(process: Incarnation) -> None:
            member = self.server(self.configs[name], process.runtime)
            member.add_role_listener(lambda term, role: self.roles.append((self.loop.time(), name, term, role.name)))
            try:
                await member.start()
            except (OSError, SegmentError) as error:
                self.ended[name] = error
                return
            self.members[name] = member
            await process.stop_requested.wait()
            await member.stop()

        return program

    def kill(self, *names: str) -> None:
        for name in names:
            self.hosts[name].kill()
            self.members.pop(name, None)

    def power_fail(self, *names: str) -> None:
        for name in names:
            self.hosts[name].power_fail()
            self.members.pop(name, None)

    async def cut(self, *sides: str) -> None:
        """Cut the network into sides, each written like "n1 n2"; a member on no side is alone."""
        side_of = {name: number for number, side in enumerate(sides) for name in side.split()}
        await self.network.cut(
            "test",
            {
                name: frozenset(
                    other
                    for other in self.names
                    if other != name and side_of.get(name, name) != side_of.get(other, other)
                )
                for name in self.names
            },
        )

    async def heal(self) -> None:
        await self.network.heal("test")

    def leaders(self) -> list[str]:
        """Members that believe they lead."""
        return [name for name, member in self.members.items() if member.member_state.is_leader]

    async def leader(self, *among: str) -> str:
        """Wait for a leader (among some members) whose no-op is committed; its name."""

        def ready() -> list[str]:
            return [
                name
                for name in self.leaders()
                if (not among or name in among)
                and (store := self[name].store).term_at(store.committed_index) == self[name].member_state.term
            ]

        await self.until(lambda: bool(ready()))
        return ready()[0]

    def append(self, name: str, body: bytes) -> asyncio.Future[Any]:
        """Append at a member. Raises DLedgerError."""
        return self.on(name, lambda: self[name].append(len(body), lambda _: body))

    async def append_all(self, name: str, *bodies: bytes) -> list[int]:
        """Append and wait until everything is committed; the indices."""
        futures = [self.append(name, body) for body in bodies]
        return [(await future).index for future in futures]

    async def barrier(self, name: str, mode: Any) -> int:
        return await self.run(name, lambda: self[name].read_barrier(mode))

    async def ask_barrier(self, name: str, mode: Any) -> int:
        """The same through `ask_barrier`, or through `barrier` if the mode needs a task."""
        future: asyncio.Future[Any] = self.loop.create_future()
        if not self.on(name, lambda: self[name].ask_barrier(mode, future.set_result)):
            return await self.barrier(name, mode)
        outcome = await future
        if isinstance(outcome, int):
            return outcome
        raise outcome

    def log(self, name: str) -> list[tuple[int, bytes]]:
        """(term, body) of every entry of a member's log, no-ops included, from the beginning."""
        store = self[name].store
        entries = (store.get(index) for index in range(max(store.ledger_begin_index, 0), store.ledger_end_index + 1))
        return [(entry.term, entry.body) for entry in entries if entry is not None]

    async def put_log(self, name: str, terms: list[int], *, term: int | None = None) -> None:
        """Give a stopped member a log with entries of these terms, and a matching current term."""
        member = self.on(name, lambda: self.server(self.configs[name], self.process(name).runtime))

        async def fill() -> None:
            member.member_state.load()
            await member.store.open()
            for index, entry_term in enumerate(terms):
                body = b"%d in %d" % (index, entry_term)
                member.store.append_as_leader(entry_term, len(body), partial(_body, body))
            async with member.member_state.lock:
                await member.member_state.change_term(max(terms, default=0) + 1 if term is None else term)
            await member.store.close()

        await self.run(name, fill)
        self.hosts[name].kill()

    async def converged(self, *names: str) -> None:
        """Wait until members hold the same log, committed and durable, byte for byte."""
        members = names or self.names

        def same() -> bool:
            if not all(name in self.members for name in members):
                return False
            stores = [self[name].store for name in members]
            ends = {(store.ledger_end_index, store.committed_index, store.durable_index) for store in stores}
            return len(ends) == 1 and len(set(next(iter(ends)))) == 1

        await self.until(same)
        end = self[members[0]].store.committed_pos
        assert len({self.content(name, f"{DATA_DIR}/dledger/data")[:end] for name in members}) == 1

    def lines(self, name: str) -> str:
        """The log lines of a member's process."""
        return self.hosts[name].log.text()


class Truth:
    """The state after each committed entry, from the first member that applied it; `violations` contradict it."""

    def __init__(self) -> None:
        self.after: dict[int, str] = {}
        self.violations: list[str] = []

    def check(self, index: int, state: str) -> None:
        if self.after.setdefault(index, state) != state:
            self.violations.append(f"after entry {index}: {state}, before it was {self.after[index]}")


class Tally:
    """A state machine: keys with values from bodies like b"key=value", a count, and a sum that depends on the order."""

    def __init__(self, truth: Truth | None = None) -> None:
        self.truth = truth or Truth()
        self.values: dict[str, str] = {}
        self.next_index = 0
        self.sum = 0

    @property
    def state(self) -> str:
        return json.dumps([self.next_index, self.sum, self.values], sort_keys=True)

    def apply(self, entry: Entry) -> None:
        if entry.index != self.next_index:
            self.truth.violations.append(f"entry {entry.index} is applied after {self.next_index - 1}")
        self.next_index = entry.index + 1
        self.sum = zlib.crc32(entry.raw, self.sum)
        key, _, value = entry.body.decode().partition("=")
        if entry.is_message:
            self.values[key] = value
        self.truth.check(entry.index, self.state)

    def save(self) -> Mapping[str, bytes]:
        return {"numbers": b"%d %d" % (self.next_index, self.sum), "values": json.dumps(self.values).encode()}

    def load(self, files: Mapping[str, bytes]) -> None:
        before = self.next_index
        self.next_index, self.sum = (int(word) for word in files["numbers"].split())
        self.values = json.loads(files["values"])
        if self.next_index < before:
            self.truth.violations.append(f"the state goes back from {before - 1} to {self.next_index - 1}")
        self.truth.check(self.next_index - 1, self.state)


def tally_server(truth: Truth, mutate: Callable[[DLedgerServer], None] | None = None) -> type[DLedgerServer]:
    """A class of members that each have a Tally, `tally`; `mutate`, if given, is applied to each."""

    class TallyServer(DLedgerServer):
        def __init__(self, config: DLedgerConfig, runtime: Runtime) -> None:
            super().__init__(config, runtime)
            self.tally = Tally(truth)
            self.apply_to(self.tally)
            if mutate is not None:
                mutate(self)

    return TallyServer


TRACE = "/trace.jsonl"


def traced(member: DLedgerServer) -> None:
    """Have a member that has not started write its trace."""
    assert member.runtime.open_lines is not None
    trace_member(member, member.runtime.open_lines(TRACE))


def judge(group: Group) -> Result:
    """The result of trace validation for all members that have written a trace."""
    traces = [
        parse_trace(host.line_files[TRACE], name=name) for name, host in group.hosts.items() if TRACE in host.line_files
    ]
    return check_traces(Raft(), traces)


@pytest.fixture
def tracing() -> Any:
    """`traced(member)`, and `judge(group)`, the result for the traces of a group."""
    return SimpleNamespace(traced=traced, judge=judge, path=TRACE)


@pytest.fixture
def tallies() -> Any:
    """The classes Tally and Truth, and `server(truth, mutate=None)`."""
    return SimpleNamespace(Tally=Tally, Truth=Truth, server=tally_server)


@pytest.fixture
def bench() -> Callable[..., Any]:
    """Run `scenario(bench)` in simulation with options of the store's configuration; returns its result."""

    def run(scenario: Callable[[Bench], Awaitable[Any]], *, seed: int = 1, **options: Any) -> Any:
        async def main() -> Any:
            return await scenario(Bench(**{**SMALL, **options}))

        return run_simulated(main(), seed=seed)

    return run


@pytest.fixture
def simulate() -> Callable[..., Any]:
    """Run `scenario(group)` in simulation with a group of `size` members; returns its result."""

    def run(
        scenario: Callable[[Group], Awaitable[Any]],
        *,
        size: int = 3,
        seed: int = 1,
        server: type[DLedgerServer] = DLedgerServer,
        **options: Any,
    ) -> Any:
        async def main() -> Any:
            return await scenario(Group(size, server, **{**SMALL, **options}))

        return run_simulated(main(), seed=seed)

    return run


@pytest.fixture
def with_timing() -> Callable[..., Any]:
    """The fast timings with some replaced."""
    return lambda **changes: dataclasses.replace(FAST_TIMING, **changes)

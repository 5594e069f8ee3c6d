"""Clients of in-memory systems, correct and incorrect ones, for every capability."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any


class Refused(Exception):
    is_definite = True
    reopen = False


class LostAnswer(Exception):
    """The operation may have happened."""


class Store:
    """State shared by a test's clients; `fault(name, number)` may spoil the number-th call of a method: "lose" loses
    the answer, "refuse" refuses the call, "drop" answers without doing it; other values are specific to a method."""

    def __init__(self, fault: Callable[[str, int], str | None] = lambda name, number: None) -> None:
        self.registers: dict[Any, Any] = {}
        self.before: dict[Any, Any] = {}
        self.elements: set[Any] = set()
        self.total = 0
        self.logs: dict[Any, list[Any]] = {}
        self.waiting: list[Any] = []
        self.shown: list[Any] = []
        self.locked: set[str] = set()
        self.ids = itertools.count()
        self.versions: dict[Any, list[Any]] = {}
        self.texts: dict[Any, str] = {}
        self.stack: list[Any] = []
        self.partitions: list[list[Any]] = [[], [], [], []]
        self.offsets: dict[Any, int] = {}
        self.prepared: set[Any] = set()
        self.rows: dict[Any, list[Any]] = {}
        self.opened = 0
        self.open_now = 0
        self._fault = fault
        self._numbers: dict[str, int] = {}

    def fault(self, name: str) -> str | None:
        self._numbers[name] = self._numbers.get(name, 0) + 1
        return self._fault(name, self._numbers[name])


class ToyClient:
    """Every capability; one step of each call is atomic, and other calls interleave before and after it."""

    def __init__(self, store: Store) -> None:
        self.store = store

    async def open(self) -> None:
        self.store.opened += 1
        self.store.open_now += 1

    async def close(self) -> None:
        self.store.open_now -= 1

    async def _do(self, name: str, change: Callable[[], Any], answer: Any = None) -> Any:
        await asyncio.sleep(0)
        fault = self.store.fault(name)
        if fault == "refuse":
            raise Refused("not now")
        result = answer if fault == "drop" else change()
        await asyncio.sleep(0)
        if fault == "lose":
            raise LostAnswer("the answer got lost")
        return result

    async def read(self, key: Any) -> Any:
        store = self.store
        return await self._do("read", lambda: store.registers.get(key), store.before.get(key))

    async def write(self, key: Any, value: Any) -> None:
        def change() -> None:
            self.store.before[key] = self.store.registers.get(key)
            self.store.registers[key] = value

        await self._do("write", change)

    async def cas(self, key: Any, old: Any, new: Any) -> bool:
        def change() -> bool:
            if self.store.registers.get(key) != old:
                return False
            self.store.registers[key] = new
            return True

        return bool(await self._do("cas", change, True))

    async def add(self, value: Any) -> None:
        await self._do("add", lambda: self.store.elements.add(value))

    async def members(self) -> Any:
        return await self._do("members", lambda: set(self.store.elements))

    async def increment(self, by: int) -> None:
        def change() -> None:
            self.store.total += by

        await self._do("increment", change)

    async def value(self) -> Any:
        return await self._do("value", lambda: self.store.total)

    async def append(self, key: Any, value: Any) -> Any:
        log = self.store.logs.setdefault(key, [])

        def change() -> int:
            log.append(value)
            return len(log) - 1

        return await self._do("append", change, len(log))

    async def poll(self, key: Any, offset: int, max_messages: int) -> Any:
        log = self.store.logs.setdefault(key, [])
        return await self._do("poll", lambda: log[offset : offset + max_messages], [])

    async def enqueue(self, value: Any) -> None:
        await self._do("enqueue", lambda: self.store.waiting.append(value))

    async def dequeue(self) -> Any:
        waiting = self.store.waiting
        return await self._do("dequeue", lambda: waiting.pop(0) if waiting else None)

    async def lock(self, name: str) -> Any:
        def change() -> bool:
            if name in self.store.locked:
                return False
            self.store.locked.add(name)
            return True

        return await self._do("lock", change, True)

    async def unlock(self, name: str) -> None:
        await self._do("unlock", lambda: self.store.locked.discard(name))

    async def transact(self, steps: list[list[Any]]) -> Any:
        registers = self.store.registers

        def change() -> list[list[Any]]:
            for step in steps:
                kind, key, value = step
                if kind == "r":
                    found = registers.get(key)
                    step[2] = list(found) if isinstance(found, list) else found
                elif kind == "w":
                    registers[key] = value
                elif kind == "add":
                    registers[key] = registers.get(key, 0) + value
                else:
                    registers.setdefault(key, []).append(value)
            return steps

        return await self._do("transact", change, steps)

    async def insert_if_absent(self, key: Any, table: int, row: Any) -> Any:
        rows = self.store.rows.setdefault(key, [])

        def change() -> bool:
            if rows:
                return False
            rows.append(row)
            return True

        return await self._do("insert_if_absent", change, True)

    async def rows(self, key: Any) -> Any:
        return await self._do("rows", lambda: list(self.store.rows.get(key, [])), [])

    async def generate(self) -> Any:
        return await self._do("generate", lambda: next(self.store.ids), 0)

    async def fetch_add(self, by: int) -> Any:
        def change() -> int:
            self.store.total += by
            return self.store.total - by

        return await self._do("fetch_add", change, self.store.total)

    async def read_version(self, key: Any) -> Any:
        written = self.store.versions.setdefault(key, [])
        old = [len(written) - 1, written[-2]] if len(written) > 1 else None
        return await self._do("read_version", lambda: [len(written), written[-1]] if written else None, old)

    async def write_version(self, key: Any, value: Any) -> Any:
        written = self.store.versions.setdefault(key, [])

        def change() -> int:
            written.append(value)
            return len(written)

        return await self._do("write_version", change, len(written) + 1)

    async def get(self, key: Any) -> Any:
        return await self._do("get", lambda: self.store.texts.get(key))

    async def put(self, key: Any, text: str) -> None:
        await self._do("put", lambda: self.store.texts.update({key: text}))

    async def concat(self, key: Any, text: str) -> None:
        await self._do("concat", lambda: self.store.texts.update({key: self.store.texts.get(key, "") + text}))

    async def publish(self, value: Any) -> Any:
        number = hash((value, 7)) % len(self.store.partitions)
        log = self.store.partitions[number]

        def change() -> list[int]:
            log.append(value)
            return [number, len(log) - 1]

        return await self._do("publish", change, [number, len(log)])

    async def fetch(self, partition: int, offset: int, max_messages: int) -> Any:
        log = self.store.partitions[partition]
        return await self._do("fetch", lambda: log[offset : offset + max_messages], [])

    async def commit_offset(self, partition: int, offset: int) -> None:
        await self._do("commit_offset", lambda: self.store.offsets.update({partition: offset}))

    async def committed_offset(self, partition: int) -> Any:
        return await self._do("committed_offset", lambda: self.store.offsets.get(partition))

    async def schedule(self, value: Any, delay_ms: int) -> None:
        waiting = self.store.waiting

        def change() -> None:
            asyncio.get_running_loop().call_later(delay_ms / 1000, waiting.append, value)

        await self._do("schedule", change)

    async def prepare(self, value: Any) -> None:
        await self._do("prepare", lambda: self.store.prepared.add(value))

    async def commit(self, value: Any) -> None:
        def change() -> None:
            self.store.prepared.discard(value)
            self.store.waiting.append(value)

        await self._do("commit", change)

    async def rollback(self, value: Any) -> None:
        await self._do("rollback", lambda: self.store.prepared.discard(value))

    async def push(self, value: Any) -> None:
        await self._do("push", lambda: self.store.stack.append(value))

    async def pop(self) -> Any:
        stack = self.store.stack
        return await self._do("pop", lambda: stack.pop() if stack else None)

    async def insert(self, value: Any) -> None:
        await self._do("insert", lambda: self.store.stack.append(value))

    async def extract(self) -> Any:
        heap = self.store.stack

        def change() -> Any:
            if not heap:
                return None
            smallest = min(heap)
            heap.remove(smallest)
            return smallest

        return await self._do("extract", change)


class AcknowledgingClient(ToyClient):
    """A queue that keeps a value until it is acknowledged."""

    async def dequeue(self) -> Any:
        store = self.store

        def change() -> Any:
            if not store.waiting:
                return None
            value = store.waiting.pop(0)
            store.shown.append(value)
            return value

        try:
            return await self._do("dequeue", change)
        except LostAnswer:
            self.redeliver()
            raise

    def redeliver(self) -> None:
        self.store.waiting.extend(self.store.shown)
        self.store.shown.clear()

    async def ack(self, value: Any) -> None:
        def change() -> None:
            if value in self.store.shown:
                self.store.shown.remove(value)

        await self._do("ack", change)

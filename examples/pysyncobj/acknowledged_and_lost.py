"""PySyncObj 0.3.17 acknowledges a command that the group never had, while it takes a dump from its new leader.

python3 acknowledged_and_lost.py

Three replicas in one process, whose ticks are called by hand, and a network that can be cut. The leader is cut off and
takes a command, which stays in its own log. The others elect another leader, which goes on and compacts its log. When
the network is whole again, the new leader sends its dump, in pieces; each piece carries its commit index. The old
leader takes this to be about the entries in its own log, applies the command and reports success. Then the dump
replaces its state and its log.
"""

import os
import tempfile
from collections.abc import Callable
from typing import Any

from pysyncobj import SyncObj, SyncObjConf, SyncObjConsumer, replicated
from pysyncobj.transport import TCPTransport

BALLAST_BYTES = 3_000_000
"""The dump has to take several messages."""

ADDRESSES = [f"127.0.0.1:{port}" for port in (9741, 9742, 9743)]
cut_off: set[str] = set()


class Network(TCPTransport):  # type: ignore[misc]  # pysyncobj has no types
    def _connectIfNecessarySingle(self, node: Any) -> bool:
        return not cut_off & {self._selfNode.id, node.id} and bool(super()._connectIfNecessarySingle(node))

    def cut(self) -> None:
        cut_off.add(self._selfNode.id)
        for connection in list(self._connections.values()):
            connection.disconnect()


class Store(SyncObjConsumer):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.values: list[Any] = []
        self.ballast = os.urandom(BALLAST_BYTES)

    @replicated  # type: ignore[untyped-decorator]
    def add(self, value: Any) -> None:
        self.values.append(value)


class Replica:
    def __init__(self, address: str, directory: str) -> None:
        self.store = Store()
        self.network: Any = None
        conf = SyncObjConf(autoTick=False, fullDumpFile=f"{directory}/{address}", connectionRetryTime=0.1)
        others = [other for other in ADDRESSES if other != address]
        self.raft: Any = SyncObj(address, others, conf, consumers=[self.store], transportClass=self.connected)

    def connected(self, *arguments: Any) -> Any:
        self.network = Network(*arguments)
        return self.network

    def add(self, value: Any) -> list[int]:
        """Returns a list that gets the reason of its failure, or 0 for success."""
        said: list[int] = []
        self.store.add(value, callback=lambda _, reason: said.append(reason))
        return said


def main(directory: str) -> None:
    replicas = [Replica(address, directory) for address in ADDRESSES]

    def tick_until(is_done: Callable[[], Any]) -> None:
        while not is_done():
            for replica in replicas:
                replica.raft.doTick(0.001)

    def add(replica: Replica, value: Any) -> None:
        said = replica.add(value)
        tick_until(lambda: said)

    def leaders() -> list[Replica]:
        return [replica for replica in replicas if replica.raft._isLeader()]

    tick_until(lambda: leaders() and all(replica.raft.isReady() for replica in replicas))
    [old] = leaders()
    add(old, "first")
    old.network.cut()
    said = old.add("LOST")
    tick_until(lambda: len(leaders()) == 2)
    [new] = (replica for replica in leaders() if replica is not old)
    for value in range(10):
        add(new, value)
    new.raft.forceLogCompaction()
    tick_until(lambda: new.raft._getRaftLogSize() == 2)
    assert not said
    cut_off.clear()
    tick_until(lambda: said)
    print("said to the client of the old leader:", "success" if said == [0] else said)
    tick_until(lambda: old.store.values == new.store.values)
    print("in the group in the end:", new.store.values)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        main(directory)

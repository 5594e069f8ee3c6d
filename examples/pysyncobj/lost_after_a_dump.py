"""PySyncObj 0.3.17 forgets acknowledged entries if it is killed right after it has written its dump.

python3 lost_after_a_dump.py

A group of one replica, with a journal and a dump, whose ticks are called by hand. No harness, no other fault than a
SIGKILL. The dump is written by a child process while the replica goes on. If the replica is killed after the child has
replaced the dump and before its own next tick, it clears the whole journal at its next start, although the journal has
every entry: the dump's last entry is not the journal's first.
"""

import os
import signal
import tempfile
import time
from typing import Any

from pysyncobj import SyncObj, SyncObjConf, SyncObjConsumer, replicated

BALLAST_BYTES = 40_000_000
"""The dump has to take longer than ten entries do."""


class Store(SyncObjConsumer):  # type: ignore[misc]  # pysyncobj has no types
    def __init__(self) -> None:
        super().__init__()
        self.values: list[int] = []
        self.ballast = os.urandom(BALLAST_BYTES)

    @replicated  # type: ignore[untyped-decorator]
    def add(self, value: int) -> None:
        self.values.append(value)


def started(directory: str) -> tuple[Any, Any]:
    store = Store()
    conf = SyncObjConf(autoTick=False, journalFile=f"{directory}/journal", fullDumpFile=f"{directory}/dump")
    raft = SyncObj("127.0.0.1:9731", [], conf, consumers=[store])
    while not raft.isReady():
        raft.doTick(0.01)
    return raft, store


def add(raft: Any, store: Any, value: int) -> None:
    """Returns once it is acknowledged."""
    done: list[int] = []
    store.add(value, callback=lambda _, error: done.append(error))
    while not done:
        raft.doTick(0.001)
    assert done == [0], done


def first_life(directory: str) -> None:
    raft, store = started(directory)
    for value in range(10):
        add(raft, store, value)
    raft.forceLogCompaction()
    raft.doTick(0)  # a child writes the dump from now on
    for value in range(10, 20):
        add(raft, store, value)
    assert not os.path.exists(f"{directory}/dump"), "it was too fast: more ballast"
    print("acknowledged:", store.values, flush=True)
    while not os.path.exists(f"{directory}/dump"):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        if (pid := os.fork()) == 0:
            first_life(directory)
        os.waitpid(pid, 0)
        print("after the restart:", started(directory)[1].values)

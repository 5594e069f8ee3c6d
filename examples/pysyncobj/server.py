"""Registers, a set and a queue, replicated by PySyncObj: the service that pysyncobj_store.py tests.

A request is a line of JSON, `["write", 5, 17]`, and so is its answer:

    {"ok": RESULT}        it happened
    {"refused": REASON}   it did not happen, and will not
    {"unknown": REASON}   it may have happened, or may yet
"""

import argparse
import json
import os
import socketserver
from typing import Any

import pysyncobj.syncobj
from pysyncobj import FAIL_REASON, SyncObj, SyncObjConf, SyncObjConsumer, SyncObjException, replicated
from pysyncobj.journal import FileJournal
from pysyncobj.node import TCPNode

TIMEOUT_S = 10.0
"""How long a command may take; its outcome is unknown then."""

REASONS = {number: name for name, number in vars(FAIL_REASON).items() if name.isupper()}

NEVER = {FAIL_REASON.QUEUE_FULL, FAIL_REASON.MISSING_LEADER, FAIL_REASON.NOT_LEADER, FAIL_REASON.DISCARDED}
"""After these a command is in no log, or in one that has lost it. LEADER_CHANGED is not among them, whatever its
documentation says: the old leader may have passed the command on."""


class Store(SyncObjConsumer):  # type: ignore[misc]  # pysyncobj has no types
    """The replicated state. A consumer is complete before the library's thread starts; a subclass of SyncObj is not."""

    def __init__(self) -> None:
        super().__init__()
        self.registers: dict[int, Any] = {}
        self.elements: list[int] = []
        self.waiting: list[int] = []

    @replicated  # type: ignore[untyped-decorator]
    def execute(self, f: str, *arguments: Any) -> Any:
        """A command, on every replica, in the order of the log. It must not raise: the replica would try for ever."""
        return getattr(self, f)(*arguments)

    def read(self, key: int) -> Any:
        return self.registers.get(key)

    def write(self, key: int, value: Any) -> None:
        self.registers[key] = value

    def cas(self, key: int, old: Any, new: Any) -> bool:
        is_old = bool(self.registers.get(key) == old)
        if is_old:
            self.registers[key] = new
        return is_old

    def add(self, value: int) -> None:
        self.elements.append(value)

    def members(self) -> list[int]:
        return list(self.elements)

    def enqueue(self, value: int) -> None:
        self.waiting.append(value)

    def dequeue(self) -> int | None:
        return self.waiting.pop(0) if self.waiting else None

    def state(self) -> dict[str, Any]:
        registers = sorted(self.registers.copy().items())
        return {"registers": registers, "elements": list(self.elements), "waiting": list(self.waiting)}


ARITY = {"read": 1, "write": 2, "cas": 3, "add": 1, "members": 0, "enqueue": 1, "dequeue": 0}
READS = ("read", "members")


class Peer(TCPNode):  # type: ignore[misc]
    """A replica, known to all by the same name. PySyncObj knows replicas by their address, but that by which a replica
    is reached may differ from one host to the next: behind a proxy or NAT, for instance."""

    def __init__(self, name: str, reached_at: str = "") -> None:
        super().__init__(f"{name}:0")
        self.reached_at = reached_at.rpartition(":")

    @property
    def ip(self) -> str:
        return self.reached_at[0]

    @property
    def port(self) -> int:
        return int(self.reached_at[2])


class SyncedJournal(FileJournal):  # type: ignore[misc]
    """A log that is on disk before anybody learns of it. PySyncObj's own never syncs: it survives the death of the
    process, not the loss of power."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path

    def add(self, command: bytes, idx: int, term: int) -> None:
        super().add(command, idx, term)
        self.flush()

    def setCurrentTerm(self, term: int, votedForNodeId: str | None) -> None:
        super().setCurrentTerm(term, votedForNodeId)
        with open(f"{self.path}.meta", "rb") as meta:
            os.fsync(meta.fileno())


def answer(raft: Any, store: Any, local_reads: bool, request: list[Any]) -> dict[str, Any]:
    """Do what a line of a client asks for."""
    f, *arguments = request
    if f == "status":
        return {"ok": {"leads": raft._isLeader(), "term": raft.raftCurrentTerm, "applied": raft.raftLastApplied}}
    if f == "state":
        return {"ok": store.state()}
    if len(arguments) != ARITY.get(f):
        return {"refused": f"no request: {json.dumps(request)}"}
    if not raft.isReady():
        return {"refused": "not ready: it has not caught up with a leader yet"}
    if local_reads and f in READS:
        return {"ok": getattr(store, f)(*arguments)}
    try:
        return {"ok": store.execute(f, *arguments, sync=True, timeout=TIMEOUT_S)}
    except SyncObjException as error:
        reason = REASONS.get(error.errorCode, error.errorCode)
        return {"refused" if error.errorCode in NEVER else "unknown": reason}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--clients", required=True, help="the address to listen on for clients")
    parser.add_argument("--peers", required=True, help="the address to listen on for the other replicas")
    parser.add_argument("--other", nargs=2, action="append", default=[], help="another replica: its name and address")
    parser.add_argument("--local-reads", action="store_true", help="answer reads from the replica's own state")
    parser.add_argument("--journal", help="the file of the log")
    parser.add_argument("--sync", action="store_true", help="sync each entry of the log to disk")
    parser.add_argument("--dump", help="the file of the state when the log was last compacted")
    parser.add_argument("--compact", type=int, default=5000, help="entries of the log until it is compacted")
    options = parser.parse_args()

    if options.sync:
        pysyncobj.syncobj.createJournal = SyncedJournal
    store = Store()
    conf = SyncObjConf(
        bindAddress=options.peers,
        journalFile=options.journal,
        fullDumpFile=options.dump,
        logCompactionMinEntries=options.compact,
    )
    others = [Peer(name, address) for name, address in options.other]
    raft = SyncObj(Peer(options.name), others, conf, consumers=[store])

    class Serve(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            for line in self.rfile:
                said = answer(raft, store, options.local_reads, json.loads(line))
                self.wfile.write(json.dumps(said).encode() + b"\n")

    class Server(socketserver.ThreadingTCPServer):
        allow_reuse_address = True
        daemon_threads = True

    ip, _, port = options.clients.rpartition(":")
    Server((ip, int(port)), Serve).serve_forever()


if __name__ == "__main__":
    main()

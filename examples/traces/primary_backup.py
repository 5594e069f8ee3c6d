"""A register with a primary and backups, a model of it, and a bug that no client sees.

    harness run examples/traces/primary_backup.py --nodes 3 --nemesis none --set send=together

Clients talk to the primary only, so their history is always right. With `send=together` every write is sent to the
backups by a thread of its own, and a backup may apply two writes in the wrong order. It would serve wrong values the
day it takes over.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from checker.trace import Event, TraceModel
from harness.sdk import Client, Host, System

SERVER = """
import json, socket, socketserver, sys, threading

ip, port, send, backups = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4:]
values, count, lock = {}, 0, threading.Lock()

def log(event, write):
    print(json.dumps({"event": event, **write}), flush=True)

def replicate(write):
    for backup in backups:
        with socket.create_connection((backup, port)) as connection:
            connection.sendall(json.dumps({"apply": write}).encode() + b"\\n")
            connection.makefile().readline()

class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            self.wfile.write(json.dumps(self.answer(json.loads(line))).encode() + b"\\n")

    def answer(self, request):
        global count
        with lock:
            if "apply" in request:
                write = request["apply"]
                log("apply", write)
                values[write["key"]] = write["value"]
            elif "value" in request:
                count += 1
                write = {"number": count, **request}
                log("write", write)
                values[request["key"]] = request["value"]
                if send == "in-order":
                    replicate(write)
                else:
                    threading.Thread(target=replicate, args=(write,)).start()
            return values.get(request.get("key"))

class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True
    request_queue_size = 100

Server((ip, port), Handler).serve_forever()
"""

State = tuple[tuple[tuple[Any, Any], ...], tuple[tuple[str, int], ...]]


class Model(TraceModel):
    """The state: the primary's writes so far, and how many of them each backup has applied."""

    name = "primary and backups"

    def init(self, nodes: Sequence[str]) -> Iterable[State]:
        return [((), ())]

    def next(self, state: State, event: Event) -> Iterable[State]:
        writes, applied = state
        write = event["key"], event["value"]
        if event.name == "write":
            return [((*writes, write), applied)] if event["number"] == len(writes) + 1 else []
        before = dict(applied).get(event.node, 0)
        if event["number"] != before + 1 or event["number"] > len(writes) or writes[before] != write:
            return []
        others = tuple(each for each in applied if each[0] != event.node)
        return [(writes, (*others, (event.node, before + 1)))]

    def commutes(self, event: Event) -> bool:
        return True  # the writes only become more, and each backup has a count of its own

    def never(self, state: State, event: Event) -> bool:
        return event.name == "apply" and event["number"] != dict(state[1]).get(event.node, 0) + 1

    def why(self, state: State, event: Event) -> str:
        before = dict(state[1]).get(event.node, 0)
        return f"{event.node} applies write {event['number']} after write {before}"

    def describe(self, state: State) -> str:
        applied = ", ".join(f"{node} has applied {count}" for node, count in sorted(state[1]))
        return f"{len(state[0])} writes; {applied or 'nothing is applied'}"


class Register(System):
    """A register with a primary, n1, and backups."""

    ports = {"client": 7100}
    settings = {"send": ("in-order", "together")}
    trace_model = Model

    def files(self, host: Host) -> Mapping[str, str]:
        return {"server.py": SERVER}

    def command(self, host: Host) -> list[str]:
        backups = [other.ip for other in self.hosts if other is not host] if host is self.hosts[0] else []
        return [host.python, host.path("server.py"), host.ip, "7100", self.settings["send"], *backups]


class RegisterClient(Client):
    async def open(self) -> None:
        self.reader, self.writer = await self.connect(self.address("client", self.hosts[0]))

    async def read(self, key: int) -> int | None:
        return await self.ask({"key": key})

    async def write(self, key: int, value: int) -> None:
        await self.ask({"key": key, "value": value})

    async def ask(self, request: dict[str, int]) -> int | None:
        self.writer.write(json.dumps(request).encode() + b"\n")
        answer: int | None = json.loads(await self.reader.readline())
        return answer

"""PySyncObj, a Raft library in Python, below a service of one file (server.py).

harness run examples/pysyncobj/pysyncobj_store.py --nodes 3 --workload cas-register --nemesis partition
"""

import json
from typing import Any

from harness.sdk import Client, Host, Refused, Status, Streams, System, connection, path, pip


class PySyncObjStore(System):
    """Registers, a set and a queue, replicated by PySyncObj."""

    install = path("server.py"), pip("pysyncobj==0.3.17")
    ports = {"client": 7000, "peer": 7001}
    settings = {
        "reads": ("log", "local"),
        "journal": ("file", "synced", "none"),
        "dump": ("file", "none"),
        "compact": "5000",
        "leader_changed": ("unknown", "refused"),
    }
    setting_descriptions = {
        "reads": "how a read is answered: through the log, or from the own state of the client's host",
        "journal": "where the log is: in a file, in a file that is synced, or in memory",
        "dump": "where compaction keeps the state: in a file, or in memory",
        "compact": "entries of the log until it is compacted",
        "leader_changed": "outcome of a command that fails with LEADER_CHANGED; refused: as the library documents it",
    }
    stored = {"log": "journal"}

    def command(self, host: Host) -> list[str]:
        words = [host.python, host.installed("server.py"), host.name]
        words += ["--clients", host.listen("client"), "--peers", host.listen("peer")]
        for other in self.hosts:
            if other is not host:
                words += ["--other", other.name, other.address("peer", host)]
        if self.settings["journal"] != "none":
            words += ["--journal", host.path("journal")]
        if self.settings["journal"] == "synced":
            words += ["--sync"]
        if self.settings["dump"] == "file":
            words += ["--dump", host.path("dump")]
        if self.settings["reads"] == "local":
            words += ["--local-reads"]
        return [*words, "--compact", self.settings["compact"]]

    async def status(self, host: Host) -> Status:
        async with connection(host.address("client")) as streams:
            said = await ask(streams, "status")
        return Status(leads=said["leads"], term=said["term"])

    async def state(self, host: Host) -> Any:
        async with connection(host.address("client")) as streams:
            return await ask(streams, "state")


class PySyncObjClient(Client):
    async def open(self) -> None:
        self.streams, self.node = await self.connect(self.address("client")), self.host.name
        await ask(self.streams, "status")  # a proxy accepts connections for a server that is down: nothing was sent yet

    async def read(self, key: int) -> Any:
        return await self.ask("read", key)

    async def write(self, key: int, value: Any) -> None:
        await self.ask("write", key, value)

    async def cas(self, key: int, old: Any, new: Any) -> bool:
        return bool(await self.ask("cas", key, old, new))

    async def add(self, value: int) -> None:
        await self.ask("add", value)

    async def members(self) -> list[Any]:
        return list(await self.ask("members"))

    async def enqueue(self, value: int) -> None:
        await self.ask("enqueue", value)

    async def dequeue(self) -> Any:
        return await self.ask("dequeue")

    async def ask(self, *request: Any) -> Any:
        try:
            return await ask(self.streams, *request)
        except Unknown as error:
            if f"{error}" == "LEADER_CHANGED" and self.settings["leader_changed"] == "refused":
                raise Refused(*error.args) from None
            raise


class Unknown(Exception):
    """The server does not know the outcome either."""


async def ask(streams: Streams, *request: Any) -> Any:
    """Send a request to the server; returns its result."""
    reader, writer = streams
    writer.write(json.dumps(request).encode() + b"\n")
    answer = json.loads(await reader.readuntil(b"\n"))
    if "refused" in answer:
        raise Refused(answer["refused"])
    if "unknown" in answer:
        raise Unknown(answer["unknown"])
    return answer["ok"]

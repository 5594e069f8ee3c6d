"""A toy: registers in the memory of one process. Killing that process loses all writes."""

import json

from harness.sdk import Client, Host, System, path


class Toy(System):
    """Registers in the memory of the first host's process, which loses them when it is killed."""

    install = path("toy_server.py")
    ports = {"client": 7000}

    def command(self, host: Host) -> list[str]:
        return [host.python, host.installed("toy_server.py"), host.ip, "7000"]


class ToyClient(Client):
    async def open(self) -> None:
        self.reader, self.writer = await self.connect(self.address("client", self.hosts[0]))

    async def read(self, key: int) -> int | None:
        return (await self.exchange({})).get(str(key))

    async def write(self, key: int, value: int) -> None:
        await self.exchange({str(key): value})

    async def exchange(self, change: dict[str, int]) -> dict[str, int]:
        self.writer.write(json.dumps(change).encode() + b"\n")
        return dict(json.loads(await self.reader.readline()))

"""Starter, a system of your own: what to test, how to start it, and how its clients talk to it.

    harness run starter.py --nodes 3 --nemesis partition

As it stands it tests a small server defined below: the first host is the primary and copies what it gets to the others.
Put your own program into `command` and your own protocol into the client. The next steps are in your-own-system.md;
`harness run --help` prints where that page is.
"""

import json
from typing import Any

from harness.sdk import Client, Host, Status, System, connection

SERVER = """
import json, socket, socketserver, sys, threading, time

data, changed = {}, threading.Condition()

class Serve(socketserver.StreamRequestHandler):
    def handle(self):                       # every line is a change, {} to read; the answer is everything there is
        for line in self.rfile:
            with changed:
                data.update(json.loads(line))
                changed.notify_all()
                answer = json.dumps(data)
            self.wfile.write(answer.encode() + b"\\n")

def copy_to(address):                       # the primary tells each of the others what it has, again and again
    name, port = address.split(":")
    while True:
        try:
            with socket.create_connection((name, int(port)), timeout=1) as peer, peer.makefile("rw") as lines:
                while True:
                    with changed:
                        text = json.dumps(data)
                    print(text, file=lines, flush=True)
                    if not lines.readline():
                        break
                    with changed:
                        changed.wait(timeout=0.2)
        except OSError:
            time.sleep(0.1)

for other in sys.argv[2:]:
    threading.Thread(target=copy_to, args=[other], daemon=True).start()
socketserver.ThreadingTCPServer.allow_reuse_address = True
name, port = sys.argv[1].split(":")
socketserver.ThreadingTCPServer((name, int(port)), Serve).serve_forever()
"""


class Starter(System):
    """A primary that copies its registers to the other hosts, some time after it has acknowledged a write."""

    # install = pip("my-package==1.0")             what to install: pip, apt, maven, npm, go, path
    ports = {"client": 7000}  # every port that clients or hosts connect to, under names of your choice
    # metrics = {"client/metrics": {"rate(requests_total)": "Requests"}}   a page for Prometheus: lanes of the report
    settings = {"read": ("primary", "any")}  # --set read=any; the default comes first
    setting_descriptions = {
        "read": "the host that answers reads: the primary, or the client's own"
    }  # for `harness list`
    cannot = {"power": "nothing is kept on disk"}  # faults that make no sense here, and why

    def files(self, host: Host) -> dict[str, str]:  # written below host.data before the first start
        return {"server.py": SERVER}

    def command(self, host: Host) -> list[str]:  # the program that runs on a host
        others = [other.address("client", host) for other in self.hosts if other is not host]
        return [host.python, host.path("server.py"), host.listen("client"), *(others if host.number == 1 else [])]

    async def status(self, host: Host) -> Status:  # who leads; raises if the host does not answer
        async with connection(host.address("client")) as streams:
            await ask(streams, {})
        return Status(leads=host.number == 1)


class StarterClient(Client):  # its methods decide which workloads can be run
    async def open(self) -> None:
        self.primary = await self.connect(self.address("client", self.hosts[0]))
        self.own = await self.connect(self.address("client"))  # to self.host: clients are spread over the hosts
        await ask(self.primary, {})  # on local a proxy accepts connections even if the server is down

    async def read(self, key: int) -> Any:
        where = self.own if self.settings["read"] == "any" else self.primary
        return (await ask(where, {})).get(str(key))

    async def write(self, key: int, value: Any) -> None:
        await ask(self.primary, {key: value})


async def ask(streams: Any, change: dict[int, Any]) -> dict[str, Any]:
    """Send changes of registers to the server; returns all registers."""
    reader, writer = streams
    writer.write(json.dumps(change).encode() + b"\n")
    answer: dict[str, Any] = json.loads(await reader.readuntil(b"\n"))
    return answer

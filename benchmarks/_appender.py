"""A small Python server as a target for faults: it appends each line to a log, syncs it, and answers."""

from harness.sdk import Client, Host, System

SERVER = """
import os, socket, socketserver, sys, threading, time

log, lock, lines = open(sys.argv[2], "ab", buffering=0), threading.Lock(), 0

class Serve(socketserver.StreamRequestHandler):
    def handle(self):
        global lines
        for line in self.rfile:
            try:
                with lock:
                    log.write(b"%.3f %s" % (time.time(), line))
                    os.fsync(log.fileno())
                    lines += 1
            except OSError as error:
                print(error, flush=True)
                return
            self.wfile.write(b"ok\\n")

def tell(address):
    name, port = address.split(":")
    while True:
        try:
            with socket.create_connection((name, int(port)), timeout=1) as peer:
                while True:
                    peer.sendall(b"%d\\n" % lines)
                    peer.recv(100)
                    time.sleep(0.1)
        except OSError:
            time.sleep(0.1)

for other in sys.argv[3:]:
    threading.Thread(target=tell, args=[other], daemon=True).start()
socketserver.ThreadingTCPServer.allow_reuse_address = True
name, port = sys.argv[1].split(":")
socketserver.ThreadingTCPServer((name, int(port)), Serve).serve_forever()
"""


class Appender(System):
    """Each host appends what it is sent, and tells the others how much it has."""

    ports = {"client": 7000}  # noqa: RUF012 - declared like this in plug-ins

    def files(self, host: Host) -> dict[str, str]:
        return {"server.py": SERVER}

    def command(self, host: Host) -> list[str]:
        others = [other.address("client", host) for other in self.hosts if other is not host]
        return [host.python, host.path("server.py"), host.listen("client"), host.path("log"), *others]


class AppenderClient(Client):
    async def open(self) -> None:
        self.reader, self.writer = await self.connect(self.address("client"))

    async def write(self, key: int, value: str) -> None:
        self.writer.write(f"{key} {value}\n".encode())
        await self.reader.readuntil(b"ok\n")

"""The server of the toy: registers in memory, over JSON lines. `python toy_server.py IP PORT`."""

import json
import socketserver
import sys
from typing import Any

REGISTERS: dict[str, Any] = {}


class Handler(socketserver.StreamRequestHandler):
    """Each line is a request: a JSON object of registers to write. The answer has all registers."""

    def handle(self) -> None:
        """Serve one connection to its end."""
        for line in self.rfile:
            REGISTERS.update(json.loads(line))
            self.wfile.write(json.dumps(REGISTERS).encode() + b"\n")


class Server(socketserver.ThreadingTCPServer):
    """Can listen at once on the address of a server that was just killed."""

    allow_reuse_address = True
    daemon_threads = True


if __name__ == "__main__":
    Server((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()

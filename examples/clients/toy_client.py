"""A client of the toy system in Python, by JSON lines and the standard library alone.

harness run --system toy --client "python3 examples/clients/toy_client.py"
"""

import io
import json
import socket
import sys
from typing import Any

connection: io.BufferedRWPair


def call(change: dict[str, int]) -> dict[str, int]:
    """Write registers to the toy's server, and have all of them."""
    connection.write(json.dumps(change).encode() + b"\n")
    connection.flush()
    registers: dict[str, int] = json.loads(connection.readline())
    return registers


def answer(message: dict[str, Any]) -> dict[str, Any]:
    """What to say to one message of the harness."""
    global connection
    if message["type"] == "hello":
        return {"type": "hello", "capabilities": ["read", "write"]}
    if message["type"] == "open":
        ip, port = message["addresses"]["client"]["n1"].split(":")  # the toy lives on the first host alone
        connection = socket.create_connection((ip, int(port))).makefile("rwb")
    elif message["type"] == "invoke" and message["f"] == "write":
        call({str(message["key"]): message["value"]})
    elif message["type"] == "invoke" and message["f"] == "read":
        return {"type": "ok", "value": call({}).get(str(message["key"]))}
    return {"type": "ok"}


for line in sys.stdin:
    message = json.loads(line)
    try:
        reply = answer(message)
    except (OSError, ValueError) as error:
        # Before the request was sent it certainly did not happen; after that, a write may have.
        certain = message["type"] == "open" or message.get("f") == "read"
        reply = {"type": "fail" if certain else "info", "error": repr(error)}
    print(json.dumps({"id": message["id"], **reply}), flush=True)

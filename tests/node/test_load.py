"""The load generator sends messages like those of RocketMQ's clients: figures for others would not be comparable."""

from __future__ import annotations

import contextlib
import re
import socketserver
import threading
from collections.abc import Iterator

import pytest

from benchmarks import _load
from node.broker.send_request import SendHeader, split_batches
from node.remoting import Command, ResponseCode, decode, encode
from node.store.properties import property_value


class _Server(socketserver.ThreadingTCPServer):
    """Answers every request with SUCCESS, and keeps it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[Command] = []


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, _Server)
        with contextlib.suppress(ConnectionError):  # the load disconnects before all answers arrive
            while size := self.rfile.read(4):
                request = decode(self.rfile.read(int.from_bytes(size, "big")))
                self.server.requests.append(request)
                self.wfile.write(encode(request.reply(ResponseCode.SUCCESS)))


@pytest.fixture
def server() -> Iterator[_Server]:
    with _Server() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("serializer", ["json", "binary"])
@pytest.mark.parametrize("words", [[], ["--batch", "4"], ["--rate", "2000"]])
def test_every_message_has_a_unique_key_of_its_own(server: _Server, words: list[str], serializer: str) -> None:
    address = f"127.0.0.1:{server.server_address[1]}"
    load = ["send", address, "--senders", "3", "--connections", "1", "--seconds", "1", "--warm-up", "0"]
    assert _load.main([*load, "--serializer", serializer, *words]) == 0
    texts = []
    for request in server.requests:
        header = SendHeader.of(request)
        texts.append(header.properties_text)
        if header.batch:
            _, bodies, own_texts, _, _ = split_batches((request.body,))
            assert [len(body) for body in bodies] == [128] * 4
            texts += [text.decode() for text in own_texts]
    keys = [property_value(text, "UNIQ_KEY") or "" for text in texts]
    assert len(keys) >= 3 * (5 if "--batch" in words else 1) and len(set(keys)) == len(keys)
    assert all(re.fullmatch("[0-9A-F]{32}", key) for key in keys)
    assert {property_value(text, "WAIT") for text in texts} == {"true"}

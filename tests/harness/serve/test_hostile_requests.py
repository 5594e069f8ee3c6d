"""Requests that none of our pages makes: each is answered with 4xx, and nothing in or beside the store changes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http.client
import itertools
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from harness.serve import app
from harness.serve.files import chunks
from harness.serve.guard import MAX_BODY_BYTES, MAX_HEADERS_BYTES, MAX_TARGET_BYTES, Guard, loopback_hosts
from harness.serve.launch import Launcher
from harness.store import Store

from .conftest import DEADLINE_S, Client, make_run

SECRET = "the secret of somebody else"


def tree(path: Path) -> dict[str, tuple[int, int, bytes]]:
    """Everything below a directory: mode, time of change, content."""
    found = {}
    for folder, folders, names in os.walk(path):
        for name in [*folders, *names]:
            one = Path(folder) / name
            entry = one.lstat()
            content = one.read_bytes() if one.is_file() and not one.is_symlink() else b""
            found[str(one)] = (entry.st_mode, entry.st_mtime_ns, content)
    return found


def request(target: str, *headers: str, method: str = "GET", host: str = "", body: bytes = b"") -> bytes:
    lines = [f"{method} {target} HTTP/1.1", *([host] if host else []), *headers, "Connection: close", "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


def traversals(run: str) -> Iterator[str]:
    outside = ("secret.txt", "other/secret.txt")
    ups = ("..", "%2e%2e", "%2E.", ".%2e", "..%2f..", "%2e%2e%2f%2e%2e", "..%5c..", "..\\..", "%252e%252e", "....//..")
    for way, up, name in itertools.product(("files", "download"), ups, outside):
        yield f"{run}/{way}/{up}/{up}/{up}/{name}"
        yield f"{run}/{way}/nodes/{up}/{up}/{up}/{up}/{name}"
    for name in (
        "/etc/passwd",
        "%2fetc%2fpasswd",
        "file:///etc/passwd",
        "linked.txt",
        "linked/secret.txt",
        "pipe",
        "nodes",
    ):
        yield f"{run}/files/{name}"
        yield f"{run}/download/{name}"
    for up in ups:
        yield from (
            f"/runs/{up}/{up}",
            f"/runs/{up}/store/files/x",
            f"/runs/x/{up}/files/secret.txt",
            f"/static/{up}/x",
        )
    for place in (
        "/runs/../x",
        "/runs/%2e%2e/store",
        "/runs/./.",
        "/runs/.runs.json/x",
        "/runs/latest/latest",
        "//etc/passwd",
    ):
        yield place
        yield f"{place}/files/results.json"
    yield from ("/static/../app.py", "/static/%2e%2e%2fapp.py", "/static/store.js", "/static/", "/runs/linked/run")
    yield from (
        f"{run}/files/results.json%00.txt",
        f"{run}/files/%0d%0aSet-Cookie:%20a=b",
        f"{run}/files/%ff%fe",
        "/%00",
    )


def others() -> Iterator[tuple[str, bytes]]:
    """(description, request), with HOST for the server's own Host header."""
    for host in (
        "evil.example", "evil.example:PORT", "127.0.0.1", "localhost", "127.0.0.1:1", "127.0.0.1.evil.example:PORT",
        "localhost.evil.example:PORT", "127.0.0.1:PORT@evil.example", "127.1:PORT", "[::1]:PORT", "0.0.0.0:PORT",
        "2130706433:PORT", "127.0.0.1:PORT/", " ", "<script>", "127.0.0.1:PORT, evil.example",
    ):  # fmt: skip
        yield f"host {host}", request("/", host=f"Host: {host}")
    yield "no host", request("/")
    yield "two hosts", request("/", "Host: evil.example", host="HOST")
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "get", "<b>", "POST"):
        yield f"method {method}", request("/", method=method, host="HOST")
    yield "long address", request("/?words=" + "a" * MAX_TARGET_BYTES, host="HOST")
    yield "very long address", request("/" + "a" * 200_000, host="HOST")
    yield "large header", request("/", "X: " + "a" * 20_000, host="HOST")
    yield "many headers", request("/", *(f"X-{i}: {'b' * 80}" for i in range(250)), host="HOST")
    yield "very large header", request("/", "X: " + "a" * 500_000, host="HOST")
    yield "body of a GET", request("/", "Content-Length: 5", host="HOST", body=b"hello")
    yield "chunks of a GET", request("/", "Transfer-Encoding: chunked", host="HOST", body=b"0\r\n\r\n")
    yield "not HTTP", b"\x16\x03\x01\x00\x05hello\r\n\r\n"
    yield "half a request", b"GET\r\n\r\n"
    yield "a space in the address", request("/a b", host="HOST")
    yield "length twice", request("/", "Content-Length: 1", "Content-Length: 2", host="HOST", body=b"ab")


def forms() -> Iterator[tuple[str, bytes]]:
    """POSTs to the form that starts runs, without its token or with something else wrong."""
    kind, good = "Content-Type: application/x-www-form-urlencoded", b"token=x&system=broker"

    def post(*headers: str, body: bytes = good, target: str = "/new") -> bytes:
        length = f"Content-Length: {len(body)}"
        return request(target, *(headers or (kind,)), length, method="POST", host="HOST", body=body)

    yield "no token", post(body=b"system=broker")
    yield "wrong token", post()
    yield "two tokens", post(body=b"token=a&token=b")
    yield "markup", post(body=b"token=%3Cscript%3E&system=%3Cimg%20src=x%20onerror=alert(1)%3E")
    yield "not UTF-8", post(body=b"\xff\xfe=\xff")
    yield "too many fields", post(body=b"&".join(b"a=1" for _ in range(500)))
    yield "another address", post(target="/")
    for origin in ("http://evil.example", "null", "https://127.0.0.1", "http://localhost", "http://127.0.0.1:1"):
        yield f"origin {origin}", post(kind, f"Origin: {origin}")
    for site in ("cross-site", "same-site", "<b>"):
        yield f"site {site}", post(kind, f"Sec-Fetch-Site: {site}")
    for other in ("text/plain", "application/json", "multipart/form-data; boundary=x", ""):
        yield f"content type {other!r}", post(f"Content-Type: {other}")
    large = b"token=" + b"a" * MAX_BODY_BYTES
    yield "too large", post(kind, body=large)
    yield "too large, says less", request("/new", kind, "Content-Length: 99999999999", method="POST", host="HOST")
    yield (
        "no length",
        request("/new", kind, "Transfer-Encoding: chunked", method="POST", host="HOST", body=b"0\r\n\r\n"),
    )
    yield "negative length", request("/new", kind, "Content-Length: -1", method="POST", host="HOST")
    yield "a length that is a word", request("/new", kind, "Content-Length: ten", method="POST", host="HOST")


@pytest.fixture
def place(tmp_path: Path, store: Store) -> tuple[Path, str]:
    """The directory of a store with one run, links out of it and secrets beside it; and the address of the run."""
    run = make_run(store)
    (tmp_path / "other").mkdir()
    for path in (tmp_path / "secret.txt", tmp_path / "other" / "secret.txt"):
        path.write_text(SECRET)
    run.nodes_path.mkdir()
    (run.path / "linked.txt").symlink_to(tmp_path / "secret.txt")
    (run.path / "linked").symlink_to(tmp_path / "other")
    os.mkfifo(run.path / "pipe")
    (store.root / "linked").symlink_to(run.path.parent)
    return tmp_path, f"/runs/{run.name}"


def test_hostile_requests_get_4xx_and_change_nothing(
    place: tuple[Path, str], store: Store, serve: Callable[..., Client]
) -> None:
    directory, run = place
    launcher = Launcher(store.root)
    client = serve(launcher)
    before = tree(directory)
    own = f"Host: 127.0.0.1:{client.port}".encode()
    tried = [(target, request(target, host="HOST")) for target in traversals(run)]
    tried += [*others(), *forms()]
    answers = {
        what: client.raw(data.replace(b"HOST", own).replace(b"PORT", str(client.port).encode())) for what, data in tried
    }
    assert len(answers) >= 200
    assert {what: status for what, status in answers.items() if not 400 <= status < 500} == {}
    assert tree(directory) == before
    assert list(launcher.launches) == []
    assert client.ask("/")[0] == 200, "the server still answers"


def guarded(
    method: str = "GET",
    path: str = "/",
    raw_path: bytes | None = None,
    hosts: Sequence[str] = ("127.0.0.1:1",),
    **headers: str,
) -> tuple[int, list[str]]:
    """The status of a request to the guard itself, 200 if it is passed on, and the names of the answer's headers. (The
    HTTP server in front of it refuses some of these requests on its own.)"""
    sent: list[MutableMapping[str, Any]] = []

    async def accept(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    given = [("host", host) for host in hosts] + [(name.replace("_", "-"), value) for name, value in headers.items()]
    scope: dict[str, Any] = {
        "type": "http", "method": method, "path": path, "query_string": b"", "raw_path": raw_path,
        "headers": [(name.encode(), value.encode()) for name, value in given],
    }  # fmt: skip
    asyncio.run(Guard(accept, hosts=loopback_hosts(1))(scope, None, send))
    return sent[0]["status"], [name.decode() for name, _ in sent[0]["headers"]]


def test_limits_of_a_request_count_its_bytes_as_sent_and_are_allowed_themselves() -> None:
    longest = "/" + "a" * (MAX_TARGET_BYTES - 1)
    assert [guarded(path=path)[0] for path in (longest, longest + "a")] == [200, 414]
    assert guarded(path="/ä", raw_path=b"/%C3%A4" + b"a" * MAX_TARGET_BYTES)[0] == 414
    rest = MAX_HEADERS_BYTES - len("host127.0.0.1:1x")
    assert [guarded(x="a" * size)[0] for size in (rest, rest + 1)] == [200, 431]
    assert [guarded(path=path)[0] for path in ("x", "/a\nb", "/a\\b")] == [400, 400, 400]
    form = {"method": "POST", "content_type": "application/x-www-form-urlencoded"}
    lengths = (str(MAX_BODY_BYTES), str(MAX_BODY_BYTES + 1), "1" * 5000)  # the last one is too long for int()
    assert [guarded(**form, content_length=length)[0] for length in lengths] == [200, 413, 413]
    assert [guarded(**form, content_length=length)[0] for length in ("ten", "-1", "")] == [411, 411, 411]


def test_a_form_is_accepted_from_our_own_pages_only() -> None:
    form = {"content_type": "application/x-www-form-urlencoded", "content_length": "2"}
    for origin, status in (("http://127.0.0.1:1", 200), ("http://localhost:1", 200), ("http://evil.example", 403)):
        assert guarded("POST", **form, origin=origin)[0] == status
    for site, status in (("same-origin", 200), ("none", 200), ("same-site", 403), ("cross-site", 403)):
        assert guarded("POST", **form, sec_fetch_site=site)[0] == status
    assert guarded("PUT", **form)[0] == 405
    assert guarded("POST", **form, transfer_encoding="chunked")[0] == 411


def test_a_request_names_this_server_exactly_once() -> None:
    ours = "127.0.0.1:1"
    for hosts, status in (((ours,), 200), ((), 421), ((ours, ours), 421), ((ours, "evil.example"), 421)):
        assert guarded(hosts=hosts)[0] == status


def test_a_refused_method_is_told_which_ones_are_accepted() -> None:
    (status, names), (other_status, others) = guarded("PUT"), guarded(path="x")
    assert (status, other_status) == (405, 400)
    assert sorted(names) == sorted(["allow", *others]) and "x-content-type-options" in others


def test_loopback_hosts_are_named_as_browsers_name_them() -> None:
    assert loopback_hosts(8137) == {"127.0.0.1:8137", "localhost:8137"}
    assert loopback_hosts(80) == {"127.0.0.1:80", "localhost:80", "127.0.0.1", "localhost"}


def test_a_server_without_a_launcher_has_no_form(place: tuple[Path, str], serve: Callable[..., Client]) -> None:
    client = serve()
    assert [client.ask(path)[0] for path in ("/new", "/started")] == [404, 404]
    status, _, _ = client.ask("/new", method="POST", body=b"", Content_Type="application/x-www-form-urlencoded")
    assert status == 404
    assert "/new" not in client.page("/")


def test_links_are_neither_listed_nor_opened(place: tuple[Path, str], serve: Callable[..., Client]) -> None:
    client = serve()
    _, run = place
    page = client.page(run)
    assert "linked" not in page and "pipe" not in page and "results.json" in page
    assert SECRET not in client.ask(f"{run}/files/linked.txt")[2]


def test_clients_that_have_disconnected_leave_no_file_open(
    place: tuple[Path, str], serve: Callable[..., Client]
) -> None:
    client = serve()
    directory, run = place
    with open(directory / "store" / run.removeprefix("/runs/") / "some.bin", "wb") as file:
        file.truncate(64 << 20)  # more than all buffers in between take

    def open_files() -> list[str]:
        paths = []
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                paths.append(os.readlink(f"/proc/self/fd/{fd}"))
        return [path for path in paths if path.startswith(f"{directory}/store")]

    gc.disable()  # it would close forgotten files
    try:
        for _ in range(20):
            _disconnect_while_reading(client, f"{run}/download/some.bin")
        deadline_s = time.monotonic() + DEADLINE_S
        while open_files() and time.monotonic() < deadline_s:
            client.ask("/")
        assert open_files() == []
    finally:
        gc.enable()


def _disconnect_while_reading(client: Client, target: str) -> None:
    with socket.create_connection(("127.0.0.1", client.port), timeout=DEADLINE_S) as connection:
        connection.sendall(request(target, host=f"Host: 127.0.0.1:{client.port}"))
        assert connection.recv(1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closes with a reset


def test_a_head_request_neither_reads_a_file_nor_follows_a_run(
    store: Store, serve: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The live view of a run lasts until the run ends."""
    read: list[str] = []

    def noted(file: BinaryIO, most_bytes: int | None) -> Iterator[bytes]:
        read.append(file.name)
        return chunks(file, most_bytes)

    monkeypatch.setattr(app, "chunks", noted)
    client = serve()
    run = store.create("broker-register-none")
    run.write_test({})
    run.history_path.write_bytes(b"")
    try:
        for way, kind in (
            ("events", "text/event-stream"), ("files/test.json", "text/plain"), ("download/test.json", "octet-stream"),
        ):  # fmt: skip
            status, headers, text = client.ask(f"/runs/{run.name}/{way}", method="HEAD")
            assert (status, text) == (200, "") and kind in headers["content-type"]
            assert "content-length" not in headers
        assert read == []
        assert client.page(f"/runs/{run.name}/files/test.json") == "{}\n" and len(read) == 1
        connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=DEADLINE_S)
        with contextlib.closing(connection):
            for method, path in (("HEAD", f"/runs/{run.name}/events"), ("GET", "/")):
                connection.request(method, path)
                answer = connection.getresponse()
                assert answer.status == 200
                answer.read()
    finally:
        run.release()

"""Things with the name of a run's file that are not files: reported, never opened, and no request waits for them."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.run_index import read_index, read_summary
from harness.serve.files import NoFile, NotThere, open_beneath
from harness.serve.live import HistoryTail, snapshot
from harness.store import Store

from .conftest import Client, make_run

NAMES = ("results.json", "test.json", "history.jsonl", "report.html", "harness.log")


def make_device(path: Path) -> None:
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero: reading it never ends
    except OSError as error:
        pytest.skip(f"no device can be made here: {error.strerror}")


def make_socket(path: Path) -> None:
    directory = os.open(path.parent, os.O_PATH)  # the whole path may be too long for an address
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/fd/{directory}/{path.name}")
    os.close(directory)


KINDS: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "directory": os.mkdir,
    "dangling link": lambda path: path.symlink_to("gone"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "device": make_device,
    "socket": make_socket,
}


@pytest.fixture(params=KINDS)
def make_odd(request: pytest.FixtureRequest) -> Callable[[Path], None]:
    """A function that replaces a file by something that is not a regular file."""

    def replace(path: Path) -> None:
        path.unlink(missing_ok=True)
        KINDS[request.param](path)

    return replace


def test_no_page_blocks_on_something_that_is_no_regular_file(
    store: Store, serve: Callable[..., Client], make_odd: Callable[[Path], None]
) -> None:
    odd, whole = make_run(store), make_run(store, minutes=1)
    for name in NAMES:
        make_odd(odd.path / name)
    (odd.path / "running").touch()  # what makes it a run
    make_odd(store.root / ".runs.json")
    client = serve()
    page = client.page("/")
    assert whole.name in page and "results.json is not a regular file, so splitbrain did not write it" in page
    page = client.page(f"/runs/{odd.name}")
    assert '<span class="pill unknown">unknown</span>' in page and "results.json is not a regular file" in page
    for name in NAMES:
        for way in ("files", "download"):
            assert client.ask(f"/runs/{odd.name}/{way}/{name}")[0] == 404
    page = client.page(f"/compare?first={whole.name}&second={odd.name}")
    assert f"the history of {odd.name} cannot be read (it is not a regular file)" in page
    page = client.ask(f"/runs/{odd.name}/events")[2]
    assert '"damage": "it is not a regular file"' in page and "event: end" in page


def test_a_running_mark_that_is_no_regular_file_is_ignored(store: Store, make_odd: Callable[[Path], None]) -> None:
    run = make_run(store)
    make_odd(run.path / "running")
    run.results_path.unlink()
    assert [one.verdict for one in read_index(store).runs] == ["unfinished"]


def test_a_run_whose_results_are_no_regular_file_is_unknown(store: Store, make_odd: Callable[[Path], None]) -> None:
    run = make_run(store)
    make_odd(run.results_path)
    (one,) = read_index(store).runs
    assert (one.verdict, one.reason) == (
        "unknown",
        f"{run.results_path} is not a regular file, so splitbrain did not write it",
    )
    assert read_summary(store, run.name) == one


def test_only_regular_files_are_opened(tmp_path: Path, make_odd: Callable[[Path], None]) -> None:
    make_odd(tmp_path / "odd")
    with pytest.raises(NoFile, match="it is not a regular file"):
        open_beneath(tmp_path, ["odd"])
    with pytest.raises(NotThere) as caught:
        open_beneath(tmp_path, ["odd", "inner"])
    assert not isinstance(caught.value, NoFile)


def test_a_history_that_becomes_unreadable_ends_its_view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "history.jsonl").touch()
    tail = HistoryTail(tmp_path, ["history.jsonl"])

    def read(fd: int, size: int) -> bytes:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "read", read)
        assert not tail.read_on()
    assert snapshot(tail, is_real_time=True)["damage"] == "Input/output error"
    tail.close()

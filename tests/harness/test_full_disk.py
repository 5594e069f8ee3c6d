"""A disk that is full when a command writes its output: existing files stay, and no partial ones are left."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from harness import cli
from harness.atomic_files import write_output
from harness.commands import shrink
from harness.errors import OperatorError
from harness.exploration.rehearsal import rehearse_test
from harness.gallery.page import write_pages
from harness.store import Store, StoreError
from harness.test import Test
from nemesis.schedule import Schedule

HISTORY = '{"process": 0, "type": "invoke", "f": "write", "value": 1}\n{"process": 0, "type": "ok", "f": "write"}\n'


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """Files can be created and removed but cannot hold a byte, as on a disk without a free block."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_output_replaces_the_old_file_only_when_complete(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    with full_disk(), pytest.raises(OSError, match=r"page\.html"):
        write_output(page, "new")
    assert list(tmp_path.iterdir()) == []
    write_output(page, "old")
    with full_disk(), pytest.raises(OSError, match=r"page\.html"):
        write_output(page, "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("page.html", "old")]


def test_output_follows_symlinks_and_is_written_into_pipes(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("page.html")
    write_output(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "page.html").read_text() == "text"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_output(tmp_path / "pipe", "text")
        assert os.read(reader, 10) == b"text"
    finally:
        os.close(reader)
    assert (tmp_path / "pipe").is_fifo()


def test_a_file_that_is_a_mount_point_is_written_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: object, target: object) -> None:
        raise OSError(16, "Device or resource busy")

    page = tmp_path / "page.html"
    page.write_text("old")
    monkeypatch.setattr(os, "replace", refuse)
    write_output(page, "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("page.html", "new")]


def test_new_leaves_no_empty_file_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with full_disk():
        assert cli.main(["new", "system", "mine"]) == 254
    assert list(tmp_path.iterdir()) == []


def test_check_keeps_the_old_page_on_a_full_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    history, page = tmp_path / "history.jsonl", tmp_path / "page.html"
    history.write_text(HISTORY)
    page.write_text("old")
    with full_disk():
        assert cli.main(["check", str(history), "--model", "register", "--html", str(page)]) == 254
    assert capsys.readouterr().err == f"{page}: File too large\n"
    assert page.read_text() == "old"


def test_shrink_keeps_the_old_schedule_on_a_full_disk(tmp_path: Path) -> None:
    (tmp_path / "schedule.json").write_text("old")
    test = Test(
        system="broker", cluster="sim", nodes=3, workload="register", nemesis=("partition",), nemesis_interval_s=5,
        time_limit_s=10, concurrency=3, rate=20, seed=1,
    )  # fmt: skip
    found = cast(Any, SimpleNamespace(schedule=Schedule(()), test=test))
    with full_disk(), pytest.raises(OperatorError, match=r"cannot write .*schedule\.json: File too large"):
        shrink._keep(found, tmp_path)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_old_gallery_pictures_are_removed_only_once_the_new_page_is_written(tmp_path: Path) -> None:
    old = "![The operations in conflict](gallery/gone.svg)\n"
    write_pages(str(tmp_path), {"gallery.md": old, "gallery/gone.svg": old})
    with full_disk(), pytest.raises(OperatorError, match=r"cannot write .*gallery\.md"):
        write_pages(str(tmp_path), {"gallery.md": "new"})
    assert (tmp_path / "gallery.md").read_text() == (tmp_path / "gallery/gone.svg").read_text() == old
    write_pages(str(tmp_path), {"gallery.md": "new"})
    assert not (tmp_path / "gallery/gone.svg").exists()


def test_a_run_that_cannot_be_created_leaves_no_broken_run(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with full_disk(), pytest.raises(StoreError):
        store.create("broker")
    assert store.runs() == []
    assert not list((tmp_path / "broker").iterdir())


def test_simulated_runs_on_a_full_disk_are_reported_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    test = Test(
        system="broker", cluster="sim", nodes=3, workload="register", nemesis=(), nemesis_interval_s=5,
        time_limit_s=4, concurrency=3, rate=20, seed=1,
    )  # fmt: skip
    with full_disk(), pytest.raises(OperatorError, match=r"needs some room in .*: File too large; .* TMPDIR"):
        rehearse_test(test, Schedule(()))
    with full_disk():
        assert cli.main(["audit", "--nodes", "3", "--nemesis", "kill", "--time-limit", "4", "--seeds", "1"]) == 254
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("harness: seed 0: a simulated run needs some room in") and "TMPDIR" in line

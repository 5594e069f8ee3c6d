"""Control groups: where they can be made, what limits them, and their removal, on made-up hierarchies."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.clusters import control_groups
from harness.clusters.control_groups import cgroup_parents, limiting_controllers, remove_group

Hierarchies = Callable[..., None]


@pytest.fixture
def hierarchies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hierarchies:
    """Sets what /proc/self shows: its groups, and a mount `device root directory kind options` for each hierarchy; the
    directories are below `tmp_path`."""

    def show(own: list[str], mounts: list[str]) -> None:
        (tmp_path / "cgroup").write_text("".join(f"{line}\n" for line in own))
        with open(tmp_path / "mountinfo", "w", encoding="utf-8") as file:
            for line in mounts:
                device, root, directory, kind, options = line.split()
                (tmp_path / directory).mkdir(parents=True, exist_ok=True)
                file.write(f"1 2 {device} {root} {tmp_path / directory} rw - {kind} x {options}\n")

        def read(path: str, *given: Any, **more: Any) -> Any:
            return open(path.replace("/proc/self", str(tmp_path)), *given, **more)

        monkeypatch.setattr(control_groups, "open", read, raising=False)

    return show


def test_groups_are_made_in_the_own_group_of_every_hierarchy(tmp_path: Path, hierarchies: Hierarchies) -> None:
    (tmp_path / "cpu" / "a" / "b").mkdir(parents=True)
    hierarchies(
        ["4:cpu,cpuacct:/a/b", "3:pids:/", "2:name=systemd:/", "0::/c"],
        [
            "0:1 / cpu cgroup cpu,cpuacct", "0:1 / again cgroup cpu,cpuacct", "0:2 / pids cgroup pids",
            "0:3 / systemd cgroup name=systemd", "0:4 /c unified cgroup2 rw", "0:5 / elsewhere tmpfs pids",
        ],
    )  # fmt: skip
    assert cgroup_parents() == [f"{tmp_path}/cpu/a/b", f"{tmp_path}/pids", f"{tmp_path}/unified"]


def test_a_hierarchy_that_shows_another_part_than_the_own_group_is_not_used(
    tmp_path: Path, hierarchies: Hierarchies
) -> None:
    (tmp_path / "a").mkdir()  # where the own group would be, seen from the mounted part
    hierarchies(["3:pids:/a"], ["0:2 /b pids cgroup pids"])
    assert cgroup_parents() == []


def test_a_hierarchy_without_write_access_is_not_used(
    tmp_path: Path, hierarchies: Hierarchies, monkeypatch: pytest.MonkeyPatch
) -> None:
    hierarchies(["3:pids:/", "2:cpu:/"], ["0:2 / pids cgroup pids", "0:3 / cpu cgroup cpu"])
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.W_OK and path.endswith("/cpu"))
    assert cgroup_parents() == [f"{tmp_path}/cpu"] and limiting_controllers() == {"cpu"}


def test_only_controllers_that_are_delegated_to_the_groups_can_limit_them(
    tmp_path: Path, hierarchies: Hierarchies
) -> None:
    hierarchies(["0::/"], ["0:4 / unified cgroup2 rw"])
    assert limiting_controllers() == frozenset()
    (tmp_path / "unified" / "cgroup.controllers").write_text("cpu memory pids\n")
    (tmp_path / "unified" / "cgroup.subtree_control").write_text("memory pids\n")
    assert limiting_controllers() == {"memory", "pids"}


def removals(monkeypatch: pytest.MonkeyPatch, *codes: int) -> list[str]:
    """What was removed; each attempt ends with the next errno, 0 for success."""
    left, removed = list(codes), list[str]()

    def remove(path: str) -> None:
        if code := left.pop(0):
            raise OSError(code, os.strerror(code))
        removed.append(path)

    monkeypatch.setattr(os, "rmdir", remove)
    monkeypatch.setattr(control_groups, "_POLL_S", 0.0)
    return removed


def test_a_group_is_removed_once_its_last_process_was_reaped(monkeypatch: pytest.MonkeyPatch) -> None:
    removed = removals(monkeypatch, errno.EBUSY, errno.EBUSY, 0)
    remove_group("/group", timeout_s=60.0)
    assert removed == ["/group"]


def test_a_group_that_stays_in_use_is_an_error_and_a_missing_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    removals(monkeypatch, errno.ENOENT, errno.EBUSY, errno.EBUSY)
    remove_group("/group", timeout_s=60.0)
    with pytest.raises(OSError, match="busy"):
        remove_group("/group", timeout_s=-1.0)

"""What limits the memory of a check without --memory: control groups, the address space, and what is free there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from checker.free_memory import free_bytes, free_in_control_groups
from checker.linearizability.budget import Budget

MIB = 1 << 20
CHECK = "import sys; from checker.cli import main; sys.exit(main(sys.argv[1:]))"


def group(directory: Path, files: dict[str, str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(f"{text}\n")


def free_in(tmp_path: Path, own: str) -> int | None:
    (tmp_path / "own").write_text(own)
    return free_in_control_groups(own=str(tmp_path / "own"), mounted=str(tmp_path))


@pytest.mark.parametrize("root", [".", "unified"])
def test_free_memory_is_that_of_the_tightest_control_group_with_its_page_cache(tmp_path: Path, root: str) -> None:
    outer = {"memory.max": f"{300 * MIB}", "memory.current": f"{250 * MIB}"}
    group(tmp_path / root / "a", {**outer, "memory.stat": f"anon 7\ninactive_file {20 * MIB}\nactive_file {5 * MIB}"})
    group(tmp_path / root / "a/b", {"memory.max": "max", "memory.current": "9", "memory.stat": ""})
    assert free_in(tmp_path, "0::/a/b\n") == 75 * MIB


@pytest.mark.parametrize("path", ["/docker/0123", "/", "/../.."])
def test_the_limit_at_the_root_applies_in_a_container_that_does_not_see_its_group(tmp_path: Path, path: str) -> None:
    of_the_container = {"memory.limit_in_bytes": f"{64 * MIB}", "memory.usage_in_bytes": f"{70 * MIB}"}
    group(tmp_path / "memory", {**of_the_container, "memory.stat": f"total_inactive_file {10 * MIB}\ninactive_file 9"})
    assert free_in(tmp_path, f"9:name=systemd:/\n8:cpu,cpuacct:/x\n4:memory:{path}\n") == 4 * MIB


def test_control_groups_without_a_limit_give_no_bound(tmp_path: Path) -> None:
    assert free_in(tmp_path, "0::/a\n3:cpuset:/\n") is None
    assert free_in(tmp_path, "") is None
    found = free_bytes()
    assert found is not None and found > 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of the address space are Linux's")
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ([], "without --memory, the limit is half of the free memory"),
        (["--memory", "9999"], "could not allocate more memory"),
    ],
)
def test_a_history_beyond_the_address_space_is_undecided(tmp_path: Path, options: list[str], reason: str) -> None:
    path = tmp_path / "large.jsonl"
    with path.open("w") as file:
        for number in range(100_000):
            for kind in ("invoke", "ok"):
                event = {"process": 0, "type": kind, "f": "write", "value": f"{number:0100}"}
                file.write(json.dumps(event) + "\n")
    words = [sys.executable, "-c", CHECK, str(path), "--model", "register", *options]
    script = 'ulimit -v 60000; exec "$@"'
    done = subprocess.run(["sh", "-c", script, "sh", *words], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (2, "")
    assert done.stdout.startswith(f"{path}: unknown: undecided: ")
    assert reason in done.stdout


def test_a_check_below_32_mib_does_not_ask_how_much_memory_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = Budget()
    monkeypatch.setattr("checker.linearizability.budget.free_bytes", lambda: 40 << 20)
    for gained, reason in (
        ((32 << 20) - 1, None), (32 << 20, "the memory limit of 20 MiB was reached"), (0, None),
    ):  # fmt: skip
        monkeypatch.setattr("checker.linearizability.budget.resident_bytes", lambda gained=gained: (1 << 30) + gained)
        budget._base_bytes = 1 << 30
        assert budget.exhausted() == reason
    monkeypatch.setattr("checker.linearizability.budget.free_bytes", lambda: 1 / 0)
    assert Budget().exhausted() is None

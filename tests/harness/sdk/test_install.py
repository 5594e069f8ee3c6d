"""Install recipes: fetched once, programs found by name, and errors of registries in one line."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness.errors import OperatorError
from harness.sdk import install
from harness.sdk.install import Recipe, cache_directory, fetched, find_file, go, is_fetched, path, pip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("SPLITBRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@dataclass(frozen=True)
class Counted(Recipe):
    """Creates a file, and counts its calls; with `fails` it fails halfway."""

    calls: tuple[list[int], ...] = ()
    fails: bool = False
    kind = "counted"

    def fetch(self, directory: str) -> None:
        self.calls[0].append(1)
        Path(directory, "half").touch()
        if self.fails:
            raise OperatorError("the line is down")
        Path(directory, "whole").touch()


def test_the_cache_directory_follows_the_environment(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert cache_directory() == str(cache)
    monkeypatch.delenv("SPLITBRAIN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == str(tmp_path / "xdg" / "splitbrain" / "packages")


def test_a_recipe_is_fetched_once_by_concurrent_callers() -> None:
    recipe = Counted(("thing",), ([],))
    threads = [threading.Thread(target=fetched, args=(recipe,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(recipe.calls[0]) == 1
    assert sorted(os.listdir(fetched(recipe))) == [".complete", "half", "whole"]


def test_a_failed_fetch_is_not_taken_for_a_complete_one(cache: Path) -> None:
    recipe = Counted(("thing",), ([],), fails=True)
    with pytest.raises(OperatorError, match="the line is down"):
        fetched(recipe)
    assert not is_fetched(recipe)
    assert [entry for entry in os.listdir(cache) if not entry.endswith(".lock")] == []


def test_a_fetch_removes_what_a_killed_fetch_of_its_recipe_left(cache: Path) -> None:
    recipe, other = Counted(("thing",), ([],)), Counted(("other",), ([],))
    for unfinished in (recipe, other):
        (cache / f".fetching-{unfinished.key}-x1").mkdir(parents=True)
    fetched(recipe)
    left = {entry for entry in os.listdir(cache) if not entry.endswith(".lock")}
    assert left == {recipe.key, f".fetching-{other.key}-x1"}


def test_a_local_file_is_copied_again_when_it_has_changed(tmp_path: Path) -> None:
    source = tmp_path / "server.py"
    source.write_text("one")
    first = fetched(path(str(source)))
    source.write_text("two!")
    second = fetched(path(str(source)))
    assert (Path(first, "server.py").read_text(), Path(second, "server.py").read_text()) == ("one", "two!")


def test_unused_copies_of_a_local_file_are_removed(tmp_path: Path) -> None:
    source = tmp_path / "server.py"
    source.write_text("one")
    first = fetched(path(str(source)))
    os.utime(Path(first, ".complete"), (0, 0))
    source.write_text("two!")
    fetched(path(str(source)))
    assert not os.path.exists(first)


def test_relative_paths_start_at_the_plug_in(tmp_path: Path) -> None:
    names: dict[str, Recipe] = {}
    exec(compile("recipe = path('server.py')", str(tmp_path / "mine.py"), "exec"), {"path": path}, names)
    assert names["recipe"].what == (str(tmp_path / "server.py"),)


def test_a_missing_local_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match=r"install path .*missing.py: No such file or directory: .*missing.py"):
        fetched(path(str(tmp_path / "missing.py")))


def test_a_native_program_is_preferred_to_the_script_that_starts_it(tmp_path: Path) -> None:
    contents = {"bin/kv": b"#!/usr/bin/python3\n", "kv/native/kv": b"\x7fELF and so on", "doc/kv": b"text"}
    for name, content in contents.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True)
        file.write_bytes(content)
        if not name.startswith("doc"):
            file.chmod(0o755)
    assert find_file(str(tmp_path), "kv", [str(tmp_path / "bin")]) == str(tmp_path / "kv/native/kv")
    assert find_file(str(tmp_path), "doc/kv", []) == str(tmp_path / "doc/kv")
    assert find_file(str(tmp_path), "nothing", []) is None
    (tmp_path / "kv/native/kv").unlink()
    assert find_file(str(tmp_path), "kv", [str(tmp_path / "bin")]) == str(tmp_path / "bin/kv")


def test_a_refusal_of_a_registry_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "WARNING: slow\nERROR: No matching distribution found for nothing==9\nnotice: a new release\n"

    def refuse(argv: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        assert argv[:3] == [sys.executable, "-m", "pip"] and argv[-1] == "nothing==9"
        return subprocess.CompletedProcess(argv, 1, "", said)

    monkeypatch.setattr(install.subprocess, "run", refuse)
    with pytest.raises(OperatorError) as caught:
        fetched(pip("nothing==9"))
    name = os.path.basename(sys.executable)
    wrong = "ERROR: No matching distribution found for nothing==9"
    assert str(caught.value) == f"install pip nothing==9: {name} failed: {wrong}"


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        (
            "ERROR: Exception:\nTraceback (most recent call last):\nOSError: [Errno 28] No space left on device\n",
            r"no space left in .* SPLITBRAIN_CACHE and TMPDIR",
        ),
        ("ERROR: Exception:\nTraceback:\nValueError: a mistake of pip's\n", "failed: ValueError: a mistake of pip's"),
    ],
)
def test_a_crash_of_a_registry_client_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, said: str, wrong: str
) -> None:
    def fail(argv: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(argv, 2, "", said)

    monkeypatch.setattr(install.subprocess, "run", fail)
    with pytest.raises(OperatorError, match=wrong) as caught:
        fetched(pip("nothing==9"))
    assert "\n" not in str(caught.value)


def test_a_refusal_of_the_go_proxy_names_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    where = "go: example.org/kv@v1: reading http://proxy/example.org/kv/@v/v1.info: 403 Forbidden"

    def refuse(argv: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        said = f"go: downloading example.org/other v2\n{where}\n\tserver response: not available.\n"
        return subprocess.CompletedProcess(argv, 1, "", said)

    monkeypatch.setattr(install, "find_program", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(install.subprocess, "run", refuse)
    with pytest.raises(OperatorError) as caught:
        fetched(go("example.org/kv@v1"))
    assert str(caught.value) == f"install go example.org/kv@v1: go failed: {where} server response: not available."


def test_a_program_that_needs_cgo_is_built_with_it_or_the_missing_compiler_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built: list[str | None] = []
    limits_s = set[float]()

    def run(argv: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if argv[1:] == ["env", "CC"]:
            return subprocess.CompletedProcess(argv, 0, "some-cc -m64\n", "")
        built.append(options["env"].get("CGO_ENABLED"))
        limits_s.add(options["timeout"])
        return subprocess.CompletedProcess(argv, 0, "", "")

    monkeypatch.delenv("CGO_ENABLED", raising=False)
    monkeypatch.setattr(install.subprocess, "run", run)
    monkeypatch.setattr(install, "find_program", lambda name: "/usr/bin/go" if name == "go" else None)
    plain, native = go("example.org/kv@v1"), go("example.org/kv@v1", cgo=True)
    fetched(plain)
    with pytest.raises(OperatorError, match="it needs cgo, and so a C compiler: some-cc is not installed"):
        fetched(native)
    monkeypatch.setattr(install, "find_program", lambda name: f"/usr/bin/{name}")
    fetched(native)  # not the plain one from the cache
    assert built == ["0", "1"]  # the same program on a machine without a compiler
    assert limits_s == {install.BUILD_TIMEOUT_S} and "building" in plain.effort


def test_a_program_whose_go_mod_replaces_modules_is_built_as_a_dependency_or_the_message_says_how(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[str, ...]] = []
    directories = set[str | None]()

    def run(argv: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if argv[1] == "install":
            said = "The go.mod file for the module providing named packages contains one or more replace directives."
            return subprocess.CompletedProcess(argv, 1, "", f"go: {argv[2]} (in {argv[2]}): {said}")
        calls.append(tuple(argv[1:3]) if argv[1] != "build" else ("build", argv[-1]))
        directories.add(options["cwd"])
        return subprocess.CompletedProcess(argv, 0, "", "")

    monkeypatch.setattr(install.subprocess, "run", run)
    monkeypatch.setattr(install, "find_program", lambda name: f"/usr/bin/{name}")
    with pytest.raises(OperatorError, match=r"has replace directives: go\(\.\.\., ignore_replace=True\)"):
        fetched(go("example.org/kv/cmd@v1"))
    assert calls == []
    fetched(go("example.org/kv/cmd@v1", ignore_replace=True))
    assert calls == [("mod", "init"), ("get", "example.org/kv/cmd@v1"), ("build", "example.org/kv/cmd")]
    assert len(directories) == 1 and None not in directories  # a module of its own, whose replacements are none


def test_a_full_disk_is_reported_with_where_to_free_space(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(recipe: Recipe, directory: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", directory)

    monkeypatch.setenv("SPLITBRAIN_CACHE", str(tmp_path))
    monkeypatch.setattr(type(pip("nothing==9")), "fetch", full)
    with pytest.raises(OperatorError, match=f"no space left in {tmp_path} or .*: free some"):
        fetched(pip("nothing==9"))


def test_a_missing_registry_client_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "find_program", lambda name: None)
    with pytest.raises(OperatorError, match="install npm left-pad: npm is not installed on this machine"):
        fetched(install.npm("left-pad"))

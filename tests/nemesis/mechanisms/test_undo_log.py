"""Power cuts undo exactly what a program had not synced, by the model of each file system."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemesis.mechanisms.launcher.filter import SYSCALLS
from nemesis.mechanisms.launcher_archive import launcher_archive, launcher_command, why_no_traps
from nemesis.mechanisms.shim import CONTROL_BYTES, HostFaults, build_shim, parse_counters, shim_environment, why_no_shim
from nemesis.mechanisms.undo_log import take_back_script

COMPILER = shutil.which("cc") or shutil.which("gcc")
REASONS = {"shim": why_no_shim(), "launcher": why_no_traps()}
every_keeper = pytest.mark.parametrize(
    "keeper",
    [pytest.param(name, marks=pytest.mark.skipif(why is not None, reason=str(why))) for name, why in REASONS.items()],
)
"""What keeps the log: the preloaded library, or the supervisor of reported system calls."""

every_deterministic_model = pytest.mark.parametrize("power_model", ["ext4", "posix"])
"""The models without randomness."""

PROGRAM = """
import ctypes, json, mmap, os, sys
root, steps = sys.argv[1], json.loads(sys.argv[2])
def at(name):
    return os.path.join(root, name)
for step in steps:
    kind, name, *rest = step
    if kind == "create":
        os.close(os.open(at(name), os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    elif kind == "write":
        fd = os.open(at(name), os.O_WRONLY)
        os.pwrite(fd, rest[1].encode(), rest[0])
        os.close(fd)
    elif kind == "write-through":
        offset, text, how = rest
        fd = os.open(at(name), os.O_WRONLY | (0 if how.startswith("RWF") else getattr(os, how)))
        if how.startswith("RWF"):
            os.pwritev(fd, [text.encode()], offset, getattr(os, how))
        else:
            os.pwrite(fd, text.encode(), offset)
        os.close(fd)
    elif kind == "append":
        fd = os.open(at(name), os.O_WRONLY | os.O_APPEND)
        os.write(fd, rest[0].encode())
        os.close(fd)
    elif kind == "truncate":
        fd = os.open(at(name), os.O_RDWR)
        os.ftruncate(fd, rest[0])
        os.close(fd)
    elif kind == "truncate-path":
        os.truncate(at(name), rest[0])
    elif kind == "copy":
        source, fd = os.open(at(name), os.O_RDONLY), os.open(at(rest[0]), os.O_WRONLY)
        os.copy_file_range(source, fd, 100, 0, rest[1])
        os.close(source)
        os.close(fd)
    elif kind == "link":
        os.link(at(name), at(rest[0]))
    elif kind == "empty":
        os.close(os.open(at(name), os.O_WRONLY | os.O_TRUNC))
    elif kind == "sync":
        fd = os.open(at(name), os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    elif kind == "map-sync":
        fd = os.open(at(name), os.O_RDWR)
        if os.fstat(fd).st_size:
            mmap.mmap(fd, 0).flush()
        else:
            os.fsync(fd)
        os.close(fd)
    elif kind == "rename":
        os.replace(at(name), at(rest[0]))
    elif kind == "unlink":
        os.unlink(at(name))
    elif kind == "sync-names":
        fd = os.open(root, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    elif kind == "sync-all":
        fd = os.open(root, os.O_RDONLY)
        if ctypes.CDLL(None).syncfs(fd):
            raise OSError("syncfs")
        os.close(fd)
    elif kind == "sync-everything":
        os.sync()
os.kill(os.getpid(), 9)
"""


class ModelFile:
    def __init__(self, content: bytes = b"") -> None:
        self.content = content
        self.durable = content
        self.journaled = 0
        """The entry of the journal that a sync of the file brings to disk."""
        self.named = 0
        """The entry that a synchronous write which does not lengthen the file brings to disk."""
        self.cuts: list[int] = []
        """Lengths set by truncations that are not durable yet."""


def patched(content: bytes, offset: int, data: bytes) -> bytes:
    padded = content.ljust(offset if data else 0, b"\0")
    return padded[:offset] + data + padded[offset + len(data) :]


class ModelDisk:
    """One directory on a disk that loses everything that was not synced: contents with the file; names with the
    directory (posix), or also as a journal has them on disk when a file is synced (ext4). A synchronous write makes its
    own bytes durable, and with a journal also the file's truncations and name."""

    def __init__(self, files: dict[str, bytes], model: str) -> None:
        self.names = {name: ModelFile(content) for name, content in files.items()}
        self.durable_names = dict(self.names)
        self.has_journal = model != "posix"
        self.journal = [dict(self.names)]
        """The directory after every change of a name, the first entry before any."""

    def changed_names(self, file: ModelFile | None) -> None:
        self.journal.append(dict(self.names))
        if file is not None:
            file.journaled = file.named = len(self.journal) - 1

    def bring_journal(self, reached: int) -> None:
        """Bring the journal to disk up to an entry."""
        if not self.has_journal or not reached:
            return
        self.durable_names = self.journal[reached]
        del self.journal[:reached]
        for file in self.names.values():
            file.journaled, file.named = max(0, file.journaled - reached), max(0, file.named - reached)

    def write_through(self, file: ModelFile, offset: int, data: bytes) -> None:
        if self.has_journal:
            for length in file.cuts:
                file.durable = file.durable[:length].ljust(length, b"\0")
            file.cuts = []
        grows = offset + len(data) > len(file.content)
        file.content, file.durable = patched(file.content, offset, data), patched(file.durable, offset, data)
        self.bring_journal(len(self.journal) - 1 if grows else file.named)

    def do(self, kind: str, name: str, *rest: Any) -> None:
        if kind == "create":
            self.names[name] = ModelFile()
            self.changed_names(self.names[name])
        elif kind == "rename":
            self.names[rest[0]] = self.names.pop(name)
            self.changed_names(self.names[rest[0]])
        elif kind == "link":
            self.names[rest[0]] = self.names[name]
            self.changed_names(self.names[name])
        elif kind == "copy":
            self.do("write", rest[0], rest[1], self.names[name].content.decode())
        elif kind == "unlink":
            self.names.pop(name)
            self.changed_names(None)
        elif kind in ("sync-names", "sync-all", "sync-everything"):
            self.durable_names = dict(self.names)
            self.journal = [dict(self.names)]
            for file in self.names.values():
                file.journaled = file.named = 0
                if kind != "sync-names":
                    file.durable, file.cuts = file.content, []
        elif kind == "write-through":
            self.write_through(self.names[name], rest[0], rest[1].encode())
        else:
            before = len(self.names[name].content)
            file = self.names[name]
            if kind == "write":
                file.content = patched(file.content, rest[0], rest[1].encode())
            elif kind == "append":
                file.content += rest[0].encode()
            elif kind in ("truncate", "truncate-path"):
                file.content = file.content[: rest[0]].ljust(rest[0], b"\0")
            elif kind == "empty":
                file.content = b""
            elif kind in ("sync", "map-sync"):
                file.durable, file.cuts = file.content, []
                self.bring_journal(file.journaled)
            if kind in ("truncate", "truncate-path", "empty"):
                file.cuts.append(len(file.content))
                file.journaled = file.named = len(self.journal) - 1
            elif len(file.content) > before:
                file.journaled = len(self.journal) - 1

    def after_power_cut(self) -> dict[str, bytes]:
        return {name: file.durable for name, file in self.durable_names.items()}

    def as_it_is(self) -> dict[str, bytes]:
        return {name: file.content for name, file in self.names.items()}


NAMES = ["a", "b", "c"]
SYNCHRONOUS = ["O_DSYNC", "O_SYNC", "RWF_DSYNC", "RWF_SYNC"]
"""What makes a write one that is durable when it returns, for open or for pwritev2."""
data = st.text("xyz", min_size=1, max_size=8)


@st.composite
def programs(draw: Any) -> list[list[Any]]:
    """Steps that succeed, over files a and b that are there and durable at first."""
    present = {"a", "b"}
    steps: list[list[Any]] = []
    for _ in range(draw(st.integers(1, 14))):
        free = sorted(set(NAMES) - present)
        kinds = ["sync-names", "sync-all"]
        if present:
            kinds += ["write", "append", "truncate", "truncate-path", "empty", "sync", "map-sync", "rename", "unlink"]
            kinds += ["write-through", "write-through"]
        if len(present) > 1:
            kinds.append("copy")
        if free:
            kinds.append("create")
        kind = draw(st.sampled_from(kinds))
        if kind in ("sync-names", "sync-all"):
            steps.append([kind, ""])
            continue
        name = draw(st.sampled_from(free if kind == "create" else sorted(present)))
        step = [kind, name]
        if kind == "write":
            step += [draw(st.integers(0, 12)), draw(data)]
        elif kind == "write-through":
            step += [draw(st.integers(0, 12)), draw(data), draw(st.sampled_from(SYNCHRONOUS))]
        elif kind == "append":
            step.append(draw(data))
        elif kind in ("truncate", "truncate-path"):
            step.append(draw(st.integers(0, 12)))
        elif kind == "copy":
            step += [draw(st.sampled_from(sorted(present - {name}))), draw(st.integers(0, 12))]
        elif kind == "rename":
            step.append(draw(st.sampled_from([other for other in NAMES if other != name])))
            present = (present - {name}) | {step[2]}
        elif kind == "unlink":
            present.discard(name)
        elif kind == "create":
            present.add(name)
        steps.append(step)
    return steps


class Host:
    """A data directory; `keeper` logs the unsynced changes of its programs."""

    def __init__(self, directory: str, files: dict[str, bytes], keeper: str) -> None:
        self.data, self.undo = os.path.join(directory, "data"), os.path.join(directory, "undo")
        os.mkdir(self.data)
        os.mkdir(self.undo)
        for name, content in files.items():
            Path(self.data, name).write_bytes(content)
        self.control = os.path.join(directory, "control")
        Path(self.control).write_bytes(HostFaults().pack().ljust(CONTROL_BYTES, b"\0"))
        self.keeper, self.tool = keeper, os.path.join(directory, "tool")
        Path(self.tool).write_bytes(build_shim() if keeper == "shim" else launcher_archive())

    def start(self, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a Python program under the keeper to its end."""
        return self.start_program([sys.executable, "-I", "-S", "-c", script, *arguments])

    def start_program(self, argv: list[str]) -> subprocess.CompletedProcess[str]:
        """Run a program under the keeper to its end."""
        environment = dict(os.environ)
        if self.keeper == "shim":
            environment |= shim_environment(self.tool, self.control, self.data, undo_path=self.undo)
        else:
            argv = launcher_command(
                sys.executable, self.tool, self.control, argv,
                root=self.data, traps=["sync", "write"], undo_path=self.undo,
            )  # fmt: skip
        return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60)

    def run(self, steps: list[list[Any]]) -> None:
        done = self.start(PROGRAM, self.data, json.dumps(steps))
        assert done.returncode == -9, done.stderr

    def cut(self, model: str, seed: int = 0, mapped: Sequence[str] = ()) -> dict[str, Any]:
        """Cut the power; returns the script's JSON. `mapped` are the names of files."""
        argv = [sys.executable, "-I", "-S", "-", self.undo, self.data, model, str(seed)]
        argv += [os.path.join(self.data, name) for name in mapped]
        done = subprocess.run(argv, input=take_back_script(), capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def take_back(self, model: str, seed: int = 0) -> tuple[int, int, int]:
        """Cut the power; returns the lost (operations, bytes, files)."""
        found = self.cut(model, seed)
        return found["operations"], found["bytes"], len(found["files"])

    def voids(self) -> int:
        """How often the account was given up."""
        return parse_counters(Path(self.control).read_bytes()).undo_overflow

    def files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in Path(self.data).iterdir()}


def check_void_or_taken_back(host: Host, files: dict[str, bytes]) -> None:
    """The shim's account is void; the launcher's is complete, and a power cut leaves these files."""
    assert host.voids() == (1 if host.keeper == "shim" else 0)
    if host.keeper != "shim":
        host.take_back("ext4")
        assert host.files() == files


def check_against_model(keeper: str, power_model: str, *lives: list[list[Any]]) -> None:
    """Every life is a process that is killed; after the last one the power is cut."""
    first = {"a": b"old a", "b": b"old b"}
    directory = tempfile.mkdtemp(prefix="undo-")
    try:
        host, model = Host(directory, first, keeper), ModelDisk(first, power_model)
        for steps in lives:
            host.run(steps)
            for step in steps:
                model.do(*step)
        assert host.files() == model.as_it_is(), f"the {keeper} changed what the program did"
        host.take_back(power_model)
        assert host.files() == model.after_power_cut()
        assert os.listdir(host.undo) == []
        assert host.take_back(power_model) == (0, 0, 0)
    finally:
        shutil.rmtree(directory)


@every_keeper
@every_deterministic_model
@settings(max_examples=12, deadline=None)
@given(programs())
def test_exactly_the_unsynced_changes_are_lost(keeper: str, power_model: str, steps: list[list[Any]]) -> None:
    check_against_model(keeper, power_model, steps)


@every_keeper
@every_deterministic_model
@settings(max_examples=5, deadline=None)
@given(programs(), st.integers(0, 14))
def test_unsynced_changes_of_a_killed_program_are_lost_after_the_next_one_too(
    keeper: str, power_model: str, steps: list[list[Any]], cut: int
) -> None:
    check_against_model(keeper, power_model, steps[:cut], steps[cut:])


@every_keeper
def test_replacing_a_file_without_syncing_it_loses_its_content(keeper: str) -> None:
    """The classic mistake: the new name is durable, the content is not."""
    steps = [["create", "c"], ["append", "c", "new"], ["rename", "c", "a"], ["sync-names", ""]]
    for power_model in ("ext4", "posix"):
        check_against_model(keeper, power_model, steps)


@every_keeper
@every_deterministic_model
def test_a_synced_new_file_is_restored_when_its_replacement_is_undone(keeper: str, power_model: str) -> None:
    steps = [["create", "c"], ["sync", "c"], ["rename", "b", "c"]]
    check_against_model(keeper, power_model, steps)


@every_keeper
@every_deterministic_model
@pytest.mark.parametrize("sync", ["sync-all", "sync-everything"])
def test_after_a_sync_of_everything_only_later_changes_are_lost(keeper: str, power_model: str, sync: str) -> None:
    before = [["create", "c"], ["append", "c", "kept"], ["append", "a", "kept"], ["unlink", "b"]]
    check_against_model(keeper, power_model, [*before, [sync, ""], ["append", "c", "lost"], ["rename", "a", "b"]])


@every_keeper
def test_a_sync_makes_the_name_of_a_new_file_durable_except_under_posix(keeper: str, tmp_path: Path) -> None:
    steps = [["create", "c"], ["append", "c", "kept"], ["sync", "c"]]
    for power_model, kept in (("ext4", {"c": b"kept"}), ("torn", {"c": b"kept"}), ("posix", {})):
        directory = tmp_path / power_model
        directory.mkdir()
        host = Host(str(directory), {}, keeper)
        host.run(steps)
        host.take_back(power_model)
        assert host.files() == kept


@every_keeper
@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 1500), st.integers(1, 3000))
def test_torn_data_is_old_or_new_sector_by_sector(keeper: str, seed: int, offset: int, length: int) -> None:
    directory = tempfile.mkdtemp(prefix="undo-")
    try:
        old, new = b"o" * 1000, b"n" * length
        host = Host(directory, {"a": old}, keeper)
        host.run([["write", "a", offset, new.decode()]])
        host.take_back("torn", seed)
        content = host.files()["a"]
        full = old.ljust(offset, b"\0")[:offset] + new + old[offset + length :]
        was = old.ljust(len(full), b"\0")
        assert len(old) <= len(content) <= len(full)
        for at in range(0, len(content), 512):
            sector = content[at : at + 512]
            assert sector in (full[at : at + len(sector)], was[at : at + len(sector)])
    finally:
        shutil.rmtree(directory)


@every_keeper
def test_torn_data_can_keep_any_subset_of_its_sectors(keeper: str, tmp_path: Path) -> None:
    """Of two unsynced sectors either, both or none survive, also the later one alone."""
    found = set()
    for seed in range(40):
        directory = tmp_path / str(seed)
        directory.mkdir()
        host = Host(str(directory), {"a": b"o" * 1024}, keeper)
        if seed == 0:
            host.run([["write", "a", 0, "n" * 512], ["write", "a", 512, "n" * 512]])
            log = Path(host.undo, "log").read_bytes()
            inode = os.stat(os.path.join(host.data, "a")).st_ino
        else:  # the same log for another seed, with the inode replaced
            Path(host.data, "a").write_bytes(b"n" * 1024)
            own = os.stat(os.path.join(host.data, "a")).st_ino
            Path(host.undo, "log").write_bytes(
                log.replace(inode.to_bytes(8, sys.byteorder), own.to_bytes(8, sys.byteorder))
            )
        host.take_back("torn", seed)
        found.add(host.files()["a"][::512])
    assert found == {b"oo", b"on", b"no", b"nn"}


@every_keeper
@every_deterministic_model
@pytest.mark.parametrize("is_synced", [False, True])
def test_a_hard_link_does_not_make_its_file_a_new_one(keeper: str, power_model: str, is_synced: bool) -> None:
    """Changes made before the link was created are changes of the same file."""
    steps = [["append", "a", "lost"], ["link", "a", "c"], *([["sync", "a"]] if is_synced else [])]
    check_against_model(keeper, power_model, steps)


WRITTEN = {
    "sendfile": "os.sendfile(b, a, 2, 3)",
    "splice": "os.write(into, b'xyz'); os.splice(out, b, 3, offset_dst=1)",
    "splice where it stands": "os.write(into, b'xyz'); os.lseek(b, 2, 0); os.splice(out, b, 3)",
    "pwritev2": "os.pwritev(b, [b'x', b'yz'], 1, os.RWF_HIPRI)",
    "pwritev2 where it stands": "os.lseek(b, 3, 0); os.pwritev(b, [b'xyz'], -1, os.RWF_HIPRI)",
    "pwritev2 at the end": "os.pwritev(b, [b'xyz'], 0, os.RWF_APPEND)",
    "fallocate": "os.posix_fallocate(b, 0, 100)",
    "symlink": "os.symlink('a', os.path.join(sys.argv[1], 'c'))",
    "renameat2": "rename(b'a', b'c', 0)",
    "renameat2 of two": "rename(b'a', b'b', 2)",
}
"""Ways to change file b, which is open as `b`, or names in its directory."""


@every_keeper
@pytest.mark.parametrize("how", WRITTEN)
def test_unsynced_changes_by_rare_calls_are_lost(keeper: str, how: str, tmp_path: Path) -> None:
    first = {"a": b"old a", "b": b"old b"}
    host = Host(str(tmp_path), first, keeper)
    script = (
        "import ctypes, os, sys\n"
        "a, b = (os.open(os.path.join(sys.argv[1], name), os.O_RDWR) for name in 'ab')\n"
        "out, into = os.pipe()\n"
        "def rename(one, other, flags):\n"
        "    root = os.fsencode(sys.argv[1]) + b'/'\n"
        "    assert ctypes.CDLL(None).renameat2(-100, root + one, -100, root + other, flags) == 0\n"
        f"{WRITTEN[how]}\n"
    )
    host.start(script, host.data).check_returncode()
    assert host.files() != first
    assert host.take_back("ext4")[0] >= 1
    assert host.files() == first


SHIFTED = {"taken out": 0x08, "put in": 0x20}
"""Modes of fallocate that remove or insert a block of a file, which moves everything behind it."""


@every_keeper
@every_deterministic_model
@pytest.mark.parametrize("how", SHIFTED)
@pytest.mark.parametrize("flag", ["O_RDWR", "O_DSYNC"])
def test_inserting_or_removing_a_block_of_a_file_is_undone(
    keeper: str, power_model: str, how: str, flag: str, tmp_path: Path
) -> None:
    block = os.statvfs(tmp_path).f_bsize
    before = b"1" * block + b"2" * block + b"3" * block + b"the end"
    host = Host(str(tmp_path), {"a": before, "b": b"old b"}, keeper)
    script = (
        "import ctypes, os, sys\n"
        "a = os.open(os.path.join(sys.argv[1], 'a'), os.O_RDWR | os." + flag + ")\n"
        "b = os.open(os.path.join(sys.argv[1], 'b'), os.O_RDWR)\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        f"place = ctypes.c_long({block})\n"
        f"if libc.fallocate(a, {SHIFTED[how]}, place, place):\n"
        "    sys.exit(os.strerror(ctypes.get_errno()))\n"
        "os.pwrite(b, b'new', 0)\n"
        "os.fsync(b)\n"
    )
    done = host.start(script, host.data)
    if "not supported" in done.stderr:
        pytest.skip(done.stderr)
    done.check_returncode()
    assert host.files()["a"] != before
    host.take_back(power_model)
    assert host.files() == {"a": before, "b": b"new b"}


@every_keeper
@pytest.mark.parametrize("how", SYNCHRONOUS)
def test_a_synchronous_write_is_durable(keeper: str, how: str, tmp_path: Path) -> None:
    host = Host(str(tmp_path), {"a": b"old a", "b": b"old b"}, keeper)
    host.run([["write", "a", 0, "lost"], ["write-through", "b", 0, "kept", how]])
    host.take_back("ext4")
    assert host.files() == {"a": b"old a", "b": b"keptb"}


@every_keeper
def test_pwrite_to_a_descriptor_with_o_append_is_logged_at_the_end_of_the_file(keeper: str, tmp_path: Path) -> None:
    """As pwrite does on Linux (man 2 pwrite)."""
    host = Host(str(tmp_path), {"a": b"old a"}, keeper)
    script = (
        "import os, sys\n"
        "path = os.path.join(sys.argv[1], 'a')\n"
        "other, a = os.open(path, os.O_RDWR), os.open(path, os.O_WRONLY | os.O_APPEND | os.O_DSYNC)\n"
        "os.pwrite(other, b'lost', 0)\n"
        "os.pwrite(a, b' kept', 0)\n"
    )
    host.start(script, host.data).check_returncode()
    assert host.files() == {"a": b"losta kept"}
    host.take_back("ext4")
    assert host.files() == {"a": b"old a kept"}


@every_keeper
@pytest.mark.parametrize("how", SYNCHRONOUS)
def test_a_synchronous_write_makes_the_name_of_a_new_file_durable_except_under_posix(
    keeper: str, how: str, tmp_path: Path
) -> None:
    """As a sync of it would; a new file that was written without one is lost."""
    steps = [["create", "c"], ["write-through", "c", 0, "kept", how], ["create", "d"], ["append", "d", "lost"]]
    for power_model, kept in (("ext4", {"c": b"kept"}), ("torn", {"c": b"kept"}), ("posix", {})):
        directory = tmp_path / power_model
        directory.mkdir()
        host = Host(str(directory), {}, keeper)
        host.run(steps)
        host.take_back(power_model)
        assert host.files() == kept


AT = "import os, sys\ndef at(name):\n    return os.path.join(sys.argv[1], name)\n"
"""Begins a script whose files are named by at(name)."""

SYNCHRONOUSLY = {
    "write": "os.write(c, b'xyz')",
    "append": "os.write(os.open(at('c'), os.O_WRONLY | os.O_APPEND | os.O_DSYNC), b'xyz')",
    "writev": "os.writev(c, [b'x', b'yz'])",
    "pwritev": "os.pwritev(c, [b'x', b'yz'], 0)",
    "sendfile": "os.sendfile(c, a, 2, 3)",
    "splice": "os.write(into, b'xyz'); os.splice(out, c, 3)",
    "copy_file_range": "os.copy_file_range(a, c, 3, 2)",
    "fallocate": "os.posix_fallocate(c, 0, 3)",
}
"""Other ways to write 3 bytes to file c, which is open with O_DSYNC; file a has xyz from its byte 2 on."""


@every_keeper
@pytest.mark.parametrize("how", SYNCHRONOUSLY)
def test_every_synchronous_write_call_makes_the_name_of_a_new_file_durable(
    keeper: str, how: str, tmp_path: Path
) -> None:
    host = Host(str(tmp_path), {"a": b"..xyz"}, keeper)
    script = (
        AT + "a, c = os.open(at('a'), os.O_RDONLY), os.open(at('c'), os.O_CREAT | os.O_WRONLY | os.O_DSYNC)\n"
        "out, into = os.pipe()\n"
        f"{SYNCHRONOUSLY[how]}\n"
    )
    host.start(script, host.data).check_returncode()
    assert host.take_back("ext4") == (0, 0, 0)
    assert host.files() == {"a": b"..xyz", "c": b"\0\0\0" if how == "fallocate" else b"xyz"}


@every_keeper
def test_an_empty_synchronous_write_makes_no_name_durable(keeper: str, tmp_path: Path) -> None:
    host = Host(str(tmp_path), {}, keeper)
    script = (
        "import os, sys\n"
        "c = os.open(os.path.join(sys.argv[1], 'c'), os.O_CREAT | os.O_WRONLY | os.O_DSYNC)\n"
        "os.write(c, b'')\n"
    )
    host.start(script, host.data).check_returncode()
    host.take_back("ext4")
    assert host.files() == {}


@every_keeper
@every_deterministic_model
@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([["append", "a", "lost"], ["write-through", "a", 20, "kept", "O_DSYNC"]], id="beyond a growth"),
        pytest.param([["write", "a", 0, "lost"], ["write-through", "a", 1, "K", "O_DSYNC"]], id="within a write"),
        pytest.param(
            [["write", "a", 0, "y" * 500], *(["write-through", "a", at, "k", "O_DSYNC"] for at in range(0, 500, 3))],
            id="many within a write",
        ),
        pytest.param([["truncate", "a", 12], ["write-through", "a", 0, "kept", "O_DSYNC"]], id="after a longer length"),
        pytest.param([["truncate", "a", 2], ["write-through", "a", 9, "kept", "O_DSYNC"]], id="after a shorter length"),
        pytest.param([["write-through", "a", 0, "kept", "O_DSYNC"], ["write", "a", 1, "lost"]], id="before a write"),
        pytest.param(
            [["write", "a", 1, "x"], ["create", "c"], ["copy", "c", "a", 0], ["write-through", "a", 0, "k", "O_DSYNC"]],
            id="after a copy of nothing",
        ),
        pytest.param(
            [["append", "a", "lost"], ["create", "c"], ["write-through", "a", 0, "kept", "O_DSYNC"]], id="beside a name"
        ),
    ],
)
def test_a_synchronous_write_makes_no_other_writes_of_its_file_durable(
    keeper: str, power_model: str, steps: list[list[Any]]
) -> None:
    check_against_model(keeper, power_model, steps)


@every_keeper
@pytest.mark.parametrize(
    ("first", "begins"),
    [
        pytest.param("os.pwrite(c, b'lost', 2)", b"k\0\0k\0", id="unsynced"),
        pytest.param("os.pwrite(c, b'lost', 0); os.fsync(c)", b"kosk\0", id="synced"),
        pytest.param("", b"k\0\0k\0", id="nothing"),
    ],
)
def test_a_long_log_of_synchronous_writes_is_compacted_without_loss(
    keeper: str, first: str, begins: bytes, tmp_path: Path
) -> None:
    """File b makes the log long; what may be dropped depends on whether file c has other unsynced writes."""
    host = Host(str(tmp_path), {"b": b""}, keeper)
    script = (
        AT + "c = os.open(at('c'), os.O_CREAT | os.O_WRONLY)\n"
        f"{first}\n"
        "through = os.open(at('c'), os.O_WRONLY | os.O_DSYNC)\n"
        "b = os.open(at('b'), os.O_RDWR)\n"
        "os.pwrite(b, bytes(1 << 20), 0)\n"
        "for number in range(40):\n"
        "    os.pwrite(through, b'k', 3 * number)\n"
        "    os.pwrite(b, bytes([number]) * (1 << 20), 0)\n"
        "    os.fsync(b)\n"
    )
    host.start(script, host.data).check_returncode()
    assert Path(host.undo, "log").stat().st_size < 20 << 20
    assert host.voids() == 0
    host.take_back("ext4")
    assert host.files()["c"] == begins + b"\0k\0" * 37 + b"\0k"


@every_keeper
def test_lost_operations_bytes_and_files_are_counted(keeper: str, tmp_path: Path) -> None:
    host = Host(str(tmp_path), {"a": b"12345"}, keeper)
    host.run([["append", "a", "durable"], ["sync", "a"], ["append", "a", "lost"], ["write", "a", 0, "xx"]])
    assert host.take_back("ext4") == (2, 6, 1)
    assert host.files() == {"a": b"12345durable"}


@every_keeper
@pytest.mark.parametrize(
    ("steps", "power_model", "lost"),
    [
        pytest.param([["create", "c"], ["append", "c", "12345"]], "ext4", (2, 5, 1), id="a new file"),
        pytest.param([["append", "a", "12345"], ["rename", "a", "b"]], "ext4", (2, 5, 1), id="renamed"),
        pytest.param([["append", "a", "12345"], ["unlink", "a"]], "ext4", (2, 5, 1), id="removed"),
        pytest.param([["append", "a", "12345"], ["link", "a", "c"]], "ext4", (2, 5, 1), id="one more name"),
        pytest.param([["create", "c"], ["append", "b", "12345"]], "ext4", (2, 5, 2), id="two files"),
    ],
)
def test_a_file_with_several_losses_is_counted_once(
    keeper: str, steps: list[list[Any]], power_model: str, lost: tuple[int, int, int], tmp_path: Path
) -> None:
    host = Host(str(tmp_path), {"a": b"1", "b": b"1"}, keeper)
    host.run(steps)
    assert host.take_back(power_model) == lost
    assert host.files() == {"a": b"1", "b": b"1"}


MAPPED = (
    "import mmap, os, sys\n"
    "path = os.path.join(sys.argv[1], 'c')\n"
    "c = os.open(path, os.O_CREAT | os.O_RDWR)\n"
    "{before}\n"
    "os.ftruncate(c, 3 << 12)\n"
    "{after}\n"
    "mmap.mmap(c, 3 << 12)[:2 << 12] = b'x' * (2 << 12)\n"
)
"""Makes a file of 12,288 bytes and writes 8,192 of them through a mapping."""


@every_keeper
@pytest.mark.parametrize(
    ("steps", "power_model", "size_bytes"),
    [
        pytest.param([["append", "c", "synced"], ["sync", "c"]], "posix", 6, id="synced, its name not"),
        pytest.param([["append", "c", "synced"], ["sync", "c"], ["write", "c", 4, "1234"]], "posix", 10, id="in part"),
        pytest.param([["write-through", "c", 0, "synced", "O_DSYNC"]], "posix", 6, id="synchronously, its name not"),
        pytest.param([["append", "c", "1" * 4000]], "torn", 4000, id="torn: a file that is gone has no sectors"),
        pytest.param([["truncate", "c", 1 << 20], ["write", "c", 9, "1234"]], "ext4", 4, id="mostly a hole"),
    ],
)
def test_a_lost_file_counts_with_all_of_its_bytes(
    keeper: str, steps: list[list[Any]], power_model: str, size_bytes: int, tmp_path: Path
) -> None:
    host = Host(str(tmp_path), {}, keeper)
    host.run([["create", "c"], *steps])
    found = host.cut(power_model)
    assert host.files() == {}
    if "truncate" in steps[0]:  # the stored size of a file is known in blocks
        assert size_bytes <= found["bytes"] <= 1 << 16
    else:
        assert found["bytes"] == size_bytes
    assert len(found["files"]) == 1


@every_keeper
def test_a_lost_directory_counts_with_the_files_in_it(keeper: str, tmp_path: Path) -> None:
    host = Host(str(tmp_path), {}, keeper)
    script = (
        "import os, sys\n"
        "directory = os.path.join(sys.argv[1], 'directory')\n"
        "os.mkdir(directory)\n"
        "c = os.open(os.path.join(directory, 'c'), os.O_CREAT | os.O_WRONLY)\n"
        "os.write(c, b'synced')\n"
        "os.fsync(c)\n"
        "os.fsync(os.open(directory, os.O_RDONLY))\n"
    )
    host.start(script, host.data).check_returncode()
    assert host.take_back("posix") == (1, 6, 2)
    assert host.files() == {}


@every_keeper
def test_a_lost_file_counts_with_the_bytes_written_through_a_mapping(keeper: str, tmp_path: Path) -> None:
    host = Host(str(tmp_path), {}, keeper)
    host.start(MAPPED.format(before="", after=""), host.data).check_returncode()
    found = host.cut("ext4", mapped=["c"])
    assert host.files() == {}
    assert 2 << 12 <= found["bytes"] <= 3 << 12
    assert (len(found["files"]), found["kept"]) == (1, [])


@every_keeper
@pytest.mark.parametrize(
    ("before", "after", "renamed", "kept", "left"),
    [
        pytest.param("", "os.fsync(c)", "", ["c"], {"a": b"1", "c": b"x" * 8192 + bytes(4096)}, id="synced"),
        pytest.param("os.fsync(c)", "", "", [], {"a": b"1", "c": b""}, id="synced before it had a length"),
        pytest.param(
            "", "os.fsync(c)", "os.rename(path, path + '2')\n", ["c"],
            {"a": b"1", "c": b"x" * 8192 + bytes(4096)}, id="under its earlier name",
        ),
        pytest.param("", "", "os.rename(path, sys.argv[1] + '/a')\n", [], {"a": b"1"}, id="gone from an old name"),
    ],
)  # fmt: skip
def test_only_mapped_files_that_still_have_content_are_reported_as_kept(
    keeper: str, before: str, after: str, renamed: str, kept: list[str], left: dict[str, bytes], tmp_path: Path
) -> None:
    host = Host(str(tmp_path), {"a": b"1"}, keeper)
    host.start(MAPPED.format(before=before, after=after) + renamed, host.data).check_returncode()
    mapped = "c2" if "c" in kept and renamed else "a" if renamed else "c"
    found = host.cut("ext4", mapped=[mapped, "never there"])
    assert host.files() == left
    assert found["kept"] == [os.path.join(host.data, name) for name in kept]


@every_keeper
@pytest.mark.parametrize("sync", ["os.fsync(a)", "ctypes.CDLL(None).syncfs(a)"])
def test_a_long_log_is_compacted_without_loss(keeper: str, sync: str, tmp_path: Path) -> None:
    host = Host(str(tmp_path), {"a": b"", "b": b"durable"}, keeper)
    script = (
        "import ctypes, os, sys\n"
        "a, b = (os.open(os.path.join(sys.argv[1], name), os.O_RDWR) for name in 'ab')\n"
        "os.pwrite(b, b'FIRST', 0)\n"
        "for number in range(60):\n"
        "    os.pwrite(a, bytes([number]) * (1 << 20), 0)\n"
        f"    {sync}\n"
    )
    host.start(script, host.data).check_returncode()
    assert Path(host.undo, "log").stat().st_size < 20 << 20
    assert host.voids() == 0
    host.take_back("ext4")
    assert host.files() == {"a": bytes([59]) * (1 << 20), "b": b"durable" if "fsync" in sync else b"FIRSTle"}


@every_keeper
def test_a_removed_directory_is_restored_with_its_files(keeper: str, tmp_path: Path) -> None:
    host = Host(str(tmp_path), {}, keeper)
    directory = Path(host.data, "stream")
    directory.mkdir()
    (directory / "1.blk").write_bytes(b"messages")
    (directory / "index").write_bytes(b"index")
    script = (
        "import os, shutil, sys\n"
        "directory = os.path.join(sys.argv[1], 'stream')\n"
        "os.rename(os.path.join(directory, 'index'), os.path.join(sys.argv[1], 'old'))\n"
        "shutil.rmtree(directory)\n"
    )
    host.start(script, host.data).check_returncode()
    host.take_back("ext4")
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == {"1.blk": b"messages", "index": b"index"}


@every_keeper
@pytest.mark.parametrize("is_new", [False, True])
def test_unsynced_changes_in_a_renamed_directory_are_undone(keeper: str, is_new: bool, tmp_path: Path) -> None:
    host = Host(str(tmp_path), {}, keeper)
    directory = Path(host.data, "stream")
    if not is_new:
        directory.mkdir()
        (directory / "1.blk").write_bytes(b"messages")
    script = (
        "import os, sys\n"
        "directory = os.path.join(sys.argv[1], 'stream')\n"
        "os.makedirs(directory, exist_ok=True)\n"
        "with open(os.path.join(directory, '1.blk'), 'ab') as file:\n"
        "    file.write(b' and more')\n"
        "os.rename(directory, directory + '-purge')\n"
    )
    host.start(script, host.data).check_returncode()
    host.take_back("ext4")
    files = [path for path in Path(host.data).rglob("*") if path.is_file()]
    left = {str(path.relative_to(host.data)): path.read_bytes() for path in files}
    assert left == ({} if is_new else {"stream/1.blk": b"messages"})


@every_keeper
def test_an_attempt_to_unlink_a_directory_does_not_make_the_account_void(keeper: str, tmp_path: Path) -> None:
    host = Host(str(tmp_path), {"a": b"1"}, keeper)
    script = (
        "import os, sys\n"
        "directory = os.path.join(sys.argv[1], 'directory')\n"
        "os.mkdir(directory)\n"
        "try:\n"
        "    os.unlink(directory)\n"
        "except OSError:\n"
        "    os.rmdir(directory)\n"
        "open(os.path.join(sys.argv[1], 'a'), 'a').write('2')\n"
    )
    host.start(script, host.data).check_returncode()
    assert host.voids() == 0
    host.take_back("ext4")
    assert host.files() == {"a": b"1"}


@every_keeper
def test_writes_of_a_forked_process_are_in_the_account_or_make_it_void(keeper: str, tmp_path: Path) -> None:
    """The shim keeps the account of one process, the launcher that of all."""
    host = Host(str(tmp_path), {"a": b"1", "b": b"1"}, keeper)
    script = (
        "import os, sys\n"
        "open(os.path.join(sys.argv[1], 'a'), 'a').write('2')\n"
        "if os.fork() == 0:\n"
        "    open(os.path.join(sys.argv[1], 'b'), 'a').write('2')\n"
        "    os._exit(0)\n"
        "os.wait()\n"
    )
    host.start(script, host.data).check_returncode()
    check_void_or_taken_back(host, {"a": b"1", "b": b"1"})


BY_NUMBER = {
    "fsync": "call('fsync', a)",
    "fdatasync": "call('fdatasync', a)",
    "syncfs": "call('syncfs', a)",
    "sync": "call('sync')",
    "msync": "call('msync', ctypes.addressof(ctypes.c_char.from_buffer(mapped)), 4, 4)",
}
"""Ways to make file a durable for a program that makes its system calls by their numbers."""


@every_keeper
@pytest.mark.parametrize("how", BY_NUMBER)
def test_system_calls_by_number_are_logged_like_calls_by_name(keeper: str, how: str, tmp_path: Path) -> None:
    host = Host(str(tmp_path), {"a": b"old a", "b": b"old b"}, keeper)
    script = (
        "import ctypes, mmap, os, sys\n"
        "a, b = (os.open(os.path.join(sys.argv[1], name), os.O_RDWR) for name in 'ab')\n"
        "mapped = mmap.mmap(a, 0)\n"
        "libc, numbers = ctypes.CDLL(None, use_errno=True), eval(sys.argv[2])\n"
        "def call(name, *arguments):\n"
        "    result = libc.syscall(ctypes.c_long(numbers[name]), *map(ctypes.c_void_p, arguments))\n"
        "    assert result >= 0, os.strerror(ctypes.get_errno())\n"
        "os.pwrite(a, b'new', 0)\n"
        f"{BY_NUMBER[how]}\n"
        "text = ctypes.create_string_buffer(b'lost')\n"
        "call('pwrite64', b, ctypes.addressof(text), 4, 0)\n"
    )
    host.start(script, host.data, repr(SYSCALLS[platform.machine()])).check_returncode()
    assert host.files() == {"a": b"new a", "b": b"lostb"}
    host.take_back("ext4")
    assert host.files() == {"a": b"new a", "b": b"old b"}


@every_keeper
def test_files_that_openat2_creates_or_truncates_are_in_the_account(keeper: str, tmp_path: Path) -> None:
    """By its number, and by its name, which newer C libraries have."""
    host = Host(str(tmp_path), {"a": b"old a"}, keeper)
    number = SYSCALLS[platform.machine()]["openat2"]
    script = (
        "import ctypes, os, struct, sys\n"
        "libc, root = ctypes.CDLL(None, use_errno=True), os.open(sys.argv[1], os.O_PATH)\n"
        f"by_number = lambda *arguments: libc.syscall({number}, *arguments)\n"
        "for name, flags, call in (\n"
        "    (b'a', os.O_TRUNC, by_number), (b'b', os.O_CREAT, by_number),\n"
        "    (b'c', os.O_CREAT, getattr(libc, 'openat2', by_number)),\n"
        "):\n"
        "    how = struct.pack('3Q', os.O_WRONLY | flags, 0o600 * (flags == os.O_CREAT), 0)\n"
        "    if call(root, name, how, ctypes.c_size_t(24)) < 0: sys.exit(os.strerror(ctypes.get_errno()))\n"
    )
    host.start(script, host.data).check_returncode()
    assert host.files() == {"a": b"", "b": b"", "c": b""}
    host.take_back("ext4")
    assert host.files() == {"a": b"old a"}


@every_keeper
def test_an_asynchronous_sync_is_in_the_account_or_makes_it_void(keeper: str, tmp_path: Path) -> None:
    """The C library syncs in a thread of its own, without calling a function of the shim."""
    host = Host(str(tmp_path), {"a": b"1"}, keeper)
    script = (
        "import ctypes, os, struct, sys, time\n"
        "a = os.open(os.path.join(sys.argv[1], 'a'), os.O_RDWR)\n"
        "ctypes.CDLL('librt.so.1', ctypes.RTLD_GLOBAL)  # where the C library has it apart\n"
        "libc, asked = ctypes.CDLL(None), ctypes.create_string_buffer(struct.pack('=i', a), 256)\n"
        "os.pwrite(a, b'2', 0)\n"
        "assert libc.aio_fsync(os.O_SYNC, asked) == 0\n"
        "while libc.aio_error(asked): time.sleep(0.01)\n"
        "assert libc.aio_return(asked) == 0\n"
    )
    host.start(script, host.data).check_returncode()
    check_void_or_taken_back(host, {"a": b"2"})


@every_keeper
def test_a_process_that_is_forked_while_a_thread_writes_can_write(keeper: str, tmp_path: Path) -> None:
    host = Host(str(tmp_path), {"a": bytes(200 << 20)}, keeper)
    script = (
        "import os, sys, threading, time\n"
        "a = os.open(os.path.join(sys.argv[1], 'a'), os.O_RDWR)\n"
        "threading.Thread(target=lambda: os.pwrite(a, bytes(200 << 20), 0), daemon=True).start()\n"
        "while not os.path.exists(sys.argv[2]) or os.path.getsize(sys.argv[2]) < 1 << 20: time.sleep(0.001)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os.pwrite(a, b'x', 0)\n"
        "    os.fsync(a)\n"
        "    os._exit(7)\n"
        "deadline = time.monotonic() + 30\n"
        "while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline: time.sleep(0.01)\n"
        "if not ended[0]: os.kill(child, 9)\n"
        "sys.exit(os.waitstatus_to_exitcode(ended[1]) != 7)\n"
    )
    host.start(script, host.data, os.path.join(host.undo, "log")).check_returncode()


@every_keeper
@pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")
def test_a_signal_handler_can_write_while_its_thread_writes(keeper: str, tmp_path: Path) -> None:
    """As a handler in C may; Python's handlers run between two calls."""
    host = Host(str(tmp_path), {"a": bytes(1 << 20), "b": b""}, keeper)
    source, program = tmp_path / "program.c", tmp_path / "program"
    source.write_text(
        "#include <fcntl.h>\n#include <signal.h>\n#include <sys/time.h>\n#include <unistd.h>\n"
        "static int a, b, handled;\n"
        "static void handle(int number) { handled += write(b, &number, 1) == 1; }\n"
        "int main(int count, char **words) {\n"
        "    static char data[4096];\n"
        "    struct itimerval soon = {{0, 300}, {0, 300}};\n"
        "    a = open(words[count - 2], O_RDWR), b = open(words[count - 1], O_WRONLY | O_APPEND);\n"
        "    signal(SIGALRM, handle);\n"
        "    setitimer(ITIMER_REAL, &soon, NULL);\n"
        "    while (handled < 200)\n"
        "        if (pwrite(a, data, sizeof data, 0) < 0) return 1;\n"
        "    return 0;\n}\n"
    )
    subprocess.run([str(COMPILER), "-o", program, source], check=True)
    host.start_program([str(program), os.path.join(host.data, "a"), os.path.join(host.data, "b")]).check_returncode()


@every_keeper
def test_closing_every_descriptor_does_not_close_the_log(keeper: str, tmp_path: Path) -> None:
    host = Host(str(tmp_path), {"a": b"old a", "b": b"old b"}, keeper)
    script = (
        "import os, sys\n"
        "os.closerange(3, 1024)\n"
        "a, b = (os.open(os.path.join(sys.argv[1], name), os.O_RDWR) for name in 'ab')\n"
        "os.pwrite(a, b'new', 0)\n"
        "os.fsync(a)\n"
        "os.pwrite(b, b'lost', 0)\n"
    )
    host.start(script, host.data).check_returncode()
    assert host.files() == {"a": b"new a", "b": b"lostb"}
    assert host.voids() == 0
    host.take_back("ext4")
    assert host.files() == {"a": b"new a", "b": b"old b"}


@every_keeper
@pytest.mark.parametrize("first_closed", ["at its start", "later"])
def test_writes_to_closed_standard_descriptors_do_not_go_into_the_log(
    keeper: str, first_closed: str, tmp_path: Path
) -> None:
    host = Host(str(tmp_path), {"a": b"old a"}, keeper)
    script = (
        "import os, sys\n"
        "os.closerange(0, 1024)\n"
        "os.chdir(sys.argv[1])\n"
        "os.truncate('a', 3)\n"
        "for number in range(3):\n"
        "    try:\n"
        "        os.write(number, b'Something is wrong')\n"
        "        os._exit(1)\n"
        "    except OSError:\n"
        "        pass\n"
        "os.truncate('a', 1)\n"
        "os._exit(0)\n"
    )
    argv = [sys.executable, "-I", "-S", "-c", script, host.data]
    if first_closed == "at its start":
        argv = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *argv]
    assert host.start_program(argv).returncode == 0
    host.take_back("ext4")
    assert host.files() == {"a": b"old a"}


@pytest.mark.parametrize("flag", ["O_RDWR", "O_WRONLY"])
def test_the_space_reserved_for_the_log_stays_reserved(flag: str, tmp_path: Path) -> None:
    """Otherwise the account would end when its disk becomes full."""
    if REASONS["shim"]:
        pytest.skip(REASONS["shim"])
    host = Host(str(tmp_path), {"a": b"old a"}, "shim")
    script = (
        "import os, sys\n"
        "print(os.stat(sys.argv[2]).st_blocks)\n"
        f"os.pwrite(os.open(os.path.join(sys.argv[1], 'a'), os.{flag}), b'new', 0)\n"
        "print(os.stat(sys.argv[2]).st_blocks)\n"
    )
    done = host.start(script, host.data, os.path.join(host.undo, "log"))
    before, after = map(int, done.stdout.split())
    if not before:
        pytest.skip("this file system reserves nothing")
    assert after == before


CHANGED_UNDER_A_LOCK = {
    "written": "os.pwrite(a, b'new', 0)",
    "written by a descriptor that cannot be read by": "os.pwrite(other(os.O_WRONLY), b'new', 0)",
    "written past the cache": "os.pwrite(other(os.O_RDWR | os.O_DIRECT), memory, 0)",
    "written past the cache, not to be read": "os.pwrite(other(os.O_WRONLY | os.O_DIRECT), memory, 0)",
    "cut by its path": "os.truncate(path, 100)",
    "cut and written": "os.truncate(path, 100); os.pwrite(other(os.O_WRONLY), b'new', 50)",
}
"""Ways to change a file that the program has locked by descriptor a."""


@every_keeper
@pytest.mark.parametrize("how", CHANGED_UNDER_A_LOCK)
def test_logging_a_change_does_not_release_the_program_s_lock_on_the_file(
    keeper: str, how: str, tmp_path: Path
) -> None:
    before = bytes(range(256)) * 32 + b"the end"
    host = Host(str(tmp_path), {"a": before}, keeper)
    script = (
        "import fcntl, mmap, os, sys\n"
        "path = os.path.join(sys.argv[1], 'a')\n"
        "a = os.open(path, os.O_RDWR)\n"
        "memory = mmap.mmap(-1, 4096)\n"
        "def other(flags):\n"
        "    try:\n"
        "        return os.open(path, flags)\n"
        "    except OSError as error:\n"
        "        sys.exit(os.strerror(error.errno))\n"
        "fcntl.lockf(a, fcntl.LOCK_EX)\n"
        f"{CHANGED_UNDER_A_LOCK[how]}\n"
        "if os.fork() == 0:\n"
        "    try:\n"
        "        fcntl.lockf(a, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "    except BlockingIOError:\n"
        "        os._exit(7)\n"
        "    os._exit(0)\n"
        "assert os.waitstatus_to_exitcode(os.wait()[1]) == 7, 'the lock is gone'\n"
    )
    done = host.start(script, host.data)
    if done.stderr == "Invalid argument\n":
        pytest.skip("this file system has no O_DIRECT")
    assert done.returncode == 0, done.stderr
    assert host.voids() == 0
    assert host.files()["a"] != before
    host.take_back("ext4")
    assert host.files() == {"a": before}


CUTS_BY_A_WRITE_ONLY_DESCRIPTOR = """
import os, sys
a = os.open(os.path.join(sys.argv[1], "a"), os.O_WRONLY)
while True:
    os.ftruncate(a, 32 << 20)
    os.fsync(a)
    os.ftruncate(a, 0)
"""


def stopped_child_of(pid: int, path: str, deadline_s: float) -> int:
    """A child of a process, caught and stopped when it had opened a file that its parent has open as well."""
    while time.monotonic() < deadline_s:
        for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                os.kill(child, signal.SIGSTOP)
                while (letter := letter_of(child)) not in "TZX":
                    time.sleep(0.001)
                descriptors = [os.readlink(shown) for shown in Path(f"/proc/{child}/fd").iterdir()]
                if letter == "T" and descriptors.count(path) == 2:
                    return child
                os.kill(child, signal.SIGCONT)
    raise AssertionError("no child was seen")


def letter_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.skipif(REASONS["shim"] is not None, reason=str(REASONS["shim"]))
@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="children are found by /proc")
def test_the_process_that_reads_old_bytes_for_a_program_ends_with_it(tmp_path: Path) -> None:
    """Otherwise the next program would find the log locked."""
    host, deadline_s = Host(str(tmp_path), {"a": b""}, "shim"), time.monotonic() + 60
    argv = [sys.executable, "-I", "-S", "-c", CUTS_BY_A_WRITE_ONLY_DESCRIPTOR, host.data]
    environment = os.environ | shim_environment(host.tool, host.control, host.data, undo_path=host.undo)
    with subprocess.Popen(argv, env=environment) as program:
        child = 0
        try:
            child = stopped_child_of(program.pid, os.path.join(host.data, "a"), deadline_s)
            program.kill()
            program.wait()
            with contextlib.suppress(FileNotFoundError):
                while letter_of(child) not in "ZX":
                    assert time.monotonic() < deadline_s, "the child still runs"
                    time.sleep(0.01)
        finally:
            program.kill()
            with contextlib.suppress(ProcessLookupError):
                os.kill(child or program.pid, signal.SIGKILL)
    host.take_back("ext4")
    assert os.listdir(host.undo) == []


@every_keeper
def test_files_outside_the_data_directory_are_left_alone(keeper: str, tmp_path: Path) -> None:
    host = Host(str(tmp_path), {"a": b"1"}, keeper)
    outside = tmp_path / "outside"
    script = f"open({str(outside)!r}, 'w').write('kept')"
    host.start(script).check_returncode()
    assert host.take_back("ext4") == (0, 0, 0)
    assert outside.read_text() == "kept"


@every_keeper
def test_a_damaged_log_is_not_applied(keeper: str, tmp_path: Path) -> None:
    host = Host(str(tmp_path), {"a": b"1"}, keeper)
    host.run([["append", "a", "2"]])
    Path(host.undo, "log").write_bytes(b"rubbish " * 20)
    argv = [sys.executable, "-I", "-S", "-", host.undo, host.data, "ext4", "0"]
    done = subprocess.run(argv, input=take_back_script(), capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "damaged" in done.stderr
    assert host.files() == {"a": b"12"}

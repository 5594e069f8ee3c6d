"""Which mechanism reaches a program: judged by its file before the start, and by its processes after it."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nemesis.mechanisms.launcher.clock_probe import read_clocks
from nemesis.mechanisms.launcher.programs import DYNAMIC, GO, OTHER, SCRIPT, STATIC, judge, look, program_kind
from nemesis.mechanisms.reach import PRELOAD, SECCOMP, mechanism_for, unreached, wanted_traps
from tests.headless import HEADLESS

COMPILER = shutil.which("cc") or shutil.which("gcc")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler to make programs with")
MACHINES = {"x86_64": 62, "aarch64": 183}


def elf(path: Path, *, interpreter: bytes = b"", note: bytes = b"", section: bytes = b"", machine: int = 0) -> Path:
    """An ELF file with these parts and nothing to run."""
    pieces = [(kind, content) for kind, content in ((3, interpreter), (4, note)) if content]
    at = 64 + 56 * len(pieces)
    headers, body = b"", b""
    for kind, content in pieces:
        headers += struct.pack("=2I6Q", kind, 4, at + len(body), 0, 0, len(content), len(content), 1)
        body += content
    sections_at = 0
    if section:
        names = b"\0" + section + b"\0"
        sections_at = at + len(body) + len(names)
        body += names + struct.pack("=2I4Q2I2Q", 0, 3, 0, 0, sections_at - len(names), len(names), 0, 0, 1, 0)
    machine = machine or MACHINES[os.uname().machine]
    head = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack(
        "=2HI3QI6H", 2, machine, 1, 0, 64, sections_at, 0, 64, 56, len(pieces), 64, 1 if section else 0, 0
    )
    path.write_bytes(head + headers + body)
    return path


@pytest.mark.parametrize(
    ("kind", "mechanism", "parts"),
    [
        (DYNAMIC, PRELOAD, {"interpreter": b"/lib64/ld-linux-x86-64.so.2\0"}),
        (STATIC, SECCOMP, {}),
        (STATIC, SECCOMP, {"interpreter": b"/lib/ld-musl-x86_64.so.1\0"}),
        (GO, SECCOMP, {"section": b".gopclntab"}),
        (GO, SECCOMP, {"interpreter": b"/lib64/ld-linux-x86-64.so.2\0", "section": b".go.buildinfo"}),
        (GO, SECCOMP, {"note": struct.pack("=3I", 4, 8, 4) + b"Go\0\0" + b"buildid\0"}),
        (OTHER, SECCOMP, {"machine": 8}),
    ],
)
def test_the_file_of_a_program_determines_its_kind_and_mechanism(
    tmp_path: Path, kind: str, mechanism: str, parts: dict[str, Any]
) -> None:
    found = program_kind(str(elf(tmp_path / "program", **parts)))
    assert found == kind and mechanism_for(found) == mechanism


def test_scripts_and_shells_are_reached_by_seccomp(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/usr/bin/python3\n")
    script.chmod(0o755)
    assert judge([str(script)]) == {"path": str(script), "kind": SCRIPT}
    assert judge(["sh", "-c", "exec something"])["kind"] == SCRIPT
    assert judge(["env", "A=b", "something"])["kind"] == SCRIPT
    assert judge(["env", "A=b", sys.executable])["kind"] == DYNAMIC
    assert judge(["env", "-i", "A=b", sys.executable])["kind"] == SCRIPT
    assert judge(["timeout", "9", str(script)]) == judge(["nohup", str(script)]) == judge([str(script)])
    assert mechanism_for(SCRIPT) == SECCOMP


def test_a_wrapper_is_judged_by_the_program_that_it_executes(tmp_path: Path) -> None:
    program = elf(tmp_path / "program", section=b".gopclntab")
    wrapped = judge(["setpriv", "--reuid", "postgres", str(program), "-D", str(tmp_path)])
    assert wrapped == {"path": str(program), "kind": GO}


def test_a_missing_program_is_an_error_and_a_text_file_has_the_kind_other(tmp_path: Path) -> None:
    assert "error" in judge([str(tmp_path / "nothing")])
    (tmp_path / "text").write_text("hello")
    assert judge([str(tmp_path / "text")])["kind"] == OTHER


@needs_compiler
def test_compiled_programs_are_dynamic_or_static(tmp_path: Path) -> None:
    source = tmp_path / "program.c"
    source.write_text("int main(void) { return 0; }\n")
    for arguments, kind in (([], DYNAMIC), (["-static"], STATIC)):
        program = tmp_path / kind
        subprocess.run([str(COMPILER), *arguments, "-o", str(program), str(source)], check=True)
        assert program_kind(str(program)) == kind


def test_look_finds_all_processes_of_a_program() -> None:
    script = "import subprocess, sys; c = subprocess.Popen(['sleep', '60']); print(c.pid, flush=True); c.wait()"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            child = int(process.stdout.readline())
            deadline_s = time.monotonic() + 30
            while True:  # until the child has executed its program, and that has been loaded
                seen = look(process.pid)
                if [os.path.basename(each["program"]) for each in seen][1:] == ["sleep"] and seen[1]["maps"]:
                    break
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
            assert [each["pid"] for each in seen] == [process.pid, child]
            assert all(each["kind"] == DYNAMIC and each["clock"] is None and each["maps"] for each in seen)
        finally:
            os.kill(child, 9)
            process.kill()
    assert look(process.pid) == []


def test_look_finds_a_process_whose_first_thread_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", HEADLESS], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == f"headless {process.pid}\n"
            [found] = look(process.pid)
            assert found["kind"] == DYNAMIC and found["maps"] and not found["problem"] and found["pid"] == process.pid
        finally:
            process.kill()
    assert look(process.pid) == []


RING = """
import ctypes, mmap, os, platform, sys
def call(number, *arguments):
    result = ctypes.CDLL(None).syscall(number, *arguments)
    if result < 0:
        sys.exit("not to be had")
    return result
if sys.argv[1] == "io_submit":
    call({"x86_64": 206, "aarch64": 0}[platform.machine()], 8, ctypes.byref(ctypes.c_ulong()))
else:
    ring = call(425, 4, ctypes.create_string_buffer(120))
    if sys.argv[1] == "mapped":
        mapping = mmap.mmap(ring, 4096, offset=0)
        os.close(ring)
print("ready", flush=True)
sys.stdin.read()
"""
"""Creates a context for io_submit, or a ring of io_uring of which it keeps the descriptor or a mapping."""


@pytest.mark.parametrize(("kept", "unseen"), [("open", "io_uring"), ("mapped", "io_uring"), ("io_submit", "io_submit")])
def test_a_process_that_uses_io_uring_or_io_submit_is_detected(kept: str, unseen: str) -> None:
    command = [sys.executable, "-c", RING, kept]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdin is not None
        if not process.stdout.readline():
            pytest.skip(f"this kernel, or a sandbox, does not allow {unseen}")
        assert [each["unseen"] for each in look(process.pid)] == [[unseen]]
        process.stdin.close()
    assert [each["unseen"] for each in look(os.getpid()) if each["pid"] == os.getpid()] == [[]]


def seen(**other: Any) -> dict[str, Any]:
    process = {"pid": 7, "program": "/p", "kind": DYNAMIC, "maps": ["/lib", "/control"], "clock": 5, "problem": ""}
    return {**process, "filters": 1, "unseen": [], "root": False, **other}


@pytest.mark.parametrize(
    ("mechanism", "looked", "needs_clock", "said"),
    [
        (PRELOAD, [seen()], True, None),
        (
            PRELOAD,
            [seen(), seen(unseen=["io_uring"])],
            False,
            "by io_uring, which bypasses every disk fault: configure it not to",
        ),
        (SECCOMP, [seen(unseen=["io_uring"])], False, "may read and write by io_uring"),
        (PRELOAD, [seen(unseen=["io_uring"])], True, None),
        (PRELOAD, [seen(), seen(maps=["/control"])], False, "has not loaded"),
        (PRELOAD, [seen(), seen(kind=GO)], False, "a Go program"),
        (PRELOAD, [seen(maps=[], problem="Permission denied")], False, "Permission denied"),
        (PRELOAD, [], False, "has ended"),
        (PRELOAD, [seen(), seen(root=True)], False, "has its own root (chroot)"),
        (PRELOAD, [seen(root=True)], True, None),
        (SECCOMP, [seen(root=True)], False, None),
        (SECCOMP, [seen(kind=GO, maps=[])], True, None),
        (SECCOMP, [seen(kind=GO), seen(kind=GO, clock=None)], True, "is not skewed"),
        (SECCOMP, [seen(kind=GO, clock=None)], False, None),
        (SECCOMP, [seen(kind=GO, filters=None)], False, None),
        (SECCOMP, [seen(kind=GO), seen(kind=GO, filters=0)], False, "are not reported"),
    ],
)
def test_every_process_has_to_be_within_reach(
    mechanism: str, looked: list[dict[str, Any]], needs_clock: bool, said: str | None
) -> None:
    problem = unreached(mechanism, looked, needed_files=["/lib", "/control"], needs_clock=needs_clock)
    assert (problem is None) == (said is None) and (said is None or said in str(problem))


def test_only_calls_that_the_faults_of_a_run_affect_are_reported() -> None:
    assert wanted_traps([("disks", "stall-fsync"), ("clocks", "wall"), ("disks", "freeze")]) == {"sync"}
    assert wanted_traps([("disks", "power")]) == {"sync", "write"}
    assert wanted_traps([("disks", "error-read")]) == {"read"}
    assert wanted_traps([("disks", "shutdown"), ("disks", "fill")]) == {"sync"}
    assert wanted_traps([("clocks", "wall")]) == frozenset()


def test_clocks_without_a_fault_are_read_as_they_are() -> None:
    readings = read_clocks(0, 0.0, [0.01, 0.01])
    assert len(readings) == 3
    for before_ns, wall_ns, after_ns, earlier_ns, monotonic_ns, later_ns in readings:
        assert before_ns <= wall_ns <= after_ns and earlier_ns <= monotonic_ns <= later_ns

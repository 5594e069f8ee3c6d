"""Skews the wall clock of a running program by patching its copy of the vDSO (`man 7 vdso`).

A program reads the clock through code that the kernel maps into it, not by a system call, so that nothing outside sees
the read. But that code becomes a private copy once it is written to through /proc/PID/mem, and then differs in this
process only. `clock_gettime`, `gettimeofday` and `time` get a jump to a few instructions after the image's end, in the
rest of its last page. These make the real system call and add an offset in nanoseconds stored beside them, for wall
clocks only (CLOCK_REALTIME, its coarse variant, CLOCK_TAI). So a jump of the clock is one write of eight bytes.
Reads of wall clocks are counted beside the offset. For this the program itself must be able to write there: it is made
to call mprotect while it is stopped. If the kernel refuses that, nothing is counted.

This reaches static and Go programs as well as those that use a C library, but no program's raw system calls.

Nothing is patched before a clock fault is in force, and the original code is restored afterwards: the real system call
costs several times as much as the vDSO's code, and some programs read the clock all the time. A child inherits its
parent's patched copy; an executed program gets a new one. So while a fault is in force, the driver checks all processes
of the program every few milliseconds.
"""

from __future__ import annotations

import errno
import os
import platform
import struct
import time
from dataclasses import dataclass

from .control import Control
from .tracing import ProcessTree, Stopped, TracingError, read_memory, write_memory

__all__ = ["ClockDriver", "ClockError", "Image", "base_of", "extent_of", "locate", "read_offset_ns"]

_STUB = bytes.fromhex(
    "00000000000000000000000000000000b8e40000000f0585c0753c83ff00740a"
    "83ff05740583ff0b752df048ff05d6ffffff48690600ca9a3b48034608480305"
    "bcffffffb900ca9a3b489948f7f94889064889560831c0c3b8600000000f0548"
    "85ff742e574883ec1031ff4889e6e89dffffff488b44240831d2b9e803000048"
    "f7f1488b0c244883c4105f48890f4889470831c0c3574883ec1031ff4889e6e8"
    "6cffffff488b04244883c4105f4885ff7403488907c3"
)
"""x86-64, at any address: the offset in nanoseconds, how often a wall clock was read, then

    clock_gettime:  mov eax,228; syscall; test eax,eax; jnz out; cmp edi,0; je wall; cmp edi,5; je wall
                    cmp edi,11; jne out
            wall:   lock inc qword [rip+count]
                    imul rax,[rsi],1000000000; add rax,[rsi+8]; add rax,[rip+offset]
                    mov ecx,1000000000; cqo; idiv rcx; mov [rsi],rax; mov [rsi+8],rdx; xor eax,eax
            out:    ret
    gettimeofday:   mov eax,96; syscall; test rdi,rdi; jz none; push rdi; sub rsp,16; xor edi,edi; mov rsi,rsp
                    call clock_gettime; mov rax,[rsp+8]; xor edx,edx; mov ecx,1000; div rcx; mov rcx,[rsp]
                    add rsp,16; pop rdi; mov [rdi],rcx; mov [rdi+8],rax
            none:   xor eax,eax; ret
    time:           push rdi; sub rsp,16; xor edi,edi; mov rsi,rsp; call clock_gettime; mov rax,[rsp]
                    add rsp,16; pop rdi; test rdi,rdi; jz end; mov [rdi],rax
            end:    ret
"""

_ENTRIES = {"__vdso_clock_gettime": 0x10, "__vdso_gettimeofday": 0x58, "__vdso_time": 0x95}
"""Function of the image -> offset of its replacement in the stub."""

_COUNT, _CODE, _SYSCALL, _COUNTING = 0x08, 0x10, 0x15, 0x2A
"""Offsets in the stub: the count, the begin of the code, a system call instruction, the counting instruction."""
_NO_COUNTING = bytes.fromhex("0f1f840000000000")
"""A no-op as long as the counting instruction, for programs that may not write to the page."""

_MPROTECT = 10
_PROT_READ, _PROT_WRITE, _PROT_EXEC = 1, 2, 4

_JUMP_BYTES = 5

_WATCH_S = 0.005
"""How often processes are checked while a clock fault is in force: a newly executed program reads the true time for up
to that long, and a drift is updated at this interval."""
_IDLE_S = 0.05
"""How often the control file is read while no clock fault is in force."""
_SETTLE_ATTEMPTS = 50
"""How often a process may be continued and stopped again because a thread is within the bytes to be changed."""

_AT_SYSINFO_EHDR = 33


class ClockError(RuntimeError):
    """The clock of a program cannot be skewed through its vDSO; the message says why."""


@dataclass(frozen=True, slots=True)
class Image:
    """The location of a process's vDSO: its address and length, the functions' entries, and room for the stub."""

    base: int
    length: int
    entries: dict[int, int]
    """address of a function's entry -> address of its replacement"""
    stub: int


def base_of(pid: int) -> int:
    """The address of a process's vDSO. Raises ClockError, OSError."""
    with open(f"/proc/{pid}/auxv", "rb") as file:
        vector = file.read()
    for kind, value in struct.iter_unpack("=2Q", vector[: len(vector) // 16 * 16]):
        if kind == _AT_SYSINFO_EHDR and value:
            return int(value)
    raise ClockError("the program has no vDSO")


def extent_of(pid: int, base: int) -> int:
    """The length in bytes of the vDSO at `base`. Raises ClockError, OSError."""
    with open(f"/proc/{pid}/maps", encoding="ascii", errors="replace") as maps:
        for line in maps:
            begin, _, end = line.split()[0].partition("-")
            if int(begin, 16) == base:
                return int(end, 16) - base
    raise ClockError("the program's vDSO is not mapped")


def locate(pid: int) -> Image:
    """The vDSO of a process. Raises ClockError if it is not as expected, OSError if the process may not be inspected or
    is gone."""
    base = base_of(pid)
    image = read_memory(pid, base, extent_of(pid, base))
    if image[:5] != b"\x7fELF\x02":
        raise ClockError("the program's vDSO is not a 64-bit ELF image")
    (sections_at,) = struct.unpack_from("=Q", image, 40)
    section_bytes, section_count = struct.unpack_from("=2H", image, 58)
    end = sections_at + section_bytes * section_count
    stub = (end + 15) // 16 * 16
    if stub + len(_STUB) > len(image):
        raise ClockError("the vDSO has no room after its end")
    entries = {}
    for name, address in _symbols(image, sections_at, section_bytes, section_count):
        if name in _ENTRIES:
            entries[base + address] = base + stub + _ENTRIES[name]
    if len(set(entries.values())) < len(_ENTRIES):
        raise ClockError("the vDSO lacks a clock function")
    return Image(base, len(image), entries, base + stub)


def _symbols(image: bytes, sections_at: int, section_bytes: int, count: int) -> list[tuple[str, int]]:
    """(name, address) of every symbol of the image."""
    sections = [struct.unpack_from("=2I4Q2I2Q", image, sections_at + i * section_bytes) for i in range(count)]
    found = []
    for _, kind, _, _, at, length, link, _, _, entry_bytes in sections:
        if kind != 11 or not entry_bytes:  # SHT_DYNSYM
            continue
        names_at = sections[link][4]
        for position in range(at, at + length, entry_bytes):
            name_at, _, _, _, address, _ = struct.unpack_from("=I2BH2Q", image, position)
            end = image.index(b"\0", names_at + name_at)
            found.append((image[names_at + name_at : end].decode("ascii", "replace"), address))
    return found


def _is_patched(pid: int, image: Image) -> bool:
    code = read_memory(pid, image.stub + _CODE, len(_STUB) - _CODE)
    return code in (_code(is_counted=True), _code(is_counted=False)) and all(
        read_memory(pid, entry, _JUMP_BYTES) == _jump(entry, to) for entry, to in image.entries.items()
    )


def _code(*, is_counted: bool) -> bytes:
    end = _COUNTING + len(_NO_COUNTING)
    return _STUB[_CODE:_COUNTING] + (_STUB[_COUNTING:end] if is_counted else _NO_COUNTING) + _STUB[end:]


def _count_of(pid: int, image: Image) -> int | None:
    """How often a patched process has read a wall clock since; None if it does not count. Raises OSError."""
    if read_memory(pid, image.stub + _COUNTING, len(_NO_COUNTING)) == _NO_COUNTING:
        return None
    return int(struct.unpack("=Q", read_memory(pid, image.stub + _COUNT, 8))[0])


def _jump(entry: int, to: int) -> bytes:
    return b"\xe9" + struct.pack("=i", to - entry - _JUMP_BYTES)


def read_offset_ns(pid: int, image: Image | None = None) -> int | None:
    """The offset of the process's clock functions, read from its memory; None if they are not patched. `image` is its
    vDSO if it has been located already. Raises ClockError, OSError."""
    image = image or locate(pid)
    return struct.unpack("=q", read_memory(pid, image.stub, 8))[0] if _is_patched(pid, image) else None


def patch(pid: int, image: Image) -> None:
    """Redirect the clock functions of a process to the stub, with an offset of zero. Raises ClockError, TracingError,
    OSError."""
    for _ in range(_SETTLE_ATTEMPTS):
        with Stopped(pid) as stopped:
            if any(entry < at < entry + _JUMP_BYTES for at in stopped.positions() for entry in image.entries):
                continue
            write_memory(pid, image.stub, _STUB)
            if not _make_writable(stopped, image, is_writable=True):
                write_memory(pid, image.stub + _CODE, _code(is_counted=False))
            for entry, to in image.entries.items():
                write_memory(pid, entry, _jump(entry, to))
            return
    raise ClockError("a thread of the program does not leave the clock function")


def restore(pid: int, image: Image) -> None:
    """Restore the original clock functions of a process, from this process, which has the same image unpatched. A
    thread that is inside a replacement continues there, with an offset of zero. Raises ClockError, OSError."""
    own_base = base_of(os.getpid())
    write_memory(pid, image.stub, struct.pack("=q", 0))
    with Stopped(pid) as stopped:
        for entry in image.entries:
            write_memory(pid, entry, read_memory(os.getpid(), own_base + entry - image.base, _JUMP_BYTES))
        # A thread may still be in a replacement, and would count.
        write_memory(pid, image.stub + _COUNTING, _NO_COUNTING)
        _make_writable(stopped, image, is_writable=False)


def _make_writable(stopped: Stopped, image: Image, *, is_writable: bool) -> bool:
    """Let the program write to its vDSO, or not. This covers the whole vDSO, because the kernel allows no other rights
    for a part of it. False if the kernel refuses. Raises OSError, ClockError."""
    rights = _PROT_READ | _PROT_EXEC | (_PROT_WRITE if is_writable else 0)
    return stopped.call(image.stub + _SYSCALL, _MPROTECT, image.base, image.length, rights) == 0


class ClockDriver:
    """Keeps the clocks of one program and its children as the control file says, until all of them have ended."""

    def __init__(self, control: Control, program: int) -> None:
        """`program` is the pid of its first process, which may not have executed it yet. Raises ClockError."""
        if platform.machine() != "x86_64":
            raise ClockError(f"clocks are skewed through the vDSO on x86-64 only, not on {platform.machine()}")
        self._control = control
        self._tree = ProcessTree(program)
        self._images: dict[int, Image] = {}
        self._counted: dict[int, int] = {}
        """process -> reads of its clock already added to the control file"""
        self._is_used = False
        self._generation = -1

    def serve(self) -> None:
        """Drive the clocks until the last process has ended."""
        while True:
            for pid in self._tree.look():
                self._images.pop(pid, None)
                self._counted.pop(pid, None)
            if not self._tree.processes:
                return
            slots, generation = self._control.wall_clock_slots()
            if slots and generation != self._generation:
                self._tree.look_everywhere()
            self._generation = generation
            if slots or self._is_used:
                self._apply(slots, generation)
                self._is_used = self._is_used or bool(slots)
            else:
                self._control.applied(generation, len(self._tree.processes), 0)
            time.sleep(_WATCH_S if slots else _IDLE_S)

    def _apply(self, slots: list[tuple[int, ...]], generation: int) -> None:
        reached = failed = 0
        for pid in list(self._tree.processes):
            try:
                self._set(pid, slots)
                reached += 1
            except (OSError, ClockError, TracingError) as error:
                if isinstance(error, OSError) and error.errno in (errno.ESRCH, errno.ENOENT, errno.EIO):
                    continue  # it has ended meanwhile
                failed += 1
        self._control.applied(generation, reached, failed)

    def _set(self, pid: int, slots: list[tuple[int, ...]]) -> None:
        image = self._images.get(pid)
        if image is None or base_of(pid) != image.base:
            image = self._images[pid] = locate(pid)
            self._counted.pop(pid, None)
        is_patched = _is_patched(pid, image)
        if is_patched:
            self._count(pid, image)
        if not slots:
            if is_patched:
                with self._control.tracing():
                    restore(pid, image)
                self._counted.pop(pid, None)
            return
        if not is_patched:
            with self._control.tracing():
                patch(pid, image)
            self._counted[pid] = 0
        offset_ns = sum(_slot_offset_ns(slot, time.time_ns()) for slot in slots)
        write_memory(pid, image.stub, struct.pack("=q", offset_ns))

    def _count(self, pid: int, image: Image) -> None:
        """Add the reads of a process's clock to the control file. A child starts with its parent's count."""
        count = _count_of(pid, image)
        if count is None:
            self._control.cannot_count_clock()
            return
        self._control.count_clock_reads(count - self._counted.get(pid, count))
        self._counted[pid] = count


def _slot_offset_ns(slot: tuple[int, ...], now_ns: int) -> int:
    """The offset that a skew adds to the wall clock at a true time, as in shim/clock.c."""
    offset_ns, rate_ppb, since_ns, strobe_ns, period_ns, _, step_ns = slot
    gained_ns = (now_ns - since_ns) * abs(rate_ppb) // 1_000_000_000
    if step_ns > 0:
        gained_ns %= step_ns
    total_ns = offset_ns + (gained_ns if rate_ppb > 0 else -gained_ns)
    if period_ns > 0 and (now_ns - since_ns) // (period_ns // 2 + 1) % 2:
        total_ns += strobe_ns
    return total_ns

"""The wall clock of a running program, moved in its own copy of the vDSO (`man 7 vdso`).

A program reads the clock by code that the kernel maps into it, not by a system call, so nothing outside sees it read.
But that code is the program's own copy: written to through /proc/PID/mem, it differs from then on in this process only.
`clock_gettime`, `gettimeofday` and `time` are given a jump to a few instructions behind the image's end, in the rest
of its last page. Those make the real system call and add a number of nanoseconds that lies beside them, to
the wall clocks only (CLOCK_REALTIME, its coarse twin, CLOCK_TAI). So a jump of the clock is one write of eight bytes.
Beside that number the readings of wall clocks are counted. For this the program itself must be able to write there: it
is made to ask the kernel for that (mprotect) while it stands still. Where that is refused nothing is counted.

This reaches static programs and Go as well as those with a C library; not programs that make the raw system call.

Nothing is patched before a fault asks for it, and what was there comes back when none does: the real system call costs
several times what the kernel's code does, and some programs read the clock at every turn. A child inherits its parent's
patched copy; a program that is executed has a new one. So the driver looks at all processes of the program every few
milliseconds while a fault is in force.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import signal
import struct
import time
from dataclasses import dataclass

from .control import Control

__all__ = ["ClockDriver", "ClockError", "Image", "locate", "read_offset_ns"]

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
"""Function of the image -> where its replacement begins in the stub."""

_COUNT, _CODE, _SYSCALL, _COUNTING = 0x08, 0x10, 0x15, 0x2A
"""Where the stub has its count, where its code begins, makes a system call, and counts."""
_NO_COUNTING = bytes.fromhex("0f1f840000000000")
"""An instruction as long as the one that counts, which does nothing: where the program may not write to the page."""

_MPROTECT = 10
_PROT_READ, _PROT_WRITE, _PROT_EXEC = 1, 2, 4
_MAX_STOPS = 100
"""Signals that may come to a thread before one system call of ours is done in it."""

_JUMP_BYTES = 5
_HELPERS = b"fault-"
"""How the names of the launcher's own processes begin."""

_WATCH_S = 0.005
"""How often processes are looked at while a clock fault is in force: a program that is executed meanwhile reads the
true time for that long, and a drift moves in steps of this."""
_IDLE_S = 0.05
"""How often the control file is looked at while no clock fault is."""
_SETTLE_ATTEMPTS = 50
"""How often a process is let go on because one of its threads stands in the bytes that are to change."""

_AT_SYSINFO_EHDR = 33
_PTRACE_SINGLESTEP, _PTRACE_GETREGS, _PTRACE_SETREGS, _PTRACE_DETACH = 9, 12, 13, 17
_PTRACE_SEIZE, _PTRACE_INTERRUPT = 0x4206, 0x4207
_WALL = 0x40000000
_RAX, _RDX, _RSI, _RDI, _ORIG_RAX, _RIP = 10, 12, 13, 14, 15, 16
_REGISTERS = 27
_TGKILL = 234


class ClockError(RuntimeError):
    """The clock of a program cannot be moved by its vDSO; the message says why."""


@dataclass(frozen=True, slots=True)
class Image:
    """Where a process has its vDSO: its first byte and length, the functions' entries, and room for the stub."""

    base: int
    length: int
    entries: dict[int, int]
    """address of a function's entry -> address of its replacement"""
    stub: int


def _read(pid: int, address: int, length: int) -> bytes:
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        return memory.read(length)


def _write(pid: int, address: int, data: bytes) -> None:
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        memory.seek(address)
        memory.write(data)


def _base_of(pid: int) -> int:
    """Where the vDSO of a process begins. Raises ClockError, OSError."""
    with open(f"/proc/{pid}/auxv", "rb") as file:
        vector = file.read()
    for kind, value in struct.iter_unpack("=2Q", vector[: len(vector) // 16 * 16]):
        if kind == _AT_SYSINFO_EHDR and value:
            return int(value)
    raise ClockError("the program has no vDSO")


def _extent_of(pid: int, base: int) -> int:
    with open(f"/proc/{pid}/maps", encoding="ascii", errors="replace") as maps:
        for line in maps:
            begin, _, end = line.split()[0].partition("-")
            if int(begin, 16) == base:
                return int(end, 16) - base
    raise ClockError("the program's vDSO is not mapped")


def locate(pid: int) -> Image:
    """The vDSO of a process. Raises ClockError where it is not as expected, OSError where the process may not be looked
    into or is gone."""
    base = _base_of(pid)
    image = _read(pid, base, _extent_of(pid, base))
    if image[:5] != b"\x7fELF\x02":
        raise ClockError("the program's vDSO is no 64-bit ELF image")
    sections_at, = struct.unpack_from("=Q", image, 40)
    section_bytes, section_count = struct.unpack_from("=2H", image, 58)
    end = sections_at + section_bytes * section_count
    stub = (end + 15) // 16 * 16
    if stub + len(_STUB) > len(image):
        raise ClockError("the vDSO has no room behind its end")
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
    code = _read(pid, image.stub + _CODE, len(_STUB) - _CODE)
    return code in (_code(is_counted=True), _code(is_counted=False)) and all(
        _read(pid, entry, _JUMP_BYTES) == _jump(entry, to) for entry, to in image.entries.items()
    )


def _code(*, is_counted: bool) -> bytes:
    end = _COUNTING + len(_NO_COUNTING)
    return _STUB[_CODE:_COUNTING] + (_STUB[_COUNTING:end] if is_counted else _NO_COUNTING) + _STUB[end:]


def _count_of(pid: int, image: Image) -> int | None:
    """How often a patched process has read a wall clock since; None where it does not count. Raises OSError."""
    if _read(pid, image.stub + _COUNTING, len(_NO_COUNTING)) == _NO_COUNTING:
        return None
    return int(struct.unpack("=Q", _read(pid, image.stub + _COUNT, 8))[0])


def _jump(entry: int, to: int) -> bytes:
    return b"\xe9" + struct.pack("=i", to - entry - _JUMP_BYTES)


def read_offset_ns(pid: int, image: Image | None = None) -> int | None:
    """By how much the process's clock functions are moved, from its own memory; None where they are the kernel's own.
    `image` is its vDSO, where that was located. Raises ClockError, OSError."""
    image = image or locate(pid)
    return struct.unpack("=q", _read(pid, image.stub, 8))[0] if _is_patched(pid, image) else None


class _Stopped:
    """A process all of whose threads stand still, by ptrace, while the context lasts."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._threads: list[int] = []
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.ptrace.argtypes = [ctypes.c_ulong, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
        self._libc.ptrace.restype = ctypes.c_long

    def _trace(self, request: int, thread: int, data: int | None = None) -> None:
        if self._libc.ptrace(request, thread, None, data) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"the program may not be traced: {os.strerror(code)}")

    def __enter__(self) -> _Stopped:
        try:
            while new := [each for each in self._listed() if each not in self._threads]:
                for thread in new:
                    self._stop(thread)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _listed(self) -> list[int]:
        return [int(name) for name in os.listdir(f"/proc/{self._pid}/task")]

    def _stop(self, thread: int) -> None:
        try:
            self._trace(_PTRACE_SEIZE, thread)
            self._threads.append(thread)
            self._trace(_PTRACE_INTERRUPT, thread)
            os.waitpid(thread, _WALL)
        except ProcessLookupError:
            if thread == self._pid:
                raise
        except ChildProcessError:
            self._threads.remove(thread)

    def positions(self) -> list[int]:
        """The address at which each thread stands."""
        found = []
        for thread in self._threads:
            registers = (ctypes.c_uint64 * _REGISTERS)()
            with contextlib.suppress(ProcessLookupError):
                self._trace(_PTRACE_GETREGS, thread, ctypes.addressof(registers))
                found.append(registers[_RIP])
        return found

    def call(self, instruction: int, number: int, *arguments: int) -> int:
        """Have the program's first thread make a system call by the instruction at an address, and go on as if it had
        not. Returns the call's result. Raises OSError, ClockError."""
        thread = self._threads[0]
        saved, changed = (ctypes.c_uint64 * _REGISTERS)(), (ctypes.c_uint64 * _REGISTERS)()
        self._trace(_PTRACE_GETREGS, thread, ctypes.addressof(saved))
        ctypes.memmove(changed, saved, ctypes.sizeof(saved))
        changed[_RAX], changed[_RIP] = number, instruction
        changed[_ORIG_RAX] = 2**64 - 1  # else the kernel would begin the call anew from which the thread was taken
        for register, value in zip((_RDI, _RSI, _RDX), arguments, strict=True):
            changed[register] = value
        self._trace(_PTRACE_SETREGS, thread, ctypes.addressof(changed))
        signals: list[int] = []
        try:
            self._step(thread, signals)
            self._trace(_PTRACE_GETREGS, thread, ctypes.addressof(changed))
        finally:
            self._trace(_PTRACE_SETREGS, thread, ctypes.addressof(saved))
            for number_of_signal in signals:
                self._libc.syscall(_TGKILL, self._pid, thread, number_of_signal)
        return ctypes.c_int64(changed[_RAX]).value

    def _step(self, thread: int, signals: list[int]) -> None:
        """One instruction of a thread; notes the signals that came in its place."""
        for _ in range(_MAX_STOPS):
            self._trace(_PTRACE_SINGLESTEP, thread)
            _, status = os.waitpid(thread, _WALL)
            if not os.WIFSTOPPED(status):
                raise ProcessLookupError(errno.ESRCH, "the program has ended")
            if status >> 16:
                continue  # stopped anew, for a reason of ptrace's own
            if os.WSTOPSIG(status) == signal.SIGTRAP:
                return
            signals.append(os.WSTOPSIG(status))
        raise ClockError("a thread of the program is sent one signal after the other")

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            with contextlib.suppress(OSError):
                self._trace(_PTRACE_DETACH, thread)


def patch(pid: int, image: Image) -> None:
    """Give the clock functions of a process their jumps, with an offset of nothing. Raises ClockError, OSError."""
    for _ in range(_SETTLE_ATTEMPTS):
        with _Stopped(pid) as stopped:
            if any(entry < at < entry + _JUMP_BYTES for at in stopped.positions() for entry in image.entries):
                continue
            _write(pid, image.stub, _STUB)
            if not _make_writable(stopped, image, is_writable=True):
                _write(pid, image.stub + _CODE, _code(is_counted=False))
            for entry, to in image.entries.items():
                _write(pid, entry, _jump(entry, to))
            return
    raise ClockError("a thread of the program does not leave the clock function")


def restore(pid: int, image: Image) -> None:
    """Give the clock functions of a process back what the kernel had there; a thread that is in the replacement goes
    on in it, with an offset of nothing. This process has the same image, and nobody has patched it. Raises ClockError,
    OSError."""
    own_base = _base_of(os.getpid())
    _write(pid, image.stub, struct.pack("=q", 0))
    with _Stopped(pid) as stopped:
        for entry in image.entries:
            _write(pid, entry, _read(os.getpid(), own_base + entry - image.base, _JUMP_BYTES))
        # A thread may still be in the replacement, and count.
        _write(pid, image.stub + _COUNTING, _NO_COUNTING)
        _make_writable(stopped, image, is_writable=False)


def _make_writable(stopped: _Stopped, image: Image, *, is_writable: bool) -> bool:
    """Let the program write to its vDSO, or not; the kernel suffers no other rights for a part of it. False where it
    refuses. Raises OSError, ClockError."""
    rights = _PROT_READ | _PROT_EXEC | (_PROT_WRITE if is_writable else 0)
    return stopped.call(image.stub + _SYSCALL, _MPROTECT, image.base, image.length, rights) == 0


class ClockDriver:
    """Keeps the clocks of one program and its children as the control file says, until all of them have ended."""

    def __init__(self, control: Control, program: int) -> None:
        """`program` is the number of its first process, which may be about to execute it. Raises ClockError."""
        if platform.machine() != "x86_64":
            raise ClockError(f"clocks are moved by the vDSO on x86-64 only, not on {platform.machine()}")
        self._control = control
        self._processes = {program: _start_of(program)}
        self._program = program
        self._images: dict[int, Image] = {}
        self._counted: dict[int, int] = {}
        """process -> readings of its clock that the control file has"""
        self._is_used = False

    def serve(self) -> None:
        """Until the last process has ended."""
        while True:
            self._look_for_children()
            if not self._processes:
                return
            slots, generation = self._control.wall_clock_slots()
            if slots or self._is_used:
                self._apply(slots, generation)
                self._is_used = self._is_used or bool(slots)
            else:
                self._control.applied(generation, len(self._processes), 0)
            time.sleep(_WATCH_S if slots else _IDLE_S)

    def _look_for_children(self) -> None:
        for pid, start in list(self._processes.items()):
            try:
                if _start_of(pid) != start or (pid != self._program and _is_helper(pid)):
                    raise ProcessLookupError
                threads = os.listdir(f"/proc/{pid}/task")
            except OSError:
                self._processes.pop(pid)
                self._images.pop(pid, None)
                self._counted.pop(pid, None)
                continue
            for thread in threads:
                with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                    for child in map(int, file.read().split()):
                        if child not in self._processes and not _is_helper(child):
                            self._processes[child] = _start_of(child)

    def _apply(self, slots: list[tuple[int, ...]], generation: int) -> None:
        reached = failed = 0
        for pid in list(self._processes):
            try:
                self._set(pid, slots)
                reached += 1
            except (OSError, ClockError) as error:
                if isinstance(error, OSError) and error.errno in (errno.ESRCH, errno.ENOENT, errno.EIO):
                    continue  # it has ended meanwhile
                failed += 1
        self._control.applied(generation, reached, failed)

    def _set(self, pid: int, slots: list[tuple[int, ...]]) -> None:
        image = self._images.get(pid)
        if image is None or _base_of(pid) != image.base:
            image = self._images[pid] = locate(pid)
            self._counted.pop(pid, None)
        is_patched = _is_patched(pid, image)
        if is_patched:
            self._count(pid, image)
        if not slots:
            if is_patched:
                restore(pid, image)
                self._counted.pop(pid, None)
            return
        if not is_patched:
            patch(pid, image)
            self._counted[pid] = 0
        offset_ns = sum(_slot_offset_ns(slot, time.time_ns()) for slot in slots)
        _write(pid, image.stub, struct.pack("=q", offset_ns))


    def _count(self, pid: int, image: Image) -> None:
        """Bring the readings of a process to the control file. A child begins with its parent's count."""
        count = _count_of(pid, image)
        if count is None:
            self._control.cannot_count_clock()
            return
        self._control.count_clock_reads(count - self._counted.get(pid, count))
        self._counted[pid] = count


def _slot_offset_ns(slot: tuple[int, ...], now_ns: int) -> int:
    """What a skew adds to the wall clock at a true time, as shim/clock.c has it."""
    offset_ns, rate_ppb, since_ns, strobe_ns, period_ns, _, step_ns = slot
    gained_ns = (now_ns - since_ns) * abs(rate_ppb) // 1_000_000_000
    if step_ns > 0:
        gained_ns %= step_ns
    total_ns = offset_ns + (gained_ns if rate_ppb > 0 else -gained_ns)
    if period_ns > 0 and (now_ns - since_ns) // (period_ns // 2 + 1) % 2:
        total_ns += strobe_ns
    return total_ns


def _is_helper(pid: int) -> bool:
    """Whether a process is one of the launcher's own, which are the program's children for a moment: who watches one
    of them waits for what waits for itself. Raises ProcessLookupError when it is gone."""
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            return file.read().startswith(_HELPERS)
    except OSError:
        raise ProcessLookupError(errno.ESRCH, "gone") from None


def _start_of(pid: int) -> int:
    """The start time of a process, which tells it from a later one of the same number. Raises ProcessLookupError when
    it is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except FileNotFoundError:
        raise ProcessLookupError(errno.ESRCH, "gone") from None
    if fields[0] in (b"Z", b"X"):
        raise ProcessLookupError(errno.ESRCH, "a zombie")
    return int(fields[19])

"""Lets reported calls continue in a few machine instructions when no fault or account is in force.

A filter stays until its process ends, so calls are still reported after a fault was healed. Answering them costs more
in Python than in the kernel: a supervisor that wakes up beside a busy program finds nothing of the interpreter in the
processor's caches, and takes 60 to 90 us of processor time per call. These instructions wait, receive and answer in
some 300 bytes. They return to Python for everything else: a call listed as left out, new settings in the control file,
a listener whose processes have all ended, a wake-up by another thread.

On processors other than x86-64, or if memory may not be made executable, Python waits and answers itself.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import struct
from collections.abc import Collection, Sequence

from .filter import Listener

__all__ = ["Passing"]

_CODE = bytes.fromhex(
    "535541544889fb488b3b488b73088b5330b8070000000f0585c00f88d0000000"
    "7512488b4318488b00483b432074d8e9bc00000031ed488b030fb74ce80685c9"
    "0f848d00000083f9010f85a1000000483b6b100f8397000000448b24e8488d7b"
    "4831c0b90a000000f348ab4489e7be002150c0488d5348b8100000000f0585c0"
    "756e488b4b48488b4328488b04e8488908488b4318488b00483b432075478b43"
    "583d00020000733d480fa383b0000000723348898b980000004489e7be012118"
    "c0488d9398000000b8100000000f0548ff433848ffc5483b6b080f8256ffffff"
    "e922ffffff48896b40b801000000eb0231c0415c5d5bc3"
)
"""x86-64, a function of the address of `_STATE`, which returns 1 with a report that Python has to answer, or 0:

            push rbx; push rbp; push r12; mov rbx,rdi
    wait:   poll([rbx], [rbx+8], [rbx+0x30]): mov eax,7; syscall; test eax,eax; js back; jnz some
            mov rax,[rbx+0x18]; mov rax,[rax]; cmp rax,[rbx+0x20]; je wait; jmp back
    some:   xor ebp,ebp
    look:   mov rax,[rbx]; movzx ecx,word [rax+rbp*8+6]; test ecx,ecx; jz next; cmp ecx,POLLIN; jne back
            cmp rbp,[rbx+0x10]; jae back; mov r12d,[rax+rbp*8]
            lea rdi,[rbx+0x48]; xor eax,eax; mov ecx,10; rep stosq
            ioctl(r12d, SECCOMP_IOCTL_NOTIF_RECV, rbx+0x48): mov eax,16; syscall; test eax,eax; jnz back
            mov rcx,[rbx+0x48]; mov rax,[rbx+0x28]; mov rax,[rax+rbp*8]; mov [rax],rcx
            mov rax,[rbx+0x18]; mov rax,[rax]; cmp rax,[rbx+0x20]; jne mine
            mov eax,[rbx+0x58]; cmp eax,512; jae mine; bt [rbx+0xb0],rax; jc mine
            mov [rbx+0x98],rcx; ioctl(r12d, SECCOMP_IOCTL_NOTIF_SEND, rbx+0x98); inc qword [rbx+0x38]
    next:   inc rbp; cmp rbp,[rbx+8]; jb look; jmp wait
    mine:   mov [rbx+0x40],rbp; mov eax,1; jmp end
    back:   xor eax,eax
    end:    pop r12; pop rbp; pop rbx; ret

An error of the last ioctl means that the call was abandoned. Errors of the first ioctl are left to Python, which gets
them again if they persist.
"""

_STATE = struct.Struct("=3Q 2Q Q i4x 2Q 80s QqiI 64s")
"""The address of the poll array; its length, and how many of its entries are listeners; the address of the settings'
generation and the generation expected there; the address of the array of addresses at which each listener's newest call
is noted; the timeout in milliseconds; how many calls were let go on; the index of the report's listener; the report
(struct seccomp_notif); the answer (struct seccomp_notif_resp); a bitmap of the calls that are left to Python."""
_SETTINGS, _SETTINGS_AT = struct.Struct("=2Q"), 0x18
_COUNT_AT, _WHOSE_AT, _REPORT_AT, _REPORT_BYTES = 0x38, 0x40, 0x48, 80
_CALLS = 512
"""Higher call numbers are left to Python: the kernel has none yet."""
_POLLED = struct.Struct("=ihh")
_POLLIN = 1
_ADDRESS = struct.Struct("=Q")
_CONTINUE = 1
_PROT_READ, _PROT_EXEC = 1, 4


def _address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class Passing:
    """The machine code with its state for one program. `left_out` are the numbers of system calls that Python must
    answer."""

    def __init__(self, left_out: Collection[int] = ()) -> None:
        """Raises OSError if this processor or system does not support it."""
        if platform.machine() != "x86_64":
            raise OSError(f"no instructions for {platform.machine()}")
        self._left_out = sum(1 << number for number in left_out if number < _CALLS).to_bytes(_CALLS // 8, "little")
        self._code = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._code[: len(_CODE)] = _CODE
        address = _address_of(self._code)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE), _PROT_READ | _PROT_EXEC):
            raise OSError(ctypes.get_errno(), "memory cannot be made executable")
        self._run = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(address)
        self._memory: mmap.mmap | None = None

    def watch(
        self, listeners: Sequence[Listener], notes: Sequence[int], others: Sequence[int], timeout_s: float | None
    ) -> None:
        """Set the listeners to wait for, the address in `notes` at which each one's newest call is noted, and the
        `others`, descriptors whose readability ends the wait. New settings are noticed within `timeout_s` seconds."""
        polled = b"".join(_POLLED.pack(number, _POLLIN, 0) for number in [*(e.descriptor for e in listeners), *others])
        noted = b"".join(map(_ADDRESS.pack, notes))
        size = _STATE.size + len(polled) + len(noted)
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        base = _address_of(self._memory)
        timeout_ms = -1 if timeout_s is None else round(timeout_s * 1000)
        state = _STATE.pack(
            base + _STATE.size, len(listeners) + len(others), len(listeners), 0, 0, base + _STATE.size + len(polled),
            timeout_ms, 0, 0, bytes(_REPORT_BYTES), 0, 0, 0, _CONTINUE, self._left_out,
        )  # fmt: skip
        self._memory[:] = state + polled + noted

    def serve(self, generation_address: int, generation: int) -> tuple[int, bytearray] | None:
        """Let calls go on while the settings' generation at that address is `generation`. Returns (listener's index,
        report) of a call that was received and not answered, or None if there is something else to do."""
        memory = self._memory
        assert memory is not None
        _SETTINGS.pack_into(memory, _SETTINGS_AT, generation_address, generation)
        if not self._run(_address_of(memory)):
            return None
        return _ADDRESS.unpack_from(memory, _WHOSE_AT)[0], bytearray(memory[_REPORT_AT : _REPORT_AT + _REPORT_BYTES])

    @property
    def count(self) -> int:
        """Calls that were let go on since `watch`."""
        return 0 if self._memory is None else int(_ADDRESS.unpack_from(self._memory, _COUNT_AT)[0])

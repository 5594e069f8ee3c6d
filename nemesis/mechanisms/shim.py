"""The shim: a small library, preloaded into the replicas, that can skew their clocks and impair their disks.

It is written in C (see the directory `shim` beside this file). A wheel includes builds for x86-64 and aarch64;
elsewhere the machine's own compiler builds it when a run first needs it. It is loaded by LD_PRELOAD. Each host has a
control file; the harness writes the host's faults there, and the shim in every process of the host sees them at once.
It needs no privileges and no kernel module, works for ordinary users, and reaches every program that calls the C
library: Python, Java, most databases. It does not reach programs that make system calls themselves, as Go's do; these
need the launcher (launcher_archive.py). So every proof checks that the replica has mapped the shim, and its counters.

This module finds or builds the shim, and packs the control file, whose layout is that of shim/control.h.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nemesis.mechanisms.launcher.control import CONTROL_BYTES
from nemesis.target import MONOTONIC_PPM, ClockSkew, DiskFault

__all__ = [
    "CLOCK_SLOTS",
    "COMPILERS",
    "CONTROL_BYTES",
    "PREBUILT_MACHINES",
    "TRIAL_SCRIPT",
    "WATCHED_KINDS",
    "Counters",
    "HostFaults",
    "ShimError",
    "build_command",
    "build_shim",
    "can_be_preloaded",
    "cross_build_arguments",
    "library_directories",
    "library_directory",
    "parse_counters",
    "place_library",
    "prebuilt_name",
    "prebuilt_shim",
    "shim_environment",
    "shim_sources",
    "trial_control",
    "trial_problem",
    "why_no_shim",
]

_DIRECTORY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "shim")
_SOURCES = ("control.c", "calls.c", "clock.c", "waits.c", "disk.c", "undo.c")
COMPILERS = ("cc", "gcc", "clang")
"""Compilers that can build the shim; the first one found is used."""
_FLAGS = ("-std=gnu11", "-O2", "-shared", "-fPIC")
_TEMP_PREFIX = "splitbrain-shim-"
_LIBRARY_NAME = "shim.so"
PREBUILT_MACHINES = ("x86_64", "aarch64")
"""Machines for which the shim is prebuilt, by their `uname -m` names."""
_PREBUILT_GLIBC = "2.17"
"""The oldest glibc that a prebuilt shim runs with, released in 2012. Newer versions keep the symbols that it uses."""
_BUILD_TIMEOUT_S = 60.0
_TRIAL_TIMEOUT_S = 20.0

_MAGIC = 0x3154554146425053
_COUNTERS_OFFSET = 2048
CLOCK_SLOTS = 16
"""Clock slots of one host. One is reserved for what monotonic clocks have gained from earlier faults."""

_HEAD = struct.Struct("=10QqQqQ")
_SLOT = struct.Struct("=7q")
_COUNTERS = struct.Struct("=5Q")


class ShimError(RuntimeError):
    """The shim cannot be built or does not work here. The message is one line that names the fix."""


def shim_sources() -> dict[str, bytes]:
    """The shim's source files by name, for hosts where this machine's build does not load."""
    files = (name for name in sorted(os.listdir(_DIRECTORY)) if name.endswith((".c", ".h")))
    return {name: Path(_DIRECTORY, name).read_bytes() for name in files}


def build_command(compiler: str, directory: str, output: str) -> list[str]:
    """The command that builds the shim from the sources in `directory` into the file `output`."""
    return [compiler, *_FLAGS, "-o", output, *(os.path.join(directory, name) for name in _SOURCES), "-ldl"]


def cross_build_arguments(machine: str, output: str) -> list[str]:
    """Arguments for `zig` that build the shim for one of PREBUILT_MACHINES into the file `output`."""
    target = f"{machine}-linux-gnu.{_PREBUILT_GLIBC}"
    return [*build_command("cc", _DIRECTORY, output), "-target", target, "-fno-sanitize=all", "-s"]


@functools.cache
def _source_digest() -> str:
    digest = hashlib.sha256(repr(_FLAGS).encode())
    for name, content in shim_sources().items():
        digest.update(b"%s %d\n%s" % (name.encode(), len(content), content))
    return digest.hexdigest()[:16]


def prebuilt_name(machine: str) -> str:
    """The file name of a prebuilt shim for one machine, built from exactly these sources."""
    return f"shim-{machine}-{_source_digest()}.so"


def prebuilt_shim(machine: str) -> bytes | None:
    """The prebuilt shim for a machine with the GNU C library; None if there is none."""
    try:
        return Path(_DIRECTORY, "built", prebuilt_name(machine)).read_bytes()
    except FileNotFoundError:
        return None


def _has_glibc() -> bool:
    try:
        return bool(os.confstr("CS_GNU_LIBC_VERSION"))
    except (AttributeError, OSError, ValueError):
        return False


@functools.cache
def build_shim() -> bytes:
    """The shim as a shared library: prebuilt, or built now, once per process. Raises ShimError."""
    for directory in library_directories()[:1]:
        _remove_left_behind(directory)
    library = prebuilt_shim(os.uname().machine) if _has_glibc() else None
    if library is not None:
        return library
    compiler = next((path for name in COMPILERS if (path := shutil.which(name)) is not None), None)
    if compiler is None:
        raise ShimError(
            "there is no C compiler for the clock and disk shim (apt-get install gcc libc6-dev; without root, in a "
            "checkout: make shim)"
        )
    parent = library_directory()
    with tempfile.TemporaryDirectory(prefix=f"{_TEMP_PREFIX}{os.getpid()}-", dir=parent) as directory:
        output = os.path.join(directory, "shim.so")
        argv = build_command(compiler, _DIRECTORY, output)
        environment = {**os.environ, "TMPDIR": directory}  # a compiler that is killed leaves its files
        try:
            built = subprocess.run(argv, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S, env=environment)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ShimError(f"the clock and disk shim cannot be built: {error}") from None
        if built.returncode != 0:
            said = next((line for line in built.stderr.splitlines() if "error" in line), built.stderr[:200])
            raise ShimError(f"{compiler} cannot build the clock and disk shim (apt-get install libc6-dev): {said}")
        with open(output, "rb") as file:
            return file.read()


@functools.cache
def why_no_shim() -> str | None:
    """None when the shim can be built here and skews the clock of a Python; otherwise why not, in one line."""
    if not sys.platform.startswith("linux"):
        return "the clock and disk shim is for Linux"
    try:
        library, parent = build_shim(), library_directory()
    except ShimError as error:
        return str(error)
    with tempfile.TemporaryDirectory(prefix=f"{_TEMP_PREFIX}{os.getpid()}-", dir=parent) as directory:
        library_path = os.path.join(directory, _LIBRARY_NAME)
        with open(library_path, "wb") as file:
            file.write(library)
        return _try_library(library_path)


def can_be_preloaded(path: str) -> bool:
    """Whether LD_PRELOAD can name `path`: the loader splits at blanks and colons, ignores quotes, and expands `$`."""
    return os.path.isabs(path) and not any(character in ":$" or character.isspace() for character in path)


def library_directories() -> list[str]:
    """Directories of this machine that can hold the library temporarily, the best first: this process may write there,
    LD_PRELOAD can name them, and code may be mapped from them."""
    found = []
    for name in (os.environ.get("TMPDIR", ""), "/tmp", "/var/tmp", "/dev/shm"):
        path = os.path.realpath(name) if os.path.isabs(name) else ""
        if not can_be_preloaded(path) or path in found or not os.access(path, os.W_OK | os.X_OK):
            continue
        if not os.statvfs(path).f_flag & os.ST_NOEXEC:
            found.append(path)
    return found


def library_directory() -> str:
    """The best of `library_directories`. Raises ShimError when there is none."""
    directories = library_directories()
    if not directories:
        raise ShimError(
            "there is no directory for the clock and disk shim: none of $TMPDIR, /tmp, /var/tmp and /dev/shm is "
            "writable, lets code be mapped, and has no blank, colon or $ in its path (set TMPDIR to such a one)"
        )
    return directories[0]


def place_library(directory: str) -> str:
    """Create `directory`, put the library there, and check that it takes effect in a Python. Returns its path.

    If it does not, the directory is removed again. Raises ShimError, OSError.
    """
    library = build_shim()
    os.mkdir(directory)
    try:
        library_path = os.path.join(directory, _LIBRARY_NAME)
        with open(library_path, "wb") as file:
            file.write(library)
        problem = _try_library(library_path)
        if problem is not None:
            raise ShimError(problem)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return library_path


def _try_library(library_path: str) -> str | None:
    """None when the library takes effect in this machine's Python; otherwise why not, in one line."""
    directory = os.path.dirname(library_path)
    control_path = os.path.join(directory, "trial.control")
    with open(control_path, "wb") as file:
        file.write(trial_control())
    before_s = time.time()
    try:
        tried = subprocess.run(
            [sys.executable, "-I", "-S", "-c", TRIAL_SCRIPT],
            capture_output=True,
            text=True,
            timeout=_TRIAL_TIMEOUT_S,
            env={**os.environ, **shim_environment(library_path, control_path, directory)},
        )
    except subprocess.TimeoutExpired:
        return f"{sys.executable} does not run under the clock and disk shim: no answer within {_TRIAL_TIMEOUT_S:g} s"
    finally:
        os.unlink(control_path)
    return trial_problem(sys.executable, tried.stdout, tried.stderr, true_s=before_s)


TRIAL_SCRIPT = "import time; print(time.time())"
"""Run by a Python under the shim and `trial_control`, this shows whether the shim takes effect."""


def trial_control() -> bytes:
    """A control file that sets the wall clock back by an hour."""
    faults = HostFaults()
    faults.add_skew("trial", ClockSkew(offset_ms=-3_600_000), wall_ns=0, monotonic_ns=0)
    return faults.pack().ljust(CONTROL_BYTES, b"\0")


def trial_problem(python: str, output: str, errors: str, *, true_s: float) -> str | None:
    """None if the trial's output shows the shim's effect on `python`, at or soon after `true_s`; else the problem."""
    try:
        seen_s = float(output)
    except ValueError:
        return f"the clock and disk shim does not load into {python}: {' '.join(errors.split())[:200]}"
    # A loader that cannot load the shim prints an error and continues without it.
    if not -3700 < seen_s - true_s < -3500:
        said = f": {' '.join(errors.split())[:200]}" if errors.strip() else " (is it statically linked?)"
        return f"the clock and disk shim does not reach {python}{said}"
    return None


def _remove_left_behind(root: str) -> None:
    """Remove from `root` what processes of this user left behind that were killed during a build or a trial."""
    for name in os.listdir(root):
        owner, _, _ = name.removeprefix(_TEMP_PREFIX).partition("-")
        if not name.startswith(_TEMP_PREFIX) or not owner.isdigit() or os.path.exists(f"/proc/{owner}"):
            continue
        path = os.path.join(root, name)
        try:
            if os.lstat(path).st_uid == os.geteuid():
                shutil.rmtree(path)
        except OSError:
            continue  # another process is removing it, too


def shim_environment(
    library_path: str,
    control_path: str,
    root: str,
    *,
    undo_path: str | None = None,
    preloaded: str | None = None,
    program: int = 0,
) -> dict[str, str]:
    """Environment variables that put a program under the faults of a control file, for files under `root`. With
    `undo_path`, a directory on the same file system, unsynced changes can be undone. `preloaded` is the program's
    LD_PRELOAD without the shim. What the program does is counted under the number `program`, unless that is 0."""
    added = {
        "LD_PRELOAD": library_path if not preloaded else f"{library_path}:{preloaded}",
        "SPLITBRAIN_FAULTS": control_path,
        "SPLITBRAIN_FAULTS_ROOT": root,
    }
    if undo_path is not None:
        added["SPLITBRAIN_FAULTS_UNDO"] = undo_path
    if program:
        added["SPLITBRAIN_FAULTS_PROGRAM"] = str(program)
    return added


@dataclass(frozen=True, slots=True)
class Counters:
    """How often the processes of a host met its disk faults."""

    held: int
    delayed: int
    refused: int
    failed: int
    undo_overflow: int


def parse_counters(control: bytes) -> Counters:
    """The counters in the bytes of a control file."""
    return Counters(*_COUNTERS.unpack_from(control, _COUNTERS_OFFSET))


@dataclass(frozen=True, slots=True)
class _Slot:
    skew: ClockSkew
    since_ns: int


@dataclass(slots=True)
class HostFaults:
    """The faults of one host: the content of its control file. Faults are distinguished by their id."""

    _generation: int = 0
    _skews: dict[str, _Slot] = field(default_factory=dict)
    _disk: dict[str, DiskFault] = field(default_factory=dict)
    _flipped: dict[str, tuple[int, int]] = field(default_factory=dict)
    _accounts: set[str] = field(default_factory=set)
    _monotonic_gained_ns: int = 0

    def add_skew(self, fault_id: str, skew: ClockSkew, *, wall_ns: int, monotonic_ns: int, margin_ns: int = 0) -> None:
        """Skew the clock from now on; the times are the host's true ones. `margin_ns` bounds the delay until the change
        takes effect: a monotonic clock is slowed down only from then on, otherwise it would go back. Raises ShimError
        for too many."""
        if fault_id not in self._skews and len(self._skews) >= CLOCK_SLOTS - 1:
            raise ShimError(f"{CLOCK_SLOTS - 1} clock faults are in force on one host already")
        if skew.affects_monotonic and (skew.offset_ms or skew.strobe_ms or skew.step_ms):
            raise ValueError("a monotonic clock can be skewed by its rate only: it must not go back")
        if skew.rate_ppm <= -1_000_000:
            raise ValueError(f"a clock cannot stand still or run backwards: {skew.rate_ppm} ppm")
        others = [slot.skew for name, slot in self._skews.items() if name != fault_id]
        # Check the sum of slow rates and the sum of fast rates separately, because either may be healed first.
        for sign, bound_ppm in zip((-1, 1), MONOTONIC_PPM, strict=True):
            rates_ppm = [each.rate_ppm for each in (skew, *others) if each.affects_monotonic]
            sum_ppm = sum(rate_ppm for rate_ppm in rates_ppm if sign * rate_ppm > 0)
            if sign * sum_ppm > sign * bound_ppm:
                said = f"{sum_ppm:+} ppm by all faults that make it {'faster' if sign > 0 else 'slower'}"
                raise ValueError(f"a monotonic clock runs at most {bound_ppm:+} ppm wrong, not {said}")
        behind_ns = margin_ns if skew.rate_ppm < 0 else 0
        self._skews[fault_id] = _Slot(skew, monotonic_ns + behind_ns if skew.affects_monotonic else wall_ns)

    def remove_skew(self, fault_id: str, *, monotonic_ns: int, margin_ns: int = 0) -> None:
        """Remove a skew. A monotonic clock keeps what it has gained or lost. `margin_ns` bounds the delay until the
        change takes effect; a fast clock is credited for it, so that it does not go back."""
        slot = self._skews.pop(fault_id, None)
        if slot is not None and slot.skew.affects_monotonic:
            ahead_ns = margin_ns if slot.skew.rate_ppm > 0 else 0
            run_ns = max(0, monotonic_ns + ahead_ns - slot.since_ns)
            self._monotonic_gained_ns += run_ns * slot.skew.rate_ppm // 1_000_000

    def add_disk_fault(self, fault_id: str, fault: DiskFault) -> None:
        """Impair the disk. Raises ValueError for a kind that the shim does not know."""
        if fault.kind not in (*_DISK_FLAGS, "slow", *WATCHED_KINDS):
            raise ValueError(f"the shim has no disk fault {fault.kind!r}")
        self._disk[fault_id] = fault

    def remove_disk_fault(self, fault_id: str) -> None:
        """Remove a disk fault, a watched bit flip or an account. Does nothing if there is none."""
        self._disk.pop(fault_id, None)
        self._accounts.discard(fault_id)
        self._flipped.pop(fault_id, None)

    def watch_flipped(self, fault_id: str, *, inode: int, offset: int) -> None:
        """Count reads of the byte with a flipped bit; of several such bytes, only the last one."""
        self._flipped[fault_id] = (inode, offset)

    def keep_account(self, fault_id: str) -> None:
        """Start logging unsynced changes, for programs whose changes have not been logged since their start."""
        self._accounts.add(fault_id)

    @property
    def fault_ids(self) -> frozenset[str]:
        """Every fault in force on this host."""
        return frozenset({*self._skews, *self._disk, *self._flipped, *self._accounts})

    @property
    def wants_traps(self) -> bool:
        """Whether programs' calls have to be reported, for a disk fault or an account."""
        return bool(self._disk or self._accounts)

    @property
    def generation(self) -> int:
        """The generation that `pack` returned last."""
        return self._generation

    def pack(self) -> bytes:
        """The first part of the control file, as a new generation."""
        self._generation += 1
        kinds = {fault.kind for fault in self._disk.values()}
        flags = [int(kind in kinds) for kind in _DISK_FLAGS]
        delay_ns = sum(fault.delay_ms for fault in self._disk.values() if fault.kind == "slow") * 1_000_000
        slots = [_pack_slot(slot) for slot in self._skews.values()]
        if self._monotonic_gained_ns:
            slots.append(_SLOT.pack(self._monotonic_gained_ns, 0, 0, 0, 0, 1, 0))
        flipped = [*self._flipped.values(), (0, 0)][max(0, len(self._flipped) - 1)]
        has_disk = int(bool(self._disk or self._flipped))
        head = _HEAD.pack(
            _MAGIC, self._generation, int(bool(slots)), has_disk, *flags, delay_ns, *flipped, int(bool(self._accounts))
        )
        body = b"".join(slots).ljust(CLOCK_SLOTS * _SLOT.size, b"\0")
        return head + body + struct.pack("=Q", self._generation)


WATCHED_KINDS: Sequence[str] = ("fill", "shutdown")
"""Disk faults injected outside the shim; while one is in force the shim counts what the disk itself refuses."""

_DISK_FLAGS: Sequence[str] = ("stall-fsync", "stall", "full", "error-write", "error-fsync", "error-read")
"""In the order of the fields of `struct settings`."""


def _pack_slot(slot: _Slot) -> bytes:
    skew = slot.skew
    return _SLOT.pack(
        skew.offset_ms * 1_000_000,
        skew.rate_ppm * 1000,
        slot.since_ns,
        skew.strobe_ms * 1_000_000,
        skew.strobe_period_ms * 1_000_000,
        int(skew.affects_monotonic),
        skew.step_ms * 1_000_000,
    )

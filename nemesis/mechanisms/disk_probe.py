"""The disk probe: a short program that writes, syncs and reads a file beside a replica's data, as the replica would.

It is sent to the host as the standard input of a Python there, so it needs nothing installed. It prints when each step
begins and how it ended; a step that never ends has only the first of these lines.
"""

from __future__ import annotations

from nemesis.target import DiskProbe, DiskStep

__all__ = ["PROBE_SCRIPT", "parse_probe"]

PROBE_SCRIPT = """
import ctypes, errno, os, sys, time
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: on a stalled disk that nobody heals it would wait for ever
path = os.path.join(sys.argv[1], ".splitbrain-probe-%d" % os.getpid())
made = []
def step(name, work):
    print(name, "begin", flush=True)
    begin = time.perf_counter()
    try:
        work()
    except OSError as error:
        print(name, errno.errorcode.get(error.errno, str(error.errno)), time.perf_counter() - begin, flush=True)
    else:
        print(name, "ok", time.perf_counter() - begin, flush=True)
def write():
    made.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    os.pwrite(made[0], b"probe" * 800, 0)
def sync():
    os.fsync(made[0] if made else os.open(sys.argv[1], os.O_RDONLY))
def read():
    os.pread(made[0], 4000, 0) if made else os.listdir(sys.argv[1])
step("write", write)
step("sync", sync)
step("read", read)
try:
    os.unlink(path)
except OSError:
    pass
"""


def parse_probe(host: str, output: str, *, waited_s: float) -> DiskProbe:
    """The result in the probe's output; `waited_s` is how long it was allowed to run, for a step that did not end."""
    steps = dict.fromkeys(("write", "sync", "read"), DiskStep("not tried"))
    for line in output.splitlines():
        words = line.split()
        if len(words) == 2 and words[0] in steps and words[1] == "begin":
            steps[words[0]] = DiskStep("no answer", waited_s)
        elif len(words) == 3 and words[0] in steps:
            steps[words[0]] = DiskStep(words[1], float(words[2]))
    return DiskProbe(host=host, write=steps["write"], sync=steps["sync"], read=steps["read"])

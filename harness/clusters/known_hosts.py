"""OpenSSH's known_hosts file: paramiko is given the lines that it understands, and never rewrites the file.

paramiko fails on a line that it cannot parse (`@cert-authority`, a damaged line), and to store a key it rewrites the
whole file, dropping comments and lines that it does not know. So it gets only what it understands, and a new key is
appended here.
"""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING

from harness.scratch import scratch_prefix

if TYPE_CHECKING:
    import paramiko

__all__ = ["append_key", "load_known_hosts"]


def load_known_hosts(client: paramiko.SSHClient, path: str) -> None:
    """Have the client trust the keys in a file, if it exists. Lines with a marker (`@`) and lines that paramiko cannot
    parse are skipped, as ssh skips what it cannot parse. Raises OSError."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            entries = [" ".join(line.split()[:3]) for line in file if _is_read_by_paramiko(line)]
    except FileNotFoundError:
        return
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", prefix=scratch_prefix("trial")) as understood:
        understood.write("".join(f"{entry}\n" for entry in entries))
        understood.flush()
        client.load_host_keys(understood.name)


def _is_read_by_paramiko(line: str) -> bool:
    from paramiko import SSHException
    from paramiko.hostkeys import HostKeyEntry, InvalidHostKey

    entry = " ".join(line.split()[:3])
    if not entry or entry[0] in "#@":
        return False
    try:
        return HostKeyEntry.from_line(entry) is not None
    except (SSHException, InvalidHostKey, ValueError):
        return False


def append_key(path: str, name: str, key: paramiko.PKey) -> None:
    """Append a key to a file, which is created if it does not exist. Raises OSError."""
    os.makedirs(os.path.dirname(path) or ".", mode=0o700, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "r+b", buffering=0) as file:
        ends_in_line = file.seek(0, os.SEEK_END) > 0 and os.pread(descriptor, 1, file.tell() - 1) != b"\n"
        line = f"{name} {key.get_name()} {key.get_base64()}\n"
        file.write((b"\n" if ends_in_line else b"") + line.encode())

"""The file of the host keys that are right, as OpenSSH has it: paramiko reads some of its lines and rewrites none.

paramiko ends with an error at what it cannot read (`@cert-authority`, a damaged line), and to keep a key it writes the
whole file anew, without comments and without the lines that it does not know. So it is given only what it understands,
and a new key is added at the end.
"""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import paramiko

__all__ = ["append_key", "load_known_hosts"]


def load_known_hosts(client: paramiko.SSHClient, path: str) -> None:
    """Have the client believe the keys of a file; none where there is no such file. Lines with a marker (`@`) and those
    that paramiko cannot read are passed over, as ssh passes over what it cannot read. Raises OSError."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            entries = [" ".join(line.split()[:3]) for line in file if _is_read_by_paramiko(line)]
    except FileNotFoundError:
        return
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".known_hosts") as understood:
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
    """Add a key at the end of a file, which is made if need be. Raises OSError."""
    os.makedirs(os.path.dirname(path) or ".", mode=0o700, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "r+b", buffering=0) as file:
        ends_in_line = file.seek(0, os.SEEK_END) > 0 and os.pread(descriptor, 1, file.tell() - 1) != b"\n"
        line = f"{name} {key.get_name()} {key.get_base64()}\n"
        file.write((b"\n" if ends_in_line else b"") + line.encode())

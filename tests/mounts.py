"""Whether programs of hosts on this machine can be shown files of their own in the place of the machine's."""

from __future__ import annotations

import os
import subprocess

__all__ = ["MAY_MOUNT"]

_TRIAL = ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), "--mount"]

MAY_MOUNT = (
    subprocess.run([*_TRIAL, "mount", "--bind", "/etc/hosts", "/etc/hosts"], capture_output=True).returncode == 0
)
"""Root may, and others in user namespaces, unless these are forbidden or this is a chroot."""

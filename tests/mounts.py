"""Which uses of namespaces are possible here; few, in a chroot whose root is not a mount point."""

from __future__ import annotations

import os
import subprocess

from harness.clusters.netns_trial import _is_mount_point

__all__ = ["IS_PLAIN_CHROOT", "MAY_MOUNT"]

IS_PLAIN_CHROOT = not _is_mount_point("/")

_TRIAL = ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), "--mount"]

MAY_MOUNT = (
    subprocess.run([*_TRIAL, "mount", "--bind", "/etc/hosts", "/etc/hosts"], capture_output=True).returncode == 0
)
"""Whether programs can be given other files in the place of the machine's: root may do so, and others in user
namespaces, unless these are forbidden."""

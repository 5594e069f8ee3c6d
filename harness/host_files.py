"""The files for creating hosts: a Dockerfile, a Vagrantfile, the script that provisions a machine.

In a checkout they are at its root, in an installation from a wheel they are data of this package. Messages name them by
a path that can be pasted.
"""

from __future__ import annotations

import os
from pathlib import Path

from harness.pasteable import pasteable

__all__ = ["BUILD_IMAGE", "HOST_FILES", "PACKAGED_DIRECTORY", "PROVISION", "host_file", "host_files_directory"]

PROVISION = "scripts/provision.sh"
BUILD_IMAGE = "scripts/build-image.sh"
HOST_FILES = ("Dockerfile", "Vagrantfile", PROVISION, BUILD_IMAGE)
PACKAGED_DIRECTORY = "for_hosts"

_PACKAGE = Path(__file__).resolve().parent


def host_files_directory() -> Path:
    """The directory of HOST_FILES: the build context of the Dockerfile, the directory for `vagrant up`."""
    packaged = _PACKAGE / PACKAGED_DIRECTORY
    return packaged if packaged.is_dir() else _PACKAGE.parent


def host_file(name: str) -> str:
    """One of HOST_FILES, as a path for a command line in the current directory."""
    return pasteable(os.path.join(host_files_directory(), name))

"""scripts/setup-host.sh: installs missing packages if it can, reports them if it cannot, and never fails."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "setup-host.sh"


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A directory that is the whole PATH of a host; `apt-get` writes down how it was called."""
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    add(bin_dir, "id", 'echo "${FAKE_UID:-0}"')
    return bin_dir


def add(bin_dir: Path, name: str, script: str) -> None:
    (bin_dir / name).write_text(f"#!/bin/sh\n{script}\n")
    (bin_dir / name).chmod(0o755)


def add_apt(bin_dir: Path, install: str, update: str = "exit 0") -> None:
    add(
        bin_dir,
        "apt-get",
        f'echo "$@" >> {bin_dir}/calls\ncase "$*" in *" install "*) {install} ;; *" update"*) {update} ;; esac',
    )


def run(bin_dir: Path, *, uid: int = 0) -> tuple[int, str, str]:
    # The script adds the system's own directories to PATH; here they must not be found.
    text = SCRIPT.read_text().replace("/usr/local/sbin:/usr/sbin:/sbin", str(bin_dir))
    done = subprocess.run(
        ["/bin/sh", "-c", text],
        env={"PATH": str(bin_dir), "FAKE_UID": str(uid)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def calls(bin_dir: Path) -> list[str]:
    path = bin_dir / "calls"
    return path.read_text().splitlines() if path.exists() else []


def test_nothing_is_installed_if_nothing_is_missing(host: Path) -> None:
    add(host, "ip", "exit 0")
    add(host, "nft", "exit 0")
    add_apt(host, "exit 0")
    assert run(host) == (0, "", "")
    assert calls(host) == []


def test_only_missing_packages_are_installed(host: Path) -> None:
    add(host, "ip", "exit 0")
    # What a package brings appears with its installation.
    add_apt(host, f"/bin/cp {host}/ip {host}/nft")
    said = "setup-host: installing the Debian packages nftables, for clusters in network namespaces\n"
    assert run(host) == (0, said, "")
    (call,) = calls(host)
    assert call.endswith("install --yes --no-install-recommends nftables")
    assert run(host) == (0, "", "")
    assert len(calls(host)) == 1


def test_stale_package_lists_are_updated_once(host: Path) -> None:
    add(host, "nft", "exit 0")
    add_apt(host, f"[ -e {host}/fresh ] && /bin/cp {host}/nft {host}/ip", f": > {host}/fresh")
    status, output, errors = run(host)
    assert (status, len(output.splitlines()), errors) == (0, 1, "")
    assert [("update" in call, call.endswith("iproute2")) for call in calls(host)] == [
        (False, True),
        (True, False),
        (False, True),
    ]


def test_a_failed_installation_is_reported_in_one_line_and_exits_with_0(host: Path) -> None:
    add_apt(host, "exit 100", "exit 100")
    status, output, errors = run(host)
    assert (status, len(output.splitlines())) == (0, 1)
    assert errors == ("setup-host: could not install iproute2 nftables; the netns cluster will not be available\n")


@pytest.mark.parametrize(("uid", "has_apt"), [(1000, True), (0, False)])
def test_without_root_or_apt_missing_packages_are_only_reported(host: Path, uid: int, has_apt: bool) -> None:
    add(host, "nft", "exit 0")
    if has_apt:
        add_apt(host, "exit 0")
    status, output, errors = run(host, uid=uid)
    assert (status, output, len(errors.splitlines())) == (0, "", 1)
    assert errors.startswith("setup-host: iproute2 missing")
    assert calls(host) == []

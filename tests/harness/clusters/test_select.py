"""Choosing a cluster: `auto` takes the best this machine can host; a name is taken, or refused with a remedy."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from harness import programs
from harness.clusters import netns_trial, select, user_namespace
from harness.clusters.base import ClusterUnavailable
from harness.clusters.netns_trial import why_no_namespaces
from harness.clusters.select import Choice, choose
from tests.mounts import IS_PLAIN_CHROOT


def machine(monkeypatch: pytest.MonkeyPatch, *, euid: int, why_not: Mapping[bool, str | None]) -> None:
    """Fake a user and the reasons against namespaces, directly (False) and in a user namespace (True)."""
    monkeypatch.setattr(os, "geteuid", lambda: euid)
    monkeypatch.setattr(select, "why_no_namespaces", lambda *, in_user_namespace: why_not[in_user_namespace])


@pytest.mark.parametrize("requested", ["auto", "netns"])
def test_root_gets_namespaces(monkeypatch: pytest.MonkeyPatch, requested: str) -> None:
    monkeypatch.delenv(user_namespace.INSIDE_VARIABLE, raising=False)
    machine(monkeypatch, euid=0, why_not={False: None})
    assert choose(requested) == Choice("netns", "network namespaces, as root")


@pytest.mark.parametrize("requested", ["auto", "netns"])
def test_an_ordinary_user_gets_namespaces_inside_a_user_namespace(
    monkeypatch: pytest.MonkeyPatch, requested: str
) -> None:
    machine(monkeypatch, euid=1000, why_not={True: None})
    choice = choose(requested)
    assert (choice.name, choice.in_user_namespace) == ("netns", True)


@pytest.mark.parametrize("euid", [0, 1000])
def test_without_namespaces_auto_chooses_local_and_gives_the_reason(monkeypatch: pytest.MonkeyPatch, euid: int) -> None:
    machine(monkeypatch, euid=euid, why_not={euid != 0: "missing packages: nftables"})
    assert choose("auto") == Choice("local", "no network namespaces: missing packages: nftables")
    with pytest.raises(ClusterUnavailable, match="netns is not available: missing packages: nftables"):
        choose("netns")


def test_other_cluster_names_are_passed_on_to_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, euid=1000, why_not={})
    assert choose("local").name == "local"
    assert choose("no-such-cluster").name == "no-such-cluster"


def test_the_trial_names_missing_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(programs, "SYSTEM_PATH", str(tmp_path))
    reason = why_no_namespaces(in_user_namespace=False)
    assert reason is not None and reason.startswith("missing packages: iproute2 mount nftables util-linux")


def fake_unshare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """An `unshare` that does what `script` says; the other programs are the machine's."""
    program = tmp_path / "unshare"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    for name in ("ip", "nft", "nsenter", "mount"):
        (tmp_path / name).symlink_to("/bin/true")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(
        netns_trial, "_is_mount_point", lambda path: True
    )  # / is not one where the tests run in a chroot


def test_a_refused_unshare_is_reported_with_the_missing_permission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_unshare(tmp_path, monkeypatch, "echo unshare: Operation not permitted >&2; echo more >&2; exit 1")
    monkeypatch.setattr(netns_trial, "_SWITCHES", ())
    as_root, as_user = (why_no_namespaces(in_user_namespace=inside) for inside in (False, True))
    assert as_root is not None and "CAP_SYS_ADMIN" in as_root and "Operation not permitted" in as_root
    assert as_user is not None and as_user.endswith("run as root") and "\n" not in as_user


@pytest.mark.parametrize(("content", "is_blamed"), [("1\n", True), ("0\n", False)])
def test_a_kernel_setting_that_forbids_namespaces_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, is_blamed: bool
) -> None:
    fake_unshare(tmp_path, monkeypatch, "exit 1")
    setting = tmp_path / "restrict"
    setting.write_text(content)
    switches = ((str(tmp_path / "absent"), "0", "sysctl a=1"), (str(setting), "1", "sysctl restrict=0"))
    monkeypatch.setattr(netns_trial, "_SWITCHES", switches)
    reason = why_no_namespaces(in_user_namespace=True)
    assert reason is not None
    assert ("as root, sysctl restrict=0" in reason) is is_blamed


@pytest.mark.netns
@pytest.mark.skipif(os.geteuid() == 0, reason="root needs no user namespace")
def test_reexec_is_possible_exactly_when_the_trial_succeeds() -> None:
    command = user_namespace.reexec_command(["sh", "-c", "id -u; exit 7"])
    assert (command is None) is (user_namespace.why_not() is not None)
    if command is not None:
        done = subprocess.run(
            command, capture_output=True, text=True, env=user_namespace.reexec_environment(), check=False
        )
        assert (done.returncode, done.stdout) == (7, "0\n")


def test_root_does_not_reexec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert user_namespace.reexec_command(["true"]) is None
    with pytest.raises(OSError):
        user_namespace.reexec(["true"])


def test_the_environment_alone_is_no_proof_of_being_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(user_namespace.INSIDE_VARIABLE, "4242")
    assert not user_namespace.inside()


UNSHARE = ["unshare", "--user", "--map-root-user", "--net", "--mount", "--"]
CAN_UNSHARE = subprocess.run([*UNSHARE, "true"], capture_output=True).returncode == 0


@pytest.mark.netns
@pytest.mark.skipif(not CAN_UNSHARE, reason="this user may not make user namespaces")
def test_slash_run_inside_differs_only_in_the_names_of_namespaces() -> None:
    """All of /run can still be reached; only the names of network namespaces are private."""
    script = (
        "import os, sys\n"
        "from harness.clusters.user_namespace import inside\n"
        "print(inside(), sorted(os.listdir('/run')), os.listdir('/run/netns'))\n"
        "sys.exit(7)"
    )
    environment = os.environ | {
        user_namespace.INSIDE_VARIABLE: str(os.geteuid()),
        "PYTHONPATH": str(Path(__file__).resolve().parents[3]),
    }
    entry = [sys.executable, "-m", "harness.clusters.user_namespace", sys.executable, "-c", script]
    expected = sorted({*os.listdir("/run"), "netns"})
    done = subprocess.run([*UNSHARE, *entry], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout == f"True {expected} []\n"


@pytest.mark.netns
@pytest.mark.skipif(not CAN_UNSHARE, reason="this user may not make user namespaces")
def test_a_missing_program_is_reported_in_one_line_with_status_255() -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    entry = [sys.executable, "-m", "harness.clusters.user_namespace", "no-such-program"]
    done = subprocess.run([*UNSHARE, *entry], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 255
    assert done.stderr.startswith("harness: cannot set up the user namespace: ")
    assert len(done.stderr.splitlines()) == 1


CHROOT = """
set -e
cd "$1"
for path in /*; do
    name=${path#/}
    case $name in proc|run|sys) continue ;; esac
    if [ -L "/$name" ]; then ln -s "$(readlink "/$name")" "$name"
    elif [ -d "/$name" ]; then mkdir "$name"; mount --rbind "/$name" "$name"; fi
done
mkdir proc run sys
mount -t proc proc proc
exec chroot . "$2" -c "$3"
"""


@pytest.mark.skipif(os.geteuid() != 0 or IS_PLAIN_CHROOT, reason="needs root outside of a plain chroot")
def test_a_plain_chroot_is_reported_with_a_remedy(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    ask = (
        f"import sys; sys.path[:0] = {sys.path!r}; from harness.clusters.netns_trial import why_no_namespaces; "
        "print(why_no_namespaces(in_user_namespace=False))"
    )
    namespaces = ["unshare", "--mount", "--propagation", "private", "--"]
    done = subprocess.run(
        [*namespaces, "sh", "-c", CHROOT, "sh", str(root), sys.executable, ask],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.startswith("/ is not a mount point, as in a plain chroot"), done.stdout + done.stderr
    assert "mount --bind DIR DIR" in done.stdout and "CAP_SYS_ADMIN" not in done.stdout

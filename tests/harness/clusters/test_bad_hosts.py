"""Unavailable hosts, on the command line: one clear line, exit status 254, and nothing left anywhere."""

from __future__ import annotations

import os
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.cli import main
from harness.clusters.netns_calls import entered

ROOT = Path(__file__).resolve().parents[3]
LAB = runpy.run_path(str(ROOT / "scripts" / "lab.py"))
WHY_NOT = LAB["missing_for"]("ssh")
on_machines = pytest.mark.skipif(WHY_NOT is not None, reason=f"no sshd in namespaces: {WHY_NOT}")

INVENTORY = '[hosts.n1]\nhostname = "192.0.2.1"\n[hosts.n2]\nhostname = "192.0.2.2"\n'


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The one-line error of a refused `harness run`, which leaves no run state."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPLITBRAIN_STATE_DIR", str(tmp_path / "states"))

    def run(*words: str) -> str:
        try:
            status = main(["run", "--time-limit", "15", *words])
        except SystemExit as error:
            status = int(error.code or 0)
        said = capsys.readouterr().err
        assert status == 254, said
        assert "Traceback" not in said
        [line] = [line for line in said.splitlines() if line.startswith("harness: ")]
        assert said.endswith(f"{line}\n"), "the error is the last line"
        assert not Path("states").exists() or os.listdir("states") == []
        return line

    return run


@pytest.mark.parametrize(
    ("inventory", "words", "expected"),
    [
        (None, [], "docs/hosts.md shows one)"),
        ('[defaults]\nusr = "x"\n' + INVENTORY, [], "defaults: unknown key 'usr' (did you mean user?)"),
        (INVENTORY.replace("hostname", "hostnam", 1), [], "hosts.n1: unknown key 'hostnam' (did you mean hostname?)"),
        (INVENTORY + 'port = "22"\n', [], "hosts.n2: port must be a whole number, not '22'"),
        (INVENTORY + "[hosts", [], "hosts.toml: "),
        (INVENTORY, ["--nodes", "3"], "--nodes 3: the inventory has only 2 hosts for replicas"),
        (INVENTORY, ["--nemesis", "kill@leeder"], "nemesis kill: unknown target 'leeder'"),
        (INVENTORY, ["--nemesis", "disk-stall=fsync@n9"], "n9"),
        (INVENTORY, ["--nemesis", "partition=majorities-ring"], "majorities-ring"),
        (INVENTORY, ["--image", "x"], "--image: not an option of cluster ssh, which takes --inventory"),
    ],
)
def test_bad_inventories_and_options_are_refused_before_connecting(
    inventory: str | None, words: list[str], expected: str, tmp_path: Path, refused: Callable[..., str]
) -> None:
    given = ["--cluster", "ssh", "--nodes", "2"]
    if inventory is not None:
        (tmp_path / "hosts.toml").write_text(inventory)
        given += ["--inventory", str(tmp_path / "hosts.toml")]
    assert expected in refused(*given, *words)


def test_a_missing_docker_engine_is_refused_with_a_remedy(
    tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none")
    said = refused("--cluster", "docker", "--nemesis", "link")
    assert f"--cluster docker: no engine answers at unix://{tmp_path}/none: start it (systemctl start docker)" in said


OTHER_KEY = "AAAAC3NzaC1lZDI1NTE5AAAAIHdAmSVSXYdhYqLAIMDDqQDJ5tSXbTjnrjmvkqMTJQ1Q"


@pytest.mark.ssh
@pytest.mark.root
@on_machines
def test_unusable_machines_are_refused_with_a_remedy(
    tmp_path: Path, ssh_machines: Any, refused: Callable[..., str]
) -> None:
    good = ssh_machines.inventory.read_text()
    (tmp_path / "known_hosts").write_text(f"10.78.0.1 ssh-ed25519 {OTHER_KEY}\n")
    known = f'known_hosts = "{tmp_path}/known_hosts"'

    def said(inventory: str) -> str:
        (tmp_path / "hosts.toml").write_text(inventory)
        with entered(ssh_machines.namespace):
            return refused("--cluster", "ssh", "--inventory", "hosts.toml", "--nodes", "2", "--nemesis", "clock")

    unreachable = said(good.replace('"10.78.0.2"', '"10.78.0.99"'))
    assert "n2: cannot connect to 10.78.0.99:22" in unreachable and "is this the right address" in unreachable
    assert "n2: cannot connect to 10.78.0.2:23" in said(good.replace('"10.78.0.2"', '"10.78.0.2"\nport = 23'))
    changed = said(re.sub("known_hosts = .*", known, good))
    assert "n1: the host key of 10.78.0.1 has changed" in changed and "ssh-keygen -f" in changed
    # Only root may use the lab's Python; these users have the system's.
    plain = re.sub("python = .*", "", good.replace('user = "root"', 'user = "plain"'))
    without = said(plain)
    assert "user plain cannot use sudo without a password" in without and "provision.sh --sudo plain" in without
    assert "user plain is not root and does not use sudo" in said(plain.replace("plain", 'plain"\nsudo = false #'))
    for host in ("n1", "n2"):
        assert ssh_machines.files(host) == []
        assert "splitbrain" not in ssh_machines.rules(host)

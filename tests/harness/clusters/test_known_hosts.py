"""The file of known host keys: what is read from it, and that all other lines are kept."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from harness.clusters.known_hosts import append_key, load_known_hosts
from harness.scratch import scratch_prefix

paramiko = pytest.importorskip("paramiko")

KEY = "AAAAC3NzaC1lZDI1NTE5AAAAIKlSct7qRVkyf4IA7+enag1+QRlm8onHf52NSAv4e6kU"
OTHERS = (
    b"# a comment\n"
    b"@cert-authority *.example ssh-ed25519 " + KEY.encode() + b"\n"
    b"@revoked * ssh-ed25519 " + KEY.encode() + b"\n"
    b"damaged.example ssh-ed25519 A\n"
    b"short.example ssh-ed25519 AAAA\n"
    b"sk.example sk-ssh-ed25519@openssh.com AAAAGnNrLXNzaC1lZDI1NTE5QG9wZW5zc2guY29tAAAAIA==\n"
    b"two words\n\xff\xfe\n\n"
)


def test_lines_that_paramiko_cannot_read_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "known_hosts"
    path.write_bytes(OTHERS + f"a.example,[b.example]:2202 ssh-ed25519 {KEY} caf\u00e9\n".encode("latin-1"))
    client = paramiko.SSHClient()
    load_known_hosts(client, str(path))
    keys = client.get_host_keys()
    assert {host: keys[host]["ssh-ed25519"].get_base64() for host in keys} == {
        "a.example": KEY,
        "[b.example]:2202": KEY,
    }
    none = paramiko.SSHClient()
    load_known_hosts(none, str(tmp_path / "none"))
    assert list(none.get_host_keys()) == []
    with pytest.raises(IsADirectoryError):
        load_known_hosts(client, str(tmp_path))


def test_a_new_key_is_added_and_every_other_line_stays(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "known_hosts"
    key = paramiko.ECDSAKey.generate()
    append_key(str(path), "[n1.example]:2202", key)
    assert path.read_text() == f"[n1.example]:2202 {key.get_name()} {key.get_base64()}\n"
    path.write_bytes(OTHERS + b"# no end of a line")
    append_key(str(path), "n2.example", key)
    assert (
        path.read_bytes() == OTHERS + f"# no end of a line\nn2.example {key.get_name()} {key.get_base64()}\n".encode()
    )
    client = paramiko.SSHClient()
    load_known_hosts(client, str(path))
    assert client.get_host_keys()["n2.example"][key.get_name()] == key


def test_the_copy_for_paramiko_is_recognised_by_clean_if_the_process_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "known_hosts"
    path.write_bytes(OTHERS)
    copies: list[str] = []

    client = SimpleNamespace(load_host_keys=lambda name: copies.append(os.path.basename(name)))
    load_known_hosts(cast(Any, client), str(path))
    assert [name.startswith(scratch_prefix("trial")) for name in copies] == [True]

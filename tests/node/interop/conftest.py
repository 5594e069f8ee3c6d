"""Third-party clients, downloaded if the machine can download them."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks._compatibility_guests import ALI_ONS_VERSION, build_go_peer
from harness.errors import OperatorError

PEER_TIMEOUT_S = 500
"""Timeout of a peer, which takes half a minute on an idle machine, its compiler included."""


@pytest.fixture(scope="session")
def run_peer() -> Callable[..., Awaitable[list[dict[str, Any]]]]:
    """Run a peer, which must exit with status 0; returns the objects that it printed, one a line. If `env` is given, it
    is the peer's whole environment."""

    async def run(*argv: str, cwd: Path, env: dict[str, str] | None = None) -> list[dict[str, Any]]:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*argv, cwd=cwd, env=env, stdout=pipe, stderr=pipe, limit=1 << 22)
        try:
            out, err = await asyncio.wait_for(process.communicate(), PEER_TIMEOUT_S)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == 0, err.decode()[-2000:]
        return [json.loads(line) for line in out.splitlines() if line.startswith(b'{"')]

    return run


@pytest.fixture(scope="session")
def ali_ons(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The peer's script next to an installed, unmodified ali-ons."""
    directory = tmp_path_factory.mktemp("ali-ons")
    (directory / "package.json").write_text('{"name": "peer", "version": "1.0.0", "private": true}')
    npm = shutil.which("npm")
    assert npm is not None, "tests that need npm are skipped without it"
    command = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", f"ali-ons@{ALI_ONS_VERSION}"]
    installed = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=150, check=False)
    if installed.returncode != 0:
        pytest.skip(f"npm cannot fetch ali-ons: {installed.stderr.strip()[-200:]}")
    shutil.copy(Path(__file__).with_name("ali_ons_peer.js"), directory)
    return directory / "ali_ons_peer.js"


@pytest.fixture(scope="session")
def java_client(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The class path of RocketMQ's client and tools of a version, fetched by Maven when it is first asked for."""
    known: dict[str, str] = {}

    def class_path(version: str) -> str:
        if version not in known:
            directory = tmp_path_factory.mktemp("rocketmq")
            maven = shutil.which("mvn")
            assert maven is not None, "tests that need Maven are skipped without it"
            command = [
                maven, "-B", "-q", "-f", str(Path(__file__).with_name("java") / "pom.xml"),
                "dependency:copy-dependencies", f"-Drocketmq.version={version}", f"-DoutputDirectory={directory}",
            ]  # fmt: skip
            try:
                fetched = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
            except subprocess.TimeoutExpired:
                pytest.skip(f"Maven did not fetch rocketmq-tools {version} in time")
            if fetched.returncode != 0:
                output = (fetched.stdout + fetched.stderr).strip()
                pytest.skip(f"Maven cannot fetch rocketmq-tools {version}: {output[-200:]}")
            known[version] = f"{directory}/*"
        return known[version]

    return class_path


@pytest.fixture(scope="session")
def go_client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The peer's program, built with an unmodified rocketmq-client-go."""
    try:
        return build_go_peer(tmp_path_factory.mktemp("rocketmq-go") / "peer")
    except OperatorError as error:
        pytest.skip(str(error))

"""Each real system on each kind of host: the runs for the table in docs/real-systems.md.

A cell is one short run with a partition and a kill. Machines behind SSH and the Docker engine come from
scripts/lab.py and exist only during the run; the ordinary user is `nobody`, with a copy of the packages.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._runs import kept_of, perform_run, timed_faults, verdict_of
from harness.sdk.install import cache_directory

__all__ = ["CLUSTERS", "perform_cell", "table"]

CLUSTERS: Mapping[str, str] = {
    "local": "processes with link proxies, as root",
    "local, ordinary user": "the same as user `nobody`",
    "ssh": "machines behind SSH, each an sshd in its own namespaces",
    "docker": "containers of a Docker engine, with an image built from this machine's programs",
}
"""Kind of host -> description. Without netns, on which the runs of the first table are."""

FAULTS = (("partition", "one"), ("kill", "sigkill@one"))
BEGIN_S, ON_S, OFF_S, LOAD_S = 3, 5, 5, 22
SEED = 1

MACHINES = 4
"""Machines of the SSH laboratory: three replicas, and one for a name server."""

USER = "nobody"
MAX_REASON_CHARS = 400
"""The reason why a system cannot run is cut to this length, which leaves out the list of what was tried."""

ROOT = Path(__file__).resolve().parent.parent
LAB = [sys.executable, str(ROOT / "scripts" / "lab.py")]


WHY = (
    "On `local` all hosts share one machine: programs that listen on all of its addresses (RocketMQ's, and RabbitMQ's"
    " epmd) conflict with each other or with the link proxies, and a program that learns a peer's address from the "
    "kernel and passes it on makes others bypass the proxies (Redis Sentinel), as does one that tells others its own "
    "address (Cassandra, Consul). Galera's members tell each other at which address they reached whom; if every link "
    "is a proxy a member has several addresses, and a member that meets another at a second address takes it for two "
    "with the same UUID and exits (mariadb). Use netns, docker, ssh or vagrant for such systems. Container images "
    "contain only what was put into them: that of the laboratory has no apt.",
)


@dataclass(frozen=True, slots=True)
class _Place:
    """How a run is started: a prefix of its command, and additions to its environment and options."""

    prefix: Sequence[str] = ()
    python: str = sys.executable
    environment: Mapping[str, str] | None = None
    options: Sequence[str] = ()


def perform_cell(system: str, cluster: str, options: str) -> dict[str, Any]:
    """Perform one run with `options`. Returns what is kept of it, or {"cannot": reason} if it was impossible."""
    kind = cluster.partition(",")[0]
    words = [*f"--system {system} --cluster {kind} --time-limit {LOAD_S} --seed {SEED}".split(), *options.split()]
    if "--nodes" not in words:
        words += ["--nodes", "3"]
    schedule = timed_faults(FAULTS, begin_s=BEGIN_S, on_s=ON_S, off_s=OFF_S)
    # Below /tmp and not in a home directory, so that other users and machines that share these files can access it.
    with tempfile.TemporaryDirectory(prefix="splitbrain-clusters-") as directory, _place(cluster, directory) as place:
        try:
            return kept_of(
                lambda: perform_run(
                    Path(directory), *words, *place.options, schedule=schedule,
                    prefix=place.prefix, python=place.python, environment=place.environment,
                )
            )  # fmt: skip
        except RuntimeError as error:
            return {"cannot": _last_line(str(error))}


def _last_line(said: str) -> str:
    """The last line of a failed command's output, which names the reason."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return (lines[-1] if lines else "it said nothing").removeprefix("harness: ")[:MAX_REASON_CHARS]


@contextlib.contextmanager
def _place(cluster: str, directory: str) -> Iterator[_Place]:
    lab = Path(tempfile.gettempdir(), "splitbrain-laboratory")  # kept: the image of an engine takes a while
    if cluster == "ssh":
        prefix = [*LAB, "ssh", str(lab / "ssh"), "--hosts", str(MACHINES), "--"]
        yield _Place(prefix, options=("--inventory", str(lab / "ssh" / "inventory.toml")))
    elif cluster == "docker":
        prefix = [*LAB, "docker", str(lab / "engine"), "--"]
        if not (lab / "rootfs").exists():
            subprocess.run([*LAB, "rootfs", str(lab / "rootfs")], check=True)
        build = ["sh", str(ROOT / "scripts" / "build-image.sh"), "--rootfs", str(lab / "rootfs")]
        subprocess.run([*prefix, *build], check=True, stdout=subprocess.DEVNULL)
        yield _Place(prefix)
    elif "," in cluster:
        yield _as_ordinary_user(directory)
    else:
        yield _Place()


def _as_ordinary_user(directory: str) -> _Place:
    """A place for runs as an unprivileged user, with packages and a Python that this user can access."""
    user = pwd.getpwnam(USER)
    packages = Path(tempfile.gettempdir(), f"splitbrain-packages-of-{USER}")
    if Path(cache_directory()).is_dir():
        subprocess.run(["cp", "-a", "--update", f"{cache_directory()}/.", str(packages)], check=True)
    subprocess.run(["chown", "-R", USER, str(packages), directory], check=True)
    words = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
    environment = {"HOME": directory, "TMPDIR": directory, "SPLITBRAIN_CACHE": str(packages)}
    # Tested through a child process: the first program is opened with rights that its children do not have.
    starts_itself = "import harness, subprocess, sys; subprocess.run([sys.executable, '-c', ''], check=True)"
    reaches = subprocess.run([*words, sys.executable, "-c", starts_itself], capture_output=True, check=False)
    if reaches.returncode == 0:
        return _Place(words, environment=environment)
    # Our Python is accessible only to root: use the system's Python, with our packages.
    paths = [str(ROOT), *(path for path in sys.path if path.endswith("site-packages"))]
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    found = shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin") or sys.executable
    return _Place(words, python=found, environment=environment)


def table(results: Mapping[str, Mapping[str, Mapping[str, Any]]], systems: Sequence[str]) -> list[str]:
    """The lines of the section: a row for each system, a column for each kind of host, and the runs not valid."""
    lines = [
        "## On other kinds of hosts",
        "",
        f"One run of {LOAD_S} s in each cell, made by `python -m benchmarks.real_systems --clusters`: one host is "
        f"partitioned for {ON_S} s after {BEGIN_S} s, and one is killed and stays down for {ON_S} s after "
        f"{BEGIN_S + ON_S + OFF_S} s. A cell gives the verdict, the operations that succeeded, and the number of "
        "faults proven and healed.",
        "",
        f"| system | {' | '.join(CLUSTERS)} |",
        f"|---|{'---|' * len(CLUSTERS)}",
    ]
    for system in systems:
        cells = [_cell(results.get(system, {}).get(cluster)) for cluster in CLUSTERS]
        lines.append(f"| {system} | {' | '.join(cells)} |")
    lines += ["", *(f"- {cluster}: {what}." for cluster, what in CLUSTERS.items()), ""]
    remarks = [
        f"- {system} on {cluster}: {'cannot: ' + run['cannot'] if 'cannot' in run else run['reason']}"
        for system in systems
        for cluster, run in results.get(system, {}).items()
        if "cannot" in run or run["valid"] is not True
    ]
    return [*lines, *(["Cells that are not valid:", "", *remarks, "", *WHY, ""] if remarks else [])]


def _cell(run: Mapping[str, Any] | None) -> str:
    if run is None:
        return "not run"
    if "cannot" in run:
        return "cannot"
    return f"{verdict_of(run)}, {run['ops']['ok']:,}, {run['proven']} of {run['faults']}"

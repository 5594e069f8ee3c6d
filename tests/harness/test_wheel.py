"""The wheel, installed without a checkout: it runs, has its shim without a compiler, and every file that it names."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from email.parser import Parser
from pathlib import Path

import pytest

from nemesis.mechanisms.shim import PREBUILT_MACHINES, prebuilt_name

ROOT = Path(__file__).resolve().parents[2]
BUILD_TIMEOUT_S = 900
"""Twenty seconds on a quiet machine: a compiler is unpacked, and its C library is built for two processors."""

NO_INDEX = ("No matching distribution found", "Could not find a version", "Failed to establish a new connection")
"""What pip prints without an index: then it cannot install the compiler that the build needs."""

ELF_MACHINE = {"x86_64": 62, "aarch64": 183}
"""The number of a processor in the header of an ELF file."""

pytestmark = [
    pytest.mark.long,
    pytest.mark.serial,
    pytest.mark.xdist_group("wheel"),
    pytest.mark.timeout(BUILD_TIMEOUT_S + 100),
]


Completed = subprocess.CompletedProcess[str]


def run(argv: Sequence[str], cwd: Path, environment: Mapping[str, str] | None = None) -> Completed:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        argv, cwd=cwd, env={**kept, **(environment or {})}, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of all tracked and new files, built in a copy, because a build leaves files beside its sources."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    listed = run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], ROOT)
    if listed.returncode != 0:
        pytest.skip("no git checkout to build from")
    for name in filter(os.path.lexists, (os.path.join(ROOT, name) for name in listed.stdout.split("\0") if name)):
        target = source / os.path.relpath(name, ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(Path(name).read_bytes())
        target.chmod(os.stat(name).st_mode & 0o777)
    built = run([sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(out), str(source)], source)
    if any(said in built.stderr + built.stdout for said in NO_INDEX):
        pytest.skip("pip reaches no index, or it has no ziglang for this machine")
    assert built.returncode == 0, built.stdout[-2000:] + built.stderr[-2000:]
    (path,) = out.glob("splitbrain-*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of Python's with the wheel in it; what it depends on is that of these tests' own environment."""
    directory = tmp_path_factory.mktemp("site") / "with it"
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(directory), str(wheel)]
    done = run(pip, directory.parent)
    assert done.returncode == 0, done.stderr
    return directory


def python(installed: Path, cwd: Path, *words: str, path: str | None = None) -> Completed:
    """A Python that has the wheel and not the checkout."""
    environment = {"PYTHONPATH": str(installed), **({} if path is None else {"PATH": path})}
    return run([sys.executable, *words], cwd, environment)


def test_the_wheel_has_both_shims_and_every_file_that_messages_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        for machine in PREBUILT_MACHINES:
            library = archive.read(f"nemesis/mechanisms/shim/built/{prebuilt_name(machine)}")
            assert library[:4] == b"\x7fELF" and int.from_bytes(library[18:20], "little") == ELF_MACHINE[machine]
        for name in ("Dockerfile", "Vagrantfile", "scripts/provision.sh", "scripts/build-image.sh"):
            assert archive.read(f"harness/for_hosts/{name}") == (ROOT / name).read_bytes()
        for page in (ROOT / "docs").rglob("*.md"):
            assert archive.read(f"harness/docs/{page.relative_to(ROOT / 'docs')}") == page.read_bytes()
        assert {"harness/py.typed", "checker/py.typed"} <= names, "plug-ins are type-checked against them"
        (metadata_name,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(metadata_name).decode())
        (license_name,) = [name for name in names if name.endswith("/LICENSE")]
        assert archive.read(license_name) == (ROOT / "LICENSE").read_bytes()
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("Classifier") and metadata["Keywords"] and "make demo" in metadata.get_payload()
    assert not [name for name in names if name.startswith(("tests/", "scripts/", "build_"))]


def test_the_installed_wheel_runs_and_names_its_own_files(installed: Path, tmp_path: Path) -> None:
    done = python(installed, tmp_path, "-m", "harness", "run", "--cluster", "sim", "--time-limit", "2", "--seed", "1")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "store" / "latest" / "report.html").exists()
    script = (
        "from harness.host_files import HOST_FILES, host_file, host_files_directory\n"
        "import harness; print(harness.__file__); print(host_files_directory())\n"
        "for name in HOST_FILES: print(host_file(name))"
    )
    package, directory, *files = python(installed, tmp_path, "-c", script).stdout.splitlines()
    assert package.startswith(str(installed)) and directory.startswith(str(installed))
    for line in files:
        (path,) = shlex.split(line)
        assert os.path.isfile(path) and path.startswith(str(installed))
    assert os.access(shlex.split(files[2])[0], os.X_OK), "a script can be run by its path"


def test_pages_that_the_installed_wheel_names_exist(installed: Path, tmp_path: Path) -> None:
    """A help text may be broken at the space that this path has."""
    asked = " ".join(python(installed, tmp_path, "-m", "harness", "run", "--help").stdout.split())
    refused = python(installed, tmp_path, "-m", "harness", "run", "--cluster", "ssh")
    assert refused.returncode == 254 and refused.stderr.count("\n") == 1
    for text, names in ((asked, {"your-own-system.md", "hosts.md"}), (refused.stderr, {"hosts.md"})):
        paths = [shlex.split(word)[0] for word in re.findall(r"\(('[^']+\.md'|\S+\.md)", text)]
        assert {Path(path).name for path in paths} == names
        assert all(Path(path).is_file() and path.startswith(str(installed)) for path in paths)


@pytest.mark.skipif(os.uname().machine not in PREBUILT_MACHINES, reason="no shim is built for this processor")
def test_the_installed_shim_is_available_without_a_compiler(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "no programs").mkdir()
    script = "from nemesis.mechanisms.shim import why_no_shim; print(why_no_shim())"
    done = python(installed, tmp_path, "-c", script, path=str(tmp_path / "no programs"))
    assert done.stdout == "None\n", done.stdout + done.stderr

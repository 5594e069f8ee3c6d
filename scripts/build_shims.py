"""Build the clock and disk shim for the common processors, without a system compiler.

    python scripts/build_shims.py [--if-needed]     into nemesis/mechanisms/shim/built, where the harness finds them

The compiler comes from the package ziglang, which cross-compiles for every machine. If it is not installed, it is
fetched for the duration of the build (100 MB; 400 MB of disk, freed afterwards). The wheel is built with the same
function (scripts/build_backend.py). `--if-needed` does nothing if the harness has a shim already, or a compiler.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from nemesis.mechanisms import shim  # noqa: E402 (the checkout's own, wherever this is called from)

__all__ = ["BUILT_DIRECTORY", "COMPILER_PACKAGE", "build_all"]

COMPILER_PACKAGE = "ziglang>=0.13,<1"
BUILT_DIRECTORY = "nemesis/mechanisms/shim/built"
"""The directory of the shims in the wheel and in a checkout (where git ignores them)."""

_TIMEOUT_S = 300.0


def build_all(directory: Path, environment: Mapping[str, str] | None = None) -> list[Path]:
    """Build the shim for every machine in `shim.PREBUILT_MACHINES` into `directory`, with this Python's ziglang.

    `environment` is added to the compiler's. Shims built from other sources are removed. Returns the paths. Raises
    RuntimeError with the compiler's message.
    """
    directory.mkdir(parents=True, exist_ok=True)
    wanted = {machine: directory / shim.prebuilt_name(machine) for machine in shim.PREBUILT_MACHINES}
    with tempfile.TemporaryDirectory(prefix="splitbrain-zig-") as cache:
        caches = {"ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache}
        for machine, path in wanted.items():
            draft = path.with_suffix(".draft")
            argv = [sys.executable, "-m", "ziglang", *shim.cross_build_arguments(machine, str(draft))]
            done = subprocess.run(
                argv, env={**os.environ, **caches, **(environment or {})}, stdin=subprocess.DEVNULL,
                capture_output=True, text=True, timeout=_TIMEOUT_S, check=False,
            )  # fmt: skip
            if done.returncode != 0:
                raise RuntimeError(f"the shim for {machine} cannot be built: {done.stderr.strip()[-500:]}")
            draft.replace(path)
    for old in set(directory.iterdir()) - set(wanted.values()):
        old.unlink()
    return list(wanted.values())


def main(arguments: list[str]) -> int:
    """Build the shims into the checkout; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--if-needed", action="store_true", help="do nothing if the harness has a shim")
    options = parser.parse_args(arguments)
    if options.if_needed and shim.why_no_shim() is None:
        return 0
    try:
        if importlib.util.find_spec("ziglang") is not None:
            build_all(ROOT / BUILT_DIRECTORY)
        else:
            with tempfile.TemporaryDirectory(prefix="splitbrain-zig-") as fetched:
                print(f"fetching a C compiler for the clock and disk shim ({COMPILER_PACKAGE}, 100 MB)", flush=True)
                pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
                subprocess.run([*pip, "--target", fetched, COMPILER_PACKAGE], check=True)
                build_all(ROOT / BUILT_DIRECTORY, {"PYTHONPATH": fetched})
    except (subprocess.CalledProcessError, RuntimeError) as error:
        print(f"build_shims: {error}; a compiler does as well: apt-get install gcc libc6-dev", file=sys.stderr)
        return 1
    shim.build_shim.cache_clear()
    shim.why_no_shim.cache_clear()
    problem = shim.why_no_shim()
    if problem is not None:
        print(f"build_shims: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

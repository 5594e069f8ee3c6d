"""Make the pictures of the docs from a reproducible simulated run: `make pictures`.

    docs/report.png    the report of a system that answers reads without asking a quorum
    docs/replay.png    the replay of the same run, at its violation

Needs the distribution's Chromium and the extra `browser`. Exit status 254 if one of them is missing.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUN = (
    *("run", "--cluster", "sim", "--nodes", "5", "--workload", "register", "--nemesis", "partition=leader"),
    *("--set", "read_mode=unsafe", "--time-limit", "16", "--seed", "4", "--trace"),
)
SIZES = {"report": (1100, 1560), "replay": (1100, 900)}
"""Width and height of each picture, in pixels."""
INVALID = 1
"""The expected exit status of `harness run`."""


def main() -> int:
    """Make the run, its report and its replay, and take a screenshot of both."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None or importlib.util.find_spec("playwright") is None:
        print("make_pictures: apt-get install chromium; pip install -e '.[browser]'", file=sys.stderr)
        return 254
    with tempfile.TemporaryDirectory(prefix="splitbrain-pictures-") as directory:
        pages = _pages(Path(directory))
        from playwright.sync_api import sync_playwright

        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            for name, path in pages.items():
                width, height = SIZES[name]
                page = browser.new_page(viewport={"width": width, "height": height}, color_scheme="light")
                page.goto(path.as_uri())
                page.screenshot(path=str(ROOT / "docs" / f"{name}.png"))
                print(f"docs/{name}.png")
            browser.close()
    return 0


def _pages(directory: Path) -> dict[str, Path]:
    """Make the run in a directory, and return the paths of its report and replay."""
    store = directory / "store"
    _harness(*RUN, "--store", str(store), expected=INVALID)
    (report,) = store.glob("*/2*/report.html")
    replay = directory / "replay.html"
    _harness("trace", str(report.parent), "--replay", "--out", str(replay), expected=0)
    return {"report": report, "replay": replay}


def _harness(*words: str, expected: int) -> None:
    done = subprocess.run([sys.executable, "-m", "harness", *words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != expected:
        raise SystemExit(f"harness {' '.join(words)} ended with status {done.returncode}\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    sys.exit(main())

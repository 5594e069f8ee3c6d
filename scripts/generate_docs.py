"""Write the pages of docs/ that say what the registry knows: one for every nemesis and workload, and their lists.

    python scripts/generate_docs.py            write them
    python scripts/generate_docs.py --check    write nothing; status 1 when a page is out of date
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from harness import registry  # noqa: E402
from nemesis.shapes import SHAPES  # noqa: E402
from nemesis.victims import TARGETS  # noqa: E402

NOTE = "<!-- Written by scripts/generate_docs.py from the code; edit it there. -->"


def pages() -> dict[Path, str]:
    """Every generated page by its path under docs/."""
    nemeses, workloads = registry.load_all("nemeses"), registry.load_all("workloads")
    found = {Path("nemeses") / f"{name}.md": nemesis_page(nemesis) for name, nemesis in nemeses.items()}
    found[Path("nemeses") / "README.md"] = nemeses_index(nemeses)
    found |= {Path("workloads") / f"{name}.md": workload_page(workload) for name, workload in workloads.items()}
    found[Path("workloads") / "README.md"] = workloads_index(workloads)
    return found


def nemeses_index(nemeses: Mapping[str, Any]) -> str:
    """The list of nemeses, and how they are chosen."""
    lines = [NOTE, "", "# Nemeses", ""]
    listed = [[f"[{name}]({name}.md)", nemesis.description] for name, nemesis in nemeses.items()]
    lines += table(["nemesis", "what it does"], listed)
    lines += [
        "",
        "## Choosing",
        "",
        "    --nemesis partition,clock,kill      these in turn, each through all its variants",
        "    --nemesis all                       every one that the cluster can have",
        "    --nemesis kill=sigkill              one form, at its own targets in turn",
        "    --nemesis kill@leader               every form, at the leader",
        "    --nemesis kill=sigkill@n1+n3        one form, at these hosts",
        "    --nemesis-schedule FILE             what happens when, as a JSON list; faults may overlap",
        "",
        "Every run leaves its `schedule.json`, which is such a file:",
        "",
        '    [{"at_s": 5.0, "action": "inject", "id": "f1", "nemesis": "kill", "variant": "sigkill@leader"},',
        '     {"at_s": 8.0, "action": "inject", "id": "f2", "nemesis": "clock", "variant": "bump@minority"},',
        '     {"at_s": 12.0, "action": "heal", "id": "f1"}, {"at_s": 14.0, "action": "heal", "id": "f2"}]',
        "",
        "A fault that is never healed is healed at the end. The seed of the run decides everything that a variant",
        "leaves open: which hosts, by how much, in which order.",
        "",
        "## Targets",
        "",
    ]
    rows = [[f"`{word}`", meaning] for word, meaning in TARGETS.items()] + [["`n1`, `n1+n3`", "these hosts"]]
    lines += table(["target", "who"], rows)
    lines += [
        "",
        "`harness doctor` shows which of them this machine can have on which cluster, and what is missing;",
        "`harness doctor --prove` injects, proves and heals each of them once.",
    ]
    return "\n".join(lines) + "\n"


def nemesis_page(nemesis: Any) -> str:
    """One nemesis: what it is, its forms, its targets, what proves it."""
    lines = [NOTE, "", f"# {nemesis.name}", "", f"{sentence(nemesis.description)}", ""]
    forms = getattr(nemesis, "forms", None)
    if forms is None:
        lines += ["## Variants", ""]
        lines += table(["variant", "what it does", "hosts"], [
            [f"`{shape.name}`", shape.description, f"at least {shape.minimum_hosts}"] for shape in SHAPES.values()
        ])  # fmt: skip
    else:
        lines += ["## Forms", ""]
        lines += table(["form", "what it does", "targets in turn", "needs"], [
            [
                f"`{form.name}`",
                form.description,
                ", ".join(f"`{word}`" for word in form.targets) if form.is_cycled else "only when asked for",
                ", ".join(f"{interface}: {ability}" for interface, ability in form.needs),
            ]
            for form in forms.values()
        ])  # fmt: skip
    lines += ["", "## How it works and what proves it", "", *prose(inspect.getmodule(type(nemesis)))]
    for title, method in (
        ("Injecting", nemesis.inject),
        ("Proof", nemesis.prove),
        ("Healing", nemesis.heal),
        ("Proof of the healing", nemesis.prove_healed),
    ):
        lines += ["", f"**{title}.** {one_line(inspect.getdoc(method))}"]
    return "\n".join(lines) + "\n"


def workloads_index(workloads: Mapping[str, Any]) -> str:
    """The list of workloads."""
    rows = [[f"[{name}]({name}.md)", workload.description] for name, workload in workloads.items()]
    return "\n".join([NOTE, "", "# Workloads", "", *table(["workload", "what clients do"], rows)]) + "\n"


def workload_page(workload: Any) -> str:
    """One workload: what it is and what it needs of a system."""
    lines = [NOTE, "", f"# {workload.name}", "", sentence(workload.description), ""]
    lines += [f"Needs a system that offers `{workload.requires}` connections.", ""]
    lines += prose(inspect.getmodule(workload))
    return "\n".join(lines) + "\n"


def prose(module: Any) -> list[str]:
    """What a module says of itself, line by line."""
    return (inspect.getdoc(module) or "").splitlines()


def one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *cells]]


def main() -> int:
    """Write or check. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 when a page is out of date")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="where the pages are (default: docs/)")
    arguments = parser.parse_args()
    wanted = {arguments.docs / path: text for path, text in pages().items()}
    directories = {path.parent for path in wanted}
    stale = [path for path, text in wanted.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    orphans = [path for directory in directories for path in directory.glob("*.md") if path not in wanted]
    if arguments.check:
        for path in [*stale, *orphans]:
            print(f"{path}: out of date; run python scripts/generate_docs.py", file=sys.stderr)
        return 1 if stale or orphans else 0
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(wanted[path], encoding="utf-8")
    for path in orphans:
        path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())

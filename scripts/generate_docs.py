"""Generate the pages of docs/ about what the registries hold: one for every nemesis, workload and checker, and indexes.

python scripts/generate_docs.py            write them
python scripts/generate_docs.py --check    write nothing; status 1 when a page is out of date
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import checker  # noqa: E402
from checker.cli import PROPERTIES, property_options  # noqa: E402
from checker.models import Model  # noqa: E402
from checker.models.registry import MODELS  # noqa: E402
from checker.transactions import ISOLATION_LEVELS  # noqa: E402
from harness import registry  # noqa: E402
from harness.systems.base import Setting  # noqa: E402
from harness.systems.broker_triggers import LOGGED_KINDS  # noqa: E402
from harness.workloads.base import AlsoByCapability, ByCapability  # noqa: E402
from nemesis.forms import HasForms, is_of_all  # noqa: E402
from nemesis.shapes import SHAPES  # noqa: E402
from nemesis.triggers import KINDS as TRIGGERS  # noqa: E402
from nemesis.victims import TARGETS  # noqa: E402

NOTE = "<!-- Written by scripts/generate_docs.py from the code; edit it there. -->"

CHECKERS: Mapping[str, Callable[..., Any]] = {
    "list-append": checker.check_transactions,
    "rw-register": checker.check_transactions,
    "log-losses": checker.check_log,
    "total-queue": checker.check_total_queue,
    "simple-set": checker.check_set,
    "set-full": checker.check_set_full,
    "unique-ids": checker.check_unique_ids,
    "counter-bounds": checker.check_counter,
    "exclusion": checker.check_exclusion,
    "bank": checker.check_bank,
    "long-fork": checker.check_long_fork,
    "write-skew": checker.check_write_skew,
    "delay": checker.check_delay,
    "transaction-visibility": checker.check_transaction_visibility,
    "consumer-progress": checker.check_consumer_progress,
    "sessions": checker.check_sessions,
}
"""Command-line name -> function, for the checkers other than linearizability."""

EXAMPLES = {"level": "snapshot-isolation", "allow_duplicates": "false", "linearizable": "true", "total": "800"}
"""Option -> a value other than its default, for the example command."""


def pages() -> dict[Path, str]:
    """Every generated page by its path under docs/."""
    nemeses, workloads = registry.load_all("nemeses"), registry.load_all("workloads")
    if not nemeses or not workloads:
        # Without the distribution the registry is empty, and every page would be removed.
        raise SystemExit(f"splitbrain is not installed for {sys.executable}: run .venv/bin/python {__file__}")
    found = {Path("nemeses") / f"{name}.md": nemesis_page(nemesis) for name, nemesis in nemeses.items()}
    found[Path("nemeses") / "README.md"] = nemeses_index(nemeses)
    found |= {Path("workloads") / f"{name}.md": workload_page(workload) for name, workload in workloads.items()}
    found[Path("workloads") / "README.md"] = workloads_index(workloads)
    found |= {Path("checkers") / f"{name}.md": model_page(name, model) for name, model in MODELS.items()}
    found |= {Path("checkers") / f"{name}.md": property_page(name, CHECKERS[name]) for name in PROPERTIES}
    found[Path("checkers") / "README.md"] = checkers_index()
    return found


def nemeses_index(nemeses: Mapping[str, Any]) -> str:
    """The index of nemeses, and how to choose them."""
    lines = [NOTE, "", "# Nemeses", ""]
    by_name = [name for name, nemesis in nemeses.items() if not is_of_all(nemesis)]
    left_out = " and ".join(by_name)
    listed = [[f"[{name}]({name}.md)", nemesis.description] for name, nemesis in nemeses.items()]
    lines += table(["nemesis", "what it does"], listed)
    lines += [
        "",
        "## Choosing",
        "",
        "    --nemesis partition,clock,kill      these in turn, each cycling through all its variants",
        f"    --nemesis all                       every one that cluster and system support, except {left_out}",
        f"    --nemesis all,{by_name[0]:<21} also one that all leaves out",
        "    --nemesis kill=sigkill              one form, at its own targets in turn",
        "    --nemesis kill@leader               every form, at the leader",
        "    --nemesis kill=sigkill@n1+n3        one form, at these hosts",
        "    --nemesis-schedule FILE             what happens when, as a JSON list; faults may overlap",
        "",
        "Every run writes its `schedule.json`, which is such a file:",
        "",
        '    [{"at_s": 5.0, "action": "inject", "id": "f1", "nemesis": "kill", "variant": "sigkill@leader"},',
        '     {"at_s": 8.0, "action": "inject", "id": "f2", "nemesis": "clock", "variant": "bump@minority"},',
        '     {"at_s": 12.0, "action": "heal", "id": "f1"}, {"at_s": 14.0, "action": "heal", "id": "f2"}]',
        "",
        "An event may wait for something that the replicas do: it happens when that next occurs after the event's",
        "time, or 3 s later if it does not occur. Simulation sees every trigger; on `local` and `netns` only triggers",
        "that a replica logs at once are seen, some milliseconds later. If a trigger cannot be seen, the run reports",
        "it at its start, and only the event's time counts.",
        "",
        '    {"at_s": 5.0, "when": "elected@n2+0.1", "action": "inject", "id": "f3", "nemesis": "kill", ...}',
        "",
        "`@HOST` and `+SECONDS` are optional. The triggers:",
        "",
        *table(
            ["trigger", "what happens", "seen on"],
            [
                [f"`{kind}`", what, "sim, local, netns" if kind in LOGGED_KINDS else "sim"]
                for kind, what in TRIGGERS.items()
            ],
        ),
        "",
        "A partition may also be given by its hosts, in a schedule or as `--nemesis 'partition=n1+n2|n3'`: this cuts",
        "two groups from each other, `n1+n2>n3` only what n3 would hear from the two.",
        "",
        "A fault that the schedule never heals is healed at the end. The seed of the run decides everything that a",
        "variant leaves open: which hosts, by how much, in which order.",
        "",
        "## Targets",
        "",
    ]
    rows = [[f"`{word}`", meaning] for word, meaning in TARGETS.items()] + [["`n1`, `n1+n3`", "these hosts"]]
    lines += table(["target", "hosts"], rows)
    lines += [
        "",
        "`harness doctor` shows which nemeses each kind of cluster supports on this machine, and what is missing;",
        "`harness doctor --prove` injects, proves and heals each of them once, or only those given by `--nemesis`.",
    ]
    return "\n".join(lines) + "\n"


def nemesis_page(nemesis: Any) -> str:
    """One nemesis: its description, forms, targets and proofs."""
    lines = [NOTE, "", f"# {nemesis.name}", "", f"{sentence(nemesis.description)}", ""]
    if not isinstance(nemesis, HasForms):
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
            for form in nemesis.forms.values()
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
    """The index of workloads."""
    rows = [[f"[{name}]({name}.md)", workload.description] for name, workload in workloads.items()]
    return "\n".join([NOTE, "", "# Workloads", "", *table(["workload", "what clients do"], rows)]) + "\n"


def workload_page(workload: Any) -> str:
    """One workload: its description, and what it requires of a system."""
    lines = [NOTE, "", f"# {workload.name}", "", sentence(workload.description), ""]
    if isinstance(workload, ByCapability):
        return "\n".join([*lines, *by_capability(workload)]) + "\n"
    lines += [f"Needs a system that offers `{workload.requires}` connections.", ""]
    lines += prose(inspect.getmodule(workload))
    if isinstance(workload, AlsoByCapability):
        form = workload.by_capability
        lines += ["", "## With any client", "", sentence(form.description), "", *by_capability(form)]
    return "\n".join(lines) + "\n"


def by_capability(workload: Any) -> list[str]:
    """The requirements, settings and description of a workload by capability."""
    methods = ", ".join(f"`{method}`" for method in workload.capabilities)
    lines = [f"Needs a client, written with `harness.sdk` or speaking JSON lines, that has {methods}.", ""]
    if workload.settings:
        lines += table(["setting", "default", "meaning", "values"], [
            [f"`workload.{each.name}`", f"`{each.default}`", each.description, values_of(each)]
            for each in workload.settings
        ])  # fmt: skip
        lines += ["", f"    --set workload.{workload.settings[0].name}={workload.settings[0].default}", ""]
    return [*lines, *prose(inspect.getmodule(workload))]


def values_of(setting: Setting) -> str:
    """The values that a setting accepts."""
    if setting.bounds is not None:
        return f"{setting.bounds[0]} to {setting.bounds[1]}"
    return ", ".join(f"`{choice}`" for choice in setting.choices)


def checkers_index() -> str:
    """The index of models and of the other checkers."""
    lines = [NOTE, "", "# Checkers", ""]
    lines += [
        "`harness check FILE --model NAME` checks a [recorded history](../recorded-histories.md); workloads use the"
    ]
    lines += ["same functions. Options follow the name: `--model cas-register:initial=0`, `--model bank:total=800`."]
    lines += ["[checking.md](../checking.md) explains how they decide, and how fast.", ""]
    lines += ["## Linearizability, against a model", ""]
    lines += table(["model", "what it is"], [
        [f"[{name}]({name}.md)", first_sentence(inspect.getdoc(model))] for name, model in MODELS.items()
    ])  # fmt: skip
    lines += ["", "`sequential:NAME` checks sequential consistency with the same model.", ""]
    lines += ["## Other properties", ""]
    lines += table(["checker", "what must hold"], [
        [f"[{name}]({name}.md)", first_sentence(inspect.getdoc(CHECKERS[name]))] for name in PROPERTIES
    ])  # fmt: skip
    return "\n".join(lines) + "\n"


def model_page(name: str, model: type[Model]) -> str:
    """One model: its operations, fields and command line."""
    lines = [NOTE, "", f"# {name}", "", *markdown(inspect.getdoc(model)), ""]
    if model.functions:
        lines += [f"Operations: {', '.join(f'`{f}`' for f in sorted(model.functions))}.", ""]
    fields = dataclasses.fields(model)
    if fields:
        first = fields[0].name
        lines += table(["field", "default"], [[f"`{each.name}`", f"`{default_of(each)}`"] for each in fields])
        lines += ["", f"    harness check history.jsonl --model {name}:{first}=VALUE", ""]
    else:
        lines += [f"    harness check history.jsonl --model {name}", ""]
    lines += [f"In Python: `checker.check(history, checker.{model.__name__}(...))`."]
    return "\n".join(lines) + "\n"


def property_page(name: str, check: Callable[..., Any]) -> str:
    """One checker other than linearizability: its description, options and command line."""
    lines = [NOTE, "", f"# {name}", "", *markdown(inspect.getdoc(check)), ""]
    options = property_options(name)
    if options:
        lines += table(["option", "default"], [[f"`{each}`", f"`{as_json(options[each])}`"] for each in options])
        if "level" in options:
            lines += ["", f"Levels: {', '.join(f'`{level}`' for level in ISOLATION_LEVELS)}."]
        first = next(iter(options))
        lines += ["", f"    harness check history.jsonl --model {name}:{first}={EXAMPLES.get(first, 'VALUE')}", ""]
    else:
        lines += [f"    harness check history.jsonl --model {name}", ""]
    lines += [f"In Python: `checker.{check.__name__}`."]
    return "\n".join(lines) + "\n"


def as_json(value: Any) -> str:
    """A default value, as written on the command line."""
    return value if isinstance(value, str) else json.dumps(value)


def default_of(each: dataclasses.Field[Any]) -> str:
    if each.default_factory is not dataclasses.MISSING:
        return repr(each.default_factory())
    return "none: must be given" if each.default is dataclasses.MISSING else repr(each.default)


def markdown(text: str | None) -> list[str]:
    """A docstring's lines as Markdown: inline code, literal blocks and roles become code."""
    plain = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", (text or "").replace("``", "`"))
    return re.sub(r"::$", ":", plain, flags=re.MULTILINE).splitlines()


def first_sentence(text: str | None) -> str:
    """The first sentence, without its full stop."""
    flat = " ".join(line.strip() for line in markdown(text))
    return re.split(r"(?<=[.])\s+(?=[A-Z`])", flat, maxsplit=1)[0].removesuffix(".")


def prose(module: Any) -> list[str]:
    """A module's docstring, line by line."""
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
    """Write or check the pages. Returns the exit status."""
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

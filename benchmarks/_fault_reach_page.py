"""The page of which faults reach which programs, from what was seen when it was tried."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks._guests import GUESTS

__all__ = ["write_page"]

_HEAD = """# Which faults reach which programs

Made by `python -m benchmarks.fault_reach`, which runs every cell: the program on a host of its own beside one that is
spared, a client that writes to it all the time, and one fault after the other, injected, proven, looked at again right
before it is healed, and healed. No cell is filled in by hand; what was not run is not there.

- **met**: the fault was in force, and the program itself met it, by the count of its own calls.
- **in force**: it was in force in the program, and whether the program noticed cannot be told (a patched vDSO counts no
  readings of the clock).
- **not met**: it was in force, and the program made no such call while it lasted.
- **not proven**: the run would be `unknown`.

*Control* is the same with the mechanism sabotaged: the program is started without it, everything else is as ever. There
nothing may be proven; a cell that is says **FALSE**.
"""

_WORDS = {"proven, met": "met", "proven": "in force", "met by nobody": "not met"}


def write_page(path: str, cells: Sequence[Mapping[str, Any]]) -> None:
    """Add cells to those that are kept beside the page, and write the page anew."""
    kept_path = Path(os.path.splitext(path)[0] + ".json")
    kept = json.loads(kept_path.read_text()) if kept_path.exists() else []
    key = ("guest", "cluster", "fault", "sabotaged")
    by_key = {tuple(cell[name] for name in key): _without_directories(cell) for cell in (*kept, *cells)}
    found = sorted(by_key.values(), key=lambda cell: [str(cell[name]) for name in key])
    kept_path.write_text(json.dumps(found, indent=1) + "\n")
    Path(path).write_text(_page(found))


def _without_directories(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Where programs and files lay on the machine is nobody's business."""
    return {**cell, "detail": re.sub(r"(?<![\w/])/(?:[^\s/()]+/)+", "", cell["detail"])}


def _page(cells: Sequence[Mapping[str, Any]]) -> str:
    lines = [_HEAD]
    columns = list(dict.fromkeys((cell["guest"], cell["cluster"]) for cell in cells))
    words = {(cell["guest"], cell["cluster"], cell["fault"], cell["sabotaged"]): cell for cell in cells}
    titles = [f"{guest} on {cluster}" for guest, cluster in columns]
    lines.append("| fault | " + " | ".join(f"{title} | control" for title in titles) + " |")
    lines.append("|---" * (1 + 2 * len(columns)) + "|")
    for fault in dict.fromkeys(cell["fault"] for cell in cells):
        row = [f"`{fault}`"]
        for guest, cluster in columns:
            for is_sabotaged in (False, True):
                row.append(_shown(words.get((guest, cluster, fault, is_sabotaged)), is_sabotaged))
        lines.append("| " + " | ".join(row) + " |")
    lines.append("\nThe programs:\n")
    for name in dict.fromkeys(guest for guest, _ in columns):
        lines.append(f"- {name}: {GUESTS[name].description}")
    return "\n".join(lines) + "\n"


def _shown(cell: Mapping[str, Any] | None, is_sabotaged: bool) -> str:
    if cell is None:
        return "not tried"
    word: str = _WORDS.get(cell["word"], cell["word"])
    if is_sabotaged and cell["proven"] and cell["exercised"] is not False:
        return "**FALSE**"
    return word if cell["healed"] else f"{word}, **not healed**"

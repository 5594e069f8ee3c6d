"""The programs in docs/client.md do what the page says."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "client.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(import asyncio\n.*?)```\n\n```text\n(.*?)```", PAGE, re.S)


def test_the_page_has_five_programs() -> None:
    assert len(PROGRAMS) == 5


@pytest.mark.parametrize(("program", "output"), PROGRAMS, ids=["first", "push", "ordered", "transaction", "failure"])
def test_programs_print_what_the_page_says(serving: Any, tmp_path: Path, program: str, output: str) -> None:
    async def scenario() -> None:
        async with serving({"unused": 1}) as served:
            path = tmp_path / "program.py"
            path.write_text(program.replace("127.0.0.1:9876", served.name_server), encoding="utf-8")
            process = await asyncio.create_subprocess_exec(
                sys.executable, str(path), stdout=asyncio.subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)}
            )
            printed, _ = await asyncio.wait_for(process.communicate(), 60)
            assert process.returncode == 0
            said = printed.decode().replace(served.name_server, "127.0.0.1:9876")
            if "stored in queue" in output:  # which one is a matter of chance
                said, output_here = (re.sub(r"queue \d", "queue N", text) for text in (said, output))
                assert said == output_here
            else:
                assert said == output

    asyncio.run(scenario())

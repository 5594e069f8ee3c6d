"""A call that a plug-in does not await is the plug-in's mistake, not an operation of the system."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

from harness.in_process import run_in_process
from harness.sdk.plugin import load_file

SOURCE = """
from harness.sdk import Client, System
import {name}_driver as driver

class Mine(System):
    def command(self, host):
        return ["server"]

class Talk(Client):
    held = {{}}

    async def read(self, key):
        return self.held.get(key)

    async def write(self, key, value):
        {write}
"""
DRIVER = """
async def put(held, key, value):
    held[key] = value

async def put_all(held, *pairs):
    for pair in pairs:
        put(held, *pair)
"""


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        ("await driver.put(self.held, key, value)", None),
        (
            "driver.put(self.held, key, value)",
            r"^ClientMistake: write: put\(\) was called but not awaited \({file}:16\)$",
        ),
        ("return driver.put(self.held, key, value)", r"^ClientMistake: write: put\(\) was called but not awaited"),
        ("result = driver.put(self.held, key, value)", r"^ClientMistake: write: put\(\) was called but not awaited"),
        (
            "await driver.put_all(self.held, (key, value))",
            r"write: put\(\) was called but not awaited \(\w+_driver.py:7\)$",
        ),
    ],
)
def test_a_call_that_a_client_does_not_await_is_a_client_mistake(
    tmp_path: Path, write: str, expected: str | None
) -> None:
    name = re.sub(r"\W", "_", tmp_path.name)  # unique, because modules stay imported by name
    (tmp_path / f"{name}_driver.py").write_text(DRIVER)
    path = tmp_path / f"{name}.py"
    path.write_text(SOURCE.format(name=name, write=write))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as under python -W error
        run = run_in_process("register", load_file(str(path)).client_class, operations=60)
    if expected is None:
        assert run.valid and not run.unexpected_errors
        return
    assert all(re.search(expected.format(file=path.name), text) for text in run.unexpected_errors), (
        run.unexpected_errors
    )
    assert run.unexpected_errors and not run.valid
    writes = [event["type"] for event in run.events if event["f"] == "write" and event["type"] != "invoke"]
    assert writes and set(writes) == {"info"}
    assert all(outcome.valid is True for outcome in run.outcomes.values()), "no check reports a loss"

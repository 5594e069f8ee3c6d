"""The clock helper on fake clocks: no test sets the clock of this machine."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.clusters.clock_helper import RESTORE_SCRIPT, ClockHelper, skew_ns

NOTHING = {"offset_ms": 0, "rate_ppm": 0, "strobe_ms": 0, "strobe_period_ms": 0, "step_ms": 0}
SECOND = 1_000_000_000


class Machine:
    """The fake clocks of a machine. The wall clock keeps running after it was set."""

    def __init__(self) -> None:
        self.boot_ns = 50 * SECOND
        self.ahead_ns = 1_700_000_000 * SECOND
        self.is_stubborn = False
        self.boot_id = "first"

    def reboot(self) -> None:
        """Reboot within a second; the battery-backed clock has kept the right time."""
        right_ns = self.wall_ns() + SECOND
        self.boot_id, self.boot_ns = "second", SECOND
        self.ahead_ns = right_ns - self.boot_ns

    def helper(self) -> ClockHelper:
        return ClockHelper(
            since_boot_ns=lambda: self.boot_ns,
            wall_ns=self.wall_ns,
            set_wall=self.set_wall,
            boot_id=lambda: self.boot_id,
        )

    def wall_ns(self) -> int:
        return self.boot_ns + self.ahead_ns

    def set_wall(self, at_ns: int) -> None:
        if not self.is_stubborn:
            self.ahead_ns = at_ns - self.boot_ns


async def until_moved(machine: Machine, from_ns: int) -> None:
    """Wait until the helper has set the wall clock."""
    async with asyncio.timeout(20):
        while machine.ahead_ns == from_ns:  # noqa: ASYNC110 - the helper sends no event
            await asyncio.sleep(0)


def test_skews_add_up_and_the_true_time_is_restored_on_release(tmp_path: Path) -> None:
    async def body() -> None:
        machine = Machine()
        true_ns, helper = machine.ahead_ns, machine.helper()
        with pytest.raises(ValueError, match="not opened"):
            await helper.skew({"fault": "f", "skew": NOTHING})
        await helper.release_all({})
        await helper.open({"base": str(tmp_path / "clock.base")})
        await helper.skew({"fault": "hour", "skew": {**NOTHING, "offset_ms": 3_600_000}})
        await helper.skew({"fault": "bump", "skew": {**NOTHING, "offset_ms": -1500}})
        assert machine.ahead_ns - true_ns == 3_598_500 * 1_000_000
        # Another helper, after the first was killed, reads the true time from the file.
        other = machine.helper()
        await other.open({"base": str(tmp_path / "clock.base")})
        await other.skew({"fault": "hour", "skew": {**NOTHING, "offset_ms": 1000}})
        assert machine.ahead_ns - true_ns == SECOND
        await other.release({"fault": "hour"})
        await other.release({"fault": "hour"})
        assert machine.ahead_ns == true_ns
        await other.skew({"fault": "reset", "skew": {**NOTHING, "offset_ms": -1000}})
        machine.is_stubborn = True
        with pytest.raises(ValueError, match="the clock is off by -1000 ms after it was corrected"):
            await other.release_all({})

    asyncio.run(body())


def test_a_drifting_or_strobing_clock_is_set_until_it_is_released(tmp_path: Path) -> None:
    async def body() -> None:
        machine = Machine()
        true_ns, helper = machine.ahead_ns, machine.helper()
        await helper.open({"base": str(tmp_path / "clock.base")})
        await helper.skew({"fault": "drift", "skew": {**NOTHING, "rate_ppm": 500_000}})
        machine.boot_ns += 4 * SECOND
        await until_moved(machine, true_ns)
        assert machine.ahead_ns - true_ns == 2 * SECOND
        await helper.skew({"fault": "swing", "skew": {**NOTHING, "strobe_ms": 700, "strobe_period_ms": 100}})
        await helper.release({"fault": "drift"})
        assert machine.ahead_ns == true_ns
        machine.boot_ns += 60_000_000
        await until_moved(machine, true_ns)
        assert machine.ahead_ns - true_ns == 700_000_000
        await helper.release_all({})
        machine.boot_ns += 60_000_000
        await asyncio.sleep(0.05)
        assert machine.ahead_ns == true_ns

    asyncio.run(body())


def test_a_clock_that_was_not_corrected_is_corrected_when_the_release_is_repeated(tmp_path: Path) -> None:
    async def body() -> None:
        machine = Machine()
        true_ns, helper = machine.ahead_ns, machine.helper()
        await helper.open({"base": str(tmp_path / "clock.base")})
        await helper.skew({"fault": "hour", "skew": {**NOTHING, "offset_ms": 3_600_000}})
        machine.is_stubborn = True
        for _ in range(2):
            with pytest.raises(ValueError, match="the clock is off by 3600000 ms after it was corrected"):
                await helper.release({"fault": "hour"})
        machine.is_stubborn = False
        await helper.release({"fault": "hour"})
        assert machine.ahead_ns == true_ns

    asyncio.run(body())


def test_a_clock_that_no_fault_of_this_helper_skews_is_corrected_too(tmp_path: Path) -> None:
    """An earlier helper may have skewed it, and been killed."""

    async def body() -> None:
        machine = Machine()
        true_ns = machine.ahead_ns
        await machine.helper().open({"base": str(tmp_path / "clock.base")})
        machine.ahead_ns = true_ns + SECOND
        helper = machine.helper()
        await helper.open({"base": str(tmp_path / "clock.base")})
        await helper.release_all({})
        assert machine.ahead_ns == true_ns

    asyncio.run(body())


def test_a_clock_that_is_off_by_a_fifth_of_a_second_is_not_right(tmp_path: Path) -> None:
    async def body() -> None:
        machine = Machine()
        helper = machine.helper()
        await helper.open({"base": str(tmp_path / "clock.base")})
        for off_ms, is_right in ((50, True), (-50, True), (200, False), (-200, False)):
            await helper.skew({"fault": "f", "skew": {**NOTHING, "offset_ms": off_ms}})
            machine.is_stubborn = True
            said = []
            try:
                await helper.release({"fault": "f"})
            except ValueError as error:
                said.append(str(error))
            machine.is_stubborn = False
            assert said == ([] if is_right else [f"the clock is off by {off_ms} ms after it was corrected"])

    asyncio.run(body())


def test_a_clock_is_not_set_any_more_once_nothing_moves_it(tmp_path: Path) -> None:
    """An operator may set it after the run."""

    async def body() -> None:
        machine = Machine()
        helper = machine.helper()
        await helper.open({"base": str(tmp_path / "clock.base")})
        await helper.skew({"fault": "drift", "skew": {**NOTHING, "rate_ppm": 500_000}})
        [mover] = asyncio.all_tasks() - {asyncio.current_task()}
        await helper.release({"fault": "drift"})
        assert mover.cancelling() and asyncio.all_tasks() == {mover, asyncio.current_task()}
        await asyncio.wait([mover])

    asyncio.run(body())


def test_a_clock_that_could_not_be_set_once_is_moved_on(tmp_path: Path) -> None:
    async def body() -> None:
        machine = Machine()
        true_ns, refused = machine.ahead_ns, 0

        def set_wall(at_ns: int) -> None:
            nonlocal refused
            if machine.boot_ns > 50 * SECOND and not refused:
                refused += 1
                raise OSError("not now")
            machine.set_wall(at_ns)

        helper = ClockHelper(
            since_boot_ns=lambda: machine.boot_ns, wall_ns=machine.wall_ns, set_wall=set_wall, boot_id=lambda: "first"
        )
        await helper.open({"base": str(tmp_path / "clock.base")})
        await helper.skew({"fault": "drift", "skew": {**NOTHING, "rate_ppm": 500_000}})
        [mover] = asyncio.all_tasks() - {asyncio.current_task()}
        machine.boot_ns += 4 * SECOND
        moved = asyncio.create_task(until_moved(machine, true_ns))
        await asyncio.wait([mover, moved], return_when=asyncio.FIRST_COMPLETED)
        assert not mover.done() and refused == 1 and machine.ahead_ns - true_ns == 2 * SECOND
        await helper.release_all({})

    asyncio.run(body())


def test_the_true_time_is_on_the_disk_before_the_helper_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, synced = tmp_path / "clock.base", []

    def sync(descriptor: int) -> None:
        synced.append((os.readlink(f"/proc/self/fd/{descriptor}"), base.exists()))

    monkeypatch.setattr(os, "fsync", sync)
    asyncio.run(Machine().helper().open({"base": str(base)}))
    assert synced == [(f"{base}.new", False)] and base.exists()


@given(st.integers(-(10**9), 10**9), st.integers(-900_000, 900_000), st.integers(0, 10**14))
def test_a_skew_grows_by_its_rate_from_its_offset(offset_ms: int, rate_ppm: int, elapsed_ns: int) -> None:
    skew = {**NOTHING, "offset_ms": offset_ms, "rate_ppm": rate_ppm}
    assert skew_ns(skew, 0) == offset_ms * 1_000_000
    added_ns = skew_ns(skew, elapsed_ns) - offset_ms * 1_000_000
    assert abs(added_ns - rate_ppm * elapsed_ns / 1e6) <= 1 + elapsed_ns * 1e-12


def test_a_drifting_clock_is_stepped_right_each_time_it_is_off_by_the_step() -> None:
    skew = {**NOTHING, "rate_ppm": 500_000, "step_ms": 300}
    found = [skew_ns(skew, elapsed_ms * 1_000_000) // 1_000_000 for elapsed_ms in (0, 400, 598, 600, 800, 1300)]
    assert found == [0, 200, 299, 0, 100, 50]
    assert skew_ns({**skew, "rate_ppm": -500_000}, 800_000_000) == -100_000_000


def restore(machine: Machine, base: Path) -> None:
    """Run the script that `harness clean` runs on the machine."""
    boot_id = base.with_name("boot_id")
    boot_id.write_text(f"{machine.boot_id}\n")
    script = re.sub(r"time\.clock_settime_ns\(time\.CLOCK_REALTIME, (.*)\)\n", r"settle(\1)\n", RESTORE_SCRIPT)
    script = script.replace("time.clock_gettime_ns(time.CLOCK_BOOTTIME)", "boot_ns")
    script = script.replace("sys.argv[1]", repr(str(base)))
    script = script.replace("/proc/sys/kernel/random/boot_id", str(boot_id))
    assert "time." not in script and "/proc" not in script
    exec(script, {"settle": machine.set_wall, "boot_ns": machine.boot_ns})


def test_the_skew_left_by_a_killed_helper_is_corrected_exactly_once(tmp_path: Path) -> None:
    base = tmp_path / "clock.base"
    machine = Machine()
    asyncio.run(machine.helper().open({"base": str(base)}))
    true_ns = machine.ahead_ns
    for wrong_ns, right_ns in ((12345, true_ns), (777, true_ns + 777)):  # there is nothing to correct the second time
        machine.ahead_ns = true_ns + wrong_ns
        restore(machine, base)
        assert machine.ahead_ns == right_ns and not base.exists()


def test_restoring_after_a_reboot_leaves_the_correct_clock_alone(tmp_path: Path) -> None:
    base = tmp_path / "clock.base"
    machine = Machine()
    asyncio.run(machine.helper().open({"base": str(base)}))
    machine.reboot()
    true_ns = machine.ahead_ns
    restore(machine, base)
    assert machine.ahead_ns == true_ns and not base.exists()


def test_a_helper_records_the_true_time_again_after_a_reboot(tmp_path: Path) -> None:
    async def body() -> None:
        base = tmp_path / "clock.base"
        machine = Machine()
        await machine.helper().open({"base": str(base)})
        machine.reboot()
        true_ns, helper = machine.ahead_ns, machine.helper()
        await helper.open({"base": str(base)})
        await helper.skew({"fault": "hour", "skew": {**NOTHING, "offset_ms": 1000}})
        assert machine.ahead_ns - true_ns == SECOND
        restore(machine, base)
        assert machine.ahead_ns == true_ns

    asyncio.run(body())

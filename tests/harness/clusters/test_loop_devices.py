"""The mark on an image: whose it is, and whether that harness is dead."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness.clusters import loop_devices
from harness.clusters.loop_devices import MARK_BYTES, ImageMark, file_id, image_mark
from harness.run_state import harness_process


def mark_read_from(path: Path, content: bytes) -> ImageMark | None:
    path.write_bytes(content)
    return loop_devices._read_mark(str(path))


def test_a_mark_names_the_run_its_harness_and_its_state(tmp_path: Path) -> None:
    state = tmp_path / "r1.jsonl"
    mark = mark_read_from(tmp_path / "image", image_mark("r1", str(state)) + b"file system")
    assert mark == ImageMark(run_id="r1", state=str(state), **harness_process())
    assert not mark.is_of_the_dead and not mark.has_state
    state.symlink_to("nowhere")
    assert mark.has_state


@pytest.mark.parametrize("too_long", [0, 1])
def test_a_state_whose_path_does_not_fit_is_left_out(tmp_path: Path, too_long: int) -> None:
    path = "/" * (MARK_BYTES - len(image_mark("r" * 64, "").rstrip(b"\0")) + too_long)
    mark = image_mark("r" * 64, path)
    assert len(mark) == MARK_BYTES
    found = mark_read_from(tmp_path / "image", mark)
    assert found is not None and found.run_id == "r" * 64
    assert found.state == ("" if too_long else path)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\0" * MARK_BYTES, b"another mark\n", b"splitbrain image \n", b"splitbrain image 7\n",
        b'splitbrain image {"run": "r1"}\n', b'splitbrain image {"run": "r1", "pid": null, "start_ticks": 1}\n',
        b'splitbrain image {"run": "r1", "pid": 1, "start_ticks": 2, "boot_id": "b", "pid_namespace": "x"}\n',
        b"splitbrain image \xff\xfe\n", pytest.param(b" " + image_mark("r1", "")[:-1], id="a mark after a blank"),
    ],
)  # fmt: skip
def test_what_is_no_mark_of_ours_is_none(tmp_path: Path, content: bytes) -> None:
    assert mark_read_from(tmp_path / "image", content) is None
    assert loop_devices._read_mark(str(tmp_path / "missing")) is None


def test_only_a_harness_that_ran_here_and_has_ended_is_dead() -> None:
    own = harness_process()
    for change, is_dead in (
        ({}, False),
        ({"start_ticks": own["start_ticks"] + 1}, True),
        ({"start_ticks": own["start_ticks"] + 1, "boot_id": "of another machine"}, False),
        ({"start_ticks": own["start_ticks"] + 1, "pid_namespace": None}, True),
    ):
        assert ImageMark(run_id="r1", **{**own, **change}).is_of_the_dead is is_dead, change


def test_a_harness_that_may_run_out_of_sight_is_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.run_state._FIRST_PID_NAMESPACE", 1)
    assert not ImageMark(run_id="r1", **{**harness_process(), "pid_namespace": 7}).is_of_the_dead


def test_a_file_is_identified_by_its_device_in_the_kernel_s_numbering(monkeypatch: pytest.MonkeyPatch) -> None:
    for major, minor, number in ((8, 1, 0x801), (7, 0x123, 0x100723), (0x103, 0xFFFFF, 0xFFF103FF)):
        status = os.stat_result((0, 99, os.makedev(major, minor), *[0] * 7))
        with monkeypatch.context() as patched:
            patched.setattr(os, "stat", lambda path, status=status: status)
            found = file_id("image")
        assert found == [number, 99]

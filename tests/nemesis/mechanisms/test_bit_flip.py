"""The program that flips a bit, run as a host would run it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemesis.mechanisms.bit_flip import FLIP_SCRIPT, FlippedBits, flip_arguments, parse_flip, restore_arguments
from nemesis.target import BitFlipped


def run(*arguments: str, script: str = FLIP_SCRIPT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", "-S", "-", *arguments], input=script, capture_output=True, text=True, timeout=30
    )


def test_one_bit_of_the_largest_file_is_flipped_and_put_back(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    small, large = tmp_path / "log" / "00", tmp_path / "log" / "01"
    small.write_bytes(b"x" * 10 + bytes(5000))
    content = bytes(range(1, 201)) + bytes(3 << 20)  # the rest is only allocated in advance
    large.write_bytes(content)
    flipped = parse_flip(run(*flip_arguments(str(tmp_path), "log/*", 0.25, 7)).stdout)
    assert (flipped.path, flipped.offset, flipped.before, flipped.after) == (str(large), 50, 51, 51 ^ 128)
    assert large.read_bytes() == content[:50] + bytes([51 ^ 128]) + content[51:]
    for _ in range(2):
        assert run(*restore_arguments(flipped)).returncode == 0
        assert large.read_bytes() == content


def test_a_byte_that_is_not_restored_although_it_was_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"a")
    flipped = parse_flip(run(*flip_arguments(str(tmp_path), "log", 0.5, 1)).stdout)
    write = "file.write(bytes([value]))"
    assert FLIP_SCRIPT.count(write) == 1
    done = run(*restore_arguments(flipped), script=FLIP_SCRIPT.replace(write, "file.write(b'?')"))
    assert (done.returncode, done.stderr) == (1, f"byte 0 of {tmp_path / 'log'} is not 97 again but [63]\n")


def test_a_file_of_zeros_has_no_bit_to_flip(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(bytes(100))
    done = run(*flip_arguments(str(tmp_path), "empty", 0.5, 0))
    assert done.returncode == 1 and "there is no empty" in done.stderr
    with pytest.raises(ValueError, match="no word of a flipped bit"):
        parse_flip(done.stdout)


@pytest.mark.parametrize("files", ["{outside}/*", "../outside/*", "linked/*", "link"])
def test_no_file_outside_the_data_directory_is_damaged(tmp_path: Path, files: str) -> None:
    """An absolute path, `..` or a link may lead to a database of the machine's own."""
    data, outside = tmp_path / "data", tmp_path / "outside"
    data.mkdir()
    outside.mkdir()
    (outside / "theirs").write_bytes(b"x" * 100)
    (data / "linked").symlink_to(outside)
    (data / "link").symlink_to(outside / "theirs")
    done = run(*flip_arguments(str(data), files.format(outside=outside), 0.5, 0))
    assert done.returncode == 1 and "in which a bit could be flipped" in done.stderr
    assert (outside / "theirs").read_bytes() == b"x" * 100


def put_back(bits: FlippedBits, files: dict[str, bytearray], fault_id: str) -> None:
    """Restore a bit as the hosts' disks do when a fault ends."""
    for host, flipped in bits.of(fault_id).items():
        way_back = bits.way_back(fault_id, host)
        if way_back is not None and files[host][flipped.offset] == way_back.after:
            files[host][flipped.offset] = way_back.before
        bits.forget(fault_id, host)


FLIPS = st.lists(
    st.tuples(st.sampled_from(("n1", "n2")), st.integers(min_value=0, max_value=1), st.integers(0, 7)), max_size=6
)


@given(flips=FLIPS, data=st.data())
def test_every_bit_is_restored_in_whatever_order_the_faults_end(
    flips: list[tuple[str, int, int]], data: st.DataObject
) -> None:
    """After each end the files contain exactly the flips of the remaining faults."""
    files, bits, left = {host: bytearray(b"ab") for host in ("n1", "n2")}, FlippedBits(), {}
    for number, (host, offset, bit) in enumerate(flips):
        before = files[host][offset]
        files[host][offset] ^= 1 << bit
        bits.add(f"f{number}", host, BitFlipped("/data/vote", offset, before, files[host][offset]))
        left[f"f{number}"] = (host, offset, bit)
        if data.draw(st.booleans(), label="one ends"):
            ends = data.draw(st.sampled_from(sorted(left)), label="which")
            put_back(bits, files, ends)
            del left[ends]
            expected = {host: bytearray(b"ab") for host in files}
            for on, at, which in left.values():
                expected[on][at] ^= 1 << which
            assert files == expected and bits.faults() == list(left)
    for fault_id in data.draw(st.permutations(sorted(left)), label="the others"):
        put_back(bits, files, fault_id)
    assert files == {"n1": bytearray(b"ab"), "n2": bytearray(b"ab")} and bits.faults() == []


def test_a_flip_that_was_overwritten_before_the_next_flip_is_not_undone() -> None:
    """0x61 became 0x60, was written as 0x70, and then became 0x78: only the second flip can be undone."""
    files, bits = {"n1": bytearray(b"\x78")}, FlippedBits()
    bits.add("f1", "n1", BitFlipped("/data/vote", 0, 0x61, 0x60))
    bits.add("f2", "n1", BitFlipped("/data/vote", 0, 0x70, 0x78))
    assert bits.way_back("f1", "n1") is None
    put_back(bits, files, "f1")
    assert files["n1"] == b"\x78"
    put_back(bits, files, "f2")
    assert files["n1"] == b"\x70"

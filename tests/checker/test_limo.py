"""LiMo's traces, in every form that its description and its histories use."""

from __future__ import annotations

import pytest

from checker import FIFOQueue, FormatError, Stack, Verdict, check
from checker.codecs import read_bytes


def trace(*rows: str, of: str = "atomic-stack") -> bytes:
    return "\n".join([f"# @object {of}", *rows, ""]).encode()


def operations(content: bytes) -> list[tuple[str, object, object]]:
    return [(o.f, o.value, o.result) for o in read_bytes(content, source="trace.limo")]


def test_the_example_in_limos_description_is_read() -> None:
    history = read_bytes(trace("[1] call push 1", "[2] call pop", "[1] return", "[2] return 1"), source="x")
    assert [(o.f, o.value, o.result) for o in history] == [("push", 1, None), ("pop", None, 1)]
    assert check(history, Stack()).verdict is Verdict.VALID


@pytest.mark.parametrize(
    ("put", "take"),
    [("enq(1)", "deq"), ("enqueue 1", "dequeue()"), ("add( 1 )", "rem"), ("put(1)", "get"), ("push(1)", "pop")],
)
def test_every_pair_of_put_and_take_methods_is_known(put: str, take: str) -> None:
    rows = [f"[1] call {put}", "[1] return", f"[2] call {take}", "[2] return %s"]
    for answer, verdict in ((1, Verdict.VALID), (2, Verdict.INVALID), ("empty", Verdict.INVALID)):
        content = trace(*rows, of="atomic-queue").replace(b"%s", str(answer).encode())
        assert check(read_bytes(content, source="x"), FIFOQueue()).verdict is verdict


def test_the_call_of_a_take_may_name_the_value_taken() -> None:
    rows = ["[0] call push(?<0,0>)", "[0] return", "[1] call pop(?<0,0>)", "[1] return", "[1] call pop", "[1] return"]
    assert operations(trace(*rows)) == [("push", "?<0,0>", None), ("pop", None, "?<0,0>"), ("pop", None, None)]
    with pytest.raises(FormatError, match=r"x:3: the call took 1, and the return says 2"):
        read_bytes(trace("[1] call pop(1)", "[1] return 2"), source="x")


def test_methods_of_objects_other_than_containers_keep_their_arguments() -> None:
    rows = ["[1] call remove(3)", "[1] return true", "[1] call put(k, 4)", "[1] return"]
    assert operations(trace(*rows, of="atomic-set")) == [("remove", 3, True), ("put", ["k", 4], None)]

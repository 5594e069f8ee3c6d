"""The command reports any defect of a file in one line that names the file, and exits with 254."""

from __future__ import annotations

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from checker.cli import PROPERTIES, main
from checker.codecs import read
from checker.models import MODELS

GOOD = (
    '{"index": 0, "process": 0, "type": "invoke", "f": "write", "value": 1}\n'
    '{"index": 1, "process": 0, "type": "ok", "f": "write", "value": 1}\n'
)
INVOKE = '{"process": 1, "type": "invoke", "f": "write", "value": %s}\n{"process": 1, "type": "ok", "f": "write"}\n'

BROKEN: dict[str, tuple[bytes, str]] = {
    "nothing.jsonl": (b"", "no client operations"),
    "blank.jsonl": (b"\n\n\n", "no client operations"),
    "foreign.jsonl": (
        GOOD.replace('"process": 0', '"process": "nemesis"').encode(),
        "all of its 2 events are from the nemesis",
    ),
    "fraction.jsonl": (GOOD.replace('"process": 0', '"process": 0.5').encode(), ":1: process must be a whole number"),
    "truth.jsonl": (GOOD.replace('"process": 0', '"process": true').encode(), "or a name, not True (bool)"),
    "nobody.jsonl": (GOOD.replace('"process": 0', '"process": null').encode(), "not None (NoneType)"),
    "nameless.jsonl": (GOOD.replace('"process": 0', '"process": ""').encode(), "not an empty name"),
    "gap.jsonl": (GOOD.replace('"index": 1', '"index": 4').encode(), ":2: index 4 comes after index 0: 3 events are"),
    "other-f.jsonl": (GOOD.replace('"write"', '"read"', 1).encode(), ":2: process 0 completes 'write', but has 'read'"),
    "half.jsonl": ((GOOD + '{"index": 2, "pro').encode(), ":3: the last line is cut short"),
    "merged.jsonl": (
        GOOD.replace('"index": 0, ', "").replace('}\n{"index": 1', "", 1).encode(),
        ":1: an object has 'process' twice",
    ),
    "then-json.edn": (
        b"{:process 0 :type :invoke :f :read :value nil}\n{:process 0 :type :ok :f :read :value nil}\n" + GOOD.encode(),
        ":3: a keyword without a name",
    ),
    "commented.edn": (
        b"[0 :invoke :read nil]\n; note {:process 0 :type :ok :f :read}\n",
        ":2: an event within a comment",
    ),
    "long-tuple.edn": (b"[0 :invoke :read nil 0 :ok :read 3]\n", ":1: an event must be a map, not [0, 'invoke'"),
    "empty-tuple.edn": (b"[0 :invoke :read nil]\n[]\n[0 :ok :read 3]\n", ":2: an event must be a map, not []"),
    "two-in-one.log": (b"x 0 :invoke :read nil 1 :invoke :read nil\n", ":1: one value must follow invoke read"),
    "other-line.log": (b"x 0 :invoke :read nil\nx 0 :ok :rea", ":2: not a line of the form"),
    "two-in-one.limo": (b"[1] call add(1)[2] call add(2)\n", ":1: neither '[thread] call method(value)' nor"),
    "swallowed.log": (
        b"INFO  jepsen.util - 0\t:invoke\t:write\t10\n#jepsen.history.Op{:process 0, :type :ok, :f :write}\n",
        ":2: an event within a comment",
    ),
    "swallowed.limo": (b"# @object atomic-queue[1] call add(2)\n[2] call remove\n", ":1: an event within a comment"),
    "bare-tag.edn": (
        b"{:process 0 :type :invoke :f :read}\n#jepsen.history.Op\n",
        ":2: nothing follows '#jepsen.history.Op'",
    ),
    "crash.limo": (b"[1] call add(2)\ncrash\n", ":2: a crash of the whole object"),
    "cut-array.json": (b'[{"process": 0, "type": "invoke", "f": "read"},\n{"process": 0', ":2: not JSON"),
    "behind.json": (b'[{"process": 0, "type": "invoke", "f": "read"}]\n[]', ":2: text after the end of the array"),
    "random.bin": (bytes(range(256)) * 20, "not text: holds a zero byte"),
    "zeros.jsonl": (b"\0" * 5000, ":1: not text: holds a zero byte"),
    "utf16.jsonl": (GOOD.encode("utf-16"), "UTF-16 text; convert it to UTF-8"),
    "latin1.jsonl": (GOOD.encode() + INVOKE.replace("%s", '"caf\xe9"').encode("latin-1"), ":3: not UTF-8 text"),
    "latin1.edn": ('{:process 0, :type :invoke, :f :write, :value "\xe9"}\n'.encode("latin-1"), ":1: not UTF-8 text"),
    "packed.jsonl.gz": (b"\x1f\x8b\x08" + bytes(range(100)), "compressed by gzip"),
    "table.parquet": (b"PAR1" + bytes(50), "a Parquet file"),
    "cut.jsonl": ((GOOD + '{"index": 2, "pro\n').encode(), ":3: not JSON"),
    "giant.jsonl": (b"{" + b"x" * 2_000_000, ":1: "),
    "twice.jsonl": ((GOOD + GOOD).encode(), ":3: index 0 comes after index 1"),
    "shuffled.jsonl": (
        GOOD.replace('"index": 0', '"index": 2').replace('"index": 1', '"index": 0').replace("2", "1", 1).encode(),
        ":2: index 0 comes after index 1",
    ),
    "headless.jsonl": (GOOD.replace('"index": 0', '"index": 7').encode(), ":1: the first index is 7: 7 events are"),
    "orphan.jsonl": (GOOD.split("\n")[1].encode() + b"\n", ":1: process 0 completes 'write', but has no operation"),
    "open.jsonl": (
        GOOD.split("\n")[0].replace('"index": 0, ', "").encode() * 1
        + b"\n"
        + GOOD.split("\n")[0].replace('"index": 0, ', "").encode()
        + b"\n",
        ":2: process 0 invokes",
    ),
    "array.jsonl": (b"[1, 2]\n", "an event must be a map"),
    "number.jsonl": (b"5\n", ":1: an event must be a map"),
    "typeless.jsonl": (b'{"process": 1, "f": "read"}\n', ":1: the event has no 'type'"),
    "nan.jsonl": (INVOKE.replace("%s", "NaN").encode(), ":1: not JSON: NaN"),
    "huge.jsonl": (
        INVOKE.replace("%s", "1e999").encode(),
        ":1: not JSON: 1e999 is too large: it would be read as infinity",
    ),
    "huge.json": (
        b'[{"process": 0, "type": "invoke", "f": "read", "value": -2e999}]',
        ":1: not JSON: -2e999 is too large",
    ),
    "long.jsonl": (INVOKE.replace("%s", "9" * 10_000).encode(), ":1: "),
    "deep.jsonl": (INVOKE.replace("%s", "[" * 100_000 + "]" * 100_000).encode(), ":1: "),
    "nested.jsonl": (INVOKE.replace("%s", "[" * 2000 + "]" * 2000).encode(), "nested too deeply"),
    "cut.json": (b'[{"process": 0,', ":1: not JSON"),
    "numbers.json": (b"[1, 2]", ":1: an event must be a map"),
    "open.edn": (b"{:process 0 :type :invoke :f :read\n", ":1: '{' is never closed"),
    "odd.edn": (b"{:process 0 :type}\n", ":1: a map has a key without a value"),
    "prose.txt": (b"hello\nthis is a text\n", ":1: an event must be a map"),
    "deep.edn": (b"[" * 50_000, ":1: nested too deeply"),
    "braces.edn": (b"[0 :invoke :read nil]\n" + b"{" * 2_000_000, ":2: nested too deeply"),
    "huge.edn": (
        b"[0 :invoke :write 1]\n[0 :ok :write 1e400]\n",
        ":2: '1e400' is too large: it would be read as infinity",
    ),
    "tiny.edn": (b"[0 :invoke :write 1e-2000M]\n", ":1: a decimal of 2,000 places is too long to be read"),
    "vast.edn": (b"[0 :invoke :write [-2e999M]]\n", ":1: '-2e999M' is too large: it would be read as infinity"),
    "long.edn": (b"[0 :invoke :read nil]\n[0 :ok :read %s]\n" % (b"9" * 5_000), ":2: a number of 5000 digits"),
    "long-time.edn": (
        b"{:process 0, :time 1, :type :invoke, :f :read}\n{:process 0, :time 2, :type :ok, :f :read}\n"
        b"{:process 0, :time %s, :type :invoke, :f :read}\n" % (b"9" * 5_000),
        ":3: a number of 5000 digits",
    ),
    "metadata.edn": (b"{:process 0, :type :invoke, :f :write, :value ^{:a 1} 1}\n", ":1: metadata (^) is not EDN"),
    "trace.limo": (b"[1] call add(1)\n[1] return\n[1] return\n", ":3: process 1 completes"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_reported_in_one_line_that_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    content, message = BROKEN[name]
    path = tmp_path / name
    path.write_bytes(content)
    for extra in ([], [str(path), "--jobs", "2"]):
        assert main([str(path), *extra, "--model", "register"]) == 254
        captured = capsys.readouterr()
        assert captured.out == ""
        lines = captured.err.splitlines()
        assert len(lines) == (2 if extra else 1)  # one for each mention of the file in the arguments
        for line in lines:
            assert str(path) in line and message in line and len(line) < 1000


def test_a_lenient_reader_leaves_out_an_event_whose_type_is_not_a_string(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text(GOOD.replace('"index": 0, ', "").replace('"index": 1, ', "").replace('"ok"', '["ok"]'))
    history = read(path, lenient=True)
    assert history.status == ["info"] and history.skipped_events == 1
    assert history.problems[0].startswith(f"{path}:2: type must be invoke, ok, fail or info, not ['ok']")


@pytest.mark.parametrize("size", [1, 60, 600])
@pytest.mark.parametrize("suffix", ["jsonl", "json", "edn"])
def test_a_history_read_from_a_pipe_is_complete(tmp_path: Path, suffix: str, size: int) -> None:
    """What format detection takes from a pipe cannot be read again."""
    events = [
        {"process": 0, "type": kind, "f": f, "value": value}
        for number in range(size)
        for f, value in (("write", number), ("read", number))
        for kind in ("invoke", "ok")
    ]
    # The violation stands at the beginning: a read of -1, which was never written.
    events = [*events[:4], *events[:2], {**events[2], "value": None}, {**events[3], "value": -1}, *events[4:]]
    text = "\n".join(map(json.dumps, events))
    if suffix == "json":
        text = f"[{text.replace(chr(10), ',' + chr(10))}]"
    elif suffix == "edn":
        text = re.sub(r'"(process|type|f|value)": ', r":\1 ", text).replace("null", "nil")
        text = re.sub(r'"(\w+)"', r":\1", text)
    path, pipe = tmp_path / f"history.{suffix}", tmp_path / "pipe"
    path.write_text(text)
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(pipe.write_text, text)
        history = read(pipe)
        writer.result()
        assert len(history) == len(events) // 2 and list(history) == list(read(path))
        writer = pool.submit(pipe.write_text, text)
        assert main([str(pipe), "--model", "register"], parquet=_no_parquet) == 1
        writer.result()


def _no_parquet(*_: Any, **__: Any) -> Any:
    raise AssertionError("a pipe was taken for a Parquet file")


def test_an_unreadable_path_is_reported_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path, reason in ((tmp_path, "Is a directory"), (tmp_path / "none", "No such file"), (tmp_path / "loop", "Too")):
        assert main([str(path), "--model", "register"]) == 254
        error = capsys.readouterr().err
        assert error.startswith(f"{path}: {reason}") and error.count("\n") == 1
    secret = tmp_path / "secret.jsonl"
    secret.write_text(GOOD)
    secret.chmod(0)
    if not os.access(secret, os.R_OK):  # root reads everything
        assert main([str(secret), "--model", "register"]) == 254
        assert capsys.readouterr().err == f"{secret}: Permission denied\n"


#: Values of every shape, whatever the operation.
SHAPES = [None, 1, 1.5, "x", [], [1, 2], [["r", "x", None]], [["q", "x", 1]], {"a": [1]}, {"offset": "0"}]


@pytest.mark.parametrize("name", [*MODELS, *PROPERTIES, "sequential:register"])
def test_values_of_the_wrong_shape_never_crash_a_checker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    functions = sorted(MODELS[name].functions) if name in MODELS else ["append", "read", "receive", "send", "txn"]
    path = tmp_path / "shapes.jsonl"
    for number, f in enumerate(functions):
        for at, shape in enumerate(SHAPES):
            answer = SHAPES[(at + number) % len(SHAPES)]
            events = [
                {"process": 0, "type": "invoke", "f": f, "value": shape, "time": "noon"},
                {"process": 0, "type": "ok", "f": f, "value": answer, "time": "noon"},
                {"process": 1, "type": "invoke", "f": f, "value": answer},
                {"process": 1, "type": "info", "f": f, "value": None},
            ]
            path.write_text("".join(json.dumps(event) + "\n" for event in events))
            status = main([str(path), "--model", name, "--timeout", "5", "--html", str(tmp_path / "page.html")])
            captured = capsys.readouterr()
            assert status in (0, 1, 2, 254), (f, shape)
            assert captured.err.count("\n") == (status == 254), (f, shape)


def test_maps_and_lists_are_compared_as_values(done) -> None:
    from checker import FIFOQueue, Register, Verdict, check

    fine = done((0, "write", {"a": [1]}, None), (1, "read", None, {"a": [1]}))
    stale = done((0, "write", {"a": 1}, None), (0, "write", [2], None), (1, "read", None, {"a": 1}))
    assert check(fine, Register()).verdict is Verdict.VALID
    assert check(stale, Register()).stats["engines"] == {"A3 register zones": 1}
    assert check(stale, Register()).verdict is Verdict.INVALID
    queue = done((0, "enqueue", [1], None), (0, "enqueue", {"b": 2}, None), (1, "dequeue", None, {"b": 2}),
                 (1, "dequeue", None, [1]))  # fmt: skip
    assert check(queue, FIFOQueue()).verdict is Verdict.INVALID


def test_escape_sequences_in_names_and_values_are_printed_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "red.jsonl"
    for f, model in (("wr\x1b[31m", "register"), ("write", "register"), ("\x1b[2J", "list-append")):
        events = [{"process": 0, "type": kind, "f": f, "value": "\x1b[31m", "key": "\x1b]0;title\x07"}
                  for kind in ("invoke", "ok")]  # fmt: skip
        events += [{"process": 1, "type": kind, "f": "read", "key": "\x1b]0;title\x07", "value": "\x1b["}
                   for kind in ("invoke", "ok")]  # fmt: skip
        path.write_text("".join(json.dumps(event) + "\n" for event in events))
        main([str(path), "--model", model])
        said = capsys.readouterr()
        assert said.out or said.err
        assert (said.out + said.err).replace("\n", "").isprintable()

"""Pairing events, and reading every format, with errors that name the line."""

from __future__ import annotations

import json
import math
import pickle
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from checker import Counter, FetchAndAdd, FormatError, History, HistoryError, Operation, Register, check, read_jsonl
from checker.codecs import detect_format, read, read_bytes, read_rows
from checker.codecs.edn import parse_edn, read_edn_text
from checker.codecs.source import FileEvents
from checker.delivery import check_delay
from checker.history import HistoryBuilder, key_of_text, key_text, plain
from checker.simple import check_bank, check_counter
from checker.values import ExactDecimal, exact


def write(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_events_pair_into_ok_fail_info_and_open_operations(events) -> None:
    history = History.of(
        events(
            (0, "invoke", "write", 1),
            ("nemesis", "invoke", "inject", {}),
            (1, "invoke", "read", None),
            (0, "ok", "write", 1),
            (1, "info", "read", None),
            (2, "invoke", "write", 2),
            (2, "fail", "write", 2),
            (3, "invoke", "write", 3),
        )
    )
    assert [operation.status for operation in history] == ["ok", "info", "fail", "info"]
    assert [operation.returned for operation in history] == [2, None, 5, None]
    assert history.nemesis_events == 1 and history.skipped_events == 0


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([(0, "invoke", "read", None)] * 2, "process 0 invokes 'read' while its 'read' is open"),
        ([(0, "ok", "read", 1)], "process 0 completes 'read', but has no operation open"),
        ([(0, "done", "read", 1)], "type must be invoke, ok, fail or info, not 'done'"),
    ],
)
def test_events_that_do_not_pair_are_refused(events, rows, reason: str) -> None:
    with pytest.raises(HistoryError, match=reason):
        History.of(events(*rows))


def test_an_event_without_a_process_is_refused() -> None:
    with pytest.raises(HistoryError, match="no 'process'"):
        History.of([{"type": "invoke", "f": "read"}])


def test_a_truncated_last_line_of_jsonl_is_refused_unless_lenient(tmp_path: Path, events) -> None:
    lines = [json.dumps(event) for event in events((0, "invoke", "write", 1), (0, "ok", "write", 1))]
    whole = write(tmp_path, "whole.jsonl", "\n".join(lines) + "\n")
    assert len(read_jsonl(whole)) == 1 and not read_jsonl(whole).problems
    cut = write(tmp_path, "cut.jsonl", "\n".join(lines) + "\n" + '{"index": 3, "pro')
    history = read_jsonl(cut, lenient=True)
    assert len(history) == 1 and history.skipped_events == 1
    assert "cut.jsonl:3: the last line is cut short" in history.problems[0]
    with pytest.raises(FormatError, match=r"cut.jsonl:3: the last line is cut short"):
        read_jsonl(cut)


@pytest.mark.parametrize(
    ("bad", "line", "reason"),
    [
        ("{nonsense}\n", 3, "not JSON"),
        ("[1, 2]\n", 3, "an event must be a map"),
        ('{"type": "ok", "process": 7, "index": 2}\n', 3, "no operation open"),
        ('{"type": "ok", "process": 7}\n', 3, "the event has no 'index'"),
    ],
)
def test_the_error_of_a_bad_line_names_file_line_and_reason(tmp_path, events, bad: str, line: int, reason: str) -> None:
    lines = [json.dumps(event) + "\n" for event in events((0, "invoke", "write", 1), (0, "ok", "write", 1))]
    path = write(tmp_path, "bad.jsonl", "".join(lines) + bad + "".join(lines))
    with pytest.raises(FormatError) as error:
        read_jsonl(path)
    assert error.value.line == line
    assert str(path) in str(error.value) and reason in str(error.value)


FORMS = {
    "json": '[{"process": 0, "type": "invoke", "f": "read", "value": null},\n'
    '{"process": 0, "type": "ok", "f": "read", "value": 3}]',
    "edn": "{:process 0, :type :invoke, :f :read, :value nil}\n{:process 0, :type :ok, :f :read, :value 3}\n",
    "vector.edn": "; a comment\n[{:process 0, :type :invoke, :f :read, :value nil}\n"
    ' {:process :nemesis, :type :info, :f :start, :value "cut {everything"}\n'
    " {:process 0, :type :ok,\n  :f :read, :value 3}]",
    "record.edn": "#jepsen.history.Op{:process 0, :type :invoke, :f :read, :value nil}\n"
    "#jepsen.history.Op{:process 0, :type :ok, :f :read, :value 3, :error [:a #{1}]}\n",
    "tuples.edn": "[0 :invoke :read nil]\n[0 :ok :read 3]\n",
    "log": "INFO  jepsen.util - 0\t:invoke\t:read\tnil\n# a comment\nINFO  jepsen.util - 0\t:ok\t:read\t3\n",
    "jsonl": '{"process": 0, "type": "invoke", "f": "read", "value": null}\n'
    '{"process": 0, "type": "ok", "f": "read", "value": 3}\n',
    "limo": "# @object atomic-queue\n[0] call read\n[0] return 3\n",
}


@pytest.mark.parametrize("name", FORMS)
def test_every_format_reads_the_same_operation(tmp_path: Path, name: str) -> None:
    history = read(write(tmp_path, f"history.{name}", FORMS[name]))
    assert [(o.process, o.f, o.result, o.status) for o in history] == [(0, "read", 3, "ok")]
    for content in (FORMS[name], FORMS[name].replace("\n", "\r\n")):
        assert list(read_bytes(content.encode(), source=name)) == list(history)


def test_edn_values_that_are_pairs_are_split_into_key_and_value(tmp_path: Path) -> None:
    text = (
        "{:process 0, :type :invoke, :f :write, :value [4 1]}\n{:process 0, :type :ok, :f :write, :value [4 1]}\n"
        "{:process 0, :type :invoke, :f :read, :value [4 nil]}\n{:process 0, :type :ok, :f :read, :value [4 1]}\n"
    )
    history = read(write(tmp_path, "keyed.edn", text))
    assert history.keyed and [(o.key, o.value, o.result) for o in history] == [(4, 1, 1), (4, None, 1)]


def test_a_completion_whose_pair_has_another_key_is_refused(tmp_path: Path) -> None:
    text = (
        "{:process 0, :type :invoke, :f :read, :value [4 nil]}\n{:process 0, :type :ok, :f :read, :value [5 1]}\n"
        "{:process 0, :type :invoke, :f :read, :value [4 nil]}\n{:process 0, :type :ok, :f :read, :value [4 2]}\n"
    )
    path = write(tmp_path, "keyed.edn", text)
    with pytest.raises(
        FormatError, match="operation 0: 'read' of process 0 was invoked on key 4, and completed with key 5"
    ):
        read(path)
    history = read(path, lenient=True)
    assert [(o.key, o.result, o.status) for o in history] == [(4, None, "info"), (4, 2, "ok")]
    assert history.skipped_events == 1 and "completed with key 5" in history.problems[0]


@pytest.mark.parametrize(("asked", "reason"), [("x", "has one of key 'x' open"), (None, "has one without a key open")])
def test_a_completion_whose_key_field_differs_is_refused(asked: str | None, reason: str) -> None:
    one = {"process": 0, "f": "read", "value": None}
    events = [{**one, "type": "invoke", "key": asked}, {**one, "type": "ok", "key": "y", "value": 1}]
    with pytest.raises(HistoryError, match=f"process 0 completes 'read' of key 'y', but {reason}") as error:
        History.from_events(events)
    assert error.value.event == 1
    builder = HistoryBuilder(lenient=True)
    builder.feed(events)
    history = builder.finish()
    assert history.status == ["info"] and history.skipped_events == 1
    # A completion need not repeat the key.
    assert History.from_events([events[0], {**one, "type": "ok", "value": 1}]).result == [1]


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("a.edn", "{:process 0, :type :invoke, :f :read}\n{:process 0 :type\n", 2),
        ("b.edn", "{:process 0, :type :ok, :f :read}\n", 1),
        ("c.log", "x 0 :invoke :read nil\nx 1 :ok :read nil\n", 2),
        ("d.limo", "[1] call add(1)\n[1] returned\n", 2),
    ],
)
def test_errors_in_other_formats_name_the_line(tmp_path: Path, name: str, text: str, line: int) -> None:
    with pytest.raises(FormatError) as error:
        read(write(tmp_path, name, text))
    assert error.value.line == line
    with pytest.raises(FormatError, match=f"^{name}:{line}: "):
        read_bytes(text.encode(), source=name)


def test_the_format_is_detected_from_the_text() -> None:
    assert detect_format('{"process": 0}') == "jsonl"
    assert detect_format("[1] call add(1)\n") == "limo"
    assert detect_format("; c\n{:process 0}") == "edn"


def test_rows_of_a_table_are_read_in_order_of_their_index() -> None:
    rows = [
        {"index": 1, "process": "0", "type": "ok", "f": "cas", "value": "[1, 2]"},
        {"index": 0, "process": "0", "type": "invoke", "f": "cas", "value": "[1, 2]"},
    ]
    assert [operation.value for operation in read_rows(rows)] == [[1, 2]]


def test_operations_of_equal_time_are_concurrent() -> None:
    history = History.from_operations(
        [
            Operation(process=0, f="write", value=1, invoked=0, returned=5),
            Operation(process=1, f="read", result=None, invoked=5, returned=6),
        ]
    )
    assert history.invoked[1] < history.returned[0]


EDN_VALUES = [
    *("nil", "7", "12345678", "-3", "1.5", ":kw", '"n1"', '"a, b :f c"', '"q\\"q"', "[1 2]", "[:a nil]", "{:a 1}"),
    *("[[1]]", "#{2}"),
]


def test_pairs_of_key_and_value_are_split_in_every_format(tmp_path: Path) -> None:
    """As one register they would be invalid."""
    steps = [("write", [0, 1], [0, 1]), ("write", [1, 2], [1, 2]), ("read", [0, None], [0, 1])]
    events = [
        {"process": 0, "type": kind, "f": f, "value": value}
        for f, *values in steps
        for kind, value in zip(("invoke", "ok"), values, strict=True)
    ]
    edn = [{**event, "value": json.dumps(event["value"]).replace("null", "nil")} for event in events]
    texts = {
        "jsonl": "\n".join(map(json.dumps, events)),
        "json": json.dumps(events),
        "edn": "\n".join("{{:process 0 :type :{type} :f :{f} :value {value}}}".format(**event) for event in edn),
        "txt": "".join("0\t:{type}\t:{f}\t{value}\n".format(**event) for event in edn),
    }
    histories = [read(write(tmp_path, f"pairs.{name}", text)) for name, text in texts.items()]
    histories.append(read_jsonl(tmp_path / "pairs.jsonl"))
    for history in (*histories, read_rows({**event, "value": json.dumps(event["value"])} for event in events)):
        assert history.keyed and check(history, Register()).valid is True


@pytest.mark.parametrize("kind", ["info", "fail"])
@pytest.mark.parametrize("answer", [":timed-out", "nil", "[:y 3]", '[:timed-out "no answer"]'])
def test_pairs_are_recognised_whatever_value_an_unsuccessful_completion_has(
    tmp_path: Path, kind: str, answer: str
) -> None:
    text = (
        "[0 :invoke :write [:x 1]] [0 :ok :write [:x 1]] [0 :invoke :write [:y 2]] [0 :ok :write [:y 2]]\n"
        f"[1 :invoke :write [:y 3]] [1 :{kind} :write {answer}] [2 :invoke :read [:x nil]] [2 :ok :read [:x 1]]\n"
    )
    history = read(write(tmp_path, "pairs.edn", text))
    assert history.keyed and history.key == ["x", "y", "y", "x"] and check(history, Register()).valid is True


@given(st.data())
def test_the_fast_path_for_edn_lines_agrees_with_the_parser(data: st.DataObject) -> None:
    lines = []
    for index in range(data.draw(st.integers(1, 12))):
        pairs = [(":index", str(index)), (":time", data.draw(st.sampled_from(["5", "123456789", "nil"])))]
        pairs += [(":process", str(index)), (":type", ":invoke"), (":f", data.draw(st.sampled_from([":read", ":add"])))]
        pairs.append((":value", data.draw(st.sampled_from(EDN_VALUES))))
        if data.draw(st.booleans()):
            pairs.append((":node", data.draw(st.sampled_from(EDN_VALUES))))
        between = data.draw(st.sampled_from([", ", " ", ",  "]))
        lines.append(data.draw(st.sampled_from(["", " "])) + "{" + between.join(map(" ".join, pairs)) + "}")
    text = "\n".join(lines)
    if data.draw(st.booleans()):
        text = f"[{text}]"
    events = [event for form in parse_edn(text) for event in (form if isinstance(form, list) else [form])]
    whole, plainly = read_edn_text(text, FileEvents("lines.edn"), keyed=False), History.of(events)
    for name in ("process", "f", "value", "invoked_ns", "status"):
        assert getattr(whole, name) == getattr(plainly, name)


def test_edn_values_that_look_alike_stay_different() -> None:
    """Code points, NaN, and symbols that Python would take for numbers."""
    text = r'["\u0041u0041" "A" \u0041 \u [##NaN 1] [1] ##Inf ##-Inf 1_0 10]'
    assert parse_edn(text) == [["Au0041", "A", "A", "u", ["##NaN", 1], [1], math.inf, -math.inf, "1_0", 10]]


def _edn_history(*steps: str) -> History:
    """One process's operations, each as ``:f asked answered``."""
    lines = []
    for step in steps:
        f, asked, answered = step.split()
        lines.append(f"{{:process 0, :type :invoke, :f {f}, :value {asked}}}")
        lines.append(f"{{:process 0, :type :ok, :f {f}, :value {answered}}}")
    return read_edn_text("\n".join(lines), FileEvents("decimals.edn"))


def test_edn_decimals_that_are_equal_as_floats_stay_different() -> None:
    of_money = [":write 10000000000000000.1M 10000000000000000.1M", ":write 10000000000000000.2M 10000000000000000.2M"]
    stale = _edn_history(*of_money, ":read nil 10000000000000000.1M")
    assert check(stale, Register()).valid is False
    assert check(_edn_history(*of_money, ":read nil 10000000000000000.20M"), Register()).valid is True
    assert parse_edn("[100M 1.0M 0.5M 1e25M -0.0M]") == [[100, 1, 0.5, 10**25, 0]]


def test_sums_of_edn_decimals_are_exact() -> None:
    right = _edn_history(":add 0.1M 0.1M", ":add 0.2M 0.2M", ":read nil 0.3M")
    wrong = _edn_history(":add 0.1M 0.1M", ":add 0.2M 0.2M", ":read nil 0.3000000000000000001M")
    for checked in (lambda history: check(history, Counter()), check_counter):
        assert checked(right).valid is True
        assert checked(wrong).valid is False
    huge = 10**4200
    beside_huge = [f":add {huge} {huge}", ":add 0.5M 0.5M", ":add 0.5M 0.5M"]
    assert check_counter(_edn_history(*beside_huge, f":read nil {huge + 1}")).valid is True
    assert check_counter(_edn_history(*beside_huge, f":read nil {huge}")).valid is False
    taken = _edn_history(":add 0.1M 0", ":add 0.2M 0.1M", ":read nil 0.3M")
    assert check(taken, FetchAndAdd()).valid is True
    banks = _edn_history(":read nil {:a,0.1M,:b,0.2M}", ":read nil {:a,0.3M,:b,0M}")
    assert check_bank(banks).valid is True
    assert check_bank(_edn_history(":read nil {:a,1e17M}", ":read nil {:a,1e17M,:b,0.1M}")).valid is False


def test_edn_decimals_are_accepted_as_times_and_delays(tmp_path: Path) -> None:
    def timed(*steps: str) -> History:
        """Operations, each as ``:f asked answered began ended``."""
        lines = []
        for step in steps:
            f, asked, answered, began, ended = step.split()
            lines.append(f"{{:process 0, :type :invoke, :f {f}, :value {asked}, :time {began}}}")
            lines.append(f"{{:process 0, :type :ok, :f {f}, :value {answered}, :time {ended}}}")
        return read(write(tmp_path, "timed.edn", "\n".join(lines)))

    result = check(timed(":write 1 1 0.5e9M 1e9M", ":read nil 2 2500000000.5M 3500000000.25M"), Register())
    assert "2.500000 s to 3.500000 s" in result.reason
    (shown,) = json.loads(json.dumps(result.to_json()))["witness"]["operations"]
    assert (shown["invoked_ns"], shown["returned_ns"]) == (2500000000.5, 3500000000.25)
    with pytest.raises(FormatError, match="must stand in the order"):
        timed(":write 1 1 5.5M 6.5M", ":read nil 1 1.5M 2.5M")
    late = timed(":send {:message,1,:delay_ms,100.5M} {:message,1,:delay_ms,100.5M} 0 1", ":receive nil [1] 5e9M 5e9M")
    assert check_delay(late).stats["counts"]["late"] == 1


def test_an_edn_decimal_is_a_json_number_only_if_a_float_is_equal() -> None:
    assert plain([ExactDecimal("0.5"), ExactDecimal("0.1")]) == [0.5, "0.1"]
    assert key_text(ExactDecimal("0.5")) == key_text(0.5)


@given(st.lists(st.decimals(allow_nan=False, allow_infinity=False, places=30), max_size=5))
def test_sums_of_edn_decimals_equal_sums_of_fractions(numbers: list[Decimal]) -> None:
    read = parse_edn(" ".join(f"{each}M" for each in numbers))
    for found in (sum(read), -sum(-each for each in read), pickle.loads(pickle.dumps(sum(read)))):
        assert Fraction(found) == sum(map(Fraction, numbers))


KEYS = st.recursive(
    st.booleans()
    | st.integers(-2, 2)
    | st.floats(-2, 2).map(lambda number: round(number, 1))
    | st.text('12.-true[]"', max_size=4),
    lambda within: st.lists(within, max_size=2),
    max_leaves=3,
)


@example(1, 1.0)
@example([2.0], [2])
@example(1, "1")
@given(KEYS, KEYS)
def test_two_keys_have_one_text_if_and_only_if_they_are_equal(one: object, other: object) -> None:
    """Spark groups by the text, the checkers by what `exact` makes: 1 and 1.0 are one key, "1" and true are others."""
    texts = [key_text(one), key_text(other)]
    assert (texts[0] == texts[1]) == (exact(one) == exact(other))
    assert exact(key_of_text(str(texts[0]))) == exact(one)

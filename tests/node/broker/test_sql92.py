"""Property filters: against SQLite as the oracle, edge cases of the grammar, and pulls through a broker."""

from __future__ import annotations

import sqlite3
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.broker.sql92 import SqlError, parse_sql
from node.store.record import decode_records

NUMBERS = st.sampled_from(["0", "1", "2.5", "-3", "10"])
TEXTS = st.sampled_from(["''", "'a'", "'ab'", "'it''s'", "'%'"])
SIGNS = st.sampled_from(["=", "<>", "<", "<=", ">", ">="])
PATTERNS = st.sampled_from(["'a%'", "'%b'", "'_b'", "'%'", "''", "'%a%b%'"])


def comparisons() -> st.SearchStrategy[str]:
    number = st.sampled_from(["n", "m"])
    text = st.sampled_from(["s", "u"])
    negation = st.sampled_from(["", "NOT "])
    return st.one_of(
        st.builds("{} {} {}".format, number, SIGNS, NUMBERS),
        st.builds("{} {} {}".format, text, SIGNS, TEXTS),
        st.builds("{} {}BETWEEN {} AND {}".format, number, negation, NUMBERS, NUMBERS),
        st.builds("{} {}IN ({}, {})".format, text, negation, TEXTS, TEXTS),
        st.builds("{} {}LIKE {}".format, text, negation, PATTERNS),
        st.builds("{} IS {}NULL".format, st.one_of(number, text), negation),
    )


EXPRESSIONS = st.recursive(
    comparisons(),
    lambda inner: st.one_of(
        st.builds("({} AND {})".format, inner, inner),
        st.builds("{} OR {}".format, inner, inner),
        st.builds("NOT ({})".format, inner),
    ),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(
    EXPRESSIONS,
    st.one_of(st.none(), st.sampled_from([0, 1, 2.5, -3, 7])),
    st.one_of(st.none(), st.sampled_from([0, 10])),
    st.one_of(st.none(), st.sampled_from(["", "a", "ab", "it's", "xaxb"])),
    st.one_of(st.none(), st.sampled_from(["", "b", "%"])),
)
def test_expressions_have_the_same_result_as_in_sqlite(expression: str, n: Any, m: Any, s: Any, u: Any) -> None:
    connection = sqlite3.connect(":memory:")
    connection.execute("PRAGMA case_sensitive_like = ON")
    connection.execute("CREATE TABLE t (n REAL, m REAL, s TEXT, u TEXT)")
    connection.execute("INSERT INTO t VALUES (?, ?, ?, ?)", (n, m, s, u))
    expected = connection.execute(f"SELECT count(*) FROM t WHERE {expression}").fetchone()[0] == 1
    connection.close()
    properties = {name: str(value) for name, value in zip("nmsu", (n, m, s, u), strict=True) if value is not None}
    assert parse_sql(expression).matches(properties) is expected


@pytest.mark.parametrize(
    ("expression", "properties", "expected"),
    [
        ("TRUE", {}, True),
        ("not false", {}, True),
        ("a = TRUE", {"a": "true"}, True),
        ("a", {"a": "True"}, True),
        ("a > 5", {"a": "many"}, False),
        ("NOT a > 5", {"a": "many"}, False),
        ("NOT a > 5", {}, False),
        ("a contains 'b'", {"a": "abc"}, True),
        ("a NOT STARTSWITH 'b'", {"a": "abc"}, True),
        ("a ENDSWITH 'bc'", {"a": "abc"}, True),
        ("a = 1e2", {"a": "100"}, True),
        ("a.b$ = +1", {"a.b$": "1"}, True),
        ("a = b", {"a": "x", "b": "x"}, True),
        ("a > b", {"a": "10", "b": "9"}, True),
        ("- -(a) = +5", {"a": "5"}, True),
        ("-a = -5", {"a": "5"}, True),
        ("-a = 5", {"a": "many"}, False),
        ("(a = 1) = NOT FALSE /* and so on */ -- to the end", {"a": "1"}, True),
        ("a = 9007199254740993", {"a": "9007199254740992"}, False),
        ("a = 9007199254740993L", {"a": "9007199254740993"}, True),
        ("a = 10", {"a": "1_0"}, False),
        ("a = 10", {"a": " 10.0 "}, True),
        ("a < 1 OR a >= 1", {"a": "nan"}, False),
        ("a > 1", {"a": "9" * 5000}, False),
    ],
)
def test_edge_cases_of_the_grammar(expression: str, properties: dict[str, str], expected: bool) -> None:
    assert parse_sql(expression).matches(properties) is expected


@pytest.mark.parametrize(
    "expression",
    ["", "a >", "a = 'x", "(a = 1", "a = 1)", "AND", "a BETWEEN 1", "a IN ()", "a LIKE b", "a # b", "a NOT", "1", "-",
     "a IS 1", "a = NULL", "a = " + "9" * 401, "a = 01", "a /* b", "- " * 5000 + "a = 1",
     "(" * 5000 + "a", "NOT " * 5000 + "a", "a OR " * 2000 + "a", "a" + " IS NULL" * 900, "a" + " > 1" * 900],
)  # fmt: skip
def test_an_invalid_expression_is_refused(expression: str) -> None:
    with pytest.raises(SqlError):
        parse_sql(expression)


@pytest.mark.parametrize("expression", ["a > 5 + 1", "a - 1 = 4", "a * 2 = 4", "a / 2 = 1", "a % 2 = 1", "a + 1"])
def test_arithmetic_is_refused_with_an_error_of_its_own(expression: str) -> None:
    with pytest.raises(SqlError, match="there is no arithmetic between operands"):
        parse_sql(expression)


def test_like_does_not_take_exponential_time() -> None:
    assert not parse_sql("a LIKE '" + "%a" * 500 + "b'").matches({"a": "a" * 5000})
    assert not parse_sql("a LIKE '%" + "a" * 8000 + "b%'").matches({"a": "a" * 32_000})


@pytest.mark.parametrize("link", [" BETWEEN 1 AND 2", " NOT BETWEEN 1 AND 2", " IN (1, 2, 3)"])
def test_an_operand_of_chained_tests_is_evaluated_once(link: str) -> None:
    class Properties(dict[str, str]):
        looked_up = 0

        def get(self, name: str, default: Any = None) -> Any:
            self.looked_up += 1
            return super().get(name, default)

    properties = Properties(a="1")
    parse_sql("a" + link * 8).matches(properties)
    assert properties.looked_up == 1
    parse_sql("a" + link * 60).matches(properties)  # would never end if each link doubled the work


def test_a_pull_with_a_long_expression_scans_few_long_messages(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        for number in range(20):
            properties = f"a\x01{'a' * 10_000}{number}\x02"
            assert (await case.ask(310, {"b": "t", "e": 0, "i": properties}, b"%d" % number)).code == 0
        wanted = {"sysFlag": 4, "expressionType": "SQL92", "subscription": f"a LIKE '%{'a_' * 400}1%'"}
        found, offset = [], 0
        while offset < 20:
            reply = await case.pull(offset, **wanted)
            found += [message.body for message in decode_records(reply.body)]
            assert 0 < int(reply.ext_fields["nextBeginOffset"]) - offset <= 3
            offset = int(reply.ext_fields["nextBeginOffset"])
        assert found == [b"1", *(b"%d" % number for number in range(10, 20))]

    run_case(scenario)


def test_pulls_filter_messages_by_properties(run_case: Any) -> None:
    async def scenario(case: Any) -> None:
        for number in range(300):
            properties = f"TAGS\x01x\x02amount\x01{number}\x02region\x01{'eu' if number % 2 else 'us'}\x02"
            assert (await case.ask(310, {"b": "t", "e": 0, "i": properties}, b"%d" % number)).code == 0
        wanted = {"sysFlag": 4, "expressionType": "SQL92", "subscription": "amount >= 290 AND region = 'eu'"}
        found, offset, codes = [], 0, []
        while offset < 300:
            reply = await case.pull(offset, **wanted)
            codes.append(reply.code)
            found += [message.body for message in decode_records(reply.body)]
            offset = int(reply.ext_fields["nextBeginOffset"])
        assert found == [b"291", b"293", b"295", b"297", b"299"]
        assert codes == [20, 20, 0]
        assert (await case.pull(0, sysFlag=4, expressionType="SQL92", subscription="amount >")).code == 23
        assert (await case.pull(0, sysFlag=4, expressionType="XPATH", subscription="a")).code == 23

    run_case(scenario)

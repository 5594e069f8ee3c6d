"""Arrays built from buffers equal those that Arrow builds from the same lists."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

if sys.implementation.name == "pypy":
    pytest.skip("PyPy has no pyarrow", allow_module_level=True)

import pyarrow as pa

from harness.arrow_arrays import array_of, repeated

NUMBERS = st.integers(-(2**63), 2**63 - 1)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
KINDS = st.sampled_from(
    [(pa.int64(), NUMBERS), (pa.timestamp("us", tz="UTC"), NUMBERS), (pa.bool_(), st.booleans()), (pa.string(), TEXTS)]
)


@given(st.data())
def test_an_array_of_a_list_with_or_without_nulls_equals_arrows(data):
    kind, values = data.draw(KINDS)
    column = data.draw(st.lists(st.none() | values if data.draw(st.booleans()) else values, max_size=40))
    made = array_of(column, kind)
    made.validate(full=True)
    assert made.equals(pa.array(column, kind)) and made.null_count == column.count(None)


@given(st.data(), st.integers(0, 20))
def test_an_array_of_a_repeated_value_equals_arrows(data, count):
    kind, values = data.draw(KINDS)
    value = data.draw(values)
    made = repeated(value, kind, count)
    made.validate(full=True)
    assert made.equals(pa.array([value] * count, kind))


def test_an_unpaired_surrogate_is_written_as_an_escape():
    assert array_of(["a", "\ud83d", "\ude00é", None], pa.string()).to_pylist() == ["a", "\\ud83d", "\\ude00é", None]
    assert repeated("\ud800", pa.string(), 2).to_pylist() == ["\\ud800"] * 2


@pytest.mark.parametrize("value", ["1", 1.0, True, [1]])
def test_a_value_that_is_not_an_integer_is_refused(value):
    with pytest.raises(TypeError, match="no whole number"):
        array_of([1, value], pa.int64())


def test_an_integer_out_of_range_and_a_mixed_list_are_refused():
    with pytest.raises(OverflowError):
        array_of([2**63], pa.int64())
    with pytest.raises(TypeError):
        array_of(["a", 1], pa.string())


def test_pandas_is_not_imported():
    program = (
        "import sys, pyarrow as pa, pyarrow.parquet; from harness.arrow_arrays import array_of, repeated;"
        "array_of(['a', None], pa.string()); array_of([1], pa.int64()); repeated('a', pa.string(), 3);"
        "sys.exit('pandas' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0

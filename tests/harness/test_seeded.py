"""Named streams are Python's own."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from harness.seeded import seeded


@given(name=st.text(max_size=40, alphabet=st.characters(exclude_categories=["Cs"])))
def test_a_named_stream_equals_python_s_random_seeded_with_the_name(name: str) -> None:
    ours, its = seeded(name), random.Random(name)
    assert ours.getstate() == its.getstate()

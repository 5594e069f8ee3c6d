"""The page about the node's speed, and its table that compares brokers."""

from __future__ import annotations

from benchmarks._node_page import BESIDE_OTHERS, section_of, with_section
from benchmarks.node_versus import ratios_of, table_of

ROWS = [
    {"replication": "single", "flush": "async", "load": "one", "round": number, "contestant": name, "per_s": rate,
     "p50_ms": 1.0, "cpu_us": cpu_us, "refused": cpu_us / 100}
    for number, name, rate, cpu_us in (
        (0, "here", 100.0, 8.0), (0, "apache", 200.0, 4.0), (1, "here", 300.0, 8.0), (1, "apache", 900.0, 2.0),
        (2, "apache", 900.0, 2.0),
    )
]  # fmt: skip


def test_ratios_are_taken_round_by_round() -> None:
    assert ratios_of(ROWS, "apache", "per_s") == [2.0, 3.0]
    assert ratios_of(ROWS, "apache", "cpu_us") == [0.5, 0.25]
    *_, here, apache = table_of(ROWS)
    assert here == "| single | async | one | here | 200 | 1.00 | 8.0 | 8.0 to 8.0 | 8.0% | - | - |"
    assert apache == "| single | async | one | apache | 900 | 1.00 | 2.0 | 2.0 to 4.0 | 2.0% | 0.40 | 2.67 |"


def test_a_new_table_replaces_the_old_one() -> None:
    page = "# Speed\n\ntext\n"
    first = with_section(page, "a\nb\n")
    assert first == f"# Speed\n\ntext\n\n{BESIDE_OTHERS}\n\na\nb\n" and section_of(first) == "a\nb"
    followed = f"{first}\n## Next\n\nmore\n"
    assert with_section(followed, "c") == f"# Speed\n\ntext\n\n{BESIDE_OTHERS}\n\nc\n\n## Next\n\nmore\n"
    assert section_of(page) == "" and section_of(followed) == "a\nb"

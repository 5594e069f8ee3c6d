"""The mutants that ``benchmarks/checker_mutants.py`` makes, and its lists of those that survived."""

from __future__ import annotations

import ast
import gc
import types
from pathlib import Path

import pytest

from benchmarks._checker_mutant_runner import NeedsNewProcess, changed_codes, functions_below, is_replaceable, named
from benchmarks._checker_mutations import ONCE_ALIVE, Mutation, everything_of, mutations_of, once_alive, sample
from benchmarks.checker_mutants import ROOT, equivalent, sources, table
from checker import History

SOURCE = '''\
LIMIT = 3

def first(items, low, /, *, strict=True):
    """Words with 7 and < in them."""
    for item in items:
        if item < low or (not item and
                          low is None):
            continue
        return f"{item + 1}"
    return min(items) + 1

class Box:
    size = 2

    def fits(self, item):
        return all(item <= each for each in self.parts if each != LIMIT)
'''


def test_every_kind_of_mutation_is_generated_once_per_place() -> None:
    made = [(each.line, each.function, each.before, each.after) for each in mutations_of("box.py", SOURCE)]
    assert len(made) == len(set(made))
    for expected in (
        (1, "(module)", "3", "4"),
        (3, "first", "True", "False"),
        (6, "first", "<", "<="),
        (6, "first", "or", "and"),
        (6, "first", "item < low", "False"),
        (6, "first", "not item", "bool(item)"),
        (7, "first", "is", "is not"),
        (7, "first", "low is None", "True"),
        (8, "first", "continue", "pass"),
        (10, "first", "min", "max"),
        (10, "first", "+", "-"),
        (13, "Box", "2", "3"),
        (16, "Box.fits", "<=", "<"),
        (16, "Box.fits", "!=", "=="),
        (16, "Box.fits", "all", "any"),
    ):
        assert expected in made
    assert not [each for each in made if each[0] in (4, 9)], "docstrings and messages are not mutated"


def test_a_mutation_changes_the_line_it_names_and_no_line_number() -> None:
    tree = ast.dump(ast.parse(SOURCE))
    for each in mutations_of("box.py", SOURCE):
        changed = each.applied(SOURCE)
        assert ast.dump(ast.parse(changed)) != tree, each.key
        assert changed.count("\n") == SOURCE.count("\n"), each.key
        unlike = [n for n, (a, b) in enumerate(zip(SOURCE.split("\n"), changed.split("\n"), strict=True), 1) if a != b]
        assert each.line in unlike


def test_the_key_of_a_mutation_does_not_depend_on_the_lines_above_it() -> None:
    keys = [each.key for each in mutations_of("box.py", SOURCE)]
    assert len(keys) == len(set(keys))
    assert [each.key for each in mutations_of("box.py", f'"""More."""\n\n{SOURCE}')] == keys


def test_a_sample_covers_every_file_and_follows_the_seed() -> None:
    texts = {"a.py": SOURCE, "b.py": "x = 1 < 2\n", "c.py": '"""Words."""\n'}
    chosen = list(sample(texts, 12, 1))
    assert {each.file for each in chosen} == {"a.py", "b.py"}
    assert len(chosen) == 12
    assert chosen == list(sample(texts, 12, 1))
    assert {each.key for each in chosen} != {each.key for each in sample(texts, 12, 2)}
    alone = {each for each in sample({"a.py": SOURCE}, 9, 1) if each.file == "a.py"}
    assert alone <= set(mutations_of("a.py", SOURCE))


def compiled(source: str) -> types.CodeType:
    return compile(source, "box.py", "exec", dont_inherit=True)


def test_only_a_mutation_outside_of_functions_needs_a_new_process() -> None:
    changed = [old.co_qualname for old, _ in changed_codes(compiled(SOURCE), compiled(SOURCE.replace("<=", "<")))]
    assert changed == ["Box.fits", "Box.fits.<locals>.<genexpr>"]
    assert list(changed_codes(compiled(SOURCE), compiled(SOURCE))) == []
    for before, after in (("LIMIT = 3", "LIMIT = 4"), ("size = 2", "size = 3"), ("strict=True", "strict=False")):
        with pytest.raises(NeedsNewProcess):
            list(changed_codes(compiled(SOURCE), compiled(SOURCE.replace(before, after))))


def test_mutants_that_once_survived_can_still_be_generated() -> None:
    made = once_alive(sources())
    assert len(made) == len(ONCE_ALIVE)
    for each in made:
        compile(each.applied(sources()[each.file]), each.file, "exec")


@pytest.fixture(scope="module")
def everything() -> list[Mutation]:
    return everything_of(sources())


def test_every_mutant_listed_as_equivalent_exists_and_has_a_reason(everything: list[Mutation]) -> None:
    keys = {each.key for each in everything}
    for key, reason in equivalent().items():
        assert key in keys, f"{key} is not a mutation of the current code: remove it from the list"
        assert reason.endswith("."), key


def test_the_page_counts_killed_equivalent_and_alive_mutants(everything: list[Mutation]) -> None:
    killed, excused, alive = everything[0], everything[1], everything[2]
    results = {
        killed.key: {"status": "failed"},
        excused.key: {"status": "passed"},
        alive.key: {"status": "passed"},
        "gone.py: f: x < y: < -> <=": {"status": "passed"},
    }
    page = table(results, {excused.key: "It cannot be told."})
    assert "3 were tried: 1 killed, 1 equivalent, 1 alive." in page
    assert "It cannot be told." in page
    assert "gone.py" not in page


def test_every_file_of_the_checker_but_its_test_helpers_is_mutated() -> None:
    assert set(sources()) == {
        path.as_posix()
        for path in (Path("checker") / found.relative_to(Path(__file__).parents[2] / "checker")
                     for found in (Path(__file__).parents[2] / "checker").rglob("*.py"))
        if "testing" not in path.parts
    }  # fmt: skip


def test_functions_are_found_although_the_tests_froze_them() -> None:
    gc.freeze()
    functions = functions_below(ROOT)
    code = History.from_events.__func__.__code__  # type: ignore[attr-defined]
    assert named(code, ROOT) in functions
    assert is_replaceable(code, code, functions, ROOT)


def test_a_function_that_nobody_holds_is_not_counted_as_replaced() -> None:
    code = compile("def alone():\n    return lambda: 1", str(ROOT / "checker" / "none.py"), "exec").co_consts[0]
    assert isinstance(code, types.CodeType) and not is_replaceable(code, code, functions_below(ROOT), ROOT)
    (nested,) = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    assert is_replaceable(nested, nested, {}, ROOT), "the function that holds it makes it anew"

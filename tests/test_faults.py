"""docs/faults.md: every row once, and every test that it names is there."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOC = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([A-Z]+-\d\d) \| [^|]+ \| ([^|]+) \|$", DOC, re.MULTILINE)
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@cache
def functions_of(path: str) -> frozenset[str]:
    """Names of the functions in a file."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, kinds))


def test_every_row_is_there_once() -> None:
    listed = re.search(r"^Rows: ([^.]+)\.$", DOC, re.MULTILINE)
    assert listed is not None
    wanted = []
    for group in listed[1].split(";"):
        kind, *numbers = group.split()
        wanted += [f"{kind}-{number}" for number in numbers]
    assert len(wanted) > 100
    assert Counter(row for row, _ in ROWS) == Counter(wanted)
    assert len(ROWS) == len(re.findall(r"^\| [A-Z]+-", DOC, re.MULTILINE)), "a line has another shape"


def test_each_row_has_a_reason_or_tests_that_there_are() -> None:
    wrong = []
    for row, how in ROWS:
        named = TEST.findall(how)
        wrong += [f"{row}: {path} has no {name}" for path, name in named if name not in functions_of(path)]
        if len(named) != how.count("`tests/"):
            wrong.append(f"{row}: a test is not spelled `tests/path.py::test_name`")
        if not named and len(how.split()) < 4:
            wrong.append(f"{row}: neither a test nor a reason")
    assert not wrong


def test_tests_that_carry_a_rows_name_are_of_rows_that_name_tests() -> None:
    with_tests = {row for row, how in ROWS if TEST.search(how)}
    kinds = "|".join({row.partition("-")[0].lower() for row, _ in ROWS})
    carried: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            for kind, number in re.findall(rf"_({kinds})_(\d\d)(?=_|$)", name):
                carried.add(f"{kind.upper()}-{number}")
    assert carried <= with_tests

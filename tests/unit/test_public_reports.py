"""The table of public reports in tests/README.md: every row names tests that are there."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
# By their numbers in the list that the table is made from: of models and inference, of verl, of rewards over HTTP.
REPORTS = {
    *(1, 2, 4, 5, 6, 7, 11, 13, 14, 17, 18, 19, 21),
    *(23, 24, 25, 27, 29, 31, 33, 34, 35, 37, 39, 40),
    *(41, 43, 44, 46, 47, 49),
}
LINES = (TESTS / "README.md").read_text(encoding="utf-8").splitlines()
ROWS = {int(line.split("|")[1]): line.split("|")[4] for line in LINES if re.match(r"\| \d+ \|", line)}
NAMED = sorted({name for cell in ROWS.values() for name in re.findall(r"`([\w/]+\.py::\w+)`", cell)})


def test_every_report_has_its_row_and_every_row_a_test():
    assert ROWS.keys() == REPORTS
    assert [number for number, cell in ROWS.items() if "::test_" not in cell] == []


@pytest.mark.parametrize("name", NAMED)
def test_a_test_that_the_table_names_is_there(name):
    file, _, function = name.partition("::")
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}

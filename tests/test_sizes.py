"""Functions stop at 50 lines, an exception carries its reason; tests.structure counts what it should."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.decisions import Tables, decisions, tables_of
from tests.structure import (
    ROOT,
    changed_errors,
    fallen,
    functions_held,
    grown,
    identities,
    import_graph,
)

MAX_FILE_LINES = 500  # of tests, benchmarks and examples; of the packages, tests.structure
MAX_FUNCTION_LINES = 50
EXCEPTIONS: dict[str, str] = {  # "file" or "file:function" -> why it is right as it is
    "pdv/compile.py:optimize": "its arguments have a line each in the signature, and one in the docstring",
    "pdv/cli/optimize.py:optimize": "its options have a line each in the signature",
}

FILES = sorted(
    path
    for folder in ("ir", "pdv", "learned_cost", "tests", "benchmarks", "examples", "tools")
    for path in (ROOT / folder).rglob("*.py")
    if "golden" not in path.relative_to(ROOT).parts
)


def too_long(path: Path) -> Iterator[str]:
    """A file, and functions in it, that have more lines than they may."""
    name, source = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
    if source.count("\n") > MAX_FILE_LINES:
        yield name
    for node in functions(ast.parse(source)) if source.count("\n") > MAX_FUNCTION_LINES else ():
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > MAX_FUNCTION_LINES:
            yield f"{name}:{node.name}"


def functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All within, by statements alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        if not isinstance(child, ast.expr):
            yield from functions(child)


def test_files_and_functions_are_small() -> None:
    assert {where for path in FILES for where in too_long(path)} == set(EXCEPTIONS)


def test_a_long_function_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.test_sizes.ROOT", tmp_path)
    path = tmp_path / "long.py"
    for lines, found in (
        (MAX_FUNCTION_LINES, []),
        (MAX_FUNCTION_LINES + 1, ["long.py:f"]),
        (MAX_FILE_LINES, ["long.py", "long.py:f"]),
    ):
        path.write_text("def f():\n" + "    x = 1\n" * (lines - 1) + "\n" * (lines == MAX_FILE_LINES))
        assert list(too_long(path)) == found


def test_what_has_grown_is_told_and_never_recorded() -> None:
    recorded = {"circles": {"now": 1, "target": 0}, "statements": {"start": 5, "target": 4}}
    assert grown({"circles": ["a, b", "c, d"]}, recorded) == ["circles: 2, were 1 (target 0)"]
    assert fallen({"circles": ["a, b", "c, d"]}, recorded) == recorded
    assert fallen({"circles": []}, recorded)["circles"] == {"now": 0, "target": 0}


def test_imports_lead_to_modules() -> None:
    graph = import_graph()
    assert graph.edges["pdv.cluster.loader", "pdv.cluster.build"]["kind"] == "eager"
    assert graph.edges["pdv.compile", "pdv.config"]["kind"] == "eager"  # from pdv import config
    assert not graph.has_edge("pdv.compile", "pdv")


def test_hidden_channels_are_seen() -> None:
    refusal = (
        "def f():\n    try:\n        g()\n    except ValueError as error:\n        error.state = 1\n        raise\n"
    )
    made = (
        "def f():\n    found = UsageError('no')\n    found.state = 1\n    self.state = found.state\n    return found\n"
    )
    assert [*changed_errors(ast.parse(refusal))] == [5]
    assert [*changed_errors(ast.parse(made))] == [3]
    answer = "@dataclass\nclass Answer:\n    cost_s: float\n    again: Callable[[float], Answer] | None = None\n"
    assert [*functions_held(ast.parse(answer))] == [4]
    assert [*identities(ast.parse("known[id(table)] = table\nkey = self.id(table)\n"))] == [1]


OPERATORS = frozenset({"add", "linear", "softmax", "reshape"})
DECISIONS = {
    "node.op.name == 'add'": 1,
    "'add' != node.op.name": 1,
    "node.op.name in ('add', 'linear')": 1,
    "node.op.name in HEAVY": 1,
    "name == 'softmax'": 1,
    "is_op(node, 'add', 'linear')": 1,
    "TABLE[node.op.name]": 1,
    "{'add': 1}.get(node.op.name)": 1,
    "TABLE.get(found)": 1,
    "node.op.name.startswith('reduce')": 1,
    "getattr(self, f'_{node.op.name}')": 1,
    "node.op is SOFTMAX": 1,
    "(lambda op: op == 'add')(node.op.name)": 1,
    "[x for x in nodes if x.op.name != kept]": 1,
    "node.op.name == other.op.name": 0,
    "node.op.name != term.op": 0,
    "OPERATORS[node.op.name]": 0,
    "k.add(x, y)": 0,
    "f'{node.op.name} is cut'": 0,
    "step[0] == 'reshape'": 0,
    "approximate == 'softmax'": 0,
}


@pytest.mark.parametrize("text", DECISIONS)
def test_decisions_are_counted(text: str) -> None:
    tree = ast.parse(f"from ir.ops.normalization import SOFTMAX\nHEAVY = ('softmax', 'linear')\n{text}")
    tables = Tables.of({"m": tree}, OPERATORS).names["m"] | {"TABLE"}
    assert len(decisions(tree, OPERATORS, tables)) == DECISIONS[text]


def test_decisions_under_another_name_are_counted() -> None:
    alias = ast.parse("def f(node):\n    name = node.op.name\n    return name == other, TABLES[name]")
    assert len(decisions(alias, OPERATORS)) == 2
    cases = (
        "match node.op.name:\n    case 'add' | 'linear': pass\n    case 'softmax' if x: pass\n    case 'x', 'add': pass"
    )
    assert [found.text for found in decisions(ast.parse(cases), OPERATORS)] == [
        "case 'add'", "case 'linear'", "case 'softmax'",
    ]  # fmt: skip


def test_tables_of_names_are_counted_where_they_stand() -> None:
    tree = ast.parse(
        "A = frozenset({'add', 'linear'})\nB = {'add': {'softmax': 1, 'add': 2}, 'linear': 0}\nC = ('add', 'x')"
    )
    assert [found.line for found in tables_of(tree, OPERATORS)] == [1, 2]
    other = ast.parse("from m import A as HEAVY")
    assert Tables.of({"m": tree, "n": other}, OPERATORS).names["n"] == {"HEAVY"}

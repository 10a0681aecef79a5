"""Files of laws that are wrong: each is one error of three parts that names the line, never a fault of ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from ir.errors import UsageError
from ir.ops import OPERATORS
from pdv.rewrite.library import read_laws

WRONG = {
    "a: frob(x) == x for x[*s]": "'frob' is no operator",
    'a: partition(x, dim=0, axis="a") == x for x[*s]': "not for laws",
    "a: relu(x, factor=c) == x for x[*s]": "relu has no attribute 'factor'",
    "a: scale(x) == x for x[*s]": "scale lacks factor",
    "a: relu(x), neg(x) == relu(x) for x[*s]": "2 results on the left, 1 on the right",
    'a: scale(x, factor=c + "d") == x for x[*s]': "counts with 'd'",
    "a: add() == x for x[*s]": "no operands",
    "a: x == y for x[*s] y[*s]": "each side has a variable",
    "a: slice(x, dim=0, start=s, stop=2) == x for x[*s]": "a run of dims",
    "a: expand(x, shape=(*r, 2)) == x for x[*s]": "no variable has",
    "a: relu(x) == relu(x) for x[*s] x[k]": "given twice",
    "a: relu(x) == relu(x) for x[*s] y": "no variable with its dims",
    "a: relu(x) == relu(x) for x[*s]:f99": "f99",
    "a: relu[...](x) == x for x[*s]": "relu[...] is given 1 operands and no attribute",
    "linear(x, w)": "this is no law",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_line_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "my.laws"
    path.write_text(f"# mine\n{line}\n")
    with pytest.raises(UsageError) as caught:
        read_laws(path)
    assert "my.laws line 2: " in caught.value.what
    assert WRONG[line] in caught.value.what
    assert caught.value.allowed
    assert caught.value.mend


@pytest.mark.parametrize("content", [b"", b"# nothing\n", b"\xff\xfe\x00", b"a: neg(neg(x)) == x for x[*s]\n" * 2])
def test_a_wrong_file_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "my.laws"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"my\.laws") as caught:
        read_laws(path)
    assert caught.value.allowed
    assert caught.value.mend


def test_every_attribute_can_be_a_variable() -> None:
    """Or drawing its values would be a fault of ours."""
    from pdv.rewrite.sample import _DRAWS

    laws = {
        name
        for op in OPERATORS.values()
        if op.kind not in ("leaf", "parallel") and not op.is_foreign
        for name in op.attrs
    }
    assert laws <= set(_DRAWS)

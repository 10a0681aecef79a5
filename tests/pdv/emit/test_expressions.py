"""The text of an operator has one home: its declared template, or a function that writes it."""

from __future__ import annotations

from ir.ops import OPERATORS
from pdv.emit.program.expressions import WRITERS


def test_each_operator_is_written_in_one_place() -> None:
    computing = [op for op in OPERATORS.values() if op.kind not in ("leaf", "parallel")]
    templates = {op.name for op in computing if op.emit}
    assert not templates & set(WRITERS), "a template that is never read"
    assert templates | set(WRITERS) == {op.name for op in computing}

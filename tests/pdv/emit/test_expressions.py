"""The text of an operator has one home: what its declaration says."""

from __future__ import annotations

from ir.ops import OPERATORS


def test_each_operator_declares_its_text() -> None:
    assert all(op.emit for op in OPERATORS.values() if op.kind not in ("leaf", "parallel"))

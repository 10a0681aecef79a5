"""Leaves: where values come from."""

from __future__ import annotations

from ir.operator import Leaf, Operator

_ANY = "-> ..."
_PARAM = ("name", "source", "view", "trainable", "stored", "regather")

OPS = (
    Operator("input", _ANY, "leaf", attrs=("name",), leaf=Leaf.INPUT),
    Operator("param", _ANY, "leaf", attrs=_PARAM, leaf=Leaf.PARAM),
    Operator("const", _ANY, "leaf", attrs=("value",), leaf=Leaf.CONST),
)

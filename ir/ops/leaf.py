"""Leaves: where values come from."""

from __future__ import annotations

from ir.operator import Operator

_ANY = "-> ..."

OPS = (
    Operator("input", _ANY, "leaf", attrs=("name",)),
    Operator("param", _ANY, "leaf", attrs=("name", "source", "view", "trainable", "stored", "regather")),
    Operator("const", _ANY, "leaf", attrs=("value",)),
)

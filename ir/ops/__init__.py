"""Every operator, by name. Adding one: a declaration in its family's file and an entry in that file's ``OPS``."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ir.operator import Operator
from ir.ops import (
    batch_norm,
    contraction,
    draws,
    elementwise,
    functions,
    indexing,
    leaf,
    logic,
    movement,
    normalization,
    opaque,
    parallel,
    parts,
    reduction,
    stencil,
)

_FAMILIES = (
    leaf, contraction, elementwise, functions, logic, draws, normalization, batch_norm, reduction, movement, parts,
    indexing, stencil, opaque, parallel,
)  # fmt: skip

_BY_NAME = {op.name: op for family in _FAMILIES for op in family.OPS}
OPERATORS: Mapping[str, Operator] = MappingProxyType(_BY_NAME)

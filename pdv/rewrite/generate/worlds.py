"""The worlds that are enumerated: a few operands of concrete shapes, and the operators that may stand over them.

Extents of a world differ, so that equal values mean equal programs and not equal sizes; attribute variables have
values here and are proven over others later. ``_`` in a step is any term, a name is that operand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from pdv.rewrite.generate.space import OperatorForm
from pdv.rewrite.law import Apply, Law, Operand, Shape, Term, parse_law

Slot = str | None
"""An operand of a step: any term, or the one so named."""


@dataclass(frozen=True)
class World:
    """Operands, their sizes, and what may be built over them.

    Attributes:
        name: for progress and reports.
        operands: in the form of a law's ``for``.
        values: of extents and attribute variables.
        offers: the steps, comma-separated.
        max_ops: operators of the largest term.
        given: terms that count as operands, because only weights are in them.
        flat: operators that stand inside no other of the same name.
    """

    name: str
    operands: str
    values: Mapping[str, object]
    offers: str
    max_ops: int = 3
    given: str = ""
    flat: frozenset[str] = frozenset()

    @cached_property
    def _read(self) -> Law:
        listed = ", ".join(filter(None, (self.offers, self.given)))
        return parse_law(f"world: {listed} == _ for _[] {self.operands}")

    @property
    def shapes(self) -> dict[str, Shape]:
        """Of the operands."""
        return {name: shape for name, shape in self._read.shapes.items() if name != "_"}

    @cached_property
    def steps(self) -> tuple[tuple[OperatorForm, tuple[Slot, ...]], ...]:
        """Operators with attributes, and their slots."""
        return tuple((OperatorForm(term.op, term.attrs), _slots(term)) for term in self._applied if _is_step(term))

    @cached_property
    def givens(self) -> tuple[Term, ...]:
        """Terms that count as operands."""
        return tuple(term for term in self._applied if not _is_step(term))

    @property
    def _applied(self) -> tuple[Apply, ...]:
        return tuple(term for term in self._read.left if isinstance(term, Apply))


def _is_step(term: Apply) -> bool:
    return Operand("_") in term.operands


def _slots(term: Apply) -> tuple[Slot, ...]:
    return tuple(None if operand == Operand("_") else str(operand) for operand in term.operands)

"""The terms of one world, in classes of equal value: an e-graph whose equality is evaluation over Z_p.

Every term is an operator over classes, so that a term inside another stands for all that equal it. A class keeps one
representative, the first and so among the smallest. Values are exact at the world's sizes; whether two terms are equal
at all sizes is asked of ``check``, not decided here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ir.dims import Loops
from ir.errors import ShapeError
from ir.evaluation.interpret import data_of, spec_of
from ir.evaluation.modular import PrimeField
from ir.evaluation.recording import Recorder
from ir.operator import Operator
from ir.ops import OPERATORS
from ir.proof.primes import draw_primes
from ir.tape import Call
from ir.types import TensorType
from pdv.rewrite.expression import Expression, evaluate
from pdv.rewrite.instantiate import dims_of, resolve_attrs
from pdv.rewrite.law import Apply, Operand, Term
from pdv.rewrite.law import Shape as LawShape

TRIALS = 2
Attrs = tuple[tuple[str, Hashable], ...]


@dataclass(frozen=True, slots=True)
class Application:
    """An operator over classes; attributes resolved (all of them, dims from the front)."""

    op: str
    attrs: Attrs
    children: tuple[int, ...]

    def attr(self, name: str) -> Hashable:
        """Value of one attribute."""
        return dict(self.attrs)[name]


@dataclass(slots=True, eq=False)
class Class:
    """Terms of one value. ``size`` counts the operators of the representative ``term``, ``leaves`` are its operands."""

    number: int
    tensor: TensorType
    value: Any  # [trials, *shape], of the field or integers
    term: Term
    size: int
    leaves: tuple[str, ...]
    entries: list[Application] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class OperatorForm:
    """An operator with attributes, as a world offers it."""

    op: str
    attrs: tuple[tuple[str, Expression], ...]


_Solved = tuple[Loops, TensorType, Attrs]


class Space:
    """Classes by value, entries by structure."""

    def __init__(self, shapes: Mapping[str, LawShape], values: Mapping[str, object], seed: int) -> None:
        self.values = values
        self.field = PrimeField(str(seed), draw_primes(f"terms/{seed}", TRIALS))
        self.classes: list[Class] = []
        self.table: dict[Application, int] = {}
        self._found: dict[bytes, int] = {}
        self._solved: dict[tuple[str, Attrs, tuple[TensorType, ...]], _Solved | None] = {}
        for name, shape in shapes.items():
            self._leaf(name, shape)

    def _leaf(self, name: str, shape: LawShape) -> None:
        tensor = TensorType(dims_of(shape, self.values), shape.dtype)
        drawn = self.field.random(f"operand {name}", tensor.shape)
        value: Any = Recorder(self.field, TRIALS).leaf(drawn, tracked=False)
        if not tensor.dtype.is_floating:
            value = np.broadcast_to(drawn[:1] % 2, drawn.shape)
        self.add_class(self.fingerprint(tensor, value), tensor, value, Operand(name), 0, (name,))

    def add_class(
        self, key: bytes, tensor: TensorType, value: Any, term: Term, size: int, leaves: tuple[str, ...]
    ) -> Class:
        """A new class."""
        found = Class(len(self.classes), tensor, value, term, size, leaves)
        self.classes.append(found)
        self._found[key] = found.number
        return found

    def known(self, key: bytes) -> Class | None:
        """The class of a value."""
        number = self._found.get(key)
        return None if number is None else self.classes[number]

    def add_entry(self, entry: Application, to: Class) -> None:
        """``entry`` is known to be in a class."""
        self.table[entry] = to.number
        to.entries.append(entry)

    def entry(self, op: str, attrs: Mapping[str, Hashable], children: Sequence[int]) -> Application | None:
        """The entry of an operator over classes; None where it does not type-check."""
        solved = self.solve(op, attrs, [self.classes[child].tensor for child in children])
        if solved is None:
            return None
        ordered = tuple(sorted(children)) if OPERATORS[op].commutative else tuple(children)
        return Application(op, solved[2], ordered)

    def solve(self, op: str, attrs: Mapping[str, Hashable], types: Sequence[TensorType]) -> _Solved | None:
        """Loops, result type and resolved attributes; None where the operands do not fit."""
        key = (op, tuple(attrs.items()), tuple(types))
        if key not in self._solved:
            self._solved[key] = _solve(OPERATORS[op], attrs, types)
        return self._solved[key]

    def compute(self, entry: Application) -> tuple[TensorType, Any, bytes]:
        """Type, value and fingerprint of an entry."""
        members = [self.classes[child] for child in entry.children]
        solved = self.solve(entry.op, dict(entry.attrs), [member.tensor for member in members])
        assert solved is not None, entry
        loops, tensor, attrs = solved
        op = OPERATORS[entry.op]
        recorder = Recorder(self.field, TRIALS)
        operands = [member.value for member in members]
        if op.evaluate is None:
            value = recorder.einsum(spec_of(loops), *operands)
        else:
            value = op.evaluate(recorder, operands, Call(loops, loops, dict(attrs), np.zeros(1, dtype=np.int64)))
        return tensor, value, self.fingerprint(tensor, value)

    def fingerprint(self, tensor: TensorType, value: Any) -> bytes:
        """A digest of type and exact value; empty for a value that is zero throughout, which no law should rest on."""
        data = data_of(value)
        if data.dtype.kind == "i" and tensor.dtype.is_floating:
            data = self.field.reduce(data)
        if not data.any():
            return b""
        digest = hashlib.blake2b(str(tensor).encode(), digest_size=16)
        digest.update(np.ascontiguousarray(data).tobytes())
        return digest.digest()

    def term_of(self, step: OperatorForm, children: Sequence[int]) -> Apply:
        """The term of a step over classes' representatives."""
        return Apply(step.op, tuple(self.classes[child].term for child in children), step.attrs)

    def concrete(self, step: OperatorForm) -> dict[str, Hashable]:
        """The step's attributes at this world's sizes."""
        found: dict[str, Hashable] = {}
        for name, written in step.attrs:
            value = evaluate(written, self.values)
            assert isinstance(value, Hashable), value
            found[name] = value
        return found


def add_term(space: Space, term: Term, met: Callable[[Term, Application, Class], None] = lambda *_: None) -> int:
    """The class of a term; all terms in it are added with it. ``met`` is told of one whose value another has."""
    if isinstance(term, Operand):
        return next(member.number for member in space.classes if member.term == term)
    children = [add_term(space, operand, met) for operand in term.operands]
    entry = space.entry(term.op, space.concrete(OperatorForm(term.op, term.attrs)), children)
    assert entry is not None, f"{term} does not type-check"
    if entry not in space.table:
        tensor, value, key = space.compute(entry)
        known = space.known(key)
        if known is None:
            known = space.add_class(key, tensor, value, term, 0, (str(term),))
        else:
            met(term, entry, known)
        space.add_entry(entry, known)
    return space.table[entry]


def _solve(op: Operator, attrs: Mapping[str, Hashable], types: Sequence[TensorType]) -> _Solved | None:
    try:
        given = op.check_attrs(resolve_attrs(op, attrs, types[0].shape))
        loops = op.solve(op.name, types, given)
        result = op.result_type(loops, types, given)
    except (ShapeError, AssertionError, IndexError, TypeError, ValueError):  # attributes that do not fit the operands
        return None
    return None if 0 in result.shape else (loops, result, tuple(given.items()))

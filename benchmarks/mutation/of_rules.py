"""Parallel rules made wrong: the state of one operand or of the result changed, and the operator declared to allow it.

Without the false declaration the validator would refuse every one of them by its states, and the proof would not be
tried. Changed states that no parallel operator makes of an Invariant operand, or takes back to one, are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from benchmarks.mutation.floats import agree
from ir.dims import Loops
from ir.errors import ShapeError, VerificationError
from ir.operator import Operator, Split
from ir.ops import OPERATORS
from ir.sharding import Invariant, Partial, Replicate, Shard, State
from pdv.rewrite.check_parallel import MESHES, Example, apply_rule, examples, prove_rule, serial
from pdv.rewrite.parallel_rules import ParallelRule, parallel_rules

PARALLEL_KINDS = ("operand's state changed", "result's state changed", "sum passed wrongly")


class Claiming(Operator):
    """An operator with one more split than its loops give it."""

    __slots__ = ("claim",)
    claim: Split

    def splits(self, loops: Loops) -> tuple[Split, ...]:
        """The claim first, so that it counts where another has the same operands."""
        return (self.claim, *(split for split in Operator.splits(self, loops) if split.operands != self.claim.operands))


def claiming(op: Operator, claim: Split) -> Operator:
    """``op``, with ``claim`` among its splits."""
    made = Claiming(**{field.name: getattr(op, field.name) for field in fields(op)})
    object.__setattr__(made, "claim", claim)
    return made


@dataclass(frozen=True)
class ParallelMutant:
    """A rule with one state changed, and the example that it is tried on."""

    example: Example
    rule: ParallelRule
    kind: str
    source: str

    @property
    def changed(self) -> str:
        """The claim, for people."""
        split = self.rule.split
        return f"{', '.join(map(str, split.operands))} -> {split.result}"


def parallel_mutants(*, every: int = 1) -> Iterator[ParallelMutant]:
    """Every rule of every example with one state changed in every way; of these each ``every``-th."""
    number = 0
    for example in examples():
        node = serial(example).outputs[0][1]
        declared = {(rule.split.loop, rule.split.operands, rule.split.result) for rule in parallel_rules(node)}
        ranks = [len(shape) for shape in example.shapes]
        for rule in parallel_rules(node):
            for kind, split in _changed(rule.split, ranks, node.type.rank):
                if (split.loop, split.operands, split.result) in declared:
                    continue
                number += 1
                if number % every == 0:
                    false = replace(example, declared=claiming(OPERATORS[example.op], split))
                    yield ParallelMutant(false, ParallelRule(rule.op, split), kind, rule.name)


def _changed(split: Split, ranks: list[int], rank: int) -> Iterator[tuple[str, Split]]:
    kind = PARALLEL_KINDS[2] if any(isinstance(state, Partial) for state in split.operands) else PARALLEL_KINDS[0]
    for at, state in enumerate(split.operands):
        others: list[State] = [Invariant(), Replicate(), *(Shard(dim) for dim in range(ranks[at]))]
        for other in others:
            if other != state:
                operands = (*split.operands[:at], other, *split.operands[at + 1 :])
                yield kind, replace(split, operands=operands)
    if split.loop is None and kind == PARALLEL_KINDS[0]:
        for at, _ in enumerate(split.operands):  # as if a pending sum might pass
            others = [Partial() if i == at else Replicate() for i in range(len(ranks))]
            yield PARALLEL_KINDS[2], Split(None, tuple(others), Partial())
    results: list[State] = [Invariant(), Partial(), *(Shard(dim) for dim in range(rank))]
    for other in results:
        if other != split.result:
            yield PARALLEL_KINDS[1], replace(split, result=other)


def judged(mutant: ParallelMutant) -> str:
    """refused by states, shapes, values or gradients; or true (confirmed in floats, or else: DISAGREES)."""
    try:
        prove_rule(mutant.example, mutant.rule, seed=0)
    except VerificationError as error:
        return f"refused by {error.check}"
    except (ShapeError, ValueError, AssertionError):  # local shapes that do not go together: it cannot run at all
        return "refused by shapes"
    return "true, confirmed" if confirmed(mutant) else "true, DISAGREES"


def confirmed(mutant: ParallelMutant) -> bool:
    """Whether one device and the ranks agree in float64, outputs and gradients, on every mesh that divides."""
    tried = 0
    for mesh in MESHES:
        pair = apply_rule(mutant.example, mutant.rule, mesh)
        if pair is not None:
            tried += 1
            if not agree(*pair, tried, mesh=mesh):
                return False
    return tried > 0

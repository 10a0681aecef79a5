"""From worlds to the shipped file: enumerate, keep what a search can use, fuse, name, prove.

Entry points: ``generate`` and ``written_library``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ir.errors import VerificationError
from ir.operator import Operator
from ir.ops import OPERATORS
from pdv.rewrite.check import check_law, holds, proven
from pdv.rewrite.expression import Symbol
from pdv.rewrite.generate.enumerate import KeptLaws, Report, explore
from pdv.rewrite.generate.fuse import fusions
from pdv.rewrite.generate.menu import WORLDS
from pdv.rewrite.generate.names import name_laws
from pdv.rewrite.generate.select import independent, orient, profitable
from pdv.rewrite.generate.worlds import World
from pdv.rewrite.law import Apply, Law, Operand, Term, apply

MAX_OPS = 4
AGAIN = (1, 2, 3)  # seeds further on: a law that hardly ever type-checks may be proven with one and not with another
ACTIVATIONS = [op for op in OPERATORS.values() if op.is_activation]
"""Worlds have one of them for any: it is uninterpreted, so what holds of it holds of the others."""


@dataclass(frozen=True)
class Generated:
    """The laws to ship, proven, and how many were looked at on the way."""

    laws: tuple[Law, ...]
    counts: Counter[str]


def generate(
    worlds: Sequence[World] = WORLDS,
    *,
    max_ops: int = MAX_OPS,
    seed: int = 0,
    written: Sequence[Law] = (),
    report: Report = lambda stage, share: None,
) -> Generated:
    """All laws of the worlds that a search can use. The same arguments give the same laws.

    Args:
        worlds: in the order in which later ones build on earlier.
        max_ops: operators of a side.
        seed: of the values at which terms are compared and laws tried.
        written: laws that are there already: what they imply is left out, and their names are theirs.
        report: called with a stage and the share done.
    """
    found = KeptLaws()
    for number, world in enumerate(worlds):
        share = number / len(worlds)
        explore(world, found, max_ops=max_ops, seed=seed, report=lambda stage, _: report(stage, share))  # noqa: B023
    report("selecting and proving", None)
    laws = [law for law in found.laws if profitable(law, seed)]
    laws += [fused for law in found.laws for fused in fusions(law, seed=seed)]
    found.counts["of use"] = len(laws)
    laws = independent(list({_key(law): law for law in laws}.values()), seed, written)
    laws = [orient(spread, seed) for law in laws for spread in _for_each_function(law, seed)]
    laws = [law for law in laws if all(_proves(law, seed + more) for more in AGAIN)]
    shipped = name_laws(laws, taken={law.name for law in written})
    found.counts["kept"] = len(shipped)
    return Generated(tuple(proven(law, seed=seed) for law in shipped), found.counts)


def _proves(law: Law, seed: int) -> bool:
    try:
        check_law(law, seed=seed)
    except VerificationError:
        return False
    return True


def _key(law: Law) -> str:
    return str(replace(law, name="", proof=""))


def _for_each_function(law: Law, seed: int) -> list[Law]:
    if not any(OPERATORS[part.op].is_activation for term in (*law.left, *law.right) for part in apply(term)):
        return [law]
    return [other for op in ACTIVATIONS if holds(other := _with_function(law, op), seed=seed)]


def _with_function(law: Law, function: Operator) -> Law:
    def inside(term: Term) -> Term:
        if isinstance(term, Operand):
            return term
        operands = tuple(map(inside, term.operands))
        if not OPERATORS[term.op].is_activation:
            return replace(term, operands=operands)
        return Apply(function.name, operands, tuple((name, Symbol(name)) for name in function.attrs))

    return replace(law, left=tuple(map(inside, law.left)), right=tuple(map(inside, law.right)))


def written_library(generated: Generated, command: str) -> str:
    """The text of the library file: a head that says where it comes from, then one law a line."""
    counts = generated.counts
    head = [
        f"# {len(generated.laws)} laws, found and proven by `{command}`; do not edit, run it again.",
        f"# {counts['enumerated']} terms, {counts['candidates']} pairs of equal value that nothing known explains;",
        f"# {counts['proven']} of these are proven at all sizes tried; kept are those whose sides do different work.",
        "# Both sides are equal over Z_p, for primes drawn from the law itself, gradients too, with functions of",
        "# elements and rows uninterpreted. How to read a law: pdv/rewrite/law.py.",
        "",
    ]
    return "\n".join([*head, *map(str, generated.laws)]) + "\n"

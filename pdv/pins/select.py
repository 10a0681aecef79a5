"""Which operators a selector means, on a graph and on what rewrites make of it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from ir.graph import Node
from pdv.pins.names import Key, Names, key_of, match_some, matching
from pdv.pins.weights import Weights


@dataclass(frozen=True)
class Selected:
    """Operators, by what of them survives a rewrite.

    Attributes:
        op: the operators' kinds, None for any.
        sources: stored tensors of which they read one, None for any.
        module: stored tensors below the module's path; ``within``: operators of the module by name.
        named: operators by name, None for any.
        weights: sees the stored tensors behind what rewrites make of parameters.
    """

    op: frozenset[str] | None = None
    sources: frozenset[str] | None = None
    module: frozenset[str] | None = None
    within: frozenset[Key] = frozenset()
    named: frozenset[Key] | None = None
    weights: Weights = field(default_factory=Weights, compare=False)

    def __contains__(self, node: Node) -> bool:
        """True for an operator that all given fields describe."""
        if self.op is not None and node.op.name not in self.op:
            return False
        if self.named is not None and key_of(node) not in self.named:
            return False
        if self.sources is None and self.module is None:
            return True
        read = self.weights.read(node)
        if self.sources is not None and self.sources.isdisjoint(read):
            return False
        return self.module is None or key_of(node) in self.within or bool(self.module.intersection(read))

    def traces(self, node: Node) -> frozenset[Hashable]:
        """What a rewrite must leave of a selected operator: its kind with each tensor that it reads, or its name.

        Views are free to go, unless they are what was asked for: nothing is computed in them.
        """
        if node not in self or not (node.op.kernel or self.op or self.named):
            return frozenset()
        read = enumerate(self.weights.sources(operand) for operand in node.operands)
        places = [(0 if node.op.commutative else place, sources) for place, sources in read]
        found: list[Hashable] = [(node.op.name, place, source) for place, sources in places for source in sources]
        return frozenset(found or [key_of(node)])

    @property
    def keys(self) -> frozenset[Key]:
        """Operators singled out by name."""
        return self.within | (self.named or frozenset())

    @property
    def params(self) -> frozenset[str]:
        """Parameters singled out by name."""
        return (self.sources or frozenset()) | (self.module or frozenset())


def select(given: Mapping[str, str], names: Names, where: str) -> Selected:
    """What the fields of a selector mean together.

    Raises:
        PinsError: if one of them, or all together, describe nothing.
    """
    op = sources = module = named = None
    within: frozenset[Key] = frozenset()
    if "op" in given:
        op = frozenset(match_some(where, "operator", given["op"], dict.fromkeys(n.op.name for n in names.operators)))
    if "param" in given:
        sources = frozenset(match_some(where, "parameter", given["param"], names.params))
    if "module" in given:
        paths = match_some(where, "module", given["module"], names.modules)
        module = frozenset(source for path in paths for source in names.modules[path])
        within = frozenset(key_of(node) for path in paths for node in names.inside(path) if node.name)
    if "name" in given:
        found = set(
            match_some(where, "operator", given["name"], dict.fromkeys(n.name for n in names.operators if n.name))
        )
        named = frozenset(key_of(node) for node in names.operators if node.name in found)
    return Selected(op, sources, module, within, named, names.weights)


__all__ = ["Names", "Selected", "matching", "select"]

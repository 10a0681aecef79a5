"""Which operators a selector means, on a graph and on what rewrites make of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ir.graph import Node
from pdv.pins.names import Key, Names, key_of, match_some, matching, sources_read


@dataclass(frozen=True)
class Selected:
    """Operators, by what of them survives a rewrite.

    Attributes:
        op: the operators' kinds, None for any.
        sources: stored tensors of which they read one, None for any.
        module: stored tensors below the module's path; ``within``: operators of the module by name.
        named: operators by name, None for any.
    """

    op: frozenset[str] | None = None
    sources: frozenset[str] | None = None
    module: frozenset[str] | None = None
    within: frozenset[Key] = frozenset()
    named: frozenset[Key] | None = None

    def __contains__(self, node: Node) -> bool:
        """True for an operator that all given fields describe."""
        if self.op is not None and node.op.name not in self.op:
            return False
        if self.named is not None and key_of(node) not in self.named:
            return False
        if self.sources is None and self.module is None:
            return True
        read = sources_read(node)
        if self.sources is not None and not self.sources.intersection(read):
            return False
        return self.module is None or key_of(node) in self.within or bool(self.module.intersection(read))

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
        within = frozenset(key_of(node) for path in paths for node in names.inside(path))
    if "name" in given:
        found = set(
            match_some(where, "operator", given["name"], dict.fromkeys(n.name for n in names.operators if n.name))
        )
        named = frozenset(key_of(node) for node in names.operators if node.name in found)
    return Selected(op, sources, module, within, named)


__all__ = ["Names", "Selected", "matching", "select"]

"""Names of local variables: short, by role where there is one, and reused as soon as a value is done with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from ir.graph import Node, unmoved
from ir.ops.parts import table_below
from pdv.emit.analysis.constants import constant_names
from pdv.emit.analysis.leaves import Reading
from pdv.emit.analysis.names import module_name
from pdv.emit.program.statements import Scope, Statement

STREAM = "x"
SPARE = ("h", "y", "z")


def variable_names(
    scope: Scope,
    statements: Sequence[Statement],
    reading: Reading,
    given: Mapping[Node, str],
    reserved: frozenset[str],
) -> Mapping[Node, str]:
    """A name for every value that a statement makes; ``given`` names the arguments, ``reserved`` ones are not used."""
    return _Naming(scope, statements, reading, given, reserved).run()


class _Naming:
    def __init__(
        self,
        scope: Scope,
        statements: Sequence[Statement],
        reading: Reading,
        given: Mapping[Node, str],
        reserved: frozenset[str],
    ) -> None:
        self._statements = statements
        self._reading = reading
        self._reserved = reserved
        self._names = dict(given)
        self._arguments = set(scope.arguments)
        self._last_read = {node: index for index, statement in enumerate(statements) for node in statement.reads}
        self._last_use = self._last_read | {
            node: max(self._last_read[node], index + 1)
            for index, statement in enumerate(statements)
            if (run := statement.run) is not None and len(run.blocks) > 1
            for node in statement.reads
            if node in run.fixed or node not in run.incoming[0]
        }  # what a loop reads in each round may not be overwritten by what a round gives
        self._roles = attention_roles(statements, reading)
        self._stream = self._bottlenecks(scope)

    def run(self) -> Mapping[Node, str]:
        holder: dict[str, Node] = {name: node for node, name in self._names.items()}
        for index, statement in enumerate(self._statements):
            targets = statement.targets
            if statement.run is not None:
                self._name_results(statement, index, holder)
            for place, node in enumerate(targets):
                if node in self._names:
                    continue
                wanted = chain(self._part_name(statement, place), self._candidates(node))
                self._names[node] = next(name for name in wanted if self._is_free(name, holder, index))
                holder[self._names[node]] = node
        return self._names

    def _name_results(self, statement: Statement, index: int, holder: dict[str, Node]) -> None:
        """What a loop's blocks pass on keeps its name, unless the value before the loop is read after it."""
        run = statement.run
        assert run is not None
        if len(run.blocks) == 1:
            return  # what one block gives is named as any other value
        passed = dict(zip(run.incoming[1], run.incoming[0], strict=True))  # by the first block -> into it
        for first, last in zip(run.outgoing[0], run.outgoing[-1], strict=True):
            before = passed.get(first)
            if before is None or self._last_use.get(before, -1) > index:
                continue
            name = self._names[before]
            if name not in self._reserved:
                self._names[last] = name
                holder[name] = last

    def _part_name(self, statement: Statement, place: int) -> list[str]:
        """``q1`` for the first part of ``q``, where parts have no role of their own."""
        if statement.kind != "chunk" or statement.value is None or statement.targets[place] in self._roles:
            return []
        whole = self._names.get(self._reading.operands(statement.value)[0], STREAM)
        return [] if whole == STREAM else [f"{whole}{place + 1}"]

    def _is_free(self, name: str, holder: Mapping[str, Node], index: int) -> bool:
        if name in self._reserved:
            return False
        return name not in holder or self._last_use.get(holder[name], -1) <= index

    def _candidates(self, node: Node) -> Iterator[str]:
        if node in self._stream:
            yield STREAM
        if node in self._roles:
            yield self._roles[node]
        leaf = self._reading.leaf(node)
        if leaf is not None:
            yield module_name(leaf.base)
        base = unmoved(node)
        if base.is_input:
            yield self._names.get(base, "inputs")
        if (table := table_below(base)) is not None:
            yield constant_names(self._reading)[table]
        if base.op.result_name:
            yield base.op.result_name
        yield SPARE[0]
        if (named := self._module_of(node)) is not None:
            yield named
        yield from SPARE[1:]
        number = 2
        while True:
            yield f"{SPARE[0]}{number}"
            number += 1

    def _module_of(self, node: Node) -> str | None:
        """The module whose weight makes a value: ``gate_proj`` of ``layers.0.mlp.gate_proj.weight``."""
        for operand in self._reading.operands(node):
            leaf = self._reading.leaf(operand)
            if leaf is not None and leaf.base.is_param:
                return module_name(leaf.base)
        for operand in self._reading.operands(node):
            if operand not in self._names and self._reading.leaf(operand) is None:
                return self._module_of(operand)
        return None

    def _bottlenecks(self, scope: Scope) -> set[Node]:
        """Values that everything after them goes through: the stream of the model."""
        found: set[Node] = set()
        fixed = {node for node in scope.arguments if node.is_leaf or self._reading.leaf(node) is not None}
        live: set[Node] = {node for node in scope.arguments if node not in fixed and node.needs_grad}
        for index, statement in enumerate(self._statements):
            made = [node for node in statement.targets if self._reading.leaf(node) is None and node.needs_grad]
            live = {node for node in (*live, *made) if self._last_read.get(node, -1) > index}
            if len(live) == 1 and list(live) == made:
                found |= live
        return found


def attention_roles(statements: Sequence[Statement], reading: Reading) -> Mapping[Node, str]:
    """q, k and v, from an attention's operands back to the projections that make them."""
    roles: dict[Node, str] = {}
    made = [node for statement in statements for node in ((statement.value,) if statement.value else ())]
    for node in made:
        for attention in _attentions(node, reading):
            for role, operand in zip("qkv", reading.operands(attention), strict=False):
                for value in _origins(operand, reading):
                    roles.setdefault(value, role)
    return roles


def _origins(value: Node, reading: Reading) -> Iterator[Node]:
    """A value and what it was made of, first operands only, down to a projection or a part of one."""
    while reading.leaf(value) is None and value.operands:
        yield value
        if value.op.kind == "contraction" or value.op.takes_part:
            return
        value = reading.operands(value)[0]


def _attentions(node: Node, reading: Reading) -> list[Node]:
    """Attention nodes within a few operators below a statement's value: it may be wrapped in moves."""
    found: list[Node] = []
    for _ in range(4):
        if node.op.has_scores:
            found.append(node)
        if node.is_leaf or node.op.has_scores:
            break
        node = reading.operands(node)[0]
    return found

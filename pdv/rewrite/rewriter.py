"""Applying rules: replacements are built, moved parameters stay parameters, and many matches are replaced at once.

Entry points: ``found_matches`` chooses where to apply a rule, ``rewritten`` replaces all of that in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ir.builder import Builder
from ir.errors import ShapeError
from ir.graph import Node, View, ViewStep, param_view
from ir.views import sources_of
from pdv.rewrite.instantiate import build
from pdv.rewrite.match import Inside, Match, Users, matches
from pdv.rewrite.rule import Rule

Serves = Mapping[str, frozenset[int]]
"""Of stored tensors by name: the numbers of the results that depend on each."""
NOBODY_ASKS: Serves = MappingProxyType({})


class RewriteBuilder(Builder):
    """A builder that keeps moved parameters parameters: ``chunk(w) == w`` read through a view, ``concat`` too.

    ``moved`` are the parameters that were read anew; ``known``: nodes that stand for what is equal to them;
    ``serves``: what depends on each stored tensor, by name: those that serve different ones are not joined.
    """

    def __init__(self, known: Iterable[Node] = (), serves: Serves = NOBODY_ASKS) -> None:
        super().__init__()
        self.moved: set[Node] = set()
        self.serves = serves
        self._nodes.update((node.digest, node) for node in known)

    def apply(self, op: Any, operands: tuple[Node, ...], attrs: Mapping[str, Any], name: str = "") -> Node:
        """As ``Builder.apply``, with views of parameters and slices of slices written as what they are."""
        made = super().apply(op, operands, attrs, name)
        if op.cuts and _is_joined(operands[0]):
            raise ShapeError(f"{operands[0]!r} was joined, and is not taken apart again")
        if op.joins and _repeats(operands):
            raise ShapeError(f"{operands!r} were taken apart, and are not joined again")
        if all(operand.is_param for operand in operands):
            if op.joins and _may_join(operands, made.attr("dim"), self.serves):
                return self._join(operands, made)
            if op.kind == "move" and op.strides is not None and not op.repeats:
                return self._view(operands[0], made)
        if op.takes_range and operands[0].op is op and operands[0].attr("dim") == made.attr("dim"):
            start = operands[0].attr("start")
            shifted = {"dim": made.attr("dim"), "start": start + made.attr("start"), "stop": start + made.attr("stop")}
            return self.apply(op, operands[0].operands, shifted, name)
        return made

    def _view(self, param: Node, moved: Node) -> Node:
        step: ViewStep = (moved.op.name, *moved.attrs.values())
        if moved.op.takes_range:
            step = (*step, param.type.shape[moved.attr("dim")])
        match step:
            case ("chunk", _, _, index):
                suffix = str(index)
            case ("slice", _, start, stop, _):
                suffix = f"{start}_{stop}"
            case ("permute", _):
                suffix = "T"
            case _:
                suffix = "as_" + "x".join(map(str, moved.type.shape))
        return self._param(param, f"{param.attr('name')}.{suffix}", moved, (*param_view(param), step), (param,))

    def _join(self, params: Sequence[Node], made: Node) -> Node:
        parts = tuple(part for param in params for part in _parts(param, made.attr("dim")) or ())
        name = _joined_name([str(param.attr("name")) for param in params])
        return self._param(params[0], name, made, (("concat", made.attr("dim"), parts),), params)

    def _param(self, like: Node, name: str, made: Node, view: View, params: Sequence[Node]) -> Node:
        self.moved.update(params)
        source = name if len(params) > 1 else like.attr("source")
        return self.param(name, made.type, source=source, view=view, trainable=like.attr("trainable"))

    def copy(self, node: Node, operands: tuple[Node, ...]) -> Node:
        """As ``Builder.copy``: what is no replacement stays as it is written."""
        if node.is_leaf:
            return super().copy(node, operands)
        return super().apply(node.op, operands, dict(node.attrs), node.name)


def _repeats(nodes: Sequence[Node]) -> bool:
    """True if two of the nodes are views of one stored tensor."""
    sources = [node.attr("source") for node in nodes if node.is_param]
    return len(set(sources)) < len(sources)


def _is_joined(node: Node) -> bool:
    return node.is_param and param_view(node)[:1] != () and param_view(node)[0][0] == "concat"


def _parts(param: Node, dim: int) -> tuple[tuple[str, View, tuple[int, ...]], ...] | None:
    """What ``param`` is joined of along ``dim``; None if it is joined in another way."""
    view = param_view(param)
    if not _is_joined(param):
        return ((param.attr("source"), view, param.type.shape),)
    return view[0][2] if len(view) == 1 and view[0][1] == dim else None


def _may_join(params: Sequence[Node], dim: int, serves: Serves) -> bool:
    """Trained tensors, each of sources of its own: buffers are overwritten one by one.

    All serve the same: one that no loss reaches has no gradient, and a joined one would have it for its other part.
    """
    parts = [_parts(param, dim) for param in params]
    sources = [source for part in parts for source, _, _ in part or ()]
    alike = len({serves.get(source) for source in sources}) <= 1
    trained = all(param.attr("trainable") for param in params)
    return len(params) > 1 and trained and alike and None not in parts and len(set(sources)) == len(sources)


def served(nodes: Sequence[Node], roots: Sequence[Node]) -> Serves:
    """Which of ``roots`` have a gradient of each stored tensor, of operators in order.

    Tensors that serve the same roots of a block serve the same outputs of the program, and the other way round, so that
    a search by blocks and a replay on the whole join alike.
    """
    reached: dict[Node, frozenset[int]] = {}
    for number, root in enumerate(roots):
        reached[root] = reached.get(root, frozenset()) | {number}
    for node in reversed(nodes):
        for operand in node.operands:
            if node.needs_grad and operand.needs_grad:
                reached[operand] = reached.get(operand, frozenset()) | reached.get(node, frozenset())
    found: dict[str, frozenset[int]] = {}
    for leaf, numbers in reached.items():
        for source in sources_of(leaf) if leaf.is_param else ():
            found[source] = found.get(source, frozenset()) | numbers
    return found


def serve_alike(new: Serves, old: Serves) -> bool:
    """Whether each stored tensor that is still read serves what it did."""
    return all(old.get(source) == numbers for source, numbers in new.items())


def _joined_name(names: Sequence[str]) -> str:
    """``h.0.q_k_v.weight`` of ``h.0.q.weight``, ``h.0.k.weight`` and ``h.0.v.weight``."""
    split = [name.split(".") for name in names]
    least = min(map(len, split))
    head = next((i for i in range(least) if len({parts[i] for parts in split}) > 1), least)
    tail = next((i for i in range(least - head) if len({parts[-1 - i] for parts in split}) > 1), least - head)
    middles = ["_".join(parts[head : len(parts) - tail]) for parts in split]
    return ".".join((*split[0][:head], "_".join(middles), *split[0][len(split[0]) - tail :]))


@dataclass(frozen=True)
class Where:
    """What rules may match: nodes in order, who reads them, and parameters that must be read as they are.

    serves: as of ``RewriteBuilder``.
    """

    nodes: Sequence[Node]
    users: Users
    inside: Inside
    fixed: Collection[Node] = ()
    serves: Serves = field(default_factory=dict)


def found_matches(rule: Rule, where: Where) -> tuple[Match, ...]:
    """Where ``rule`` is applied at once: matches that do not overlap, the first come first."""
    chosen: list[Match] = []
    roots: set[Node] = set()
    inner: set[Node] = set()
    op = rule.before[0].op
    for node in where.nodes:
        if node.op.name != op or node in roots:
            continue
        for match in matches(rule, node, where.users, where.inside):
            own = set(match.nodes)
            if roots.isdisjoint(own) and inner.isdisjoint(match.roots) and applies(match, where.fixed, where.serves):
                chosen.append(match)
                roots.update(match.roots)
                inner |= own.difference(match.roots)
                break
    return tuple(chosen)


def applies(match: Match, fixed: Collection[Node] = (), serves: Serves = NOBODY_ASKS) -> bool:
    """True if the replacement has the types of what it replaces, is another, and moves no ``fixed`` parameter."""
    k = RewriteBuilder(serves=serves)
    try:
        made = [build(k, term, match.operands, match.values) for term in match.rule.after]
    except ShapeError:
        return False
    pairs = list(zip(made, match.roots, strict=True))
    if any(new.type != old.type or new.needs_grad != old.needs_grad for new, old in pairs):
        return False
    return k.moved.isdisjoint(fixed) and any(new.digest != old.digest for new, old in pairs)


class CircleError(Exception):
    """Matches that cannot be replaced at once: each needs what the other makes."""

    def __init__(self, match: Match) -> None:
        super().__init__(f"{match.rule.name} at {match.roots} needs itself")
        self.match = match


def rewritten(
    k: Builder, nodes: Iterable[Node], found: Sequence[Match], outside: Callable[[Node], Node]
) -> dict[Node, Node]:
    """Old node -> new, all matches replaced at once.

    Args:
        k: what builds.
        nodes: what is rewritten, operands first.
        found: matches that do not overlap.
        outside: what stands for a node that is not among ``nodes`` (or a leaf).

    Raises:
        CircleError: if two matches need each other's results.
    """
    members = dict.fromkeys(nodes)
    owner = {root: match for match in found for root in match.roots}
    new: dict[Node, Node] = {}
    opened: set[Node] = set()
    for first in members:
        stack = [first]
        while stack:
            node = stack[-1]
            match = owner.get(node)
            waiting = _waiting(node, match, new, members, outside)
            if node in new or not waiting:
                stack.pop()
                if node not in new:
                    _make(k, node, match, new)
                continue
            opened.update((node,) if match is None else match.roots)
            if opened.intersection(waiting):
                raise CircleError(match or found[0])
            stack.extend(waiting)
    return new


def _waiting(
    node: Node, match: Match | None, new: dict[Node, Node], members: Collection[Node], outside: Callable[[Node], Node]
) -> list[Node]:
    """What must be made before ``node``; what is not ours is at hand."""
    needs = node.operands if match is None else tuple(match.operands.values())
    for operand in needs:
        if operand not in members and operand not in new:
            new[operand] = outside(operand)
    return [operand for operand in needs if operand not in new]


def _make(k: Builder, node: Node, match: Match | None, new: dict[Node, Node]) -> None:
    if match is None:
        new[node] = k.copy(node, tuple(new[operand] for operand in node.operands))
        return
    operands = {name: new[operand] for name, operand in match.operands.items()}
    for root, term in zip(match.roots, match.rule.after, strict=True):
        new[root] = build(k, term, operands, match.values)

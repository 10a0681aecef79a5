"""The published techniques, placed exactly: which loop each operator cuts along each axis of a configuration.

No search: data parallelism (Li et al., VLDB'20), ZeRO-3 (Rajbhandari et al., SC'20), Megatron's tensor parallelism
(Shoeybi et al., 2019), its sequence parallelism (Korthikanti et al., MLSys'23), context parallelism by gathered keys
and values (Grattafiori et al., 2024, section 3.3.2) and expert parallelism (Lepikhin et al., 2021) each say what every
operator does, so that a plan can be read off in one pass over the program. Entry point: `place`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ir.graph import Graph, Node
from ir.mesh import Mesh
from ir.operator import Split
from ir.sharding import Invariant, Partial, Shard, Sharding, State
from pdv.manual.columns import Columns
from pdv.pins.roles import RoleOf
from pdv.problem import Assignment, Storage

Use = Literal["data", "copies", "expert", "context", "tensor", "sequence"]
"""What an axis is for; "copies": samples, with weights that rest whole along it whatever others do (hybrid sharding);
"sequence": tensor parallel, with norms and residuals cut along the sequence."""

DATA: tuple[Use, ...] = ("data", "expert", "context")


@dataclass
class Placement:
    """One pass over a graph, operands first."""

    graph: Graph
    mesh: Mesh
    uses: Sequence[Use]
    splits: dict[Node, tuple[Split, ...]] = field(default_factory=dict)
    wanted: dict[Node, list[State]] = field(default_factory=dict)  # of parameters and what is made of them alone

    def __post_init__(self) -> None:
        self.role = RoleOf()
        self.fixed = self.graph.fixed
        self.columns = Columns(self.graph, self.fixed, self.splits)

    def run(self) -> dict[Node, tuple[Split, ...]]:
        """The split of every operator along every axis."""
        for node in self.graph.nodes:
            if node not in self.fixed and not node.is_leaf:
                self._place(node)
        for node in reversed(self.graph.nodes):
            if node in self.fixed and not node.is_leaf:
                self._place_fixed(node)
        return self.splits

    def _place(self, node: Node) -> None:
        options = node.op.splits(node.loops)
        degrees: dict[str, int] = {}
        chosen = []
        for position, use in enumerate(self.uses):
            legal = [split for split in options if self._divides(node, split, position, degrees)]
            split = self._choose(node, legal, position, use)
            if split.loop is not None:
                degrees[split.loop] = degrees.get(split.loop, 1) * self.mesh.axes[position].size
            chosen.append(split)
        self.splits[node] = tuple(chosen)
        self._want(node)

    def _divides(self, node: Node, split: Split, position: int, degrees: Mapping[str, int]) -> bool:
        if split.loop is None:
            return split.label == "none"
        return node.loops.extents[split.loop] % (degrees.get(split.loop, 1) * self.mesh.axes[position].size) == 0

    def _choose(self, node: Node, legal: list[Split], position: int, use: Use) -> Split:
        match use:
            case "data" | "copies":
                return self._samples(node, legal)
            case "context":
                _, positions = self.role.loops(node)
                return next((split for split in legal if split.loop in positions), legal[0])
            case "expert":
                return self._expert(node, legal, self._states(node, position))
            case _:
                return self._tensor(node, legal, position, sequence=use == "sequence")

    def _states(self, node: Node, position: int) -> list[State | None]:
        """Along an axis, the states in which operands were made; None for those that can be had in any."""
        return [self._state(operand, position) for operand in node.operands]

    def _state(self, value: Node, position: int) -> State | None:
        if value in self.fixed:
            return None
        return Invariant() if value.is_leaf else self.splits[value][position].result

    def _samples(self, node: Node, legal: list[Split]) -> Split:
        samples, _ = self.role.loops(node)
        return next((split for split in legal if split.loop in samples), legal[0])

    def _expert(self, node: Node, legal: list[Split], states: list[State | None]) -> Split:
        """Experts by number, and what lies between two of their products; all else by samples."""
        apart = next((split for split in legal if self.role(node, split) == "expert"), None)
        if apart is not None:
            return apart
        samples, _ = self.role.loops(node)
        kept = _follows(legal, states)
        if kept is not None and kept.loop not in samples and not node.op.reorders_dims:
            return kept
        return next((split for split in legal if split.loop in samples), legal[0])

    def _tensor(self, node: Node, legal: list[Split], position: int, *, sequence: bool) -> Split:
        """Products by column, then by row; what is between them follows; sums are taken at once."""
        states = self._states(node, position)
        none = legal[0]
        if any(isinstance(state, Partial) for state in states):
            _, positions = self.role.loops(node) if sequence else ((), frozenset())
            return next((split for split in legal if split.loop in positions), none)
        if node.op.looks_up_rows:
            return next((split for split in legal if isinstance(split.result, Partial)), none)
        if node.op.kind == "contraction" and node.operands[1] in self.fixed:
            row = next((s for s in legal if isinstance(s.result, Partial) and s.operands[0] == states[0]), None)
            column = next((s for s in legal if _is_column(s, node)), None)
            if row is not None:
                return row
            if column is not None and self.columns.stay_cut(node, position, self.mesh.axes[position].size):
                return column
        return _follows(legal, states) or _nearly(legal, states) or none

    def _want(self, node: Node) -> None:
        """Tell operands that can be had in any state in which they are wanted; the first reader decides."""
        for place, operand in enumerate(node.operands):
            if operand in self.fixed:
                states = [split.operands[place] for split in self.splits[node]]
                self.wanted.setdefault(operand, states)

    def _place_fixed(self, node: Node) -> None:
        """In the states that the first reader wants."""
        options = node.op.splits(node.loops)
        wanted = self.wanted.get(node, [Invariant()] * len(self.uses))
        chosen, degrees = [], dict[str, int]()
        for position, state in enumerate(wanted):
            legal = [split for split in options if self._divides(node, split, position, degrees)]
            cut = isinstance(state, Shard)
            split = next((split for split in legal if cut and split.result == state), legal[0])
            if split.loop is not None:
                degrees[split.loop] = degrees.get(split.loop, 1) * self.mesh.axes[position].size
            chosen.append(split)
        self.splits[node] = tuple(chosen)
        self._want(node)

    def storage(self, *, resting: bool) -> dict[Node, Storage]:
        """Where parameters rest: as their first reader wants them; ``resting``: cut along data axes, too (ZeRO-3)."""
        found = {}
        for param in self.graph.params:
            if param.needs_grad:
                states = [s if isinstance(s, Shard) else Invariant() for s in self._readers(param)]
                found[param] = Storage(tuple(states))
                if resting:
                    cut = rest_cut(param, states, self.mesh, self.uses)
                    found[param] = Storage(cut, regather=cut != tuple(states))
        return found

    def _readers(self, param: Node) -> list[State]:
        return self.wanted.get(param, [Invariant()] * len(self.uses))


def place(graph: Graph, mesh: Mesh, uses: Sequence[Use], *, resting: bool = False) -> Assignment:
    """The assignment of a configuration; ``uses`` is aligned with the mesh's axes."""
    made = Placement(graph, mesh, uses)
    splits = made.run()
    return Assignment(splits, made.storage(resting=resting))


def rest_cut(param: Node, states: Sequence[State], mesh: Mesh, uses: Sequence[Use]) -> Sharding:
    """``states`` with a cut along each data axis that has none: of the first dim that divides and that is free.

    A dim that an inner axis cuts for its own use cannot be cut along an outer one: the inner cut would have to be
    undone first.
    """
    found = list(states)
    given = [state if isinstance(state, Shard) else None for state in states]
    for position, use in enumerate(uses):
        if use not in DATA or given[position] is not None:
            continue
        for dim, extent in enumerate(param.type.shape):
            degree = mesh.axes[position].size
            for other, state in enumerate(found):
                degree *= mesh.axes[other].size if state == Shard(dim) else 1
            if extent % degree == 0 and Shard(dim) not in given[position + 1 :]:
                found[position] = Shard(dim)
                break
    return tuple(found)


def _is_column(split: Split, node: Node) -> bool:
    """Whether a product's cut is of its weight's outputs: the result's last dim."""
    return split.result == Shard(node.type.rank - 1) and isinstance(split.operands[1], Shard)


def _follows(legal: list[Split], states: list[State | None]) -> Split | None:
    """The cut that takes all operands as they are."""
    if not any(isinstance(state, Shard) for state in states):
        return None
    for split in legal:
        pairs = zip(states, split.operands, strict=True)
        if split.loop is not None and all(state is None or state == want for state, want in pairs):
            return split
    return None


def _nearly(legal: list[Split], states: list[State | None]) -> Split | None:
    """The cut that takes the first cut operand as it is, and others whole."""
    first = next((place for place, state in enumerate(states) if isinstance(state, Shard)), None)
    if first is None:
        return None
    whole = [place for place, state in enumerate(states) if isinstance(state, Invariant)]
    for split in legal:
        if split.loop is not None and split.operands[first] == states[first]:
            others = [place for place, state in enumerate(states) if isinstance(state, Shard) and place != first]
            if all(split.operands[place] == states[place] for place in others):
                return split if whole or others else None
    return None

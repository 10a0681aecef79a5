"""Evaluate a graph in NumPy: on one device, or on n simulated ranks at once; outputs and gradients, in any field.

``evaluate(graph, values)`` with the default field is the float64 reference; ``exact.py`` runs the same over Z_p.
Local programs come from the operators' declarations, what moves between ranks from ``collectives.MOVES``.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ir.collectives import MOVES, Group, Move, cut
from ir.dims import Loops
from ir.einsum import Data
from ir.errors import VerificationError
from ir.floats import FloatField
from ir.graph import Graph, Node, View, apply_view, read_stored
from ir.mesh import Mesh
from ir.recording import Calls, Field, Recorder, Var
from ir.sharding import Partial, Replicate, Shard, Sharding
from ir.tape import Call
from ir.verify import check_outputs, describe, infer_shardings, node_splits, split_degrees

SINGLE = Mesh(())
Value = Var | Data
Moves = Mapping[str, tuple[Move, Move]]


@dataclass(frozen=True, slots=True, eq=False)
class Gradients:
    """Per parameter node the gradient [trials · ranks, *local], and bounds on their degrees."""

    local: Mapping[Node, Data]
    degrees: Mapping[Node, int]


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """A graph's values on every rank."""

    graph: Graph
    mesh: Mesh
    shardings: Mapping[Node, Sharding]
    values: Mapping[Node, Value]
    field: Field
    recorder: Recorder

    @property
    def outputs(self) -> Mapping[str, Data]:
        """Output name -> [trials · ranks, *local]."""
        return {name: data_of(self.values[node]) for name, node in self.graph.outputs}

    @property
    def calls(self) -> Mapping[str, Calls]:
        """Named function -> how often it was asked."""
        return self.recorder.calls

    def gather(self) -> dict[str, Data]:
        """Output name (buffers as ``update:name``) -> [*global], or [trials, *global] if the field has a trial axis.

        Raises:
            VerificationError: if ranks that hold an Invariant result disagree.
        """
        named = [*self.graph.outputs, *((f"update:{name}", node) for name, node in self.graph.updates)]
        return {name: self._bare(self.whole(node)) for name, node in named}

    def whole(self, node: Node) -> Data:
        """[trials, *global]: one node's value put together.

        Raises:
            VerificationError: if ranks that hold an Invariant value disagree.
        """
        return self._join(data_of(self.values[node]), self.shardings[node], describe(node))

    def gradients(self, cotangents: Mapping[str, Data]) -> Gradients:
        """Gradients by every tracked leaf, given those by the outputs as [*global] (or [trials, *global]) arrays."""
        seeds = []
        for name, node in self.graph.outputs:
            value = self.values[node]
            if isinstance(value, Var) and name in cotangents:
                given = np.asarray(cotangents[name]).reshape(self.field.trials, *node.type.shape)
                seeds.append((value, cut(given, self.shardings[node], self.mesh)))
        grads, degrees = self.recorder.backward(seeds)
        local, degree = {}, {}
        for node, value in self.values.items():
            if node.is_leaf and isinstance(value, Var) and value.slot >= 0:
                local[node] = grads.get(value.slot, np.zeros(value.shape, dtype=value.dtype))
                degree[node] = degrees.get(value.slot, 0)
        return Gradients(local, degree)

    def whole_gradient(self, node: Node, gradients: Gradients) -> Data:
        """[trials, *global]: the gradient of one leaf put together.

        Raises:
            VerificationError: if ranks that hold the leaf Invariant got different gradients.
        """
        return self._join(gradients.local[node], self.shardings[node], f"the gradient of {node.name}", "gradients")

    def gather_gradients(self, cotangents: Mapping[str, Data]) -> dict[str, Data]:
        """Leaf name -> gradient [*global] (or [trials, *global]); leaves that share a name are an error of ours.

        Raises:
            VerificationError: if ranks that hold a leaf Invariant got different gradients.
        """
        gradients = self.gradients(cotangents)
        return {node.name: self._bare(self.whole_gradient(node, gradients)) for node in gradients.local}

    def _bare(self, x: Data) -> Data:
        return x if self.field.trial_axis else x[0]

    def _join(self, local: Data, sharding: Sharding, what: str, check: str = "values") -> Data:
        """[trials, *global] of what ranks hold: blocks joined, terms summed, the same checked to be the same."""
        whole = local
        for axis in reversed(range(len(sharding))):  # inner axes first
            group = Group(self.mesh, axis, self.field.trials, self.field.sum)
            state = sharding[axis]
            if isinstance(state, Shard):
                whole = group.gather(whole, state.dim)
            elif isinstance(state, Partial):
                whole = group.sum(whole)
        ranks = whole.reshape(self.field.trials, self.mesh.num_devices, *whole.shape[1:])
        if not any(isinstance(state, Replicate) for state in sharding):
            self._check_same(ranks, what, check)
        return ranks[:, 0]

    def _check_same(self, ranks: Data, what: str, check: str) -> None:
        grid = ranks.reshape(ranks.shape[0], *self.mesh.shape, *ranks.shape[2:])
        for axis, named in enumerate(self.mesh.axes):
            first = grid.take([0], axis=1 + axis)
            same = np.allclose(grid, first, rtol=1e-9, atol=1e-9) if grid.dtype.kind == "f" else (grid == first).all()
            if not same:
                raise VerificationError(
                    f"{what} should be the same along axis {named.name}, but ranks disagree", check=check
                )


def evaluate(
    graph: Graph,
    values: Mapping[str, Data],
    *,
    mesh: Mesh = SINGLE,
    field: Field | None = None,
    moves: Moves = MOVES,
    track_inputs: bool = False,
) -> Evaluation:
    """Run ``graph`` on every rank of ``mesh``.

    Args:
        graph: serial, or a PCG for ``mesh``.
        values: inputs by name and stored tensors by ``source``; [*global], or [trials, *global] if the field has
            a trial axis.
        mesh: the simulated ranks; none for one device.
        field: of numbers; float64 by default.
        moves: what the parallel operators do (tests seed mistakes here).
        track_inputs: give gradients by floating inputs too.

    Raises:
        ShardingError: if the graph is no legal PCG for ``mesh``.
    """
    field = field or FloatField()
    shardings = infer_shardings(graph, mesh)
    check_outputs(graph, shardings)
    run = _Run(mesh, field, moves, Recorder(field, field.trials * mesh.num_devices), values, track_inputs)
    found: dict[Node, Value] = {}
    for node in graph.nodes:
        found[node] = run.value(node, [found[x] for x in node.operands], shardings)
    return Evaluation(graph, mesh, shardings, found, field, run.recorder)


def data_of(value: Value) -> Data:
    """The array of a value."""
    return value.data if isinstance(value, Var) else value


@dataclass(frozen=True, slots=True)
class _Run:
    mesh: Mesh
    field: Field
    moves: Moves
    recorder: Recorder
    given: Mapping[str, Data]
    track_inputs: bool

    def value(self, node: Node, operands: Sequence[Value], shardings: Mapping[Node, Sharding]) -> Value:
        if node.is_leaf:
            return self._leaf(node, shardings[node])
        if node.op.kind == "parallel":
            return self._move(node, operands[0])
        call = self._call(node, [shardings[operand] for operand in node.operands])
        if node.op.evaluate is not None:
            result = node.op.evaluate(self.recorder, operands, call)
        else:
            assert node.op.kind == "contraction", f"{node.op.name} has no evaluate"
            result = self.recorder.einsum(spec_of(node.loops), *operands)
        expected = (self.recorder.worlds, *call.loops.result_shape)
        assert result.shape == expected, f"{node} evaluates to {result.shape}, declared {expected}"
        if isinstance(result, np.ndarray) and node.type.dtype.value == "bool":
            return result.astype(bool)
        return result  # type: ignore[no-any-return]

    def _leaf(self, node: Node, sharding: Sharding) -> Value:
        trials = self.field.trials
        if node.op.name == "const":
            array = node.attr("value").array
            lifted = self.field.lift(array) if node.type.dtype.is_floating else array
            whole = np.broadcast_to(lifted, (trials, *node.type.shape))
        elif node.op.name == "param":
            whole = np.stack([read_stored(node, partial(self._stored, trial)) for trial in range(trials)])
        else:
            whole = np.asarray(self.given[node.attr("name")]).reshape(trials, *node.type.shape)
        assert whole.shape[1:] == node.type.shape, f"{node} was given {whole.shape[1:]}"
        local = cut(whole, sharding, self.mesh)
        if not node.type.dtype.is_floating:
            return local
        tracked = node.needs_grad or (self.track_inputs and node.op.name == "input")
        return self.recorder.leaf(local, tracked=tracked)

    def _stored(self, trial: int, source: str, view: View) -> Data:
        stored = np.asarray(self.given[source])
        return apply_view(stored[trial] if self.field.trial_axis else stored, view)

    def _move(self, node: Node, x: Value) -> Value:
        def total(data: Data, axes: tuple[int, ...]) -> Data:
            return self.field.sum(data, axes) if isinstance(x, Var) else np.asarray(data.sum(axis=axes))

        group = Group(self.mesh, self.mesh.index(node.attr("axis")), self.field.trials, total)
        forward, dual = self.moves[node.op.name]
        result: Value = self.recorder.linear_map(
            x, lambda d: forward(group, d, node.attrs), lambda g: dual(group, g, node.attrs)
        )
        return result

    def _call(self, node: Node, shardings: Sequence[Sharding]) -> Call:
        splits = node_splits(node, shardings, self.mesh)
        degrees = split_degrees(splits, self.mesh)
        extents = {name: extent // degrees.get(name, 1) for name, extent in node.loops.extents.items()}
        local = Loops(node.loops.operands, node.loops.result, extents, node.loops.whole)
        offset = np.zeros(self.mesh.num_devices, dtype=np.int64)
        if (loop := node.op.offset_loop) is not None:
            block = np.zeros_like(offset)
            for split, axis, place in zip(splits, self.mesh.axes, self._places(), strict=True):
                if split.loop == loop:
                    block = block * axis.size + place
            offset = block * extents[loop]
        return Call(local, node.loops, node.attrs, np.tile(offset, self.field.trials), degrees)

    def _places(self) -> Sequence[Any]:
        """For each axis, [ranks]: where each rank stands on it."""
        return np.unravel_index(np.arange(self.mesh.num_devices), self.mesh.shape) if self.mesh.axes else ()


def spec_of(loops: Loops) -> str:
    """The einsum of a contraction; a broadcast dim gets a letter of its own."""
    letters = iter(string.ascii_letters)
    of_loop = {name: next(letters) for name in loops.names}
    parts = ["".join(of_loop[g[0]] if g else next(letters) for g in dims) for dims in (*loops.operands, loops.result)]
    return f"{','.join(parts[:-1])}->{parts[-1]}"

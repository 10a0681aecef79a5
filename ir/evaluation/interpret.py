"""Evaluate a graph in NumPy: on one device, or on n simulated ranks at once; outputs and gradients, in any field.

``evaluate(graph, values)`` with the default field is the float64 reference; ``exact.py`` runs the same over Z_p.
Local programs come from the operators' declarations, what moves between ranks from ``collectives.MOVES``.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from ir.dims import Loops
from ir.errors import VerificationError
from ir.evaluation.collectives import MOVES, Group, Move, cut
from ir.evaluation.einsum import Data
from ir.evaluation.field import Calls, Field, Var
from ir.evaluation.floats import FloatField
from ir.evaluation.polynomial import ONE, Size
from ir.evaluation.recording import Recorder
from ir.graph import Graph, Node, View
from ir.mesh import Mesh
from ir.sharding import Partial, Replicate, Shard, Sharding
from ir.tape import Call
from ir.verify import check_outputs, describe, infer_shardings, node_splits, split_degrees
from ir.views import apply_view, read_stored

SINGLE = Mesh(())
_WIDEST = 8  # bytes of an integer, as they are evaluated
Value = Var | Data
Moves = Mapping[str, tuple[Move, Move]]


@dataclass(frozen=True, slots=True, eq=False)
class Gradients:
    """Per leaf the gradient [trials · ranks, *local], and bounds on it; ``fresh`` the same for boundaries."""

    local: Mapping[Node, Data]
    sizes: Mapping[Node, Size]
    fresh: Mapping[Node, Data]


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """A graph's values on every rank. ``arrived`` holds what was computed where ``values`` has a fresh one."""

    graph: Graph
    mesh: Mesh
    shardings: Mapping[Node, Sharding]
    values: Mapping[Node, Value]
    arrived: Mapping[Node, Value]
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
        return {name: self._bare(self._typed(self.whole(node), node)) for name, node in named}

    def _typed(self, x: Data, node: Node) -> Data:
        """Integers that are floats by now as elements of the field."""
        return self.field.lift(x) if node.type.dtype.is_floating and x.dtype.kind in "iub" else x

    def whole(self, node: Node) -> Data:
        """[trials, *global]: one node's value put together.

        Raises:
            VerificationError: if ranks that hold an Invariant value disagree.
        """
        return self._join(data_of(self.values[node]), self.shardings[node], describe(node))

    def whole_arrived(self, node: Node) -> Data:
        """[trials, *global]: what was computed at a node whose value was replaced by a fresh one.

        Raises:
            VerificationError: if ranks that hold an Invariant value disagree.
        """
        return self._join(data_of(self.arrived[node]), self.shardings[node], describe(node))

    def gradients(
        self, cotangents: Mapping[str, Data], arriving: Mapping[Node, Data] = MappingProxyType({})
    ) -> Gradients:
        """Gradients by every tracked leaf and fresh value, given those by the outputs.

        cotangents: by name of an output, [*global] (or [trials, *global]). arriving: by node that has a fresh value,
        those by what was computed there, [trials, *global].
        """
        seeds = []
        given = [(self.values[node], node, cotangents[name]) for name, node in self.graph.outputs if name in cotangents]
        given += [(self.arrived[node], node, cotangent) for node, cotangent in arriving.items()]
        for value, node, cotangent in given:
            if isinstance(value, Var):
                whole = np.asarray(cotangent).reshape(self.field.trials, *node.type.shape)
                seeds.append((value, cut(whole, self.shardings[node], self.mesh)))
        grads, sizes = self.recorder.backward(seeds)
        local: dict[Node, Data] = {}
        fresh: dict[Node, Data] = {}
        size: dict[Node, Size] = {}
        for node, value in self.values.items():
            if (node.is_leaf or node in self.arrived) and isinstance(value, Var) and value.slot >= 0:
                found = local if node.is_leaf else fresh
                found[node] = grads.get(value.slot, np.zeros(value.shape, dtype=value.dtype))
                size[node] = sizes.get(value.slot, ONE)
        return Gradients(local, size, fresh)

    def whole_gradient(self, node: Node, gradients: Gradients) -> Data:
        """[trials, *global]: the gradient of one leaf or fresh value put together.

        Raises:
            VerificationError: if ranks that hold it Invariant got different gradients.
        """
        local = gradients.local[node] if node.is_leaf else gradients.fresh[node]
        what = f"the gradient of {node.name if node.is_leaf else describe(node)}"
        return self._join(local, self.shardings[node], what, "gradients")

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
            group = Group(self.mesh, (axis,), self.field.trials, self.field.sum)
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
    fresh: Mapping[Node, Data] = MappingProxyType({}),
    loops: Mapping[Node, Loops] = MappingProxyType({}),
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
        fresh: nodes in states Shard and Invariant -> [trials, *global] that their readers get instead of what is
            computed there (an induction's step begins with any value).
        loops: nodes -> the loop nest of the program that ``graph`` is a smaller copy of; means divide by its extents.

    Raises:
        ShardingError: if the graph is no legal PCG for ``mesh``.
    """
    field = field or FloatField()
    shardings = infer_shardings(graph, mesh)
    check_outputs(graph, shardings)
    run = _Interpreter(
        mesh, field, moves, Recorder(field, field.trials * mesh.num_devices), values, track_inputs, loops
    )
    found: dict[Node, Value] = {}
    arrived: dict[Node, Value] = {}
    for node in graph.nodes:
        found[node] = run.value(node, [found[x] for x in node.operands], shardings)
        if node in fresh:
            arrived[node] = found[node]
            local = cut(fresh[node], shardings[node], mesh)
            found[node] = run.recorder.leaf(local, tracked=node.needs_grad)
    return Evaluation(graph, mesh, shardings, found, {node: arrived[node] for node in fresh}, field, run.recorder)


def data_of(value: Value) -> Data:
    """The array of a value."""
    return value.data if isinstance(value, Var) else value


@dataclass(frozen=True, slots=True)
class _Interpreter:
    mesh: Mesh
    field: Field
    moves: Moves
    recorder: Recorder
    given: Mapping[str, Data]
    track_inputs: bool
    loops: Mapping[Node, Loops]

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
        if isinstance(self.field, FloatField) and not node.type.dtype.is_floating:
            found = data_of(result)  # arithmetic is done in floats
            return _wrapped(np.rint(found).astype(np.int64) if found.dtype.kind == "f" else found, node)
        return _wrapped(result, node)

    def _leaf(self, node: Node, sharding: Sharding) -> Value:
        trials = self.field.trials
        if node.is_const:
            array = node.attr("value").array
            if node.type.dtype.is_floating:
                lifted, size = self.field.constant(array)
                return self.recorder.known(cut(lifted, sharding, self.mesh), size)
            whole = np.broadcast_to(array, (trials, *node.type.shape))
        elif node.is_param:
            each = [read_stored(node, partial(self._store, trial)) for trial in range(trials)]
            whole = each[0][None] if trials == 1 else np.stack(each)  # one is not copied: it may be all of a file
        else:
            whole = np.asarray(self.given[node.attr("name")]).reshape(trials, *node.type.shape)
        assert whole.shape[1:] == node.type.shape, f"{node} was given {whole.shape[1:]}"
        local = cut(whole, sharding, self.mesh)
        if not node.type.dtype.is_floating:
            return _wrapped(local.astype(np.int64), node) if local.dtype.kind in "iu" else local
        tracked = node.needs_grad or (self.track_inputs and node.is_input)
        return self.recorder.leaf(local, tracked=tracked)

    def _store(self, trial: int, source: str, view: View) -> Data:
        stored = np.asarray(self.given[source])
        return apply_view(stored[trial] if self.field.trial_axis else stored, view)

    def _move(self, node: Node, x: Value) -> Value:
        def total(data: Data, axes: tuple[int, ...]) -> Data:
            return self.field.sum(data, axes) if isinstance(x, Var) else np.asarray(data.sum(axis=axes))

        group = Group(self.mesh, self.mesh.positions(node.attr("axis")), self.field.trials, total)
        forward, dual = self.moves[node.op.name]
        result: Value = self.recorder.linear_map(
            x, lambda d: forward(group, d, node.attrs), lambda g: dual(group, g, node.attrs), group.size
        )
        return _wrapped(result, node)

    def _call(self, node: Node, shardings: Sequence[Sharding]) -> Call:
        splits = node_splits(node, shardings, self.mesh)
        degrees = split_degrees(splits, self.mesh)
        extents = {name: extent // degrees.get(name, 1) for name, extent in node.loops.extents.items()}
        local = Loops(node.loops.operands, node.loops.result, extents, node.loops.whole)
        blocks: dict[str, Data] = {}
        for split, axis, place in zip(splits, self.mesh.axes, self._places(), strict=True):
            if split.loop is not None:
                blocks[split.loop] = blocks.get(split.loop, 0) * axis.size + place
        starts = {loop: np.tile(block * extents[loop], self.field.trials) for loop, block in blocks.items()}
        none = np.zeros(self.recorder.worlds, dtype=np.int64)
        offset = starts.get(node.op.offset_loop or "", none)
        dtypes = tuple(operand.type.dtype for operand in node.operands)
        return Call(local, self.loops.get(node, node.loops), node.attrs, offset, starts, dtypes)

    def _places(self) -> Sequence[Any]:
        """For each axis, [ranks]: where each rank stands on it."""
        return np.unravel_index(np.arange(self.mesh.num_devices), self.mesh.shape) if self.mesh.axes else ()


def _wrapped(x: Value, node: Node) -> Value:
    """Integers as their own type holds them: modulo a power of two."""
    dtype = node.type.dtype
    if not isinstance(x, np.ndarray) or x.dtype.kind not in "iu" or dtype.is_floating or dtype.itemsize == _WIDEST:
        return x
    return x.astype(dtype.torch_name).astype(np.int64)


def spec_of(loops: Loops) -> str:
    """The einsum of a contraction; a broadcast dim gets a letter of its own."""
    letters = iter(string.ascii_letters)
    of_loop = {name: next(letters) for name in loops.names}
    parts = ["".join(of_loop[g[0]] if g else next(letters) for g in dims) for dims in (*loops.operands, loops.result)]
    return f"{','.join(parts[:-1])}->{parts[-1]}"

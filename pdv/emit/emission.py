"""A PCG as it is written: lowered, folded for inference, with its outline, its text and its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from ir.dims import Shape
from ir.graph import Constant, Graph, Node, View, is_column
from ir.mesh import Mesh
from ir.types import DType
from ir.views import readings, shape_after, shape_before_step
from pdv.emit.analysis.constants import STORED, constant_names
from pdv.emit.analysis.fold import fold, value_of
from pdv.emit.analysis.leaves import Reading
from pdv.emit.analysis.lower import lower
from pdv.emit.analysis.open_sizes import NamedSizes
from pdv.emit.analysis.outline import BlockRun, own_params
from pdv.emit.analysis.reserved import MODULES
from pdv.emit.analysis.staged import ONCE, Running, StageOutline
from pdv.emit.analysis.stored_views import stored_views
from pdv.emit.program.header import header
from pdv.emit.program.model_text import write_program
from pdv.emit.weights import Array, Loader
from pdv.frontend.program import Weights
from pdv.pcg.in_slices import in_slices
from pdv.problem.precision import MASTER

ShapeOf = Callable[[str], Shape]
"""Shape of a stored tensor, by name."""

_TEMPLATES = Path(__file__).parent / "templates"
_OF_TEMPLATES = f"{__package__}.templates"  # as those in folders of theirs import the others
BESIDE = (
    "parallel", "runtime", "accumulate", "calls", "gradients", "losses", "optimizers", "rounding", "stored", "training",
    "buckets", "checkpoints", "compiled", "dtensors", "exits", "launched", "meetings", "named", "refused", "remembered",
    "scaled", "states", "steps",
)  # fmt: skip
"""Modules that stand beside every ``model.py``."""
_INIT = '''"""The sharded model, for a training script.

build: the model with this process's share of the weights, on the processes that torchrun started, or whole on one.
Model: its class. ``train_step`` is forward, loss and backward on one batch; ``full_state_dict`` and ``full_gradients``
    give all weights and gradients, whole and under the source's names. Its parameters are DTensors.
"""

from pathlib import Path

from . import model
from .model import Model, build

if Path(model.__file__).resolve().parent != (here := Path(__file__).resolve().parent):  # build() would be of that one
    raise ImportError(
        f"other-package: {__name__} is imported from {here}, and {model.__name__}, which is there already, is from "
        f"{model.__file__}. Allowed: one package of a name in a process. Import this one by another name."
    )

__all__ = ["Model", "build"]
'''


@dataclass(frozen=True)
class Emission:
    """What is written of a PCG.

    Attributes:
        pcg, pcg_mesh: the PCG itself.
        graph: what the text says.
        mesh: with axes named as in the text.
        whole: the graph before values were computed from weights alone.
        computed: these values, nodes of ``whole``, by the names under which they are stored.
        train: False for inference.
        sizes: of the inputs, which the source leaves open, and why others are fixed.
        running: its stages, by nodes of ``graph``, and its micro-batches.
        asked: the same by nodes of ``pcg``.
    """

    pcg: Graph
    pcg_mesh: Mesh
    graph: Graph
    mesh: Mesh
    whole: Graph
    computed: Mapping[str, Node]
    train: bool
    sizes: NamedSizes
    running: Running = ONCE
    asked: Running = ONCE
    _memo: dict[str, tuple[str, Sequence[StageOutline]]] = field(default_factory=dict, compare=False)

    @classmethod
    def of(
        cls,
        pcg: Graph,
        mesh: Mesh,
        *,
        train: bool,
        sizes: NamedSizes | None = None,
        running: Running = ONCE,
        at_once: bool = False,
    ) -> Emission:
        """What is written of ``pcg`` on ``mesh``; ``running`` speaks of its nodes.

        at_once: of what runs in slices, the same text with all of time in one.

        Raises:
            ShardingError: if it is not legal there.
        """
        written, inside, stage_of = pcg, mesh, running.stage_of
        if running.moments > 1:
            sliced = in_slices(pcg, mesh, 1 if at_once else running.moments)
            written, inside = sliced.graph, sliced.mesh
            stage_of = {sliced.places[node]: stage for node, stage in stage_of.items()}
            # Stages pass slices on: outputs are put together where they leave, whichever stage makes them.
            stage_of |= {node: running.stages - 1 for _, node in written.outputs} if stage_of else {}
        whole, named, made = lower(written, inside, sizes or ())
        graph, computed = (whole, {}) if train else fold(whole, named)
        assert train or running.stages == 1, "pipelines train"
        lowered = replace(running, stage_of=_lower_stages(whole, made, stage_of))
        graph = graph if computed else whole
        return cls(pcg, mesh, graph, named, whole, computed, train, sizes or {}, lowered, running)

    @property
    def at_once(self) -> Emission:
        """The same program with all of time in one slice, as a model is called."""
        if self.running.moments == 1:
            return self
        return Emission.of(
            self.pcg, self.pcg_mesh, train=self.train, sizes=self.sizes, running=self.asked, at_once=True
        )

    @property
    def devices(self) -> Mesh:
        """The mesh, with axes named as in the text, but for that of time."""
        return Mesh(self.mesh.axes[1:]) if self.running.moments > 1 else self.mesh

    def alike_of(self, pcg: Graph) -> Emission:
        """What is written of another PCG on the same mesh, for the same."""
        running = Running(scaled=self.running.scaled)
        return Emission.of(pcg, self.pcg_mesh, train=self.train, sizes=self.sizes, running=running)

    def files(self, document: Mapping[str, object], shape_of: ShapeOf) -> dict[str, str]:
        """The Python files of the package, by name; ``document``: plan.json."""
        return module_texts(self.model(document, shape_of))

    def model(self, document: Mapping[str, object], shape_of: ShapeOf) -> str:
        """model.py."""
        return f"{header(document, self.graph, self.devices, self.running)}\n\n{self.body(shape_of)}"

    def body(self, shape_of: ShapeOf) -> str:
        """model.py below its docstring."""
        return self._write(shape_of)[0]

    def constants(self) -> dict[str, tuple[DType, Array]]:
        """What the program itself knows of the tensors that are stored."""
        found: dict[str, tuple[DType, Array]] = {}
        for node, name in constant_names(Reading(self.graph)).items():
            value = node.attr("value")
            assert isinstance(value, Constant)
            found[STORED + name] = node.type.dtype, value.array
        return found

    def tensors(self, weights: Weights) -> dict[str, tuple[DType, Loader]]:
        """Every tensor that is stored for the program, in the type that it computes in, given the source's.

        Raises:
            ModelError: if two parameters share elements of one.
        """
        found: dict[str, tuple[DType, Loader]] = {}
        for source, params in stored_views(self.graph).items():
            node = self.computed.get(source)
            load = partial(weights.load, source) if node is None else partial(value_of, node, weights)
            rests = MASTER if self.running.masters and params[0].attr("trainable") else params[0].type.dtype
            found[source] = rests, load
        for name, (dtype, array) in self.constants().items():
            found[name] = dtype, partial(_give, array)
        return found

    def outlines(self, shape_of: ShapeOf) -> Sequence[StageOutline]:
        """The outlines of the text's stages."""
        return self._write(shape_of)[1]

    def _write(self, shape_of: ShapeOf) -> tuple[str, Sequence[StageOutline]]:
        if "written" not in self._memo:
            shapes = stored_shapes(self.graph, shape_of)
            self._memo["written"] = write_program(self.graph, self.mesh, shapes, sizes=self.sizes, running=self.running)
        return self._memo["written"]

    def alike(self, shape_of: ShapeOf) -> list[tuple[Node, Node]]:
        """Nodes that have one text, or one value, and so one size."""
        reading = Reading(self.graph)
        pairs: list[tuple[Node, Node]] = []
        first: dict[object, tuple[Node, ...]] = {}  # of the runs that stages share, each of one class
        for item in (item for outline in self.outlines(shape_of) for item in outline.items):
            if isinstance(item, BlockRun):
                groups = [(*block, *own_params(reading, block)) for block in item.blocks]
                whole = [(*group, *incoming) for group, incoming in zip(groups, item.incoming, strict=True)]
                key = tuple((node.op.name, node.type) for node in groups[0]) if self.running.stages > 1 else item
                for group in whole:
                    known = first.setdefault(key, group)
                    pairs += zip(known, group, strict=True) if known is not group else ()
        params = {param.attr("source"): param for param in self.graph.params}
        return pairs + [(node, params[name]) for name, node in self.computed.items()]


def _lower_stages(lowered: Graph, made: Mapping[Node, Node], stage_of: Mapping[Node, int]) -> dict[Node, int]:
    """The stage of each node with a gradient: where it was, or a move that lowering made, with its first reader.

    One that only leaves the program goes with what it moves.
    """
    if not stage_of:
        return {}
    written = set(lowered.nodes)
    found = {made[node]: stage for node, stage in stage_of.items() if made[node] in written}
    moves = [node for node in lowered.nodes if node.needs_grad and not node.is_leaf and node not in found]
    for node in reversed(moves):
        readers = [found[reader] for reader in lowered.users[node] if reader in found]
        if readers:
            found[node] = min(readers)
    for node in moves:
        if node not in found:
            found[node] = max(found[operand] for operand in node.operands if operand in found)
    return {node: stage for node, stage in found.items() if node.needs_grad and not node.is_leaf}


def module_texts(model: str) -> dict[str, str]:
    """The Python files of a package, by name; model: the text of model.py."""
    beside = [*BESIDE, *(name for name in MODULES if name not in BESIDE and f"from .{name} import" in model)]
    beside += ["later", "tied"] if "pipeline" in beside else []
    return {
        "model.py": model,
        "__init__.py": _INIT,
        **{f"{name}.py": _template(f"{name}.py") for name in beside},
    }


def _template(name: str) -> str:
    """A module that packages have, whichever folder it is in here: there it is beside the others."""
    path = next(path for path in (_TEMPLATES / name, _TEMPLATES / "kernels" / name) if path.exists())
    return (
        path.read_text(encoding="utf-8").replace(f"from {_OF_TEMPLATES}.", "from .").replace("from .kernels.", "from .")
    )


def _give(array: Array) -> Array:
    return array


def shapes_in(weights: Weights) -> ShapeOf:
    """The shapes of stored tensors, each read when it is asked for."""
    return lambda source: tuple(weights.load(source).shape)


def stored_shapes(graph: Graph, shape_of: ShapeOf) -> dict[str, Shape]:
    """Shape of each stored tensor that a graph reads; asked for only where a view does not tell it."""
    found: dict[str, Shape] = {}
    for node in graph.params:
        if is_column(node):
            found[str(node.attr("source"))] = node.type.shape[:1]
        for reading in readings(node):
            if reading.source not in found:
                before = shapes_before(reading.view, reading.shape, reading.source, shape_of)
                found[reading.source] = before[0]
    return found


def shapes_before(view: View, after: Shape, source: str, shape_of: ShapeOf) -> list[Shape]:
    """Shapes before each step of a view, and ``after`` all."""
    shapes: list[Shape] = [after]
    for at in range(len(view) - 1, -1, -1):
        before = shape_before_step(shapes[0], view[at])
        shapes.insert(0, shape_after(shape_of(source), view[:at]) if before is None else before)
    return shapes

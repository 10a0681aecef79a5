"""model.py of an emitted package, as text. Entry point: ``write_program``.

Decides: which classes there are, what they are called, what each holds. The text of single operators is
``expressions.py``, of a forward function ``body.py``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from ir.emission.code import tuple_of
from ir.errors import ShapeError
from ir.graph import Graph, Node
from ir.mesh import JOINT, Mesh
from ir.sharding import Shard
from ir.verify import check_returned
from pdv.emit.analysis.constants import constant_buffers
from pdv.emit.analysis.leaves import Reading
from pdv.emit.analysis.names import argument, identifier, plain, string, unique
from pdv.emit.analysis.open_sizes import NamedSizes, Opened, open_sizes
from pdv.emit.analysis.outline import graph_updates
from pdv.emit.analysis.reserved import CALLING, MODULES
from pdv.emit.analysis.shapes import Shapes
from pdv.emit.analysis.staged import ONCE, Running, StageOutline, over_stages, staged_outlines
from pdv.emit.program.body import Again
from pdv.emit.program.classes import Setting
from pdv.emit.program.code import WIDTH, docstring
from pdv.emit.program.expressions import UnsayableError
from pdv.emit.program.holder import Holder, write_holders
from pdv.frontend.program import BATCH
from pdv.pcg.apart import summed_apart
from pdv.problem.precision import MASTER, ROUNDED

Outlines = Sequence[StageOutline]
WHOLE, RUNS = "the whole batch", "a micro-batch over all ranks of a stage"
UNSAID = "sizes in it follow from this one in a way that the program has no words for"
COMPILED = ("    model.compile()  # each part when it runs first", "    return model")
ON_HOST = "Parameters are in the host's memory, and are updated there; the device has copies to compute with."


def write_program(
    graph: Graph,
    mesh: Mesh,
    stored_shapes: Mapping[str, Sequence[int]],
    *,
    sizes: NamedSizes | None = None,
    outlines: Outlines | None = None,
    running: Running = ONCE,
) -> tuple[str, Outlines]:
    """The text of model.py below its docstring, and the outlines of its stages, over the nodes of ``graph``.

    Sizes that the program leaves open are in no line: it is written at two choices of them, alike. By a given outline
    it is written once: who gives it compares it with the text that it is of.

    Args:
        graph: a PCG of ``mesh``, lowered.
        mesh: its mesh.
        stored_shapes: shape of each stored tensor, by name.
        sizes: of the inputs, which the source leaves open, and why others are fixed; default: the rows are open.
        outlines: to follow.
        running: its stages and micro-batches.
    """
    last: list[tuple[str, Outlines]] = []
    for opened in _openings(graph, sizes or {}):
        found = _write(opened, mesh, stored_shapes, outlines, running)
        if len({text for text, _ in found}) == 1:
            return found[0]
        last = found or last
    return last[0]


def _openings(graph: Graph, said: NamedSizes) -> Iterator[Opened]:
    """What may be left open, most first: all that the plan leaves open, the batch alone, nothing."""
    places = {name: tuple((str(where), int(dim)) for where, dim in one["inputs"]) for name, one in said.items()}
    reasons = {name: plain(str(one["fixed_by"])) for name, one in said.items() if one["fixed_by"]}
    opened = open_sizes(graph, places if said else None).close(reasons)
    most = {name: one["most"] for name, one in said.items()}
    for names in ([], [name for name in opened.named if name != BATCH], list(opened.named)):
        unsaid = {name: UNSAID for name in names if name in opened.symbols}
        if unsaid or not names:
            with suppress(ShapeError):
                yield (opened.close(unsaid) if unsaid else opened).bounded(most)


def _write(
    opened: Opened,
    mesh: Mesh,
    stored_shapes: Mapping[str, Sequence[int]],
    outlines: Outlines | None,
    running: Running,
) -> list[tuple[str, Outlines]]:
    """The text, and its outlines, at each choice of open sizes; none if it cannot be said."""
    try:
        found = []
        for graph, shapes, made in opened.variants(mesh, 2 if outlines is None else 1):
            if outlines is None:  # the second text follows the outline of the first
                origins = {new: old for old, new in made.items()}
                stage_of = {made[node]: stage for node, stage in running.stage_of.items()}
                outlines = over_stages(staged_outlines(Reading(graph), shapes.shardings, stage_of), origins)
            here = over_stages(outlines, made)
            found.append((_Program(graph, mesh, stored_shapes, shapes, opened, here, running).text(), outlines))
        return found
    except (ShapeError, UnsayableError):
        return []


class _Program:
    def __init__(
        self,
        graph: Graph,
        mesh: Mesh,
        stored_shapes: Mapping[str, Sequence[int]],
        shapes: Shapes,
        opened: Opened,
        outlines: Outlines,
        running: Running,
    ) -> None:
        self._graph = graph
        self._opened = opened
        self._mesh = mesh
        self._running = running
        shardings = shapes.shardings
        check_returned(graph, shardings)  # there is nothing to add to what was proved
        reading = Reading(graph, several=running.shares_copies, light=running.light)
        self._shapes = shapes
        constants = constant_buffers(reading)
        named = {leaf: buffer.attribute for leaf, buffer in constants.items()}
        stages = ("stage",) if len(outlines) > 1 else ()
        self._setting = Setting(
            mesh, reading, shapes, graph_updates(graph, reading), running.scaled, named, stages, running.moments > 1
        )
        arguments = [self._argument_names(outline) for outline in outlines]
        self._holders = write_holders(
            outlines, arguments, self._setting, constants, stored_shapes, again=Again(running.recompute, running.hosted)
        )

    def text(self) -> str:
        model = self._model_class() if len(self._holders) == 1 else self._pipeline_class()
        blocks = list(dict.fromkeys(block.lines for holder in self._holders for _, block in holder.blocks))
        stages = [self._stage_class(holder) for holder in self._holders] if len(self._holders) > 1 else []
        tables = [table for holder in self._holders for table in holder.name_tables()]
        parts = [*tables, *blocks, *stages, model, self._build()]
        body = "\n\n\n".join("\n".join(lines) for lines in parts)
        return f"{self._imports(body)}\n\n\n{body}\n"

    @property
    def _devices(self) -> Mesh:
        """The mesh of a stage: an axis of time is none of it."""
        return Mesh(self._mesh.axes[1:]) if self._running.moments > 1 else self._mesh

    # ---- Classes ----

    def _model_class(self) -> list[str]:
        (holder,) = self._holders
        takes = self._interface()
        rows = self._batch_axes()
        note = f"this rank's rows of it (cut by {', then '.join(rows)})" if rows else "the same on every rank"
        return [
            "class Model(ParallelModule):",
            *docstring(self._summary(takes), 4),
            "",
            "    def __init__(self, mesh: Mesh, weights: Weights) -> None:",
            *self._super_lines(["mesh"], takes),
            *holder.init_lines(),
            "",
            *holder.forward_lines(f"Takes the whole batch on every rank, returns {note}.", list(takes.values())),
        ]

    def _stage_class(self, holder: Holder) -> list[str]:
        shapes = self._shapes
        before = ", ".join(f"{name} {shapes.text(node)}" for node, name in holder.arguments.items())
        after = ", ".join(shapes.text(node) for node in holder.outline.results)
        return [
            f"class Stage{holder.stage}(nn.Module):",
            *docstring(f"{before} -> {after}", 4),
            "",
            "    def __init__(self, mesh: Mesh, weights: Weights) -> None:",
            "        super().__init__()",
            *holder.init_lines(),
            "",
            *holder.forward_lines(""),
        ]

    def _pipeline_class(self) -> list[str]:
        """The model as a chain of its stages."""
        inputs = self._interface()
        names = dict(inputs)
        stages: list[str] = []
        for number, holder in enumerate(self._holders):
            takes = [string(names[node]) for node in holder.outline.arguments]
            results = holder.outline.results
            for place, node in enumerate(results):
                names[node] = unique(f"x{number}" if len(results) == 1 else f"x{number}_{place + 1}", names.values())
            gives = [string(names[node]) for node in results]
            stages.append(f"Stage(Stage{number}, {tuple_of(tuple(takes))}, {tuple_of(tuple(gives))})")
        pad = " " * 8
        return [
            f"class Model({'SlicedModule' if self._running.moments > 1 else 'PipelinedModule'}):",
            *docstring(self._summary(inputs), 4),
            "",
            "    def __init__(self, mesh: Mesh, weights: Weights) -> None:",
            f"{pad}stages = (",
            *(f"{pad}    {stage}," for stage in stages),
            f"{pad})",
            *self._tied_lines(),
            *self._super_lines(["mesh", "weights", "stages"], inputs),
        ]

    def _tied_lines(self) -> list[str]:
        """Parameters that several stages hold, by stage; their gradients are summed between stages."""
        found: dict[Node, list[str]] = {}
        for holder in self._holders:
            for param, attribute in holder.attributes.items():
                if param.attr("trainable"):
                    found.setdefault(param, []).append(f"{holder.stage}: {string(attribute)}")
        tied = [f"{{{', '.join(places)}}}" for places in found.values() if len(places) > 1]
        pad = " " * 8
        if len(line := f"{pad}tied = {tuple_of(tuple(tied))}") <= WIDTH:
            return [line] if tied else []
        return [f"{pad}tied = (", *(f"{pad}    {one}," for one in tied), f"{pad})"]

    # ---- The model's forward ----

    def _argument_names(self, outline: StageOutline) -> dict[Node, str]:
        """Names of what a stage takes: ``x`` and the like for values of earlier ones, inputs by their own."""
        inputs = self._input_names()
        used = {*self._setting.reserve(), *inputs.values()}
        names: dict[Node, str] = {}
        for node in outline.received:
            names[node] = unique("x" if not names else "y", used)
            used.add(names[node])
        return names | {node: inputs[node] for node in outline.inputs}

    def _interface(self) -> dict[Node, str]:
        """The source's own names of what the model takes, whatever lines of the program call it."""
        names: dict[Node, str] = {}
        for node in self._graph.inputs:
            names[node] = unique(argument(node.attr("name")), (*CALLING, *names.values()))
        return names

    def _input_names(self) -> dict[Node, str]:
        names: dict[Node, str] = {}
        used = set(self._setting.reserve())
        for node in self._graph.inputs:
            names[node] = unique(identifier(node.attr("name"), "x"), used)
            used.add(names[node])
        return names

    def _batch_axes(self) -> tuple[str, ...]:
        """Axes along which the outputs, all alike, are cut by rows."""
        if not self._graph.outputs:
            return ()
        states = self._shapes.shardings[self._graph.outputs[0][1]]
        return tuple(axis.name for axis, state in zip(self._mesh.axes, states, strict=True) if state == Shard(0))

    def _batch_axes_text(self) -> str:
        return tuple_of(tuple(string(axis) for axis in self._batch_axes()))

    def _super_lines(self, given: Sequence[str], inputs: Mapping[Node, str]) -> list[str]:
        """The call that says along which axes outputs are cut, and which sizes inputs have."""
        pad = " " * 8
        shapes = [f"{string(name)}: {tuple_of(self._size_names(node))}" for node, name in inputs.items()]
        options = [
            f"batch_axes={self._batch_axes_text()}",
            f"inputs={{{', '.join(shapes)}}}",
            *self._conditions(inputs),
        ]
        options += self._running_options()
        if len(line := f"{pad}super().__init__({', '.join([*given, *options])})") <= WIDTH:
            return [line]
        if len(together := f"{pad}    {', '.join([*given, *options])}") <= WIDTH:
            return [f"{pad}super().__init__(", together, f"{pad})"]
        each = [f"{pad}    {option}," for option in options]
        if len(each[1]) > WIDTH:
            each[1:2] = [f"{pad}    inputs={{", *(f"{pad}        {shape}," for shape in shapes), f"{pad}    }},"]
        return [f"{pad}super().__init__(", *(f"{pad}    {name}," for name in given), *each, f"{pad})"]

    def _running_options(self) -> list[str]:
        """In how many micro-batches a step runs, and how a pipeline orders them."""
        options = [f"micro_batches={self._running.micro_batches}"] if self._running.micro_batches > 1 else []
        options += [f"joined={string(joined)}"] if (joined := self._running.joined) else []
        if len(self._holders) > 1:
            options.append(f"order={string(self._running.order)}")
            options += [f"slices={self._running.moments}"] if self._running.moments > 1 else []
            spans = [span.split(JOINT) for span in self._devices.spans if JOINT in span]
            joint = tuple(tuple_of(tuple(map(string, names))) for names in spans)
            options += [f"joint={tuple_of(joint)}"] if joint else []
            options += ["tied=tied"] if self._tied_lines() else []
        return options

    def _conditions(self, inputs: Mapping[Node, str]) -> list[str]:
        """What open sizes besides the batch must be, of axes and tables; and inputs of other types than parameters."""
        cut = {name: axes for name, axes in sorted(self._shapes.cuts_of_sizes().items()) if name != BATCH}
        cuts = ", ".join(f"{string(name)}: {tuple_of(tuple(map(string, axes)))}" for name, axes in cut.items())
        most = ", ".join(f"{string(name)}: {size}" for name, size in self._opened.most.items())
        said = [f"{name}={{{text}}}" for name, text in (("cuts", cuts), ("most", most)) if text]
        params = [param for param in self._graph.params if param.type.dtype.is_floating]
        types = {x.type.dtype for x in [param for param in params if param.attr("trainable")] or params}
        others = [name for x, name in inputs.items() if x.type.dtype.is_floating and {x.type.dtype} != types]
        return [*said, f"own_types={tuple_of(tuple(map(string, others)))}"] if others and len(types) == 1 else said

    def _size_names(self, node: Node) -> tuple[str, ...]:
        """``"b", 64``: the sizes of an input, open ones by name."""
        return tuple(
            string(self._shapes.size_text(node, dim)) if self._shapes.is_open(node, dim) else str(size)
            for dim, size in enumerate(node.type.shape)
        )

    def _summary(self, inputs: Mapping[Node, str]) -> str:
        shapes = self._shapes
        before = ", ".join(f"{name} {shapes.text(node)}" for node, name in inputs.items())
        after = ", ".join(shapes.text(node) for _, node in self._graph.outputs)
        several = self._running.micro_batches > 1
        return f"{before} -> {after}{self._opened.note(RUNS if several else WHOLE)}"

    # ---- Around the classes ----

    def _build(self) -> list[str]:
        sizes = ", ".join(f"{string(axis.name)}: {axis.size}" for axis in self._devices.axes)
        stages = f", stages={len(self._holders) // self._running.virtual}" if len(self._holders) > 1 else ""
        offload, masters = ", offload=True" * self._running.offload, self._running.masters
        compute = f", compute=dtype or torch.{ROUNDED.torch_name}" if masters else ""
        model = 'Model(mesh, Weights(Path(__file__).with_name("weights.safetensors"), dtype))'
        return [
            "def build(device: str | torch.device | None = None, dtype: torch.dtype | None = None) -> Model:",
            '    """The model with its share of the weights: on the processes that torchrun started, or whole on one.',
            "",
            "    device: default is this process's GPU, else the CPU; dtype: default is that of the weights.",
            *([f"    That is {MASTER.torch_name}; forward reads them in {ROUNDED.torch_name}."] if masters else []),
            *([f"    {ON_HOST}"] if offload else []),
            '    """',
            *_mesh_lines(f"{{{sizes}}}, device{stages}{self._placed_text()}{compute}{offload}"),
            *([f"    model = {model}", *COMPILED] if self._running.compiled else [f"    return {model}"]),
        ]

    def _placed_text(self) -> str:
        """Where its ranks stand, and in which groups they sum."""
        return f"{self._ranks_text()}{self._levels_text()}{self._sums_text()}"

    def _ranks_text(self) -> str:
        """Which processes have which stage, where that is not their order; what follows each other as a range."""
        runs: list[range] = []
        for rank in self._running.ranks:
            if runs and runs[-1].stop == rank:
                runs[-1] = range(runs[-1].start, rank + 1)
            else:
                runs.append(range(rank, rank + 1))
        texts = [f"*range({run.start}, {run.stop})" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
        return f", ranks=({', '.join(texts)})" if runs else ""

    def _levels_text(self) -> str:
        """Axes whose sums take levels one by one."""
        used = {node.attr("axis") for node in self._graph.nodes if node.op.kind == "parallel"}
        of_span = zip(self._devices.spans, self._running.levels, strict=False)
        found = [(span.replace(JOINT, "_"), sizes) for span, sizes in of_span if sizes and span in used]
        text = ", ".join(f"{string(name)}: {tuple_of(tuple(map(str, sizes)))}" for name, sizes in found)
        return f", levels={{{text}}}" if found else ""

    def _sums_text(self) -> str:
        """Axes along which gradients are summed beside other collectives."""
        beside = self._running.recompute or self._running.stages > 1
        axes = summed_apart(self._graph, forward=beside, several=self._running.shares_copies)
        found = tuple(string(axis.replace(JOINT, "_")) for axis in axes if axis in self._devices.spans)
        return f", own_sums={tuple_of(found)}" if found else ""

    def _imports(self, body: str) -> str:
        words = {node.id for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Name)}
        lines = [
            "from __future__ import annotations",
            "",
            "from pathlib import Path",
            "",
            "import torch",
            "from torch import Tensor" + (", nn" if "nn" in words else ""),
        ]
        if "F" in words:
            lines.append("from torch.nn import functional as F")
        if "checkpoint" in words:
            lines.append("from torch.utils.checkpoint import checkpoint")
        lines.append("")
        for module, names in MODULES.items():
            found = sorted(name for name in names if name in words)
            found.sort(key=lambda name: (not name[0].isupper(), name))  # classes first, as import sorters do
            if found:
                lines.append(_import(module, found))
        return "\n".join(lines)


def _mesh_lines(options: str) -> list[str]:
    line = f"    mesh = make_mesh({options})"
    return [line] if len(line) <= WIDTH else ["    mesh = make_mesh(", f"        {options}", "    )"]


def _import(module: str, names: Sequence[str]) -> str:
    line = f"from .{module} import {', '.join(names)}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"from .{module} import (", *(f"    {name}," for name in names), ")"])

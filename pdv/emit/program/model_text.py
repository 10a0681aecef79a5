"""model.py of an emitted package, as text. Entry point: ``write_program``.

Decides: which classes there are, what they are called, what each holds. The text of single operators is
``expressions.py``, of a forward function ``body.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from ir.emission.code import call, tuple_of
from ir.errors import ShapeError
from ir.graph import Graph, Node
from ir.mesh import Mesh
from ir.sharding import Shard
from ir.verify import check_returned
from ir.views import sources_of
from pdv.emit.analysis.constants import constant_buffers
from pdv.emit.analysis.leaves import Reading
from pdv.emit.analysis.names import identifier, plain, string, unique
from pdv.emit.analysis.open_sizes import NamedSizes, Opened, open_sizes
from pdv.emit.analysis.outline import BlockRun, Item, graph_updates, outline, over, own_names, own_params
from pdv.emit.analysis.reserved import HELPERS, MODULE, PARALLEL, RUNTIME
from pdv.emit.analysis.shapes import Shapes
from pdv.emit.program.body import Attributes, Body
from pdv.emit.program.classes import (
    BlockClass,
    Setting,
    attribute_names,
    axis_attributes,
    axis_lines,
    block_class,
    declaration,
    used_axes,
)
from pdv.emit.program.code import WIDTH, docstring, signature, statement
from pdv.emit.program.expressions import UnsayableError
from pdv.emit.program.statements import Scope
from pdv.frontend.program import BATCH

UNSAID = "sizes in it follow from this one in a way that the program has no words for"


def write_program(
    graph: Graph,
    mesh: Mesh,
    stored_shapes: Mapping[str, Sequence[int]],
    *,
    sizes: NamedSizes | None = None,
    items: Sequence[Item] | None = None,
) -> tuple[str, tuple[Item, ...]]:
    """The text of model.py below its docstring, and the outline that it follows, over the nodes of ``graph``.

    Sizes that the program leaves open are in no line: it is written at two choices of them, alike. By a given outline
    it is written once: who gives it compares it with the text that it is of.

    Args:
        graph: a PCG of ``mesh``, lowered.
        mesh: its mesh.
        stored_shapes: shape of each stored tensor, by name.
        sizes: of the inputs, which the source leaves open, and why others are fixed; default: the rows are open.
        items: the outline to follow.
    """
    last: list[tuple[str, tuple[Item, ...]]] = []
    for opened in _openings(graph, sizes or {}):
        found = _write(opened, mesh, stored_shapes, items)
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
    opened: Opened, mesh: Mesh, stored_shapes: Mapping[str, Sequence[int]], items: Sequence[Item] | None
) -> list[tuple[str, tuple[Item, ...]]]:
    """The text, and its outline, at each choice of open sizes; none if it cannot be said."""
    try:
        found = []
        for graph, shapes, made in opened.variants(mesh, 2 if items is None else 1):
            if items is None:  # the second text follows the outline of the first
                origins = {new: old for old, new in made.items()}
                items = over(outline(Reading(graph), shapes.shardings), origins)
            program = _Program(graph, mesh, stored_shapes, shapes, opened, over(items, made))
            found.append((program.text(), tuple(items)))
        return found
    except (ShapeError, UnsayableError):
        return []


def helpers_used(text: str) -> bool:
    """True if a program needs operators.py beside it."""
    return "from .operators import" in text


class _Program:
    def __init__(
        self,
        graph: Graph,
        mesh: Mesh,
        stored_shapes: Mapping[str, Sequence[int]],
        shapes: Shapes,
        opened: Opened,
        items: Sequence[Item],
    ) -> None:
        self._graph = graph
        self._opened = opened
        self._mesh = mesh
        self._stored_shapes = stored_shapes
        shardings = shapes.shardings
        check_returned(graph, shardings)  # there is nothing to add to what was proved
        reading = Reading(graph)
        self._shapes = shapes
        self._constants = constant_buffers(reading)
        named = {leaf: buffer.attribute for leaf, buffer in self._constants.items()}
        self._setting = Setting(mesh, reading, self._shapes, graph_updates(graph, reading), named)
        self._items = tuple(items)
        self._blocks = self._block_classes()

    def text(self) -> str:
        model = self._model_class()
        classes = [block.lines for _, block in self._blocks] + [tuple(model)]
        body = "\n\n\n".join("\n".join(lines) for lines in [*self._name_tables(), *classes, tuple(self._build())])
        return f"{self._imports(body)}\n\n\n{body}\n"

    # ---- Classes ----

    def _block_classes(self) -> list[tuple[BlockRun, BlockClass]]:
        runs = [item for item in self._items if isinstance(item, BlockRun)]
        found: list[tuple[BlockRun, BlockClass]] = []
        attributes: list[str] = [*MODULE]
        for number, run in enumerate(runs):
            name = "Block" if len(runs) == 1 else f"Block{number + 1}"
            attribute = unique(self._list_name(run), attributes)
            attributes.append(attribute)
            found.append((run, block_class(run, name, attribute, self._setting, self._stored_shapes)))
        return found

    def _list_name(self, run: BlockRun) -> str:
        """``layers`` of ``model.layers.0``: what the model called its list."""
        if run.prefixes is None:
            return "blocks"
        parts = [part for part in run.prefixes[0].split(".") if not part.isdigit()]
        name = identifier(parts[-1] if parts else "blocks", "blocks")
        return name if len(name) > 1 else "blocks"

    def _name_tables(self) -> list[tuple[str, ...]]:
        """Stored names of blocks whose names do not line up."""
        tables: list[tuple[str, ...]] = []
        for run, block in self._blocks:
            if run.prefixes is None and (names := self._source_names(run)) and names[0]:
                rows = [f"    {tuple_of(tuple(string(name) for name in row))}," for row in names]
                tables.append((f"{self._table(block)} = (", *rows, ")"))
        return tables

    def _source_names(self, run: BlockRun) -> list[list[str]]:
        return [own_names(self._setting.reading, block) for block in run.blocks]

    def _table(self, block: BlockClass) -> str:
        return f"{block.name.upper()}_NAMES"

    def _model_class(self) -> list[str]:
        reading = self._setting.reading
        own = self._own_params()
        lists = [block.attribute for _, block in self._blocks]
        taken = [*self._setting.axes, *lists, *self._setting.constants.values()]
        attributes = attribute_names(own, "", taken)
        inputs = self._input_names()
        results = tuple(reading.resolve(node) for _, node in self._graph.outputs)
        in_blocks = {node for run, _ in self._blocks for block in run.blocks for node in block}
        updates = {node: name for node, name in self._setting.updates.items() if node not in in_blocks}
        scope = Scope(self._items, self._graph.inputs, results, updates)
        leaves = {**attributes, **self._setting.constants}
        held = Attributes(leaves, {run: block.attribute for run, block in self._blocks})
        body = Body(scope, reading, self._shapes, held, inputs, self._setting.reserve())
        lines = body.lines()
        axes = used_axes(lines, self._setting.axes)
        return [
            "class Model(ParallelModule):",
            *docstring(self._summary(inputs), 4),
            "",
            "    def __init__(self, mesh: Mesh, weights: Weights) -> None:",
            *self._super_lines(inputs),
            *axis_attributes(axes),
            *self._declarations(own, attributes),
            "",
            *self._forward(lines, inputs, len(results)),
        ]

    def _own_params(self) -> list[Node]:
        """Parameters of the model itself: those that no block class holds."""
        held = {
            param
            for run, _ in self._blocks
            for block in run.blocks
            for param in own_params(self._setting.reading, block)
        }
        return [param for param in self._graph.params if param not in held]

    def _declarations(self, own: Sequence[Node], attributes: Mapping[Node, str]) -> list[str]:
        lines: list[str] = []
        for param in own:
            keys = [string(source) for source in sources_of(param)]
            lines += declaration(param, attributes[param], keys, self._mesh, self._stored_shapes)
        for buffer in self._constants.values():
            made = call("mesh.tensor", f"weights[{string(buffer.stored)}]", *([buffer.cuts] if buffer.cuts else []))
            lines += statement(f"self.{buffer.attribute} = ", call("nn.Buffer", made, "persistent=False"), 8)
        for run, block in self._blocks:
            lines += self._module_list(run, block)
        return lines

    def _module_list(self, run: BlockRun, block: BlockClass) -> list[str]:
        if run.prefixes is not None:
            key, loop = _prefixes_text(run.prefixes)
        elif self._source_names(run)[0]:
            key, loop = "names", f"names in {self._table(block)}"
        else:
            key, loop = "()", f"_ in range({len(run.blocks)})"
        pad, made = " " * 8, f"{block.name}(mesh, weights, {key}) for {loop}"
        line = f"{pad}self.{block.attribute} = nn.ModuleList({made})"
        if len(line) <= WIDTH:
            return [line]
        return [f"{pad}self.{block.attribute} = nn.ModuleList(", f"{pad}    {made}", f"{pad})"]

    # ---- The model's forward ----

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

    def _super_lines(self, inputs: Mapping[Node, str]) -> list[str]:
        """The call that says along which axes outputs are cut, and which sizes inputs have."""
        pad = " " * 8
        shapes = [f"{string(name)}: {tuple_of(self._size_names(node))}" for node, name in inputs.items()]
        options = [f"batch_axes={self._batch_axes_text()}", f"inputs={{{', '.join(shapes)}}}", *self._conditions()]
        if len(line := f"{pad}super().__init__({', '.join(['mesh', *options])})") <= WIDTH:
            return [line]
        if len(together := f"{pad}    {', '.join(['mesh', *options])}") <= WIDTH:
            return [f"{pad}super().__init__(", together, f"{pad})"]
        each = [f"{pad}    {option}," for option in options]
        if len(each[1]) > WIDTH:
            each[1:2] = [f"{pad}    inputs={{", *(f"{pad}        {shape}," for shape in shapes), f"{pad}    }},"]
        return [f"{pad}super().__init__(", f"{pad}    mesh,", *each, f"{pad})"]

    def _conditions(self) -> list[str]:
        """What open sizes besides the batch must be: multiples of the axes that cut them, no larger than tables."""
        cut = {name: axes for name, axes in sorted(self._shapes.cuts_of_sizes().items()) if name != BATCH}
        cuts = ", ".join(f"{string(name)}: {tuple_of(tuple(map(string, axes)))}" for name, axes in cut.items())
        most = ", ".join(f"{string(name)}: {size}" for name, size in self._opened.most.items())
        return [f"{name}={{{text}}}" for name, text in (("cuts", cuts), ("most", most)) if text]

    def _size_names(self, node: Node) -> tuple[str, ...]:
        """``"b", 64``: the sizes of an input, open ones by name."""
        return tuple(
            string(self._shapes.size_text(node, dim)) if self._shapes.is_open(node, dim) else str(size)
            for dim, size in enumerate(node.type.shape)
        )

    def _forward(self, lines: Sequence[str], inputs: Mapping[Node, str], results: int) -> list[str]:
        axes = axis_lines(lines, self._setting.axes)
        rows = self._batch_axes()
        note = f"this rank's rows of it (cut by {', then '.join(rows)})" if rows else "the same on every rank"
        doc = f'        """Takes the whole batch on every rank, returns {note}."""'
        if not any(param.attr("regather") for param in self._graph.params):
            return [*signature("forward", inputs.values(), results), doc, *axes, *lines]
        return [
            *signature("forward", inputs.values(), results),
            doc,
            "        with regathering():  # gathered weights are dropped after use, and gathered again in backward",
            f"            return self.compute({', '.join(inputs.values())})",
            "",
            *signature("compute", inputs.values(), results),
            '        """The forward pass itself."""',
            *axes,
            *lines,
        ]

    def _summary(self, inputs: Mapping[Node, str]) -> str:
        shapes = self._shapes
        before = ", ".join(f"{name} {shapes.text(node)}" for node, name in inputs.items())
        after = ", ".join(shapes.text(node) for _, node in self._graph.outputs)
        return f"{before} -> {after}{self._opened.note}"

    # ---- Around the classes ----

    def _build(self) -> list[str]:
        sizes = ", ".join(f"{string(axis.name)}: {axis.size}" for axis in self._mesh.axes)
        return [
            "def build(device: str | torch.device | None = None, dtype: torch.dtype | None = None) -> Model:",
            '    """The model with its share of the weights: on the processes that torchrun started, or whole on one.',
            "",
            "    device: default is this process's GPU, else the CPU; dtype: default is that of the weights.",
            '    """',
            f"    mesh = make_mesh({{{sizes}}}, device)",
            '    return Model(mesh, Weights(Path(__file__).with_name("weights.safetensors"), dtype))',
        ]

    def _imports(self, body: str) -> str:
        words = set(re.findall(r"(?<![.\w])\w+", body))
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
        lines.append("")
        for module, names in (("operators", HELPERS), ("parallel", PARALLEL), ("runtime", RUNTIME)):
            found = sorted(name for name in names if name in words)
            found.sort(key=lambda name: (not name[0].isupper(), name))  # classes first, as import sorters do
            if found:
                lines.append(_import(module, found))
        return "\n".join(lines)


def _import(module: str, names: Sequence[str]) -> str:
    line = f"from .{module} import {', '.join(names)}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"from .{module} import (", *(f"    {name}," for name in names), ")"])


def _prefixes_text(prefixes: Sequence[str]) -> tuple[str, str]:
    """(expression of one prefix, the loop's ``target in values``): ``f"h.{i}"``, ``i in range(12)``."""
    heads = {prefix.rpartition(".")[0] for prefix in prefixes}
    last = [prefix.rpartition(".")[2] for prefix in prefixes]
    head = heads.pop()
    if not heads and all(part.isdecimal() and str(int(part)) == part for part in last):
        start, stop = int(last[0]), int(last[-1]) + 1
        plain = all(c.isalnum() or c in "._-" for c in head) and head.isascii()
        if [int(part) for part in last] == list(range(start, stop)) and plain:
            span = f"{start}, {stop}" if start else str(stop)
            return (f'f"{head}.{{i}}"' if head else 'f"{i}"'), f"i in range({span})"
    return "prefix", f"prefix in {tuple_of(tuple(string(prefix) for prefix in prefixes))}"

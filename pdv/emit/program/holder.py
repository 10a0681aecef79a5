"""What one stage of a program holds and computes, as parts of a class: declarations, and the lines of its forward."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ir.emission.code import call, tuple_of
from ir.graph import Node
from ir.views import sources_of
from pdv.emit.analysis.constants import Buffer
from pdv.emit.analysis.names import identifier, string, unique
from pdv.emit.analysis.outline import BlockRun, own_names, own_params
from pdv.emit.analysis.reserved import MODULE
from pdv.emit.analysis.staged import StageOutline
from pdv.emit.program.body import ONCE, Again, Attributes, Body
from pdv.emit.program.classes import (
    BlockClass,
    Setting,
    attribute_names,
    axis_attributes,
    axis_lines,
    block_class,
    declaration,
    unit_lines,
    used_axes,
)
from pdv.emit.program.code import WIDTH, signature, statement
from pdv.emit.program.statements import Scope

Shapes = Mapping[str, Sequence[int]]
"""Of stored tensors, by name."""


@dataclass(frozen=True)
class Holder:
    """A stage as it is written.

    Attributes:
        outline: what it computes.
        arguments: names of what its forward takes.
        blocks: its runs of equal blocks, with their classes.
        attributes: of the parameters that it holds itself.
        lines: of its forward.
        constants: buffers of constants that it reads.
    """

    outline: StageOutline
    arguments: Mapping[Node, str]
    blocks: Sequence[tuple[BlockRun, BlockClass]]
    attributes: Mapping[Node, str]
    lines: Sequence[str]
    constants: Sequence[Buffer]
    setting: Setting
    stored_shapes: Shapes
    stage: int | None = None
    again: Again = ONCE
    """How backward has what it needs of all of it."""

    def init_lines(self) -> list[str]:
        """The lines of ``__init__`` that make what it holds."""
        return [*axis_attributes(used_axes(self.lines, self.setting.axes)), *self._declarations()]

    def forward_lines(self, doc: str, takes: Sequence[str] = ()) -> list[str]:
        """Its forward; gathered weights are dropped after use where some are to be.

        takes: names of its arguments, which lines may not have for themselves; default: those that they have.
        """
        names, results = list(self.arguments.values()), len(self.outline.results)
        given = list(takes) or names
        axes = axis_lines(self.lines, self.setting.axes)
        docs = [f'        """{doc}"""'] if doc else []
        light = bool(self.setting.reading.light)
        regather = light or any(node.attr("regather") for node in self._held)
        if given == names and not regather and not self.again:
            return [*signature("forward", names, results), *docs, *axes, *self.lines]
        made = call("self.compute", *given)
        if self.again:
            made = self.again.call("self.compute", "self", given, moves=self.setting.moves)
        gathered = "with regathering():  # gathered weights are dropped after use, and gathered again in backward"
        if light:
            gathered = "with regathering():  # what again() gives, or regathers, is dropped and made again in backward"
        return [
            *signature("forward", given, results),
            *docs,
            *([f"        {gathered}"] if regather else []),
            *statement("return ", made, 12 if regather else 8),
            "",
            *signature("compute", names, results),
            '        """The forward pass itself."""',
            *axes,
            *self.lines,
        ]

    def name_tables(self) -> list[tuple[str, ...]]:
        """Stored names of blocks whose names do not line up."""
        tables: list[tuple[str, ...]] = []
        for run, block in self.blocks:
            if run.prefixes is None and (names := self._source_names(run)) and names[0]:
                rows = [f"    {tuple_of(tuple(string(name) for name in row))}," for row in names]
                tables.append((f"{self._table(block)} = (", *rows, ")"))
        return tables

    @property
    def _held(self) -> list[Node]:
        inner = [param for run, _ in self.blocks for x in run.blocks for param in own_params(self.setting.reading, x)]
        return [*self.attributes, *inner]

    def _declarations(self) -> list[str]:
        lines: list[str] = []
        for param, attribute in self.attributes.items():
            keys = [string(source) for source in sources_of(param)]
            lines += declaration(param, attribute, keys, self.setting.mesh, self.stored_shapes)
        for reads in self._segments():
            lines += unit_lines(reads, self.attributes, self.setting.reading, whole=False)
        for buffer in self.constants:
            made = call("mesh.tensor", f"weights[{string(buffer.stored)}]", *([buffer.cuts] if buffer.cuts else []))
            lines += statement(f"self.{buffer.attribute} = ", call("nn.Buffer", made, "persistent=False"), 8)
        for run, block in self.blocks:
            lines += self._module_list(run, block)
        return lines

    def _segments(self) -> list[list[Node]]:
        """What it reads itself, before, between and behind its runs; nothing twice."""
        found: list[dict[Node, None]] = [{}]
        for item in self.outline.items:
            run = isinstance(item, BlockRun)
            reads = item.fixed if isinstance(item, BlockRun) else self.setting.reading.operands(item)
            known = set().union(*found[:-1])
            found[-1] |= dict.fromkeys(node for node in reads if node not in known)
            if run:
                found.append({})
        return [list(reads) for reads in found]

    def _module_list(self, run: BlockRun, block: BlockClass) -> list[str]:
        pad = " " * 8
        if run.prefixes is not None:
            key, loop = _prefixes_text(run.prefixes)
        elif self._source_names(run)[0]:
            key, loop = "names", f"names in {self._table(block)}"
        else:
            key, loop = "()", f"_ in range({len(run.blocks)})"
        made = f"{block.name}(mesh, weights, {key}) for {loop}"
        line = f"{pad}self.{block.attribute} = nn.ModuleList({made})"
        if len(line) <= WIDTH:
            return [line]
        return [f"{pad}self.{block.attribute} = nn.ModuleList(", f"{pad}    {made}", f"{pad})"]

    def _source_names(self, run: BlockRun) -> list[list[str]]:
        return [own_names(self.setting.reading, block) for block in run.blocks]

    def _table(self, block: BlockClass) -> str:
        if self.stage is None:
            return f"{block.name.upper()}_NAMES"
        return f"STAGE{self.stage}_{block.attribute.upper()}_NAMES"


def write_holders(
    outlines: Sequence[StageOutline],
    arguments: Sequence[Mapping[Node, str]],
    setting: Setting,
    constants: Mapping[Node, Buffer],
    stored_shapes: Shapes,
    *,
    again: Again,
) -> list[Holder]:
    """All stages; blocks of one text have one class, whichever stage they are in.

    again: how backward has what it needs, block by block, or of a stage that has none as a whole.
    """
    classes = _Classes(outlines, setting, stored_shapes)
    found = []
    for number, (outline, names) in enumerate(zip(outlines, arguments, strict=True)):
        blocks = classes.of(outline)
        attributes = attribute_names(
            _own_params(outline, blocks, setting, whole=len(outlines) == 1),
            "",
            [*setting.axes, *(block.attribute for _, block in blocks), *setting.constants.values()],
        )
        in_blocks = {node for run, _ in blocks for block in run.blocks for node in block}
        updates = {node: name for node, name in setting.updates.items() if node not in in_blocks}
        scope = Scope(outline.items, outline.arguments, outline.results, updates)
        held = Attributes(
            {**attributes, **setting.constants},
            {run: block.attribute for run, block in blocks},
            again,
            *setting.written,
        )
        lines = Body(scope, setting.reading, setting.shapes, held, names, setting.reserve()).lines()
        buffers = [x for x in constants.values() if len(outlines) == 1 or _names(lines, x.attribute)]
        stage = None if len(outlines) == 1 else number
        own = ONCE if blocks else again
        found.append(Holder(outline, names, blocks, attributes, lines, buffers, setting, stored_shapes, stage, own))
    return found


def _names(lines: Sequence[str], attribute: str) -> bool:
    return any(re.search(rf"\bself\.{attribute}\b", line) for line in lines)


class _Classes:
    """The classes of equal blocks: one a run, or where there are several stages one for each text."""

    def __init__(self, outlines: Sequence[StageOutline], setting: Setting, stored_shapes: Shapes) -> None:
        runs = [item for outline in outlines for item in outline.items if isinstance(item, BlockRun)]
        texts = [(at, run, block_class(run, "", "", setting, stored_shapes).lines[1:]) for at, run in enumerate(runs)]
        keys = [(0 if len(outlines) > 1 else at, lines) for at, _, lines in texts]
        distinct = list(dict.fromkeys(keys))
        self._lines: dict[int, tuple[str, tuple[str, ...]]] = {}
        for key, (_, run, lines) in zip(keys, texts, strict=True):
            name = "Block" if len(distinct) == 1 else f"Block{distinct.index(key) + 1}"
            self._lines[id(run)] = name, (f"class {name}(nn.Module):", *lines)

    def of(self, outline: StageOutline) -> list[tuple[BlockRun, BlockClass]]:
        """The runs of a stage, each with its class and the attribute that holds it."""
        found: list[tuple[BlockRun, BlockClass]] = []
        attributes: list[str] = [*MODULE]
        for run in (item for item in outline.items if isinstance(item, BlockRun)):
            name, lines = self._lines[id(run)]
            attribute = unique(_list_name(run), attributes)
            attributes.append(attribute)
            found.append((run, BlockClass(name, attribute, lines)))
        return found


def _own_params(
    outline: StageOutline, blocks: Sequence[tuple[BlockRun, BlockClass]], setting: Setting, *, whole: bool
) -> list[Node]:
    """Parameters of a stage itself: those that it reads, or all where it is the ``whole``, and no block holds."""
    reading = setting.reading
    held = {param for run, _ in blocks for block in run.blocks for param in own_params(reading, block)}
    if whole:
        return [param for param in reading.graph.params if param not in held]
    steps = [x for item in outline.items if not isinstance(item, BlockRun) for x in (item,)]
    operands = [operand for node in (*steps, *outline.results) for operand in (node, *reading.operands(node))]
    operands += [node for run, _ in blocks for node in run.fixed]
    leaves = (reading.leaf(operand) for operand in operands)
    read = {leaf.base for leaf in leaves if leaf is not None and leaf.base.is_param}
    return [param for param in reading.graph.params if param in read and param not in held]


def _list_name(run: BlockRun) -> str:
    """``layers`` of ``model.layers.0``: what the model called its list, if all have the same places in both.

    Others would be taken for other layers by that name: ``layers_from_2`` begins with the source's ``layers.2``.
    """
    if run.prefixes is None:
        return "blocks"
    parts = [part for part in run.prefixes[0].split(".") if not part.isdigit()]
    name = identifier(parts[-1] if parts else "blocks", "blocks")
    name = name if len(name) > 1 else "blocks"
    numbers = [[int(part) for part in prefix.split(".") if part.isdecimal()] for prefix in run.prefixes]
    if not all(numbers):
        return name
    places = [each[-1] for each in numbers]
    first = places[0]
    if places != list(range(first, first + len(places))):
        return f"some_{name}"
    return f"{name}_from_{first}" if first else name


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

"""The classes of an emitted program: one per run of equal blocks, and the model itself."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ir.emission.code import Code, call
from ir.graph import Node, View, is_column, param_view
from ir.mesh import JOINT, Mesh
from ir.ops.parts import table_below
from ir.sharding import Shard, parse_sharding
from ir.views import readings, sources_of
from pdv.emit.analysis.fold import FOLDED
from pdv.emit.analysis.leaves import Reading
from pdv.emit.analysis.lower import variable
from pdv.emit.analysis.names import identifier, string, together, unique
from pdv.emit.analysis.outline import BlockRun, own_params
from pdv.emit.analysis.reserved import GLOBALS, MODULE
from pdv.emit.analysis.shapes import Shapes
from pdv.emit.analysis.staged import Scaled
from pdv.emit.program.body import ONCE, Attributes, Body
from pdv.emit.program.code import WIDTH, signature, statement
from pdv.emit.program.statements import Scope
from pdv.pcg.units import Key, gathered_units


@dataclass(frozen=True)
class Setting:
    """What every class of one program is written from."""

    mesh: Mesh
    reading: Reading
    shapes: Shapes
    updates: Mapping[Node, str]
    scaled: Scaled | None
    constants: Mapping[Node, str]  # leaf node (a constant below its cuts) -> name in the weights file
    stages: tuple[str, ...] = ()
    """The axis of stages, if there are several."""
    in_slices: bool = False
    """Whether an axis of time is that of slices."""

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes, and joint ones, as ``mesh[...]`` names them."""
        return (*self.mesh.spans, *self.stages)

    @property
    def written(self) -> tuple[Scaled | None, tuple[str, ...], bool]:
        """How operators are written."""
        return self.scaled, self.stages, self.in_slices

    @property
    def moves(self) -> bool:
        """Whether a pass that runs twice would not do the same: it overwrites buffers, or draws."""
        return bool(self.updates or self.reading.graph.draws)

    def reserve(self) -> frozenset[str]:
        """Names that no local variable may take."""
        return GLOBALS | {variable(axis) for axis in self.axes}


@dataclass(frozen=True)
class BlockClass:
    """The class of a run: its name, what the model calls the list of its instances, and its lines."""

    name: str
    attribute: str
    lines: tuple[str, ...]


def cuts_of(param: Node, mesh: Mesh) -> str:
    """``{"tp": 0, "dp": 1}``: the dim that each axis cuts, or nothing."""
    sharding = parse_sharding(param.attr("stored"))
    pairs = [
        f"{string(axis.name)}: {state.dim}"
        for axis, state in zip(mesh.axes, sharding, strict=False)
        if isinstance(state, Shard) and not (is_column(param) and state.dim > 0)  # a vector has no such dim to cut
    ]
    return f"{{{', '.join(pairs)}}}" if pairs else ""


def stored_code(param: Node, keys: Sequence[str], shapes_of: Mapping[str, Sequence[int]]) -> Code:
    """``weights["h.0.attn.weight"].permute(1, 0)``, or ``join(0, weights[...], ...)``: what a parameter is made of.

    keys: expressions of the names of the stored tensors; shapes_of: their shapes, by name.
    """
    if is_column(param):
        return Code(f"weights[{keys[0]}]")
    found = [
        _view(f"weights[{key}]", reading.view, shapes_of[reading.source])
        for key, reading in zip(keys, readings(param), strict=True)
    ]
    view = param_view(param)
    if view and view[0][0] == "concat":
        joined = call("join", str(view[0][1]), *found)
        return joined if len(view) == 1 else Code(_view(joined.text, view[1:], _joined_shape(param)))
    return Code(found[0])


def _joined_shape(param: Node) -> list[int]:
    """Shape of the parts of a joined parameter, together."""
    shapes = [reading.shape for reading in readings(param)]
    dim = param_view(param)[0][1]
    return [sum(shape[dim] for shape in shapes) if i == dim else size for i, size in enumerate(shapes[0])]


def _view(text: str, view: View, shape: Sequence[int]) -> str:
    """The expression with the steps of a view applied; shape: of what it is taken of."""
    sizes = list(shape)
    for step in view:
        match step:
            case ("permute", perm):
                text += f".permute({', '.join(map(str, perm))})"
                sizes = [sizes[dim] for dim in perm]
            case ("chunk", dim, parts, index):
                sizes[dim] //= parts
                text += f".narrow({dim}, {index * sizes[dim]}, {sizes[dim]})"
            case ("slice", dim, start, stop, _):
                sizes[dim] = stop - start
                text += f".narrow({dim}, {start}, {sizes[dim]})"
            case ("reshape", new):
                text += f".reshape({', '.join(map(str, new))})"
                sizes = list(new)
            case _:
                raise AssertionError(f"no such view step: {step}")
    return text


def declaration(
    param: Node, attribute: str, keys: Sequence[str], mesh: Mesh, shapes_of: Mapping[str, Sequence[int]]
) -> list[str]:
    """The line of ``__init__`` that makes a parameter or a buffer; keys: expressions of its stored names."""
    stored = stored_code(param, keys, shapes_of)
    cuts = cuts_of(param, mesh)
    if param.attr("trainable"):
        return statement(f"self.{attribute} = ", call("mesh.parameter", stored, *([cuts] if cuts else [])), 8)
    assert not cuts, f"buffers are whole: {param!r}"
    return statement(f"self.{attribute} = ", call("mesh.buffer", stored), 8)


def unit_lines(reads: Iterable[Node], attributes: Mapping[Node, str], reading: Reading, *, whole: bool) -> list[str]:
    """The lines that make units of the parameters among what is read; ``whole``: the module holds no others."""
    units: dict[Key, dict[Node, str]] = {}
    moves = [leaf.chain[0] for node in reads if (leaf := reading.leaf(node)) is not None and leaf.chain]
    for move, key in gathered_units(moves, several=reading.several).items():
        if move.operands[0] in attributes:
            units.setdefault(key, {})[move.operands[0]] = attributes[move.operands[0]]
    trained = sum(bool(param.attr("trainable")) for param in attributes if param.is_param)
    lines: list[str] = []
    for (_, axis, _, once), members in units.items():
        names = [f"self.{name}" for name in members.values()]
        if whole and len(members) == trained:
            names = ["*self.parameters()"]
        words = [*map(Code, names), *([Code("once=True")] if once else [])]
        lines += statement("", call("gather_together", f"self.{variable(axis)}", *words), 8)
    return lines


def attribute_names(params: Sequence[Node], prefix: str, taken: Sequence[str] = ()) -> dict[Node, str]:
    """An attribute for each parameter: as much of its stored name after the prefix as tells it from the others."""
    split = {param: _split_name(param.attr("name").removeprefix(f"{prefix}.")) for param in params}
    modules = _short_names([module for module, _ in split.values()])
    names: dict[Node, str] = {}
    used = {*MODULE, *taken}
    for param, (module, leaf) in split.items():
        words = (*map(together, modules[module]), *leaf)
        names[param] = unique(identifier(".".join(words), "weight"), used)
        used.add(names[param])
    return names


Words = tuple[str, ...]


def _split_name(name: str) -> tuple[Words, Words]:
    """The module of a parameter and what it is there: ``("attn", "c_proj")`` and ``("weight",)``."""
    words = tuple(name.split("."))
    last = next((i for i in range(len(words) - 1, 0, -1) if not words[i].isdigit() and words[i] != FOLDED), 0)
    return words[:last], words[last:]


def _short_names(modules: Iterable[Words]) -> dict[Words, Words]:
    """The last words of each module's name, as many as no other ends in, and as its siblings have."""
    found = dict.fromkeys(modules, 0)
    for module in found:
        others = [other for other in found if other != module]
        depth = min(1, len(module))
        while depth < len(module) and (
            module[-depth].isdigit() or any(other[-depth:] == module[-depth:] for other in others)
        ):
            depth += 1
        found[module] = depth
    deepest: dict[Words, int] = {}
    for module, depth in found.items():
        deepest[module[:-1]] = max(deepest.get(module[:-1], 0), depth)
    return {module: module[len(module) - deepest[module[:-1]] :] if module else () for module in found}


def axis_lines(lines: Sequence[str], axes: Sequence[str], indent: int = 8) -> list[str]:
    """``dp, tp = self.dp, self.tp`` for the axes that the lines name."""
    used = used_axes(lines, axes)
    if not used:
        return []
    names = [variable(axis) for axis in used]
    return [" " * indent + f"{', '.join(names)} = {', '.join(f'self.{name}' for name in names)}"]


def used_axes(lines: Sequence[str], axes: Sequence[str]) -> list[str]:
    """Axes that the code of some lines names (comments apart)."""
    words = {word for line in lines for word in re.findall(r"(?<![\w.\"'])\w+", line.split("  # ")[0])}
    if all(line.lstrip().startswith("#") for line in lines):
        return []
    return [axis for axis in axes if variable(axis) in words]


def block_class(
    run: BlockRun, name: str, attribute: str, setting: Setting, shapes_of: Mapping[str, Sequence[int]]
) -> BlockClass:
    """The class of a run of equal blocks, written from its first block."""
    reading = setting.reading
    first = run.blocks[0]
    params = own_params(reading, first)
    prefix = run.prefixes[0] if run.prefixes else ""
    attributes = attribute_names(params, prefix, setting.axes)
    arguments = argument_names(run, setting)
    updates = {node: setting.updates[node] for node in first if node in setting.updates}
    scope = Scope(first, (*run.incoming[0], *run.fixed), run.outgoing[0], updates)
    body = Body(
        scope, reading, setting.shapes, Attributes(attributes, {}, ONCE, *setting.written), arguments, setting.reserve()
    )
    lines = body.lines()
    names = "prefix: str" if run.prefixes else "names: tuple[str, ...]"
    declared: list[str] = []
    number = 0
    for param in params:
        keys = []
        for source in sources_of(param):
            keys.append(f"names[{number}]" if not run.prefixes else prefix_code(source[len(prefix) + 1 :]))
            number += 1
        declared += declaration(param, attributes[param], keys, setting.mesh, shapes_of)
    axes = used_axes(lines, setting.axes)
    what = ", ".join(f"{arguments[node]} {setting.shapes.text(node)}" for node in run.incoming[0])
    after = ", ".join(setting.shapes.text(node) for node in run.outgoing[0])
    text = [
        f"class {name}(nn.Module):",
        f'    """{what} -> {after}"""',
        "",
        f"    def __init__(self, mesh: Mesh, weights: Weights, {names}) -> None:",
        "        super().__init__()",
        *axis_attributes(axes),
        *declared,
        *unit_lines((operand for node in first for operand in reading.operands(node)), attributes, reading, whole=True),
        "",
        *signature("forward", (arguments[node] for node in scope.arguments), len(scope.results)),
        *axis_lines(lines, setting.axes),
        *lines,
    ]
    return BlockClass(name, attribute, tuple(text))


def axis_attributes(axes: Sequence[str]) -> list[str]:
    """``self.dp, self.dp_tp = mesh["dp"], mesh["dp", "tp"]``."""
    if not axes:
        return []
    keys = [", ".join(string(name) for name in axis.split(JOINT)) for axis in axes]
    left, right = [f"self.{variable(axis)}" for axis in axes], [f"mesh[{key}]" for key in keys]
    line = f"        {', '.join(left)} = {', '.join(right)}"
    return [line] if len(line) <= WIDTH else [f"        {a} = {b}" for a, b in zip(left, right, strict=True)]


def prefix_code(suffix: str) -> str:
    """The stored name ``prefix.suffix`` as an expression over ``prefix``."""
    if suffix.isascii() and all(c.isalnum() or c in "._-" for c in suffix):
        return f'f"{{prefix}}.{suffix}"'
    return f"prefix + {string('.' + suffix)}"


def argument_names(run: BlockRun, setting: Setting) -> dict[Node, str]:
    """Names of what a block is given: ``x`` for the stream, then by what it is."""
    names: dict[Node, str] = {}
    used = set(setting.reserve())
    for node in run.incoming[0]:
        names[node] = unique("x" if not names else "y", used)
        used.add(names[node])
    for node in run.fixed:
        base = node
        while base.operands and base.op.kind == "parallel":
            base = base.operands[0]
        table = table_below(base)
        known = setting.constants.get(node if table is None else table)
        names[node] = unique(known or identifier(base.name, "value"), used)
        used.add(names[node])
    return names

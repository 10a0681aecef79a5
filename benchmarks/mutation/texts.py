"""Emitted texts made wrong: one place of model.py or parallel.py changed; judged by running them on simulated ranks."""

from __future__ import annotations

import ast
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from unittest.mock import patch

from benchmarks.mutation.judge import Verdict
from benchmarks.mutation.plans import Right
from ir.dims import Shape
from ir.errors import PdvError
from pdv.check import check_text, checked
from pdv.check.imports import Texts
from pdv.check.run import run
from pdv.check.small import full_pair
from pdv.emit.emission import Emission, module_texts
from pdv.frontend.program import Weights

FUNCTIONS = ("gelu", "relu", "silu", "tanh", "sigmoid")
MOVES = ("partition", "combine", "replicate", "reduce", "all_gather", "reduce_scatter", "all_to_all")
MOVED = {"partition": "reduce_scatter", "combine": "all_gather", "all_gather": "combine", "reduce": "replicate",
         "replicate": "reduce", "reduce_scatter": "partition"}  # fmt: skip
PRIVATE = {"_all_reduce": "_same", "_same": "_all_reduce", "_slice": "_reduce_scatter", "_reduce_scatter": "_slice"}
OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*"}
KEPT = (
    "regather",
    "recipes",
    "remember",
    "check_version",
    "_remembered",
    "pack",
    "unpack",
    "again",
    "_is_gone",
)  # functions that no check runs
Changed = tuple[ast.expr | ast.stmt, str]
"""(where, what is put in its place)."""


@dataclass(frozen=True)
class Module:
    """One file: its text and tree, and the parts of it that compute; of a library only what ``used_by`` calls."""

    name: str
    text: str
    axes: tuple[str, ...]
    used_by: str = ""

    @cached_property
    def nodes(self) -> list[ast.expr | ast.stmt]:
        """Expressions and statements inside of functions."""
        found: list[ast.expr | ast.stmt] = []
        tree, used = ast.parse(self.text), self._used()
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef) and function.name in used:
                for statement in function.body:
                    found += [x for x in ast.walk(statement) if isinstance(x, ast.expr | ast.stmt)]
        return found

    def _used(self) -> set[str]:
        """Functions that run."""
        functions = {x.name: x for x in ast.walk(ast.parse(self.text)) if isinstance(x, ast.FunctionDef)}
        if not self.used_by:
            return set(functions) - {"build"}
        queue = [self.used_by]
        used: set[str] = set()
        while queue:
            words = {x.id for x in ast.walk(ast.parse(queue.pop())) if isinstance(x, ast.Name)}
            new = (words & set(functions)) - used - set(KEPT)
            used |= new
            queue += [ast.unparse(functions[name]) for name in new]
        return used

    def calls(self, *names: str) -> list[ast.Call]:
        """Calls of functions by their last name."""
        return [x for x in self.nodes if isinstance(x, ast.Call) and (not names or called(x) in names)]

    def of(self, node: ast.AST) -> str:
        """The text of a node."""
        return ast.get_source_segment(self.text, node) or ""

    def with_change(self, changed: Changed) -> str:
        """The text with a node's replaced."""
        node, put = changed
        lines = self.text.encode().splitlines(keepends=True)
        starts = [sum(map(len, lines[:n])) for n in range(len(lines))]
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        data = self.text.encode()
        return (data[:start] + put.encode() + data[end:]).decode()


def called(node: ast.Call) -> str:
    """The last name of what is called."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _functions(m: Module) -> Iterator[Changed]:
    for node in m.calls(*FUNCTIONS):
        yield from ((node.func, m.of(node.func).replace(called(node), f)) for f in FUNCTIONS if f != called(node))


def _axes(m: Module) -> Iterator[Changed]:
    for node in m.nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in m.axes:
            yield from ((node, axis) for axis in m.axes if axis != node.id)


def _dropped(m: Module) -> Iterator[Changed]:
    return ((node, m.of(node.args[0])) for node in m.calls(*MOVES) if node.args)


def _moved(m: Module) -> Iterator[Changed]:
    return ((node.func, MOVED[called(node)]) for node in m.calls(*MOVED))


def _private(m: Module) -> Iterator[Changed]:
    for node in m.nodes:
        if isinstance(node, ast.Name) and node.id in PRIVATE:
            yield node, PRIVATE[node.id]


def _called_off(m: Module) -> Iterator[Changed]:
    for node in m.calls():
        if node.args and called(node) not in (*MOVES, "local", "parameter", "buffer", "super"):
            yield node, m.of(node.args[0])


def _local(m: Module) -> Iterator[Changed]:
    for node in m.calls("local"):
        for at in range(1, len(node.args)):
            kept = [m.of(x) for i, x in enumerate(node.args) if i != at]
            yield node, f"local({', '.join(kept)})"
        yield node, m.of(node.args[0])
        yield from ((node, f"local({', '.join(map(m.of, node.args))}, {x})") for x in m.axes if x not in m.of(node))


def _whole_numbers(m: Module) -> Iterator[Changed]:
    for node in m.nodes:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            yield from ((node, f"({node.value + by})") for by in (1, -1))


def _floats(m: Module) -> Iterator[Changed]:
    for node in m.nodes:
        if isinstance(node, ast.Constant) and type(node.value) is float:
            yield from ((node, repr(node.value * by)) for by in (2.0, 1.001))


def _flags(m: Module) -> Iterator[Changed]:
    for node in m.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield node, str(not node.value)
        if isinstance(node, ast.Constant) and node.value in ("tanh", "none"):
            yield node, '"none"' if node.value == "tanh" else '"tanh"'


def _keys(m: Module) -> Iterator[Changed]:
    keys = [x for x in m.nodes if isinstance(x, ast.Subscript) and m.of(x.value) == "weights"]
    names = list(dict.fromkeys(map(m.of, keys)))
    for node in keys:
        yield from ((node, name) for name in names if name != m.of(node))


def _cuts(m: Module) -> Iterator[Changed]:
    for node in m.nodes:
        if isinstance(node, ast.Dict) and len(node.keys) > 1:
            keys, values = [m.of(x) for x in node.keys if x], [m.of(x) for x in node.values]
            yield node, "{" + ", ".join(f"{k}: {v}" for k, v in zip(keys, values[::-1], strict=True)) + "}"
            yield node, "{" + ", ".join(f"{k}: {v}" for k, v in list(zip(keys, values, strict=True))[1:]) + "}"


def _operators(m: Module) -> Iterator[Changed]:
    for node in m.nodes:
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            yield node, f"({m.of(node.left)} {OPERATORS[type(node.op)]} {m.of(node.right)})"


def _one_side(m: Module) -> Iterator[Changed]:
    for node in m.nodes:
        if isinstance(node, ast.BinOp):
            yield node, m.of(node.left)
            yield node, m.of(node.right)


def _sizes(m: Module) -> Iterator[Changed]:
    for node in m.nodes:
        if isinstance(node, ast.Attribute) and node.attr in ("size", "rank") and not isinstance(node.ctx, ast.Store):
            yield node, "1" if node.attr == "size" else "0"
            yield node, m.of(node.value) + (".rank" if node.attr == "size" else ".size")


def _arguments(m: Module) -> Iterator[Changed]:
    for node in m.calls():
        if len(node.args) > 1:
            first, second, *rest = map(m.of, [*node.args, *node.keywords])
            yield node, f"{m.of(node.func)}({', '.join([second, first, *rest])})"


def _detached(m: Module) -> Iterator[Changed]:
    return ((node, f"{m.of(node)}.detach()") for node in m.calls(*MOVES, "local", "linear", "conv2d", *FUNCTIONS))


def _statements(m: Module) -> Iterator[Changed]:
    for node in m.nodes:
        if isinstance(node, ast.Assign | ast.Expr) and "super()" not in m.of(node) and '"""' not in m.of(node):
            yield node, "pass"


def _twice(m: Module) -> Iterator[Changed]:
    for node in m.nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp):
            yield node.value, f"({m.of(node.value)} + {m.of(node.value.right)})"


def _scaled(m: Module) -> Iterator[Changed]:
    for node in m.calls("linear", "matmul", "conv2d", "embedding", *MOVES):
        for axis in m.axes:
            yield node, f"({m.of(node)} * {axis}.size)"


TEXT_KINDS: Mapping[str, Callable[[Module], Iterator[Changed]]] = {
    "text: another function": _functions,
    "text: another axis": _axes,
    "text: collective dropped": _dropped,
    "text: another collective": _moved,
    "text: another move inside": _private,
    "text: call dropped": _called_off,
    "text: axes of local()": _local,
    "text: whole number": _whole_numbers,
    "text: float": _floats,
    "text: flag": _flags,
    "text: key of a weight": _keys,
    "text: cuts of a weight": _cuts,
    "text: operator": _operators,
    "text: one side only": _one_side,
    "text: size or rank": _sizes,
    "text: arguments exchanged": _arguments,
    "text: gradient cut off": _detached,
    "text: statement left out": _statements,
    "text: term twice": _twice,
    "text: scaled by a degree": _scaled,
}


class Texted:
    """A right program's text, and what becomes of changed ones."""

    def __init__(self, right: Right) -> None:
        self.right = right
        self.emission = Emission.of(right.pcg, right.mesh, train=True)
        self.files = module_texts(self.emission.body(self._shape))
        axes = tuple(axis.name for axis in self.emission.mesh.axes)
        model = self.files["model.py"]
        libraries = [name for name in ("parallel.py", "operators.py") if name in self.files]
        self.modules = [Module("model.py", model, axes)]
        self.modules += [Module(name, self.files[name], axes, model) for name in libraries]

    def _shape(self, source: str) -> Shape:
        return next(x.type.shape for x in self.right.source.params if x.attr("source") == source)

    def places(self, kind: str) -> list[tuple[Module, Changed]]:
        """Where a kind of change can be made."""
        return [(module, changed) for module in self.modules for changed in TEXT_KINDS[kind](module)]

    def judged(self, module: Module, changed: Changed) -> Verdict | None:
        """By a run at small sizes; what it does not refuse is run at its own sizes on other numbers."""
        started = time.process_time()
        try:
            text = module.with_change(changed)
            if ast.dump(ast.parse(text)) == ast.dump(ast.parse(module.text)):
                return None
        except SyntaxError:
            return None
        files = {**self.files, module.name: text}
        note = self._refused(files)
        equal = None if note is not None else self._equal(files)
        refused = frozenset({"text"} if note is not None else ())
        first = "text" if note is not None else "nothing"
        return Verdict(refused, first, equal, note or "", time.process_time() - started)

    def _refused(self, files: Mapping[str, str]) -> str | None:
        weights = Weights()
        with warnings.catch_warnings(), patch.object(checked, "FEW_ELEMENTS", 0):
            warnings.simplefilter("ignore")
            try:
                check_text(self.right.source, self.emission, weights, files=files)
            except PdvError as error:
                return str(error)
        return None

    def _equal(self, files: Mapping[str, str]) -> bool:
        pair = full_pair(self.right.source, self.emission, self._shape)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                for seed in (101, 202):
                    run(pair, Texts(files, Path("emitted")), train=True, seed=seed)
            except PdvError:
                return False
        return True

"""Decisions by an operator's name: where code asks which operator a node is, and not what the operator declares.

Counted are comparisons with a name or a list of names, lookups in tables by name, cases of a ``match``, calls that are
given a name to compare with (``is_op``), prefixes and suffixes of names, attributes looked up by name, and identity
tests against a declaration; under whatever variable the name is meanwhile kept. Not counted are two names compared with
each other, operators looked up or built by name, and the steps of a stored tensor's view, which use the same words.
Entry point: ``decisions``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

COMPARED_BY = {"is_op"}
"""Functions that compare an operator's name with the texts they are given."""
OTHER_WORDS = {"act", "activation", "approximate", "collective", "given", "key", "kind"}
"""Variables and attributes whose values are spelled as some operator is, and mean something else."""
WRAPPERS = {"MappingProxyType", "dict", "frozenset", "list", "set", "tuple"}


@dataclass(frozen=True, order=True)
class Decision:
    """Where a decision is taken, and its text."""

    line: int
    text: str


@dataclass(frozen=True)
class Tables:
    """Module-level names bound to tables or lists of operator names, per module, imports followed."""

    names: Mapping[str, frozenset[str]]

    @classmethod
    def of(cls, trees: Mapping[str, ast.Module], operators: frozenset[str]) -> Tables:
        """The tables of modules by dotted name."""
        own = {
            module: {target for node in tree.body for target in _bound(node) if _is_table(_value(node), operators)}
            for module, tree in trees.items()
        }
        for module, tree in trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and node.module in own:
                    taken = {(alias.asname or alias.name) for alias in node.names if alias.name in own[node.module]}
                    own[module] = own[module] | taken
        return cls({module: frozenset(names) for module, names in own.items()})


def decisions(tree: ast.Module, operators: frozenset[str], tables: frozenset[str] = frozenset()) -> list[Decision]:
    """The decisions of a module.

    Args:
        tree: the module.
        operators: every operator's name.
        tables: names in the module that are bound to tables of operator names.
    """
    declared = (
        {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ir.ops")
            for alias in node.names
            if alias.name.isupper() or alias.name in operators
        }
        - {"OPERATORS", "OPS", "TRANSITIONS"}
        - tables
    )
    reader = _Reader(operators, tables, frozenset(declared))
    found = [Decision(node.lineno, ast.unparse(node)) for node, names in _scoped(tree) if reader.decides(node, names)]
    cases = [
        Decision(part.lineno, f"case {ast.unparse(part.value)}")
        for node in ast.walk(tree)
        if isinstance(node, ast.match_case)
        for part in _alternatives(node.pattern)
        if isinstance(part, ast.MatchValue) and reader.is_operator(part.value)
    ]
    return sorted(found + cases)


def tables_of(tree: ast.Module, operators: frozenset[str]) -> list[Decision]:
    """Tables and lists of operator names: literals of two or more of them, and nothing else."""
    literals = ast.Call | ast.Dict | ast.Set | ast.Tuple | ast.List
    found = [node for node in ast.walk(tree) if isinstance(node, literals) and _is_table(node, operators)]
    inside = {id(part) for node in found for part in ast.walk(node) if part is not node}
    return sorted(Decision(node.lineno, ast.unparse(node)) for node in found if id(node) not in inside)


@dataclass(frozen=True)
class _Reader:
    operators: frozenset[str]
    tables: frozenset[str]
    declared: frozenset[str]

    def decides(self, node: ast.expr, names: frozenset[str]) -> bool:
        """Whether an expression is a decision; names: variables that hold an operator's name."""
        match node:
            case ast.Compare(left, _, comparators):
                sides = [left, *comparators]
                if any(map(_means_other, sides)):
                    return False
                if any(map(self.is_operator, sides)) or any(map(self._is_list, sides)):
                    return True
                if any(isinstance(side, ast.Name) and side.id in self.declared for side in sides):
                    return True
                return any(_is_name(side, names) for side in sides) and not all(_is_any(side, names) for side in sides)
            case ast.Subscript(value, key):
                if isinstance(key, ast.Constant | ast.Slice) or (
                    isinstance(value, ast.Name) and value.id == "OPERATORS"
                ):
                    return False
                return (self._is_list(value) and not isinstance(value, ast.Tuple)) or _is_name(key, names)
            case ast.Call(ast.Name(function), args):
                given = [arg for arg in args if self.is_operator(arg)]
                return (function in COMPARED_BY and bool(given)) or (function == "getattr" and _mentions(args, names))
            case ast.Call(ast.Attribute(value, "get"), [key, *_]):
                return self._is_list(value) or _is_name(key, names)
            case ast.Call(ast.Attribute(value, "startswith" | "endswith")):
                return _is_name(value, names)
        return False

    def is_operator(self, node: ast.AST) -> bool:
        """Whether an expression is the name of an operator, as text."""
        return isinstance(node, ast.Constant) and node.value in self.operators

    def _is_list(self, node: ast.AST) -> bool:
        """Whether an expression is a list or table of names: written out, or bound to a name before."""
        if isinstance(node, ast.Name):
            return node.id in self.tables
        elements = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else ()
        return any(map(self.is_operator, elements)) or _is_table(node, self.operators)


def _scoped(tree: ast.Module) -> Iterator[tuple[ast.expr, frozenset[str]]]:
    """Every expression, with the variables that hold an operator's name in the function around it."""
    around: dict[int, frozenset[str]] = {}
    nodes = list(ast.walk(tree))
    for function in nodes:
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and (names := _aliases(function)):
            for part in ast.walk(function):
                around[id(part)] = around.get(id(part), frozenset()) | names
    for node in nodes:
        if isinstance(node, ast.expr):
            yield node, around.get(id(node), frozenset())


def _aliases(function: ast.FunctionDef | ast.AsyncFunctionDef) -> frozenset[str]:
    """Variables of a function that are given an operator's name."""
    return frozenset(
        target.id
        for part in ast.walk(function)
        if isinstance(part, ast.Assign | ast.NamedExpr) and _is_name(part.value, frozenset())
        for target in (part.targets if isinstance(part, ast.Assign) else [part.target])
        if isinstance(target, ast.Name)
    )


def _is_name(node: ast.AST, names: frozenset[str]) -> bool:
    """Whether an expression is ``op.name`` of something, or a variable that holds one."""
    match node:
        case ast.Attribute(ast.Attribute(_, "op") | ast.Name("op"), "name"):
            return True
        case ast.Name(name):
            return name in names
    return False


def _is_any(node: ast.AST, names: frozenset[str]) -> bool:
    """Whether an expression is any operator's name: of a node, or of a term in a pattern."""
    match node:
        case ast.Attribute(_, "op") | ast.Name("op"):
            return True
    return _is_name(node, names)


def _means_other(node: ast.AST) -> bool:
    """Whether an expression is the step of a view, ``step[0]``, or a variable whose words mean something else."""
    match node:
        case ast.Subscript(_, ast.Constant(index)):
            return isinstance(index, int)
        case ast.Name(name) | ast.Attribute(_, name):
            return name in OTHER_WORDS
    return False


def _alternatives(pattern: ast.pattern) -> list[ast.pattern]:
    """A pattern, or those that it offers."""
    return pattern.patterns if isinstance(pattern, ast.MatchOr) else [pattern]


def _mentions(args: list[ast.expr], names: frozenset[str]) -> bool:
    return any(_is_name(part, names) for arg in args for part in ast.walk(arg))


def _bound(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _value(node: ast.stmt) -> ast.AST | None:
    return node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None


def _is_table(node: ast.AST | None, operators: frozenset[str]) -> bool:
    """Whether a literal holds operator names and nothing else (as keys, for a table), two or more."""
    if isinstance(node, ast.Call):
        wraps = isinstance(node.func, ast.Name) and node.func.id in WRAPPERS and len(node.args) == 1
        return wraps and _is_table(node.args[0], operators)
    if isinstance(node, ast.Dict):
        keys = [key for key in node.keys if key is not None]
    elif isinstance(node, ast.Set | ast.Tuple | ast.List):
        keys = node.elts
    else:
        return False
    names = {key.value for key in keys if isinstance(key, ast.Constant)}
    return len(keys) > 1 and len(names) == len(keys) and names <= operators

"""Parts of loops that are left out where they would work on no rows. Entry point: ``skips``.

``if top_x.shape[0] == 0: continue`` and ``if mask.any(): out[mask] += expert(x[mask])`` spare a loop over experts those
that no row chose. Without rows such a part does nothing: programs always run it, if all that it leaves behind is put
where there are rows. That is read off its text, and anything else is no such part.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence

_PLACED = {"index_add_": 1, "index_add": 1, "scatter_add_": 1, "index_copy_": 1, "index_put_": 0, "index_put": 0}
"""Methods that leave all as it is but some rows, and the argument that says which."""
_SAME = frozenset("view reshape flatten squeeze unsqueeze bool clone contiguous ravel".split())  # noqa: SIM905
_PLACES = frozenset("where nonzero argwhere".split())  # noqa: SIM905
_TRUTHS = frozenset({"any", "sum"})


def skips(tree: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
    """The tests of a file that ask whether there are rows to work on, and how each goes where there are."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        for loop in ast.walk(function):
            if isinstance(loop, ast.For) and not loop.orelse:
                yield from _of_loop(function, loop)


def _of_loop(function: ast.FunctionDef, loop: ast.For) -> Iterator[tuple[ast.expr, bool]]:
    for at, statement in enumerate(loop.body):
        asked = _asked(statement.test) if isinstance(statement, ast.If) and not statement.orelse else None
        if asked is None or not isinstance(statement, ast.If):
            continue
        subject, of_truths, answer = asked
        leaves = len(statement.body) == 1 and isinstance(statement.body[0], ast.Continue)
        part = loop.body[at + 1 :] if leaves else statement.body
        if answer is not leaves and _Part(function, loop, part, subject, of_truths=of_truths).does_nothing():
            yield statement.test, answer


def _asked(test: ast.expr) -> tuple[str, bool, bool] | None:
    """Of what a test asks whether it has rows, or (true) holds anywhere, and its answer where that is so."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            found = _asked(inner)
            return None if found is None else (*found[:2], not found[2])
        case ast.Compare(left=left, ops=[ast.Eq()], comparators=[ast.Constant(value=0)]):
            answer = False
        case ast.Compare(left=left, ops=[ast.Gt() | ast.NotEq()], comparators=[ast.Constant(value=0)]):
            answer = True
        case _:
            left, answer = test, True
    counted = _counted(left)
    return None if counted is None else (*counted, answer)


def _counted(number: ast.expr) -> tuple[str, bool] | None:
    """Whose size, or (true) number of true elements, it is."""
    match number:
        case ast.Call(func=ast.Attribute(value=inner, attr="item"), args=[]):
            return _counted(inner)
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=what), args=[], keywords=[]):
            return (name, what in _TRUTHS) if what in _TRUTHS | {"numel"} else None
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="size"), args=[ast.Constant(value=0)]):
            return name, False
        case ast.Subscript(value=ast.Attribute(value=ast.Name(id=name), attr="shape"), slice=ast.Constant(value=0)):
            return name, False
    return None


class _Part:
    """A part of a loop, and the names of what selects no rows where the ``subject`` of its test has none."""

    def __init__(
        self, function: ast.FunctionDef, loop: ast.For, part: Sequence[ast.stmt], subject: str, *, of_truths: bool
    ) -> None:
        self._part = part
        shared = any(isinstance(node, ast.Global | ast.Nonlocal) for node in ast.walk(function))
        inside = {id(node) for statement in part for node in ast.walk(statement)}
        names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
        self._read_outside = {x.id for x in names if isinstance(x.ctx, ast.Load) and id(x) not in inside}
        stored = [x.id for x in names if isinstance(x.ctx, ast.Store)]
        once = {name for name in stored if stored.count(name) == 1}
        assigned = [one for one in ast.walk(loop) if isinstance(one, ast.Assign) and len(one.targets) == 1]
        values = {name: one.value for one in assigned for name in _names(one.targets) or () if name in once}
        known = not shared and subject in once and (not of_truths or _is_truth(values.get(subject), values))
        self._rows = {subject} if known else set()
        match values.get(subject):
            case ast.Subscript(value=ast.Name(), slice=ast.Name(id=chosen)) if not of_truths:  # rows = x[chosen]
                self._rows |= {chosen} & once if known else set()
        for _ in assigned:
            for one in assigned:
                self._rows |= _related(one, self._rows) & once

    def does_nothing(self) -> bool:
        """Whether all that it leaves behind is put where there are rows."""
        left, kept = self._own(), set[str]()
        for statement in self._part:
            read = {x.id for x in ast.walk(statement) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load)}
            if (read & left) - kept:  # of the loop's last round
                return False
            if not self._is_put(statement):
                own = _names(statement.targets) if isinstance(statement, ast.Assign) else None
                if own is None or not isinstance(statement, ast.Assign) or not _is_pure(statement.value):
                    return False
                kept |= own
        return bool(self._rows) and bool(self._part) and not left & self._read_outside

    def _own(self) -> set[str]:
        """Names that the part gives values, but those that it puts rows into."""
        plain = [one for one in self._part if isinstance(one, ast.Assign) and not self._is_put(one)]
        return {name for one in plain for name in _names(one.targets) or ()}

    def _is_put(self, statement: ast.stmt) -> bool:
        """Whether it puts rows somewhere, and does nothing else."""
        match statement:
            case ast.Assign(targets=[ast.Subscript(value=ast.Name(), slice=where)], value=value):
                return self._is_of_rows(where) and _is_pure(value)
            case ast.AugAssign(target=ast.Subscript(value=ast.Name(), slice=where), value=value):
                return self._is_of_rows(where) and _is_pure(value)
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(), attr=attr), args=args)):
                return attr.endswith("_") and self._is_placed(attr, args)
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(func=ast.Attribute(value=ast.Name(id=of), attr=attr), args=args),
            ):
                return name == of and not attr.endswith("_") and self._is_placed(attr, args)
        return False

    def _is_placed(self, attr: str, args: Sequence[ast.expr]) -> bool:
        at = _PLACED.get(attr)
        return at is not None and len(args) > at and self._is_of_rows(args[at]) and all(map(_is_pure, args))

    def _is_of_rows(self, where: ast.expr) -> bool:
        """Whether an index is of rows alone: names of them, with whole dims behind."""
        parts = where.elts if isinstance(where, ast.Tuple) else [where]
        behind = [part for part in parts if not (isinstance(part, ast.Name) and part.id in self._rows)]
        whole = all(isinstance(x, ast.Slice) and not (x.lower or x.upper or x.step) for x in behind)
        return len(behind) < len(parts) and whole


def _names(targets: Sequence[ast.expr]) -> set[str] | None:
    """Names that are given values; None if anything else is."""
    parts = [x for one in targets for x in (one.elts if isinstance(one, ast.Tuple) else [one])]
    return {x.id for x in parts if isinstance(x, ast.Name)} if all(isinstance(x, ast.Name) for x in parts) else None


def _is_pure(value: ast.expr) -> bool:
    """Whether it changes nothing by a method or function of torch, whose names say so."""
    return not any(
        isinstance(node, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom)
        or (isinstance(node, ast.Attribute) and node.attr.endswith("_") and not node.attr.startswith("_"))
        for node in ast.walk(value)
    )


def _is_truth(value: ast.expr | None, values: Mapping[str, ast.expr], depth: int = 4) -> bool:
    """Whether its text says that an expression is a mask: a comparison, or another form of one."""
    match value:
        case ast.Compare():
            return True
        case ast.Name(id=name):
            return depth > 0 and _is_truth(values.get(name), values, depth - 1)
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="eq")):
            return True
        case ast.Call(func=ast.Attribute(value=inner, attr=attr)):
            return attr in ("any", "eq", "bool") or (attr in _SAME and _is_truth(inner, values, depth))
    return False


def _related(assigned: ast.Assign, rows: set[str]) -> set[str]:
    """Names that select nothing where ``rows`` do: made of such, or such are made of them."""
    targets, (base, is_of_places, is_cut) = _names(assigned.targets) or set(), _base(assigned.value)
    if base is None and not is_of_places:
        return set()
    found = {base} & rows or (targets & rows if not is_cut else set())
    return ({*targets, base} if not is_cut else targets) - {None} if found else set()  # type: ignore[return-value]


def _base(value: ast.expr) -> tuple[str | None, bool, bool]:
    """Of what it is another form, if that has a name; whether places are, and whether elements are left out."""
    match value:
        case ast.Name(id=name):
            return name, False, False
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=attr), args=[inner]) if attr in _PLACES:
            return _base(inner)[0], True, _base(inner)[2]
        case ast.Call(func=ast.Attribute(value=inner, attr=attr)) if attr in _SAME | _PLACES:
            base, places, is_cut = _base(inner)
            return base, places or attr in _PLACES, is_cut
        case ast.Subscript(value=inner):
            base, places, _ = _base(inner)
            return base, places, True
    return None, False, False

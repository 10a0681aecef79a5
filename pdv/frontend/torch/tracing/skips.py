"""Parts of loops that are left out where they would work on no rows. Entry points: ``skips``, ``Part``.

``if top_x.shape[0] == 0: continue`` and ``if mask.any(): out[mask] += expert(x[mask])`` spare a loop over experts those
that no row chose. Without rows such a part does nothing: programs always run it, if all that it leaves behind is put
where there are rows. That is read off its text, and anything else is no such part.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

_PLACED = {"index_add_": 1, "index_add": 1, "scatter_add_": 1, "index_copy_": 1, "index_put_": 0, "index_put": 0}
"""Methods that leave all as it is but some rows, and the argument that says which."""
SAME = frozenset("view reshape flatten squeeze unsqueeze bool clone contiguous ravel".split())  # noqa: SIM905
PLACES = frozenset("where nonzero argwhere".split())  # noqa: SIM905
TRUTHS = frozenset({"any", "sum"})


def skips(tree: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
    """The tests of a file that ask whether there are rows to work on, and how each goes where there are.

    And counts of rows of which such tests alone read (``counts = torch.bincount(selected).tolist()``), as true.
    """
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        loops = [loop for loop in ast.walk(function) if isinstance(loop, ast.For) and not loop.orelse]
        found = [one for loop in loops for one in _of_loop(function, loop)]
        yield from found
        read = {id(node) for test, _ in found for node in ast.walk(test)}
        for one in ast.walk(function):
            if isinstance(one, ast.Assign) and _counts_of(one.value) and (names := names_of(one.targets)):
                loads = [x for x in ast.walk(function) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load)]
                if all(id(x) in read for x in loads if x.id in names):
                    yield one.value, True


@dataclass(frozen=True)
class _Asked:
    """Whether something has rows, or (``of_truths``) holds anywhere; of ``number``, if it counts rows by number."""

    name: str
    answer: bool = True
    of_truths: bool = False
    number: str = ""


def _of_loop(function: ast.FunctionDef, loop: ast.For) -> Iterator[tuple[ast.expr, bool]]:
    for at, statement in enumerate(loop.body):
        asked = _asked(statement.test) if isinstance(statement, ast.If) and not statement.orelse else None
        if asked is None or not isinstance(statement, ast.If):
            continue
        leaves = len(statement.body) == 1 and isinstance(statement.body[0], ast.Continue)
        part = loop.body[at + 1 :] if leaves else statement.body
        first = partial(_first, function=function, asked=asked)
        if asked.answer is not leaves and Part(function, loop, part, first).does_nothing():
            yield statement.test, asked.answer


def _asked(test: ast.expr) -> _Asked | None:
    """What a test asks, with its answer where there are rows."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            found = _asked(inner)
            return None if found is None else replace(found, answer=not found.answer)
        case ast.Compare(left=left, ops=[ast.Eq()], comparators=[ast.Constant(value=0)]):
            answer = False
        case ast.Compare(left=left, ops=[ast.Gt() | ast.NotEq()], comparators=[ast.Constant(value=0)]):
            answer = True
        case _:
            left, answer = test, True
    counted = _counted(left)
    return None if counted is None else replace(counted, answer=answer)


def _counted(number: ast.expr) -> _Asked | None:
    """Whose size, or number of true elements, it is."""
    match number:
        case ast.Call(func=ast.Attribute(value=inner, attr="item"), args=[]):
            return _counted(inner)
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=what), args=[], keywords=[]):
            return _Asked(name, of_truths=what in TRUTHS) if what in TRUTHS | {"numel"} else None
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="size"), args=[ast.Constant(value=0)]):
            return _Asked(name)
        case ast.Subscript(value=ast.Attribute(value=ast.Name(id=name), attr="shape"), slice=ast.Constant(value=0)):
            return _Asked(name)
        case ast.Subscript(value=ast.Name(id=name), slice=ast.Name(id=one)):
            return _Asked(name, number=one)
    return None


class Part:
    """A part of a loop, and the names of what selects no rows in a case: ``first``, and what is made of these.

    first: of what the loop assigns, and the names that have one value.
    """

    def __init__(
        self,
        function: ast.FunctionDef,
        loop: ast.For,
        part: Sequence[ast.stmt],
        first: Callable[[Sequence[ast.Assign], set[str]], set[str]],
    ) -> None:
        self._part, self._target = part, names_of([loop.target]) or set()
        shared = any(isinstance(node, ast.Global | ast.Nonlocal) for node in ast.walk(function))
        inside = {id(node) for statement in part for node in ast.walk(statement)}
        names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
        self._read_outside = {x.id for x in names if isinstance(x.ctx, ast.Load) and id(x) not in inside}
        stored = [x.id for x in names if isinstance(x.ctx, ast.Store)]
        once = {name for name in stored if stored.count(name) == 1} - written_in(function)
        assigned = [one for one in ast.walk(loop) if isinstance(one, ast.Assign) and len(one.targets) == 1]
        self._rows = set() if shared else first(assigned, once) & once
        for _ in assigned:
            for one in assigned:
                self._rows |= _related(one, self._rows) & once

    def does_nothing(self, *, of_loop: bool = False) -> bool:
        """Whether all that it leaves behind is put where there are rows; of_loop: it is all that the loop does."""
        left = self._own() | (self._target if of_loop else set())
        kept = self._kept(self._part, left, self._target)
        return kept is not None and bool(self._rows) and bool(self._part) and not left & self._read_outside

    def _kept(self, part: Sequence[ast.stmt], left: set[str], kept: set[str]) -> set[str] | None:
        """Names that have values of this round behind a part, of those that have before it.

        None if the part does more than to give names values, and to put rows somewhere.
        """
        for statement in part:
            read_of: ast.AST = statement.test if isinstance(statement, ast.If) else statement
            read = {x.id for x in ast.walk(read_of) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load)}
            if (read & left) - kept:  # of the loop's last round
                return None
            if isinstance(statement, ast.If):
                ways = [self._kept(each, left, kept) for each in (statement.body, statement.orelse)]
                if not _is_pure(statement.test) or ways[0] is None or ways[1] is None:
                    return None
                kept = kept | (ways[0] & ways[1])
            elif not isinstance(statement, ast.Continue) and not self._is_put(statement):
                own = names_of(statement.targets) if isinstance(statement, ast.Assign) else None
                if own is None or not isinstance(statement, ast.Assign) or not _is_pure(statement.value):
                    return None
                kept = kept | own
        return kept

    def _own(self) -> set[str]:
        """Names that the part gives values, but those that it puts rows into."""
        all_of = [one for statement in self._part for one in ast.walk(statement)]
        plain = [one for one in all_of if isinstance(one, ast.Assign) and not self._is_put(one)]
        return {name for one in plain for name in names_of(one.targets) or ()}

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


def _first(assigned: Sequence[ast.Assign], once: set[str], function: ast.FunctionDef, asked: _Asked) -> set[str]:
    """Names that select no rows where what is asked has none, as the test itself says."""
    values = {name: one.value for one in assigned for name in names_of(one.targets) or () if name in once}
    if asked.number:
        counts = [one for one in ast.walk(function) if isinstance(one, ast.Assign) and _counts_of(one.value)]
        of = {_counts_of(one.value) for one in counts if names_of(one.targets) == {asked.name}}
        if asked.name not in once or asked.number not in once or len(of) != 1 or not of <= once:
            return set()
        pair = (next(iter(of)), asked.number)
        return {name for name, value in values.items() if _compared(value) == pair}
    value = values.get(asked.name)
    if asked.name not in once or (asked.of_truths and not is_truth(value, values)):
        return set()
    match value:
        case ast.Subscript(value=ast.Name(), slice=ast.Name(id=chosen)) if not asked.of_truths:  # rows = x[chosen]
            return {asked.name, chosen}
    return {asked.name}


def _counts_of(value: ast.expr) -> str:
    """Of what it counts how often each number is there, as a list; empty if it is none such."""
    match value:
        case ast.Call(func=ast.Attribute(value=ast.Call(func=function, args=[inner]) as counts, attr="tolist")):
            plain = ast.unparse(function) == "torch.bincount" and all(x.arg == "minlength" for x in counts.keywords)
            base, places, is_cut = _base(inner)
            return base if plain and base and not places and not is_cut else ""
    return ""


def _compared(value: ast.expr) -> tuple[str, str] | None:
    """The names of which it says where the first equals the second."""
    match value:
        case ast.Compare(left=ast.Name(id=one), ops=[ast.Eq()], comparators=[ast.Name(id=other)]):
            return one, other
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=attr), args=[inner]) if attr in PLACES:
            return _compared(inner)
        case ast.Call(func=ast.Attribute(value=inner, attr=attr)) if attr in SAME | PLACES | {"any"}:
            return _compared(inner)
    return None


def written_in(function: ast.FunctionDef) -> set[str]:
    """Names of what is written into."""
    found: list[ast.expr] = []
    for node in ast.walk(function):
        if isinstance(node, ast.Subscript | ast.Attribute):
            named = isinstance(node, ast.Attribute) and node.attr.endswith("_")
            found += [node.value] * (named or not isinstance(node.ctx, ast.Load))
    return {node.id for node in found if isinstance(node, ast.Name)}


def names_of(targets: Sequence[ast.expr]) -> set[str] | None:
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


def is_truth(value: ast.expr | None, values: Mapping[str, ast.expr], depth: int = 4) -> bool:
    """Whether its text says that an expression is a mask: a comparison, or another form of one."""
    match value:
        case ast.Compare():
            return True
        case ast.Name(id=name):
            return depth > 0 and is_truth(values.get(name), values, depth - 1)
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="eq")):
            return True
        case ast.Call(func=ast.Attribute(value=inner, attr=attr)):
            return attr in ("any", "eq", "bool") or (attr in SAME and is_truth(inner, values, depth))
    return False


def _related(assigned: ast.Assign, rows: set[str]) -> set[str]:
    """Names that select nothing where ``rows`` do: made of such, or such are made of them."""
    targets, (base, is_of_places, is_cut) = names_of(assigned.targets) or set(), _base(assigned.value)
    if base is None and not is_of_places:
        return set()
    found = {base} & rows or (targets & rows if not is_cut else set())
    return ({*targets, base} if not is_cut else targets) - {None} if found else set()  # type: ignore[return-value]


def _base(value: ast.expr) -> tuple[str | None, bool, bool]:
    """Of what it is another form, if that has a name; whether places are, and whether elements are left out."""
    match value:
        case ast.Name(id=name):
            return name, False, False
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=attr), args=[inner]) if attr in PLACES:
            return _base(inner)[0], True, _base(inner)[2]
        case ast.Call(func=ast.Attribute(value=inner, attr=attr)) if attr in SAME | PLACES:
            base, places, is_cut = _base(inner)
            return base, places or attr in PLACES, is_cut
        case ast.Subscript(value=inner):
            base, places, _ = _base(inner)
            return base, places, True
    return None, False, False

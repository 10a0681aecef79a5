"""Checks of values that end in an error, or spare work on no rows, while a module is exported. Entry point: ``Guards``.

``if labels.max() >= classes: raise ValueError(…)`` and ``assert (weights > 0).all()`` ask values that tracing has not.
Of a call that ends well the answer is known all the same: no error is raised. Programs go that way, and check nothing;
that the module does not raise on the example inputs is seen where it is run itself. What spares a loop work on no rows
(``skips``) is asked likewise, of sizes too: programs do that work. Loops over experts that some row chose go over all.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import PurePath
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from pdv.frontend.torch.tracing.hits import hits
from pdv.frontend.torch.tracing.skips import skips

_Span = tuple[int, int, int, int]  # line, column, and where it ends: line, column
_SAID, _LOOKED_AT = 3, 2
_LEAVES = (ast.Return, ast.Break, ast.Continue)
_FORMS = frozenset("nonzero argwhere squeeze flatten view reshape".split())  # noqa: SIM905
_SAME_ELEMENTS = frozenset(
    "squeeze unsqueeze flatten view reshape permute transpose contiguous clone detach long int bool float to".split()  # noqa: SIM905
)
_PRODUCTS = frozenset({"mul", "__mul__", "__rmul__", "multiply"})


class Guards(TorchFunctionMode):
    """In this mode questions of a check that may raise are answered so that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.met: dict[str, None] = {}
        """Where such checks stand: ``file.py:7``."""
        self.skipped: dict[str, None] = {}
        """Where work on no rows is spared."""
        self._numbers: MutableMapping[torch.Tensor, int] = WeakIdKeyDictionary()
        """Of the numbers of those rows in which something holds, how many rows there are."""
        self._hot: MutableMapping[torch.Tensor, None] = WeakIdKeyDictionary()
        """Tensors of zeros and ones, of which sums count the ones."""
        self._number: MutableMapping[torch.Tensor, int] = WeakIdKeyDictionary()
        """Of the number that a loop over all rows is at, in any form, which it is: names are made of it."""

    def notes(self) -> tuple[str, ...]:
        """What the program leaves out, in words."""
        told = {
            "Not checked by the program: values by which the module raises an error": self.met,
            "Experts that no row chooses have gradients of zero, where the module leaves them out and has none (AdamW "
            "lets their weights decay)": self.skipped,
        }
        places = {what: ", ".join([*met][:_SAID]) + ", …" * (len(met) > _SAID) for what, met in told.items()}
        return tuple(f"{what} (at {where})" for what, where in places.items() if where)

    @contextmanager
    def of_sizes(self) -> Iterator[None]:
        """While this lasts, questions about sizes and counts of rows that depend on values are answered, too."""
        symbols: tuple[Any, ...] = (torch.SymBool, torch.SymInt)  # Any: classes of torch, whose methods are replaced
        tensors: tuple[Any, ...] = (FunctionalTensor, FakeTensor)
        before = [one.__bool__ for one in symbols], [one.tolist for one in tensors]

        def answering(ask: Callable[[Any], Any]) -> Callable[[Any], Any]:  # Any: of symbols or tensors what they give
            def asked(x: Any) -> Any:
                known = isinstance(x, symbols) and x.node.has_hint()
                found = None if known else _asking(sys._getframe(1))  # noqa: SLF001
                if found is None or not found[2]:
                    return ask(x)
                answer = self._noted(*found)
                return answer if isinstance(x, symbols) else _Counts()

            return asked

        def use(of_symbols: Iterable[Callable[[Any], Any]], of_tensors: Iterable[Callable[[Any], Any]]) -> None:
            for one, function in zip(symbols, of_symbols, strict=True):
                one.__bool__ = function
            for one, function in zip(tensors, of_tensors, strict=True):
                one.tolist = function

        use(map(answering, before[0]), map(answering, before[1]))
        try:
            yield
        finally:
            use(*before)

    def _noted(self, answer: bool, where: str, spares: bool) -> bool:
        (self.skipped if spares else self.met)[where] = None
        return answer

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # Any: torch's
        del types
        name: str = getattr(function, "__name__", "")
        if name in ("__bool__", "item") and (found := _asking(sys._getframe(1))) is not None:  # noqa: SLF001
            answer = self._noted(*found)
            return answer if name == "__bool__" else _Number(answer)
        if name in ("__iter__", "unbind") and (where := self._hit(args[0], sys._getframe(1))):  # noqa: SLF001
            self.skipped[where] = None
            return iter(self._all(self._numbers[args[0]], args[0].dim()))
        if name == "__format__" and isinstance(args[0], torch.Tensor) and args[0] in self._number:
            return format(self._number[args[0]], *args[1:])
        result = function(*args, **(kwargs or {}))
        given = [x for x in args if isinstance(x, torch.Tensor)]
        if name in _FORMS and isinstance(result, torch.Tensor) and given:
            self._note_numbers(result, given[0])
        if (name == "__getitem__" or name in _FORMS) and given and given[0] in self._number:
            self._number[result] = self._number[given[0]]
        kept = name in _SAME_ELEMENTS or (name in _PRODUCTS and len(given) == len(args))
        if isinstance(result, torch.Tensor) and (name == "one_hot" or (kept and all(map(self._is_hot, given)))):
            self._hot[result] = None
        return result

    def _all(self, count: int, rank: int) -> Sequence[torch.Tensor]:
        """The numbers of so many rows, [] or [1] each."""
        with _disable_current_modes():  # constants, as any that a module makes of numbers
            found = torch.arange(count).reshape(-1, *[1] * (rank - 1)).unbind()
        self._number.update(zip(found, range(count), strict=True))
        return found

    def _is_hot(self, x: Any) -> bool:  # Any: whatever has the name of a mask
        return isinstance(x, torch.Tensor) and (x.dtype == torch.bool or x in self._hot)

    def _hit(self, numbers: Any, frame: FrameType | None) -> str:  # Any: a tensor
        """Where a loop stands that goes over the numbers of rows in which something holds, and may go over all."""
        is_known = isinstance(numbers, torch.Tensor) and numbers in self._numbers
        return _looping(frame, self._is_hot) if is_known else ""

    def _note_numbers(self, x: torch.Tensor, of: torch.Tensor) -> None:
        """That a tensor has the numbers of rows, [n] or [n, 1], if it is where another holds, or a form of such."""
        is_list = x.dim() in (1, 2) and isinstance(x.size(0), torch.SymInt) and x.shape[1:] in ((), (1,))
        count = self._numbers.get(of, int(of.size(0)) if of.dim() == 1 and isinstance(of.size(0), int) else None)
        if is_list and count is not None:
            self._numbers[x] = count


class _Counts:
    """How many rows there are of each number, of which all that is asked is whether there are any."""

    def __getitem__(self, number: int) -> int:
        return 1


class _Number:
    """A number of which all that is asked has one answer."""

    def __init__(self, answer: bool) -> None:  # its only part
        self._answer = answer

    def __bool__(self) -> bool:
        return self._answer

    def _same(self, *_: object) -> Any:  # Any: such a number
        return self

    def _asked(self, _: object) -> bool:
        return self._answer

    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _asked
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __abs__ = __neg__ = _same
    __hash__ = None  # type: ignore[assignment]


def _asking(frame: FrameType | None) -> tuple[bool, str, bool] | None:
    """How the check that asks goes on without an error, where it stands, and whether it spares work on no rows.

    None if it is no such check.
    """
    while frame is not None and frame.f_code.co_name == "__torch_function__":  # other modes, that of torch.export
        frame = frame.f_back
    if frame is None:
        return None
    name = frame.f_code.co_filename
    raising, spared = _checks(name, tuple(linecache.getlines(name, frame.f_globals)))
    tests = {**raising, **spared}
    for span in _spans(frame):
        for test, wanted in tests.items():
            if (answer := _answer(test, span, wanted=wanted)) is not None:
                return answer, f"{PurePath(name).name}:{test.lineno}", test in spared
    return None


def _looping(frame: FrameType | None, is_hot: Callable[[Any], bool]) -> str:  # Any: as above
    """Where a loop stands that may go over all rows, if one asks; else empty. is_hot: whether it is zeros and ones."""
    while frame is not None and frame.f_code.co_name in ("__torch_function__", "__iter__"):
        frame = frame.f_back
    if frame is None:
        return ""
    name = frame.f_code.co_filename
    over = _loops(name, tuple(linecache.getlines(name, frame.f_globals)))
    known = {one: not mask or is_hot(frame.f_locals.get(mask)) for one, mask in over}
    found = (one for span in _spans(frame) for one, is_known in known.items() if is_known and _holds(one, span))
    return next((f"{PurePath(name).name}:{one.lineno}" for one in found), "")


def _spans(frame: FrameType) -> Iterator[_Span]:
    """Where it asks, and what was computed right before: ``not`` and ``assert`` ask as whole statements."""
    told: list[_Span] = []
    for line, end, column, last in reversed([*frame.f_code.co_positions()][: frame.f_lasti // 2 + 1]):
        if line is None or end is None or column is None or last is None:  # python -X no_debug_ranges
            continue
        span = (line, column, end, last)
        if span not in told:
            told.append(span)
            yield span
        if len(told) == _LOOKED_AT:
            return


def _answer(test: ast.expr, span: _Span, *, wanted: bool) -> bool | None:
    """What the part of a test at ``span`` is to be, so that the test is as ``wanted``; None if it is not in there."""
    if not _holds(test, span):
        return None
    inner = next((one for one in ast.iter_child_nodes(test) if isinstance(one, ast.expr) and _holds(one, span)), None)
    if isinstance(test, ast.Lambda | ast.IfExp) or inner is None:
        return wanted if inner is None else None
    denied = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
    return _answer(inner, span, wanted=wanted is not denied)


def _holds(node: ast.expr, span: _Span) -> bool:
    starts = (node.lineno, node.col_offset) <= span[:2]
    return starts and span[2:] <= (node.end_lineno or 0, node.end_col_offset or 0)


@lru_cache(maxsize=256)
def _checks(name: str, lines: Sequence[str]) -> tuple[Mapping[ast.expr, bool], Mapping[ast.expr, bool]]:
    """Of a file the tests that decide about an error alone, or about work on no rows, and how each goes."""
    del name
    try:
        tree = ast.parse("".join(lines))
        return dict(_tests(tree)), dict(skips(tree))
    except (SyntaxError, ValueError):  # of a notebook's cell with commands of its own
        return {}, {}


@lru_cache(maxsize=256)
def _loops(name: str, lines: Sequence[str]) -> Sequence[tuple[ast.expr, str]]:
    """Of a file what loops go over that may go over all rows, if what has the name is of zeros and ones."""
    del name
    try:
        return tuple(hits(ast.parse("".join(lines))))
    except (SyntaxError, ValueError):
        return ()


def _tests(tree: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
    """Not those whose error the code itself may catch, and go on."""
    caught = {
        id(node)
        for attempt in ast.walk(tree)
        if isinstance(attempt, ast.Try) and attempt.handlers
        for statement in attempt.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in caught:
            continue
        if isinstance(node, ast.Assert):
            yield node.test, True
        elif isinstance(node, ast.If) and _raises(node.body):
            yield node.test, False
        elif isinstance(node, ast.If) and _raises(node.orelse):
            yield node.test, True


def _raises(body: Sequence[ast.stmt]) -> bool:
    """Whether it ends in an error whatever it does before."""
    left = any(isinstance(one, _LEAVES) for statement in body for one in ast.walk(statement))
    return bool(body) and isinstance(body[-1], ast.Raise) and not left

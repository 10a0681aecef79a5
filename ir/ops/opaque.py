"""A function of another library, run as it is: it is known what it gives, not how.

A proof takes it as any function whatever: equal operands, equal results, and gradients that are another such function.
It is whole in all dims, unless loops are declared that it goes along row by row: then it is any function of a row.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np

from ir import dims
from ir.dims import Dims, Shape
from ir.emission.code import Code, call
from ir.emission.writing import Writing
from ir.errors import ShapeError
from ir.evaluation.bounds import of_torch
from ir.graph import Node
from ir.operator import Attrs, Operator
from ir.scaling.ties import Loops, Ties, where
from ir.tape import Call, Known, Tape
from ir.types import DType

MOST_OPERANDS = 64
_OPERAND = re.compile(r"\{(\d+)\}")


@dataclass(frozen=True, slots=True)
class Foreign:
    """A call of a function that another library has.

    Attributes:
        function: its name there, as Python reads it: ``torch.ops.aten.sort.stable``.
        arguments: as they stand in the call, operands by number: ``{0}, stable=True, dim=-1``.
        output: which of its results is taken; -1 where it gives one.
        types: of each operand, its own; all floats are ``float64``.
    """

    function: str
    arguments: str
    output: int
    types: tuple[str, ...]


Run = Callable[
    [Foreign, Sequence[Any], Sequence[bool]], tuple[Any, Callable[[Any], Sequence[Any]]]
]  # Any: NumPy arrays
"""Calls a function on arrays, given which of them need gradients: its result, and the gradients of all of them."""


def _loops(shapes: Sequence[Shape], attrs: Attrs) -> tuple[str, dict[str, int]]:
    """As declared, else each dim a loop of its own, whole; sizes that no operand has are the attribute's."""
    sizes = cast(Shape, attrs["sizes"])
    if attrs["loops"] == "":
        text = ", ".join(" ".join(f"x{n}_{i}*" for i in range(len(shape))) for n, shape in enumerate(shapes))
        return f"{text} -> {' '.join(f'y{i}*' for i in range(len(sizes)))}", {f"y{i}": n for i, n in enumerate(sizes)}
    text = str(attrs["loops"])
    notation = dims.parse(text)
    known = {loop for operand in notation.operands for group in operand for loop in group}
    last = dict(zip(reversed(notation.result), reversed(sizes), strict=False))
    return text, {group[0]: size for group, size in last.items() if len(group) == 1 and group[0] not in known}


def check_loops(text: str, arity: int | None) -> None:
    """Loops that a function about which nothing is known may have.

    Raises:
        ShapeError: if they cannot be read, are of another number of operands, or ask for sums.
    """
    try:
        notation = dims.parse(text)
    except ValueError as error:
        raise ShapeError(f"loops {text!r} cannot be read: {error}", "... d*, d* -> ... d*") from None
    if arity is not None and len(notation.operands) != arity:
        raise ShapeError(f"loops {text!r} are of {len(notation.operands)} operands", f"The function takes {arity}")
    result = {loop for group in notation.result for loop in group}
    operands = {loop for operand in notation.operands for group in operand for loop in group}
    if apart := sorted((result ^ operands) - notation.whole):
        raise ShapeError(
            f"loops {text!r}: {', '.join(apart)} may be cut, and is not in both the operands and the result",
            "Loops that operands and result have, or whole ones (with a *)",
            "Write a * behind it",
        )
    if any(len(group) > 1 for each in (*notation.operands, notation.result) for group in each):
        raise ShapeError(f"loops {text!r} have dims of several loops", "One loop for each dim")


def _dtype(operands: Sequence[DType], attrs: Attrs) -> DType:
    """That of an operand by number, or a name."""
    given = str(attrs["gives"])
    return operands[int(given)] if given.isdigit() else DType(given)


def _evaluate(t: Tape, operands: Sequence[Any], c: Call) -> Any:  # Any: arrays of the tape's field
    is_floating = DType(_given(c.attrs)).is_floating
    if t.foreign is not None:
        kinds = tuple("float64" if dtype.is_floating else dtype.torch_name for dtype in c.dtypes)
        foreign = Foreign(str(c.attrs["function"]), str(c.attrs["arguments"]), int(c.attrs["output"]), kinds)
        if not is_floating and all(isinstance(x, np.ndarray) for x in operands):  # floats do not hold all integers
            return _run(t.foreign, foreign, operands, [False] * len(operands))[0]
        y = t.joint(Known(foreign.function, partial(_run, t.foreign, foreign)), operands)
    else:
        y = _random(t, operands, c)
    if is_floating:
        return y
    found = t.whole(f"{_name(c.attrs)} is", np.rint, y)
    return found.astype(bool) if _given(c.attrs) == "bool" else np.asarray(found).astype(np.int64)


def _run(
    run: Run, foreign: Foreign, operands: Sequence[Any], tracked: Sequence[bool]
) -> tuple[Any, Callable[[Any], Sequence[Any]]]:
    """The function itself of each rank's operands, and the gradients of these."""
    found = [run(foreign, [x[world] for x in operands], tracked) for world in range(len(operands[0]))]

    def pull(g: Any) -> Sequence[Any]:
        each = [pullback(own) for own, (_, pullback) in zip(g, found, strict=True)]
        return [np.stack(parts) for parts in zip(*each, strict=True)]

    return np.stack([y for y, _ in found]), pull


def _random(t: Tape, operands: Sequence[Any], c: Call) -> Any:
    """Any function whatever of each row: a number for the row, and of that another for each place of the result."""
    nest, name = c.loops, _name(c.attrs)
    rows = tuple(loop for group in nest.result for loop in group if loop not in nest.whole)
    sizes = tuple(nest.extents[loop] for loop in rows)
    flat = [_flat(t, x, groups, rows, sizes) for x, groups in zip(operands, nest.operands, strict=True)]
    number = t.row_reduce(Known(name, _unknown), t.concat(flat, len(rows)))
    inner = [group[0] for group in nest.result if group[0] not in rows]
    inner_sizes = tuple(nest.extents[loop] for loop in inner)
    count = math.prod(inner_sizes)
    places = np.broadcast_to(np.arange(count), (number.shape[0], *sizes, count))
    each = t.unary(Known(f"{name} at", _unknown), t.add(t.expand(number, (*sizes, count)), places))
    order = [*rows, *inner]
    return t.transpose(t.reshape(each, (*sizes, *inner_sizes)), [order.index(group[0]) for group in nest.result])


def _flat(t: Tape, x: Any, groups: Dims, rows: tuple[str, ...], sizes: Shape) -> Any:
    """[*rows, all other dims in one]: repeated along the rows that an operand lacks."""
    own = [group[0] if group else "" for group in groups]
    lead = [own.index(loop) for loop in rows if loop in own]
    moved = t.transpose(x, [*lead, *(i for i in range(len(own)) if i not in lead)])
    count = math.prod(moved.shape[1 + len(lead) :])
    own_sizes = tuple(size if loop in own else 1 for loop, size in zip(rows, sizes, strict=True))
    return t.expand(t.reshape(moved, (*own_sizes, count)), (*sizes, count))


def _unknown(x: Any) -> Any:
    raise AssertionError("a function of another library, evaluated where nobody can call it")


def _name(attrs: Attrs) -> str:
    return f"{attrs['function']}({attrs['arguments']})[{attrs['output']}]"


def _given(attrs: Attrs) -> str:
    """Of the result; where an operand's type is its own, floats."""
    given = str(attrs["gives"])
    return DType.F32.value if given.isdigit() else given


def _tie(node: Node, loops: Loops, ties: Ties) -> None:
    """A proof may take any sizes, the same in both programs; the function itself is called at its own alone."""
    whole = [name for name in loops if name in node.loops.whole]
    key: tuple[object, ...]
    if ties.are_open:
        key = (_name(node.attrs), tuple(x.type.shape for x in node.operands), node.type.shape)
        follow = {f"x{n}_0" for n in cast(Sequence[int], node.attr("follow"))}
        leading = [name for name in whole if follow and name in {"y0", *follow}]
        for name in leading:
            ties.share((*key, "leading"), loops[name])
        whole = [name for name in whole if name not in leading]
    if ties.are_open or ties.are_run:
        for name in whole:
            ties.keep(loops[name], f"{where(node)} ({node.attr('function')}) takes whole values of this size")
        return
    key = (_name(node.attrs), node.attr("loops"), tuple(x.type.shape for x in node.operands), node.type.shape)
    for name in whole:
        ties.share((*key, name), loops[name])


def _write(node: Node, x: Sequence[Code], writing: Writing) -> Code:
    """``torch.ops.aten.sort.stable(x, dim=-1)[1]``."""
    arguments = [_argument(text, x) for text in arguments_of(str(node.attr("arguments")))]
    code, output = call(str(node.attr("function")), *arguments), int(node.attr("output"))
    return code if output < 0 else Code(f"{code.text}[{output}]")


def arguments_of(text: str) -> list[str]:
    """The arguments of a call, apart: operands are sets of one number."""
    parsed = ast.parse(f"f({text})", mode="eval").body
    assert isinstance(parsed, ast.Call), text
    return [ast.unparse(each) for each in parsed.args] + [f"{k.arg}={ast.unparse(k.value)}" for k in parsed.keywords]


def _argument(text: str, x: Sequence[Code]) -> Code | str:
    whole = _OPERAND.fullmatch(text)
    return x[int(whole[1])] if whole else _OPERAND.sub(lambda found: x[int(found[1])].text, text)


def _work(loops: dims.Loops) -> float:
    """One operation for each element read or written: what it computes is unknown.

    But for weights that share whole dims with the first operand or the result, as those of a convolution do their
    channels: a multiplication and an addition for each element of that, and each of theirs with its channel.
    """
    first, result = loops.operands[0], loops.result
    found = float(sum(loops.size_of(groups) for groups in (*loops.operands, result)))
    for weights in loops.operands[1:]:
        own = {loop for group in weights for loop in group}
        for other in (first, result):
            if shared := own & {loop for group in other for loop in group} & loops.whole:
                size = math.prod(loops.extents[loop] for loop in shared)
                found += 2.0 * loops.size_of(other) * loops.size_of(weights) / size
    return found


opaque = Operator(
    "opaque",
    _loops,
    "row",
    attrs=("function", "arguments", "output", "loops", "sizes", "gives", "follow"),
    defaults={"loops": "", "output": -1, "follow": ()},
    result_dtype=_dtype,
    is_foreign=True,
    flops=_work,
    saved=tuple(range(MOST_OPERANDS)),
    ties=_tie,
    attrs_at=lambda node, operands, shape, are_open: {"sizes": shape},
    evaluate=_evaluate,
    emit=_write,
    between=of_torch,
    is_heavy=True,
)

OPS = (opaque,)

"""What the text of an operator may depend on besides its operands."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ir.emission.code import Code, binary, call, method, negative
from ir.graph import Node


@dataclass(frozen=True, kw_only=True)
class Writing:
    """Writes operators as they declare it; of itself, those of a program on one device whose sizes are known.

    Attributes:
        bias: to be added in the same call, if the node takes one.
        stages: the axis along which ranks run other parts of the program, if they do.
    """

    bias: Code | None = None
    stages: tuple[str, ...] = ()

    def write(self, node: Node, operands: Sequence[Code]) -> Code:
        """The expression of a node over its operands' expressions."""
        emit = node.op.emit
        code: Code = emit(node, operands, self) if callable(emit) else _template(emit, node, operands, self.bias)
        return code

    def cutting(self, node: Node, *loops: str) -> tuple[str, ...]:  # noqa: ARG002  # nothing is cut on one device
        """The axes that cut one of a node's loops, outer first."""
        return ()

    def is_open(self, node: Node, dim: int) -> bool:  # noqa: ARG002
        """True if the size of a dim is not the same in every run."""
        return False

    def left_open(self, node: Node, dims: Sequence[int]) -> int | None:  # noqa: ARG002
        """The dim whose size is best left to torch, one of all: an open one before any cut one."""
        return None

    def size(self, node: Node, dim: int, near: Sequence[tuple[Node, Code]] = ()) -> Code:  # noqa: ARG002
        """The size of a dim on one rank; ``near``: operands at hand, which tell it if they have a name."""
        return Code(str(node.type.shape[dim]))

    def count(self, node: Node, dims: Sequence[int]) -> Code:
        """The elements along some dims, over all ranks."""
        return Code(str(math.prod(node.type.shape[dim] for dim in dims)))


def _template(template: str, node: Node, x: Sequence[Code], bias: Code | None) -> Code:
    """The declared template: ``F.relu({0})`` or another call, ``{0}.pow({exponent})``, ``{0} + {1}`` or ``-{0}``."""
    named = {name: repr(value) for name, value in node.attrs.items()}
    if found := re.fullmatch(r"([\w.]+)\((.*)\)", template):
        arguments = [_argument(text, x, named) for text in found[2].split(", ")]
        return call(found[1], *arguments, *([bias] if bias else []))
    if found := re.fullmatch(r"\{0\}\.(\w+)\((.*)\)", template):
        return method(x[0], found[1], found[2].format(**named))
    if found := re.fullmatch(r"\{0\} (\S) \{1\}", template):
        return binary(x[0], found[1], x[1])
    assert template == "-{0}", f"{node.op.name} is written by no template: {template!r}"
    return negative(x[0])


def _argument(text: str, x: Sequence[Code], named: Mapping[str, str]) -> Code | str:
    place = re.fullmatch(r"\{(\d)\}", text)
    return x[int(place[1])] if place else text.format(**named)


def block_index(axes: Sequence[str]) -> str:
    """Which block of a dim cut by ``axes`` (outer first) this rank holds: ``dp.rank * tp.size + tp.rank``."""
    if not axes:
        return "0"
    text = f"{axes[0]}.rank"
    for axis in axes[1:]:
        text = f"{f'({text})' if '+' in text else text} * {axis}.size + {axis}.rank"
    return text


def block_count(axes: Sequence[str]) -> str:
    """Into how many blocks ``axes`` cut a dim: ``dp.size * tp.size``."""
    return " * ".join(f"{axis}.size" for axis in axes) or "1"

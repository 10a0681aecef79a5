"""Chunks that hold the same from moment to moment, whatever their layers are called.

Entry points: ``marks``; ``numbers``, where all are told apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence

from ir.graph import Node
from pdv.memory.passes import segments_of
from pdv.memory.setting import Setting, chain, of_weights
from pdv.pcg.units import gathered_units


def marks(setting: Setting) -> tuple[str, ...]:
    """By chunk, what its walk depends on: where marks are equal, of one workload or of two, walks are.

    Of what a framework runs each is its own: its walk asks for more.
    """
    if not setting.eager:
        return numbers(setting)
    work = setting.workload
    how = repr((work.execution, work.problem.train, work.problem.mesh))
    return tuple(_mark(setting, chunk, how) for chunk in setting.chunks)


def numbers(setting: Setting) -> tuple[str, ...]:
    """By chunk, a mark that no other one of its workload has."""
    return tuple(map(str, range(len(setting.chunks))))


def _mark(setting: Setting, chunk: Sequence[Node], how: str) -> str:
    """Of operators, local shapes, who reads what, and what runs again; ``how`` the step runs."""
    numbers: dict[Node, int] = {}
    units = gathered_units((operand for node in chunk for operand in node.operands), several=False)
    keys = {key: number for number, key in enumerate(dict.fromkeys(units.values()))}
    inside, returned = set(chunk), {node for _, node in setting.workload.pcg.outputs}
    users = setting.workload.pcg.users

    def number(node: Node) -> int:
        return numbers.setdefault(node, len(numbers))

    def read(operand: Node) -> Hashable:
        if operand in inside:
            return number(operand)
        steps = chain(operand) if of_weights(operand) else [operand]
        unit = keys[units[operand]] if operand in units else None
        return tuple((number(step), _of(setting, step)) for step in steps), unit

    found: list[Hashable] = [
        (
            _of(setting, node),
            node.needs_grad,
            setting.is_differentiated(node),
            node in returned,
            any(user not in inside and not user.is_leaf for user in users[node]),
            tuple(map(read, node.operands)),
            number(node),
        )
        for node in chunk
    ]
    found += [(len(one.nodes), one.recomputed, one.hosted) for one in segments_of(setting, chunk)]
    return hashlib.sha256((how + repr(found)).encode()).hexdigest()


def _of(setting: Setting, node: Node) -> Hashable:
    """A value by itself: what it is called does not matter."""
    what = node.signature
    if node.is_leaf:
        what = f"{node.attr('trainable')}, {bool(node.attr('regather'))}" if node.is_param else ""
    return node.op.name, what, str(node.type), setting.shape(node), node.needs_grad, node in setting.light

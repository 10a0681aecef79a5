"""What nothing hides of gradients' sums, in bounds: what they take of the compute beside them, and the last ones.

Entry points: `last_reader`, whose backward is the last, and `Exposed`, what sums add to a step at least.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ir.graph import Node
from ir.sharding import Invariant, Replicate, Sharding, local_bytes
from ir.types import TensorType
from pdv.cost.comm import AxisLink, all_gather_seconds, all_reduce_seconds, joint_link, reduce_scatter_seconds
from pdv.problem import Problem

Differing = tuple[tuple[int, bool], ...]
"""Axes whose ranks use a parameter differently, and of each whether the gradient is summed whole along it."""

SIZES = [2.0**power for power in range(10, 42, 2)]  # bytes of a bucket, among which is what a byte takes least in


def last_reader(ways: Iterable[Sequence[Node]]) -> Node | None:
    """The first node of a program that has a gradient, if that is the same in all ways to write its beginning."""
    firsts = {next((node for node in nodes if node.op.kernel and node.needs_grad), None) for nodes in ways}
    return firsts.pop() if len(firsts) == 1 else None


@dataclass(frozen=True)
class Exposed:
    """Of a problem's parameters, as a simulated step sums their gradients (``pdv.simulate.lowering``).

    Along some axes together or one after the other, each with its part of the bytes; scattered along those that the
    parameter rests cut along. A sum that runs beside compute slows that (``Problem.slowed``), be it in a bucket of any
    size; the last is waited for as a whole.
    """

    problem: Problem
    _known: dict[tuple[Differing, float], float] = field(default_factory=dict)
    _rates: dict[Differing, float] = field(default_factory=dict)

    def seconds(self, param: TensorType, rests: Sharding, need: Sharding, *, last: bool) -> float:
        """Of one step at least, of one micro-batch its share; ``last``: of a reader that runs backward last."""
        problem = self.problem
        differing = tuple(
            (at, isinstance(before, Invariant))
            for at, (axis, before, after) in enumerate(zip(problem.axes, rests, need, strict=True))
            if isinstance(after, Replicate) and axis.size > 1
        )
        if not (differing and problem.train and problem.once and (last or problem.slowed)):
            return 0.0
        weight = param.dtype.itemsize
        size = local_bytes(param, need, problem.mesh) * problem.precision.gradient_bytes(weight) / weight
        return problem.once * (
            self._least_s(differing, size) if last else problem.slowed * self._rate(differing) * size
        )

    def _rate(self, differing: Differing) -> float:
        """Seconds a byte."""
        if differing not in self._rates:
            self._rates[differing] = min(self._least_s(differing, size) / size for size in SIZES)
        return self._rates[differing]

    def _least_s(self, differing: Differing, num_bytes: float) -> float:
        """In any order of any groups of axes."""
        if (differing, num_bytes) not in self._known:
            found = []
            for count in range(1, len(differing) + 1):
                for group in itertools.combinations(differing, count):
                    link = joint_link(tuple(self.problem.axes[at] for at, _ in group))
                    own_s = _sum_s(link, num_bytes, is_whole=all(is_whole for _, is_whole in group))
                    rest = tuple(axis for axis in differing if axis not in group)
                    found.append(own_s + self._least_s(rest, num_bytes / link.size))
            self._known[differing, num_bytes] = min(found, default=0.0)
        return self._known[differing, num_bytes]


def _sum_s(link: AxisLink, num_bytes: float, *, is_whole: bool) -> float:
    scattered = reduce_scatter_seconds(link, num_bytes)
    if not is_whole:
        return scattered
    return min(all_reduce_seconds(link, num_bytes), scattered + all_gather_seconds(link, num_bytes))

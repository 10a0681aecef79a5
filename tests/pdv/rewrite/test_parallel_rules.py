"""Every parallel substitution that the operators' loops give is a law, for any degree."""

from __future__ import annotations

import pytest

from ir.builder import Builder
from ir.mesh import Mesh
from ir.proof.exact import verify_equal
from ir.verify import divides
from pdv.rewrite.parallel_rules import parallel_rules
from tests.conftest import Golden
from tests.property.programs import EXAMPLES, Example, leaf, serial


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_a_split_between_its_parallel_operators_is_the_operator(example: Example) -> None:
    whole = serial(example)
    node = whole.outputs[0][1]
    for degree in (2, 3):
        mesh = Mesh.of(a=degree)
        for rule in parallel_rules(node):
            if rule.passes_sum or not divides(node.loops, (rule.split,), mesh):
                continue
            k = Builder()
            operands = tuple(leaf(k, f"x{i}", tensor) for i, tensor in enumerate(example.types))
            pcg = k.graph({"y": rule.apply(k, node, operands, "a")})
            verify_equal(whole, pcg, mesh, scale=False, trials=1)


def test_laws_read_as_laws(golden: Golden) -> None:
    lines = []
    for name in ("linear", "attention", "embedding", "add"):
        example = next(example for example in EXAMPLES if example.op == name)
        lines.append(str(example))
        lines += [f"  {rule.name}: {rule.law}" for rule in parallel_rules(serial(example).outputs[0][1])]
    golden("plans/laws.txt", "\n".join(lines) + "\n")

"""Laws of the canonical form: true, exactly and gradients too; names of functions are what those are; all are taken."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest

from ir.builder import Builder
from ir.errors import ShapeError, VerificationError
from ir.evaluation.interpret import evaluate
from ir.graph import Graph, Node
from pdv.passes import LAWS, canonicalize
from pdv.rewrite.check import check_law
from pdv.rewrite.instantiate import instantiate
from pdv.rewrite.law import Law, parse_law
from pdv.rewrite.library import read_laws
from pdv.rewrite.sample import samples

ALL = read_laws(LAWS)
NAMES = [law for law in ALL if law.name.startswith("name-")]
"""Proofs take the functions of these as unknown."""


@pytest.mark.parametrize("law", [law for law in ALL if law not in NAMES], ids=lambda law: law.name)
def test_a_law_is_true(law: Law) -> None:
    check_law(law)


def sides(law: Law, count: int) -> Iterator[tuple[Graph, Graph]]:
    """Both sides at sizes at which they type-check."""
    tried = 0
    for values in islice(samples(law, 0), 1000):
        try:
            yield instantiate(law, values)
        except ShapeError:
            continue
        tried += 1
        if tried == count:
            return
    raise AssertionError(f"{law.name} type-checks at {tried} sizes")


def agree(left: Graph, right: Graph) -> bool:
    """Whether both compute the same of positive numbers, in float64."""
    rng = np.random.default_rng(0)
    values = {node.attr("name"): rng.uniform(0.1, 2.0, node.type.shape) for node in left.params}
    one, other = (evaluate(graph, values).gather()["y0"] for graph in (left, right))
    return bool(np.allclose(one, other, rtol=1e-9, atol=0))


@pytest.mark.parametrize("law", NAMES, ids=lambda law: law.name)
def test_a_name_is_that_of_the_function(law: Law) -> None:
    assert all(agree(*both) for both in sides(law, 12))


WRONG_NAMES = """
silu: mul(x, tanh(x)) == silu(x) for x[*s]
gelu: mul(scale(x, factor=0.5), shift(erf(scale(x, factor=0.7072)), offset_by=1.0)) == gelu(x) for x[*s]
""".strip().splitlines()


@pytest.mark.parametrize("text", WRONG_NAMES)
def test_a_wrong_name_is_caught(text: str) -> None:
    assert not any(agree(*both) for both in sides(parse_law(text), 3))


WRONG = """
a-scale-too-many: matmul(scale[...](q, factor=a), scale[...](t, factor=b)) == scale(matmul(q, t), factor=~(a * b * b)) \
for q[*s, m, e] t[*s, e, n]
shifts-are-no-product: shift[...](x, offset_by=c) == shift(x, offset_by=c) for x[*s]
permutations-the-other-way: permute(permute(x, perm=p), perm=q) == permute(x, perm=q[p]) for x[*s]
the-number-itself: sub(x, c) == shift(x, offset_by=c) for x[*s] c[]:number
""".strip().splitlines()


@pytest.mark.parametrize("text", WRONG, ids=lambda text: text.partition(":")[0])
def test_a_wrong_law_is_caught(text: str) -> None:
    with pytest.raises(VerificationError):
        check_law(parse_law(text))


def computed(graph: Graph) -> Graph:
    """The graph with values that are no parameters, for these would be read through views, and that are moved."""
    k = Builder()
    new: dict[Node, Node] = {}
    for node in graph.nodes:
        new[node] = k.copy(node, tuple(new[operand] for operand in node.operands))
        if node.is_param:
            back = tuple(reversed(range(node.type.rank)))
            new[node] = k.permute(k.exp(k.permute(new[node], perm=back)), perm=back) if back else k.exp(new[node])
    return k.graph({name: new[node] for name, node in graph.outputs})


@pytest.mark.parametrize("law", ALL, ids=lambda law: law.name)
def test_a_law_is_taken_from_left_to_right(law: Law) -> None:
    """At most of the sizes: of dims of size one there is nothing to sum, or to move."""
    found = [[canonicalize(computed(side)).digest for side in both] for both in sides(law, 8)]
    assert sum(left == right for left, right in found) >= 5, found


@pytest.mark.parametrize("law", ALL, ids=lambda law: law.name)
def test_a_law_reads_as_it_is_written(law: Law) -> None:
    assert parse_law(str(law)) == law

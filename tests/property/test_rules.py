"""Every law of the library is true, exactly and gradients too; every rule of it finds and replaces its own pattern."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from ir.builder import Builder
from ir.errors import ShapeError, VerificationError
from ir.graph import Graph, Node
from ir.mesh import Mesh
from ir.proof.exact import verify_equal
from pdv.rewrite import library
from pdv.rewrite.check import check_law
from pdv.rewrite.instantiate import instantiate
from pdv.rewrite.law import parse_law
from pdv.rewrite.library import FILES, all_rules, read_laws
from pdv.rewrite.rewriter import RewriteBuilder, Where, found_matches, rewritten
from pdv.rewrite.rule import REVERSED, Rule, rules_of
from pdv.rewrite.sample import samples
from tests.pdv.worlds import f32

ALONE = Mesh(())
FOLDER = Path(library.__file__).parent
WRITTEN = read_laws(FOLDER / "written.laws")


@pytest.mark.parametrize("law", WRITTEN, ids=lambda law: law.name)
def test_a_written_law_is_true(law: object) -> None:
    check_law(law)  # type: ignore[arg-type]  # pytest's parameters are untyped


WRONG = """
the-next-piece: chunk(add(x, b), dim=-1, parts=2, index=0) == add(chunk(x, dim=-1, parts=2, index=0), \
chunk(b, dim=-1, parts=2, index=1)) for x[*s, k] b[k]
another-factor: linear(scale(x, factor=c), w) == scale(linear(x, w), factor=c + c) for x[*s, k] w[n, k]
one-of-two-terms: add(linear(x, w), linear(y, w)) == linear(add(x, x), w) for x[*s, k] y[*s, k] w[n, k]
results-swapped: linear(x, u), linear(x, v) == chunk(linear(x, concat(u, v, dim=0)), dim=-1, parts=2, index=1), \
chunk(linear(x, concat(u, v, dim=0)), dim=-1, parts=2, index=0) for x[*s, k] u[n, k] v[n, k]
""".strip().splitlines()


@pytest.mark.parametrize("text", WRONG, ids=lambda text: text.partition(":")[0])
def test_a_wrong_law_is_caught(text: str) -> None:
    with pytest.raises(VerificationError):
        check_law(parse_law(text))


def program(rule: Rule, values: dict[str, object]) -> Graph:
    """The rule's pattern at given sizes; operands are values with gradients, not parameters."""
    sides = instantiate(rule.law, values)
    side = sides[1] if rule.name.endswith(REVERSED) else sides[0]
    k = Builder()
    new: dict[Node, Node] = {}
    for node in side.nodes:
        new[node] = k.copy(node, tuple(new[operand] for operand in node.operands))
        if node.is_param:
            new[node] = k.tanh(new[node])
    return k.graph({name: new[node] for name, node in side.outputs})


def applied(rule: Rule, graph: Graph) -> Graph | None:
    """The graph with the rule applied everywhere; None if it matches nowhere."""
    nodes = [node for node in graph.nodes if not node.is_leaf]
    found = found_matches(rule, Where(nodes, graph.users, lambda node: True))
    k = RewriteBuilder()
    new = rewritten(k, nodes, found, lambda node: k.copy(node, ()))
    return k.graph({name: new[node] for name, node in graph.outputs}) if found else None


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.name)
def test_a_rule_finds_its_pattern_and_keeps_what_it_computes(rule: Rule) -> None:
    tried = 0
    for values in islice(samples(rule.law, 0), 60):
        try:
            before = program(rule, values)
        except ShapeError:
            continue
        if len({node for _, node in before.outputs}) < len(before.outputs):
            continue
        after = applied(rule, before)
        if after is not None:
            verify_equal(before, after, ALONE, scale=False, trials=1)
            tried += 1
        if tried == 2:
            return
    assert tried, "no program of its own pattern is matched"


def value(k: Builder, name: str, *shape: int) -> Node:
    return k.tanh(k.param(name, f32(*shape)))


def unmatched() -> dict[str, tuple[str, Node]]:
    """Programs of a rule's form that it must leave alone."""
    k = Builder()
    x, w = value(k, "x", 6, 12), value(k, "w", 4, 12)
    deep, one = value(k, "deep", 2, 6, 12), value(k, "one", 1)
    return {
        "the chunked dim is not the last": ("move-chunk-into-linear", k.chunk(k.linear(x, w), dim=0, parts=2, index=0)),
        "the bias has no such dim": ("move-chunk-past-bias", k.chunk(k.add(x, one), dim=1, parts=2, index=0)),
        "the bias has more dims": ("move-chunk-past-add", k.chunk(k.add(x, deep), dim=2, parts=3, index=0)),
        "a sum of unlike terms": (
            "share-linear-of-sum", k.add(k.linear(x, w), k.linear(value(k, "y", 1, 12), w)),
        ),
        "two weights": ("share-linear-of-sum", k.add(k.linear(x, w), k.linear(x, value(k, "t", 4, 12)))),
        "a stride": (
            "merge-pointwise-convolutions",
            k.conv2d(
                k.conv2d(value(k, "i", 2, 3, 5, 5), value(k, "a", 4, 3, 1, 1), stride=(2, 2)), value(k, "c", 2, 4, 1, 1)
            ),
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", unmatched())
def test_what_is_not_its_pattern_is_left_alone(name: str) -> None:
    rule, node = unmatched()[name]
    (found,) = [r for r in all_rules() if r.name == rule]
    assert applied(found, Builder().graph({"y": node})) is None


def test_operands_of_a_sum_may_stand_in_either_order() -> None:
    k = Builder()
    x, w = value(k, "x", 3, 4), value(k, "w", 6, 4)
    chunk = k.chunk(k.add(k.param("b", f32(6)), k.linear(x, w)), dim=1, parts=2, index=1)
    (rule,) = [r for r in all_rules() if r.name == "move-chunk-past-bias"]
    after = applied(rule, Builder().graph({"y": chunk}))
    assert after is not None
    assert after.outputs[0][1].op.name == "add"


def test_a_direction_that_guesses_is_no_rule() -> None:
    law = parse_law("undo: neg(neg(x)) == x for x[*s]")
    assert [rule.name for rule in rules_of(law)] == ["undo"]
    law = parse_law("fuse: scale(scale(x, factor=c), factor=d) == scale(x, factor=c * d) for x[*s]")
    assert [rule.name for rule in rules_of(law)] == ["fuse"], "a product does not tell its factors"


def test_names_and_laws_are_written_once() -> None:
    found = [law for file in FILES for law in read_laws(FOLDER / file)]
    assert len({law.name for law in found}) == len(found)

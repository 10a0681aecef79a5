"""Unity's hand-coded substitution families, each derived here from the operators' declarations, for any degree.

Unity (Unger et al., OSDI 2022) makes its parallel substitutions in ``substitution.cc`` by hand, one maker per family.
Here a family is a choice of generated rules, ``split-<op>-<loop>``; what stands between two of them cancels and fuses
in ``redistribute``. Each entry below names the family, its program, and the state that each operator's result takes
along the axis; the test finds the rule that gives it, derives the parallel program, and proves it, gradients too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest

from ir.builder import Builder
from ir.graph import Graph, Node
from ir.mesh import Mesh
from ir.operator import Split
from ir.proof.exact import verify_equal
from ir.sharding import Invariant, Partial, Shard, State
from ir.types import DType, TensorType
from pdv.pcg.derive import derive
from pdv.pcg.redistribute import Redistribution
from pdv.problem import Assignment
from pdv.rewrite.parallel_rules import ParallelRule, parallel_rules
from tests.pdv.worlds import f32, problem

DEGREES = (2, 3, 4, 8, 16)


@dataclass(frozen=True)
class Family:
    """``program`` of a degree, and the state of each operator's result by its name (others: Invariant)."""

    program: Callable[[int], Graph]
    states: Mapping[str, State]
    rules: tuple[str, ...]


def alone(build: Callable[[Builder, int], Node]) -> Callable[[int], Graph]:
    """A program of one result."""

    def program(degree: int) -> Graph:
        k = Builder()
        return k.graph({"y": build(k, degree)})

    return program


def x(k: Builder, *shape: int, name: str = "x") -> Node:
    return k.param(name, f32(*shape))


def linear(k: Builder, d: int) -> Node:
    return k.linear(x(k, 2 * d, 3, d), x(k, 3 * d, d, name="w"), name="y")


def attention_layer(heads: int) -> Callable[[Builder, int], Node]:
    """Query, key and value by heads, attention, and the product that takes the heads together."""

    def build(k: Builder, d: int) -> Node:
        h, width = heads * d, 4
        value = x(k, d, 2, width)
        parts = []
        for name in ("q", "k", "v"):
            part = k.linear(value, x(k, 2 * h, width, name=f"w{name}"), name=f"product_{name}")
            part = k.reshape(part, shape=(d, 2, h, 2), name=f"heads_{name}")
            parts.append(k.permute(part, perm=(0, 2, 1, 3), name=f"outer_{name}"))
        y = k.permute(k.attention(*parts, scale=0.5, name="attention"), perm=(0, 2, 1, 3), name="inner")
        y = k.reshape(y, shape=(d, 2, 2 * h), name="joined")
        return k.linear(y, x(k, width, 2 * h, name="wo"), name="y")

    return build


HEADS: Mapping[str, State] = {
    **{f"product_{name}": Shard(2) for name in "qkv"},
    **{f"heads_{name}": Shard(2) for name in "qkv"},
    **{f"outer_{name}": Shard(1) for name in "qkv"},
    "attention": Shard(1),
    "inner": Shard(2),
    "joined": Shard(2),
    "y": Partial(),
}
SAMPLES: Mapping[str, State] = {name: Shard(0) for name in HEADS}
BY_HEADS = ("split-linear-n", "split-attention-_0", "split-linear-k")


def conv(k: Builder, d: int) -> Node:
    return k.conv2d(x(k, d, d, 4, 3), x(k, 2 * d, d, 2, 2, name="w"), padding=(1, 0), name="y")


def pool(op: str) -> Callable[[Builder, int], Node]:
    return lambda k, d: getattr(k, op)(x(k, d, 2 * d, 4, 4), kernel=(2, 2), stride=(2, 2), name="y")


def embedding(k: Builder, d: int) -> Node:
    ids = k.input("ids", TensorType((d, 3), DType.I64))
    return k.embedding(x(k, 2 * d, d, name="table"), ids, name="y")


def concat(k: Builder, d: int) -> Node:
    return k.concat(x(k, d, 3), x(k, d, 3, name="z"), dim=1, name="y")


def combine_concat(k: Builder, d: int) -> Node:
    """Values that are cut already are joined without being gathered."""
    one, other = (k.relu(x(k, d, 3, name=name), name=f"relu_{name}") for name in ("x", "z"))
    return k.concat(one, other, dim=1, name="y")


def inception(k: Builder, d: int) -> Node:
    """Branches of one image, joined by channels."""
    image = k.relu(x(k, d, 2, 4, 4), name="image")
    small = k.conv2d(image, x(k, 3, 2, 1, 1, name="w1"), name="small")
    large = k.conv2d(image, x(k, 3, 2, 3, 3, name="w3"), padding=(1, 1), name="large")
    pooled = k.avg_pool2d(image, kernel=(3, 3), stride=(1, 1), padding=(1, 1), name="pooled")
    return k.concat(small, large, pooled, dim=1, name="y")


def linear_relu(k: Builder, d: int) -> Node:
    return k.relu(k.linear(x(k, 3, 4), x(k, 2 * d, 4, name="w"), name="product"), name="y")


FAMILIES: Mapping[str, Family] = {
    "partition_linear_combine": Family(alone(linear), {"y": Shard(0)}, ("split-linear-_1",)),
    "replicate_linear_combine": Family(alone(linear), {"y": Shard(2)}, ("split-linear-n",)),
    "partition_linear_reduce": Family(alone(linear), {"y": Partial()}, ("split-linear-k",)),
    "partition_attention_combine": Family(
        alone(attention_layer(1)), SAMPLES, ("split-linear-_1", "split-attention-_1")
    ),
    "replicate_attention_reduce": Family(alone(attention_layer(1)), HEADS, BY_HEADS),
    "replicate_attention_reduce, three heads each": Family(alone(attention_layer(3)), HEADS, BY_HEADS),
    "partition_conv2d_combine": Family(alone(conv), {"y": Shard(0)}, ("split-conv2d-n",)),
    "replicate_conv2d_combine": Family(alone(conv), {"y": Shard(1)}, ("split-conv2d-co",)),
    "partition_conv2d_reduce": Family(alone(conv), {"y": Partial()}, ("split-conv2d-ci",)),
    "partition_pool2d_combine, samples": Family(alone(pool("max_pool2d")), {"y": Shard(0)}, ("split-max_pool2d-n",)),
    "partition_pool2d_combine, channels": Family(alone(pool("avg_pool2d")), {"y": Shard(1)}, ("split-avg_pool2d-c",)),
    "partition_add_combine": Family(
        alone(lambda k, d: k.add(x(k, d, 3), x(k, 3, name="b"), name="y")), {"y": Shard(0)}, ("split-add-_1",)
    ),
    "partition_relu_combine": Family(
        alone(lambda k, d: k.relu(x(k, 3, d), name="y")), {"y": Shard(1)}, ("split-relu-_0",)
    ),
    "partition_concat_combine": Family(alone(concat), {"y": Shard(0)}, ("split-concat-d0",)),
    "partition_softmax_combine": Family(
        alone(lambda k, d: k.softmax(x(k, d, 3), name="y")), {"y": Shard(0)}, ("split-softmax-_0",)
    ),
    "partition_embedding_combine": Family(alone(embedding), {"y": Shard(0)}, ("split-embedding-_1",)),
    "replicate_embedding_combine": Family(alone(embedding), {"y": Shard(2)}, ("split-embedding-d",)),
    "partition_embedding_reduce": Family(alone(embedding), {"y": Partial()}, ("split-embedding-v",)),
    "combine_concat": Family(
        alone(combine_concat), dict.fromkeys(("relu_x", "relu_z", "y"), Shard(0)), ("split-relu-_1", "split-concat-d0")
    ),
    "combine_inception": Family(
        alone(inception),
        dict.fromkeys(("image", "small", "large", "pooled", "y"), Shard(0)),
        ("split-conv2d-n", "split-avg_pool2d-n", "split-concat-d0"),
    ),
    "linear_relu_merge": Family(
        alone(linear_relu), {"product": Shard(1), "y": Shard(1)}, ("split-linear-n", "split-relu-_0")
    ),
}


def rule_of(node: Node, wanted: State) -> ParallelRule:
    """The generated rule whose result takes the wanted state."""
    rules = [rule for rule in parallel_rules(node) if not rule.passes_sum]
    return next(rule for rule in rules if rule.split.result == wanted and (rule.split.loop or wanted == Invariant()))


def derived(family: Family, degree: int) -> tuple[Graph, Graph, set[str]]:
    """(source, parallel program, names of the rules applied)."""
    source = family.program(degree)
    mesh = Mesh.of(a=degree)
    given = problem(source, mesh)
    rules = {
        node: rule_of(node, family.states.get(node.name, Invariant())) for node in source.nodes if not node.is_leaf
    }
    splits: dict[Node, tuple[Split, ...]] = {node: (rule.split,) for node, rule in rules.items()}
    leaving = (Shard(0),) if family.states.get("y") == Shard(0) else None  # nothing here is the batch: it is said
    pcg = derive(given, Assignment(splits, {}, leaving), Redistribution(mesh, given.axes)).pcg
    return source, pcg, {rule.name for rule in rules.values()}


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_derived_and_proven(name: str, degree: int) -> None:
    family = FAMILIES[name]
    source, pcg, used = derived(family, degree)
    assert set(family.rules) <= used
    verify_equal(source, pcg, Mesh.of(a=degree), trials=1)


def moves(pcg: Graph) -> Counter[str]:
    """Parallel operators other than those that copy a weight."""
    return Counter(node.op.name for node in pcg.nodes if node.op.kind == "parallel" and node.op.name != "replicate")


def test_what_stands_between_cut_operators_cancels() -> None:
    for name, inside in (("combine_concat", 2), ("combine_inception", 1)):
        _, pcg, _ = derived(FAMILIES[name], 4)
        assert moves(pcg) == {"partition": inside}, name  # the operands are cut once, and nothing is gathered between
    _, pcg, _ = derived(FAMILIES["linear_relu_merge"], 4)
    relu = next(node for node in pcg.nodes if node.op.name == "relu")
    assert relu.operands[0].op.name == "linear"


def test_megatron_mlp_is_a_derivation() -> None:
    """split-linear-n, split-gelu, split-linear-k, and the sum: f and g of Megatron are replicate and reduce."""

    def mlp(k: Builder, d: int) -> Node:
        up = k.linear(k.layer_norm(x(k, 3, 4), x(k, 4, name="g"), eps=1e-5), x(k, 2 * d, 4, name="up"), name="up")
        act = k.gelu(k.add(up, x(k, 2 * d, name="b"), name="bias"), name="gelu")
        return k.linear(act, x(k, 4, 2 * d, name="down"), name="y")

    states: Mapping[str, State] = {"up": Shard(1), "bias": Shard(1), "gelu": Shard(1), "y": Partial()}
    family = Family(alone(mlp), states, ())
    for degree in DEGREES:
        source, pcg, used = derived(family, degree)
        assert used == {"repeat-layer_norm", "split-linear-n", "split-add-_0", "split-gelu-_0", "split-linear-k"}
        activations = [node for node in pcg.nodes if node.op.kind == "parallel" and not node.operands[0].is_leaf]
        assert [node.op.name for node in activations] == ["replicate", "reduce"]
        verify_equal(source, pcg, Mesh.of(a=degree), trials=1)

"""What lectures on rewriting and on parallel training show, as laws and as a program: the library must have them.

Entry points: ``LECTURES``, ``FUSIONS`` (names of laws that make one product of two), ``megatron``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ir.builder import Builder
from ir.graph import Graph
from ir.proof.exact import Proof, verify_equal
from ir.types import DType, TensorType
from pdv.cluster import load_cluster
from pdv.plan.derivation import replay, to_steps
from pdv.planning.problems import plan_problems
from pdv.rewrite.generate.select import is_implied
from pdv.rewrite.law import Law, parse_law
from pdv.search.meshes import search_mesh

LECTURES = tuple(
    map(
        parse_law,
        """
matmul-is-associative: matmul(matmul(x, y), z) == matmul(x, matmul(y, z)) for x[m, k] y[k, n] z[n, p]
linear-is-associative: linear(linear(x, v), w) == linear(x, matmul(w, v)) for x[t, k] v[m, k] w[n, m]
matmul-distributes-left: matmul(x, add(y, z)) == add(matmul(x, y), matmul(x, z)) for x[m, k] y[k, n] z[k, n]
matmul-distributes-right: matmul(add(x, y), z) == add(matmul(x, z), matmul(y, z)) for x[m, k] y[m, k] z[k, n]
linear-distributes: add(linear(x, u), linear(x, v)) == linear(x, add(u, v)) for x[t, k] u[n, k] v[n, k]
transpose-of-product: permute(matmul(x, y), perm=(1, 0)) == matmul(permute(y, perm=(1, 0)), permute(x, perm=(1, 0))) \
for x[m, k] y[k, n]
scale-is-linear: linear(scale(x, factor=c), w) == scale(linear(x, w), factor=c) for x[t, k] w[n, k]
products-of-one-input: concat(matmul(x, y), matmul(x, z), dim=1) == matmul(x, concat(y, z, dim=1)) \
for x[m, k] y[k, n] z[k, p]
products-summed: add(linear(x, u), linear(y, v)) == linear(concat(x, y, dim=1), concat(u, v, dim=1)) \
for x[t, k] y[t, m] u[n, k] v[n, m]
convolution-is-linear: conv2d(add(x, y), f, padding=p) == add(conv2d(x, f, padding=p), conv2d(y, f, padding=p)) \
for x[b, c, h, w] y[b, c, h, w] f[e, c, r, q]
convolutions-of-one-input: concat(conv2d(x, f, padding=p), conv2d(x, g, padding=p), dim=1) == \
conv2d(x, concat(f, g, dim=0), padding=p) for x[b, c, h, w] f[e, c, r, q] g[m, c, r, q]
channels-scaled: mul(conv2d(x, f, padding=p), reshape(s, shape=(e, 1, 1))) == \
conv2d(x, mul(f, reshape(s, shape=(e, 1, 1, 1))), padding=p) for x[b, c, h, w] f[e, c, r, q] s[e]
conv-norm: batch_norm(conv2d(x, f, padding=p), m, v, g, a, eps=o) == add(conv2d(x, mul(f, reshape(mul(g, \
rsqrt(shift(v, offset_by=o))), shape=(e, 1, 1, 1))), padding=p), reshape(sub(a, mul(m, mul(g, rsqrt(shift(v, \
offset_by=o))))), shape=(e, 1, 1))) for x[b, c, h, w] f[e, c, r, q] m[e] v[e] g[e] a[e]
""".strip().splitlines(),
    )
)
# Terms by way of which a law follows from two others: `implied` looks at the terms of a law's own sides alone.
BY_WAY_OF = {"scale-is-linear": "linear(x, scale(w, factor=c))"}
FUSIONS = ("fuse-linear-sharing-input", "fuse-matmul-sharing-input", "fuse-conv2d-sharing-input")


def shown(laws: Sequence[Law]) -> dict[str, bool]:
    """Each law of the lectures, and each fusion: whether it follows from ``laws``, or is one of them."""
    single = [law for law in laws if len(law.left) == 1]
    found = {law.name: all(is_implied(part, single, 2) for part in parts(law)) for law in LECTURES}
    return found | {name: any(is_fusion(law, name) for law in laws) for name in FUSIONS}


def parts(law: Law) -> tuple[Law, ...]:
    """The law, or the two of which it is the chain."""
    if law.name not in BY_WAY_OF:
        return (law,)
    (middle,) = parse_law(
        f"middle: {BY_WAY_OF[law.name]} == x for {' '.join(f'{name}{shape}' for name, shape in law.shapes.items())}"
    ).left
    return replace(law, right=(middle,)), replace(law, left=(middle,))


def is_fusion(law: Law, name: str) -> bool:
    """Whether it joins the weights of two products of one input, and cuts the result where they met."""
    return law.name.startswith(name) and "slice(" in str(law.right[0]) and "concat(" in str(law.right[0])


@dataclass(frozen=True)
class Megatron:
    """The plan found for a transformer's MLP on one axis: the rules applied, what moves, and its proof."""

    rules: tuple[str, ...]
    moves: tuple[str, ...]
    proof: Proof


def mlp(degree: int) -> Graph:
    """x + down(gelu(up(norm(x)))), a prime number of rows, so that nothing but weights can be cut."""
    k = Builder()
    x = k.input("x", f32(4093, 48 * degree))
    norm = k.layer_norm(x, k.param("g", f32(48 * degree)), k.param("o", f32(48 * degree)), eps=1e-5)
    up = k.add(k.linear(norm, k.param("up", f32(192 * degree, 48 * degree))), k.param("b", f32(192 * degree)))
    return k.graph({"y": k.add(x, k.linear(k.gelu(up), k.param("down", f32(48 * degree, 192 * degree))))})


def f32(*shape: int) -> TensorType:
    """A float32 tensor."""
    return TensorType(shape, DType.F32)


def megatron(degree: int) -> Megatron:
    """Plan the MLP for ``degree`` devices, told nothing; replay the derivation, prove what it gives.

    Raises:
        VerificationError: if it is not the MLP.
    """
    cluster = load_cluster(
        {"name": "box", "nodes": [{"devices": degree, "device": "h100-80gb-sxm", "link": "nvlink4"}],
         "mesh": {"tp": degree}}
    )  # fmt: skip
    source = mlp(degree)
    (problem,) = plan_problems(source, cluster, mode="train")
    steps = to_steps(search_mesh(problem).solution)
    pcg = replay(problem, steps)
    moves = [node for node in pcg.nodes if node.op.kind == "parallel" and not node.operands[0].is_leaf]
    rules = dict.fromkeys(str(step["rule"]) for step in steps)
    return Megatron(
        tuple(rules), tuple(node.op.name for node in moves), verify_equal(source, pcg, problem.mesh, trials=2)
    )

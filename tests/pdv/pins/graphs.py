"""A small GPT with the names that pins speak of."""

from __future__ import annotations

from ir.builder import Builder
from ir.graph import Graph, Node
from ir.types import DType, TensorType
from tests.pdv.worlds import f32

BATCH, SEQUENCE, HEADS, WIDTH = 4, 8, 4, 24


def gpt(layers: int = 2) -> Graph:
    """Pre-norm blocks; each result that has a module has its name."""
    k = Builder()
    ids = k.input("ids", TensorType((BATCH, SEQUENCE), DType.I64))
    h = k.embedding(k.param("wte", f32(48, WIDTH)), ids, name="wte.out")
    for layer in range(layers):
        h = k.add(h, _attention(k, _norm(k, h, f"h.{layer}.ln_1"), f"h.{layer}.attn"), name=f"h.{layer}.mid")
        h = k.add(h, _mlp(k, _norm(k, h, f"h.{layer}.ln_2"), f"h.{layer}.mlp"), name=f"h.{layer}.out")
    h = _norm(k, h, "ln_f")
    return k.graph({"logits": k.linear(h, k.param("head.weight", f32(48, WIDTH)), name="head.out")}, name="gpt")


def _norm(k: Builder, x: Node, name: str) -> Node:
    weight, bias = k.param(f"{name}.weight", f32(WIDTH)), k.param(f"{name}.bias", f32(WIDTH))
    return k.layer_norm(x, weight, bias, eps=1e-5, name=name)


def _attention(k: Builder, x: Node, name: str) -> Node:
    qkv = k.linear(x, k.param(f"{name}.c_attn.weight", f32(3 * WIDTH, WIDTH)), name=f"{name}.qkv")
    shape = (BATCH, SEQUENCE, HEADS, WIDTH // HEADS)
    parts = [
        k.permute(k.reshape(k.chunk(qkv, dim=2, parts=3, index=i), shape=shape), perm=(0, 2, 1, 3)) for i in range(3)
    ]
    a = k.attention(*parts, causal=True, scale=(WIDTH // HEADS) ** -0.5, name=f"{name}.scores")
    a = k.reshape(k.permute(a, perm=(0, 2, 1, 3)), shape=(BATCH, SEQUENCE, WIDTH))
    return k.linear(a, k.param(f"{name}.c_proj.weight", f32(WIDTH, WIDTH)), name=f"{name}.out")


def _mlp(k: Builder, x: Node, name: str) -> Node:
    up = k.gelu(
        k.linear(x, k.param(f"{name}.c_fc.weight", f32(4 * WIDTH, WIDTH)), name=f"{name}.up"), name=f"{name}.act"
    )
    return k.linear(up, k.param(f"{name}.c_proj.weight", f32(WIDTH, 4 * WIDTH)), name=f"{name}.down")

"""The graph of a described transformer, built operator by operator.

Entry points: `graph`, `program` and `count_parameters`. Shapes in comments: b samples, s positions, h hidden, a heads,
g heads of keys and values, d width of a head, f feed-forward, e experts, k of them for each token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from ir.builder import Builder
from ir.errors import ModelError
from ir.graph import Graph, Node
from ir.types import DType, TensorType
from pdv.frontend.arch import names as arch_names
from pdv.frontend.arch.description import Arch, with_layers
from pdv.frontend.program import Program, Weights

Layout = Literal["megatron", "exported"]
REMEMBERED = 4  # graphs: those who try many configurations of one model ask for the same again
ROTARY_BASE = 500000.0  # Llama 3; only the constants' values depend on it, and no price does


@lru_cache(maxsize=REMEMBERED)
def build(arch: Arch, batch: int, dtype: DType, *, exported: bool, padded: int) -> Graph:
    """The program; ``padded``: the vocabulary is a multiple of it.

    Raises:
        ModelError: if tokens do not spread evenly over experts.
    """
    tokens = arch.seq * arch.topk
    if arch.kind == "mixtral" and not exported and tokens % arch.experts:
        raise ModelError(
            f"{arch.name}: {arch.seq} tokens with {arch.topk} experts each do not spread evenly over {arch.experts}",
            mend=f"Choose seq so that {arch.experts} divides seq x topk",
        )
    return _Model(arch, batch, dtype, exported, -(-arch.vocab // padded) * padded).graph()


def graph(arch: Arch, batch: int, dtype: DType = DType.F32, *, tp: int = 1, layout: Layout = "megatron") -> Graph:
    """The forward program: ids [batch, seq] -> logits [batch, seq, vocab].

    Args:
        arch: its sizes.
        batch: samples.
        dtype: of weights and activations.
        tp: how many ways "megatron" cuts it inside: the vocabulary is padded to whole 128s for each, as Megatron-LM
            does (`--make-vocab-size-divisible-by`).
        layout: "exported": the operators that the frontend finds in the transformers model. "megatron": the same sums
            and weights, with heads (and gates) outermost where one product makes queries, keys and values, with
            positions added rather than looked up, and with experts that each do their share of the tokens.

    Raises:
        ModelError: if ``batch`` tokens do not spread evenly over the experts.
    """
    return build(arch, batch, dtype, exported=layout == "exported", padded=1 if layout == "exported" else 128 * tp)


def program(arch: Arch, batch: int, dtype: DType = DType.F32) -> Program:
    """A described model as `pdv.optimize` takes it: a graph without weights, so that its plan cannot be emitted.

    Raises:
        ModelError: as ``graph``.
    """
    return Program(graph(arch, batch, dtype), Weights())


def count_parameters(arch: Arch) -> int:
    """Weights of the program, a tied one once, the vocabulary as it is."""
    one, two = (_train(arch, layers) for layers in (1, 2))
    return one + (two - one) * (arch.layers - 1)


def _train(arch: Arch, layers: int) -> int:
    graph = build(with_layers(arch, layers), 1, DType.BF16, exported=True, padded=1)
    return sum(math.prod(node.type.shape) for node in graph.params)


@dataclass
class _Model:
    arch: Arch
    batch: int
    dtype: DType
    exported: bool
    vocab: int

    def __post_init__(self) -> None:
        self.k = Builder()
        self.names = arch_names.NAMES[self.arch.kind]
        cos, sin = _angles(self.arch.seq, self.arch.head) if self.names.rms else (np.zeros(1), np.zeros(1))
        self.cos, self.sin = self.k.const(cos, dtype=self.dtype), self.k.const(sin, dtype=self.dtype)

    def graph(self) -> Graph:
        """ids [b, s] -> logits [b, s, v]."""
        ids = self.k.input("input_ids", TensorType((self.batch, self.arch.seq), DType.I64))
        layer = {"gpt": self._gpt_layer, "bert": self._bert_layer}.get(self.arch.kind, self._llama_layer)
        x = self._embed(ids)
        for number in range(self.arch.layers):
            x = layer(x, f"{self.names.layer}.{number}")
        return self.k.graph({"logits": self._head(x)}, name=self.arch.name or self.arch.kind)

    def param(self, name: str, *shape: int) -> Node:
        return self.k.param(name, TensorType(shape, self.dtype))

    @property
    def table(self) -> Node:
        """The token embedding's weight [v, h]; a tied one is stored under the head's name."""
        tied = self.arch.tied and self.arch.kind != "llama"
        return self.param(self.names.head if tied else self.names.tokens, self.vocab, self.arch.hidden)

    def _embed(self, ids: Node) -> Node:
        """[b, s] -> [b, s, h]."""
        k, a = self.k, self.arch
        x: Node = k.embedding(self.table, ids, name="embedding")
        if a.kind == "bert":
            kinds = self.param(self.names.kinds, 2, a.hidden)
            found = k.embedding(kinds, k.const(np.zeros((1, 1), dtype=np.int64)), name="embedding_kind")
            x = k.add(x, found, name="add_kind")
        if self.names.positions:
            places = self.param(self.names.positions, a.seq, a.hidden)
            if self.exported:
                places = k.embedding(places, k.const(np.arange(a.seq)[None]), name="embedding_position")
            x = k.add(x, places, name="add_position")
        return self.norm(x, self.names.embedded) if self.names.embedded else x

    def _head(self, x: Node) -> Node:
        """[b, s, h] -> [b, s, v]."""
        k, a, names = self.k, self.arch, self.names
        if a.kind == "bert":
            x = self.affine(x, names.transform, a.hidden)
            x = self.norm(k.gelu(x, approximate="none", name="gelu_head"), names.last)
        else:
            x = self.norm(x, names.last)
        weight = self.table if a.tied else self.param(names.head, self.vocab, a.hidden)
        logits: Node = k.linear(x, weight, name="head")
        if a.kind == "bert":
            logits = k.add(logits, self.param(names.head.replace("weight", "bias"), self.vocab), name="head")
        return logits

    def norm(self, x: Node, name: str) -> Node:
        """Layer norm, or rms norm of a llama."""
        h, made = self.arch.hidden, name.rsplit(".", 2)[-1]
        if self.names.rms:
            return _node(self.k.rms_norm(x, self.param(f"{name}.weight", h), eps=1e-5, name=made))
        weight, bias = self.param(f"{name}.weight", h), self.param(f"{name}.bias", h)
        return _node(self.k.layer_norm(x, weight, bias, eps=1e-5, name=made))

    def affine(self, x: Node, name: str, width: int) -> Node:
        """x wᵀ + b."""
        made = name.rsplit(".", 1)[-1]
        product = self.k.linear(x, self.param(f"{name}.weight", width, x.type.shape[-1]), name=made)
        return _node(self.k.add(product, self.param(f"{name}.bias", width), name=made))

    def product(self, x: Node, name: str, width: int) -> Node:
        """x wᵀ."""
        weight = self.param(f"{name}.weight", width, x.type.shape[-1])
        return _node(self.k.linear(x, weight, name=name.rsplit(".", 1)[-1]))

    def heads(self, x: Node, count: int) -> Node:
        """[b, s, (a d)] -> [b, a, s, d]."""
        b, s, width = x.type.shape
        split = self.k.reshape(x, shape=(b, s, count, width // count), name="heads")
        return _node(self.k.permute(split, perm=(0, 2, 1, 3), name="heads"))

    def attention(self, q: Node, key: Node, value: Node, *, causal: bool) -> Node:
        """[b, a, s, d] each -> [b, s, (a d)]."""
        b, a, s, d = q.type.shape
        seen = self.k.attention(q, key, value, causal=causal, scale=1.0 / math.sqrt(d), name="attention")
        seen = self.k.permute(seen, perm=(0, 2, 1, 3), name="joined")
        return _node(self.k.reshape(seen, shape=(b, s, a * d), name="joined"))

    def _gpt_layer(self, x: Node, at: str) -> Node:
        a = self.arch
        inside = self.affine(self.norm(x, f"{at}.ln_1"), f"{at}.attn.c_attn", 3 * a.heads * a.head)
        y = self.attention(*self._three(inside), causal=True)
        x = self.k.add(self.affine(y, f"{at}.attn.c_proj", a.hidden), x, name="residual")
        y = self.affine(self.norm(x, f"{at}.ln_2"), f"{at}.mlp.c_fc", a.ffn)
        y = self.k.gelu(y, approximate="tanh", name="gelu")
        return _node(self.k.add(x, self.affine(y, f"{at}.mlp.c_proj", a.hidden), name="residual"))

    def _three(self, x: Node) -> tuple[Node, Node, Node]:
        """Queries, keys and values of one product [b, s, (3 a d)], or with heads outermost [b, s, (a 3 d)]."""
        k, a = self.k, self.arch
        b, s, _ = x.type.shape
        if self.exported:
            q, key, value = (self.heads(k.chunk(x, dim=2, parts=3, index=i, name="qkv"), a.heads) for i in range(3))
            return q, key, value
        joint = k.reshape(x, shape=(b, s, a.heads, 3 * a.head), name="qkv")
        parts = [k.chunk(joint, dim=3, parts=3, index=i, name="qkv") for i in range(3)]
        q, key, value = (_node(k.permute(part, perm=(0, 2, 1, 3), name="heads")) for part in parts)
        return q, key, value

    def _bert_layer(self, x: Node, at: str) -> Node:
        a, width = self.arch, self.arch.heads * self.arch.head
        if self.exported:
            names = ("query", "key", "value")
            three = [self.heads(self.affine(x, f"{at}.attention.self.{name}", width), a.heads) for name in names]
            y = self.attention(three[0], three[1], three[2], causal=False)
        else:
            y = self.attention(*self._three(self.affine(x, f"{at}.attention.self.qkv", 3 * width)), causal=False)
        y = self.affine(y, f"{at}.attention.output.dense", a.hidden)
        x = self.norm(self.k.add(y, x, name="residual"), f"{at}.attention.output.LayerNorm")
        y = self.k.gelu(self.affine(x, f"{at}.intermediate.dense", a.ffn), approximate="none", name="gelu")
        y = self.affine(y, f"{at}.output.dense", a.hidden)
        return self.norm(self.k.add(y, x, name="residual"), f"{at}.output.LayerNorm")

    def _llama_layer(self, x: Node, at: str) -> Node:
        k, a = self.k, self.arch
        normed = self.norm(x, f"{at}.input_layernorm")
        q, key, value = (
            self.heads(self.product(normed, f"{at}.self_attn.{name}_proj", count * a.head), count)
            for name, count in (("q", a.heads), ("k", a.kv_heads), ("v", a.kv_heads))
        )
        y = self.attention(
            self._rotate(q), self._repeat_heads(self._rotate(key)), self._repeat_heads(value), causal=True
        )
        x = k.add(x, self.product(y, f"{at}.self_attn.o_proj", a.hidden), name="residual")
        normed = self.norm(x, f"{at}.post_attention_layernorm")
        inside = self._gate if a.kind == "llama" else self._dense_mixture if self.exported else self._mixture
        return _node(k.add(x, inside(normed, f"{at}.mlp"), name="residual"))

    def _rotate(self, x: Node) -> Node:
        """Rotary positions (Su et al., 2021) of [b, a, s, d]: x cos + (-x₂, x₁) sin."""
        k, d = self.k, self.arch.head
        first, second = (k.slice(x, dim=3, start=i, stop=i + d // 2, name="half") for i in (0, d // 2))
        turned = k.concat(k.neg(second, name="neg"), first, dim=3, name="turned")
        straight = k.mul(x, self.cos, name="rotary")
        return _node(k.add(straight, k.mul(turned, self.sin, name="rotary"), name="rotary"))

    def _repeat_heads(self, x: Node) -> Node:
        """[b, g, s, d] -> [b, a, s, d]: each head of keys or values for all queries of its group."""
        b, g, s, d = x.type.shape
        if g == self.arch.heads:
            return x
        apart = self.k.reshape(x, shape=(b, g, 1, s, d), name="group")
        spread = self.k.expand(apart, shape=(b, g, self.arch.heads // g, s, d), name="group")
        return _node(self.k.reshape(spread, shape=(b, self.arch.heads, s, d), name="group"))

    def _gate(self, x: Node, at: str) -> Node:
        """down(silu(gate x) · up x)."""
        k, f = self.k, self.arch.ffn
        gate = k.silu(self.product(x, f"{at}.gate_proj", f), name="silu")
        up = self.product(x, f"{at}.up_proj", f)
        return self.product(k.mul(gate, up, name="gated"), f"{at}.down_proj", self.arch.hidden)

    def _chances(self, x: Node, at: str) -> Node:
        """Of each token, the share of each of its experts, and zero of others: [b, s, h] -> [b, s, e]."""
        k, a = self.k, self.arch
        routed = self.product(x, f"{at}.gate", a.experts)
        if self.exported:
            routed = k.reshape(routed, shape=(self.batch * a.seq, a.experts), name="routed")
        kept = k.top_k(k.softmax(routed, dim=-1, name="softmax"), k=a.topk, name="chosen")
        total = k.reduce_sum(kept, dims=(kept.type.rank - 1,), keepdim=True, name="total")
        return _node(k.div(kept, total, name="share"))

    def _weight(self, name: str, *shape: int) -> Node:
        """An expert's weights [e, out, in], read as [e, in, out]."""
        e, i, o = shape
        return self.k.param(name, TensorType((e, i, o), self.dtype), view=(("permute", (0, 2, 1)),))

    def _dense_mixture(self, x: Node, at: str) -> Node:
        """Every expert on every token, with weight zero where it was not chosen: what an exported model does."""
        k, a, tokens = self.k, self.arch, self.batch * self.arch.seq
        flat = k.reshape(x, shape=(tokens, a.hidden), name="tokens")
        both = k.matmul(flat, self._weight(f"{at}.experts.gate_up_proj", a.experts, a.hidden, 2 * a.ffn), name="up")
        gate, up = (k.chunk(both, dim=2, parts=2, index=i, name="gate_up") for i in range(2))
        inside = k.mul(k.silu(gate, name="silu"), up, name="gated")
        share = k.permute(self._chances(x, at), perm=(1, 0), name="share")
        inside = k.mul(inside, k.reshape(share, shape=(a.experts, tokens, 1), name="share"), name="shared")
        down = k.matmul(inside, self._weight(f"{at}.experts.down_proj", a.experts, a.ffn, a.hidden), name="down")
        total = k.reduce_sum(down, dims=(0,), keepdim=False, name="summed")
        return _node(k.reshape(total, shape=x.type.shape, name="tokens"))

    def _mixture(self, x: Node, at: str) -> Node:
        """Each expert does its share of the tokens, all shares equal: the work and the traffic of balanced routing.

        Which tokens those are depends on data, so here they are dealt out in turn. Tokens stay in order of samples
        and positions, [b, c, e, h] with c tokens of each expert, so that bringing tokens that are cut by samples to
        experts that are cut by number takes the all-to-all that it takes in truth.
        """
        k, a, b = self.k, self.arch, self.batch
        each = a.seq * a.topk // a.experts
        copies = k.reshape(x, shape=(b, a.seq, 1, a.hidden), name="copies")
        copies = k.expand(copies, shape=(b, a.seq, a.topk, a.hidden), name="copies")
        dealt = k.reshape(copies, shape=(b, each, a.experts, a.hidden), name="dealt")
        sent = k.permute(dealt, perm=(2, 0, 1, 3), name="dispatched")  # [e, b, c, h]
        both = k.matmul(sent, self._stack(f"{at}.experts.gate_up_proj", a.hidden, 2 * a.ffn), name="up")
        both = k.reshape(both, shape=(a.experts, b, each, a.ffn, 2), name="gate_up")
        gate, up = (k.chunk(both, dim=4, parts=2, index=i, name="gate_up") for i in range(2))
        inside = k.mul(k.silu(gate, name="silu"), up, name="gated")
        inside = k.reshape(inside, shape=(a.experts, b, each, a.ffn), name="gated")
        down = k.matmul(inside, self._stack(f"{at}.experts.down_proj", a.ffn, a.hidden), name="down")
        back = k.permute(down, perm=(1, 2, 0, 3), name="returned")
        back = k.reshape(back, shape=(b, a.seq, a.topk, a.hidden), name="returned")
        share = k.slice(self._chances(x, at), dim=2, start=0, stop=a.topk, name="share")
        share = k.reshape(share, shape=(b, a.seq, a.topk, 1), name="share")
        return _node(k.reduce_sum(k.mul(back, share, name="shared"), dims=(2,), keepdim=False, name="summed"))

    def _stack(self, name: str, inner: int, outer: int) -> Node:
        """An expert's weights as [e, 1, in, out], for every sample."""
        e = self.arch.experts
        view = (("permute", (0, 2, 1)), ("reshape", (e, 1, inner, outer)))
        return self.k.param(name, TensorType((e, 1, inner, outer), self.dtype), view=view)


def _angles(seq: int, head: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines [s, d]."""
    speeds = ROTARY_BASE ** (-np.arange(0, head, 2) / head)
    angles = np.concatenate([np.outer(np.arange(seq), speeds)] * 2, axis=1).astype(np.float32)
    return np.cos(angles), np.sin(angles)


def _node(made: object) -> Node:
    assert isinstance(made, Node)
    return made

"""Each kernel as a batch of matrix products, with the work that it does: what makes operators comparable.

A convolution is the product that its window unrolls to, an attention head two products over its sequence, the experts
of a layer a batch of products; a row or element-wise operator is m rows of n elements. Where data gives no arithmetic
or traffic (mixed batches of attention, recurrences, whole modules), they are derived here from the sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from learned_cost.kernels.nodes import Floats, Nodes

Mask = NDArray[np.bool_]

# Bytes of a weight and of an activation by dtype, scales of blocks included: 4 bits and a byte for each 16 (NVFP4) or
# 32 (MXFP4, OCP microscaling formats 1.0).
WEIGHT_BYTES = {
    "fp64": 8.0, "fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0, "fp8_block": 1.0, "int8": 1.0, "sq": 1.0,
    "int8_wo": 1.0, "int4_wo": 0.53, "nvfp4": 0.5625, "w4a16_mxfp4": 0.53, "w4a8_mxfp4_mxfp8": 0.53,
}  # fmt: skip
ACTIVATION_BYTES = WEIGHT_BYTES | {"int8_wo": 2.0, "int4_wo": 2.0, "w4a16_mxfp4": 2.0, "w4a8_mxfp4_mxfp8": 1.0}

# Multi-head latent attention as in DeepSeek-V2 (arXiv 2405.04434, section 2.1) at V3's sizes: model width, ranks of
# queries and of keys and values, and a head's parts.
MLA_MODEL, MLA_Q, MLA_KV, MLA_NOPE, MLA_ROPE, MLA_V = 7168, 1536, 512, 128, 64, 128


@dataclass(frozen=True)
class Products:
    """[n] each: ``b`` products of [m, k] by [k, n]; arithmetic, traffic; bytes of an element of either side."""

    b: Floats
    m: Floats
    n: Floats
    k: Floats
    flops: Floats
    bytes: Floats
    weight_bytes: Floats
    activation_bytes: Floats
    experts: Mask
    attention: Mask


def products_of(nodes: Nodes) -> Products:
    """The products of all kernels."""
    codes, ops = nodes.texts["op"]
    dtypes, names = nodes.texts["dtype"]
    weight = np.array([*(WEIGHT_BYTES.get(name, 2.0) for name in names), 2.0])[dtypes]
    activation = np.array([*(ACTIVATION_BYTES.get(name, 2.0) for name in names), 2.0])[dtypes]

    def mask(*wanted: str) -> Mask:
        chosen = [
            code
            for code, op in enumerate(ops)
            if any(op == w or (w[-1] == "*" and op[: len(w) - 1] == w[:-1]) for w in wanted)
        ]
        found: Mask = np.isin(codes, chosen)
        return found

    flops, traffic = _work(nodes, mask, weight)
    b, m, n, k = (np.ones(len(nodes)) for _ in range(4))
    s = nodes.sizes

    def put(where: Mask, *values: Floats | float) -> None:
        for target, value in zip((b, m, n, k), values, strict=True):
            target[where] = np.maximum(np.broadcast_to(value, len(nodes))[where], 1.0)

    put(np.ones(len(nodes), dtype=bool), 1.0, s["m"], s["n"], 1.0)
    put(mask("linear", "bmm"), s["b"], s["m"], s["n"], s["k"])
    side = np.floor((s["img"] + 2 * s["pad"] - s["ksize"]) / np.maximum(s["stride"], 1)) + 1
    put(mask("conv2d"), 1.0, s["b"] * side * side, s["c_out"], s["c_in"] * s["ksize"] ** 2)
    experts = mask("moe")
    local, rows = experts_of(nodes)
    active = np.maximum(local * (1 - np.exp(-rows / local)), np.minimum(1.0, rows))  # of the local ones, hit at random
    put(experts, active, rows / np.maximum(active, 1), 2 * s["inter"] / np.maximum(s["tp"], 1), s["hidden"])
    many = mask("attn_prefill", "attn_full", "attn_mixed", "mla_prefill", "mla_module_prefill")
    put(many, s["b"] * s["heads"], s["seq_q"], s["seq_kv"], np.maximum(s["head_dim"], MLA_NOPE + MLA_ROPE))
    one = mask("attn_decode", "mla_decode", "mla_module_decode")
    grouped = s["kv_heads"] > 0
    put(
        one,
        s["b"] * np.where(grouped, s["kv_heads"], 1),
        np.where(grouped, s["heads"] / np.maximum(s["kv_heads"], 1), s["heads"]),
        s["seq_kv"],
        np.where(s["head_dim"] > 0, s["head_dim"], MLA_KV + MLA_ROPE),
    )
    return Products(b, m, n, k, flops, traffic, weight, activation, experts, many | one)


def experts_of(nodes: Nodes) -> tuple[Floats, Floats]:
    """Experts of a device, and rows that reach it."""
    s = nodes.sizes
    ranks = np.maximum(s["ep"], 1)
    return np.maximum(s["experts"] / ranks, 1), s["m"] * s["topk"] / ranks


def _work(nodes: Nodes, mask: object, weight: Floats) -> tuple[Floats, Floats]:
    """Arithmetic and traffic, those that nobody said derived; at least one each."""
    assert callable(mask)
    s, flops, traffic = nodes.sizes, nodes.flops.copy(), nodes.bytes.copy()
    b, m, q, kv, h, kh, d = (s[name] for name in ("b", "m", "seq_q", "seq_kv", "heads", "kv_heads", "head_dim"))

    def derive(where: Mask, arithmetic: Floats, moved: Floats) -> None:
        for target, value in ((flops, arithmetic), (traffic, moved)):
            target[where & (target == 0)] = value[where & (target == 0)]

    decodes, keys = s["n_decode"], s["kv_decode"]
    derive(
        mask("attn_mixed"),
        4 * b * h * d * q * (kv - q / 2) + 4 * decodes * h * d * keys,
        2 * (2 * b * q * h * d + 2 * b * kv * kh * d + decodes * (2 * h * d + 2 * keys * kh * d)),
    )
    state = s["num_v_heads"] * s["head_k_dim"] * s["head_v_dim"]
    vectors = 2 * s["num_v_heads"] * s["head_v_dim"] + 2 * s["num_k_heads"] * s["head_k_dim"]
    derive(mask("gdn"), 4 * m * state, 2 * m * vectors + 8 * b * state)
    state = s["nheads"] * d * s["d_state"]
    vectors = 2 * s["nheads"] * d + 2 * s["n_groups"] * s["d_state"]
    derive(mask("mamba2"), 6 * m * state, 2 * m * vectors + 8 * b * state)
    parameters = (
        MLA_MODEL * (MLA_Q + MLA_KV + MLA_ROPE)
        + MLA_Q * h * (MLA_NOPE + MLA_ROPE)
        + h * MLA_KV * (MLA_NOPE + MLA_V)
        + h * MLA_V * MLA_MODEL
    )
    projected = 2 * b * q * parameters
    moved = parameters * weight + 4 * b * q * MLA_MODEL + 2 * b * kv * (MLA_KV + MLA_ROPE)
    derive(mask("mla_module_prefill"), projected + b * h * q * kv * (MLA_NOPE + MLA_ROPE + MLA_V), moved)
    derive(mask("mla_module_decode"), projected + 2 * b * h * kv * (2 * MLA_KV + MLA_ROPE), moved)
    return np.maximum(flops, 1.0), np.maximum(traffic, 1.0)

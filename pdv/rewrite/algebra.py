"""Algebraic rules: equal programs on one device, some of which let more loops be cut.

A rule that costs time alone may pay under a mesh: GPT-2's fused query-key-value product has its heads in the middle of
the output dim, where a cut would interleave them; read as three products, each has its heads outermost.
"""

from __future__ import annotations

from pdv.rewrite.rule import Rule

move_chunk_past_add = Rule(
    "move-chunk-past-add",
    law="chunk_i(x + b) == chunk_i(x) + chunk_i(b)",
    before=lambda k, x, b, dim, parts, index: k.chunk(k.add(x, b), dim=dim, parts=parts, index=index),
    after=lambda k, x, b, dim, parts, index: k.add(
        k.chunk(x, dim=dim, parts=parts, index=index),
        k.chunk(b, dim=b.type.rank - 1, parts=parts, index=index),
    ),
    when=lambda x, b, dim, parts, index: (
        dim == x.type.rank - 1 and 1 <= b.type.rank <= x.type.rank and b.type.shape[-1] == x.type.shape[-1]
    ),
)

move_chunk_into_linear = Rule(
    "move-chunk-into-linear",
    law="chunk_i(x @ w.T) == x @ chunk_i(w).T",
    before=lambda k, x, w, dim, parts, index: k.chunk(k.linear(x, w), dim=dim, parts=parts, index=index),
    after=lambda k, x, w, dim, parts, index: k.linear(x, k.chunk(w, dim=0, parts=parts, index=index)),
    when=lambda x, w, dim, parts, index: dim == x.type.rank - 1,
)

move_scale_past_linear = Rule(
    "move-scale-past-linear",
    law="(c · x) @ w.T == c · (x @ w.T)",
    before=lambda k, x, w, factor: k.linear(k.scale(x, factor=factor), w),
    after=lambda k, x, w, factor: k.scale(k.linear(x, w), factor=factor),
    when=lambda x, w, factor: w.type.shape[0] < w.type.shape[1],
)

share_linear_of_sum = Rule(
    "share-linear-of-sum",
    law="x @ w.T + y @ w.T == (x + y) @ w.T",
    before=lambda k, x, y, w: k.add(k.linear(x, w), k.linear(y, w)),
    after=lambda k, x, y, w: k.linear(k.add(x, y), w),
    when=lambda x, y, w: x.type == y.type,
)

associate_linear = Rule(
    "associate-linear",
    law="(x @ v.T) @ w.T == x @ (w @ v).T",
    before=lambda k, x, v, w: k.linear(k.linear(x, v), w),
    after=lambda k, x, v, w: k.linear(x, k.matmul(w, v)),
)

RULES = (
    move_chunk_past_add,
    move_chunk_into_linear,
    move_scale_past_linear,
    share_linear_of_sum,
    associate_linear,
)

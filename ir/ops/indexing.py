"""Gathers by integer ids."""

from __future__ import annotations

from ir.operator import Operator

embedding = Operator(
    "embedding",
    "v d, ... -> ... d",
    "index",
    emit="embedding({0}, {1}, {offset})",
    offset_loop="v",  # a shard of the vocabulary answers zero for ids outside it: a term of the sum
    linear=(frozenset({0}),),
    flops_per_point=0,
    backward_factor=1,
    saved=(1,),
    differentiable=(0,),
    evaluate=lambda t, x, c: t.take(x[0], x[1], c.offset),
)

OPS = (embedding,)

"""What PyTorch runs for each operator of ir, on one device: the calls that are measured.

x: the operands, a: the attributes. Views have no entry: they run nothing. Entry point: ``CALLS``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # as everyone calls it

from ir.operator import Attrs
from ir.types import DType

Call = Callable[[Sequence[Tensor], Attrs], Tensor]


def _plain(function: Callable[..., Any]) -> Call:  # Any: torch's functions are typed in many ways
    """Of operators without attributes."""
    return lambda x, a: cast(Tensor, function(*x))


def _value(attrs: Attrs, name: str) -> Any:  # Any: attribute types differ by operator
    return attrs[name]


def _attention(x: Sequence[Tensor], a: Attrs) -> Tensor:
    mask = x[3] if len(x) > 3 else None
    scale = float(_value(a, "scale"))
    return F.scaled_dot_product_attention(x[0], x[1], x[2], attn_mask=mask, is_causal=bool(a["causal"]), scale=scale)


def _top_k(x: Sequence[Tensor], a: Attrs) -> Tensor:
    values, places = x[0].topk(int(_value(a, "k")))
    return torch.zeros_like(x[0]).scatter(-1, places, values)


def _per_channel(vector: Tensor, x: Tensor) -> Tensor:
    return vector.reshape(-1, *(1,) * (x.dim() - 2))


def _channel_mean(x: Tensor) -> Tensor:
    return x.mean((0, *range(2, x.dim())))


def _batch_norm(x: Sequence[Tensor], a: Attrs) -> Tensor:
    mean, variance, weight, bias = (_per_channel(vector, x[0]) for vector in x[1:])
    return (x[0] - mean) * torch.rsqrt(variance + float(_value(a, "eps"))) * weight + bias


CALLS: Mapping[str, Call] = {
    "linear": lambda x, a: F.linear(x[0], x[1]),
    "matmul": lambda x, a: torch.matmul(x[0], x[1]),
    "attention": _attention,
    "conv2d": lambda x, a: F.conv2d(
        x[0], x[1], None, _value(a, "stride"), _value(a, "padding"), _value(a, "dilation"), _value(a, "groups")
    ),
    "max_pool2d": lambda x, a: F.max_pool2d(
        x[0], _value(a, "kernel"), _value(a, "stride"), _value(a, "padding"), _value(a, "dilation")
    ),
    "avg_pool2d": lambda x, a: F.avg_pool2d(x[0], _value(a, "kernel"), _value(a, "stride"), _value(a, "padding")),
    "layer_norm": lambda x, a: F.layer_norm(x[0], x[1].shape, x[1], x[2], float(_value(a, "eps"))),
    "rms_norm": lambda x, a: F.rms_norm(x[0], x[1].shape, x[1], float(_value(a, "eps"))),
    "softmax": lambda x, a: F.softmax(x[0], dim=-1),
    "log_softmax": lambda x, a: F.log_softmax(x[0], dim=-1),
    "top_k": _top_k,
    "channel_mean": lambda x, a: _channel_mean(x[0]),
    "channel_variance": lambda x, a: _channel_mean((x[0] - _per_channel(x[1], x[0])).square()),
    "batch_norm": _batch_norm,
    "reduce_sum": lambda x, a: x[0].sum(_value(a, "dims"), keepdim=bool(a["keepdim"])),
    "reduce_mean": lambda x, a: x[0].mean(_value(a, "dims"), keepdim=bool(a["keepdim"])),
    "concat": lambda x, a: torch.cat(list(x), int(_value(a, "dim"))),
    "embedding": lambda x, a: F.embedding(x[1], x[0]),
    "index_select": lambda x, a: torch.index_select(x[0], int(_value(a, "dim")), x[1]),
    "add": _plain(torch.add), "sub": _plain(torch.sub), "mul": _plain(torch.mul), "div": _plain(torch.div),
    "scale": lambda x, a: x[0] * float(_value(a, "factor")),
    "unbiased": lambda x, a: x[0] * (_value(a, "points") / (_value(a, "points") - 1)),
    "shift": lambda x, a: x[0] + float(_value(a, "offset_by")),
    "neg": _plain(torch.neg),
    "cast": lambda x, a: x[0].to(getattr(torch, DType(a["dtype"]).torch_name)),
    "where": _plain(torch.where),
    "gelu": lambda x, a: F.gelu(x[0], approximate=str(a["approximate"])),
    "relu": _plain(F.relu), "silu": _plain(F.silu), "tanh": _plain(torch.tanh), "sigmoid": _plain(torch.sigmoid),
    "exp": _plain(torch.exp), "log": _plain(torch.log), "erf": _plain(torch.erf), "sqrt": _plain(torch.sqrt),
    "rsqrt": _plain(torch.rsqrt), "reciprocal": _plain(torch.reciprocal), "sin": _plain(torch.sin),
    "cos": _plain(torch.cos), "abs": _plain(torch.abs),
    "pow": lambda x, a: torch.pow(x[0], float(_value(a, "exponent"))),
}  # fmt: skip

# Views: they run nothing, and stand between operators of a subgraph.
VIEWS: Mapping[str, Call] = {
    "reshape": lambda x, a: x[0].reshape(_value(a, "shape")),
    "permute": lambda x, a: x[0].permute(_value(a, "perm")),
    "expand": lambda x, a: x[0].expand(_value(a, "shape")),
    "chunk": lambda x, a: x[0].chunk(int(_value(a, "parts")), int(_value(a, "dim")))[int(_value(a, "index"))],
    "slice": lambda x, a: x[0].narrow(
        int(_value(a, "dim")), int(_value(a, "start")), int(_value(a, "stop")) - int(_value(a, "start"))
    ),
}

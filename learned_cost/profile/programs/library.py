"""What PyTorch runs for an operator of ir on one device: the calls that are measured. Entry point: ``call_of``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # as everyone calls it

from ir.emission.code import Code
from ir.emission.writing import Writing
from ir.graph import Node
from ir.operator import Operator


def can_call(op: Operator) -> bool:
    """Whether an operator is a call, or a view; not where it draws, for its call asks a module whether it trains, nor
    where it is any other library's function, or in texts alone.
    """
    is_own = not (op.draws or op.is_foreign or op.only_written)
    return op.kind != "parallel" and bool(op.emit) and is_own


def call_of(node: Node) -> Callable[..., Any]:  # Any: tensors, or what traces them
    """The operator of a node, with its attributes, as a function of its operands."""
    places = [Code(f"x[{place}]") for place in range(len(node.operands))]
    text = node.op.eager.format(**node.attrs) or Writing().write(node, places).text
    call: Callable[..., Any] = eval(f"lambda *x: {text}", HELPERS)  # noqa: S307  # what ir/ops declares
    return call


def without_gradient(call: Callable[..., Any], x: Sequence[Tensor]) -> Callable[[], Any]:
    """The call on its operands, as in inference."""

    def run() -> Any:
        with torch.no_grad():
            return call(*x)

    return run


def _top_k(x: Tensor, k: int) -> Tensor:
    values, places = x.topk(k)
    return torch.zeros_like(x).scatter(-1, places, values)


def _pick(x: Tensor, ids: Tensor) -> Tensor:
    return x.gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def _bag_numbers(ids: Tensor, offsets: Tensor) -> Tensor:
    places = torch.arange(ids.size(0), device=ids.device, dtype=offsets.dtype)
    return torch.bucketize(places, offsets.sort().values, right=True) - 1


def _segment_sum(values: Tensor, numbers: Tensor, like: Tensor) -> Tensor:
    count = like.size(0)
    numbers = numbers.masked_fill((numbers < 0) | (numbers >= count), count)
    return values.new_zeros(count + 1, values.size(1)).index_add(0, numbers, values)[:count]


def _grouped_linear(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    sizes = ends.sort().values.clamp(0, rows.size(0)).diff(prepend=ends.new_zeros(1)).tolist()
    *groups, rest = rows.split([*sizes, rows.size(0) - sum(sizes)])  # type: ignore[no-untyped-call]
    products = [group @ matrix for group, matrix in zip(groups, matrices.unbind(), strict=True)]
    return torch.cat([*products, rest.new_zeros(rest.size(0), matrices.size(2))])


def _routed_linear(rows: Tensor, matrices: Tensor, numbers: Tensor) -> Tensor:
    count = matrices.size(0)
    ordered, order = numbers.masked_fill(numbers < 0, count).sort()
    places = torch.arange(count, device=ordered.device, dtype=ordered.dtype)
    found = _grouped_linear(rows[order], matrices, torch.searchsorted(ordered, places, right=True))
    return torch.empty_like(found).index_copy(0, order, found)


def _per_channel(vector: Tensor, x: Tensor) -> Tensor:
    return vector.reshape(-1, *(1,) * (x.dim() - 2))


def _channel_mean(x: Tensor, shares: int) -> Tensor:
    return x.mean((0, *range(2, x.dim()))) / shares


def _channel_variance(x: Tensor, mean: Tensor, shares: int) -> Tensor:
    return _channel_mean((x - _per_channel(mean, x)).square(), shares)


def _batch_norm(x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """As of what is whole on one device: one call, which takes the statistics itself."""
    return F.batch_norm(x, None, None, weight, bias, training=True, eps=eps)


HELPERS: dict[str, Any] = {  # Any: modules and functions
    "torch": torch,
    "F": F,
    **{f.__name__[1:]: f for f in (_top_k, _pick, _bag_numbers, _segment_sum)},
    **{f.__name__[1:]: f for f in (_grouped_linear, _routed_linear)},
    **{f.__name__[1:]: f for f in (_channel_mean, _channel_variance, _batch_norm)},
}

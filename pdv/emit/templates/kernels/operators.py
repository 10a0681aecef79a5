"""Operators whose share must know where it begins, or what all shares add up to; copied beside models that use them.

``block`` is the index of this rank's block of the dim that is cut: its first element is ``block`` times its size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from .compiled import outside


def embedding_block(ids: Tensor, table: Tensor, block: int, blocks: int, padding_idx: int | None = None) -> Tensor:
    """Rows of a block of the vocabulary, zero for ids outside it: a term of the sum over so many blocks.

    ids: [...], table: [v/n, d] -> [..., d]; the row ``padding_idx`` of the whole table takes no gradient.

    Raises:
        RuntimeError: if an id is of no block; on GPUs once the device comes to it, as torch's embedding does.
    """
    first, size = block * table.size(0), table.size(0)
    torch._assert_async(((ids >= 0) & (ids < blocks * size)).all(), "ids outside of the table")  # noqa: SLF001
    ids = ids - first
    outside = (ids < 0) | (ids >= size)
    padding = padding_idx - first if padding_idx is not None and first <= padding_idx < first + size else None
    return F.embedding(ids.masked_fill(outside, 0), table, padding).masked_fill(outside.unsqueeze(-1), 0)


def pick(x: Tensor, ids: Tensor, block: int = 0) -> Tensor:
    """Of each row the element at its id, zero where there is none: a term of the sum over blocks of the rows.

    x: [..., v/n], ids: [...] -> [...]
    """
    ids = ids - block * x.size(-1)
    outside = (ids < 0) | (ids >= x.size(-1))
    return x.gather(-1, ids.masked_fill(outside, 0).unsqueeze(-1)).squeeze(-1).masked_fill(outside, 0)


def bag_numbers(ids: Tensor, offsets: Tensor) -> Tensor:
    """In which bag each of the ids is; bags begin at ``offsets``: [n], [b] -> [n]."""
    places = torch.arange(ids.size(0), device=ids.device, dtype=offsets.dtype)
    return torch.bucketize(places, offsets.sort().values, right=True) - 1


def segment_sum(values: Tensor, numbers: Tensor, like: Tensor, block: int = 0) -> Tensor:
    """Sums of the rows of each segment of a block: [n, d], [n], as many segments as ``like``: [b/n] -> [b/n, d].

    Rows of other segments go into one more, which is dropped.
    """
    count = like.size(0)
    numbers = numbers - block * count
    numbers = numbers.masked_fill((numbers < 0) | (numbers >= count), count)
    wide = values.float() if values.dtype == torch.bfloat16 else values
    sums = wide.new_zeros(count + 1, values.size(1)).index_add(0, numbers, wide)
    return sums[:count].to(values.dtype)


def grouped_linear(rows: Tensor, matrices: Tensor, ends: Tensor, block: int = 0) -> Tensor:
    """Rows in groups, one behind the other, each times its own matrix: [s/n, k], [e, k, n], [e] -> [s/n, n].

    ``ends`` are of the groups of all rows; rows behind the last are zero.
    """
    count = rows.size(0)
    ends = (ends.sort().values - block * count).clamp(0, count)
    is_half = rows.dtype == torch.bfloat16 and rows.element_size() == 2  # where it is checked, all are float64
    if is_half and rows.size(1) % 8 == 0 == matrices.size(2) % 8:  # 16 bytes, as its kernel asks
        inside = (torch.arange(count, device=rows.device) < ends[-1]).unsqueeze(1)
        found = F.grouped_mm(rows.where(inside, 0).contiguous(), matrices, offs=ends.int())
        return found.where(inside, 0)
    return _each_by_its_own(rows, matrices, ends)


def routed_linear(rows: Tensor, matrices: Tensor, numbers: Tensor) -> Tensor:
    """Each row times the matrix of its number: [s, k], [e, k, n], [s] -> [s, n]; zero where no matrix has it."""
    count = matrices.size(0)
    ordered, order = torch.where(numbers < 0, count, numbers).sort()
    ends = torch.searchsorted(ordered, torch.arange(count, device=ordered.device, dtype=ordered.dtype), right=True)
    found = grouped_linear(rows.index_select(0, order), matrices, ends)
    return torch.empty_like(found).index_copy(0, order, found)


@outside  # how many rows a group has depends on values
def _each_by_its_own(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    *groups, rest = rows.split([*sizes, rows.size(0) - sum(sizes)])  # type: ignore[no-untyped-call]
    products = [group @ matrix for group, matrix in zip(groups, matrices.unbind(), strict=True)]
    return torch.cat([*products, rest.new_zeros(rest.size(0), matrices.size(2))])


seed = [0]  # of all that is drawn here: torch's, on rank 0, when the model was built
_drawn = [0]  # masks by this process: the same on all ranks that run the same stages


def _next_generator(device: torch.device, block: int) -> torch.Generator:
    """Of the next mask, for one part. Seeds are mixed (SplitMix64, Steele et al., OOPSLA'14): CPUs read 32 bits."""
    _drawn[0] += 1
    number = (seed[0] * 0x9E3779B97F4A7C15 + (_drawn[0] << 20) + block) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        number = (number ^ number >> shift) * factor % 2**64
    return torch.Generator(device).manual_seed(number)


@outside  # no compiler knows generators: a program that is compiled draws the same
def _drawn_for(like: Tensor, draw: Callable[..., Tensor], block: int, **options: Any) -> Tensor:
    return draw(like.shape, generator=_next_generator(like.device, block), device=like.device, **options)


def dropout(x: Tensor, p: float, training: bool, block: int = 0) -> Tensor:
    """Each element zero with probability ``p``, else scaled by 1 / (1 - p); nothing where the model is not in training.

    ``block``: which part of the whole value this is, and of which stages' values. Ranks that hold the same part draw
    the same mask, others another; what runs again in backward draws its masks again (``restoring``).
    """
    if not training:
        return x
    dropped = _drawn_for(x, torch.rand, block) < p
    return x.masked_fill(dropped, 0) * (1 / (1 - p))


steady = [False]  # whether noise is the same each time, and in each row: while programs are compared
_FIRST = 0.6180339887498949  # of steady noise between 0 and 1, moved by a share of 1 along each dim but that of rows
_STEPS = (0.4142135623730951, 0.7320508075688772, 0.23606797749978969, 0.6457513110645906, 0.3166247903553998)


def noise(
    like: Tensor,
    kind: str,
    *,
    low: int = 0,
    high: int = 1,
    training: bool = True,
    block: int = 0,
    cut: Mapping[int, int] = MappingProxyType({}),
) -> Tensor:
    """Random numbers of the shape and type of ``like``: ``normal``, ``uniform`` from 0 to 1, or ``integers``.

    ``block``: as of ``dropout``; ``cut``: dim -> which part of it this is. Integers are from ``low`` to ``high``,
    which is left out.

    Raises:
        RuntimeError: where the module draws in training alone, and the model is in evaluation.
    """
    if steady[0]:
        return _steady_noise(like, kind, low, high, cut)
    if not training:
        raise RuntimeError(
            "drawn-in-training: the module draws random numbers while it trains, and may not in evaluation. Plan it in "
            "evaluation (model.eval(), then pdv optimize --mode infer), and load the weights there."
        )
    if kind == "integers":
        return _drawn_for(like, partial(torch.randint, low, high), block, dtype=like.dtype)
    return _drawn_for(like, torch.randn if kind == "normal" else torch.rand, block, dtype=like.dtype)


def _steady_noise(like: Tensor, kind: str, low: int, high: int, cut: Mapping[int, int]) -> Tensor:
    found = torch.full(like.shape, _FIRST, dtype=torch.float64, device=like.device)
    for dim, size in list(enumerate(like.shape))[1:]:
        along = torch.arange(size, dtype=torch.float64, device=like.device) + cut.get(dim, 0) * size
        found = found + _STEPS[dim % len(_STEPS)] * along.view(-1, *[1] * (like.dim() - dim - 1))
    found = found % 1
    if kind == "integers":
        found = low + (found * min(high - low, 2)).floor()
    elif kind == "normal":
        found = (found / (1 - found)).log()
    return found.to(like.dtype)


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, block: int, *, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Attention of a block of queries: query i of the whole sequence sees keys 0 to i, as far as ``mask`` allows.

    q: [..., s/n, e], k: [..., t, e], v: [..., t, f], mask: bool or additive, broadcast to [..., s/n, t]
    """
    rows = block * q.size(-2) + torch.arange(q.size(-2), device=q.device)
    seen = torch.arange(k.size(-2), device=q.device) <= rows.unsqueeze(1)
    if mask is not None:
        seen = mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, float("-inf"))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)


def channel_mean(x: Tensor, shares: int) -> Tensor:
    """Mean of each channel, or this rank's term of it where points are cut into ``shares``: [n, c, ...] -> [c]."""
    return x.mean((0, *range(2, x.dim()))) / shares


def channel_variance(x: Tensor, mean: Tensor, shares: int) -> Tensor:
    """Mean squared distance of each channel from its mean, or this rank's term of it: [n, c, ...], [c] -> [c].

    It does not change with ``mean`` where that is the mean, so no gradient flows there: computed, it would be rounding.
    """
    return channel_mean((x - per_channel(mean.detach(), x)).square(), shares)


def batch_norm(x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias, each a vector of channels; x: [n, c, ...]."""
    factor = (variance + eps).rsqrt() * weight
    return (x - per_channel(mean, x)) * per_channel(factor, x) + per_channel(bias, x)


def per_channel(vector: Tensor, x: Tensor) -> Tensor:
    """[c] -> [c, 1, ...], to be broadcast to x: [n, c, ...]."""
    return vector.view(-1, *(1,) * (x.dim() - 2))


def fused_batch_norm(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor,
    bias: Tensor,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """torch's batch norm, right in backward for all strides: [n, c, ...] -> same.

    On CPUs torch 2.13 misreads gradients of [n, c, h, w] whose strides suit two layouts, for a size besides c is one.
    """
    points = x.flatten(2) if x.dim() > 3 and 1 in (x.size(0), *x.shape[2:]) else x
    y = F.batch_norm(points, mean, variance, weight, bias, training, momentum, eps)
    return y.reshape(x.shape)


def batch_norm_of_all(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Batch norm by the statistics of this rank's points, which are all; those too: [n, c, ...] -> same, [c], [c]."""
    mean, variance = torch.zeros_like(weight, requires_grad=False), torch.zeros_like(weight, requires_grad=False)
    y = fused_batch_norm(x, mean, variance, weight, bias, training=True, momentum=1.0, eps=eps)
    points = x.numel() // x.size(1)
    return y, mean, variance * ((points - 1) / points)


def top_k(x: Tensor, k: int) -> Tensor:
    """Each row with all but its ``k`` largest elements zero: [..., d] -> [..., d]."""
    values, chosen = x.topk(k, -1)
    return torch.zeros_like(x).scatter(-1, chosen, values)


def overwrite(buffer: Tensor, value: Tensor) -> None:
    """Set a buffer that is no part of the function: running statistics."""
    with torch.no_grad():
        buffer.copy_(value)


def restoring(module: nn.Module) -> Callable[[], tuple[AbstractContextManager[None], AbstractContextManager[None]]]:
    """Of a checkpoint: forward draws the same masks again, and finds the buffers of ``module`` again as they were.

    Both are left as they are then.
    """

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _Restored(tuple(module.buffers()))

    return contexts


class _Restored(AbstractContextManager[None]):
    """Buffers as they are now, and the masks drawn next, each time it is entered; what was then comes back."""

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self._buffers = buffers
        self._first = self._now = self._state()

    def __enter__(self) -> None:
        self._now = self._state()
        self._set(self._first)

    def __exit__(self, *_: object) -> None:
        self._set(self._now)

    def _state(self) -> tuple[list[Tensor], int]:
        return [buffer.clone() for buffer in self._buffers], _drawn[0]

    def _set(self, state: tuple[list[Tensor], int]) -> None:
        values, _drawn[0] = state
        for buffer, value in zip(self._buffers, values, strict=True):
            buffer.data.copy_(value)  # no new version: who saved one for backward finds it as it was

"""Text from emitted decoders: the most likely token each time, or one drawn. Entry point: ``generate``.

Of packages for inference keys and values of earlier positions are kept (``decoding.py``); of others each token costs a
forward pass over all positions, prompt and rest: enough to look at samples while a model trains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ir.errors import UsageError
from pdv.loops.decoding import Decoder, decoder_of
from pdv.loops.evaluate import evaluate, evaluate_call, rows_of_a_call
from pdv.loops.pieces import share
from pdv.loops.rows import bounds_of, shapes_of

SEES_AHEAD = 1e-3
"""Of logits' range: by how much they may change with tokens behind them, which is rounding."""
FEW = 4
"""So many positions are told one by one, and at once, before those of a text are told one by one."""


@torch.no_grad()
def generate(
    model: Any,  # Any: an emitted model
    prompts: Tensor | Sequence[Tensor],
    max_new_tokens: int,
    *,
    sample: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos: int | None = None,
    pad: int | None = None,
    generator: torch.Generator | None = None,
    cache: bool = True,
) -> Tensor:
    """[rows, prompt + new]: the prompts and what follows, as transformers' ``generate`` without beams.

    prompts: [rows, s], or rows of several lengths; all ranks pass them all, and get all. sample: draw by the
    probabilities, of the ``top_k`` likeliest and of those that together have ``top_p``; rank 0 draws. eos: the token
    that ends a row; behind it stands ``pad`` (default: ``eos``), as behind rows that began shorter. cache: False does
    not keep keys and values where it could.

    Raises:
        UsageError: if the program takes other inputs, has no room, gives no logits, or sees what is ahead.
    """
    rows = [row.reshape(-1) for row in prompts]
    _check(rows, max_new_tokens, temperature, top_k, top_p)
    lengths = torch.tensor([len(row) for row in rows])
    wanted = int(lengths.max()) + max_new_tokens
    total = _positions(model, wanted)
    ids = torch.zeros(len(rows), total, dtype=torch.int64, device=model.mesh.device)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = row
    draw = partial(_choose, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
    training = model.training
    model.eval()
    try:
        ends = _extend(_Passes(model, cache=cache), ids, lengths, max_new_tokens, draw if sample else _likeliest, eos)
    finally:
        model.train(training)
    behind = torch.arange(total) >= ends[:, None]
    rest = pad if pad is not None else eos or 0
    return ids.masked_fill(behind.to(ids.device), rest)[:, : int(ends.max())]


def _extend(
    passes: _Passes, ids: Tensor, ends: Tensor, count: int, choose: Callable[[Tensor], Tensor], eos: int | None
) -> Tensor:
    """Write what follows into ``ids``; where each row ends then."""
    ends, more = ends.clone(), torch.ones(len(ids), dtype=torch.bool)
    for step in range(count):
        logits = passes.logits(ids, ends, more) if step else passes.first_logits(ids, ends)
        chosen = _of_first(choose(logits).to(ids.device)).cpu()
        at = more.nonzero().flatten()
        ids[at, ends[at]] = chosen[at].to(ids.device)
        ends[at] += 1
        if eos is not None:
            more &= chosen != eos
        if not more.any():
            break
    return ends


class _Passes:
    """Forward passes of one text: over all positions, or behind the first over those that are new."""

    def __init__(self, model: Any, *, cache: bool) -> None:  # Any: an emitted model
        self._model, self._decoder = model, decoder_of(model) if cache else None

    def first_logits(self, ids: Tensor, ends: Tensor) -> Tensor:
        """[rows, vocabulary], float32: of what follows each row's last token.

        Raises:
            UsageError: if these change with what stands behind.
        """
        others = _with_others_behind(ids, ends)
        wanted, few = _logits(self._model, others, ends, FEW)
        if self._decoder is not None and len(ids) <= (rows_of_a_call(self._model) or len(ids)):
            one_by_one = [self._run(self._decoder, others, place, 1) for place in range(few.size(1))]
            self._decoder.moment.forget()
            total, longest = ids.size(1), int(ends.max())
            self._run(self._decoder, ids, 0, next(size for size in range(longest, total + 1) if total % size == 0))
            found = self.logits(ids, ends, torch.ones(len(ids), dtype=torch.bool))
            if all(share(_are_near(found, wanted) and _are_near(torch.cat(one_by_one, 1), few))):
                return found
        self._decoder = None  # the program was edited, say, or is no decoder
        logits, _ = _logits(self._model, ids, ends)
        if not _are_near(logits, wanted):
            raise UsageError("text from a program whose logits change with what stands behind", "A decoder", "Take one")
        return logits

    def logits(self, ids: Tensor, ends: Tensor, more: Tensor) -> Tensor:
        """The same behind the first; of those that are over (not ``more``) anything."""
        if self._decoder is None:
            return _logits(self._model, ids, ends)[0]
        found: Tensor | None = None
        for place in sorted({*(ends[more] - 1).tolist()}):
            part = self._run(self._decoder, ids, place, 1)[:, 0].float().cpu()
            found = part if found is None else torch.where((ends - 1 == place)[:, None], part, found)
        assert found is not None, "asked while a row goes on"
        return found

    def _run(self, decoder: Decoder, ids: Tensor, start: int, count: int) -> Tensor:
        """[rows, count, vocabulary]: positions from ``start`` on."""
        decoder.moment.move(start, count, ids.size(1))
        size = rows_of_a_call(self._model) or len(ids)
        found: Tensor = evaluate_call(decoder.module, [ids], None, None, size, lambda x: x)[1]
        return found


def _are_near(found: Tensor, logits: Tensor) -> bool:
    return bool((found - logits).abs().max() <= SEES_AHEAD * (logits.amax() - logits.amin()))


def _likeliest(logits: Tensor) -> Tensor:
    return logits.argmax(-1)


def _check(rows: Sequence[Tensor], new: int, temperature: float, top_k: int | None, top_p: float | None) -> None:
    mend = "Mend the call"
    if not rows or any(not len(row) or row.is_floating_point() for row in rows):
        raise UsageError("a prompt without tokens", "Rows of one id or more", mend)
    if new < 1 or temperature <= 0 or (top_k is not None and top_k < 1) or not 0 < (1 if top_p is None else top_p) <= 1:
        said = f"max_new_tokens={new}, temperature={temperature}, top_k={top_k}, top_p={top_p}"
        raise UsageError(said, "New tokens, temperature and top_k above 0, top_p above 0 and at most 1", mend)


def _positions(model: Any, wanted: int) -> int:
    """How many positions each pass has."""
    shapes = shapes_of(model)
    sizes = next(iter(shapes.values()), ())
    if len(shapes) != 1 or len(sizes) != 2:
        what = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise UsageError(f"text from a program that takes {what}", "One input, of ids: [rows, positions]", "Export so")
    size = sizes[1]
    ways, most = (1, size) if isinstance(size, int) else bounds_of(model, size)
    total = size if isinstance(size, int) else -(-wanted // ways) * ways
    if wanted > total or (most is not None and total > most):
        raise UsageError(
            f"prompt and new tokens are {wanted}",
            f"Up to {most}, for which the program was written",
            "Ask for fewer, or plan the model at more positions",
        )
    return total


def _logits(model: Any, ids: Tensor, ends: Tensor, few: int = 0) -> tuple[Tensor, Tensor]:
    """[rows, vocabulary], float32: of what follows each row's last token; and [rows, few, vocabulary], of the first."""
    first, last = int(ends.min()) - 1, int(ends.max())
    kept = (slice(None, few), slice(first, last))
    _, output = evaluate(
        model, [ids], keep=lambda x: torch.cat([x[:, part] for part in kept], 1) if x.dim() == 3 else x
    )
    logits = output[0] if isinstance(output, tuple) else output
    if logits.dim() != 3 or not logits.is_floating_point():
        raise UsageError(f"text from outputs of shape {list(logits.shape)}", "Logits first: [b, s, v]", "Export so")
    few = logits.size(1) - (last - first)  # there may be fewer
    found: Tensor = logits[torch.arange(len(ids)), (ends - 1 - first + few).to(logits.device)].float().cpu()
    return found, logits[:, :few]


def _with_others_behind(ids: Tensor, ends: Tensor) -> Tensor:
    """Ids that change nothing for a decoder."""
    behind = torch.arange(ids.size(1), device=ids.device) >= ends[:, None].to(ids.device)
    return ids.masked_fill(behind, 1)


def _choose(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None
) -> Tensor:
    """One token of each row, by its probability."""
    logits = logits / temperature
    if top_k is not None:
        least = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if top_p is not None and top_p < 1:  # nucleus sampling (Holtzman et al., ICLR'20)
        ordered, places = logits.sort()
        rare = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
        rare[:, -1] = False
        logits = logits.masked_fill(rare.scatter(1, places, rare), float("-inf"))
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).flatten()


def _of_first(chosen: Tensor) -> Tensor:
    """What rank 0 chose: ranks whose logits differ in a bit go on with one text."""
    if dist.is_initialized():
        dist.broadcast(chosen, src=0)
    return chosen
